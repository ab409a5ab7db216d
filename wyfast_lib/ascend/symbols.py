"""Integers that may be unknown: linear forms over named unknowns, with upper bounds taken from `min`.

The HIVM text of a kernel computes offsets, sizes and trip counts from run-time values (T, the program id,
the task counter). Reading it without those values needs three answers: is this a constant, are these two
offsets the same or a constant apart, and how large can this size be (a tile clamped at the end of a
sequence is at most a full tile). A `Sym` answers them: `const + sum coefficient * unknown`, where an
unknown is anything that is not linear.
"""

from __future__ import annotations

from dataclasses import dataclass


class Unknown:
    """One unknown: what made it (`op`) and from what (`operands`, ints or Sym), or just a name when
    `operands` is ().

    Equal (op, operands) give the same object, so comparing and hashing stay cheap however deep an
    expression is.
    """

    __slots__ = ("op", "operands", "serial")
    _known: dict = {}

    def __new__(cls, op: str, operands: tuple = ()):
        found = cls._known.get((op, operands))
        if found is None:
            found = super().__new__(cls)
            found.op, found.operands, found.serial = op, operands, len(cls._known)
            cls._known[(op, operands)] = found
        return found

    def __str__(self) -> str:
        return self.text(3)

    def text(self, depth: int) -> str:
        """Readable form; below `depth` levels only dots, since an offset can hold a long history."""
        if not self.operands:
            return self.op
        if depth == 0:
            return f"{self.op}(..)"
        inner = ", ".join(str(o) if isinstance(o, int) else o.text(depth - 1) for o in self.operands)
        return f"{self.op}({inner})"


@dataclass(frozen=True)
class Sym:
    """const + sum of coefficient * Unknown. Build with the functions below; they return an int when nothing
    is unknown.
    """

    terms: tuple = ()  # of (Unknown, coefficient), in the order of their making, no zero coefficient
    const: int = 0

    def __str__(self) -> str:
        return self.text(3)

    def text(self, depth: int) -> str:
        """Readable form, at most `depth` levels of nested operations."""
        parts = [("" if c == 1 else f"{c}*") + u.text(depth) for u, c in self.terms]
        if self.const:
            parts.append(str(self.const))
        return " + ".join(parts)


def _order(x: Sym):
    return tuple((u.serial, c) for u, c in x.terms), x.const


def unknown(op: str, *operands) -> Sym:
    """A new unknown as a value; equal arguments give equal values, which is how re-reads of one region are
    recognised.
    """
    return Sym(((Unknown(op, tuple(operands)), 1),), 0)


def _make(terms: dict, const: int):
    kept = [(u, c) for u, c in terms.items() if c]
    if not kept:
        return const
    return Sym(tuple(sorted(kept, key=lambda t: t[0].serial)), const)


def _split(x) -> tuple[dict, int]:
    return ({}, x) if isinstance(x, int) else (dict(x.terms), x.const)


def add(a, b):
    """a + b."""
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    ta, ca = _split(a)
    tb, cb = _split(b)
    for u, c in tb.items():
        ta[u] = ta.get(u, 0) + c
    return _make(ta, ca + cb)


def mul(a, b):
    """a * b; an unknown times an unknown is a new unknown."""
    if isinstance(a, Sym) and isinstance(b, Sym):
        first, second = sorted((a, b), key=_order)
        return unknown("mul", first, second)
    if isinstance(a, Sym):
        a, b = b, a
    if isinstance(b, int):
        return a * b
    return _make({u: c * a for u, c in b.terms}, b.const * a)


def sub(a, b):
    """a - b."""
    return add(a, mul(-1, b))


def _trunc_div(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


_EXACT = {
    "floordiv": lambda a, b: a // b,
    "ceildiv": lambda a, b: -(-a // b),
    "mod": lambda a, b: a % b,
    "divsi": _trunc_div,
    "remsi": lambda a, b: a - _trunc_div(a, b) * b,
    "andi": lambda a, b: a & b,
    "ori": lambda a, b: a | b,
    "xori": lambda a, b: a ^ b,
    "shli": lambda a, b: a << b,
    "shrsi": lambda a, b: a >> b,
}


def binary(op: str, a, b):
    """Any two-operand integer operation of the text; `op` is a key of the table above, else an unknown
    results.
    """
    if (
        op in _EXACT
        and isinstance(a, int)
        and isinstance(b, int)
        and not (b == 0 and op[-3:] in ("div", "mod"))
    ):
        if b == 0 and op in ("divsi", "remsi"):
            return unknown(op, a, b)
        return _EXACT[op](a, b)
    if b == 1 and op in ("floordiv", "ceildiv", "divsi"):
        return a
    if b == 1 and op in ("mod", "remsi"):
        return 0
    return unknown(op, a, b)


def minimum(*xs):
    """min; the bound that `upper` later finds in it is what makes a clamped tile 'at most a full tile'."""
    return _extreme("min", min, xs)


def maximum(*xs):
    """max."""
    return _extreme("max", max, xs)


def _extreme(name, pick, xs):
    ints = [x for x in xs if isinstance(x, int)]
    syms = list(dict.fromkeys(x for x in xs if isinstance(x, Sym)))
    if not syms:
        return pick(ints)
    if len(syms) == 1 and not ints:
        return syms[0]
    if len(syms) > 1:  # forms that differ by a constant only: keep the extreme one
        first = syms[0]
        gaps = [sub(s, first) for s in syms]
        if all(isinstance(gap, int) for gap in gaps):
            best = pick(gaps)
            return _extreme(name, pick, [add(first, best), *ints])
    return unknown(name, *sorted(syms, key=_order), *([pick(ints)] if ints else []))


def upper(x) -> int | None:
    """The largest value that the `min`s inside x allow, or None. min(a + 64, T) - a gives 64; max(0, y) at
    most y's.
    """
    if isinstance(x, int):
        return x
    for u, c in x.terms:
        if c > 0 and u.op in ("min", "max", "floordiv", "divsi", "ceildiv"):
            rest = sub(x, mul(c, Sym(((u, 1),), 0)))
            bound = _bound_with(u, c, rest)
            if bound is not None:
                return bound
    return None


def _bound_with(u: Unknown, c: int, rest) -> int | None:
    if u.op == "min":
        found = [upper(add(mul(c, o), rest)) for o in u.operands]
        found = [f for f in found if f is not None]
        return min(found) if found else None
    if u.op == "max":
        found = [upper(add(mul(c, o), rest)) for o in u.operands]
        return max(found) if None not in found else None
    inner = upper(u.operands[0])
    if inner is None or not isinstance(u.operands[1], int) or u.operands[1] <= 0:
        return None
    return upper(add(c * _EXACT[u.op](inner, u.operands[1]), rest))


def compare(predicate: str, a, b) -> int | None:
    """1 or 0 when a comparison is decided by constants or by a constant distance, else None."""
    gap = sub(a, b)
    if not isinstance(gap, int):
        return None
    signs = {"eq": gap == 0, "ne": gap != 0, "slt": gap < 0, "sle": gap <= 0, "sgt": gap > 0, "sge": gap >= 0}
    signs.update(ult=gap < 0, ule=gap <= 0, ugt=gap > 0, uge=gap >= 0)
    return int(signs[predicate]) if predicate in signs else None
