"""What runs inside the worker process: import a kernel under the Ascend triton, and take it through the
compiler.

Started by `wyfast_lib.ascend.worker` as a script; nothing else imports it. Kernel -> TTIR -> linalg
(triton-ascend) -> HIVM (bishengir-compile). The packages `wyfast_lib` and `wyfast_lib.ascend` are set up
without running their __init__, which imports torch (2 s): a kernel needs triton only, and one that asks for
more gets the real package.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import importlib
import importlib.abc
import importlib.util
import os
import pickle
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import traceback
import types
from pathlib import Path

LIBRARY = Path(__file__).resolve().parents[1]
ALIAS = "wyfast_kernels_"  # of a module that is imported by its file


def bare_package(name: str, folder: Path) -> None:
    """Register a package that runs its own __init__ only when somebody asks for a name that is not a
    submodule.
    """
    module = types.ModuleType(name)
    module.__path__ = [str(folder)]
    module.__file__ = str(folder / "__init__.py")

    def on_demand(attribute: str):
        if attribute.startswith("__") or importlib.util.find_spec(f"{name}.{attribute}") is not None:
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        if module.__dict__.pop("__getattr__", None) is not None:
            source = Path(module.__file__).read_text(encoding="utf-8")
            exec(compile(source, module.__file__, "exec"), module.__dict__)
        return getattr(module, attribute)

    module.__getattr__ = on_demand
    sys.modules[name] = module


if __name__ == "__main__":
    del sys.path[0]  # this script's own folder: its module names must not shadow anybody's
    bare_package("wyfast_lib", LIBRARY)
    bare_package("wyfast_lib.ascend", LIBRARY / "ascend")

# Only now are the packages there.
from wyfast_lib.ascend.errors import last_lines  # noqa: E402
from wyfast_lib.ascend.programs import Failure, again_after_a_crash, run_program  # noqa: E402

# ---- the kernel's module ----


def load_kernel(module: str, file: str, name: str):
    """The @triton.jit function `name` of a module, imported under the Ascend triton (and jitted if it
    was plain).
    """
    import triton

    try:
        found = getattr(_import(module, file), name)
    except Failure:
        raise
    except Exception:
        raise Failure(
            "kernel", f"{file} does not import under triton-ascend:\n{last_lines(traceback.format_exc())}"
        ) from None
    while not isinstance(found, triton.runtime.JITFunction):
        if isinstance(found, types.FunctionType):
            found = triton.jit(found)
            break
        if not hasattr(found, "fn"):
            raise Failure(
                "kernel", f"{name} in {file} is a {type(found).__name__}, not a @triton.jit function"
            )
        found = found.fn
    return found


def _origin(function) -> tuple[str, int] | None:
    """File and line of the `def` that a function of `session.py` was written from: its file's last line."""
    file = function.fn.__code__.co_filename
    if not Path(file).name.startswith("kernel_"):
        return None
    found = re.search(r"\n# (.+):(\d+)\n\Z", Path(file).read_text(encoding="utf-8"))
    return (found[1], int(found[2])) if found else None


def locate_in_their_own_files() -> None:
    """Have Triton take locations from the file that a kernel was written from, not the one written for it."""
    from triton.compiler import code_generator

    written = code_generator.get_jit_fn_file_line

    def place(function):
        while not hasattr(function, "arg_names"):
            function = function.fn
        return _origin(function) or written(function)

    code_generator.get_jit_fn_file_line = place


def _import(module: str, file: str) -> types.ModuleType:
    if module:
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            spec = None
        if spec is not None and spec.origin and os.path.realpath(spec.origin) == os.path.realpath(file):
            return importlib.import_module(module)
    alias = ALIAS + hashlib.sha256(file.encode()).hexdigest()[:16]
    if alias not in sys.modules:
        folder = str(Path(file).parent)
        if folder not in sys.path:
            sys.path.append(folder)  # for helpers beside it
        spec = importlib.util.spec_from_file_location(alias, file)
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[alias] = loaded
        try:
            spec.loader.exec_module(loaded)
        except BaseException:
            del sys.modules[alias]
            raise
    return sys.modules[alias]


