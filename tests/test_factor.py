"""The stage before the operator: the chunk-local gate and A = (I + M)^-1."""

import pytest
import torch
from support import draw

from wyfast_lib import check_factor, chunk_local_cumsum, wy_factor
from wyfast_lib.factor import invert_unit_lower
from wyfast_lib.reference import chunk_ranges, wy_factor_reference
from wyfast_lib.testing import TOLERANCE, error_ratio

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("cu", [None, [0, 5, 5, 70]])
@pytest.mark.parametrize("BT", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_factor_equals_the_triangular_solve_in_every_dtype(dtype, BT, cu):
    call = draw(1, 70, 4, 2, BT=BT, dtype=dtype, cu=cu)
    A = wy_factor(call.k, call.beta, call.g, BT, call.chunks)
    offsets = None if cu is None else torch.tensor(cu)
    assert A.dtype == dtype and A.is_contiguous()
    expected = wy_factor_reference(call.k, call.beta, call.g, BT, offsets)
    assert error_ratio(A, expected) <= TOLERANCE[dtype]


def test_the_factor_is_unit_lower_triangular_and_zero_past_the_tail():
    for cu in (None, [0, 5, 5, 40]):
        call = draw(1, 40, cu=cu)
        for s, e in chunk_ranges(40, 16, None if cu is None else torch.tensor(cu)):
            tile = call.A[0, s:e].transpose(0, 1)
            assert torch.equal(tile, torch.nn.functional.pad(tile[..., : e - s].tril(), (0, 16 - (e - s))))
            assert (tile.diagonal(dim1=1, dim2=2) == 1).all()


@pytest.mark.parametrize("n", [1, 2, 16, 128])
def test_the_blocked_inverse_inverts(n):
    M = torch.randn(3, 2, n, n, dtype=torch.float64).tril(-1) / n
    A = invert_unit_lower(M)
    identity = torch.eye(n, dtype=torch.float64).expand_as(M)
    assert error_ratio(A @ (identity + M), identity) < 1e-13
    assert torch.equal(A, A.tril())


def test_no_gate_is_a_gate_of_zeros_in_the_factor():
    call = draw(gated=False)
    assert torch.equal(
        wy_factor(call.k, call.beta, None, 16), wy_factor(call.k, call.beta, torch.zeros_like(call.beta), 16)
    )


def test_the_factor_is_detached_and_modifies_nothing():
    call = draw()
    k, before = call.k.clone().requires_grad_(), call.k.clone()
    assert not wy_factor(k, call.beta, call.g, 16).requires_grad
    assert torch.equal(k, before)


def test_out_dtype_sets_the_dtype_of_the_factor_only():
    call = draw(dtype=torch.bfloat16)
    A = wy_factor(call.k, call.beta, call.g, 16, out_dtype=torch.float32)
    assert A.dtype == torch.float32
    assert error_ratio(A, wy_factor_reference(call.k, call.beta, call.g, 16)) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("cu", [None, [0, 20, 20, 40, 60]])
@pytest.mark.parametrize("name", ["k", "beta", "g"])
def test_nan_reaches_the_factor_of_its_chunk_and_head_only(name, cu):
    call = draw(1 if cu else 3, 60, 4, 2, cu=cu)
    row = 0 if cu else 1
    bad = call.map(torch.clone)
    getattr(bad, name)[row, 25, 1 if name == "k" else 2] = torch.nan
    A = wy_factor(bad.k, bad.beta, bad.g, 16, call.chunks)
    reached = torch.zeros(A.shape[:3], dtype=torch.bool)
    first, last = (20, 36) if cu else (16, 32)
    reached[row, first:last, slice(2, 4) if name == "k" else 2] = True
    assert torch.equal(A[~reached], call.A[~reached])
    assert A[reached].isnan().any()


@pytest.mark.parametrize("cu", [None, [0, 5, 5, 40]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_is_summed_inside_each_chunk_in_float32_or_wider(dtype, cu):
    step = -torch.rand(1, 40, 3).to(dtype)
    offsets = None if cu is None else torch.tensor(cu)
    out = chunk_local_cumsum(step, 16, offsets)
    assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for s, e in chunk_ranges(40, 16, offsets):
        assert error_ratio(out[:, s:e], step[:, s:e].double().cumsum(1)) <= TOLERANCE[out.dtype]


@pytest.mark.parametrize("cu", [None, [0, 5, 5, 40]])
def test_the_sum_of_gates_is_differentiable(cu):
    step = -torch.rand(1, 40, 2, dtype=torch.float64)
    offsets = None if cu is None else torch.tensor(cu)
    assert torch.autograd.gradcheck(lambda x: chunk_local_cumsum(x, 16, offsets), step.requires_grad_())


def test_nan_in_a_gate_stays_in_its_chunk_forward_and_backward():
    step = -torch.rand(2, 40, 2)
    step[1, 20, 1] = torch.nan
    out = chunk_local_cumsum(step.requires_grad_(), 16)
    assert out[1, 20:32, 1].isnan().all() and out.isnan().sum() == 12
    upstream = torch.ones_like(out)
    upstream[0, 35, 0] = torch.nan
    out.backward(upstream)
    assert step.grad.isnan().nonzero().tolist() == [[0, t, 0] for t in (32, 33, 34, 35)]


@pytest.mark.parametrize("T", [0, 1, 16, 17])
def test_lengths_from_zero_on_work(T):
    call = draw(2, T)
    assert call.A.shape == (2, T, 2, 16)
    assert chunk_local_cumsum(call.beta, 16).shape == (2, T, 2)


def test_the_check_tells_a_right_factor_from_a_wrong_one():
    call = draw(2, 70, 4, 2)
    assert check_factor(call.A, call.k, call.beta, call.g) <= TOLERANCE[torch.float32]
    assert check_factor(call.A.bfloat16(), call.k, call.beta, call.g) <= TOLERANCE[torch.bfloat16]
    other_gate = check_factor(call.A, call.k, call.beta, call.g * 1.4427)
    assert other_gate > 3 * TOLERANCE[torch.bfloat16]
    assert check_factor(call.A, call.k.flip(1), call.beta, call.g) > 0.1
    assert check_factor(call.A, call.k, 1 - call.beta, call.g) > 0.1


def test_the_check_follows_packed_sequences():
    call = draw(1, 40, cu=[0, 5, 40])
    assert check_factor(call.A, call.k, call.beta, call.g, call.chunks) <= TOLERANCE[torch.float32]
    assert (
        check_factor(call.A, call.k, call.beta, call.g, torch.tensor([0, 5, 40])) <= TOLERANCE[torch.float32]
    )
    assert check_factor(call.A, call.k, call.beta, call.g) > 1e-3


def test_a_broken_factor_never_passes_the_check():
    call = draw()
    call.A[0, 3, 0, 1] = torch.nan
    assert check_factor(call.A, call.k, call.beta, call.g) == float("inf")
