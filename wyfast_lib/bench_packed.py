"""Is a packed row as fast as a dense one of the same number of tokens? (`bench --suite packed`, CUDA)"""

from __future__ import annotations

import torch

from wyfast_lib import prepare_chunks, records
from wyfast_lib.records import Record, percentiles

SHAPES = ("train-8k", "train-32k", "train-32k-gqa")
MEAN = 1024  # tokens a sequence


def run_packed(rounds: int) -> list[Record]:
    """Rows of suite "packed": kernel ms of one dense row and of the same tokens as sequences of about 1024.

    Raises:
        RuntimeError: no CUDA device, or a packed result that misses its tolerance.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("the packed suite needs a CUDA device")
    origin, rows = records.provenance(device="cuda"), []
    for shape in SHAPES:
        for phase, layouts in measure_shape(shape, rounds).items():
            for layout, samples in layouts.items():
                p20, p50, p80 = percentiles(samples)
                rows.append(
                    Record(
                        suite="packed", provider=layout, op="wy_fast", phase=phase, shape=shape,
                        dtype="bfloat16", metric="kernel", unit="ms", p20=p20, p50=p50, p80=p80, gate="pass",
                        note=f"sequences of about {MEAN} tokens", **origin,
                    )
                )  # fmt: skip
        torch.cuda.empty_cache()
    return rows


def measure_shape(shape: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """{phase: {"dense" | "packed": samples in ms}}, interleaved."""
    from wyfast_lib.backends import cuda as backend
    from wyfast_lib.bench_providers import make_case
    from wyfast_lib.bench_timing import capture
    from wyfast_lib.factor import wy_factor

    case = make_case(shape, torch.bfloat16, "cuda")
    chunks = prepare_chunks(offsets(case.shape.T).cuda(), case.shape.BT)
    A = wy_factor(case.k, case.beta, case.g, case.shape.BT, chunks)
    factors = {"dense": (case.A, None), "packed": (A, chunks)}
    k, v, beta, _, g = case.inputs
    out = {}
    for phase in ("forward", "backward"):
        calls = {}
        for layout, (factor, table) in factors.items():
            if phase == "forward":
                calls[layout] = lambda A=factor, c=table: backend.forward(k, v, beta, A, g, None, c)
            else:
                calls[layout] = lambda A=factor, c=table: backend.backward(
                    k, v, beta, A, g, case.dw, case.du, c
                )
        check(case, A, chunks, phase, calls["packed"]())
        graphs = {layout: capture([call]) for layout, call in calls.items()}
        samples = {layout: [] for layout in graphs}
        for _ in range(rounds + 1):
            for layout, graph in graphs.items():
                samples[layout].append(graph.milliseconds())
        out[phase] = {layout: times[1:] for layout, times in samples.items()}
    return out


def offsets(T: int) -> torch.Tensor:
    """cu_seqlens of sequences of 1 to 2 MEAN tokens that fill T; the same in every run."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 2 * MEAN, (2 * T // MEAN + 8,), generator=random)
    ends = lengths.cumsum(0)
    return torch.cat([torch.zeros(1, dtype=torch.int64), ends[ends < T], torch.tensor([T])])


def check(case, A, chunks, phase: str, results: tuple) -> None:
    """RuntimeError unless the first sequence agrees with the float64 reference."""
    from wyfast_lib.reference import wy_adjoint_reference, wy_fast_reference
    from wyfast_lib.testing import TOLERANCE, error_ratio

    end = int(chunks.cu_seqlens[1])
    k, v, beta, A, g, dw, du = (
        x[:, :end].cpu() for x in (case.k, case.v, case.beta, A, case.g, case.dw, case.du)
    )
    if phase == "forward":
        expected = wy_fast_reference(k, v, beta, A, g)
    else:
        expected = wy_adjoint_reference(k, v, beta, A, g, dw, du)
    for x, reference in zip(results, expected, strict=True):
        error = error_ratio(x[:, :end], reference)
        if error > TOLERANCE[torch.bfloat16]:
            raise RuntimeError(f"packed {phase}: error ratio {error:.3g}")
