"""Where the Ascend toolchain lives, how it gets there, and who may import it.

triton-ascend installs the import package `triton`, as the triton that torch requires does. Both in one
site-packages overwrite each other, so the toolchain has a directory of its own in the user's cache, named
by a hash of the pins (all clones with the same pins share it). Only a process that needs it puts that
directory first on its path: the worker of `wyfast_lib.ascend.worker`, or, on an NPU host, the process
itself through `activate`.

Environment: WYFAST_CACHE (the cache's root; default $XDG_CACHE_HOME/wyfast, ~/.cache/wyfast), and
WYFAST_ASCEND_TOOLCHAIN (a ready directory, used as it is).
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from wyfast_lib.ascend.errors import ToolchainMissing

INSTALL_COMMAND = "python -m wyfast_lib ascend install"
MARKER = ".complete"
DISK_BYTES = 1 << 30  # what the installed directory takes, rounded up: 0.94 GB


def cache_root() -> Path:
    """Directory of everything that wyfast keeps between sessions; not created here.

    For a user without a home directory it is in the directory of temporary files.
    """
    if explicit := os.environ.get("WYFAST_CACHE"):
        return Path(explicit).expanduser().absolute()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser().absolute() / "wyfast"
    try:
        return Path.home().absolute() / ".cache" / "wyfast"
    except RuntimeError:  # HOME is not set and the user has no entry to look it up in
        return Path(tempfile.gettempdir()) / f"wyfast-{os.getuid()}"


def keep(path: Path, data: bytes) -> bool:
    """Write a cache entry, whole or not at all. Where the cache cannot be written, say so once and go on."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        partial.replace(path)
        return True
    except OSError as problem:
        with contextlib.suppress(OSError):
            partial.unlink()
        _say_once(f"{cache_root()} cannot be written ({problem.strerror}): going on without a cache")
        return False


@functools.cache
def _say_once(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=4)


def requirements_file() -> Path:
    """The one list of the toolchain's exact pins: package data beside this module."""
    return Path(__file__).with_name("requirements-ascend.txt")


def pins() -> tuple[str, ...]:
    """The pins, `name==version` each, in the order of the file."""
    text = requirements_file().read_text(encoding="utf-8")
    lines = (line.split("#", 1)[0].strip() for line in text.splitlines())
    return tuple(line for line in lines if line)


def versions() -> str:
    """One short hash of the pins and of the Python that their wheels are for; a part of every cache key."""
    text = "\n".join((*pins(), f"cp{sys.version_info[0]}{sys.version_info[1]}", platform.machine()))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


#: What of the toolchain decides a result: its compilers, their libraries, and triton's own Python code.
_DECIDING = ("triton/**/*.py", "triton/**/*.so", "triton/backends/ascend/triton-adapter-opt*",
             "ascendnpuir/bin/*", "ascendnpuir/lib/*", "triton_ascend-*.dist-info/RECORD",
             "ascendnpu_ir-*.dist-info/RECORD")  # fmt: skip