class StandInNpu(importlib.abc.MetaPathFinder):
    """Gives torch, when a kernel's module imports it, a `torch.npu` without devices.

    Modules written for the NPU look it up while they are imported; nothing of it is called to compile a
    kernel.
    """

    def find_spec(self, name, path=None, target=None):
        """torch's own spec, with the namespace added behind its import; None for every other module."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                if not hasattr(module, "npu"):
                    module.npu = types.SimpleNamespace(
                        is_available=lambda: False, device_count=lambda: 0, device=contextlib.nullcontext
                    )

            spec.loader.exec_module = exec_module
        return spec


# ---- kernel -> TTIR -> linalg ----


class StandInDriver:
    """Answers what a kernel's module asks while it is imported, without a device; it cannot launch
    anything.
    """

    def __init__(self, target) -> None:
        self.target = target

    def get_current_target(self):
        """The GPUTarget that the compilation is for."""
        return self.target

    def get_benchmarker(self):
        """What @triton.autotune stores when it decorates, and would call at a launch."""
        return self._no_device

    def _no_device(self, *args, **kwargs):
        raise RuntimeError("there is no NPU here: kernels are compiled, not launched")


def to_linalg(request: dict) -> tuple[str, str, int]:
    """(TTIR text, linalg text, crashes on the way) of a kernel for a target."""
    import triton
    from triton._C.libtriton import ir
    from triton.backends.ascend.compiler import AscendBackend, make_ttir, ttir_to_linalg
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource

    _reach("kernel")
    target = GPUTarget("npu", request["target"], 0)
    triton.runtime.driver.set_active(StandInDriver(target))
    locate_in_their_own_files()
    function = load_kernel(request["module"], request["file"], request["name"])
    _reach("ttir")
    backend = AscendBackend(target)
    options = backend.parse_options({"compile_on_910_95": request["arch35"], **request["options"]})
    source = ASTSource(function, request["signature"], request["constexprs"])
    context = ir.context()
    ir.load_dialects(context)
    metadata = {"target": target, **options.__dict__}
    try:
        module = source.make_ir(
            options, backend.get_codegen_implementation(), backend.get_module_map(), context
        )
    except Exception as problem:
        raise Failure(
            "ttir", f"{request['name']} is not accepted by triton-ascend: {type(problem).__name__}: {problem}"
        ) from None
    try:
        module = make_ttir(module, metadata, options)
    except Exception as problem:
        text = f"{request['name']} fails in triton-ascend's own passes: {type(problem).__name__}: {problem}"
        raise Failure("ttir", text) from None
    ttir = re.sub(r'loc\("[^"]*/([^"/]+)"', r'loc("\1"', str(module))  # a file's name, not where it lies
    _reach("linalg")
    try:
        linalg, crashes = again_after_a_crash(
            lambda: ttir_to_linalg(module, metadata, options, named_ops=True)
        )
        return ttir, linalg, crashes
    except subprocess.CalledProcessError as problem:
        output = problem.stderr.decode(errors="replace") if problem.stderr else ""
        raise Failure(
            "linalg",
            f"{request['name']} fails in triton-adapter-opt (status {problem.returncode}):\n"
            f"{last_lines(output)}",
            ttir,
        ) from None


# ---- linalg -> HIVM ----


def to_hivm(request: dict, linalg: str) -> tuple[str, str, int, int]:
    """(HIVM text or "", everything the compiler printed, its exit status, crashes on the way)."""
    program = Path(request["toolchain"]) / "ascendnpuir/bin" / request["compiler"]
    text = re.sub(r', mix_mode\s*=\s*"[^"]*"', "", linalg)
    with tempfile.TemporaryDirectory(prefix="wyfast-") as scratch:
        source = Path(scratch) / "kernel.ttadapter.mlir"
        source.write_text(text, encoding="utf-8")
        saved = Path(scratch) / "saved"
        saved.mkdir()
        command = [
            str(program),
            str(source),
            f"--target={request['target']}",
            *flags(request),
            f"--save-temps={saved}",
            "-o",
            str(Path(scratch) / "kernel.o"),
        ]
        environment = _compiler_environment(Path(scratch), request["compiler"])
        done, crashes = run_program(command, cwd=scratch, env=environment, stdin=subprocess.DEVNULL)
        written = saved / "module.hivm.opt.mlir"
        hivm = written.read_text(encoding="utf-8") if written.is_file() else ""
        log = (done.stdout + done.stderr).replace(scratch + os.sep, "")
        return hivm, log, done.returncode, crashes


def _compiler_environment(scratch: Path, compiler: str) -> dict[str, str]:
    """PATH with a stand-in for `hivmc`, CANN's last code generator, where there is none.

    Without it bishengir-compile takes the missing program for a failure of the kernel; the arch35 one then
    tries again four times with ever fewer optimisations. The stand-in ends the compilation well where the
    public part ends.
    """
    environment = dict(os.environ)
    name = "hivmc-a5" if compiler.endswith("-a5") else "hivmc"
    if shutil.which(name) is None:
        folder = scratch / "stand-in"
        folder.mkdir()
        (folder / name).symlink_to(shutil.which("true"))  # no script: a scratch directory may forbid programs
        environment["PATH"] = f"{folder}{os.pathsep}{environment.get('PATH', '')}"
    return environment


def compile_kernel(request: dict) -> dict:
    """The whole way: {"ttir", "linalg", "hivm", "log", "status", "crashes"}."""
    ttir, linalg, front = to_linalg(request)
    _reach("hivm")
    hivm, log, status, back = to_hivm(request, linalg)
    texts = {"ttir": ttir, "linalg": linalg, "hivm": hivm, "log": log}
    return {**texts, "status": status, "crashes": front + back}


# ---- options ----


def flags(request: dict) -> list[str]:
    """bishengir-compile's flags: the request's, changed as triton-ascend changes its own for the options."""
    given, plain = (_as_triton_ascend(request, options) for options in (request["options"], {}))
    changed = [flag for flag in given if flag not in plain]
    gone = {_flag_name(flag) for flag in plain} - {_flag_name(flag) for flag in given}
    ours = {_flag_name(flag): flag for flag in request["flags"] if _flag_name(flag) not in gone}
    explicit = {_flag_name(flag): flag for flag in request["explicit"]}
    return list((ours | {_flag_name(flag): flag for flag in changed} | explicit).values())


def _flag_name(flag: str) -> str:
    return flag.partition("=")[0]


class _Command(Exception):
    """The command that triton-ascend would run."""


def _as_triton_ascend(request: dict, options: dict) -> list[str]:
    """The flags that triton-ascend itself hands to bishengir-compile for these options: its own code is run
    up to the point where it starts the program.
    """
    from unittest import mock

    from triton.backends.ascend import compiler
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("npu", request["target"], 0)
    parsed = compiler.AscendBackend(target).parse_options({"compile_on_910_95": request["arch35"], **options})
    if parsed.force_simt_only:
        raise Failure("kernel", "options: force_simt_only takes a way through the compiler that is not here")
    last = compiler.linalg_to_bin_enable_npu_compile_A2_A3
    if request["arch35"]:
        last = compiler.linalg_to_bin_enable_npu_compile_910_95

    def stop(command, **_):
        raise _Command(command)

    chip = types.SimpleNamespace(get_arch=lambda: request["target"])
    module = 'module { func.func @kernel() attributes {mix_mode = "mix", parallel_mode = "simd"} { return } }'
    stubs = {
        "_parse_linalg_metadata": lambda linalg, metadata: (linalg, metadata),
        "_get_npucompiler_path": lambda: "bishengir-compile",
        "_check_bishengir_api_change": lambda: True,
        "_check_bishengir_is_regbased": lambda: False,
        "NPUUtils": lambda: chip,
        "subprocess": types.SimpleNamespace(run=stop),
    }
    with mock.patch.multiple(compiler, **{n: f for n, f in stubs.items() if hasattr(compiler, n)}):
        try:
            last(module, {"target": target, **parsed.__dict__}, parsed)
        except _Command as command:
            found = [x for x in command.args[0] if x.startswith("--") and not x.startswith("--target")]
            return found
    raise Failure("kernel", "options: triton-ascend's compiler stage was not understood")


# ---- the loop ----

_progress = None  # where the child that compiles says how far it is
_stage = "kernel"


def _reach(stage: str) -> None:
    """Note the stage that begins, for the report of a failure, or of a death."""
    global _stage
    _stage = stage
    if _progress is not None:
        _send(_progress, {"stage": stage})


def _send(file, message: dict) -> None:
    data = pickle.dumps(message)
    file.write(struct.pack("<Q", len(data)) + data)
    file.flush()


def compile_apart(request: dict) -> dict:
    """`compile_kernel` in a child of this process, which imports the kernel's modules anew and forgets them.

    This process keeps what is the same for every kernel: triton and, once a kernel has asked for it, torch.
    """
    global _progress
    import triton.backends.ascend.compiler  # noqa: F401

    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(receive)
            with os.fdopen(send, "wb") as _progress:
                _adopt(request)
                reply = answer(request, compile_kernel)
                _send(_progress, {"reply": reply, "torch": "torch" in sys.modules})
        finally:
            os._exit(0)
    os.close(send)
    stage, last = "kernel", {}
    with os.fdopen(receive, "rb") as messages:
        while len(header := messages.read(8)) == 8:
            last = pickle.loads(messages.read(struct.unpack("<Q", header)[0]))
            stage = last.get("stage", stage)
    _, status = os.waitpid(child, 0)
    if "reply" not in last:
        return {"died": os.waitstatus_to_exitcode(status), "stage": stage}
    if last["torch"]:
        import torch  # noqa: F401
    return last["reply"]


def _adopt(request: dict) -> None:
    """Take over the caller's import path and environment, less what belongs to this process."""
    for entry in request.pop("path", ()):
        if entry not in sys.path:
            sys.path.append(entry)
    _import_from_source()
    own = {name: os.environ[name] for name in OWN_VARIABLES if name in os.environ}
    given = request.pop("environment", None)
    if given is not None:
        os.environ.clear()
        os.environ.update({n: v for n, v in given.items() if n not in OWN_VARIABLES} | own)


