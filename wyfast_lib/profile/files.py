"""Files that a profiler wrote on another machine: which tool's they are, and their rows."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from wyfast_lib.profile import ncu, op_summary
from wyfast_lib.profile.report import Row
from wyfast_lib.profile.request import ProfileError


def rows(names: Sequence[str], kernel: str) -> list[Row]:
    """The rows of one variant from one file a group of counters; a quantity in two files is the first's."""
    found: dict[tuple, Row] = {}
    for name in names:
        path = Path(name.strip())
        if not path.is_file():
            raise ProfileError(f"--csv: there is no file {path}")
        for row in _rows(path, kernel):
            found.setdefault((row.quantity, row.unit), row)
    return list(found.values())


def _rows(path: Path, kernel: str) -> list[Row]:
    with open(path, newline="", encoding="utf-8-sig") as file:
        header = [name.strip() for name in next(csv.reader(file), [])]
    if op_summary.recognises(header):
        tool = "msprof op_summary" if "Op Name" in header else "torch_npu.profiler"
        return op_summary.rows(op_summary.of_kernel(op_summary.read(path), kernel), tool)
    try:
        launches = ncu.read(path.read_text(encoding="utf-8-sig").splitlines())
    except ProfileError:
        raise ProfileError(
            f"--csv: {path} is no op_summary_*.csv of msprof, no kernel_details.csv of torch_npu and no "
            "output of ncu --csv"
        ) from None
    stem = kernel.removesuffix("_kernel")
    chosen = [launch for launch in launches if stem in launch.name]
    if not chosen:
        raise ProfileError(f"--csv: {path} has no launch of {kernel}; it has "
                           f"{', '.join(sorted({launch.name for launch in launches}))}")  # fmt: skip
    return ncu.rows(chosen, "ncu")
