"""On an NVIDIA GPU: the kernel's time from CUDA graphs, and counters from ncu when it is installed."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from wyfast_lib.profile import metrics, ncu, targets
from wyfast_lib.profile.launch import application
from wyfast_lib.profile.report import Row
from wyfast_lib.profile.request import ProfileError, Request

WARM_UP, ROUNDS, SETS = 3, 15, 4
TIMED = "CUDA graph"
COUNTED = "ncu"


def available() -> bool:
    """Does torch see a CUDA device?"""
    import torch

    return torch.cuda.is_available()


def profile(
    requests: Sequence[Request], groups: tuple[str, ...], launches: int, folder: Path
) -> tuple[list[list[Row]], list[str]]:
    """(rows of each variant, notes). The variants' times are taken in turn, round after round.

    A kernel that fits in L2 stays there between the launches of one set of inputs, so several are rotated.
    """
    found = times(requests)
    notes = []
    counters = metrics.of_gpu(groups)
    if not counters:
        notes.append(f"a GPU has no counters for {', '.join(groups)}")
    elif ncu.available() is None:
        notes.append("ncu is not on the PATH: times without counters")
    else:
        for number, request in enumerate(requests):
            try:
                found[number] += count(request, counters, launches, folder / f"ncu-{number}")
            except ProfileError as problem:
                notes.append(f"{request.variant}: {problem}")
    return found, notes


def times(requests: Sequence[Request]) -> list[list[Row]]:
    """The time of each variant, from interleaved replays of one graph each."""
    from wyfast_lib.bench_timing import capture
    from wyfast_lib.records import percentiles

    graphs = []
    for request in requests:
        calls = [targets.call(request, "cuda", seed) for seed in range(SETS)]
        graphs.append(capture(calls, launches=2 * SETS))
    samples: list[list[float]] = [[] for _ in graphs]
    for turn in range(ROUNDS + 1):
        for graph, times in zip(graphs, samples, strict=True):
            us = 1000 * graph.milliseconds()
            if turn:  # the first replay uploads the graph
                times.append(us)
    rows = []
    for times in samples:
        low, middle, high = percentiles(times)
        rows.append([Row("time", middle, "us", "measured", TIMED, low, high)])
    return rows


def count(request: Request, counters: Sequence[str], launches: int, folder: Path) -> list[Row]:
    """ncu's counters of one variant; ProfileError with ncu's last words when it records nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "ncu.csv"
    command = commands(request, counters, launches, folder)
    done = subprocess.run(command, capture_output=True, text=True)
    text = log.read_text() if log.exists() else ""
    try:
        found = ncu.read(text.splitlines())
    except ProfileError:
        found = []
    if not found:
        words = [line for line in f"{text}\n{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
        raise ProfileError(f"ncu recorded nothing (status {done.returncode}): {' | '.join(words[-2:])}")
    return ncu.rows(found, COUNTED)


def commands(request: Request, counters: Sequence[str], launches: int, folder: Path) -> list[str]:
    """ncu's command line for one variant."""
    program = application(request, "cuda", WARM_UP + launches, folder)
    pattern = targets.gpu_name(request)
    return ncu.command(pattern, counters, program, WARM_UP, launches, folder / "ncu.csv")
