"""`audit(compiled)`: every data movement of a compiled Ascend kernel, counted a task, beside what it must move.

The numbers come from two texts of the compiler itself: the HIVM module (which template is called on which memref, in
which loop, at which address) and the template library's bitcode (which hardware instructions such a call issues). A
task is one turn of the kernel's outermost loop with a run-time trip count (a persistent kernel's loop over chunk and
head), or one program where there is no such loop. Without `values` every tile is a full one.

What these texts do not reveal:
- time: no latency, bandwidth, cache or bank conflict; waiting is visible only as the flags that cause it;
- the last code generator (CANN's hivmc): scalar instructions, instruction order inside a pipe, register use, and
  which copy of the template library it links (`notes` says where its call differs from the one read here);
- L2: two reads of one address are two reads here;
- the bank of a UB address at run time beyond its byte offset, and the alignment of the tensors that the caller passes;
- values read from memory (varlen tables) and data-dependent branches: both branches are listed, marked `maybe`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from wyfast_lib.ascend import hivm, symbols, templates, walk

BLOCK = 32
LOCAL_SPACES = ("UB", "L1", "L0A", "L0B", "L0C")


@dataclass(frozen=True)
class Row:
    """One call site of a template, with the operands that it moves or computes on, as executed for one task.

    `times`: executions a task, over both vector units. `bytes`: bytes asked for in one execution; `moved`: the same
    in whole 32-byte blocks; `bursts`: DMA bursts of one execution. `layout`: contiguous (one burst), rows (a burst a
    row), discrete (a burst an element), scalar (the scalar unit moves single elements), or "" for computation.
    `padding`: bytes that the local tile spans over bytes that it holds (16 when each bf16 sits in its own block).
    `argument`: the kernel's tensor, "workspace", or "" when the call stays inside the core.
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

    @property
    def discrete(self) -> bool:
        """True when elements travel one by one, by DMA bursts or by the scalar unit."""
        return self.layout in ("discrete", "scalar")

    def to_dict(self) -> dict:
        """The row with plain values, for CSV and JSON."""
        plain = {k: getattr(self, k) for k in self.__dataclass_fields__}
        plain.update(shape="x".join(map(str, self.shape)), strides=",".join(map(str, self.strides)),
                     instructions=" ".join(f"{n}*{c}" for n, c in self.instructions))  # fmt: skip
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

    # ---- totals -----------------------------------------------------------------------------------------------------

    def _sum(self, value, rows=None) -> float:
        return sum(value(r) * r.times for r in (self.rows if rows is None else rows) if not r.once)

    def moves(self) -> list:
        """Rows that touch global memory."""
        return [r for r in self.rows if r.argument]

    def argument_bytes(self, direction: str | None = None, name: str | None = None, moved: bool = False) -> int:
        """Bytes a task between the core and argument tensors; `direction` in/out and `name` restrict it."""
        rows = [r for r in self.moves() if r.argument != "workspace"
                and direction in (None, r.direction) and name in (None, r.argument)]  # fmt: skip
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
    def padded_rows(self) -> list:
        """Calls on local tiles that hold one element in each 32-byte block."""
        return [r for r in self.rows if r.padding >= 2]

    @property
    def one_unit_rows(self) -> list:
        """Global stores that only the first vector unit does."""
        return [r for r in self.moves() if r.one_unit]

    @property
    def split(self) -> bool | None:
        """True when both vector units do different work; False when stores are left to the first one (the second
        repeats its work); None for a kernel without a cube half, whose programs have one vector unit each."""
        if not any(r.unit == "aic" for r in self.rows):
            return None
        return not self.one_unit_rows

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
            "vector_instructions": round(self._sum(lambda r: sum(c for n, c in r.instructions if _is_vector(n)))),
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

    # ---- output -----------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict:
        """Everything with plain values."""
        return {"kernel": self.kernel, "target": self.target, "tasks": self.tasks, "totals": self.totals,
                "minimum": self.minimum, "notes": self.notes,
                "syncs": [{"unit": u, "operation": o, "pipes": p, "times": n} for (u, o, p), n in self.syncs.items()],
                "rows": [r.to_dict() for r in self.rows]}  # fmt: skip

    HEADERS = ("unit", "pipe", "call", "from", "to", "shape", "strides", "bytes", "moved", "bursts", "layout",
               "times", "tensor", "marks")  # fmt: skip

    def table(self, compute: bool = False) -> list:
        """Rows of text for `HEADERS`: movements through global memory, and with `compute` every call."""
        return [_cells(r) for r in self.rows if compute or r.argument]

    def summary(self) -> list:
        """Lines of text with the totals."""
        t = self.totals
        ratio = f" = {t['argument_bytes'] / t['minimum_bytes']:.2f}x the minimum" if t["minimum_bytes"] else ""
        peaks = ", ".join(f"{s} {_kb(self.peaks[s])} of {_kb(self.capacity[s])}" for s in LOCAL_SPACES
                          if self.peaks[s] and s in self.capacity)  # fmt: skip
        split = {None: "one vector unit a program", True: "over both vector units",
                 False: f"NOT split: {len(self.one_unit_rows)} stores by the first vector unit only"}[self.split]
        return [
            f"arguments {_kb(t['argument_bytes'])} ({_kb(t['argument_bytes_in'])} in, "
            f"{_kb(t['argument_bytes_out'])} out){ratio} of {_kb(t['minimum_bytes'])}; workspace "
            f"{_kb(t['workspace_bytes'])}; together {_kb(t['global_bytes'])} a task, {t['bursts']} bursts",
            f"discrete {t['discrete_calls']:g} calls; scalar unit {t['scalar_elements']} elements; padded "
            f"{t['padded_calls']:g} calls",
            f"vector {t['vector_calls']:g} calls, {t['vector_instructions']} instructions, {t['vector_repeats']} "
            f"repeats; cube {t['cube_calls']:g} calls, {t['macs']} MACs; synchronisation "
            f"{t['sync_instructions']:g} and {t['flags_inside_templates']} inside templates",
            f"memory plan: {peaks}; work {split}",
            *[f"note: {n}" for n in self.notes],
        ]

    def __str__(self) -> str:
        return f"{self.kernel} for {self.target}, a task:\n" + _align([self.HEADERS, *self.table()]) + "\n" + "\n".join(
            self.summary()
        )

    def _repr_html_(self) -> str:
        from html import escape

        head = "".join(f"<th>{h}</th>" for h in self.HEADERS)
        body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in self.table())
        lines = "<br>".join(escape(line) for line in self.summary())
        return (f"<table><caption>{escape(self.kernel)} for {escape(self.target)}, a task</caption>"
                f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{lines}</p>")  # fmt: skip


def _kb(n: float) -> str:
    return f"{n / 1024:.1f} KB" if n >= 1024 else f"{n:g} B"


def _cells(r: Row) -> tuple:
    marks = [m for m, on in (("maybe", r.maybe), ("unit 0 only", r.one_unit), ("once", r.once),
                             (f"padded {r.padding:g}x", r.padding >= 2),
                             (f"{r.scalar} by scalar", r.scalar and r.layout != "scalar")) if on]  # fmt: skip
    return (r.unit, r.pipe, r.template, r.source, r.destination, "x".join(map(str, r.shape)),
            ",".join(map(str, r.strides)), str(r.bytes), str(r.moved), str(r.bursts), r.layout, f"{r.times:g}",
            r.argument, ", ".join([*marks, *([r.note] if r.note else [])]))  # fmt: skip


def _align(rows) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows)


