"""The adapters speak flash-linear-attention's units: g in log2 in, dg of the natural-log gate out."""

from __future__ import annotations

import math

import pytest
import torch
from support import GRADIENTS, draw, reference

from wyfast_lib.integrations.fla import prepare_wy_repr_bwd, recompute_w_u_fwd
from wyfast_lib.testing import error_ratio, tolerance

CU = [0, 5, 5, 40]


@pytest.mark.parametrize("cu", [None, CU])
@pytest.mark.parametrize("indices", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_adapters_take_log2_gates_and_return_natural_gradients(cu, indices, gated):
    call = draw(gated=gated, cu=cu)
    g2 = None if call.g is None else call.g / math.log(2)
    packed = (None, None)
    if cu is not None:
        packed = (call.chunks.cu_seqlens.int(), call.chunks.indices if indices else None)
    results = dict(zip("wu", recompute_w_u_fwd(call.k, call.v, call.beta, call.A, g2, *packed), strict=True))
    gradients = prepare_wy_repr_bwd(call.k, call.v, call.beta, call.A, call.dw, call.du, g2, *packed)
    results |= {n: x for n, x in zip(GRADIENTS, gradients, strict=True) if x is not None}
    expected = reference(call)
    assert set(results) == set(expected)
    for name, x in results.items():
        assert error_ratio(x, expected[name]) <= tolerance(name, x, call.k, call.v), name


def test_a_natural_gate_in_place_of_a_log2_one_is_seen():
    call = draw()
    w, _ = recompute_w_u_fwd(call.k, call.v, call.beta, call.A, call.g)
    assert error_ratio(w, reference(call)["w"]) > 1e-2


def test_empty_rows_give_empty_results():
    call = draw().tokens(0, 0)
    w, u = recompute_w_u_fwd(call.k, call.v, call.beta, call.A, call.g)
    assert w.shape == call.dw.shape and u.shape == call.du.shape
    gradients = prepare_wy_repr_bwd(call.k, call.v, call.beta, call.A, call.dw, call.du, call.g)
    assert all(isinstance(x, torch.Tensor) and x.numel() == 0 for x in gradients)
