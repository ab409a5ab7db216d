"""The csv files of Ascend's profilers: msprof's op_summary_*.csv and torch_npu's kernel_details.csv.

One row is one launch. Older tools write `Block Dim,Mix Block Dim`, newer ones `Block Num,Mix Block Num` and
`Device_id` in front; torch_npu renames the columns of name, type, core and times. Behind these stand the
counters of the one group that was recorded. A cell may be empty or N/A, a start time ends in a tab, and rows
of other engines (DSA_SQE: random numbers) have no counters.

Of the counters: `aicore_time` and `aiv_time` are means over the cores, `*_total_cycles` sums over the blocks,
and the times of the pipes overlap. `cube_utilization(%)` says how long a cube core held the kernel, not how
much it multiplied.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wyfast_lib.profile.report import Row
from wyfast_lib.profile.request import ProfileError
from wyfast_lib.records import percentiles

# what a launch has -> the names that a column of it goes by
COLUMNS = {
    "name": ("Op Name", "Name"),
    "kind": ("OP Type", "Type"),
    "core": ("Task Type", "Accelerator Core"),
    "start": ("Task Start Time(us)", "Start Time(us)"),
    "duration": ("Task Duration(us)", "Duration(us)"),
    "wait": ("Task Wait Time(us)", "Wait Time(us)"),
    "blocks": ("Block Num", "Block Dim"),
    "mix_blocks": ("Mix Block Num", "Mix Block Dim"),
}
REQUIRED = ("name", "core", "start", "duration")
# Columns that are neither a launch's own nor a counter.
OTHERS = ("Device_id", "Model Name", "Model ID", "Task ID", "Stream ID", "Infer ID", "Step Id", "OP State",
          "HF32 Eligible", "Context ID", "Input Shapes", "Input Data Types", "Input Formats",
          "Output Shapes", "Output Data Types", "Output Formats")  # fmt: skip
_UNIT = re.compile(r"(.*?)\((us|GB/s|KB|%)\)$")


@dataclass(frozen=True)
class Launch:
    """One row. Times in microseconds; `counters` by the file's own column names, absent cells left out."""

    name: str
    kind: str
    core: str
    start: float | None
    duration: float | None
    wait: float | None
    blocks: float | None
    mix_blocks: float | None
    counters: dict[str, float] = field(default_factory=dict)


def recognises(header: Sequence[str]) -> bool:
    """Is this the first line of such a file?"""
    return all(any(name in header for name in COLUMNS[each]) for each in REQUIRED)


def read(path: Path) -> list[Launch]:
    """Every launch of a file, by start time; ProfileError names the columns that are missing."""
    with open(path, newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file)
        header = [name.strip() for name in next(rows, [])]
        if not recognises(header):
            missing = [COLUMNS[n][0] for n in REQUIRED if not any(c in header for c in COLUMNS[n])]
            raise ProfileError(f"{path}: no op_summary or kernel_details file, {', '.join(missing)} missing")
        own = {each: next((n for n in names if n in header), None) for each, names in COLUMNS.items()}
        counters = [name for name in header if name not in (*own.values(), *OTHERS)]
        launches = [_launch(dict(zip(header, row, strict=False)), own, counters) for row in rows if row]
    return sorted(launches, key=lambda launch: launch.start or 0.0)


def _launch(cells: dict[str, str], own: dict, counters: list[str]) -> Launch:
    found = {each: cells.get(column, "").strip() for each, column in own.items() if column}
    text = {each: found.get(each, "") for each in ("name", "kind", "core")}
    numbers = {each: _number(found.get(each, "")) for each in COLUMNS if each not in text}
    values = {name: _number(cells.get(name, "")) for name in counters}
    return Launch(**text, **numbers, counters={n: v for n, v in values.items() if v is not None})


def _number(cell: str) -> float | None:
    """A cell's number; None for an empty one, N/A and any other text."""
    try:
        return float(cell.strip())
    except ValueError:
        return None


def of_kernel(launches: Iterable[Launch], kernel: str, skip: int = 0) -> list[Launch]:
    """The launches of one kernel without the first `skip`; ProfileError lists the names when there are none.

    A mixed kernel may have its halves' suffix behind its name.
    """
    launches = list(launches)
    found = [each for each in launches if each.name == kernel]
    found = found or [each for each in launches if each.name.startswith(f"{kernel}_")]
    if not found:
        names = sorted({each.name for each in launches})
        raise ProfileError(f"no launch of {kernel} in the file; it has {', '.join(names) or 'no rows'}")
    if len(found) <= skip:
        raise ProfileError(f"{len(found)} launches of {kernel}, {skip} of them for warm-up: none is left")
    return found[skip:]


def rows(launches: Sequence[Launch], how: str) -> list[Row]:
    """Duration, wait, blocks and every counter of launches of one kernel: median and 20th to 80th percentile.

    A counter that is zero in all of them is left out: that unit was not used.
    """
    columns = {"time": ("us", [each.duration for each in launches]),
               "wait before a launch": ("us", [each.wait for each in launches]),
               "blocks": ("1", [each.blocks for each in launches]),
               "blocks of the vector half": ("1", [each.mix_blocks for each in launches])}  # fmt: skip
    for name in dict.fromkeys(name for each in launches for name in each.counters):
        quantity, unit = unit_of(name)
        columns[quantity] = (unit, [each.counters.get(name) for each in launches])
    found = []
    for quantity, (unit, samples) in columns.items():
        samples = [value for value in samples if value is not None]
        if any(samples):
            low, middle, high = percentiles(samples)
            found.append(Row(quantity, middle, unit, "measured", how, low, high))
    return found


def unit_of(column: str) -> tuple[str, str]:
    """("aiv_time", "us") from "aiv_time(us)"; a ratio has unit "1", cycles "cycles"."""
    if match := _UNIT.match(column):
        return match[1], match[2]
    return column, "cycles" if column.endswith("_cycles") else "1"
