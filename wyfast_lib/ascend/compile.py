"""`compile_kernel`: a Triton kernel through the real Ascend compiler, on a machine without an NPU.

What passes here has passed tiling, the cube / vector split, memory planning and synchronisation; only the
last code generator (CANN's hivmc) is missing. Results are cached on disk, keyed on all that they depend on:
the kernel's source with its globals, what it imports and the environment that is read on the way, the
constants, the target, options and flags, the toolchain's versions and files. A cached call does not start the
worker.
"""

from __future__ import annotations

import difflib
import functools
import gzip
import hashlib
import json
import os
import re
import signal
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from wyfast_lib.ascend import sources, toolchain, worker
from wyfast_lib.ascend.errors import CompileError, MemoryOverflowError, UBOverflowError, last_lines

#: Target -> (compiler program, whether it is arch35: Ascend 950).
TARGETS = {"Ascend910B2": ("bishengir-compile", False), "Ascend950PR_9589": ("bishengir-compile-a5", True)}

#: Those triton-ascend itself passes, and one thread: multi-threaded runs of the compiler crashed now and
#: then.
FLAGS = (
    "--enable-auto-multi-buffer=True",
    "--enable-auto-bind-sub-block=True",
    "--enable-hfusion-compile=true",
    "--enable-hivm-compile=true",
    "--enable-triton-kernel-compile=true",
    "--mlir-disable-threading",
)


