"""Is a packed row as fast as a dense one of the same number of tokens? (`bench --suite packed`, CUDA)"""

from __future__ import annotations

from dataclasses import replace

import torch

from wyfast_lib import backends, prepare_chunks, records, wy_factor
from wyfast_lib.bench_providers import Case, make_case
from wyfast_lib.bench_timing import capture, gate, verdict
from wyfast_lib.records import Record, percentiles

SHAPES = ("train-8k", "train-32k", "train-32k-gqa")
MEAN = 1024  # tokens a sequence


def run_packed(rounds: int) -> list[Record]:
    """Rows of suite "packed": kernel ms of one dense row and of the same tokens as sequences of about 1024.

    And the error over its tolerance of each; where that is above 1, no time is recorded.

    Raises:
        RuntimeError: no CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("the packed suite needs a CUDA device")
    origin, rows = records.provenance(device="cuda"), []
    for shape in SHAPES:
        case = make_case(shape, torch.bfloat16, "cuda")
        rows += measure_case(shape, case, rounds, backends.load("cuda"), origin)
        torch.cuda.empty_cache()
    return rows


def measure_case(shape: str, case: Case, rounds: int, backend, origin: dict) -> list[Record]:
    """Rows of one shape: both layouts through the backend, interleaved."""
    cu = offsets(case.shape.T)
    chunks = prepare_chunks(cu.to(case.k.device), case.shape.BT)
    A = wy_factor(case.k, case.beta, case.g, case.shape.BT, chunks)
    common = {"suite": "packed", "op": "wy_fast", "shape": shape, **origin,
              "dtype": str(case.k.dtype).removeprefix("torch."),
              "note": f"{len(cu) - 1} sequences of {case.shape.T / (len(cu) - 1):.0f} tokens on average"}
    rows = []
    factors = {"dense": (case.A, None), "packed": (A, chunks)}
    k, v, beta, _, g = case.inputs
    for phase in ("forward", "backward"):
        calls = {}
        for layout, (factor, table) in factors.items():
            if phase == "forward":
                calls[layout] = lambda A=factor, c=table: backend.forward(k, v, beta, A, g, None, c)
            else:
                calls[layout] = lambda A=factor, c=table: backend.backward(
                    k, v, beta, A, g, case.dw, case.du, c
                )
        found = {"dense": gate(case, phase, calls["dense"]()),
                 "packed": packed_gate(case, A, cu.tolist(), phase, calls["packed"]())}  # fmt: skip
        for layout, (ok, worst) in found.items():
            rows.append(row(layout, phase, "error", "ratio", [worst], ok, common))
        green = {layout: call for layout, call in calls.items() if found[layout][0]}
        graphs = {layout: capture([call]) for layout, call in green.items()}
        samples = {layout: [] for layout in graphs}
        for _ in range(rounds + 1):
            for layout, graph in graphs.items():
                samples[layout].append(graph.milliseconds())
        for layout, times in samples.items():
            rows.append(row(layout, phase, "kernel", "ms", times[1:], found[layout][0], common))
    return rows


def row(layout: str, phase: str, metric: str, unit: str, samples: list, ok: bool, common: dict) -> Record:
    """One row of the suite."""
    p20, p50, p80 = percentiles(samples)
    return Record(provider=layout, phase=phase, metric=metric, unit=unit, p20=p20, p50=p50, p80=p80,
                  gate=verdict(ok), **common)  # fmt: skip


def offsets(T: int) -> torch.Tensor:
    """cu_seqlens of sequences of 1 to 2 MEAN tokens that fill T; the same in every run."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 2 * MEAN, (2 * T // MEAN + 8,), generator=random)
    ends = lengths.cumsum(0)
    return torch.cat([torch.zeros(1, dtype=torch.int64), ends[ends < T], torch.tensor([T])])


def packed_gate(case: Case, A, cu: list[int], phase: str, results: tuple) -> tuple[bool, float]:
    """As `bench_timing.gate`, of packed results: the first and the last sequence, each as a row alone."""
    verdicts = []
    for s, e in (cu[:2], cu[-2:]):
        tensors = {n: getattr(case, n)[:, s:e] for n in ("k", "v", "beta", "g", "dw", "du")}
        alone = replace(case, shape=replace(case.shape, T=e - s), A=A[:, s:e], **tensors)
        verdicts.append(gate(alone, phase, tuple(x[:, s:e] for x in results)))
    finite = all(bool(x.isfinite().all()) for x in results)
    worst = max(worst for _, worst in verdicts) if finite else float("inf")
    return finite and all(ok for ok, _ in verdicts), worst
