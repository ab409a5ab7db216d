"""torch.func on every public function: right, or refused with what to do instead (row 41)."""

import pytest
import torch
from support import assert_bitwise, draw, run
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

from wyfast_lib import (
    WyFastFunction,
    check_factor,
    chunk_bwd_dv_local,
    chunk_local_cumsum,
    wy_factor,
    wy_fast,
)

NAMES = ("k", "v", "beta", "g")


def loss_of(call, backend):
    """A scalar of (k, v, beta, g) whose gradients are those of the call."""

    def loss(k, v, beta, g):
        w, u = wy_fast(k, v, beta, call.A, g, cu_seqlens=call.chunks, backend=backend)
        return (w * call.dw).sum() + (u * call.du).sum()

    return loss


def leaves_of(call):
    return tuple(getattr(call, n) for n in NAMES)


def several(x, n=3):
    """Different tensors like x, stacked."""
    return torch.stack([x * (1 - 0.2 * i) for i in range(n)])


@pytest.mark.parametrize("cu", [None, [0, 5, 40]])
def test_41_grad_equals_autograd(backend, device, cu):
    call = draw(1 if cu else 2, 40, 4, 2, cu=cu, device=device)
    found = grad(loss_of(call, backend), argnums=(0, 1, 2, 3))(*leaves_of(call))
    expected = run(call, backend)
    assert_bitwise(
        dict(zip(("dk", "dv", "dbeta", "dg"), found, strict=True)),
        {n: expected[n] for n in ("dk", "dv", "dbeta", "dg")},
    )