def fingerprint() -> str:
    """Hash of size and time of every file that decides a result: a patched toolchain is another one."""
    path = directory()
    lines = []
    for name in _deciding(str(path)):
        try:
            stat = os.stat(name)
        except OSError:
            continue
        lines.append(f"{name[len(str(path)):]} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@functools.cache
def _deciding(path: str) -> tuple[str, ...]:
    root = Path(path)
    return tuple(sorted({str(p) for pattern in _DECIDING for p in root.glob(pattern) if p.is_file()}))


def options() -> tuple[str, ...]:
    """Names of triton-ascend's compile options, read from its source without importing it."""
    source = locate() / "triton/backends/ascend/compiler.py"
    return _options(str(source), source.stat().st_mtime_ns)


@functools.cache
def _options(source: str, mtime: int) -> tuple[str, ...]:
    tree = ast.parse(Path(source).read_text(encoding="utf-8"))
    (found,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "NPUOptions")
    return tuple(n.target.id for n in found.body if isinstance(n, ast.AnnAssign))


def directory() -> Path:
    """Where the toolchain is or will be."""
    if explicit := os.environ.get("WYFAST_ASCEND_TOOLCHAIN"):
        return Path(explicit).expanduser().absolute()
    return cache_root() / f"ascend-{versions()}"


def platform_problem() -> str | None:
    """Why the toolchain cannot run on this machine, or None: Linux on x86-64 or aarch64, CPython 3.9 to
    3.11.
    """
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return (
            f"the Ascend toolchain has wheels for Linux on x86-64 and aarch64 only; "
            f"this is {sys.platform} on {platform.machine()}"
        )
    if sys.implementation.name != "cpython" or not (3, 9) <= sys.version_info[:2] <= (3, 11):
        return (
            "the Ascend toolchain (triton-ascend) has wheels for CPython 3.9 to 3.11 only; this is "
            f"{platform.python_implementation()} {platform.python_version()}. Make a Python 3.11 "
            "environment, as environment.yml does"
        )
    return None


def _problem(path: Path) -> str | None:
    """What is missing in `path` for it to be the toolchain of these pins, or None."""
    needed = ("triton/backends/ascend/triton-adapter-opt", "ascendnpuir/bin/bishengir-compile")
    for part in needed:
        if not (path / part).exists():
            return f"{path} has no {part}"
    for pin in pins():
        name, _, version = pin.partition("==")
        if not (path / f"{name.replace('-', '_')}-{version}.dist-info").is_dir():
            return f"{path} has not {pin}"
    return None


def locate() -> Path:
    """The installed toolchain's directory; raises ToolchainMissing, naming the install command, when
    there is none.
    """
    if reason := platform_problem():
        raise ToolchainMissing(reason)
    path = directory()
    if os.environ.get("WYFAST_ASCEND_TOOLCHAIN"):
        if reason := _problem(path):
            raise ToolchainMissing(f"WYFAST_ASCEND_TOOLCHAIN: {reason}; unset it and run `{INSTALL_COMMAND}`")
    elif not (path / MARKER).is_file():
        raise ToolchainMissing(f"the Ascend toolchain is not installed ({path}): run `{INSTALL_COMMAND}`")
    return path


def available() -> tuple[bool, str]:
    """(True, directory) or (False, why not and what to do); cheap, never raises."""
    try:
        return True, str(locate())
    except (ToolchainMissing, OSError) as problem:
        return False, str(problem)


def install(report=print) -> Path:
    """Install the pinned toolchain (about 0.95 GB on disk), or find it installed; returns its directory.

    Two installers at once: the second waits. Interrupted: the next run starts from a clean directory, with
    the wheels that pip has already downloaded taken from pip's cache. `report(str)` gets each step. Raises
    ToolchainMissing.
    """
    if os.environ.get("WYFAST_ASCEND_TOOLCHAIN"):
        path = locate()
        report(f"Ascend toolchain: {path} (from WYFAST_ASCEND_TOOLCHAIN)")
        return path
    if reason := platform_problem():
        raise ToolchainMissing(reason)
    from filelock import FileLock, Timeout

    path = directory()
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{path}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("another process is installing the Ascend toolchain: waiting for it")
        lock.acquire()
    try:
        if not (path / MARKER).is_file():
            _install_into(path, report)
    finally:
        lock.release()
    report(f"Ascend toolchain: {path}")
    return path


def _install_into(path: Path, report) -> None:
    """Install beside `path` and rename, so that `path` never holds half a toolchain. The caller holds
    the lock.
    """
    free = shutil.disk_usage(path.parent).free
    if free < 2 * DISK_BYTES:
        raise ToolchainMissing(
            f"the Ascend toolchain needs 2 GB for a moment; {path.parent} has {free >> 20} MB free"
        )
    staging = path.with_name(path.name + ".partial")
    shutil.rmtree(staging, ignore_errors=True)
    report(f"installing {', '.join(pins())} into {path} (about 0.95 GB)")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
        "--target",
        str(staging),
        "-r",
        str(requirements_file()),
    ]
    with tempfile.TemporaryDirectory(
        prefix="pip-", dir=path.parent
    ) as scratch:  # same disk: pip's moves are free
        result = subprocess.run(command, env={**os.environ, "TMPDIR": scratch})
    if result.returncode != 0:
        raise ToolchainMissing(
            f"pip ended with status {result.returncode}; its output above says why. "
            f"Run `{INSTALL_COMMAND}` again: what is downloaded already is kept"
        )
    if reason := _problem(staging):
        raise ToolchainMissing(f"pip succeeded, but {reason}")
    (staging / MARKER).write_text("\n".join(pins()) + "\n", encoding="utf-8")
    shutil.rmtree(path, ignore_errors=True)
    staging.rename(path)


def activate() -> Path:
    """On an NPU host: put the toolchain first on this process's own import path, before triton is imported.

    Returns the directory. Raises RuntimeError when another triton has been imported already (one process
    can hold one only), ToolchainMissing when there is none. Written for hosts with CANN; not tested on
    hardware.
    """
    path = locate()
    loaded = sys.modules.get("triton")
    if loaded is not None:
        if Path(loaded.__file__).resolve().is_relative_to(path.resolve()):
            return path
        raise RuntimeError(
            f"triton {getattr(loaded, '__version__', '?')} is imported already from {loaded.__file__}: "
            "call wyfast_lib.ascend.toolchain.activate() before anything imports triton"
        )
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))
    return path
