"""Measured rows with their provenance, kept as CSV under data/.

A row says what was measured (provider, operation, pass, shape, dtype, metric), the value (20th, 50th and 80th
percentile), whether the correctness gate of that row was green, and where it comes from (device, driver,
torch, triton,
commit, date, command). Nothing here is model output: a row is a measurement, or it is not written.
"""

from __future__ import annotations

import csv
import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Record:
    """One measured quantity.

    `suite` names the experiment, `provider` who computed it, `op` the operator, `phase` forward | backward |
    both,
    `shape` a name such as "B1_T8192_H32_Hg32_K128_V128_BT64", `unit` the unit of p20, p50, p80. `gate` is
    "pass" when the
    result of this provider met the tolerance on these inputs, "fail" when not, "none" where nothing can be
    compared
    (a plain copy). The provenance fields are filled by `provenance()`.
    """

    suite: str
    provider: str
    op: str
    phase: str
    shape: str
    dtype: str
    metric: str
    unit: str
    p20: float
    p50: float
    p80: float
    gate: str
    note: str = ""
    device: str = ""
    driver: str = ""
    torch: str = ""
    triton: str = ""
    commit: str = ""
    date: str = ""
    command: str = ""


COLUMNS = tuple(f.name for f in fields(Record))
PROVENANCE = ("device", "driver", "torch", "triton", "commit", "date", "command")
_NUMBERS = ("p20", "p50", "p80")


def percentiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """20th, 50th and 80th percentile of `samples` by linear interpolation. ValueError for an empty
    sequence."""
    if not samples:
        raise ValueError("percentiles: no samples")
    ordered = sorted(samples)

    def at(q: float) -> float:
        x = q * (len(ordered) - 1)
        low = int(x)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (x - low)

    return at(0.2), at(0.5), at(0.8)


def provenance(command: str | None = None, device: str | None = None) -> dict[str, str]:
    """Where a measurement comes from, as the provenance columns of a Record.

    `command`: the command line, this process's own by default. `device`: "cuda" takes the current CUDA
    device,
    anything else (or None) the host processor. The commit is WYFAST_COMMIT when set (for a copy of the tree
    without
    its git history), else `git rev-parse` with "+dirty" for a changed tree, else "unknown".
    """
    import torch

    name, driver = _host_name(), "-"
    if device is not None and device.startswith("cuda") and torch.cuda.is_available():
        name, driver = torch.cuda.get_device_name(device), _driver()
    return {
        "device": name,
        "driver": driver,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "command": command if command is not None else command_line(),
    }


def read(path: str | os.PathLike[str]) -> list[Record]:
    """All records of a CSV file. ValueError names the columns that are missing or unknown."""
    with open(path, newline="", encoding="utf-8") as f:
        reader = csv.DictReader(f)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path}: columns {reader.fieldnames}, expected {list(COLUMNS)}")
        return [Record(**{k: float(v) if k in _NUMBERS else v for k, v in row.items()}) for row in reader]


def write(path: str | os.PathLike[str], records: Iterable[Record], append: bool = False) -> None:
    """Writes records to a CSV file, replacing it unless `append`; the header is written once."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not append or not path.exists()
    with open(path, "w" if fresh else "a", newline="", encoding="utf-8") as f:
        out = csv.DictWriter(f, COLUMNS, lineterminator="\n")
        if fresh:
            out.writeheader()
        for record in records:
            row = asdict(record)
            out.writerow({k: f"{v:.6g}" if k in _NUMBERS else v for k, v in row.items()})


def command_line() -> str:
    """This process's command, without the directories of interpreter and script."""
    argv = list(getattr(sys, "orig_argv", sys.argv)) or ["python"]
    argv = [Path(a).name if i == 0 or os.path.isabs(a) else a for i, a in enumerate(argv)]
    return shlex.join(argv)


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


def _commit() -> str:
    if os.environ.get("WYFAST_COMMIT"):
        return os.environ["WYFAST_COMMIT"]
    here = Path(__file__).resolve().parent
    head = _output(["git", "-C", str(here), "rev-parse", "--short=12", "HEAD"])
    if head is None:
        return "unknown"
    return head + ("+dirty" if _output(["git", "-C", str(here), "status", "--porcelain"]) else "")


def _driver() -> str:
    out = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return out.splitlines()[0].strip() if out else "-"


def _host_name() -> str:
    """Model name of the host's processor and its number of cores that this process may use."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            model = next((x.split(":", 1)[1].strip() for x in f if x.startswith("model name")), model)
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model} x{cores}"


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
