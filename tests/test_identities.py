"""Exact relations of the operator, to rounding: they catch what a tolerance lets through."""

import math
from dataclasses import replace

import pytest
import torch
from support import draw, run

from wyfast_lib import wy_factor
from wyfast_lib.reference import chunk_ranges
from wyfast_lib.testing import TOLERANCE, error_ratio

# The widest dtype that a backend takes. float64 leaves room for the sums of a chunk.
WIDEST = {"torch": torch.float64}
ROUNDING = {torch.float64: 1e-12, torch.float32: TOLERANCE[torch.float32]}


def wide_call(backend, device, T=40, **kwargs):
    dtype = WIDEST.get(backend, torch.float32)
    return draw(2, T, 4, 2, dtype=dtype, device=device, **kwargs)


def assert_same(x, expected, terms=None):
    """Equal to rounding. terms: what x is a sum of, where it may cancel: its rounding is theirs."""
    limit = ROUNDING[x.dtype]
    if terms is None:
        assert error_ratio(x, expected) < limit
    else:
        assert (x - expected).norm() < limit * terms.norm()


def refactored(call, g):
    """The same call with another gate and the factor that belongs to it."""
    return replace(call, g=g, A=wy_factor(call.k, call.beta, g, 16))


def test_the_gated_factor_is_similar_to_the_plain_one():
    call = wide_call("torch", "cpu")
    plain = wy_factor(call.k, call.beta, None, 16)
    for s, e in chunk_ranges(40, 16):
        g = call.g[:, s:e].transpose(1, 2)
        similar = plain[:, s:e, :, : e - s].transpose(1, 2) * (g[..., :, None] - g[..., None, :]).exp()
        assert_same(call.A[:, s:e, :, : e - s].transpose(1, 2), similar)


def test_w_is_scaled_by_the_gate_and_u_is_not_invariant(backend, device):
    call = wide_call(backend, device)
    plain = refactored(call, torch.zeros_like(call.g))
    gated, ungated = run(call, backend), run(plain, backend)
    assert_same(gated["w"], call.g.exp()[..., None] * ungated["w"])
    through = run(replace(plain, v=call.v * (-call.g).exp()[..., None]), backend)["u"]
    assert_same(gated["u"], call.g.exp()[..., None] * through)
    assert error_ratio(gated["u"], ungated["u"]) > 1e-2


def test_a_constant_on_the_gate_of_a_chunk_scales_w_and_leaves_u(backend, device):
    call = wide_call(backend, device)
    c = torch.zeros_like(call.g)
    for n, (s, e) in enumerate(chunk_ranges(40, 16)):
        c[:, s:e] = (-0.7, 0.3, -2.0)[n]
    moved = run(refactored(call, call.g + c), backend)
    still = run(call, backend)
    assert_same(moved["u"], still["u"])
    assert_same(moved["w"], c.exp()[..., None] * still["w"])


def test_the_gate_gradients_of_a_chunk_sum_to_the_product_of_dw_and_w(backend, device):
    call = wide_call(backend, device)
    results = run(call, backend)
    inner = (call.dw * results["w"]).sum(-1)
    for s, e in chunk_ranges(40, 16):
        dg = results["dg"][:, s:e]
        assert_same(dg.sum(1), inner[:, s:e].sum(1), terms=dg.abs().sum(1))


def test_the_adjoint_is_linear_in_the_upstream_gradients(backend, device):
    call = wide_call(backend, device)
    other = torch.randn_like(call.dw), torch.randn_like(call.du)
    a = run(call, backend)
    b = run(replace(call, dw=other[0], du=other[1]), backend)
    both = run(replace(call, dw=2 * call.dw - 3 * other[0], du=2 * call.du - 3 * other[1]), backend)
    for name in ("dk", "dv", "dbeta", "dg"):
        assert_same(both[name], 2 * a[name] - 3 * b[name])


def test_u_is_linear_in_v_and_w_does_not_know_v(backend, device):
    call = wide_call(backend, device)
    a, b = run(call, backend), run(replace(call, v=-2 * call.v), backend)
    assert_same(b["u"], -2 * a["u"])
    assert torch.equal(a["w"], b["w"])


def test_orthonormal_keys_make_the_factor_the_identity(backend, device):
    """Nothing to correct: w = beta e^g k and u = beta v, and dv = beta du."""
    call = wide_call(backend, device, K=16)
    keys = torch.eye(16, dtype=call.k.dtype, device=device).repeat(3, 1)[:40]
    call = replace(call, k=keys[None, :, None].expand(2, 40, 2, 16))
    call = refactored(call, call.g)
    results, scale = run(call, backend), call.beta[..., None]
    expected = call.k.repeat_interleave(2, 2) * scale * call.g.exp()[..., None]
    assert torch.equal(results["u"], call.v * scale)
    assert_same(results["w"], expected)
    assert_same(results["dv"], call.du * scale)


def test_nothing_written_means_nothing_read(backend, device):
    """beta = 0: A = I, w = u = 0, and only beta has a gradient."""
    call = wide_call(backend, device)
    call = refactored(replace(call, beta=torch.zeros_like(call.beta)), call.g)
    results = run(call, backend)
    for name in ("w", "u", "dk", "dv", "dg"):
        assert not results[name].any(), name
    expected = (call.dw * call.k.repeat_interleave(2, 2)).sum(-1) * call.g.exp() + (call.du * call.v).sum(-1)
    assert_same(results["dbeta"], expected)


@pytest.mark.parametrize("factor", [math.log(2), 1 / math.log(2)])
def test_a_gate_in_another_unit_would_break_the_identities(factor):
    call = wide_call("torch", "cpu")
    wrong = refactored(call, call.g * factor)
    ungated = run(refactored(call, torch.zeros_like(call.g)), "torch")
    assert error_ratio(run(wrong, "torch")["w"], call.g.exp()[..., None] * ungated["w"]) > 1e-2
