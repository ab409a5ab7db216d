"""From executed template calls to rows of the audit: which pipe, how many bursts, which layout; and which
bytes of global memory are distinct.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from wyfast_lib.ascend import symbols, walk
from wyfast_lib.ascend.audit_report import Row

BLOCK = 32  # bytes that the DMA units move at least


def number(value, default: int) -> int:
    """An int for a value that may be unknown: its upper bound (a full tile), else `default`."""
    if isinstance(value, int):
        return value
    bound = symbols.upper(value) if isinstance(value, symbols.Sym) else None
    return default if bound is None else bound


def as_argument(operand):
    """An operand as `templates.trace` takes it."""
    if isinstance(operand, walk.View):
        sizes = [number(s, 1) for s in operand.shape]
        # A stride that only the caller knows is traced as a whole number of blocks that is not 1.
        strides = [number(s, 64 * max(sizes, default=1)) for s in operand.strides]
        local = operand.space != "GM"
        return {
            "space": operand.space,
            "address": number(operand.base, 0) if local else 0,
            "offset": number(operand.offset, 0) if local else 0,
            "sizes": sizes,
            "strides": strides,
            "bits": operand.bits,
        }
    if isinstance(operand, str):
        return 0  # a float constant: its value changes nothing that is issued
    return number(operand, 0)


NEGATIVE = "NEGATIVE EXTENT"


def negative(event) -> str:
    """What to say of an event that asks for fewer than no elements, "" when it does not.

    The compiled code does not clamp every mask: one with its lower bound past its upper bound reaches the
    template as a negative size.
    """
    for view in event.views:
        if any(isinstance(s, int) and s < 0 for s in view.shape):
            shape = "x".join(str(s) for s in view.shape)
            return f"is asked for {shape} elements (HIVM line {event.line}): not counted, undefined"
    return ""


_PIPES = (
    ("load_gm_to_ubuf", "MTE2"),
    ("nd2nz", "MTE2"),
    ("load_gm_to_cbuf", "MTE2"),
    ("copy_gm_to", "MTE2"),
    ("set_l1", "MTE2"),
    ("store_ubuf_to_gm", "MTE3"),
    ("copy_ubuf_to_cbuf", "MTE3"),
    ("mma_tile", "M"),
    ("fixpipe", "FIX"),
    ("scalar_", "S"),
)


def _pipe(template: str, core: str) -> str:
    for prefix, pipe in _PIPES:
        if template.startswith(prefix):
            return pipe
    return "V" if core == "aiv" else "M"


def make_row(key, group: list, trace, names: dict) -> Row:
    core, line, template, _, conditional, limited, once = key
    event = group[0][1]
    views = event.views
    far = next((v for v in views if v.space == "GM"), None)
    pipe = _pipe(template, core)
    shown = far if far is not None else (views[-1] if views else None)
    if shown is not None and pipe == "V" and far is None:
        shown = max(views, key=lambda v: _count(v))
    direction = ""
    if far is not None:
        direction = "in" if far is event.read else "out"
    local = next((v for v in views if v.space not in ("GM", "stack")), None)
    usable = trace is not None and not trace.error
    below = negative(event)
    size = 0 if below else _count(shown) * shown.bits // 8 if shown is not None else 0
    bursts, moved, layout = _from_memref(far, local) if far is not None and not below else (0, 0, "")
    note = f"{NEGATIVE} {below}" if below else ""
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
        unit=core,
        pipe=pipe,
        template=template,
        source=spaces[0] if spaces else "",
        destination=_destination(template, views),
        shape=_plain(shown, "shape"),
        strides=_plain(shown, "strides"),
        dtype=shown.dtype if shown is not None else "",
        bytes=size,
        moved=moved,
        bursts=bursts,
        layout=layout,
        times=sum(w for w, _ in group),
        argument=argument,
        direction=direction,
        padding=max(paddings, default=1.0),
        scalar=scalar,
        instructions=tuple(instructions.items()),
        repeats=sum(r for _, r in vector),
        macs=trace.macs if usable else 0,
        inner_flags=trace.flags if usable else 0,
        local_bytes=sum(t.bytes for t in trace.transfers if t.pipe == "MTE1") if usable else 0,
        maybe=conditional,
        one_unit=limited,
        once=once,
        line=line,
        note=note,
        arguments=tuple(as_argument(o) for o in event.operands),
    )


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
        total *= number(s, 1)
    return total


def _runs(view) -> int:
    """Elements that lie one after the other, from the innermost dimension outwards."""
    run = 1
    for size, stride in sorted(
        zip(view.shape, view.strides, strict=False), key=lambda p: number(p[1], 1 << 40)
    ):
        size = number(size, 1)
        if size == 1:
            continue
        if stride != run:
            break
        run *= size
    return run


def _inner_run(view) -> int:
    """Elements of a burst when a copy walks the view in its own order: dimensions from the last one."""
    run = 1
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=False):
        size = number(size, 1)
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
    dims = [(number(s, 1), number(t, 1)) for s, t in zip(view.shape, view.strides, strict=False)]
    dims = [(s, t) for s, t in dims if s > 1]
    if not dims:
        return 1.0
    smallest = min(t for _, t in dims)
    return float(smallest) if smallest > 1 else 1.0


# ---- what must move at least ----


def distinct(walks: list, names: dict) -> tuple[dict, dict]:
    """Bytes of each argument that a task touches, each byte once, and in which direction."""
    touched: dict = defaultdict(set)
    ways: dict = defaultdict(set)
    tasks = max(w.task_count for w in walks)
    for w in walks:
        for event in w.walk.events:
            if w.once(event):
                continue
            for view in event.views:
                if view.space != "GM" or view.root not in names or negative(event):
                    continue
                way = "in" if view is event.read else "out"
                ways[view.root].add(way)
                touched[view.root, way] |= set(_intervals(view))
    sizes: Counter = Counter()
    for (root, _), spans in touched.items():
        sizes[names[root]] += _union(spans)
    return (
        {n: round(size / tasks) for n, size in sizes.items()},
        {names[r]: "+".join(sorted(d)) for r, d in ways.items()},
    )


def _intervals(view):
    """(unknown part of the address, first byte, past the last byte) of each contiguous run of a view."""
    address = view.address
    terms, const = (address.terms, address.const) if isinstance(address, symbols.Sym) else ((), address)
    unit = max(1, view.bits // 8)
    run = _inner_run(view)
    outer, left = [], run
    for size, stride in reversed(list(zip(view.shape, view.strides, strict=False))):
        size = number(size, 1)
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
