"""`audit(compiled)`: every data movement of a compiled Ascend kernel, counted a task, beside what it must
move.

The numbers come from two texts of the compiler itself: the HIVM module (which template is called on which
memref, in which loop, at which address) and the template library's bitcode (which hardware instructions
such a call issues). A task is one turn of the kernel's outermost loop with a run-time trip count (a
persistent kernel's loop over chunk and head), or one program where there is no such loop. Without `values`
every tile is a full one.
A mixed kernel's vector half is walked for both of its units: what both load counts twice.

`Audit.unwritten` lists tiles that a call reads and nothing writes. With several workspace buffers in flight
(the default) the 910B compiler drops the vector unit's load of a tile that the cube of a task loop also uses.
The compiler flag `--set-workspace-multibuffer=1` avoids it, and lets it split work that it otherwise leaves
to one vector unit.

What these texts do not reveal:
- time: no latency, bandwidth, cache or bank conflict; waiting is visible only as the flags that cause it;
- the last code generator (CANN's hivmc): scalar instructions, instruction order inside a pipe, register
  use, and which copy of the template library it links (`notes` says where its call differs from the one
  read here);
- L2: two reads of one address are two reads here;
- the bank of a UB address at run time beyond its byte offset, and the alignment of the tensors that the
  caller passes;
- values read from memory (varlen tables) and data-dependent branches: both branches are listed, marked
  `maybe`;
- for the Ascend 950, what a template issues: its library is bitcode that llvmlite cannot open.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from wyfast_lib.ascend import hivm, templates, walk
from wyfast_lib.ascend.audit_report import LOCAL_SPACES, Audit, Row
from wyfast_lib.ascend.audit_rows import NEGATIVE, as_argument, distinct, make_row, negative

__all__ = ["Audit", "Row", "audit"]


def audit(
    compiled, values: dict | None = None, *, minimum: dict | int | None = None, device: bool = True
) -> Audit:
    """Audit a compiled kernel.

    compiled: a `Compiled` (anything with kernel, target, signature, constexprs, hivm). values: run-time
    values by argument name, ints for scalars and sequences of ints for tensors that addresses are read
    from (`cu_seqlens`), and "grid" (a tuple) and "program" (an index into it, 0 when a grid is given) for
    the program to follow; every task of that program is then walked. minimum: bytes that must cross global
    memory a task, by argument name or in all; default: the distinct bytes that the kernel itself touches
    in a task. device: read the template library for what each call issues; False reads the HIVM text only
    (no toolchain needed; bursts then follow from the memrefs). Raises ValueError for a value whose name
    is not an argument, HivmError (a ValueError) for a text that is not a HIVM module.
    """
    module = hivm.parse(compiled.hivm)
    names = _argument_names(module, compiled)
    given, program = _given(names, values or {}, compiled.target)
    walks = _walk_all(module, given, program)
    groups = _group(walks)
    traces = _traces(groups, compiled.target) if device else {}
    rows = [make_row(key, group, traces.get(key), names) for key, group in groups.items()]
    own_minimum, directions = distinct(walks, names)
    unwritten = _unwritten(walks)
    notes = _notes(walks, rows, traces, compiled)
    notes += [f"MISCOMPILED: {text}" for text in unwritten]
    if isinstance(minimum, int):
        minimum = {"all": minimum}
    plan = {
        s: sorted(
            {b for w in walks for b in w.walk.buffers if b.space == s}, key=lambda b: (b.offset, b.line)
        )
        for s in LOCAL_SPACES
    }
    return Audit(
        kernel=compiled.kernel,
        target=compiled.target,
        rows=rows,
        plan=plan,
        peaks={s: max(w.walk.peak(s) for w in walks) for s in LOCAL_SPACES},
        capacity={s: module.spec[f"{s}_SIZE"] // 8 for s in LOCAL_SPACES if f"{s}_SIZE" in module.spec},
        workspace_per_program=module.workspace_bytes,
        tasks=max(w.task_count for w in walks),
        syncs=_syncs(walks),
        minimum=own_minimum if minimum is None else dict(minimum),
        directions=directions,
        notes=notes,
        unwritten=unwritten,
        writing_units=_writing_units(walks),
    )


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
        return (
            1 / self.walk.tasks[event.loop] if event.loop is not None and self.walk.tasks[event.loop] else 1.0
        )

    def once(self, event) -> bool:
        return event.loop is None and bool(self.walk.tasks)


def _argument_names(module: hivm.Module, compiled) -> dict:
    """HIVM argument -> the kernel's parameter name, or "grid x"... for the three that the launcher adds."""
    entry = module.entries[0]
    plain = [name for name, _, attrs in entry.args if "hacc.arg_type" not in attrs]
    parameters = [n for n, kind in compiled.signature.items() if kind != "constexpr"]
    if len(plain) != len(parameters) + 3:
        raise hivm.HivmError(
            f"{compiled.kernel}: {len(plain)} arguments in the HIVM text, expected the kernel's "
            f"{len(parameters)} ({', '.join(parameters)}) and the three of the grid"
        )
    return dict(zip(plain, [*parameters, "grid x", "grid y", "grid z"], strict=False))


