"""The measuring itself: correctness gate, interleaved times, CUDA graphs, memory, and the copy as floor."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

GATE_TOKENS = 256  # tokens at each end of a row that are compared with the reference
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}  # larger than any cache


def gate(case, phase: str, results: tuple, allowed: float = 0.0) -> tuple[bool, float]:
    """(within tolerance, worst error ratio over its tolerance) of one pass against the float64 closed form.

    The tolerance is the looser of the dtypes' own and `allowed`. Compared are the first and last chunks of
    every row; a NaN anywhere fails.
    """
    from wyfast_lib.reference import wy_adjoint_reference, wy_fast_reference
    from wyfast_lib.testing import TOLERANCE, error_ratio

    T, BT = case.shape.T, case.shape.BT
    last = max(0, T - GATE_TOKENS) // BT * BT
    spans = [slice(0, min(T, GATE_TOKENS)), slice(last, T)]
    worst = 0.0
    for span in spans:
        k, v, beta, A, g = (x[:, span].cpu() for x in case.inputs)
        if phase == "forward":
            expected = wy_fast_reference(k, v, beta, A, g)
        else:
            expected = wy_adjoint_reference(k, v, beta, A, g, case.dw[:, span].cpu(), case.du[:, span].cpu())
        for x, reference in zip(results, expected, strict=True):
            limit = max(TOLERANCE[x.dtype], TOLERANCE[case.k.dtype], allowed)
            worst = max(worst, error_ratio(x[:, span], reference) / limit)
    finite = all(bool(x.isfinite().all()) for x in results)
    return finite and worst <= 1.0, worst if finite else float("inf")


def verdict(ok: bool) -> str:
    """How a row says it."""
    return "pass" if ok else "fail"


def time_calls(device: str, passes: dict[str, list[Callable]], rounds: int):
    """(wall ms, host us) of single calls, the device idle before each."""
    synchronize(device)
    wall = {name: [] for name in passes}
    host = {name: [] for name in passes}
    for calls in passes.values():
        for call in calls:
            call()
    for i in range(4 * rounds):
        for name, calls in passes.items():
            call = calls[i % len(calls)]
            synchronize(device)
            begin = time.perf_counter()
            result = call()
            returned = time.perf_counter()
            synchronize(device)
            wall[name].append((time.perf_counter() - begin) * 1e3)
            host[name].append((returned - begin) * 1e6)
            del result
    return wall, host


@dataclass
class Graph:
    """`calls` launches captured once, replayed often."""

    graph: torch.cuda.CUDAGraph
    calls: int

    def milliseconds(self) -> float:
        """Device time of one call in one replay."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / self.calls


def time_graphs(passes: dict[str, list[Callable]], rounds: int) -> dict[str, list[float]]:
    """Kernel ms of each provider that can be captured, from interleaved replays. `wy_fast` is left out:
    its graph holds the same kernels as the backend's."""
    graphs = {}
    for name, calls in passes.items():
        if name == "wy_fast":
            continue
        try:
            graphs[name] = capture(calls)
        except Exception as error:  # a provider that synchronises cannot be captured
            print(f"# {name}: no CUDA graph: {str(error).splitlines()[0]}", flush=True)
            torch.cuda.synchronize()
    for graph in graphs.values():
        graph.milliseconds()
    samples = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            samples[name].append(graph.milliseconds())
    return samples


def capture(calls: list[Callable], launches: int = 6) -> Graph:
    """A graph of about `launches` calls that goes round the input sets."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    total = max(1, launches // len(calls)) * len(calls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(total):
            calls[i % len(calls)]()
    return Graph(graph, total)


def extra_bytes(call: Callable) -> int:
    """Peak memory of a call beyond its outputs."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    peak, kept = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    del result
    return (peak - before) - (kept - before)


def copy_rates(device: str) -> list[float]:
    """GB/s of large copies, bytes read plus bytes written: the floor of a memory-bound operator."""
    size = COPY_BYTES[device]
    x = torch.empty(size // 4, dtype=torch.float32, device=device).normal_()
    y = torch.empty_like(x)
    rates = []
    for _ in range(10):
        synchronize(device)
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(4):
                y.copy_(x)
            end.record()
            end.synchronize()
            seconds = begin.elapsed_time(end) / 4e3
        else:
            start = time.perf_counter()
            y.copy_(x)
            seconds = time.perf_counter() - start
        rates.append(2 * size / seconds / 1e9)
    return rates[2:]


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def release(device: str) -> None:
    """Give cached memory back between shapes."""
    if device == "cuda":
        torch.cuda.empty_cache()
