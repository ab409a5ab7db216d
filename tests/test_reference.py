"""The specification itself: against the token-by-token rule, and against float64 autograd."""

import pytest
import torch
from support import draw

from wyfast_lib import chunk_local_cumsum, wy_factor
from wyfast_lib.inputs import Shape, make_inputs
from wyfast_lib.reference import (
    gated_delta_rule,
    outputs_from_wy,
    wy_adjoint_reference,
    wy_factor_reference,
    wy_fast_reference,
)
from wyfast_lib.testing import error_ratio

ROUNDING = 1e-12


def inputs64(T, *, gated=True, Hg=1, seed=0):
    return make_inputs(Shape(2, T, 2, Hg, 8, 12, 16), torch.float64, gated=gated, seed=seed)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("T", [1, 16, 17, 50])
def test_w_and_u_rebuild_the_recurrence_and_its_final_state(T, gated):
    i = inputs64(T, gated=gated)
    w, u = wy_fast_reference(*i.call)
    state = torch.randn(2, 2, 8, 12, dtype=torch.float64)
    o, last = gated_delta_rule(i.q, i.k, i.v, i.beta, i.log_decay, initial_state=state)
    o2, last2 = outputs_from_wy(i.q, i.k, w, u, i.g, 16, initial_state=state)
    assert error_ratio(o2, o) < ROUNDING
    assert error_ratio(last2, last) < ROUNDING


def test_each_packed_sequence_restarts_the_recurrence():
    cu = torch.tensor([0, 7, 7, 40])
    i = make_inputs(Shape(1, 40, 2, 2, 8, 12, 16), torch.float64)
    g = chunk_local_cumsum(i.log_decay, 16, cu)
    A = wy_factor(i.k, i.beta, g, 16, cu)
    w, u = wy_fast_reference(i.k, i.v, i.beta, A, g, cu_seqlens=cu)
    o, _ = outputs_from_wy(i.q, i.k, w, u, g, 16, cu_seqlens=cu)
    for s, e in ((0, 7), (7, 40)):
        alone, _ = gated_delta_rule(*(x[:, s:e] for x in (i.q, i.k, i.v, i.beta, i.log_decay)))
        assert error_ratio(o[:, s:e], alone) < ROUNDING


def test_wrong_w_does_not_rebuild_the_recurrence():
    i = inputs64(50)
    w, u = wy_fast_reference(*i.call)
    o, _ = gated_delta_rule(i.q, i.k, i.v, i.beta, i.log_decay)
    wrong, _ = outputs_from_wy(i.q, i.k, 1.001 * w, u, i.g, 16)
    assert error_ratio(wrong, o) > 1e-6


def test_the_triangular_solve_and_the_blocked_inverse_agree():
    i = inputs64(50)
    assert error_ratio(i.A, wy_factor_reference(i.k, i.beta, i.g, 16)) < ROUNDING


@pytest.mark.parametrize("cu", [None, [0, 3, 3, 40]])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("Hg, H", [(1, 1), (1, 4), (2, 4)])
def test_the_closed_form_adjoint_is_float64_autograd_through_the_factor(Hg, H, gated, cu):
    call = draw(1 if cu else 2, 40, H, Hg, dtype=torch.float64, gated=gated, cu=cu)
    offsets = None if cu is None else torch.tensor(cu)
    leaves = [x.clone().requires_grad_() for x in (call.k, call.v, call.beta, call.g) if x is not None]
    k, v, beta, *gate = leaves
    g = gate[0] if gate else None
    A = wy_factor_reference(k, beta, g, 16, offsets)
    w, u = wy_fast_reference(k, v, beta, A, g, cu_seqlens=offsets)
    expected = torch.autograd.grad((w, u), leaves, (call.dw, call.du))
    closed = wy_adjoint_reference(call.k, call.v, call.beta, A.detach(), call.g, call.dw, call.du, offsets)
    assert (closed[3] is None) == (not gated)
    for x, ref in zip(closed, expected, strict=False):
        assert error_ratio(x, ref) < ROUNDING
