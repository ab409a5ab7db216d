"""Walk a HIVM function as the device would, with integers that may be unknown, and record what it does.

Every operation on integers and memrefs is evaluated (`symbols.py` holds what is not known); loops whose
trip count is known run that often, a clamped tile counts as a full tile, and a loop over tasks whose count
is not known runs once. Recorded are the calls of library templates with their memrefs, scalar accesses of
global memory, and synchronisation. Sizes, offsets and trip counts are exact for the arguments given, and
for a full tile where none are.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace

from wyfast_lib.ascend import symbols as sym
from wyfast_lib.ascend.hivm import (
    ELEMENT_BITS,
    Block,
    Function,
    HivmError,
    MemrefType,
    Module,
    Op,
    parse_memref,
    row_major,
    split_list,
)

MAX_STEPS = 2_000_000  # operations; a walk longer than this is a request for too many tasks


@dataclass(frozen=True)
class View:
    """A memref: `root` names its memory, `base` its start there in bytes, the rest is in elements.

    `sizes` may hold unknowns; `full` holds the sizes of a full tile (None where even that is unknown).
    """

    root: str  # "arg3", "workspace", or a memory space of the core
    space: str
    dtype: str
    base: object
    offset: object
    sizes: tuple
    full: tuple
    strides: tuple
    alloc: int = 0  # line of the `pointer_cast` that made the buffer, 0 for global memory

    @property
    def address(self):
        """First byte, relative to `root`."""
        if self.bits % 8 == 0:
            return sym.add(self.base, sym.mul(self.offset, self.bits // 8))
        return sym.add(self.base, sym.binary("floordiv", sym.mul(self.offset, self.bits), 8))

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return ELEMENT_BITS[self.dtype]

    @property
    def shape(self) -> tuple:
        """Sizes with every unknown one replaced by its full-tile value (kept unknown when there is none)."""
        return tuple(
            s if isinstance(s, int) else (s if f is None else f)
            for s, f in zip(self.sizes, self.full, strict=False)
        )


@dataclass(frozen=True)
class Buffer:
    """One entry of the memory plan: `bytes` at byte `offset` of `space`, seen as shape x dtype, written on
    `line`.
    """

    space: str
    offset: int
    bytes: int
    shape: tuple
    dtype: str
    line: int


@dataclass(frozen=True)
class Event:
    """A template call (or scalar access) that was executed once, in the state that it was executed in."""

    line: int
    core: str  # aic or aiv
    sub_block: int  # which vector unit; 0 on the cube
    template: str
    operands: tuple
    conditional: bool  # under a condition that nothing here decides
    limited: bool  # under `limit_sub_block_id0`: one vector unit only
    loop: int | None  # line of the task loop that it runs in
    vector_ops: tuple = ()  # (name, count) of vector instructions of an outlined vector function

    @property
    def views(self) -> list[View]:
        """The operands that are memrefs."""
        return [operand for operand in self.operands if isinstance(operand, View)]

    @property
    def read(self) -> View | None:
        """The memref that is read and not written: the first of several, or a scalar load's. None for an
        outlined vector function, which may write whatever it gets.
        """
        several = len(self.views) > 1 and not self.vector_ops
        return self.views[0] if several or self.template == "scalar_load" else None

    @property
    def written(self) -> list[View]:
        """The memrefs that may be written: all but `read`."""
        read = self.read
        return [view for view in self.views if view is not read]


@dataclass
class Walk:
    """What one program did. `tasks` counts the tasks by task loop (line -> number); without such a loop it is
    {}.
    """

    events: list = field(default_factory=list)
    syncs: Counter = field(default_factory=Counter)  # (core, operation, pipes, loop) -> count
    buffers: list = field(default_factory=list)
    tasks: Counter = field(default_factory=Counter)
    dynamic_loops: list = field(default_factory=list)  # lines of loops that ran once for want of a trip count
    unread: Counter = field(default_factory=Counter)  # operations that this walk does not interpret
    skipped_tails: int = 0  # calls that only a partial tile makes

    def peak(self, space: str) -> int:
        """Highest byte of `space` in the memory plan."""
        return max((b.offset + b.bytes for b in self.buffers if b.space == space), default=0)


class Walker:
    """Executes one function of a module for one program and one vector unit."""

    def __init__(
        self,
        module: Module,
        function: Function,
        *,
        arguments=None,
        program=None,
        sub_block=0,
        task_loops=frozenset(),
    ):
        """`arguments`: HIVM argument name (`%arg5`) -> int, float or sequence of ints (memory that scalars
        are read from). `program`: index of this program in the grid, or None when unknown.
        """
        self.module, self.function = module, function
        self.arguments = dict(arguments or {})
        self.program, self.sub_block = program, sub_block
        self.task_loops = task_loops
        self.env: dict = {}
        self.out = Walk()
        self.stack: dict = {}
        self.steps = 0
        self.conditional = self.limited = 0
        self.loop: int | None = None
        self.around: int | None = None  # line of the innermost scf.for that we are inside of
        self.inner: Counter = Counter()  # pipelined loops right inside the current task-loop turn -> trips
        self.counters: dict = {}  # line of a loop without a known trip count -> its number
        self.vector_function: Counter | None = None
        self.vector_functions: dict = {}  # (name, operands without their addresses) -> what a call issues
        self.stride_unknown = 0

    def run(self) -> Walk:
        """Walk the function from its first operation."""
        for name, type_text, attrs in self.function.args:
            self.env[name] = self._argument(name, type_text, attrs)
        self._region(self.function.blocks)
        return self.out

    def _argument(self, name, type_text, attrs):
        memref = parse_memref(type_text)
        if memref is None:
            given = self.arguments.get(name)
            return given if given is not None else sym.unknown(name)
        root = "workspace" if "<workspace>" in attrs else ("lock" if "<sync_block_lock>" in attrs else name)
        return View(root, memref.space, memref.dtype, 0, 0, (sym.unknown(f"size of {name}"),), (None,), (1,))

    # ---- control flow
    # -------------------------------------------------------------------------------------------

    def _region(self, blocks: list):
        """Run blocks from the first one; returns the values of the yield that ends it."""
        if len(blocks) == 1:
            return self._straight(blocks[0])
        graph = _Graph(blocks)
        return self._branches(graph, blocks[0], None)

    def _straight(self, block: Block):
        for op in block.ops:
            if op.name in ("return", "func.return", "llvm.return"):
                return []
            if op.name == "scf.yield":
                return [self.value(v) for v in split_list(op.text.split(" : ")[0])]
            if op.name == "scf.condition":
                return [self.value(v) for v in re.findall(r"%[\w#-]+", op.text.split(" : ")[0])]
            self.step(op)
        return []

    def _branches(self, graph: _Graph, block: Block, stop: str | None):
        """Run a control-flow graph until it returns or reaches block `stop`."""
        active: dict = {}  # header label -> (loop before, tasks counted) of loops that we are inside of
        while block.label != stop:
            last = block.ops[-1]
            self._straight(Block(block.label, [], block.ops[:-1]))
            if last.name in ("cf.br", "llvm.br"):
                block = self._jump(graph, last.text)
            elif last.name in ("cf.cond_br", "llvm.cond_br"):
                block = self._cond_branch(graph, block, last, active)
            else:
                return []
        return []

    def _jump(self, graph, target: str) -> Block:
        label, args = _target(target)
        block = graph.by_label[label]
        values = [self.value(a) for a in args]
        self.env.update(zip(block.args, values, strict=False))
        return block

    def _cond_branch(self, graph, block, op, active) -> Block:
        parts = split_list(op.text.split(" {")[0])
        condition, targets = self.decided(self.value(parts[0])), parts[1:3]
        if block.label in graph.headers:
            inside = [_target(t)[0] in graph.headers[block.label] for t in targets]
            enter, leave = (0, 1) if inside[0] else (1, 0)
            known = isinstance(condition, int)
            if known:
                go = 0 if condition else 1
            else:
                go = leave if block.label in active else enter
            if go == enter:
                if block.label not in active:
                    active[block.label] = self.loop
                    self._enter_loop(op.line, known)
                if self.loop == op.line:
                    self.out.tasks[op.line] += 1
            elif block.label in active:
                self.loop = active.pop(block.label)
            return self._jump(graph, targets[go])
        if isinstance(condition, int):
            return self._jump(graph, targets[0 if condition else 1])
        join = graph.join(block.label)
        self.conditional += 1
        for target in targets:
            if _target(target)[0] != join:
                self._branches(graph, self._jump(graph, target), join)
            else:
                self._jump(graph, target)
        self.conditional -= 1
        if join is None:
            return Block("", [], [Op([], "return", "", op.line)])
        return graph.by_label[join]

    def _enter_loop(self, line: int, known: bool):
        if not known:
            self.out.dynamic_loops.append(line)
        if self.loop is None and (line in self.task_loops or not known):
            self.loop = line

    def op_scf_for(self, op: Op):
        """scf.for, with or without iter_args."""
        match = re.match(
            r"(%[\w-]+) = (\S+) to (\S+) step (\S+?)(?: iter_args\((.*?)\) -> .*?)?\s*(?:: \w+)?$", op.text
        )
        if not match:
            raise HivmError(f"line {op.line}: scf.for not understood: {op.text[:120]}")
        variable, low, high, step, carried = match.groups()
        names, values = [], []
        for item in split_list(carried or ""):
            name, start = item.split(" = ")
            names.append(name.strip())
            values.append(self.value(start.strip()))
        low, high, step = self.value(low), self.value(high), self.value(step)
        trips = _trips(low, high, step)
        before, outer_inner, around = self.loop, self.inner, self.around
        # The compiler pipelines a loop by cutting it in two: a longer step, and an inner loop over the step.
        # Only the task loop's own inner loop counts tasks; one deeper down is a kernel's loop inside a task.
        if "multibuffer_unroll_factor" in op.attrs and trips is not None and around == before is not None:
            self.inner[op.line] += trips
        self._enter_loop(op.line, trips is not None)
        self.around = op.line
        is_task_loop = self.loop == op.line and before is None
        for n in range(1 if trips is None else trips):
            if is_task_loop:
                self.inner = Counter()
            at = sym.add(low, sym.mul(n, step)) if trips is not None else self._turn(op.line)
            self.env[variable] = at
            self.env.update(zip(names, values, strict=False))
            values = self._region(op.regions[0]) or values
            if is_task_loop:
                self.out.tasks[op.line] += max(self.inner.values(), default=1)
        self.loop, self.inner, self.around = before, outer_inner, around
        self.bind(op, values)

    def op_scf_if(self, op: Op):
        """scf.if: the branch that runs, or both, marked conditional, when nothing decides it."""
        condition = self.value(re.match(r"(%[\w#-]+)", op.text).group(1))
        decided = self.decided(condition)
        self.limited += "limit_sub_block_id0" in op.attrs
        if isinstance(decided, int):
            taken = op.regions[0] if decided else (op.regions[1] if len(op.regions) > 1 else None)
            self.bind(op, self._region(taken) if taken else [])
        elif "unlikely_condition" in op.attrs:
            self.out.skipped_tails += sum("call" in o.name for b in op.regions[0] for o in b.ops)
            self.bind(op, [])
        else:
            self.conditional += 1
            results = [self._region(region) for region in op.regions]
            self.conditional -= 1
            self.bind(op, results[0] if results else [])
        self.limited -= "limit_sub_block_id0" in op.attrs

    def _turn(self, line: int):
        """The unknown counter of a loop, named by the loop's place among its kind: the cube and the vector
        half of a kernel walk the same tasks, and an address that both read must be one address.
        """
        number = self.counters.setdefault(line, len(self.counters))
        return sym.unknown(f"turn{number}")

    def op_scf_while(self, op: Op):
        """scf.while: run once; its trip count is not worked out."""
        self.out.dynamic_loops.append(op.line)
        results = []
        for region in op.regions:
            results = self._region(region)
        self.bind(op, results)

    def decided(self, condition):
        """A condition as 0 or 1 where constants or full tiles decide it."""
        if isinstance(condition, int):
            return 1 if condition else 0
        if isinstance(condition, sym.Sym) and len(condition.terms) == 1 and condition.const == 0:
            unknown = condition.terms[0][0]
            if unknown.op.startswith("cmp "):
                a, b = (sym.upper(o) if sym.upper(o) is not None else o for o in unknown.operands)
                return sym.compare(unknown.op[4:], a, b)
        return None

    # ---- values
    # -------------------------------------------------------------------------------------------------

    def value(self, text: str):
        """The value of an operand: a name or a literal."""
        text = text.strip()
        if text in self.env:
            return self.env[text]
        if re.fullmatch(r"-?\d+", text):
            return int(text)
        if text.startswith("%"):
            return sym.unknown(text)
        return text

    def bind(self, op: Op, values):
        """Give the results of `op` their values; results without one become unknowns."""
        names = []
        for name in op.results:
            base, _, many = name.partition(":")
            names += [f"{base}#{i}" for i in range(int(many))] if many else [name]
        values = list(values)
        for i, name in enumerate(names):
            self.env[name] = values[i] if i < len(values) else sym.unknown(f"{name}@{op.line}")

    def step(self, op: Op):
        """Execute one operation."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise HivmError(f"walk of {self.function.name} exceeds {MAX_STEPS} operations: give fewer tasks")
        handler = _HANDLERS.get(op.name)
        if handler is not None:
            try:
                handler(self, op)
            except HivmError:
                raise
            except (AttributeError, KeyError, IndexError, TypeError, ValueError) as problem:
                # A form of an operation that was not met before: what follows from it would be guesswork.
                where = f"{self.function.name}, HIVM line {op.line}"
                raise HivmError(f"{where}: cannot follow {op.name} ({problem}): {op.text}") from problem
        elif op.name.startswith("hivm_regbaseintrins"):
            if self.vector_function is not None:
                self.vector_function[op.name.removeprefix("hivm_regbaseintrins.intr.hivm.")] += 1
            self.bind(op, [])
        elif op.results and _makes_memref(op):
            # Passed over, every access through this buffer would be missing from the counts.
            where = f"{self.function.name}, HIVM line {op.line}"
            raise HivmError(f"{where}: {op.name} makes a buffer and is not known: {op.text}")
        else:
            if not op.name.startswith(
                ("hivm.hir.set_mask", "hivm.hir.set_ctrl", "hivm.hir.set_ffts", "llvm.")
            ):
                self.out.unread[op.name] += 1
            self.bind(op, [])

    def op_constant(self, op: Op):
        """arith.constant and llvm.mlir.constant; a float stays text."""
        text = op.text.split(" : ")[0].strip().lstrip("(").split(" {")[0]
        text = text.rstrip(")") if op.name.startswith("llvm") else text
        number = {"true": 1, "false": 0}.get(text)
        if number is None:
            number = int(text) if re.fullmatch(r"-?\d+", text) else text
        self.bind(op, [number])

    def op_same(self, op: Op):
        """Casts between integer types: the value as it is. A cast to i1 keeps its lowest bit."""
        value = self.value(re.match(r"\S+", op.text).group(0).rstrip(","))
        if isinstance(value, int) and re.search(r"to i1$", op.text):
            value &= 1
        self.bind(op, [value])

    def op_binary(self, op: Op):
        """Two-operand integer arithmetic."""
        kind = _BINARY[op.name]
        a, b = (self.value(x) for x in re.findall(r"%[\w#-]+|-?\d+", op.text.split(" : ")[0])[:2])
        if not all(isinstance(x, (int, sym.Sym)) for x in (a, b)):
            return self.bind(op, [])
        made = {"add": sym.add, "sub": sym.sub, "mul": sym.mul, "min": sym.minimum, "max": sym.maximum}
        self.bind(op, [made[kind](a, b) if kind in made else sym.binary(kind, a, b)])

    def op_compare(self, op: Op):
        """arith.cmpi and llvm.icmp."""
        predicate = re.search(r"\b(eq|ne|[su][lg][te])\b", op.text).group(1)
        a, b = (self.value(x) for x in re.findall(r"%[\w#-]+", op.text.split(" : ")[0])[:2])
        if not all(isinstance(x, (int, sym.Sym)) for x in (a, b)):
            return self.bind(op, [])
        decided = sym.compare(predicate, a, b)
        self.bind(op, [decided if decided is not None else sym.unknown(f"cmp {predicate}", a, b)])

    def op_select(self, op: Op):
        """select; an undecided choice between two buffers of a double buffer takes the second."""
        condition, a, b = (self.value(x) for x in re.findall(r"%[\w#-]+", op.text.split(" : ")[0])[:3])
        if isinstance(condition, int):
            return self.bind(op, [a if condition else b])
        if isinstance(b, View) or a == b:
            return self.bind(op, [b])
        if isinstance(a, (int, sym.Sym)) and isinstance(b, (int, sym.Sym)):
            return self.bind(op, [sym.unknown("select", condition, a, b)])
        self.bind(op, [])

    def op_affine(self, op: Op):
        """affine.apply, affine.min, affine.max."""
        match = re.match(r"(#\w+)\(([^)]*)\)(?:\[([^\]]*)\])?", op.text)
        table = self.module.maps[match.group(1)]
        names = table.dims + table.symbols
        given = [self.value(v) for v in split_list(match.group(2)) + split_list(match.group(3) or "")]
        values = [_affine(r, dict(zip(names, given, strict=False))) for r in table.results]
        pick = {"affine.min": sym.minimum, "affine.max": sym.maximum}.get(op.name, lambda x: x)
        self.bind(op, [pick(*values)])

    def op_block_idx(self, op: Op):
        """The index of this program in the grid."""
        self.bind(op, [self.program if self.program is not None else sym.unknown("program")])

    def op_sub_block_idx(self, op: Op):
        """Which of the two vector units this is."""
        self.bind(op, [self.sub_block])

    # ---- memrefs
    # ------------------------------------------------------------------------------------------------

    def op_pointer_cast(self, op: Op):
        """A buffer at a fixed address: an entry of the memory plan."""
        operands, type_text = re.match(r"\((.*?)\)(?: \[.*?\])? : (.*)$", op.text).groups()
        memref = parse_memref(type_text)
        bits = ELEMENT_BITS[memref.dtype]
        count = 1
        for s in memref.shape:
            count = sym.mul(count, s if s is not None else sym.unknown(f"size@{op.line}"))
        size = -(-count * bits // 8) if isinstance(count, int) else 0
        first = None
        for offset in (self.value(o) for o in split_list(operands)):
            if isinstance(offset, int):
                self.out.buffers.append(
                    Buffer(memref.space, offset, size, memref.shape, memref.dtype, op.line)
                )
            first = offset if first is None else first
        self.bind(op, [replace(_view(memref.space, memref, first), alloc=op.line)])

    def op_view(self, op: Op):
        """memref.view: bytes of the workspace seen as a typed array."""
        source, offset, type_text = re.match(
            r"(%[\w#-]+)\[(.*?)\]\[.*?\] : .* to (memref<.*>)$", op.text
        ).groups()
        source = self.value(source)
        view = _view(source.space, parse_memref(type_text), sym.add(source.address, self.value(offset)))
        self.bind(op, [replace(view, root=source.root)])

    def op_reinterpret_cast(self, op: Op):
        """memref.reinterpret_cast: a new offset, sizes and strides on the same base."""
        match = re.match(
            r"(%[\w#-]+) to offset: \[(.*?)\], sizes: \[(.*?)\], strides: \[(.*?)\] : .* to (memref<.*>)$",
            op.text,
        )
        source = self.value(match.group(1))
        offset, sizes, strides = ([self.value(v) for v in split_list(match.group(i))] for i in (2, 3, 4))
        memref = parse_memref(match.group(5))
        full = tuple(_full(s, None) for s in sizes)
        view = replace(source, offset=offset[0], sizes=tuple(sizes), full=full, strides=tuple(strides))
        self.bind(op, [replace(view, dtype=memref.dtype)])

    def op_subview(self, op: Op):
        """memref.subview, dropping unit dimensions where the result type has fewer."""
        match = re.match(r"(%[\w#-]+)\[(.*?)\] \[(.*?)\] \[(.*?)\] : .* to (memref<.*>)$", op.text)
        source = self.value(match.group(1))
        offsets, sizes, steps = ([self.value(v) for v in split_list(match.group(i))] for i in (2, 3, 4))
        offset = source.offset
        for o, stride in zip(offsets, source.strides, strict=False):
            offset = sym.add(offset, sym.mul(o, stride))
        strides = [sym.mul(a, b) for a, b in zip(source.strides, steps, strict=False)]
        full = [_full(s, f) for s, f in zip(sizes, source.full, strict=False)]
        kept = _kept_dims(sizes, parse_memref(match.group(5)))
        pick = lambda xs: tuple(xs[i] for i in kept)  # noqa: E731
        self.bind(
            op, [replace(source, offset=offset, sizes=pick(sizes), full=pick(full), strides=pick(strides))]
        )

    def op_collapse_shape(self, op: Op):
        """memref.collapse_shape: the innermost dimension of each group that is not 1 gives the stride."""
        source, groups = re.match(r"(%[\w#-]+) (\[.*?\]) : ", op.text).groups()
        source = self.value(source)
        sizes, full, strides = [], [], []
        for group in _groups(groups):
            size, whole = 1, 1
            for i in group:
                size = sym.mul(size, source.sizes[i])
                whole = None if (whole is None or source.full[i] is None) else whole * source.full[i]
            inner = [i for i in group if source.sizes[i] != 1] or group
            sizes.append(size)
            full.append(whole)
            strides.append(source.strides[inner[-1]])
        self.bind(op, [replace(source, sizes=tuple(sizes), full=tuple(full), strides=tuple(strides))])

    def op_expand_shape(self, op: Op):
        """memref.expand_shape."""
        source, groups, shape = re.match(r"(%[\w#-]+) (\[.*\]) output_shape \[(.*?)\] : ", op.text).groups()
        source = self.value(source)
        shape = [self.value(s) for s in split_list(shape)]
        strides: list = [None] * len(shape)
        for i, group in enumerate(_groups(groups)):
            step = source.strides[i]
            for j in reversed(group):
                strides[j] = step
                step = sym.mul(step, shape[j])
        full = tuple(_full(s, None) for s in shape)
        self.bind(op, [replace(source, sizes=tuple(shape), full=full, strides=tuple(strides))])

    def op_transpose(self, op: Op):
        """memref.transpose."""
        source, order = re.match(r"(%[\w#-]+) \(.*?\) -> \((.*?)\)", op.text).groups()
        source = self.value(source)
        order = [int(d.strip()[1:]) for d in order.split(",")]
        pick = lambda xs: tuple(xs[i] for i in order)  # noqa: E731
        self.bind(
            op,
            [replace(source, sizes=pick(source.sizes), full=pick(source.full), strides=pick(source.strides))],
        )

    def op_metadata(self, op: Op):
        """memref.extract_strided_metadata: the bare buffer, then offset, sizes, strides."""
        source = self.value(re.match(r"(%[\w#-]+)", op.text).group(1))
        bare = replace(source, offset=0, sizes=(), full=(), strides=())
        self.bind(op, [bare, source.offset, *source.sizes, *source.strides])

    def op_bitcast(self, op: Op):
        """hivm.hir.bitcast: the same elements read as another type of the same width."""
        source, result = re.match(r"(%[\w#-]+) : .* -> (memref<.*>)$", op.text).groups()
        self.bind(op, [replace(self.value(source), dtype=parse_memref(result).dtype)])

    def op_alloca(self, op: Op):
        """memref.alloca: a few integers on the scalar unit's stack."""
        memref = parse_memref(op.text[op.text.index("memref<") :])
        self.bind(op, [replace(_view("stack", memref, 0), root=f"stack{op.line}")])

    def op_load(self, op: Op):
        """memref.load: a scalar, from the given arguments where they hold it."""
        source, index = re.match(r"(%[\w#-]+)\[(.*?)\]", op.text).groups()
        view, at = self.value(source), self._element(self.value(source), index)
        if view.space == "stack":
            return self.bind(op, [self.stack.get((view.root, at), sym.unknown(f"stack {view.root}"))])
        self._record(op, "scalar_load", (replace(view, offset=at, sizes=(1,), full=(1,), strides=(1,)),))
        memory = self.arguments.get(view.root)
        if memory is not None and isinstance(at, int):
            return self.bind(op, [int(memory[at])])
        self.bind(op, [sym.unknown("load", sym.unknown(view.root), at)])

    def op_store(self, op: Op):
        """memref.store of a scalar."""
        value, target, index = re.match(r"(%[\w#-]+), (%[\w#-]+)\[(.*?)\]", op.text).groups()
        view, at = self.value(target), self._element(self.value(target), index)
        if view.space == "stack":
            self.stack[(view.root, at)] = self.value(value)
            return
        self._record(op, "scalar_store", (replace(view, offset=at, sizes=(1,), full=(1,), strides=(1,)),))

    def _element(self, view: View, index: str):
        at = view.offset
        for i, stride in zip((self.value(v) for v in split_list(index)), view.strides, strict=False):
            at = sym.add(at, sym.mul(i, stride))
        return at

    # ---- what is recorded
    # ---------------------------------------------------------------------------------------

    def _record(self, op: Op, template: str, operands: tuple, vector_ops: tuple = ()):
        self.out.events.append(
            Event(
                op.line,
                self.function.core,
                self.sub_block,
                template,
                operands,
                self.conditional > 0,
                self.limited > 0,
                self.loop,
                vector_ops,
            )
        )

    def op_call(self, op: Op):
        """A template call, or a call of an outlined vector function of this module, which is walked too."""
        name, operands = re.match(r"@([\w$.]+)\((.*?)\)", op.text).groups()
        values = tuple(self.value(v) for v in split_list(operands))
        callee = self.module.functions.get(name)
        if callee is None:
            self._record(op, name, values)
            return self.bind(op, [])
        key = name, tuple(replace(v, base=0, offset=0) if isinstance(v, View) else v for v in values)
        if key not in self.vector_functions:
            self.vector_functions[key] = self._vector_function(callee, values)
        instructions, unread = self.vector_functions[key]
        self.out.unread.update(unread)
        self._record(op, name, values, tuple(sorted(instructions.items())))
        self.bind(op, [])

    def _vector_function(self, callee: Function, values: tuple) -> tuple[Counter, Counter]:
        """What an outlined vector function issues for such operands, and what was not interpreted in it."""
        inner = Walker(self.module, callee, program=self.program, sub_block=self.sub_block)
        inner.vector_function = Counter()
        inner.env.update(zip((a[0] for a in callee.args), values, strict=False))
        inner._region(callee.blocks)
        return inner.vector_function, inner.out.unread

    def op_sync(self, op: Op):
        """set_flag, wait_flag, pipe_barrier, sync_block_set and sync_block_wait."""
        pipes = ">".join(re.findall(r"<(?:PIPE_)?(\w+)>", op.text.split("]")[0])[:2])
        self.out.syncs[(self.function.core, op.name.removeprefix("hivm.hir."), pipes, self.loop)] += 1
        self.bind(op, [])


def _makes_memref(op: Op) -> bool:
    """Is the type of the operation's result, the last one in its text, a buffer?"""
    last = re.split(r"->|\bto\b| : ", op.text)[-1]
    return last.strip().startswith("memref<")


def _view(root: str, memref: MemrefType, base) -> View:
    sizes = tuple(s if s is not None else sym.unknown(f"size {root}") for s in memref.shape)
    strides = memref.strides if None not in memref.strides else row_major(memref.shape)
    return View(
        root, memref.space, memref.dtype, base, 0, sizes, tuple(_full(s, None) for s in sizes), strides
    )


def _full(size, of_source):
    """Full-tile value of a size: itself, else the bound that its clamp gives, else the size of what it is cut
    from.
    """
    if isinstance(size, int):
        return size
    bound = sym.upper(size)
    if bound is None or (of_source is not None and of_source < bound):
        return of_source
    return bound


def _kept_dims(sizes, result: MemrefType) -> list:
    """Which dimensions of a subview its (possibly rank-reduced) result type keeps."""
    drop = len(sizes) - len(result.shape)
    kept = []
    for i, size in enumerate(sizes):
        at = len(kept)
        fits = at < len(result.shape) and (result.shape[at] == size or result.shape[at] is None)
        if drop and size == 1 and not (fits and result.shape[at] == 1):
            drop -= 1
            continue
        kept.append(i)
    while drop and len(kept) > len(result.shape):
        kept.remove(next(i for i in kept if sizes[i] == 1))
    return kept


def _groups(text: str) -> list:
    return [[int(d) for d in re.findall(r"\d+", g)] for g in re.findall(r"\[([\d, ]+)\]", text)]


def _trips(low, high, step) -> int | None:
    """Trip count, with a clamped upper bound at its full value; None when not known."""
    span = sym.sub(high, low)
    span = span if isinstance(span, int) else sym.upper(span)
    if span is None or not isinstance(step, int) or step <= 0:
        return None
    return max(0, -(-span // step))


def _affine(tree, names: dict):
    if isinstance(tree, int):
        return tree
    if isinstance(tree, str):
        return names[tree]
    op, left, right = tree
    left, right = _affine(left, names), _affine(right, names)
    made = {"+": sym.add, "-": sym.sub, "*": sym.mul}
    return made[op](left, right) if op in made else sym.binary(op, left, right)


def _target(text: str) -> tuple[str, list]:
    """`^bb1(%a, %b : i32, i32)` -> ("bb1", ["%a", "%b"])."""
    match = re.match(r"\^(\w+)(?:\((.*)\))?", text.strip())
    inner = match.group(2)
    return match.group(1), split_list(inner.split(" : ")[0]) if inner else []


class _Graph:
    """Control-flow graph of a region: loop headers with their bodies, and where two branches join."""

    def __init__(self, blocks: list):
        self.by_label = {b.label: b for b in blocks}
        self.order = [b.label for b in blocks]
        self.next = {b.label: re.findall(r"\^(\w+)", b.ops[-1].text) for b in blocks}
        self.headers: dict = {}
        for label in self.order:
            for target in self.next[label]:
                if self.order.index(target) <= self.order.index(label):
                    self.headers.setdefault(target, {target}).update(self._body(target, label))
        self.passed = self._passed()

    def _body(self, header: str, tail: str) -> set:
        before = {t: [s for s in self.order if t in self.next[s]] for t in self.order}
        body, todo = {header}, [tail]
        while todo:
            label = todo.pop()
            if label not in body:
                body.add(label)
                todo += before[label]
        return body

    def _passed(self) -> dict[str, set]:
        """The blocks that every way from a block to the end passes (its post-dominators), itself included."""
        everything = set(self.order)
        passed = {b: everything if self.next[b] else {b} for b in self.order}
        changed = True
        while changed:
            changed = False
            for label in reversed(self.order):
                after = [passed[t] for t in self.next[label]]
                now = {label} | set.intersection(*after) if after else {label}
                changed |= now != passed[label]
                passed[label] = now
        return passed

    def join(self, label: str) -> str | None:
        """The first block that both branches of `label` must pass, None when they part for good."""
        later = self.passed[label] - {label}
        return max(later, key=lambda block: len(self.passed[block])) if later else None


_BINARY = {}
for _prefix in ("arith", "llvm"):
    for _name, _kind in {
        "addi": "add",
        "subi": "sub",
        "muli": "mul",
        "add": "add",
        "sub": "sub",
        "mul": "mul",
        "divsi": "divsi",
        "divui": "divsi",
        "sdiv": "divsi",
        "udiv": "divsi",
        "remsi": "remsi",
        "remui": "remsi",
        "srem": "remsi",
        "urem": "remsi",
        "floordivsi": "floordiv",
        "ceildivsi": "ceildiv",
        "minsi": "min",
        "maxsi": "max",
        "minui": "min",
        "maxui": "max",
        "intr.smin": "min",
        "intr.smax": "max",
        "intr.umin": "min",
        "intr.umax": "max",
        "andi": "andi",
        "ori": "ori",
        "xori": "xori",
        "and": "andi",
        "or": "ori",
        "xor": "xori",
        "shli": "shli",
        "shrsi": "shrsi",
        "shl": "shli",
        "ashr": "shrsi",
    }.items():
        _BINARY[f"{_prefix}.{_name}"] = _kind

_HANDLERS = {
    "scf.for": Walker.op_scf_for,
    "scf.if": Walker.op_scf_if,
    "scf.while": Walker.op_scf_while,
    "arith.constant": Walker.op_constant,
    "llvm.mlir.constant": Walker.op_constant,
    "arith.cmpi": Walker.op_compare,
    "llvm.icmp": Walker.op_compare,
    "arith.select": Walker.op_select,
    "llvm.select": Walker.op_select,
    "affine.apply": Walker.op_affine,
    "affine.min": Walker.op_affine,
    "affine.max": Walker.op_affine,
    "hivm.hir.get_block_idx": Walker.op_block_idx,
    "hivm.hir.get_sub_block_idx": Walker.op_sub_block_idx,
    "hivm.hir.pointer_cast": Walker.op_pointer_cast,
    "memref.view": Walker.op_view,
    "memref.cast": Walker.op_same,
    "memref.memory_space_cast": Walker.op_same,
    "memref.reinterpret_cast": Walker.op_reinterpret_cast,
    "memref.subview": Walker.op_subview,
    "memref.collapse_shape": Walker.op_collapse_shape,
    "memref.expand_shape": Walker.op_expand_shape,
    "memref.transpose": Walker.op_transpose,
    "memref.extract_strided_metadata": Walker.op_metadata,
    "hivm.hir.bitcast": Walker.op_bitcast,
    "memref.alloca": Walker.op_alloca,
    "memref.load": Walker.op_load,
    "memref.store": Walker.op_store,
    "func.call": Walker.op_call,
    "call": Walker.op_call,
    **{name: Walker.op_binary for name in _BINARY},
    **{f"arith.{c}": Walker.op_same for c in ("index_cast", "index_castui", "trunci", "extsi", "extui")},
    **{f"llvm.{c}": Walker.op_same for c in ("trunc", "sext", "zext")},
    "builtin.unrealized_conversion_cast": Walker.op_same,
    **{
        f"hivm.hir.{s}": Walker.op_sync
        for s in ("set_flag", "wait_flag", "pipe_barrier", "sync_block_set", "sync_block_wait")
    },
}
