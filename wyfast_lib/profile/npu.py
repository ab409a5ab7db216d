"""On an Ascend NPU: torch_npu.profiler in this process, or msprof around one of its own.

Written by the documented interfaces (torch_npu 2.x, CANN 8 and 9) and never run on hardware; the files that
these tools write are read by `op_summary`, which is tested on their real headers. One group of counters a
run, as the tools demand.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from wyfast_lib.profile import op_summary, targets
from wyfast_lib.profile.launch import application
from wyfast_lib.profile.report import Row
from wyfast_lib.profile.request import ProfileError, Request

WARM_UP = 5
TOOLS = ("torch_npu", "msprof")
HOW = {"torch_npu": "torch_npu.profiler", "msprof": "msprof op_summary"}
UNTESTED = "the code that drives the NPU's profilers has not been run on hardware; its csv readers are tested"


def available() -> bool:
    """Does torch see an NPU? Needs torch_npu to have been imported, or to be importable."""
    import torch

    if importlib.util.find_spec("torch_npu") is None:
        return False
    try:
        import torch_npu  # noqa: F401  makes torch.npu

        return torch.npu.is_available()
    except Exception:  # an installation without CANN
        return False


def profile(
    requests: Sequence[Request], groups: tuple[str, ...], launches: int, folder: Path, tool: str = "torch_npu"
) -> tuple[list[list[Row]], list[str]]:
    """(rows of each variant, notes). Files of the tools stay under `folder`."""
    record = {"torch_npu": with_torch_npu, "msprof": with_msprof}[tool]
    found = []
    for number, request in enumerate(requests):
        rows: dict[tuple, Row] = {}
        for group in groups:
            file = record(request, group, launches, folder / f"{tool}-{number}-{group}")
            skip = WARM_UP if tool == "msprof" else 0
            seen = op_summary.of_kernel(op_summary.read(file), request.name, skip)
            for row in op_summary.rows(seen, HOW[tool]):
                rows.setdefault(row.key, row)  # the time of the first group's run
        found.append(list(rows.values()))
    return found, [UNTESTED]


def with_torch_npu(request: Request, group: str, launches: int, folder: Path) -> Path:
    """Record with torch_npu.profiler -> kernel_details.csv."""
    try:
        import torch
        import torch_npu
    except ImportError as missing:
        raise ProfileError(f"torch_npu.profiler: {missing}; install torch_npu for this CANN") from None
    profiler = torch_npu.profiler
    if not hasattr(profiler.AiCMetrics, group):
        raise ProfileError(f"--metrics: this torch_npu has no group {group}")
    call = targets.call(request, "npu")
    for _ in range(WARM_UP):
        call()
    torch.npu.synchronize()
    settings = profiler._ExperimentalConfig(
        profiler_level=profiler.ProfilerLevel.Level1, aic_metrics=getattr(profiler.AiCMetrics, group)
    )
    with profiler.profile(
        activities=[profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU],
        on_trace_ready=profiler.tensorboard_trace_handler(str(folder)),
        experimental_config=settings,
    ):
        for _ in range(launches):
            call()
        torch.npu.synchronize()
    return newest(folder, "*/ASCEND_PROFILER_OUTPUT/kernel_details.csv")


def with_msprof(request: Request, group: str, launches: int, folder: Path) -> Path:
    """Record with msprof -> op_summary_*.csv."""
    if shutil.which("msprof") is None:
        raise ProfileError("msprof is not on the PATH: source CANN's set_env.sh")
    done = subprocess.run(msprof_command(request, group, launches, folder), capture_output=True, text=True)
    if done.returncode:
        words = [line for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
        raise ProfileError(f"msprof failed (status {done.returncode}): {' | '.join(words[-2:])}")
    return newest(folder, "PROF_*/mindstudio_profiler_output/op_summary_*.csv")


def msprof_command(request: Request, group: str, launches: int, folder: Path) -> list[str]:
    """msprof's command line for one variant and one group of counters."""
    program = application(request, "npu", WARM_UP + launches, folder)
    return ["msprof", f"--output={folder}", "--task-time=on", "--ai-core=on", "--aic-mode=task-based",
            f"--aic-metrics={group}", *program]  # fmt: skip


def newest(folder: Path, pattern: str) -> Path:
    """The file of the last run that matches; ProfileError when the tool wrote none."""
    files = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)
    if not files:
        raise ProfileError(f"the profiler wrote no {pattern} under {folder}")
    return files[-1]
