"""Views and subclasses whose values are in plain memory, or nearly: the values count (rows 39 and 40)."""

import dataclasses

import pytest
import torch
from support import assert_bitwise, draw, run

from wyfast_lib import (
    check_factor,
    chunk_bwd_dv_local,
    chunk_local_cumsum,
    prepare_chunks,
    wy_factor,
    wy_fast,
)
from wyfast_lib.backends import ascend_plan, lowered
from wyfast_lib.integrations import fla


def negated(x):
    """x as a view whose memory holds -x."""
    view = torch._neg_view(-x)
    assert view.is_neg() and torch.equal(view, x)
    return view


def conjugated(x):
    """x as the imaginary part of a conjugate, which is such a view with a stride of two."""
    if x.dtype not in (torch.float32, torch.float64):
        return negated(x)  # there is no complex bfloat16
    view = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert view.is_neg() and torch.equal(view, x)
    return view


LAZY = [negated, conjugated]
TENSORS = ("k", "v", "beta", "A", "g", "dw", "du")


@pytest.mark.parametrize("lazy", LAZY)
@pytest.mark.parametrize("cu", [None, [0, 5, 40]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_40_lazily_negated_views_keep_their_sign(backend, device, dtype, cu, lazy):
    call = draw(1, 40, 4, 2, cu=cu, dtype=dtype, device=device)
    assert_bitwise(run(call.map(lazy), backend), run(call, backend))


@pytest.mark.parametrize("name", TENSORS)
def test_40_each_lazily_negated_tensor_keeps_its_sign(backend, device, name):
    call = draw(1, 40, 4, 2, device=device)
    expected = run(call, backend)
    setattr(call, name, negated(getattr(call, name)))
    assert_bitwise(run(call, backend), expected)


@pytest.mark.parametrize("lazy", LAZY)
def test_40_a_lazily_negated_channel_gate_keeps_its_sign(backend, device, lazy):
    call = draw(1, 40, 4, 2, device=device)
    call.gk = -torch.rand(call.k.shape, device=device)
    expected = run(call, backend)
    call.gk = lazy(call.gk)
    assert_bitwise(run(call, backend), expected)


@pytest.mark.parametrize("lazy", LAZY)
def test_40_the_local_part_of_dv_keeps_the_sign(backend, device, lazy):
    call = draw(1, 40, 4, 2, device=device)

    def dv(q, k, do, g):
        return chunk_bwd_dv_local(q, k, do, g, chunk_size=16, backend=backend)

    plain = (call.k, call.k, call.du, call.g)
    assert torch.equal(dv(*map(lazy, plain)), dv(*plain))


@pytest.mark.parametrize("lazy", LAZY)
def test_40_the_stages_before_the_check_and_the_adapters_keep_the_sign(lazy):
    call = draw(1, 40, 4, 2)
    views = call.map(lazy)
    assert torch.equal(chunk_local_cumsum(views.g, 16), chunk_local_cumsum(call.g, 16))
    factor = wy_factor(call.k, call.beta, call.g, 16)
    assert torch.equal(wy_factor(views.k, views.beta, views.g, 16), factor)
    assert check_factor(views.A, views.k, views.beta, views.g) < 1e-6
    plain = (call.k, call.v, call.beta, call.A, call.dw, call.du, call.g)
    lazily = (views.k, views.v, views.beta, views.A, views.dw, views.du, views.g)
    pairs = zip(fla.prepare_wy_repr_bwd(*lazily), fla.prepare_wy_repr_bwd(*plain), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    found, expected = (fla.recompute_w_u_fwd(*x[:4], x[-1]) for x in (lazily, plain))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_40_a_kernel_that_is_run_on_negated_views_reads_and_writes_their_values():
    """`wyfast_lib.ascend.run` by itself, without the operator before it: inputs and outputs may be views."""
    call = draw(1, 40, 4, 2)
    launch, w, u = ascend_plan.plan_forward(
        call.k, call.v, call.beta, call.A, call.g, None, None, lowered.device()
    )
    lowered.execute(launch)
    assert not w.isnan().any()
    floats = {n: x for n, x in launch.args.items() if torch.is_tensor(x) and x.is_floating_point()}
    views = launch.args | {n: negated(x) for n, x in floats.items()}
    views["w"], views["u"] = (torch._neg_view(torch.zeros_like(x)) for x in (w, u))
    lowered.execute(dataclasses.replace(launch, args=views))
    assert views["w"].is_neg() and torch.equal(views["w"], w) and torch.equal(views["u"], u)


def test_40_lazily_negated_offsets_keep_their_sign():
    cu = torch._neg_view(torch.tensor([0, -5, -40]))
    assert prepare_chunks(cu, 16).cu_seqlens.tolist() == [0, 5, 40]


@pytest.mark.parametrize("name", ["v", "g", "dw"])
def test_40_a_lazy_zero_is_zero(backend, device, name):
    """Autograd's stand-in for an undefined gradient; it has no memory at all."""
    call = draw(1, 40, 4, 2, device=device)
    setattr(call, name, torch.zeros_like(getattr(call, name)))
    expected = run(call, backend)
    zero = torch._efficientzerotensor(getattr(call, name).shape, device=device)
    assert zero._is_zerotensor()
    upstream = {"dw": call.dw, "du": call.du}
    inputs = {n: getattr(call, n) for n in TENSORS[:5]} | ({} if name == "dw" else {name: zero})
    w, u = wy_fast(inputs.pop("k").requires_grad_(), **inputs, backend=backend)
    (dk,) = torch.autograd.grad((w, u), call.k, list((upstream | {name: zero}).values())[:2])
    assert torch.equal(w, expected["w"]) and torch.equal(u, expected["u"]) and torch.equal(dk, expected["dk"])


class Named(torch.Tensor):
    """A subclass without storage tricks, as users make for bookkeeping."""


def test_39_a_plain_subclass_is_an_ordinary_tensor(backend, device):
    call = draw(1, 40, 4, 2, device=device)
    assert_bitwise(run(call.map(lambda x: x.as_subclass(Named)), backend), run(call, backend))


def test_39_a_parameter_is_an_ordinary_tensor_and_gets_its_gradient(backend, device):
    call = draw(1, 40, 4, 2, device=device)
    k, v, beta, g = (torch.nn.Parameter(x.clone()) for x in (call.k, call.v, call.beta, call.g))
    outputs = wy_fast(k, v, beta, call.A, g, backend=backend)
    torch.autograd.backward(outputs, (call.dw, call.du))
    expected = run(call, backend)
    assert_bitwise(
        dict(zip(("dk", "dv", "dbeta", "dg"), (x.grad for x in (k, v, beta, g)), strict=True)),
        {n: expected[n] for n in ("dk", "dv", "dbeta", "dg")},
    )
    assert torch.equal(outputs[0], expected["w"])
