"""Gates that grow and gates far from zero: rows 37 and 38 of the faults that users met."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import Call, draw, reference, run

from wyfast_lib import chunk_bwd_dv_local, chunk_local_cumsum, wy_factor
from wyfast_lib.reference import chunk_bwd_dv_local_reference
from wyfast_lib.testing import TOLERANCE, error_ratio

# log gates a token, up to e^80 in all: float32 holds e^88
GROWING = {
    "one token of +60": (16, [0.0] * 5 + [60.0] + [0.0] * 10),
    "the first token of +60": (16, [60.0] + [-0.1] * 15),
    "two tokens of +30": (16, [0.0] * 3 + [30.0] + [0.0] * 4 + [30.0] + [0.0] * 7),
    "one token of +80": (16, [0.0] * 9 + [80.0] + [0.0] * 6),
    "+0.8 a token": (64, [0.8] * 64),
    "+1.25 a token": (64, [1.25] * 64),
    "growth, then decay": (64, [1.0] * 32 + [-1.0] * 32),
    "decay, then growth": (64, [-1.0] * 32 + [1.0] * 32),
    "a short last chunk": (16, [0.5] * 16 + [40.0] + [0.3] * 4),
}
# Up, down and up again: A^T dA A^T itself overflows, the gradient does not.
TWICE = {
    "+60, -60, +60": (16, [0.0, 0.0, 60.0, -60.0, 0.0, 60.0] + [0.0] * 10),
    "+50, -80, +50": (16, [0.0, 50.0, -80.0, 0.0, 50.0] + [0.0] * 11),
    "+40, -60, +40": (16, [0.0, 40.0, -60.0, 0.0, 40.0] + [0.0] * 11),
}


def with_gate(log_gates: list[float], BT: int, dtype: torch.dtype, device: str, K=32, V=32) -> Call:
    """A call of two heads on one whose gates are these, with the factor of exactly these inputs."""
    call = draw(T=len(log_gates), K=K, V=V, BT=BT, dtype=dtype, gate_dtype=torch.float32, device=device)
    raw = torch.tensor(log_gates, device=device)[None, :, None].expand(1, -1, 2)
    g = chunk_local_cumsum(raw, BT)
    return replace(call, g=g, A=wy_factor(call.k, call.beta, g, BT))


def assert_finite_and_equal(call: Call, backend: str) -> None:
    """Every result within its dtype's limit, twice for large sums; dg, a difference of such, within four."""
    results, expected = run(call, backend), reference(call)
    for name, x in results.items():
        assert x.isfinite().all(), f"{name} is not finite"
        limit = TOLERANCE[call.k.dtype] * (4 if name == "dg" else 2)
        error = error_ratio(x, expected[name])
        assert error <= limit, f"{name}: error ratio {error:.3g} is over {limit:.3g}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", GROWING)
def test_37_gates_that_grow(backend, device, kind, dtype):
    BT, log_gates = GROWING[kind]
    assert_finite_and_equal(with_gate(log_gates, BT, dtype, device), backend)


@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_37_gates_that_grow_at_the_widths_of_a_model(backend, device, K, dtype):
    assert_finite_and_equal(with_gate([0.8] * 64, 64, dtype, device, K, K), backend)


@pytest.mark.parametrize("kind", TWICE)
def test_37_gates_that_grow_twice(backend, device, kind):
    BT, log_gates = TWICE[kind]
    call = with_gate(log_gates, BT, torch.float32, device)
    largest = call.g.max().item()
    if backend in ("lowered", "ascend") and 2 * largest > 88:
        # These kernels hold e^(2 g) on the way: a documented limit that shows, and is never a wrong number.
        results = run(call, backend)
        assert results["w"].isfinite().all() and not results["dk"].isfinite().all()
    else:
        assert_finite_and_equal(call, backend)


@pytest.mark.parametrize("kind", [*GROWING, *TWICE])
def test_37_the_local_gradient_of_the_values_under_gates_that_grow(backend, device, kind):
    BT, log_gates = (GROWING | TWICE)[kind]
    call = with_gate(log_gates, BT, torch.float32, device)
    q = torch.nn.functional.normalize(torch.randn(call.k.shape), dim=-1).to(device)
    dv = chunk_bwd_dv_local(q, call.k, call.du, call.g, chunk_size=BT, backend=backend)
    expected = chunk_bwd_dv_local_reference(*(x.cpu() for x in (q, call.k, call.du, call.g)), None, BT, None)
    assert error_ratio(dv, expected) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("shift", [-200.0, -60.0, -20.0, 20.0, 60.0])
def test_38_gates_far_from_zero_cost_no_accuracy(backend, device, shift):
    call = draw(T=40, H=2, Hg=1, K=16, V=16, BT=16, device=device)
    moved = replace(call, g=call.g + shift)  # the same A: it depends on differences
    results, expected = run(moved, backend), reference(moved)
    for name, x in results.items():
        if name == "w" and shift == -200.0:  # e^-200 is no float32 number
            assert (x == 0).all()
            continue
        error = error_ratio(x, expected[name])
        assert error <= 5e-7, f"{name}: error ratio {error:.3g}"
