"""What the Ascend compiler says about our kernels and the peer's, as rows for data/ascend_compile.csv.

Nothing is timed: a row is a count read off the compiler's output, a chunk and head (a group's divided by its
heads).
"""

from __future__ import annotations

import importlib.metadata
import sys
from dataclasses import replace

from wyfast_lib.ascend import launches, peer, production, toolchain

SHAPE = "H{H}_Hg{Hg}_K{width}_V{width}_BT{chunk}"
COUNTS = {
    "argument_bytes": "B", "scratch_bytes": "B", "workspace_bytes": "B", "global_bytes": "B", "ub_peak": "B",
    "bursts": "1", "sync_instructions": "1", "discrete_calls": "1", "retries": "1",
}  # fmt: skip


def records(target: str = "Ascend910B2", command: str | None = None) -> list:
    """Rows of all production cases at K = V = 128, of each strided layout, and of the peer's wy_fast in
    bfloat16, for one target.
    """
    from wyfast_lib.records import provenance

    from_here = provenance(command) | {
        "device": f"{target} (compiler only)",
        "triton": ", ".join(" ".join(pin) for pin in compilers()),
    }
    rows = []
    kernels = tuple(production.NAMES)
    for case in [*production.cases(kernels, (target,), widths=(128,)), *strided_cases(target)]:
        print(case, file=sys.stderr)
        rows += [replace(row, **from_here) for row in own(case)]
    return rows + [replace(row, **from_here) for row in beside(target)]


def compilers() -> list[tuple[str, str]]:
    """(package, version) of the compiler's two parts, as installed in the toolchain."""
    path = [str(toolchain.locate())]
    found = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions(path=path)}
    return [(name, found[name]) for name in ("triton-ascend", "ascendnpu-ir")]


def strided_cases(target: str) -> list[production.Case]:
    """Each gate of each kernel stored [B, T, H], one flag at a time."""
    gates = {"forward": ("g", "beta"), "backward": ("g", "beta", "dg", "db"), "dv_local": ("g",)}
    return [
        production.Case(kernel, target, strided=(gate,))
        for kernel, name in production.NAMES.items()
        for gate in gates[name]
    ]


def own(case: production.Case) -> list:
    """Rows of one of our kernels."""
    counts = production.count(case, production.build(case))
    H, Hg = production.HEADS[case.heads]
    name = production.NAMES[case.kernel]
    note = " ".join(["varlen" if case.varlen else "dense", *(f"strided {gate}" for gate in case.strided)])
    shape = SHAPE.format(H=H, Hg=Hg, width=case.width, chunk=case.chunk)
    counts = {"scratch_bytes": 0, **counts}
    if not case.strided:
        kernels, host = launches.own(case)
        counts |= {"kernel_launches": kernels, "host_launches": host}
    op, phase = ("chunk_bwd_dv_local", "backward") if name == "dv_local" else ("wy_fast", name)
    return _rows("wyfast", op, phase, shape, case.dtype, note, counts)


def beside(target: str) -> list:
    """Rows of the peer's wy_fast, its kernels summed: bfloat16, MHA, contiguous gates."""
    table = peer.peer_table(target, layouts=(True,))
    rows = []
    for phase in ("forward", "backward"):
        sums = table.sums(phase, "contiguous")
        each = [row for row in table.rows if row.stage == phase]
        kernels, host = launches.beside(phase)
        assert kernels == len(each) and not sums["failed"]
        counts = {
            "argument_bytes": sums["arguments"], "scratch_bytes": sums["scratch"],
            "workspace_bytes": sums["workspace"], "global_bytes": sums["total"],
            "ub_peak": max(row.ub_peak for row in each), "bursts": sum(row.bursts for row in each),
            "sync_instructions": sum(row.sync for row in each),
            "discrete_calls": sum(row.discrete for row in each), "retries": sum(row.retries for row in each),
            "kernel_launches": kernels, "host_launches": host,
        }  # fmt: skip
        shape = SHAPE.format(H=32, Hg=32, width=128, chunk=64)
        rows += _rows(f"fla-core {peer.VERSION}", "wy_fast", phase, shape, "bfloat16", "dense", counts)
    return rows


def _rows(provider, op, phase, shape, dtype, note, counts) -> list:
    from wyfast_lib.records import Record

    units = COUNTS | {"kernel_launches": "1", "host_launches": "1"}
    return [
        Record("ascend_compile", provider, op, phase, shape, dtype, metric, unit,
               *[float(counts[metric])] * 3, "none", note)  # fmt: skip
        for metric, unit in units.items()
        if metric in counts
    ]