def test_41_grad_without_a_gate_and_through_the_stages_before(backend, device):
    call = draw(2, 40, 4, 2, gated=False, device=device)

    def loss(k, beta):
        A = wy_factor(k, beta, None, 16)
        return sum(x.square().sum() for x in wy_fast(k, call.v, beta, A, backend=backend))

    found = grad(loss, argnums=(0, 1))(call.k, call.beta)
    leaves = [x.clone().requires_grad_() for x in (call.k, call.beta)]
    for a, b in zip(found, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        assert torch.equal(a, b)


def test_41_vjp_after_the_transform_and_jacrev_equal_autograd(backend, device):
    call = draw(2, 40, 4, 2, device=device)
    expected = run(call, backend)
    _, pull = vjp(lambda k: wy_fast(k, call.v, call.beta, call.A, call.g, backend=backend), call.k)
    assert torch.equal(pull((call.dw, call.du))[0], expected["dk"])
    dk = jacrev(loss_of(call, backend))(*leaves_of(call))
    assert torch.equal(dk, expected["dk"])


def test_41_the_public_function_itself_is_ready_for_transforms():
    call = draw(2, 40, 4, 2)

    def loss(k):
        w, u = WyFastFunction.apply(k, call.v, call.beta, call.A, call.g, None, None, None, "torch")
        return (w * call.dw).sum() + (u * call.du).sum()

    assert torch.equal(grad(loss)(call.k), run(call, "torch")["dk"])


@pytest.mark.parametrize("cu", [None, [0, 5, 5, 40]])
@pytest.mark.parametrize("name, dim", [("k", 0), ("v", 2), ("beta", 0), ("A", 1), ("g", 0)])
def test_41_vmap_equals_a_loop(backend, device, cu, name, dim):
    call = draw(1 if cu else 2, 40, 4, 2, cu=cu, device=device)
    inputs = {n: getattr(call, n) for n in ("k", "v", "beta", "A", "g")}
    many = several(inputs[name])

    def one(x):
        return wy_fast(**(inputs | {name: x}), cu_seqlens=call.chunks, backend=backend)

    w, u = vmap(one, in_dims=dim)(many.movedim(0, dim))
    for i, x in enumerate(many):
        expected = one(x)
        assert torch.equal(w[i], expected[0]) and torch.equal(u[i], expected[1])


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("cu", [None, [0, 5, 40]])
def test_41_gradients_a_sample_equal_a_loop(backend, device, cu, gated):
    """vmap over grad, what per-sample gradients are made of, and grad over vmap."""
    call = draw(1 if cu else 2, 40, 4, 2, cu=cu, gated=gated, device=device)
    loss, many = loss_of(call, backend), several(call.k)
    rest = leaves_of(call)[1:]
    a_sample = vmap(lambda k: grad(loss)(k, *rest))(many)
    together = grad(lambda k: vmap(lambda x: loss(x, *rest))(k).sum())(many)
    for i, k in enumerate(many):
        expected = grad(loss)(k, *rest)
        assert torch.equal(a_sample[i], expected) and torch.equal(together[i], expected)


def test_41_two_vmaps_and_a_batch_of_none_work(backend, device):
    call = draw(2, 40, 4, 2, device=device)

    def one(k, v):
        return wy_fast(k, v, call.beta, call.A, call.g, backend=backend)[1]

    ks, vs = several(call.k, 2), several(call.v, 3)
    u = vmap(lambda k: vmap(lambda v: one(k, v))(vs))(ks)
    assert u.shape == (2, 3, *call.v.shape)
    assert torch.equal(u[1, 2], one(ks[1], vs[2]))
    assert vmap(lambda k: one(k, call.v))(ks[:0]).shape == (0, *call.v.shape)


def test_41_vmap_of_the_other_functions_equals_a_loop(backend, device):
    call = draw(2, 40, 4, 2, device=device)

    def dv(q, do, g):
        return chunk_bwd_dv_local(q, call.k, do, g, chunk_size=16, backend=backend)

    functions = {
        "cumsum": (lambda g: chunk_local_cumsum(g, 16), call.g),
        "factor of k": (lambda k: wy_factor(k, call.beta, call.g, 16), call.k),
        "factor of beta": (lambda b: wy_factor(call.k, b, None, 16), call.beta),
        "dv of q": (lambda q: dv(q, call.du, call.g), call.k),
        "dv of do, no gate": (lambda do: dv(call.k, do, None), call.du),
    }
    for name, (function, x) in functions.items():
        many = several(x)
        for found, one in zip(vmap(function)(many), many, strict=True):
            assert torch.allclose(found, function(one), rtol=1e-6, atol=1e-6), name


def test_41_vmap_of_packed_rows_of_the_other_functions_equals_a_loop(backend, device):
    call = draw(1, 40, 4, 2, cu=[0, 5, 40], device=device)
    functions = {
        "cumsum": (lambda g: chunk_local_cumsum(g, 16, call.chunks), call.g),
        "factor": (lambda k: wy_factor(k, call.beta, call.g, 16, call.chunks), call.k),
        "dv": (lambda d: chunk_bwd_dv_local(
            call.k, call.k, d, call.g, None, call.chunks, chunk_size=16, backend=backend), call.du),
    }  # fmt: skip
    for name, (function, x) in functions.items():
        many = several(x)
        for found, one in zip(vmap(function)(many), many, strict=True):
            assert torch.allclose(found, function(one), rtol=1e-6, atol=1e-6), name


def test_41_a_module_that_uses_the_operator_has_gradients_a_sample():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.key = torch.nn.Linear(6, 8)

        def forward(self, x):
            k = torch.nn.functional.normalize(self.key(x), dim=-1).unsqueeze(2)
            beta = x.new_full((*x.shape[:2], 1), 0.5)
            w, u = wy_fast(k, k, beta, wy_factor(k, beta, None, 16))
            return (w * u).sum()

    layer, x = Layer(), torch.randn(3, 1, 20, 6)
    weights = {n: p.detach() for n, p in layer.named_parameters()}
    found = vmap(grad(lambda p, x: functional_call(layer, p, (x,))), in_dims=(None, 0))(weights, x)
    for i in range(3):
        layer.zero_grad()
        layer(x[i]).backward()
        assert torch.allclose(found["key.weight"][i], layer.key.weight.grad, atol=1e-5)


def test_41_what_cannot_work_says_what_to_do_instead(backend, device):
    call = draw(1, 40, 4, 2, cu=[0, 5, 40], device=device)
    loss, leaves = loss_of(call, backend), leaves_of(call)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative: use torch.func.grad"):
        jvp(lambda k: loss(k, *leaves[1:]), (call.k,), (call.k,))
    with pytest.raises(NotImplementedError, match="no forward-mode derivative: use torch.func.grad"):
        hessian(lambda k: loss(k, *leaves[1:]))(call.k)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad(lambda k: grad(loss)(k, *leaves[1:]).sum())(call.k)
    cuts = torch.tensor([[0, 5, 40], [0, 6, 40]], device=device)
    with pytest.raises(ValueError, match="cu_seqlens must be the same for all calls of a torch.func.vmap"):
        vmap(lambda cu: wy_fast(*leaves[:3], call.A, cu_seqlens=cu, backend=backend))(cuts)
    with pytest.raises(ValueError, match="check_factor returns a number"):
        vmap(lambda k: check_factor(call.A, k, call.beta, call.g, call.chunks))(several(call.k))
    gk = torch.zeros_like(call.k)
    with pytest.raises(NotImplementedError, match="no backward with gk"):
        grad(lambda k: wy_fast(k, *leaves[1:3], call.A, call.g, gk, backend=backend)[0].sum())(call.k)


def test_41_a_limit_of_the_backend_is_named_inside_a_transform():
    call = draw(1, 140, 2, 1, 16, 16, 128)
    with pytest.raises(NotImplementedError, match="BT = 128"):
        grad(loss_of(call, "lowered"))(*leaves_of(call))
