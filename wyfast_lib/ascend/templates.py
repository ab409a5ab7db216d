"""What a library template of the Ascend compiler issues on the device, read from its bitcode.

A HIVM module calls templates; the toolchain ships their bodies. Each compiler program names its own
library: `bishengir-compile` (910B) `ascendnpuir/lib/meta_op.{aiv,aic}.bc`, `bishengir-compile-a5` (Ascend
950) the files ending in `.c310.bc`. The `.c220.bc` files beside them are 910B code for the a5 program and
differ: their loads take one argument more than the 910B compiler's HIVM passes. `trace` runs the bodies
for concrete operands on this CPU, in a process of its own (`device_code.py`), and returns the hardware
instructions with their parameters. `describe` says, without operands, which instructions a template can
issue at all and when it leaves the vector and DMA units for a loop over single elements on the scalar
unit. Both need the installed toolchain and are cached on disk.

Limits. The `.c310` bitcode comes from a producer that llvmlite's LLVM cannot read: no traces for the
Ascend 950. The last code generator, CANN's own, may carry another copy of the library;
`Trace.missing_arguments` counts what HIVM does not pass to the body here. Flags, masks and counters that a
template reads back from the hardware are 0 here.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from wyfast_lib.ascend import device_code, toolchain
from wyfast_lib.ascend.errors import WorkerCrashed

LIBRARY_OF_TARGET = {"Ascend910B2": "meta_op.{core}.bc", "Ascend950PR_9589": "meta_op.{core}.c310.bc"}
BLOCK = 32  # bytes; the DMA units and UB work in such blocks


@dataclass(frozen=True)
class Transfer:
    """One DMA instruction: `bursts` of `burst_bytes`; `moved` counts whole 32-byte blocks a burst."""

    instruction: str
    pipe: str
    bursts: int
    burst_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes asked for."""
        return self.bursts * self.burst_bytes

    @property
    def moved(self) -> int:
        """Bytes in whole 32-byte blocks."""
        return self.bursts * (-(-self.burst_bytes // BLOCK) * BLOCK)


@dataclass(frozen=True)
class Trace:
    """What one call issues. `instructions`: (name, integer operands, times in a row), addresses left out;
    `scalar`: single elements that the scalar unit reads and writes, by memory ("UB read": 32);
    `functions`: the (mangled) library functions that ran; `truncated`: it issues more than the log holds, so
    that what stands here is a part; `error`: why there is no trace, else "".
    """

    template: str
    instructions: tuple = ()
    scalar: dict = field(default_factory=dict)
    functions: tuple = ()
    missing_arguments: int = 0
    truncated: bool = False
    error: str = ""

    @property
    def transfers(self) -> list:
        """The DMA instructions in order."""
        found = []
        for name, values, times in self.instructions:
            decoded = _transfer(name, values)
            if decoded is not None:
                found += [decoded] * times
        return found

    @property
    def scalar_accesses(self) -> int:
        """Single elements that the scalar unit moved."""
        return sum(self.scalar.values())

    @property
    def by_scalar(self) -> bool:
        """True when the call works element by element on the scalar unit, whole or in part."""
        return self.scalar_accesses > 0

    @property
    def vector(self) -> list:
        """(instruction, repeats) of the vector unit: a repeat is 256 bytes, the hardware's step."""
        return list(_vector_work(self.instructions))

    @property
    def flags(self) -> int:
        """set_flag and wait_flag pairs inside the template."""
        return sum(n for name, _, n in self.instructions if name.startswith("SET.FLAG"))

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the cube."""
        total = 0
        for name, values, times in self.instructions:
            if name.startswith("MAD"):
                word = values[0]
                total += times * (word & 0xFFF) * (word >> 12 & 0xFFF) * (word >> 24 & 0xFFF)
        return total

    def count(self, prefix: str) -> int:
        """How many instructions have a name that starts with `prefix`."""
        return sum(n for name, _, n in self.instructions if name.startswith(prefix))


_BYTES = {
    "b8": 1,
    "u8": 1,
    "s8": 1,
    "b16": 2,
    "f16": 2,
    "bf16": 2,
    "u16": 2,
    "s16": 2,
    "b32": 4,
    "f32": 4,
    "u32": 4,
    "s32": 4,
    "f32s": 4,
    "s32s": 4,
    "u32s": 4,
    "f322bf16": 2,
    "f322f16": 2,
    "f2h": 2,
    "b64": 8,
    "s64": 8,
    "s322f16": 2,
    "s322s16": 2,
    "s322s8": 1,
}


def _element(name: str) -> int:
    for part in reversed(name.split(".")):
        if part in _BYTES:
            return _BYTES[part]
    return 1


def _transfer(name: str, values) -> Transfer | None:
    """Decode the parameter words of a 910B DMA instruction; the bit fields are those that the templates
    build.
    """
    if name.startswith("MOV.OUT.TO.UB.ALIGN") or name.startswith("MOV.UB.TO.OUT.ALIGN"):
        pipe = "MTE2" if "OUT.TO.UB" in name else "MTE3"
        return Transfer(name, pipe, values[0] >> 4 & 0xFFF, values[0] >> 16 & 0x1FFFFF)
    if name.startswith("MOV.OUT.TO.L1.MULTI.ND2NZ"):
        rows, columns, matrices = values[0] >> 16 & 0xFFFF, values[0] >> 32 & 0xFFFF, values[0] >> 4 & 0xFFF
        return Transfer(name, "MTE2", rows * matrices, columns * _element(name))
    if name.startswith("MOV.OUT.TO.L1"):
        return Transfer(name, "MTE2", values[0] >> 4 & 0xFFF, BLOCK * (values[0] >> 16 & 0xFFFF))
    if name.startswith("FIX.L0C.TO.OUT"):
        return Transfer(name, "FIX", values[0] >> 16 & 0xFFFF, (values[0] >> 4 & 0xFFF) * _element(name))
    if name.startswith(("LOAD.L1.TO.L0A.3DV2", "LOAD.L1.TO.L0B.3DV2")):
        return Transfer(name, "MTE1", values[0] >> 16 & 0xFFFF, (values[0] & 0xFFFF) * _element(name))
    if name.startswith("MOV.UB.TO.UB"):
        return Transfer(name, "V", values[0] >> 4 & 0xFFF, BLOCK * (values[0] >> 16 & 0xFFFF))
    return None


_NOT_VECTOR = ("MOVEMASK", "MOVEVA", "MOV.")
_VECTOR = re.compile(r"V[A-Z]|MOVEV\.|S\.VNCHWCONV")
_COUNT_MODE = 1 << 56  # bit of the control register: the mask register holds an element count


def is_vector(name: str) -> bool:
    """True for an instruction of the vector unit (masks and address registers are not)."""
    return bool(_VECTOR.match(name)) and not name.startswith(_NOT_VECTOR)


def _vector_work(instructions):
    """(name, repeats): from the repeat field, or from the element count where the counter mode is on."""
    count_mode, mask = False, 0
    for name, values, times in instructions:
        if name == "SET.CTRL":
            count_mode = bool(values[0] & _COUNT_MODE)
        elif name == "MOVEMASK" and values[0] == 0:
            mask = values[1] & 0xFFFFFFFFFFFFFFFF
        elif is_vector(name):
            repeats = values[-1] >> 56 & 0xFF if values else 1
            if name.startswith(("VCADD", "VCMAX", "VCMIN", "VSHR")):  # an order or rounding mode comes last
                repeats = values[-2] >> 56 & 0xFF
            if count_mode and not name.startswith("S.VNCHWCONV"):
                width = max((int(w) for w in re.findall(r"(?:bf|f|s|u|b)(8|16|32|64)", name)), default=32)
                repeats = -(-mask * width // 2048)
            for _ in range(times):
                yield name, max(1, repeats)


@dataclass(frozen=True)
class Probe:
    """One change of an example call and its effect: `scalar` elements on the scalar unit, DMA `bursts`."""

    change: str
    scalar: int
    bursts: int
    vector_repeats: int


@dataclass(frozen=True)
class TemplateFacts:
    """What `describe` found. `instructions`: every hardware instruction that the body can reach;
    `scalar_functions`: the library functions under it that touch device memory element by element; `base` and
    `probes`: an example call, and the same call with one property changed at a time."""

    template: str
    instructions: tuple
    scalar_functions: tuple
    base: Trace | None = None
    probes: tuple = ()

    @property
    def scalar_path(self) -> bool:
        """True when the body has a path over single elements at all."""
        return bool(self.scalar_functions)

    @property
    def condition(self) -> str:
        """The single changes of the example that lead to the scalar unit, or how the example itself gets
        there.
        """
        if self.base is None:
            return "not probed: no example call given"
        if self.base.by_scalar:
            return f"the example call itself: {self.base.scalar_accesses} elements"
        found = [f"{p.change} ({p.scalar} elements)" for p in self.probes if p.scalar]
        return "; ".join(found) if found else "none of the probed changes"


def describe(
    template: str, arguments: list | tuple | None = None, target: str = "Ascend910B2", core: str = "aiv"
):
    """TemplateFacts of a template: what its body can issue, and, given the arguments of an example call (as
    `trace` takes them), which single changes of strides and addresses send it to the scalar unit. Every
    answer is a run of the body. Raises ValueError for a template that the library has not, ToolchainMissing
    without a toolchain.
    """
    bitcode = library_path(target, core)
    index = _writable(_index_path(bitcode))
    if not index.exists():
        trace(
            [(template, [])] if arguments is None else [(template, arguments)], target, core
        )  # makes the index
    if not index.exists():
        raise ValueError(f"{template}: the library of {target} cannot be read")
    base = sqlite3.connect(index)
    items = device_code.closure(base, [f"_mlir_ciface_{template}"])
    base.close()
    if f"_mlir_ciface_{template}" not in items:
        raise ValueError(f"{template}: no such template in {bitcode.name}")
    instructions = sorted(n.removeprefix("llvm.hivm.") for n in items if n.startswith("llvm.hivm."))
    scalar = sorted(
        n for n, (kind, body) in items.items() if kind == "define" and device_code.touches_memory(body)
    )
    if arguments is None:
        return TemplateFacts(template, tuple(instructions), tuple(scalar))
    arguments = list(arguments)
    changes = list(_changes(arguments))
    first, *rest = trace([(template, a) for _, a in [("", arguments), *changes]], target, core)
    probes = tuple(
        Probe(text, t.scalar_accesses, sum(x.bursts for x in t.transfers), sum(r for _, r in t.vector))
        for (text, _), t in zip(changes, rest, strict=True)
        if not t.error
    )
    return TemplateFacts(template, tuple(instructions), tuple(scalar), first, probes)


def _changes(arguments):
    """(text, arguments) with one memref property changed: inner stride, row stride, order, alignment."""
    for i, operand in enumerate(arguments):
        if not isinstance(operand, dict) or 0 in operand["sizes"] or not operand["sizes"]:
            continue
        block = max(2, 8 * BLOCK // operand["bits"])  # elements of a 32-byte block
        strides, sizes = operand["strides"], operand["sizes"]
        name = f"operand {i} ({operand['space']})"

        def changed(text, i=i, operand=operand, name=name, **new):
            return f"{name}: {text}", [*arguments[:i], {**operand, **new}, *arguments[i + 1 :]]

        scale = [s * block for s in strides]
        yield changed("an element a 32-byte block", strides=scale)
        yield changed("inner stride 3", strides=[s * 3 for s in strides])
        if len(sizes) == 1 and sizes[0] == 1:
            continue
        if len(sizes) > 1:
            yield changed("rows off the 32-byte grid", strides=[strides[0] + 1, *strides[1:]])
            dense = [1]
            for size in sizes[:-1]:
                dense.append(dense[-1] * size)
            yield changed("transposed", strides=dense)
        if operand["space"] != "GM":
            yield changed("address off the 32-byte grid", offset=operand["offset"] + 1)


# ---- running the library
# ----------------------------------------------------------------------------------------


def library_path(target: str, core: str) -> Path:
    """The bitcode file with the templates of a core (`aic` or `aiv`) of a target."""
    return toolchain.locate() / "ascendnpuir" / "lib" / LIBRARY_OF_TARGET[target].format(core=core)


@cache
def _digest(bitcode: Path) -> str:
    return hashlib.sha256(
        bitcode.read_bytes() + inspect.getsource(device_code.build_index).encode()
    ).hexdigest()[:20]


@cache
def _script_digest() -> str:
    return hashlib.sha256(_script().read_bytes()).hexdigest()[:12]


def _index_path(bitcode: Path) -> Path:
    """The index of a bitcode file in our cache, named by its content and by the code that writes it."""
    return toolchain.cache_root() / "templates" / f"{bitcode.stem}-{_digest(bitcode)}.sqlite"


def _script() -> Path:
    return Path(__file__).with_name("device_code.py")


def trace(calls: list, target: str, core: str) -> list:
    """Run template calls; `calls` is a list of (template name, arguments), an argument an int or a dict as
    described in `device_code.py`. Returns a Trace each, in order; `error` is set where the library has no
    such template or where its body cannot run here. Raises ToolchainMissing.
    """
    bitcode = library_path(target, core)
    index = _writable(_index_path(bitcode))
    folder = index.with_suffix(f".{_script_digest()}")  # what the library says, as read by this script
    keys = [hashlib.sha256(json.dumps(c, sort_keys=True).encode()).hexdigest()[:32] for c in calls]
    answers = {k: _read(folder / f"{k}.json") for k in dict.fromkeys(keys)}
    missing = {k: c for k, c in zip(keys, calls, strict=False) if answers[k] is None}
    if missing:
        for key, answer in zip(missing, _ask(bitcode, index, list(missing.values())), strict=False):
            answers[key] = answer
            if "signal" not in answer.get("error", ""):  # a process that died may have died of something else
                _write(folder / f"{key}.json", answer)
    return [_as_trace(c[0], answers[k]) for k, c in zip(keys, calls, strict=False)]


def _as_trace(template: str, answer: dict) -> Trace:
    if "error" in answer:
        return Trace(template, error=answer["error"])
    return Trace(
        template,
        tuple((n, tuple(v), t) for n, v, t in answer["instructions"]),
        answer["scalar"],
        tuple(answer["functions"]),
        answer["missing_arguments"],
        answer["log_words"] > device_code.LOG_WORDS,
    )


def _ask(bitcode: Path, index: Path, calls: list) -> list:
    """Answers for `calls` from one process; a call that ends the process gets an error, the ones after it a
    new one.
    """
    answers: list = []
    while len(answers) < len(calls):
        rest = calls[len(answers) :]
        request = {
            "bitcode": str(bitcode),
            "index": str(index),
            "calls": [{"template": name, "args": args} for name, args in rest],
        }
        done = _run(request)
        got = [json.loads(line) for line in done.stdout.splitlines()]
        answers += got
        if len(got) < len(rest):
            if done.returncode >= 0:
                raise WorkerCrashed(f"reading the template library failed:\n{done.stderr[-2000:]}", "hivm")
            answers.append({"error": f"its body cannot run on this CPU (signal {-done.returncode})"})
    return answers


def _run(request: dict) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(toolchain.locate()), "PYTHONUTF8": "1"}
    return subprocess.run(
        [sys.executable, str(_script())],
        input=json.dumps(request),
        env=env,
        encoding="utf-8",
        capture_output=True,
        timeout=300,
    )


def _read(path: Path) -> dict | None:
    try:
        answer = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) and ("error" in answer or "instructions" in answer) else None


def _write(path: Path, answer: dict) -> None:
    toolchain.keep(path, json.dumps(answer).encode())


def _writable(index: Path) -> Path:
    """The index's place in the cache, or where that cannot be written one in a directory of this process."""
    if index.is_file():
        return index
    if toolchain.keep(index.with_suffix(".probe"), b"0"):
        index.with_suffix(".probe").unlink(missing_ok=True)
        return index
    return Path(_own_folder().name) / index.name


@cache
def _own_folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="wyfast-templates-")
