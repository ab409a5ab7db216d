"""The text of a HIVM module (`module.hivm.opt.mlir`) as functions, blocks and operations.

HIVM is the last form of a kernel that the public part of the Ascend compiler writes: tiling is done, work
is split between cube (`NAME_mix_aic`) and vector (`NAME_mix_aiv`), every buffer has an address in UB, L1
or L0 (`hivm.hir.pointer_cast`), and synchronisation is in place. This module reads it without MLIR: one
operation a line, regions in braces. It knows nothing of what an operation means; `walk.py` does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

ELEMENT_BITS = {
    "i1": 1,
    "i8": 8,
    "ui8": 8,
    "si8": 8,
    "f8E4M3FN": 8,
    "f8E5M2": 8,
    "i16": 16,
    "ui16": 16,
    "f16": 16,
    "bf16": 16,
    "i32": 32,
    "ui32": 32,
    "f32": 32,
    "i64": 64,
    "ui64": 64,
    "index": 64,
    "f64": 64,
}
SPACES = {"gm": "GM", "ub": "UB", "cbuf": "L1", "ca": "L0A", "cb": "L0B", "cc": "L0C"}


class HivmError(ValueError):
    """The text is not a HIVM module, or holds a form that this reader does not know."""


@dataclass
class MemrefType:
    """`memref<64x16xbf16, strided<[..], offset: ..>, #hivm.address_space<ub>>`: None stands for `?`."""

    shape: tuple
    dtype: str
    strides: tuple
    space: str  # GM, UB, L1, L0A, L0B, L0C, or "stack" when the text names none

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return ELEMENT_BITS[self.dtype]


@dataclass
class Op:
    """One operation: `results = name text`, with the regions in its braces, on `line` (from 1) of the
    module's text.
    """

    results: list
    name: str
    text: str
    line: int
    regions: list = field(default_factory=list)  # of list[Block]
    attrs: str = ""


@dataclass
class Block:
    """A straight run of operations; `args` are the names that a branch to `label` fills."""

    label: str
    args: list
    ops: list = field(default_factory=list)


@dataclass
class Function:
    """A function with a body. `args` holds (name, type text, attribute text) in order."""

    name: str
    args: list
    attrs: str
    blocks: list

    @property
    def core(self) -> str:
        """`aic` (cube) or `aiv` (vector)."""
        found = re.search(r"hivm\.func_core_type<(\w+)>", self.attrs)
        return found.group(1).lower() if found else "aiv"

    @property
    def part_of_mix(self) -> bool:
        """True when cube and vector halves of one kernel run together."""
        return "hivm.part_of_mix" in self.attrs

    @property
    def is_entry(self) -> bool:
        """True for what the device runs, False for host helpers and outlined vector functions."""
        return "hacc.entry" in self.attrs and "hacc.function_kind<DEVICE>" in self.attrs

    def ops(self):
        """Every operation, nested ones too, in the order of the text."""
        return walk_ops(self.blocks)


@dataclass
class Module:
    """A parsed module: `maps` by name, `functions` with a body by name, `spec` (UB_SIZE... in bits) of the
    target.
    """

    maps: dict
    functions: dict
    declared: set
    spec: dict

    @property
    def entries(self) -> list:
        """The functions that the device runs: one vector function, or a cube and a vector one."""
        return [f for f in self.functions.values() if f.is_entry]

    @property
    def workspace_bytes(self) -> int | None:
        """Bytes of global workspace that one program (AI core) of this kernel needs, or None when the text
        has none.
        """
        for name, function in self.functions.items():
            if name.endswith("infer_workspace_shape_function"):
                for op in function.ops():
                    found = re.search(r"(-?\d+) : (?:index|i64)", op.text)
                    if found and op.name in ("arith.constant", "llvm.mlir.constant"):
                        return int(found.group(1))
                    found = re.search(r"\((-?\d+) : ", op.text)
                    if found and op.name == "llvm.mlir.constant":
                        return int(found.group(1))
        return None

    @property
    def vector_units(self) -> int:
        """Vector units that run the vector function for each program: 2 beside a cube function, else 1."""
        return 2 if any(f.part_of_mix for f in self.entries) else 1


def walk_ops(blocks):
    """Yield every operation of `blocks`, an operation before those in its regions."""
    for block in blocks:
        for op in block.ops:
            yield op
            for region in op.regions:
                yield from walk_ops(region)


def split_list(text: str) -> list:
    """Split at commas that stand outside brackets: `a, b<c, d>` gives two items; empty text gives []."""
    items, depth, start = [], 0, 0
    for i, ch in enumerate(text):
        if ch in "([{<":
            depth += 1
        elif ch in ")]}" or (ch == ">" and text[i - 1] != "-"):
            depth -= 1
        elif ch == "," and depth == 0:
            items.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*items, last] if last else items


_MEMREF = re.compile(r"memref<((?:[\d?]+x)*)(\w+)(.*)>$", re.S)


def parse_memref(text: str) -> MemrefType | None:
    """Read a memref type, or return None when `text` is another type. Missing strides mean row-major."""
    match = _MEMREF.match(text.strip())
    if not match:
        return None
    dims, dtype, rest = match.groups()
    shape = tuple(None if d == "?" else int(d) for d in dims.split("x") if d)
    space = re.search(r"address_space<(\w+)>", rest)
    strided = re.search(r"strided<\[([^\]]*)\]", rest)
    if strided:
        strides = tuple(
            None if s.strip() == "?" else int(s) for s in strided.group(1).split(",") if s.strip()
        )
    else:
        strides = row_major(shape)
    return MemrefType(shape, dtype, strides, SPACES.get(space.group(1), space.group(1)) if space else "stack")


def row_major(shape) -> tuple:
    """Strides of a dense row-major array; None where an inner dimension is unknown."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step = None if (step is None or size is None) else step * size
    return tuple(reversed(strides))