@dataclass(frozen=True)
class Compiled:
    """A kernel that passed the Ascend compiler for one target and one set of constants.

    `ttir`, `linalg`, `hivm`: the texts after each stage. `mix_mode`: "aiv" (vector only) or "mix" (cube and
    vector). `notes`: what the compiler said worth reading; `retries` counts those that say it tried again
    with fewer optimisations, each a warning. `crashes`: runs of the compilers that a signal ended before this
    result; they say nothing of the kernel (see `programs.py`). Peaks and `workspace_bytes` (global memory
    between cube and vector, a program; None when the compiler does not say) are in bytes. `arguments`: names
    of the run-time parameters, in order.
    """

    kernel: str
    target: str
    signature: dict[str, str]
    constexprs: dict
    ttir: str = field(repr=False)
    linalg: str = field(repr=False)
    hivm: str = field(repr=False)
    mix_mode: str = ""
    notes: list[str] = field(default_factory=list)
    retries: int = 0
    crashes: int = 0
    ub_peak: int = 0
    l1_peak: int = 0
    l0a_peak: int = 0
    l0b_peak: int = 0
    l0c_peak: int = 0
    workspace_bytes: int | None = None
    from_cache: bool = False

    @property
    def warnings(self) -> list[str]:
        """The notes that say the compiler gave up an optimisation to make the kernel fit; [] is good."""
        return [note for note in self.notes if "[NOTE]" in note or "revert" in note]

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the parameters that are passed at run time, in order."""
        return tuple(name for name, kind in self.signature.items() if kind != "constexpr")


def compile_kernel(
    kernel,
    signature: dict[str, str],
    constexprs: dict,
    target: str = "Ascend910B2",
    *,
    options: dict | None = None,
    flags: tuple[str, ...] = (),
    cache: bool = True,
) -> Compiled:
    """Compile a Triton kernel for an Ascend target.

    kernel: a @triton.jit function (of any triton), or the text "module:kernel" or "file.py:kernel".
    signature: a type for each parameter, such as {"x": "*bf16", "T": "i32", "BT": "constexpr"}; constants
    need not be repeated in it. constexprs: their values; None for an optional pointer. target: a key of
    TARGETS. options: triton-ascend's own (fields of its NPUOptions), which take effect as it lets them, in
    its front end or as flags of bishengir-compile; flags: more of bishengir-compile, or others in place of
    FLAGS and of what the options say. Raises ToolchainMissing, UBOverflowError (MemoryOverflowError for the
    other local memories), WorkerCrashed, or CompileError with the compiler's last lines; ValueError for a bad
    target, signature or option.
    """
    if target not in TARGETS:
        raise ValueError(f"target: expected one of {', '.join(TARGETS)}, got {target!r}")
    options = dict(options or {})
    _check_options(options)
    source = sources.find(kernel)
    signature = complete_signature(source, signature, constexprs)
    compiler, arch35 = TARGETS[target]
    request = {
        "module": source.module,
        "file": source.file,
        "name": source.name,
        "signature": signature,
        "constexprs": {name: constexprs[name] for name in signature if name in constexprs},
        "target": target,
        "compiler": compiler,
        "arch35": arch35,
        "options": options,
        "flags": FLAGS,
        "explicit": tuple(flags),
    }
    path = _cache_path(source, request)
    reply = _read(path) if cache else None
    if reply is not None:
        return _finish(request, reply, from_cache=True)
    reply = worker.call("compile", **request)
    if cache and (reply["hivm"] or _overflow(reply["log"])):
        _write(path, reply)
    return _finish(request, reply, from_cache=False)


def complete_signature(source: sources.KernelSource, signature: dict, constexprs: dict) -> dict[str, str]:
    """The signature in the kernel's own order, with every constant marked; ValueError names what is
    missing or extra.
    """
    for name in (*signature, *constexprs):
        if name not in source.parameters:
            raise ValueError(
                f"signature: {source.name} has no parameter {name}; it has {', '.join(source.parameters)}"
            )
    full = {}
    for name in source.parameters:
        if name in constexprs:
            if signature.get(name, "constexpr") != "constexpr":
                raise ValueError(f"signature: {name} is {signature[name]!r} and has a constant value too")
            full[name] = "constexpr"
        elif name not in signature:
            raise ValueError(f"signature: the type of {name} is missing (of {', '.join(source.parameters)})")
        elif signature[name] == "constexpr":
            raise ValueError(f"constexprs: the value of {name} is missing")
        else:
            full[name] = signature[name]
    return full


def _check_options(options: dict) -> None:
    """ValueError for an option that triton-ascend does not have: it would pass over it in silence."""
    known = toolchain.options()
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            names = ", ".join(known)
            raise ValueError(f"options: triton-ascend has no option {name!r}; {hint}it has {names}")
        if name == "compile_on_910_95":
            raise ValueError("options: compile_on_910_95 follows from the target")


# ---- from the compiler's texts to a result ----


def _overflow(log: str) -> re.Match | None:
    return re.search(r"(\w+) overflow, requires (\d+) bits while (\d+) bits available", log)


def _notes(log: str) -> list[str]:
    """The lines worth reading: notes, warnings and reverted optimisations; not the missing hivmc."""
    lines = []
    for line in log.splitlines():
        line = re.sub(r'loc\("[^"]*":\d+:\d+\): ', "", line).strip()
        if "hivmc" in line or not re.search(r"\[NOTE\]|\[WARNING\]|\[hivm-|\bwarning:", line):
            continue
        if line not in lines:
            lines.append(line)
    return lines


def _finish(request: dict, reply: dict, from_cache: bool) -> Compiled:
    """The result of a reply, or its error."""
    name, log, hivm = request["name"], reply["log"], reply["hivm"]
    notes = _notes(log)
    if not hivm or reply["status"] != 0:
        if match := _overflow(log):
            kind = UBOverflowError if match[1].lower() == "ub" else MemoryOverflowError
            problem = kind(
                name,
                request["target"],
                match[1].lower(),
                int(match[2]) // 8,
                int(match[3]) // 8,
                request["constexprs"],
                notes,
            )
        else:
            how = _how(request["compiler"], reply["status"])
            problem = CompileError(f"{name} {how}:\n{last_lines(log)}", "hivm")
        problem.ttir, problem.linalg = reply["ttir"], reply["linalg"]
        raise problem
    peaks, unknown = _peaks(hivm)
    if unknown:
        notes = [
            *notes,
            f"{unknown} local buffers have a size or place that is not constant: not in the peaks",
        ]
    mix = re.search(r'mix_mode\s*=\s*"([^"]+)"', reply["linalg"])
    return Compiled(
        kernel=name,
        target=request["target"],
        signature=request["signature"],
        constexprs=request["constexprs"],
        ttir=reply["ttir"],
        linalg=reply["linalg"],
        hivm=hivm,
        mix_mode=mix[1] if mix else "",
        notes=notes,
        retries=sum("retrying compilation" in note for note in notes),
        crashes=reply["crashes"],
        from_cache=from_cache,
        workspace_bytes=_workspace(hivm),
        **peaks,
    )


def _how(compiler: str, status: int) -> str:
    if status < 0:
        return f"crashes {compiler} ({signal.Signals(-status).name})"
    return f"fails in {compiler} (status {status})"


def _workspace(hivm: str) -> int | None:
    """Bytes of global workspace a program, from the module's own host function; 0 when it has none of it."""
    match = re.search(r"func\.func @\w+_infer_workspace_shape_function\(\)(.*?)\n  \}", hivm, re.S)
    if match is None:
        return 0
    value = re.search(r"constant[ (](\d+) : (?:index|i64)", match[1])
    return int(value[1]) if value else None


