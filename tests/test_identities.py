"""Exact relations of the operator, to rounding: they catch what a tolerance lets through."""

import math
from dataclasses import replace

import pytest
import torch
from support import draw, run

from wyfast_lib import wy_factor
from wyfast_lib.reference import chunk_ranges
from wyfast_lib.testing import error_ratio

ROUNDING = 1e-12


def call64(backend, device, T=40, **kwargs):
    return draw(2, T, 4, 2, dtype=torch.float64, device=device, **kwargs)


def refactored(call, g):
    """The same call with another gate and the factor that belongs to it."""
    return replace(call, g=g, A=wy_factor(call.k, call.beta, g, 16))


def test_the_gated_factor_is_similar_to_the_plain_one():
    call = call64("torch", "cpu")
    plain = wy_factor(call.k, call.beta, None, 16)
    for s, e in chunk_ranges(40, 16):
        g = call.g[:, s:e].transpose(1, 2)
        similar = plain[:, s:e, :, : e - s].transpose(1, 2) * (g[..., :, None] - g[..., None, :]).exp()
        assert error_ratio(call.A[:, s:e, :, : e - s].transpose(1, 2), similar) < ROUNDING


def test_w_is_scaled_by_the_gate_and_u_is_not_invariant(backend, device):
    call = call64(backend, device)
    plain = refactored(call, torch.zeros_like(call.g))
    gated, ungated = run(call, backend), run(plain, backend)
    assert error_ratio(gated["w"], call.g.exp()[..., None] * ungated["w"]) < ROUNDING
    through = run(replace(plain, v=call.v * (-call.g).exp()[..., None]), backend)["u"]
    assert error_ratio(gated["u"], call.g.exp()[..., None] * through) < ROUNDING
    assert error_ratio(gated["u"], ungated["u"]) > 1e-2


def test_a_constant_on_the_gate_of_a_chunk_scales_w_and_leaves_u(backend, device):
    call = call64(backend, device)
    c = torch.zeros_like(call.g)
    for n, (s, e) in enumerate(chunk_ranges(40, 16)):
        c[:, s:e] = (-0.7, 0.3, -2.0)[n]
    moved = run(refactored(call, call.g + c), backend)
    still = run(call, backend)
    assert error_ratio(moved["u"], still["u"]) < ROUNDING
    assert error_ratio(moved["w"], c.exp()[..., None] * still["w"]) < ROUNDING


def test_the_gate_gradients_of_a_chunk_sum_to_the_product_of_dw_and_w(backend, device):
    call = call64(backend, device)
    results = run(call, backend)
    inner = (call.dw * results["w"]).sum(-1)
    for s, e in chunk_ranges(40, 16):
        assert error_ratio(results["dg"][:, s:e].sum(1), inner[:, s:e].sum(1)) < ROUNDING


def test_the_adjoint_is_linear_in_the_upstream_gradients(backend, device):
    call = call64(backend, device)
    other = torch.randn_like(call.dw), torch.randn_like(call.du)
    a = run(call, backend)
    b = run(replace(call, dw=other[0], du=other[1]), backend)
    both = run(replace(call, dw=2 * call.dw - 3 * other[0], du=2 * call.du - 3 * other[1]), backend)
    for name in ("dk", "dv", "dbeta", "dg"):
        assert error_ratio(both[name], 2 * a[name] - 3 * b[name]) < ROUNDING


def test_u_is_linear_in_v_and_w_does_not_know_v(backend, device):
    call = call64(backend, device)
    a, b = run(call, backend), run(replace(call, v=-2 * call.v), backend)
    assert error_ratio(b["u"], -2 * a["u"]) < ROUNDING
    assert torch.equal(a["w"], b["w"])


def test_orthonormal_keys_make_the_factor_the_identity(backend, device):
    """Nothing to correct: w = beta e^g k and u = beta v, and dv = beta du."""
    call = call64(backend, device, K=16)
    keys = torch.eye(16, dtype=torch.float64, device=device).repeat(3, 1)[:40]
    call = replace(call, k=keys[None, :, None].expand(2, 40, 2, 16))
    call = refactored(call, call.g)
    results, scale = run(call, backend), call.beta[..., None]
    expected = call.k.repeat_interleave(2, 2) * scale * call.g.exp()[..., None]
    assert torch.equal(results["u"], call.v * scale)
    assert error_ratio(results["w"], expected) < ROUNDING
    assert error_ratio(results["dv"], call.du * scale) < ROUNDING


def test_nothing_written_means_nothing_read(backend, device):
    """beta = 0: A = I, w = u = 0, and only beta has a gradient."""
    call = call64(backend, device)
    call = refactored(replace(call, beta=torch.zeros_like(call.beta)), call.g)
    results = run(call, backend)
    for name in ("w", "u", "dk", "dv", "dg"):
        assert not results[name].any(), name
    expected = (call.dw * call.k.repeat_interleave(2, 2)).sum(-1) * call.g.exp() + (call.du * call.v).sum(-1)
    assert error_ratio(results["dbeta"], expected) < ROUNDING


@pytest.mark.parametrize("factor", [math.log(2), 1 / math.log(2)])
def test_a_gate_in_another_unit_would_break_the_identities(factor):
    call = call64("torch", "cpu")
    wrong = refactored(call, call.g * factor)
    ungated = run(refactored(call, torch.zeros_like(call.g)), "torch")
    assert error_ratio(run(wrong, "torch")["w"], call.g.exp()[..., None] * ungated["w"]) > 1e-2