_OP = re.compile(r'^(?:(%[\w#:$., %-]+?) = )?"?([a-zA-Z_][\w.]*)"?(.*)$', re.S)
_ATTRS = re.compile(r" \{([^{}]*)\}(?= : |$)")
_BLOCK = re.compile(r"^\^(\w+)(?:\((.*)\))?:")
_FUNC = re.compile(r"^func\.func (?:private |public )?@([\w$.]+)\(")


def _strip_location(line: str) -> str:
    return re.sub(r"\s+loc\(.*\)$", "", line)


class _Reader:
    """Reads lines into nested blocks; `self.i` is the next line."""

    def __init__(self, text: str):
        self.lines = text.split("\n")
        self.i = 0

    def next(self) -> tuple[str, int]:
        line = _strip_location(self.lines[self.i].strip())
        self.i += 1
        return line, self.i

    def region(self) -> tuple[list, str]:
        """Blocks up to the brace that closes the region, and what stands behind that brace."""
        blocks = [Block("entry", [])]
        while self.i < len(self.lines):
            line, number = self.next()
            if not line or line.startswith("//"):
                continue
            if line.startswith("}"):
                return [b for b in blocks if b.ops or b.label != "entry" or len(blocks) == 1], line[
                    1:
                ].strip()
            label = _BLOCK.match(line)
            if label:
                args = [a.split(":")[0].strip() for a in split_list(label.group(2) or "")]
                blocks.append(Block(label.group(1), args))
                continue
            blocks[-1].ops.append(self.operation(line, number))
        raise HivmError("the text ends inside a region")

    def operation(self, line: str, number: int) -> Op:
        match = _OP.match(line)
        if not match:
            raise HivmError(f"line {number}: not an operation: {line[:120]}")
        results, name, text = match.groups()
        op = Op([r.strip() for r in results.split(",")] if results else [], name, text.strip(), number)
        while line.endswith("{"):
            blocks, rest = self.region()
            op.regions.append(blocks)
            if rest.startswith("else") or (rest.startswith("do") and rest.endswith("{")):
                line = rest
                continue
            op.attrs = rest
            line = ""
        if op.regions:
            op.text = op.text[:-1].strip()
            return op
        attrs = _ATTRS.search(op.text)
        if attrs:
            op.attrs = attrs.group(1)
            op.text = op.text[: attrs.start()] + op.text[attrs.end() :]
        return op


