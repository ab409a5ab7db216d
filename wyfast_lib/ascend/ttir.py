"""A check on Triton's IR: a tile that was the left operand of `tt.dot` is dead afterwards.

The Ascend compiler may overwrite the left operand of a dot. A kernel must therefore reload such a tile, or
copy it before its first dot, and it must do so after Triton's own optimiser: two equal loads without a
store between them become one again. So the check reads the TTIR, not the source. It follows values through
views (trans, reshape), loop carried arguments, loops (the next iteration reads again what was defined
outside) and the branches of an `if`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

VIEWS = ("tt.trans", "tt.reshape", "tt.expand_dims", "tt.bitcast")


@dataclass(frozen=True)
class LeftOperandRead:
    """One violation: `value`, the left operand of the dot in `dot_line`, is read by `reader` in `line`
    (1-based lines).

    `next_iteration`: the read stands before the dot in the text, and comes after it in the next turn of a
    loop.
    """

    value: str
    dot_line: int
    line: int
    reader: str
    next_iteration: bool
    text: str

    def __str__(self) -> str:
        when = ", in the next iteration" if self.next_iteration else ""
        return (
            f"{self.value}: left operand of the dot in line {self.dot_line}, read by {self.reader} in line "
            f"{self.line}{when}: {self.text}"
        )


@dataclass(eq=False)
class _Value:
    """An SSA value: where it is defined, and what it stands for without a copy."""

    name: str
    op: str
    regions: tuple = ()
    sources: list[_Value] = field(default_factory=list)  # the value is one of these, or a view of it
    views: list[_Value] = field(default_factory=list)


@dataclass(eq=False)
class _Region:
    """A region of an op: `loop` for those that run again, `branch` tells the exclusive regions of one
    op apart.
    """

    op: _Op | None
    loop: bool
    branch: int
    names: dict[str, list[_Value]] = field(default_factory=dict)


@dataclass(eq=False)
class _Op:
    name: str
    line: int
    text: str
    operands: list[_Value]
    regions: tuple[_Region, ...]
    results: list[_Value] = field(default_factory=list)
    arguments: list[_Value] = field(default_factory=list)  # of a loop's body
    conditions: list[_Value] = field(default_factory=list)  # scf.while: what scf.condition passes on


def left_operand_reads(ttir: str) -> list[LeftOperandRead]:
    """Every read of a tile after it was the left operand of a `tt.dot`, in the order of the dots; [] is
    right.

    Raises ValueError when the text holds no function.
    """
    ops = _Parser().parse(ttir)
    found = []
    for dot in (op for op in ops if op.name == "tt.dot"):
        seen = set()
        for value in _same_memory(dot.operands[0]):
            for reader in ops:
                if value not in reader.operands or (reader.line, value.name) in seen:
                    continue
                verdict = _reads_after(value, dot, reader)
                if verdict is not None:
                    seen.add((reader.line, value.name))
                    found.append(
                        LeftOperandRead(value.name, dot.line, reader.line, reader.name, verdict, reader.text)
                    )
    return found


def assert_left_operands_dead(ttir: str) -> None:
    """Raise AssertionError that lists every read of a tile after it was the left operand of a dot."""
    if reads := left_operand_reads(ttir):
        raise AssertionError(
            "the Ascend compiler may overwrite these tiles before they are read:\n"
            + "\n".join(map(str, reads))
        )


def _same_memory(left: _Value) -> list[_Value]:
    """The values that may share memory with `left`: what it is made from without a copy, and other
    views of that.
    """
    back, pending = [], [left]
    while pending:
        value = pending.pop()
        if value in back or value.op == "arith.constant":
            continue
        back.append(value)
        pending.extend(value.sources)
    pending, every = list(back), []
    while pending:
        value = pending.pop()
        if value not in every:
            every.append(value)
            pending.extend(value.views)
    return every


def _reads_after(value: _Value, dot: _Op, reader: _Op) -> bool | None:
    """Whether `reader` can see `value` after `dot`: False (yes, later in the text), True (next
    iteration), None (no).
    """
    common = [a for a, b in zip(dot.regions, reader.regions, strict=False) if a is b]
    rest = dot.regions[len(common) :], reader.regions[len(common) :]
    exclusive = all(rest) and rest[0][0].op is rest[1][0].op and rest[0][0].branch != rest[1][0].branch
    if reader.line > dot.line and not exclusive:
        return False
    if any(region.loop and region not in value.regions for region in common):
        return True
    return None


class _Parser:
    """One op a line, as MLIR prints it; regions open with a line's last `{` and close with its first `}`."""

    def __init__(self) -> None:
        self.ops: list[_Op] = []
        self.stack: list[_Region] = []

    def parse(self, text: str) -> list[_Op]:
        if "tt.func" not in text:
            raise ValueError("ttir: there is no tt.func in the text")
        for number, line in enumerate(text.splitlines(), 1):
            line = re.sub(r"\s*loc\((?:[^()]|\([^()]*\))*\)", "", line).strip()
            if line and not line.startswith("#"):
                self._line(number, line)
        return self.ops

    def _line(self, number: int, line: str) -> None:
        if line.startswith("}"):
            closed = self.stack.pop()
            if line.endswith("{"):  # } else {   } do {   }, {
                self.stack.append(_Region(closed.op, closed.loop, 0 if closed.loop else closed.branch + 1))
            return
        if line.startswith("^"):
            for i, name in enumerate(re.findall(r"(%\w+):", line)):
                value = self._define(name, "block argument")[0]
                op = self.stack[-1].op
                if op is not None and i < len(op.conditions):
                    value.sources.append(op.conditions[i])
            return
        match = re.match(r'(?:(%\w+)(?::(\d+))? = )?"?([\w.]+)"?', line)
        if match is None or line.startswith("module"):
            if line.endswith("{"):
                self.stack.append(_Region(None, False, 0))
            return
        op = self._op(number, line, match)
        if line.endswith("{"):
            loop = op.name in ("scf.for", "scf.while")
            self.stack.append(_Region(op, loop, 0))
            self._arguments(op, line)

    def _op(self, number: int, line: str, match: re.Match) -> _Op:
        name, count = match[1], int(match[2] or 1)
        body = line[match.end() :]
        inner = set(re.findall(r"(%\w+) = ", body)) if match[3] in ("scf.for", "scf.while") else set()
        if match[3] == "tt.func":
            inner = set(re.findall(r"(%\w+):", body))
        used = [
            self._find(n, int(i or 0)) for n, i in re.findall(r"(%\w+)(?:#(\d+))?", body) if n not in inner
        ]
        op = _Op(match[3], number, line, [value for value in used if value is not None], tuple(self.stack))
        self.ops.append(op)
        if name:
            op.results = self._define(name, op.name, count)
        if op.name in VIEWS and op.results:
            op.results[0].sources.append(op.operands[0])
            op.operands[0].views.append(op.results[0])
        self._forward(op)
        return op

    def _forward(self, op: _Op) -> None:
        """What a terminator hands to the op around it."""
        parent = self.stack[-1].op if self.stack else None
        if parent is None:
            return
        if op.name == "scf.condition":
            parent.conditions = op.operands[1:]
        handed = {"scf.yield": op.operands, "scf.condition": op.operands[1:]}.get(op.name, [])
        if op.name == "scf.yield" and parent.name == "scf.while":
            return
        for result, value in zip(parent.results, handed, strict=False):
            result.sources.append(value)

    def _arguments(self, op: _Op, line: str) -> None:
        """Names that a loop or a function defines in its head."""
        if op.name == "tt.func":
            for name in re.findall(r"(%\w+):", line):
                self._define(name, "argument")
            return
        if op.name == "scf.for":
            self._define(re.search(r"scf\.for (%\w+)", line)[1], "counter")
        pairs = re.search(r"(?:iter_args|scf\.while )\((.*?)\)", line)
        for i, (name, initial, index) in enumerate(
            re.findall(r"(%\w+) = (%\w+)(?:#(\d+))?", pairs[1] if pairs else "")
        ):
            value = self._define(name, "loop argument")[0]
            source = self._find(initial, int(index or 0))
            if source is not None:
                value.sources.append(source)
                if i < len(op.results):
                    op.results[i].sources.append(source)

    def _define(self, name: str, op: str, count: int = 1) -> list[_Value]:
        shown = [name if count == 1 else f"{name}#{i}" for i in range(count)]
        values = [_Value(each, op, tuple(self.stack)) for each in shown]
        self.stack[-1].names[name] = values
        return values

    def _find(self, name: str, index: int) -> _Value | None:
        for region in reversed(self.stack):
            if name in region.names:
                values = region.names[name]
                return values[min(index, len(values) - 1)]
        return None
