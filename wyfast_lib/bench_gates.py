"""The stride-HV question on NVIDIA: does it pay to keep beta and g as [B, HV, T] instead of [B, T, HV]?

Three measurements for HV heads, the tokens chosen so that all have the same number of gates: a kernel that
only touches the gates, our two Hopper kernels with the flag G_T_CONTIG off and on, and the transposition.
"""

from __future__ import annotations

import torch

from wyfast_lib import records
from wyfast_lib.bench_providers import Case, make_case
from wyfast_lib.bench_timing import capture, gate, verdict
from wyfast_lib.inputs import Shape
from wyfast_lib.records import Record, percentiles
from wyfast_lib.testing import TOLERANCE, error_ratio

HEADS = (1, 8, 32, 64)
GATES = 1 << 20  # tokens x heads
WIDTH = 128


def run_gates(rounds: int) -> list[Record]:
    """Rows of suite "gates": ms with stride HV, ms with stride 1, and ms of one transposition.

    Raises:
        RuntimeError: no Hopper GPU.
    """
    from wyfast_lib.backends import cuda as backend

    if not torch.cuda.is_available() or not backend._device(torch.cuda.current_device()).hopper:
        raise RuntimeError("the gates suite needs a Hopper GPU and Triton 3.6 or newer")
    origin, rows = records.provenance(device="cuda"), []
    for HV in HEADS:
        case = make_case(Shape(1, GATES // HV, HV, HV, WIDTH, WIDTH), torch.bfloat16, "cuda")
        s, samples, found = case.shape, *measure_heads(case, rounds)
        for (op, phase, provider), times in samples.items():
            p20, p50, p80 = percentiles(times)
            rows.append(
                Record(
                    suite="gates", provider=provider, op=op, phase=phase, metric="kernel", unit="ms",
                    shape=f"B={s.B} T={s.T} HV={s.H} K={s.K} V={s.V} BT={s.BT}",
                    dtype=str(case.k.dtype).removeprefix("torch."), p20=p20, p50=p50, p80=p80,
                    gate=found[op, phase, provider], **origin,
                )
            )  # fmt: skip
        torch.cuda.empty_cache()
    return rows


def measure_heads(case: Case, rounds: int) -> tuple[dict[tuple[str, str, str], list[float]], dict]:
    """{(op, phase, layout): samples in ms}, interleaved, and the verdict on each.

    Raises:
        RuntimeError: a result that misses its tolerance, or differs between the layouts.
    """
    HV, calls, found, results = case.shape.H, {}, {}, {}
    for layout in ("stride-HV", "stride-1"):
        made = layout_calls(case, layout == "stride-1")
        results[layout] = {name: upright(call(), case) for name, call in made.items()}
        calls |= {(*name, layout): call for name, call in made.items()}
        found |= {(*name, layout): verdict(right(case, *name, x)) for name, x in results[layout].items()}
    for name, expected in results["stride-HV"].items():
        if not all(torch.equal(a, b) for a, b in zip(expected, results["stride-1"][name], strict=True)):
            raise RuntimeError(f"{name} differs between the two gate layouts")
    if wrong := [name for name, word in found.items() if word == verdict(False)]:
        raise RuntimeError(f"{wrong} are not within their tolerance")
    del results
    if HV > 1:  # of a single head the two layouts are one
        calls["transpose", "both", "g and beta"] = lambda: (turn(case.g), turn(case.beta))
        found["transpose", "both", "g and beta"] = "none"
    graphs = {name: capture([call]) for name, call in calls.items()}
    samples = {name: [] for name in graphs}
    for _ in range(rounds + 1):
        for name, graph in graphs.items():
            samples[name].append(graph.milliseconds())
    return {name: times[1:] for name, times in samples.items()}, found


def upright(results: tuple, case: Case) -> tuple:
    """Results with their gates, which come in the layout that was asked for, as [B, T, HV]."""
    B, T, HV = case.g.shape
    return tuple(x.transpose(1, 2) if x.shape == (B, HV, T) != (B, T, HV) else x for x in results)


def right(case: Case, op: str, phase: str, results: tuple) -> bool:
    """Are they within their tolerance of the closed form?"""
    if op == "wy_fast":
        return gate(case, phase, results)[0]
    return error_ratio(results[0], case.g.double().exp()) <= TOLERANCE[case.g.dtype]


def turn(x: torch.Tensor) -> torch.Tensor:
    """[B, T, HV] -> [B, HV, T], contiguous."""
    return x.transpose(1, 2).contiguous()


def layout_calls(case, contiguous: bool) -> dict[tuple[str, str], object]:
    """The three launches for one layout of the gates; gate outputs come back in that layout."""
    from wyfast_lib.kernels.gates import decay_kernel
    from wyfast_lib.kernels.hopper import (
        prepare_wy_repr_bwd_hopper_kernel,
        recompute_w_u_fwd_hopper_kernel,
    )

    k, v, beta, A, g = case.inputs
    if contiguous:
        beta, g = turn(beta), turn(g)
    T, HV = k.shape[1:3]
    BT = case.shape.BT
    NT = (T + BT - 1) // BT
    sizes = {"H": HV, "HV": HV, "K": WIDTH, "V": WIDTH, "USE_G": True, "IS_VARLEN": False}
    out, w, u = torch.empty_like(g), torch.empty_like(k), torch.empty_like(v)
    dk, dv, db, dg = (torch.empty_like(x) for x in (k, v, beta, g))

    def gate_only():
        decay_kernel[(NT * HV,)](g, out, T, NT, HV=HV, BT=BT, G_T_CONTIG=contiguous, num_warps=2)
        return (out,)

    def forward():
        recompute_w_u_fwd_hopper_kernel[(NT * HV,)](
            k, v, beta, w, u, A, g, None, None, T, NT, **sizes, G_T_CONTIG=contiguous
        )
        return w, u

    def backward():
        prepare_wy_repr_bwd_hopper_kernel[(NT * HV,)](
            k, v, beta, g, A, case.dw, case.du, dk, dv, db, dg, None, None, T, NT, **sizes,
            G_T_CONTIG=contiguous,
        )  # fmt: skip
        return dk, dv, db, dg

    return {("gates", "both"): gate_only, ("wy_fast", "forward"): forward, ("wy_fast", "backward"): backward}
