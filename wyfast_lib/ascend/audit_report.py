"""What an audit is: its rows, its totals, and how they print. `audit.py` makes it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from wyfast_lib.ascend import templates

LOCAL_SPACES = ("UB", "L1", "L0A", "L0B", "L0C")


@dataclass(frozen=True)
class Row:
    """One call site of a template, with the operands that it moves or computes on, as executed for one task.

    `times`: executions a task, over both vector units. `bytes`: bytes asked for in one execution; `moved`:
    the same in whole 32-byte blocks; `bursts`: DMA bursts of one execution. `layout`: contiguous (one
    burst), rows (a burst a row), discrete (a burst an element), scalar (the scalar unit moves single
    elements), or "" for computation. `padding`: bytes that the local tile spans over bytes that it holds
    (16 when each bf16 sits in its own block). `argument`: the kernel's tensor, "workspace", or "" when the
    call stays inside the core.
    """

    unit: str
    pipe: str
    template: str
    source: str
    destination: str
    shape: tuple
    strides: tuple
    dtype: str
    bytes: int
    moved: int
    bursts: int
    layout: str
    times: float
    argument: str
    direction: str  # in, out or ""
    padding: float
    scalar: int  # elements that the scalar unit moves in one execution
    instructions: tuple  # (hardware instruction, count) of one execution
    repeats: int  # 256-byte steps of the vector unit in one execution
    macs: int
    inner_flags: int
    local_bytes: int  # MTE1: bytes from L1 to L0 in one execution
    maybe: bool  # under a condition that only run-time data decides
    one_unit: bool  # under limit_sub_block_id0: the second vector unit does not do it
    once: bool  # outside the task loop: once a program, in no total
    line: int
    note: str = ""
    arguments: tuple = field(default=(), repr=False, compare=False)  # for `templates.trace` and `describe`

    @property
    def discrete(self) -> bool:
        """True when elements travel one by one, by DMA bursts or by the scalar unit."""
        return self.layout in ("discrete", "scalar")

    def to_dict(self) -> dict:
        """The row with plain values, for CSV and JSON."""
        plain = {k: getattr(self, k) for k in self.__dataclass_fields__ if k != "arguments"}
        plain.update(
            shape="x".join(map(str, self.shape)),
            strides=",".join(map(str, self.strides)),
            instructions=" ".join(f"{n}*{c}" for n, c in self.instructions),
        )
        return plain


@dataclass
class Audit:
    """Rows and totals, all a task. Print it, show it in a notebook, or take `rows` and `totals`."""

    kernel: str
    target: str
    rows: list
    plan: dict  # space -> list of walk.Buffer
    peaks: dict  # space -> bytes
    capacity: dict  # space -> bytes
    workspace_per_program: int | None
    tasks: float  # tasks that the walked program did (1 when the loop ran symbolically and is not pipelined)
    syncs: Counter  # (unit, operation, pipes) -> count a task
    minimum: dict  # argument -> bytes that must cross global memory once
    directions: dict  # argument -> "in", "out" or "in+out"
    notes: list = field(default_factory=list)
    unwritten: list = field(
        default_factory=list
    )  # tiles that are read and never written: the compiler lost a load
    writing_units: int = 2  # vector units whose results leave them

    # ---- totals
    # -----------------------------------------------------------------------------------------------------

    def _sum(self, value, rows=None) -> float:
        return sum(value(r) * r.times for r in (self.rows if rows is None else rows) if not r.once)

    def moves(self) -> list:
        """Rows that touch global memory."""
        return [r for r in self.rows if r.argument]

    def argument_bytes(
        self, direction: str | None = None, name: str | None = None, moved: bool = False
    ) -> int:
        """Bytes a task between the core and argument tensors; `direction` in/out and `name` restrict it."""
        rows = [
            r
            for r in self.moves()
            if r.argument != "workspace" and direction in (None, r.direction) and name in (None, r.argument)
        ]
        return round(self._sum(lambda r: r.moved if moved else r.bytes, rows))

    @property
    def workspace_bytes(self) -> int:
        """Bytes a task written to and read from the cube-vector workspace in global memory."""
        return round(self._sum(lambda r: r.bytes, [r for r in self.rows if r.argument == "workspace"]))

    @property
    def global_bytes(self) -> int:
        """Argument and workspace bytes a task."""
        return self.argument_bytes() + self.workspace_bytes

    @property
    def minimum_bytes(self) -> int:
        """Each input once, each output once: the bytes a task that no kernel can avoid."""
        return sum(self.minimum.values())

    @property
    def discrete_rows(self) -> list:
        """Global loads and stores that go element by element."""
        return [r for r in self.moves() if r.discrete and not r.template.startswith("scalar_")]

    @property
    def scalar_rows(self) -> list:
        """Template calls that work element by element on the scalar unit, whole or in part."""
        return [r for r in self.rows if r.scalar and not r.template.startswith("scalar_")]

    @property
    def untraced_rows(self) -> list:
        """Calls without a device trace: bursts come from the memrefs, scalar work does not show."""
        return [r for r in self.rows if r.note]

    @property
    def padded_rows(self) -> list:
        """Calls on local tiles that hold one element in each 32-byte block."""
        return [r for r in self.rows if r.padding >= 2]

    @property
    def one_unit_rows(self) -> list:
        """Global stores that only the first vector unit does."""
        return [r for r in self.moves() if r.one_unit]

    @property
    def split(self) -> bool | None:
        """True when both vector units do different work; False when results are left to the first one (the
        second repeats its work); None for a kernel without a cube half or without vector work, whose
        programs have one vector unit each.
        """
        if not any(r.unit == "aic" for r in self.rows) or not self.writing_units:
            return None
        return not self.one_unit_rows and self.writing_units > 1

    @property
    def ub_peak(self) -> int:
        """Highest byte of UB in the memory plan."""
        return self.peaks["UB"]

    def sync_count(self, operation: str | None = None, unit: str | None = None) -> float:
        """Synchronisation instructions a task that the HIVM text itself holds."""
        return sum(n for (u, o, _), n in self.syncs.items() if operation in (None, o) and unit in (None, u))

    @property
    def totals(self) -> dict:
        """Every total a task, by name."""
        vector = [r for r in self.rows if r.pipe == "V"]
        return {
            "argument_bytes_in": self.argument_bytes("in"),
            "argument_bytes_out": self.argument_bytes("out"),
            "argument_bytes": self.argument_bytes(),
            "minimum_bytes": self.minimum_bytes,
            "workspace_bytes": self.workspace_bytes,
            "global_bytes": self.global_bytes,
            "moved_bytes": round(self._sum(lambda r: r.moved, self.moves())),
            "bursts": round(self._sum(lambda r: r.bursts, self.moves())),
            "discrete_calls": round(self._sum(lambda r: 1, self.discrete_rows), 3),
            "scalar_elements": round(self._sum(lambda r: r.scalar)),
            "vector_calls": round(self._sum(lambda r: 1, vector), 3),
            "vector_instructions": round(
                self._sum(lambda r: sum(c for n, c in r.instructions if _is_vector(n)))
            ),
            "vector_repeats": round(self._sum(lambda r: r.repeats)),
            "padded_calls": round(self._sum(lambda r: 1, self.padded_rows), 3),
            "cube_calls": round(self._sum(lambda r: 1, [r for r in self.rows if r.pipe == "M"]), 3),
            "macs": round(self._sum(lambda r: r.macs)),
            "l1_to_l0_bytes": round(self._sum(lambda r: r.local_bytes)),
            "sync_instructions": round(self.sync_count(), 3),
            "flags_inside_templates": round(self._sum(lambda r: r.inner_flags)),
            "ub_peak": self.peaks["UB"],
            "l1_peak": self.peaks["L1"],
            "l0c_peak": self.peaks["L0C"],
            "split": self.split,
        }

    # ---- output
    # -----------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict:
        """Everything with plain values."""
        return {
            "kernel": self.kernel,
            "target": self.target,
            "tasks": self.tasks,
            "totals": self.totals,
            "minimum": self.minimum,
            "notes": self.notes,
            "syncs": [
                {"unit": u, "operation": o, "pipes": p, "times": n} for (u, o, p), n in self.syncs.items()
            ],
            "rows": [r.to_dict() for r in self.rows],
        }

    HEADERS = (
        "unit",
        "pipe",
        "call",
        "from",
        "to",
        "shape",
        "strides",
        "bytes",
        "moved",
        "bursts",
        "layout",
        "times",
        "tensor",
        "marks",
    )

    def table(self, compute: bool = False) -> list:
        """Rows of text for `HEADERS`: movements through global memory, and with `compute` every call."""
        return [_cells(r) for r in self.rows if compute or r.argument]

    def summary(self) -> list:
        """Lines of text with the totals."""
        t = self.totals
        ratio = (
            f" = {t['argument_bytes'] / t['minimum_bytes']:.2f}x the minimum" if t["minimum_bytes"] else ""
        )
        peaks = ", ".join(
            f"{s} {_kb(self.peaks[s])} of {_kb(self.capacity[s])}"
            for s in LOCAL_SPACES
            if self.peaks[s] and s in self.capacity
        )
        split = {
            None: "one vector unit a program",
            True: "over both vector units",
            False: f"NOT split: {len(self.one_unit_rows)} stores by the first vector unit only",
        }[self.split]
        return [
            f"arguments {_kb(t['argument_bytes'])} ({_kb(t['argument_bytes_in'])} in, "
            f"{_kb(t['argument_bytes_out'])} out){ratio} of {_kb(t['minimum_bytes'])}; workspace "
            f"{_kb(t['workspace_bytes'])}; together {_kb(t['global_bytes'])} a task, {t['bursts']} bursts",
            f"discrete {t['discrete_calls']:g} calls; scalar unit {t['scalar_elements']} elements; padded "
            f"{t['padded_calls']:g} calls",
            f"vector {t['vector_calls']:g} calls, {t['vector_instructions']} instructions, "
            f"{t['vector_repeats']} "
            f"repeats; cube {t['cube_calls']:g} calls, {t['macs']} MACs; synchronisation "
            f"{t['sync_instructions']:g} and {t['flags_inside_templates']} inside templates",
            f"memory plan: {peaks}; work {split}",
            *[f"note: {n}" for n in self.notes],
        ]

    def __str__(self) -> str:
        return (
            f"{self.kernel} for {self.target}, a task:\n"
            + _align([self.HEADERS, *self.table()])
            + "\n"
            + "\n".join(self.summary())
        )

    def _repr_html_(self) -> str:
        from html import escape

        head = "".join(f"<th>{h}</th>" for h in self.HEADERS)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in self.table()
        )
        lines = "<br>".join(escape(line) for line in self.summary())
        return (
            f"<table><caption>{escape(self.kernel)} for {escape(self.target)}, a task</caption>"
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{lines}</p>"
        )


def _kb(n: float) -> str:
    return f"{n / 1024:.1f} KB" if n >= 1024 else f"{n:g} B"


def _cells(r: Row) -> tuple:
    marks = [
        m
        for m, on in (
            ("maybe", r.maybe),
            ("unit 0 only", r.one_unit),
            ("once", r.once),
            (f"padded {r.padding:g}x", r.padding >= 2),
            (f"{r.scalar} by scalar", r.scalar and r.layout != "scalar"),
        )
        if on
    ]
    return (
        r.unit,
        r.pipe,
        r.template,
        r.source,
        r.destination,
        "x".join(map(str, r.shape)),
        ",".join(map(str, r.strides)),
        str(r.bytes),
        str(r.moved),
        str(r.bursts),
        r.layout,
        f"{r.times:g}",
        r.argument,
        ", ".join([*marks, *([r.note] if r.note else [])]),
    )


def _align(rows) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=False)).rstrip() for row in rows
    )


def _is_vector(name: str) -> bool:
    return name.startswith("v") or templates.is_vector(
        name
    )  # lower case: an outlined vector function of the 950