def _function(reader: _Reader, line: str):
    """Read the function whose first line is `line`; None for a declaration."""
    match = _FUNC.match(line)
    depth, end = 1, match.end()
    while depth:
        depth += {"(": 1, ")": -1}.get(line[end], 0)
        end += 1
    args = []
    for item in split_list(line[match.end() : end - 1]):
        found = re.match(r"(%[\w]+): (.*?)(?: (\{.*\}))?$", item, re.S)
        if found:
            args.append((found.group(1), found.group(2), found.group(3) or ""))
    if not line.endswith("{"):
        return match.group(1), None
    blocks, _ = reader.region()
    return match.group(1), Function(match.group(1), args, line[end:], blocks)


def parse(text: str) -> Module:
    """Parse a HIVM module's text. Raises HivmError when it is not one."""
    reader = _Reader(text)
    maps, functions, declared, spec = {}, {}, set(), {}
    seen_module = False
    while reader.i < len(reader.lines):
        line, number = reader.next()
        if line.startswith("#") and "affine_map<" in line:
            name, body = line.split(" = ", 1)
            maps[name] = AffineMap.parse(body[len("affine_map<") : -1])
        elif line.startswith("module"):
            seen_module = True
            spec.update((k, int(v)) for k, v in re.findall(r'dl_entry<"(\w+)", (\d+) : i32>', line))
        elif line.startswith("func.func"):
            name, function = _function(reader, line)
            if function is None:
                declared.add(name)
            else:
                functions[name] = function
    if not seen_module or not any(f.is_entry for f in functions.values()):
        raise HivmError("no HIVM module with a device function in this text")
    return Module(maps, functions, declared, spec)


@dataclass
class AffineMap:
    """`(d0)[s0] -> (d0 * 4 + s0, 64)`: `dims` and `symbols` by name, `results` as nested tuples (op, left,
    right).
    """

    dims: list
    symbols: list
    results: list

    @classmethod
    def parse(cls, text: str) -> AffineMap:
        """Read the text between `affine_map<` and its `>`."""
        match = re.match(r"\(([^)]*)\)(?:\[([^\]]*)\])? -> \((.*)\)$", text.strip())
        if not match:
            raise HivmError(f"not an affine map: {text[:80]}")
        dims, symbols, body = match.groups()
        names = [n.strip() for n in dims.split(",") if n.strip()]
        syms = [n.strip() for n in (symbols or "").split(",") if n.strip()]
        return cls(names, syms, [_Affine(part).expression() for part in split_list(body)])


class _Affine:
    """Recursive descent over an affine expression: + and - bind weaker than *, floordiv, ceildiv and mod."""

    def __init__(self, text: str):
        self.tokens = re.findall(r"\d+|[a-z]\w*|[-+*()]", text)
        self.i = 0

    def peek(self):
        return self.tokens[self.i] if self.i < len(self.tokens) else None

    def take(self):
        self.i += 1
        return self.tokens[self.i - 1]

    def expression(self):
        left = self.product()
        while self.peek() in ("+", "-"):
            left = (self.take(), left, self.product())
        return left

    def product(self):
        left = self.atom()
        while self.peek() in ("*", "floordiv", "ceildiv", "mod"):
            left = (self.take(), left, self.atom())
        return left

    def atom(self):
        token = self.take()
        if token == "-":
            return ("*", -1, self.atom())
        if token == "(":
            inner = self.expression()
            self.take()
            return inner
        return int(token) if token.isdigit() else token