_BITS = {"bf16": 16, "f16": 16, "f32": 32, "f64": 64, "index": 64}


def _peaks(hivm: str) -> tuple[dict[str, int], int]:
    """Highest byte in use of each local memory, offset + size of every `pointer_cast`; and how many
    were unclear.
    """
    constants = {}
    peaks = dict.fromkeys(("ub_peak", "l1_peak", "l0a_peak", "l0b_peak", "l0c_peak"), 0)
    spaces = {"ub": "ub_peak", "cbuf": "l1_peak", "ca": "l0a_peak", "cb": "l0b_peak", "cc": "l0c_peak"}
    unknown = 0
    for line in hivm.splitlines():
        if "func.func" in line:
            constants = {}
        if match := re.search(r"(%[\w-]+) = (?:arith|llvm)\S*constant[ (](-?\d+)\b.*: i64", line):
            constants[match[1]] = int(match[2])
        match = re.search(r"pointer_cast\(([^)]*)\).*: memref<((?:\d+x)*)(\w+),.*address_space<(\w+)>", line)
        if match is None:
            unknown += "hivm.hir.pointer_cast(" in line
            continue
        if match[4] not in spaces:
            continue
        bits = _BITS.get(match[3]) or int(match[3].lstrip("sui"))
        size = bits
        for extent in match[2].rstrip("x").split("x"):
            size *= int(extent or 1)
        key = spaces[match[4]]
        for name in match[1].split(","):  # several places: a buffer with several copies
            if name.strip() in constants:
                peaks[key] = max(peaks[key], constants[name.strip()] + (size + 7) // 8)
            else:
                unknown += 1
    return peaks, unknown


# ---- the disk cache ----


@functools.lru_cache(maxsize=1)
def _own_digest() -> str:
    """Hash of the worker's code: a changed pipeline must not read what the old one wrote."""
    here = Path(__file__).parent
    files = b"".join((here / f"{name}.py").read_bytes() for name in ("inside", "session"))
    return hashlib.sha256(files).hexdigest()


#: Variables by these names change what the compilers do.
COMPILER_VARIABLES = ("TRITON_", "ASCEND_", "BISHENG", "MLIR_", "LLVM_")


def _cache_path(source: sources.KernelSource, request: dict) -> Path:
    key = {
        **{name: request[name] for name in ("name", "signature", "target", "compiler", "arch35")},
        **{name: repr(request[name]) for name in ("options", "flags", "explicit")},
        "constexprs": {name: repr(value) for name, value in request["constexprs"].items()},
        "source": source.digest,
        "environment": {n: v for n, v in os.environ.items() if n.startswith(COMPILER_VARIABLES)},
        "worker": _own_digest(),
        "toolchain": [toolchain.versions(), toolchain.fingerprint()],
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return toolchain.cache_root() / "compiled" / digest[:2] / f"{digest}.json.gz"


def _read(path: Path) -> dict | None:
    """A cache entry, or None when there is none or it cannot be read (a disk that was full, an
    interrupted copy).
    """
    try:
        reply = json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, ValueError, zlib.error):
        return None
    return reply if isinstance(reply, dict) and "hivm" in reply else None


def _write(path: Path, reply: dict) -> None:
    """Keep a reply; a cache that cannot be written costs time, never a result."""
    toolchain.keep(path, gzip.compress(json.dumps(reply).encode(), 1))
