"""What the compiled code says without a device: the one adapter between a report and the Ascend model.

`model` is the place where a timeline of the compiled kernel is connected: its time, busy shares and critical
path become rows of source `modelled` in `timeline_rows`. Until there is one, rows are counts alone and the
report says so; a time is never made up from counts.
"""

from __future__ import annotations

from wyfast_lib.profile.report import Row
from wyfast_lib.profile.request import Request

COUNTS = {  # total of the audit -> (name in the report, unit)
    "argument_bytes": ("argument bytes a task", "B"),
    "workspace_bytes": ("workspace bytes a task", "B"),
    "bursts": ("DMA bursts a task", "1"),
    "discrete_calls": ("element-by-element transfers a task", "1"),
    "padded_calls": ("calls on padded tiles a task", "1"),
    "scalar_elements": ("elements moved by the scalar unit a task", "1"),
    "vector_instructions": ("vector instructions a task", "1"),
    "vector_repeats": ("vector repeats a task", "1"),
    "macs": ("cube MACs a task", "1"),
    "sync_instructions": ("synchronisations a task", "1"),
    "ub_peak": ("UB peak", "B"),
}
COUNTED = "count in the compiled code"
NO_TIME = "no modelled time: this installation has no timeline; counts only"


def profile(request: Request, case) -> tuple[list[Row], list[str]]:
    """(rows, notes) of one variant; raises what the compiler raises."""
    compiled = case.compile(request.target)
    notes = [f"{request.variant}: the compiler: {text}" for text in compiled.warnings]
    rows = model(compiled, case.args, case.grid)
    if not any(row.unit == "us" for row in rows):
        notes.append(NO_TIME)
    return rows, notes


def model(compiled, args: dict, grid: tuple[int, ...]) -> list[Row]:
    """Every modelled row of one launch: the timeline's, then the counts."""
    return [*timeline_rows(compiled, args, grid), *count_rows(compiled)]


def timeline_rows(compiled, args: dict, grid: tuple[int, ...]) -> list[Row]:
    """Time of the launch with its range, busy share a pipe; [] without a timeline."""
    return []


def count_rows(compiled) -> list[Row]:
    """What a task moves, computes and waits for, read off the compiler's output."""
    from wyfast_lib.ascend import audit

    totals = audit(compiled).totals
    how = f"{COUNTED} for {compiled.target}"
    return [Row(name, float(totals[key]), unit, "modelled", how) for key, (name, unit) in COUNTS.items()]