def _given(names: dict, values: dict, target: str) -> tuple[dict, int | None]:
    """Values by HIVM argument, and the index of the program to follow."""
    known = set(names.values()) | {"grid", "program"}
    for name in values:
        if name not in known:
            raise ValueError(
                f"values: {name!r} is no run-time argument of this kernel ({', '.join(sorted(known))})"
            )
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
            # The compilers number the programs of a grid differently: x slowest on 910B, fastest on 950.
            slowest_x = (x * grid[1] + y) * grid[2] + z
            program = slowest_x if "910" in target else x + grid[0] * (y + grid[1] * z)
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
                done = walk.Walker(
                    module, entry, arguments=given, program=program, sub_block=unit, task_loops=loops
                ).run()
            walks.append(_Walked(entry.core, done))
    return walks


def _group(walks: list) -> dict:
    """Executions that look alike: (core, line, template, operand shapes...) -> [(weight, event, once)]."""
    groups: dict = defaultdict(list)
    for w in walks:
        for event in w.walk.events:
            shapes = tuple(
                (o.root, o.shape, o.strides, o.dtype, o.space) if isinstance(o, walk.View) else None
                for o in event.operands
            )
            key = (
                w.core,
                event.line,
                event.template,
                shapes,
                event.conditional,
                event.limited,
                w.once(event),
            )
            groups[key].append((w.weight(event), event))
    return dict(groups)


def _traces(groups: dict, target: str) -> dict:
    """A device trace for each group that calls a template of the library, keyed as the groups."""
    found = {}
    for core in ("aic", "aiv"):
        keys = [
            k
            for k in groups
            if k[0] == core
            and not k[2].startswith("scalar_")
            and not groups[k][0][1].vector_ops
            and not negative(groups[k][0][1])
        ]
        calls = [(k[2], [as_argument(o) for o in groups[k][0][1].operands]) for k in keys]
        if calls:
            found.update(zip(keys, templates.trace(calls, target, core), strict=True))
    for key, trace in found.items():
        if trace.truncated:
            raise hivm.HivmError(
                f"{trace.template} on HIVM line {key[1]} issues more instructions than a trace holds: "
                "what was seen of it would be counted as all of it"
            )
    return found


def _writing_units(walks: list) -> int:
    """How many vector units write outside their own UB. On the Ascend 950 a unit that repeats the other's
    work branches around its stores; on 910B they stand under `limit_sub_block_id0`.
    """
    units = {
        event.sub_block
        for w in walks
        if w.core == "aiv"
        for event in w.walk.events
        if any(view.space not in ("UB", "stack") for view in event.written)
    }
    return len(units)


def _unwritten(walks: list) -> list:
    """Buffers that a template reads and that nothing writes, neither its own core nor, at the same address,
    the other: on the Ascend 950 the cube writes its results into UB, and a vector unit its tiles into L1.
    """
    places = {(w.core, v.space, v.base) for w in walks for event in w.walk.events for v in event.written}
    found = {}
    for w in walks:
        written = {view.alloc for event in w.walk.events for view in event.written}
        other = "aiv" if w.core == "aic" else "aic"
        for event in w.walk.events:
            view = event.read
            if view is None or not view.alloc or view.alloc in written:
                continue
            if (other, view.space, view.base) not in places:
                found.setdefault(view.alloc, (w.core, event.template, view))
    return [
        f"{core}: {template} reads a {'x'.join(map(str, view.shape))} {view.dtype} tile in {view.space} "
        f"that nothing writes (buffer of HIVM line {line})"
        for line, (core, template, view) in sorted(found.items())
    ]


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
        notes.append(
            f"loops with a trip count known only at run time counted once (HIVM lines {sorted(inner)})"
        )
    unread = sum((w.walk.unread for w in walks), Counter())
    if unread:
        notes.append("operations not interpreted: " + ", ".join(f"{n} ({c})" for n, c in unread.items()))
    if any(r.maybe for r in rows):
        notes.append(
            "rows marked maybe run under a condition that only run-time data decides; they are counted"
        )
    for r in rows:
        if r.note.startswith(NEGATIVE):
            what = r.note.removeprefix(NEGATIVE)
            notes.append(f"{NEGATIVE}: {r.unit}: {r.template} of {r.argument or r.source}{what}")
    short = sorted({t.template for t in traces.values() if t.missing_arguments})
    if short:
        notes.append(
            "HIVM passes fewer arguments than this library's body takes (traced as 0): " + ", ".join(short)
        )
    failed = defaultdict(set)
    for t in traces.values():
        if t.error:
            failed[t.error].add(t.template)
    notes += [f"not traced ({why}): " + ", ".join(sorted(names)) for why, names in failed.items()]
    return notes
