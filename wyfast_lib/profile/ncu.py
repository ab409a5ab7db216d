"""Nsight Compute: its command line, and the csv it prints (`ncu --csv`, one line a launch and counter)."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wyfast_lib.profile.report import Row
from wyfast_lib.profile.request import ProfileError
from wyfast_lib.records import percentiles

NEEDED = ("ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value")


@dataclass
class Launch:
    """One profiled launch: {counter: (value, unit)}."""

    name: str
    counters: dict[str, tuple[float, str]] = field(default_factory=dict)


def available() -> str | None:
    """The program's path, or None."""
    return shutil.which("ncu")


def command(
    kernel: str, counters: Sequence[str], application: Sequence[str], skip: int, launches: int, log: Path
) -> list[str]:
    """The command line that profiles `launches` launches of kernels named like `kernel` after `skip`.

    Base units, so that a value reads the same whatever its size. No clock control: the counters then belong
    to the clock at which the times are taken.
    """
    return [
        "ncu", "--csv", "--print-units", "base", "--clock-control", "none", "--target-processes", "all",
        "--kernel-name", kernel, "--launch-skip", str(skip), "--launch-count", str(launches),
        "--metrics", ",".join(counters), "--log-file", str(log), *application,
    ]  # fmt: skip


def recognises(header: Sequence[str]) -> bool:
    """Is this the header of such a table?"""
    return all(name in header for name in NEEDED)


def read(lines: Iterable[str]) -> list[Launch]:
    """Every launch in the text of `ncu --csv`; what ncu and the program print before it is skipped.

    A counter that the GPU does not have (empty, n/a) is left out. ProfileError when there is no table.
    """
    table = csv.reader(line for line in lines if not line.startswith("=="))
    header = next((row for row in table if recognises(row)), None)
    if header is None:
        raise ProfileError(f"no table of ncu --csv: no line has {', '.join(NEEDED)}")
    launches: dict[tuple, Launch] = {}
    for row in table:
        if len(row) < len(NEEDED):
            continue
        cells = dict(zip(header, row, strict=False))
        if not cells["ID"].isdigit():
            continue
        launch = launches.setdefault((cells.get("Process ID"), cells["ID"]), Launch(cells["Kernel Name"]))
        value = _number(cells["Metric Value"])
        if cells["Metric Name"] and value is not None:
            launch.counters[cells["Metric Name"]] = value, cells["Metric Unit"] or "1"
    return list(launches.values())


def _number(cell: str) -> float | None:
    """A number with or without thousands separators; None for anything else."""
    try:
        return float(cell.replace(",", ""))
    except ValueError:
        return None


def rows(launches: Sequence[Launch], how: str) -> list[Row]:
    """Every counter: median and 20th to 80th percentile over the launches."""
    units = {name: unit for launch in launches for name, (_, unit) in launch.counters.items()}
    found = []
    for name, unit in units.items():
        samples = [launch.counters[name][0] for launch in launches if name in launch.counters]
        low, middle, high = percentiles(samples)
        found.append(Row(name, middle, unit, "measured", how, low, high))
    return found