def _is_vector(name: str) -> bool:
    return bool(templates._VECTOR.match(name)) and not name.startswith(templates._NOT_VECTOR)


# ---- making it --------------------------------------------------------------------------------------------------


def audit(compiled, values: dict | None = None, *, minimum: dict | int | None = None, device: bool = True) -> Audit:
    """Audit a compiled kernel.

    compiled: a `Compiled` (anything with kernel, target, signature, constexprs, hivm). values: run-time values by
    argument name, ints for scalars and sequences of ints for tensors that addresses are read from (`cu_seqlens`), and
    "grid" (a tuple) and "program" (an index into it, 0 when a grid is given) for the program to follow; every task of
    that program is then walked. minimum: bytes that must cross global memory a task, by argument name or in all;
    default: the distinct bytes that the kernel itself touches in a task. device: read the template library for what
    each call issues; False reads the HIVM text only (no toolchain needed; bursts then follow from the memrefs).
    Raises KeyError for a value whose name is not an argument, HivmError for a text that is not a HIVM module.
    """
    module = hivm.parse(compiled.hivm)
    names = _argument_names(module, compiled)
    given, program = _given(module, names, values or {})
    walks = _walk_all(module, given, program)
    groups = _group(walks)
    traces = _traces(groups, compiled.target) if device else {}
    rows = [_row(key, group, traces.get(key), names) for key, group in groups.items()]
    own_minimum, directions = _distinct(walks, names)
    notes = _notes(walks, rows, traces, compiled)
    if isinstance(minimum, int):
        minimum = {"all": minimum}
    plan = {s: sorted({b for w in walks for b in w.walk.buffers if b.space == s}, key=lambda b: (b.offset, b.line))
            for s in LOCAL_SPACES}  # fmt: skip
    return Audit(
        kernel=compiled.kernel, target=compiled.target, rows=rows, plan=plan,
        peaks={s: max(w.walk.peak(s) for w in walks) for s in LOCAL_SPACES},
        capacity={s: module.spec[f"{s}_SIZE"] // 8 for s in LOCAL_SPACES if f"{s}_SIZE" in module.spec},
        workspace_per_program=module.workspace_bytes, tasks=max(w.task_count for w in walks), syncs=_syncs(walks),
        minimum=own_minimum if minimum is None else dict(minimum), directions=directions, notes=notes,
    )  # fmt: skip


@dataclass
class _Walked:
    """A walk of one half of the kernel on one unit, with the number of tasks that it did."""

    core: str
    walk: walk.Walk

    @property
    def task_count(self) -> int:
        return max(self.walk.tasks.values(), default=1)

    def weight(self, event) -> float:
        """What one execution counts a task."""
        return 1 / self.walk.tasks[event.loop] if event.loop is not None and self.walk.tasks[event.loop] else 1.0

    def once(self, event) -> bool:
        return event.loop is None and bool(self.walk.tasks)


def _argument_names(module: hivm.Module, compiled) -> dict:
    """HIVM argument -> the kernel's parameter name, or "grid x"... for the three that the launcher adds."""
    entry = module.entries[0]
    plain = [name for name, _, attrs in entry.args if "hacc.arg_type" not in attrs]
    parameters = [n for n, kind in compiled.signature.items() if kind != "constexpr"]
    if len(plain) != len(parameters) + 3:
        raise hivm.HivmError(f"{compiled.kernel}: {len(plain)} arguments in the HIVM text, expected the kernel's "
                             f"{len(parameters)} ({', '.join(parameters)}) and the three of the grid")  # fmt: skip
    return dict(zip(plain, [*parameters, "grid x", "grid y", "grid z"]))


def _given(module, names: dict, values: dict) -> tuple[dict, int | None]:
    known = set(names.values()) | {"grid", "program"}
    for name in values:
        if name not in known:
            raise KeyError(f"values: {name!r} is no run-time argument of this kernel ({', '.join(sorted(known))})")
    values = dict(values)
    grid = values.pop("grid", None)
    program = values.pop("program", None)
    given = {h: values[n] for h, n in names.items() if n in values}
    if grid is not None:
        grid = (grid,) if isinstance(grid, int) else tuple(grid)
        grid = (*grid, *(1,) * (3 - len(grid)))
        given.update({h: grid["xyz".index(n[-1])] for h, n in names.items() if n.startswith("grid ")})
        program = 0 if program is None else program
        if not isinstance(program, int):
            x, y, z = (*program, *(0,) * (3 - len(program)))
            program = (x * grid[1] + y) * grid[2] + z
    return given, program


def _walk_all(module, given: dict, program: int | None) -> list:
    """Walk each entry on each of its units. A first walk without values finds the task loop of each entry."""
    walks = []
    for entry in module.entries:
        free = walk.Walker(module, entry).run()
        loops = frozenset(free.tasks)
        for unit in range(module.vector_units if entry.core == "aiv" else 1):
            done = free
            if given or program is not None or unit:
                done = walk.Walker(module, entry, arguments=given, program=program, sub_block=unit,
                                   task_loops=loops).run()  # fmt: skip
            walks.append(_Walked(entry.core, done))
    return walks


def _group(walks: list) -> dict:
    """Executions that look alike: (core, line, template, operand shapes...) -> [(weight, event, once)]."""
    groups: dict = defaultdict(list)
    for w in walks:
        for event in w.walk.events:
            shapes = tuple((o.root, o.shape, o.strides, o.dtype, o.space) if isinstance(o, walk.View) else None
                           for o in event.operands)  # fmt: skip
            key = (w.core, event.line, event.template, shapes, event.conditional, event.limited, w.once(event))
            groups[key].append((w.weight(event), event))
    return dict(groups)


def _traces(groups: dict, target: str) -> dict:
    """A device trace for each group that calls a template of the library, keyed as the groups."""
    found = {}
    for core in ("aic", "aiv"):
        keys = [k for k in groups if k[0] == core and not k[2].startswith("scalar_") and not groups[k][0][1].vector_ops]
        calls = [(k[2], [_as_argument(o) for o in groups[k][0][1].operands]) for k in keys]
        if calls:
            found.update(zip(keys, templates.trace(calls, target, core)))
    return found


def _number(value, default: int) -> int:
    """An int for a value that may be unknown: its upper bound (a full tile), else `default`."""
    if isinstance(value, int):
        return value
    bound = symbols.upper(value) if isinstance(value, symbols.Sym) else None
    return default if bound is None else bound


def _as_argument(operand):
    if isinstance(operand, walk.View):
        sizes = [_number(s, 1) for s in operand.shape]
        # A stride that only the caller knows is traced as a whole number of blocks that is not 1.
        strides = [_number(s, 64 * max(sizes, default=1)) for s in operand.strides]
        local = operand.space != "GM"
        return {"space": operand.space, "address": _number(operand.base, 0) if local else 0,
                "offset": _number(operand.offset, 0) if local else 0, "sizes": sizes, "strides": strides,
                "bits": operand.bits}  # fmt: skip
    if isinstance(operand, str):
        return 0  # a float constant: its value changes nothing that is issued
    return _number(operand, 0)


_PIPES = (("load_gm_to_ubuf", "MTE2"), ("nd2nz", "MTE2"), ("load_gm_to_cbuf", "MTE2"), ("copy_gm_to", "MTE2"),
          ("set_l1", "MTE2"), ("store_ubuf_to_gm", "MTE3"), ("copy_ubuf_to_cbuf", "MTE3"), ("mma_tile", "M"),
          ("fixpipe", "FIX"), ("scalar_", "S"))  # fmt: skip


def _pipe(template: str, core: str) -> str:
    for prefix, pipe in _PIPES:
        if template.startswith(prefix):
            return pipe
    return "V" if core == "aiv" else "M"


def _row(key, group: list, trace, names: dict) -> Row:
    core, line, template, _, conditional, limited, once = key
    event = group[0][1]
    views = [o for o in event.operands if isinstance(o, walk.View)]
    far = next((v for v in views if v.space == "GM"), None)
    pipe = _pipe(template, core)
    shown = far if far is not None else (views[-1] if views else None)
    if shown is not None and pipe == "V" and far is None:
        shown = max(views, key=lambda v: _count(v))
    direction = ""
    if far is not None:
        out = template.startswith(("store", "fixpipe", "scalar_store")) or views[0] is not far
        direction = "out" if out else "in"
    local = next((v for v in views if v.space not in ("GM", "stack")), None)
    usable = trace is not None and not trace.error
    size = _count(shown) * shown.bits // 8 if shown is not None else 0
    bursts, moved, layout = _from_memref(far, local) if far is not None else (0, 0, "")
    note = ""
    scalar = int(far is not None and template.startswith("scalar_"))
    if usable:
        scalar = trace.scalar_accesses // 2 if far is not None else trace.scalar_accesses
        if far is not None:
            bursts, moved, layout = _from_trace(trace, pipe, far, size)
    elif trace is not None and trace.error:
        note = trace.error
    instructions = Counter()
    for name, _, times in trace.instructions if usable else ():
        instructions[name] += times
    instructions.update(dict(event.vector_ops))
    vector = trace.vector if usable else []
    argument = ""
    if far is not None:
        argument = names.get(far.root, far.root)
    paddings = [_padding(v) for v in views if v.space == "UB"]
    spaces = [v.space for v in views]
    return Row(
        unit=core, pipe=pipe, template=template,
        source=spaces[0] if spaces else "", destination=_destination(template, views), shape=_plain(shown, "shape"),
        strides=_plain(shown, "strides"), dtype=shown.dtype if shown is not None else "", bytes=size, moved=moved,
        bursts=bursts, layout=layout, times=sum(w for w, _ in group), argument=argument, direction=direction,
        padding=max(paddings, default=1.0), scalar=scalar, instructions=tuple(instructions.items()),
        repeats=sum(r for _, r in vector), macs=trace.macs if usable else 0,
        inner_flags=trace.flags if usable else 0,
        local_bytes=sum(t.bytes for t in trace.transfers if t.pipe == "MTE1") if usable else 0,
        maybe=conditional, one_unit=limited, once=once, line=line, note=note,
    )  # fmt: skip


def _destination(template: str, views: list) -> str:
    if not views:
        return ""
    if len(views) == 1:
        return views[0].space
    gm = [v.space for v in views if v.space == "GM"]
    return views[1].space if gm else views[-1].space


def _plain(view, what: str) -> tuple:
    if view is None:
        return ()
    return tuple(x if isinstance(x, int) else "?" for x in getattr(view, what))


def _count(view) -> int:
    total = 1
    for s in view.shape:
        total *= _number(s, 1)
    return total


def _runs(view) -> int:
    """Elements that lie one after the other, from the innermost dimension outwards."""
    run = 1
    for size, stride in sorted(zip(view.shape, view.strides), key=lambda p: _number(p[1], 1 << 40)):
        size = _number(size, 1)
        if size == 1:
            continue
        if stride != run:
            break
        run *= size
    return run


def _inner_run(view) -> int:
    """Elements of a burst when a copy walks the view in its own order: dimensions from the last one."""
    run = 1
    for size, stride in zip(reversed(view.shape), reversed(view.strides)):
        size = _number(size, 1)
        if size == 1:
            continue
        if stride != run:
            break
        run *= size
    return run


def _from_memref(far, local) -> tuple[int, int, str]:
    """Bursts, bytes in blocks and layout when no device trace says better."""
    count = _count(far)
    if not count:
        return 0, 0, ""
    run = _inner_run(far)
    if local is not None and local.space == "UB" and len(local.shape) == len(far.shape):
        run = min(run, _inner_run(local))
    bursts = -(-count // run)
    moved = bursts * (-(-run * far.bits // 8 // BLOCK) * BLOCK)
    return bursts, moved, _layout(bursts, run, count)


def _layout(bursts: int, run: int, count: int) -> str:
    if bursts <= 1:
        return "contiguous"
    return "discrete" if run == 1 and count > 1 else "rows"


def _from_trace(trace, pipe: str, far, size: int) -> tuple[int, int, str]:
    """Bursts, bytes in blocks and layout from the DMA instructions that the template issues."""
    transfers = [t for t in trace.transfers if t.pipe == pipe]
    if not transfers:
        count = _count(far)
        return (0, count * BLOCK, "scalar") if trace.scalar_accesses and count else (0, 0, "")
    bursts = sum(t.bursts for t in transfers)
    moved = sum(t.moved for t in transfers)
    longest = max(t.burst_bytes for t in transfers)
    element = max(1, far.bits // 8)
    if bursts > 1 and longest <= element:
        layout = "discrete"
    else:
        layout = "contiguous" if bursts <= 1 or _runs(far) == _count(far) else "rows"
    return bursts, moved, layout


def _padding(view) -> float:
    """Bytes spanned over bytes held, for a tile in UB whose elements stand apart; 1 for dense rows."""
    dims = [(_number(s, 1), _number(t, 1)) for s, t in zip(view.shape, view.strides)]
    dims = [(s, t) for s, t in dims if s > 1]
    if not dims:
        return 1.0
    smallest = min(t for _, t in dims)
    return float(smallest) if smallest > 1 else 1.0


# ---- what must move at least ------------------------------------------------------------------------------------


def _distinct(walks: list, names: dict) -> tuple[dict, dict]:
    """Bytes of each argument that a task touches, each byte once, and in which direction."""
    touched: dict = defaultdict(set)
    ways: dict = defaultdict(set)
    tasks = max(w.task_count for w in walks)
    for w in walks:
        for event in w.walk.events:
            if w.once(event):
                continue
            for i, view in enumerate(event.operands):
                if not isinstance(view, walk.View) or view.space != "GM" or view.root not in names:
                    continue
                out = event.template.startswith(("store", "fixpipe", "scalar_store")) or i > 0
                ways[view.root].add("out" if out else "in")
                touched[view.root, "out" if out else "in"] |= set(_intervals(view))
    sizes: Counter = Counter()
    for (root, _), spans in touched.items():
        sizes[names[root]] += _union(spans)
    return ({n: round(size / tasks) for n, size in sizes.items()},
            {names[r]: "+".join(sorted(d)) for r, d in ways.items()})  # fmt: skip


def _intervals(view):
    """(unknown part of the address, first byte, past the last byte) of each contiguous run of a view."""
    address = view.address
    terms, const = (address.terms, address.const) if isinstance(address, symbols.Sym) else ((), address)
    unit = max(1, view.bits // 8)
    run = _inner_run(view)
    outer, left = [], run
    for size, stride in reversed(list(zip(view.shape, view.strides))):
        size = _number(size, 1)
        if left > 1 and size > 1 and left % size == 0:
            left //= size
            continue
        if size > 1:
            outer.append((size, stride))
    starts = [(terms, const)]
    for size, stride in outer:
        if isinstance(stride, int):
            starts = [(t, c + i * stride * unit) for t, c in starts for i in range(size)]
        else:
            starts = [((t, stride, i), c) for t, c in starts for i in range(size)]
    return [(t, c, c + run * unit) for t, c in starts]


def _union(spans) -> int:
    by_terms: dict = defaultdict(list)
    for terms, start, stop in spans:
        by_terms[terms].append((start, stop))
    total = 0
    for pieces in by_terms.values():
        end = None
        for start, stop in sorted(pieces):
            if end is None or start > end:
                total += stop - start
                end = stop
            elif stop > end:
                total += stop - end
                end = stop
    return total


def _syncs(walks: list) -> Counter:
    counts: Counter = Counter()
    for w in walks:
        for (core, operation, pipes, loop), n in w.walk.syncs.items():
            if loop is None and w.walk.tasks:
                continue
            counts[core, operation, pipes] += n / (w.walk.tasks[loop] if loop is not None else 1)
    return counts


def _notes(walks: list, rows: list, traces: dict, compiled) -> list:
    notes = [f"compiler: {n}" for n in getattr(compiled, "notes", [])]
    inner = {line for w in walks for line in w.walk.dynamic_loops if line not in w.walk.tasks}
    if inner:
        notes.append(f"loops with a trip count known only at run time counted once (HIVM lines {sorted(inner)})")
    unread = sum((w.walk.unread for w in walks), Counter())
    if unread:
        notes.append("operations not interpreted: " + ", ".join(f"{n} ({c})" for n, c in unread.items()))
    if any(r.maybe for r in rows):
        notes.append("rows marked maybe run under a condition that only run-time data decides; they are counted")
    short = sorted({t.template for t in traces.values() if t.missing_arguments})
    if short:
        notes.append("HIVM passes fewer arguments than this library's body takes (traced as 0): " + ", ".join(short))
    failed = defaultdict(set)
    for t in traces.values():
        if t.error:
            failed[t.error].add(t.template)
    notes += [f"not traced ({why}): " + ", ".join(sorted(names)) for why, names in failed.items()]
    return notes
