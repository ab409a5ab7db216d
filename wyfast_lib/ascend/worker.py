"""The worker process: the only one that imports the Ascend triton, compiles, and runs lowered kernels.

One worker a process of ours, started at the first call and kept. Requests go down its stdin, replies come
up a pipe of their own (both pickled, length first), so that whatever a compiler prints to stdout or stderr
cannot break the protocol: that goes to a log, whose last lines are in the error when the worker dies. After
a death the next call starts anew.
"""

from __future__ import annotations

import atexit
import os
import pickle
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from wyfast_lib.ascend import toolchain
from wyfast_lib.ascend.errors import CompileError, WorkerCrashed

TIMEOUT_S = 600.0
LOG_TAIL_LINES = 12


#: What a request that ends the worker itself was about, as `CompileError.stage` says it.
_STAGE = {"compile": "kernel", "load": "native", "run": "native"}


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


class Worker:
    """One live worker. `call` sends a request and waits; `close` ends it."""

    def __init__(self) -> None:
        self.directory = directory = toolchain.locate()
        self.owner = os.getpid()
        self.log = tempfile.TemporaryFile("a+b")
        self.memory = os.memfd_create("wyfast-tensors")  # the tensors of a run, seen by both processes
        self.scratch = tempfile.TemporaryDirectory(prefix="wyfast-")  # a killed worker cannot tidy up; we do
        reply_read, reply_write = os.pipe()
        script = Path(__file__).with_name("inside.py")
        try:
            self.process = subprocess.Popen(
                [sys.executable, str(script), str(reply_write), str(self.memory), str(directory)],
                stdin=subprocess.PIPE,
                stdout=self.log,
                stderr=self.log,
                pass_fds=(reply_write, self.memory),
                start_new_session=True,  # a group of its own, so that a compiler it runs ends with it
                env={**_environment(directory), "TMPDIR": self.scratch.name},
            )
        finally:
            os.close(reply_write)
        self.reply = reply_read

    def call(self, request: dict, timeout: float, pass_path: bool = True) -> dict:
        """Send one request, return its reply. Raises WorkerCrashed when no reply comes."""
        os.ftruncate(self.log.fileno(), 0)
        if pass_path:
            request = {**request, "path": [p for p in sys.path if p], "environment": dict(os.environ)}
        data = pickle.dumps(request)
        try:
            self.process.stdin.write(struct.pack("<Q", len(data)) + data)
            self.process.stdin.flush()
            deadline = time.monotonic() + timeout
            (length,) = struct.unpack("<Q", self._read(8, deadline))
            return pickle.loads(self._read(length, deadline))
        except (BrokenPipeError, EOFError):
            raise WorkerCrashed(
                f"the Ascend worker {self._end()} while it handled {request['do']!r}{self._tail()}",
                _STAGE[request["do"]],
            ) from None
        except TimeoutError:
            tail = self._tail()
            self.close(kill=True)
            raise WorkerCrashed(
                f"the Ascend worker did not answer {request['do']!r} in {timeout:.0f} s and was ended{tail}",
                _STAGE[request["do"]],
            ) from None

    def _read(self, count: int, deadline: float) -> bytes:
        parts = []
        while count:
            if not select.select([self.reply], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            part = os.read(self.reply, min(count, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _end(self) -> str:
        try:
            code = self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        return _ending(code)

    def _tail(self) -> str:
        self.log.seek(0)
        lines = self.log.read()[-65536:].decode(errors="replace").strip().splitlines()
        own = re.compile(
            r"  File .*(<frozen |ascend/(inside|native)\.py)"
        )  # frames that say nothing of the cause
        lines = [line for line in lines if line.strip() and not own.match(line)][-LOG_TAIL_LINES:]
        return ":\n" + "\n".join(lines) if lines else ""

    def close(self, kill: bool = False) -> None:
        """End the worker: it leaves when its stdin closes; at once with `kill`. Safe to call twice."""
        if self.owner != os.getpid():  # a fork's copy: the process belongs to the parent
            return
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self.process.wait(timeout=0 if kill else 2)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self.reply is not None:
            os.close(self.reply)
            os.close(self.memory)
            self.log.close()
            self.scratch.cleanup()
            self.reply = None


def _environment(directory: Path) -> dict[str, str]:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(directory), environment.get("PYTHONPATH"))))
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    environment["PYTHONUTF8"] = "1"  # kernels and compilers' texts are UTF-8, whatever the locale
    for name in ("TRITON_INTERPRET", "PYTHONSAFEPATH", "PYTHONSTARTUP"):
        environment.pop(name, None)
    return environment


lock = threading.RLock()
_worker: Worker | None = None


def current() -> Worker:
    """The live worker of this process; starts one when there is none. Hold `lock` while using it."""
    global _worker
    if _worker is not None and _worker.owner != os.getpid():
        _worker = None
    if _worker is not None and (
        _worker.process.poll() is not None or _worker.directory != toolchain.directory()
    ):
        close()  # it died while idle, or another toolchain was chosen
    if _worker is None:
        _worker = Worker()
    return _worker


def call(do: str, timeout: float = TIMEOUT_S, **payload) -> dict:
    """Have the worker do something; returns its reply. Starts a worker when there is none.

    Every compilation imports its kernel's modules anew. Raises CompileError with what the worker reported, or
    WorkerCrashed.
    """
    global _worker
    with lock:
        current()
        try:
            reply = _worker.call({"do": do, **payload}, timeout)
        except WorkerCrashed:
            close()
            raise
        except BaseException:  # interrupted half-way: the pipe holds half a message
            _worker.close(kill=True)
            _worker = None
            raise
        if "died" in reply:  # the child that compiled; the worker itself goes on
            text = f"the Ascend worker {_ending(reply['died'])} while it handled {do!r}{_worker._tail()}"
            raise WorkerCrashed(text, reply["stage"])
        if error := reply.get("error"):
            diagnostics = _worker._tail() if error["stage"] in ("ttir", "native") else ""  # MLIR prints them
            texts = error.get("ttir", ""), error.get("linalg", "")
            raise CompileError(error["message"] + diagnostics, error["stage"], *texts)
    return reply


def close() -> None:
    """End the worker, if there is one. The next call starts a new one."""
    global _worker
    with lock:
        if _worker is not None:
            _worker.close()
            _worker = None


atexit.register(close)