def _import_from_source() -> None:
    """Take no module of the user's from its .pyc: that is stale for a second after an edit."""
    external = importlib._bootstrap_external
    cached = external.cache_from_source

    def cache_from_source(path, *arguments, **settings):
        if not re.search(r"/(site|dist)-packages/|/lib/python3|/triton/", str(path)):
            raise NotImplementedError("compiled anew")  # the importer's own word for a source without a cache
        return cached(path, *arguments, **settings)

    external.cache_from_source = cache_from_source


# Set for this process by its owner, whatever the caller's are.
OWN_VARIABLES = ("PYTHONPATH", "TMPDIR", "TORCH_DEVICE_BACKEND_AUTOLOAD", "TRITON_INTERPRET", "PYTHONUTF8",
                 "PYTHONSAFEPATH", "PYTHONSTARTUP")  # fmt: skip


def answer(request: dict, work) -> dict:
    """work(request), every exception made an error reply."""
    try:
        return work(request)
    except Failure as problem:
        texts = {"ttir": problem.ttir, "linalg": problem.linalg}
        return {"error": {"stage": problem.stage, "message": str(problem), **texts}}
    except Exception:
        return {"error": {"stage": _stage, "message": last_lines(traceback.format_exc(), 20)}}


def handle(request: dict) -> dict:
    """Do one request; every exception becomes an error reply."""
    if request["do"] == "compile":
        return answer(request, compile_apart)
    _reach("native")
    from wyfast_lib.ascend import native

    return answer(request, native.handle)


def main(reply: int, memory: int, directory: str) -> None:
    """Answer requests from stdin on the file descriptor `reply` until stdin closes."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that owns this one; it ends us
    requests = os.fdopen(os.dup(0), "rb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.set_inheritable(reply, False)
    os.set_inheritable(memory, False)
    sys.meta_path.insert(0, StandInNpu())
    if str(LIBRARY.parent) not in sys.path:
        sys.path.append(str(LIBRARY.parent))
    with os.fdopen(reply, "wb") as replies:
        while header := requests.read(8):
            request = pickle.loads(requests.read(struct.unpack("<Q", header)[0]))
            request.update(toolchain=directory, memory=memory)
            data = pickle.dumps(handle(request))
            replies.write(struct.pack("<Q", len(data)) + data)
            replies.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
