"""What a library template of the Ascend compiler issues on the device, read from its bitcode.

A HIVM module calls templates; the toolchain ships their bodies. Each compiler program names its own library:
`bishengir-compile` (910B) `ascendnpuir/lib/meta_op.{aiv,aic}.bc`, `bishengir-compile-a5` (Ascend 950) the files ending
in `.c310.bc`. The `.c220.bc` files beside them are 910B code for the a5 program and differ: their loads take one
argument more than the 910B compiler's HIVM passes. `trace` runs the bodies for concrete operands on this CPU, in a
process of its own (`device_code.py`), and returns the hardware instructions with their parameters. `describe` says,
without operands, which instructions a template can issue at all and when it leaves the vector and DMA units for a loop
over single elements on the scalar unit. Both need the installed toolchain and are cached on disk.

Limits. The `.c310` bitcode comes from a producer that llvmlite's LLVM cannot read: no traces for the Ascend 950. The
last code generator, CANN's own, may carry another copy of the library; `Trace.missing_arguments` counts what HIVM does
not pass to the body here. Flags, masks and counters that a template reads back from the hardware are 0 here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from wyfast_lib.ascend import toolchain
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
    `scalar`: single elements that the scalar unit reads and writes, by memory ("UB read": 32); `functions`: the
    (mangled) library functions that ran; `error`: why there is no trace, else ""."""

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


_BYTES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "f16": 2, "bf16": 2, "u16": 2, "s16": 2, "b32": 4, "f32": 4, "u32": 4,
          "s32": 4, "f32s": 4, "s32s": 4, "u32s": 4, "f322bf16": 2, "f322f16": 2, "f2h": 2, "b64": 8, "s64": 8,
          "s322f16": 2, "s322s16": 2, "s322s8": 1}  # fmt: skip


def _element(name: str) -> int:
    for part in reversed(name.split(".")):
        if part in _BYTES:
            return _BYTES[part]
    return 1


def _transfer(name: str, values) -> Transfer | None:
    """Decode the parameter words of a 910B DMA instruction; the bit fields are those that the templates build."""
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


def _vector_work(instructions):
    """(name, repeats): from the repeat field, or from the element count where the counter mode is on."""
    count_mode, mask = False, 0
    for name, values, times in instructions:
        if name == "SET.CTRL":
            count_mode = bool(values[0] & _COUNT_MODE)
        elif name == "MOVEMASK" and values[0] == 0:
            mask = values[1] & 0xFFFFFFFFFFFFFFFF
        elif _VECTOR.match(name) and not name.startswith(_NOT_VECTOR):
            repeats = values[-1] >> 56 & 0xFF if values else 1
            if name.startswith(("VCADD", "VCMAX", "VCMIN", "VMRGSORT", "VSHL", "VSHR")):
                repeats = values[0] >> 56 & 0xFF
            if count_mode and not name.startswith("S.VNCHWCONV"):
                width = max((int(w) for w in re.findall(r"(?:bf|f|s|u|b)(8|16|32|64)", name)), default=32)
                repeats = -(-mask * width // 2048)
            for _ in range(times):
                yield name, max(1, repeats)


# ---- running the library ----------------------------------------------------------------------------------------


def library_path(target: str, core: str) -> Path:
    """The bitcode file with the templates of a core (`aic` or `aiv`) of a target."""
    return toolchain.locate() / "ascendnpuir" / "lib" / LIBRARY_OF_TARGET[target].format(core=core)


@lru_cache(maxsize=None)
def _index_path(bitcode: Path) -> Path:
    """The index of a bitcode file in our cache, named by the file's content and by the code that reads it."""
    digest = hashlib.sha256(bitcode.read_bytes() + _script().read_bytes()).hexdigest()[:20]
    return toolchain.cache_root() / "templates" / f"{bitcode.stem}-{digest}.sqlite"


def _script() -> Path:
    return Path(__file__).with_name("device_code.py")


def trace(calls: list, target: str, core: str) -> list:
    """Run template calls; `calls` is a list of (template name, arguments), an argument an int or a dict as described
    in `device_code.py`. Returns a Trace each, in order; `error` is set where the library has no such template or
    where its body cannot run here. Raises ToolchainMissing."""
    bitcode = library_path(target, core)
    index = _index_path(bitcode)
    folder = index.with_suffix("")
    keys = [hashlib.sha256(json.dumps(c, sort_keys=True).encode()).hexdigest()[:32] for c in calls]
    answers = {k: _read(folder / f"{k}.json") for k in dict.fromkeys(keys)}
    missing = {k: c for k, c in zip(keys, calls) if answers[k] is None}
    if missing:
        index.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)
        for key, answer in zip(missing, _ask(bitcode, index, list(missing.values()))):
            answers[key] = answer
            _write(folder / f"{key}.json", answer)
    return [_as_trace(c[0], answers[k]) for k, c in zip(keys, calls)]


def _as_trace(template: str, answer: dict) -> Trace:
    if "error" in answer:
        return Trace(template, error=answer["error"])
    return Trace(
        template,
        tuple((n, tuple(v), t) for n, v, t in answer["instructions"]),
        answer["scalar"],
        tuple(answer["functions"]),
        answer["missing_arguments"],
        answer["log_words"] > 1 << 21,
    )


def _ask(bitcode: Path, index: Path, calls: list) -> list:
    """Answers for `calls` from one process; a call that ends the process gets an error, the ones after it a new one."""
    answers: list = []
    while len(answers) < len(calls):
        rest = calls[len(answers) :]
        request = {"bitcode": str(bitcode), "index": str(index),
                   "calls": [{"template": name, "args": args} for name, args in rest]}  # fmt: skip
        done = _run(request)
        got = [json.loads(line) for line in done.stdout.splitlines()]
        answers += got
        if len(got) < len(rest):
            if done.returncode >= 0:
                raise WorkerCrashed(f"reading the template library failed:\n{done.stderr[-2000:]}")
            answers.append({"error": f"its body cannot run on this CPU (signal {-done.returncode})"})
    return answers


def _run(request: dict) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(toolchain.locate())}
    return subprocess.run([sys.executable, str(_script())], input=json.dumps(request), env=env, text=True,
                          capture_output=True, timeout=300)  # fmt: skip


def _read(path: Path) -> dict | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _write(path: Path, answer: dict) -> None:
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(answer))
    os.replace(partial, path)
