"""Tensors without values give shapes and dtypes and no launch; wrappers are refused by name (row 39)."""

import pytest
import torch
from support import draw
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from wyfast_lib import (
    check_factor,
    chunk_bwd_dv_local,
    chunk_local_cumsum,
    prepare_chunks,
    wy_factor,
    wy_fast,
)
from wyfast_lib.backends import NAMES, load
from wyfast_lib.integrations import fla

EVERY_BACKEND = (None, *NAMES)  # also those that this machine has not: nothing is launched
HALF = dict(dtype=torch.bfloat16, gate_dtype=torch.float32)


@pytest.fixture(autouse=True)
def nothing_is_launched(monkeypatch):
    for name in NAMES:
        for function in ("forward", "backward", "dv_local"):
            if hasattr(load(name), function):
                monkeypatch.setattr(load(name), function, lambda *_: pytest.fail("launched"))


def valueless(call, kind):
    """The call with tensors that have no values."""
    if kind == "meta":
        return call.map(lambda x: x.to("meta"))
    mode = FakeTensorMode()
    return call.map(mode.from_tensor)


KINDS = ["meta", "fake"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on", EVERY_BACKEND)
@pytest.mark.parametrize("gated", [True, False])
def test_39_forward_and_backward_give_shapes_and_dtypes(on, kind, gated):
    call = valueless(draw(2, 40, 4, 2, gated=gated, **HALF), kind)
    leaves = [x.requires_grad_() for x in (call.k, call.v, call.beta, call.g) if x is not None]
    w, u = wy_fast(call.k, call.v, call.beta, call.A, call.g, backend=on)
    gradients = torch.autograd.grad((w, u), leaves, (call.dw, call.du))
    for x, like in zip((w, u, *gradients), (call.dw, call.du, *leaves), strict=True):
        assert x.shape == like.shape and x.dtype == like.dtype and x.device == like.device
        assert type(x) is type(like) and x.is_contiguous()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on", EVERY_BACKEND)
def test_39_the_local_part_of_dv_gives_a_shape_and_dtype(on, kind):
    call = valueless(draw(2, 40, 4, 2, **HALF), kind)
    dv = chunk_bwd_dv_local(call.k, call.k, call.du, call.g, chunk_size=16, backend=on)
    assert dv.shape == call.du.shape and dv.dtype == torch.bfloat16 and type(dv) is type(call.du)


@pytest.mark.parametrize("kind", KINDS)
def test_39_the_stages_before_give_shapes_and_dtypes(kind):
    call = valueless(draw(2, 40, 4, 2, **HALF), kind)
    g, A = chunk_local_cumsum(call.g, 16), wy_factor(call.k, call.beta, call.g, 16)
    assert g.shape == call.g.shape and g.dtype == torch.float32 and type(g) is type(call.g)
    assert A.shape == (2, 40, 4, 16) and A.dtype == torch.bfloat16 and type(A) is type(call.A)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_39_the_adapters_give_shapes_and_dtypes(name, kind, monkeypatch):
    monkeypatch.setenv("WYFAST_BACKEND", name)
    call = valueless(draw(2, 40, 4, 2, **HALF), kind)
    w, u = fla.recompute_w_u_fwd(call.k, call.v, call.beta, call.A, call.g)
    gradients = fla.prepare_wy_repr_bwd(call.k, call.v, call.beta, call.A, call.dw, call.du, call.g)
    wanted = (call.dw, call.du, call.k, call.v, call.beta, call.g)
    for x, like in zip((w, u, *gradients), wanted, strict=True):
        assert x.shape == like.shape and x.dtype == like.dtype and type(x) is type(like)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("form", ["table", "offsets"])
@pytest.mark.parametrize("on", EVERY_BACKEND)
def test_39_fake_inputs_beside_real_offsets_or_a_real_table(on, form, inside):
    call, mode = draw(1, 40, 4, 2, cu=[0, 5, 40], **HALF), FakeTensorMode()
    cu = call.chunks if form == "table" else torch.tensor([0, 5, 40])
    call = call.map(mode.from_tensor)
    with mode if inside else torch.no_grad():
        w, u = wy_fast(call.k, call.v, call.beta, call.A, call.g, cu_seqlens=cu, backend=on)
        dv = chunk_bwd_dv_local(call.k, call.k, call.du, call.g, None, cu, chunk_size=16, backend=on)
        A, g = wy_factor(call.k, call.beta, call.g, 16, cu), chunk_local_cumsum(call.g, 16, cu)
    for x, like in ((w, call.dw), (u, call.du), (dv, call.du), (A, call.A), (g, call.g)):
        assert isinstance(x, FakeTensor) and x.shape == like.shape


@pytest.mark.parametrize("on", EVERY_BACKEND)
def test_39_inputs_that_are_made_inside_the_mode_work(on):
    with FakeTensorMode():
        k, v, A = (torch.empty(1, 33, 2, n, dtype=torch.float16) for n in (24, 40, 64))
        beta = torch.empty(1, 33, 2)
        w, u = wy_fast(k, v, beta, A, backend=on)
    assert w.shape == k.shape and u.shape == v.shape and isinstance(w, FakeTensor)


def test_39_a_fake_row_without_tokens_works():
    call = valueless(draw(1, 0, 4, 2), "fake")
    w, u = wy_fast(call.k.requires_grad_(), call.v, call.beta, call.A, call.g)
    (dk,) = torch.autograd.grad((w, u), call.k, (call.dw, call.du))
    assert w.shape == call.dw.shape and dk.shape == call.k.shape


@pytest.mark.parametrize("kind", KINDS)
def test_39_what_needs_values_says_so(kind):
    call = valueless(draw(), kind)
    with pytest.raises(ValueError, match="check_factor returns a number and needs values"):
        check_factor(call.A, call.k, call.beta, call.g)
    cu = torch.tensor([0, 5, 40])
    cu = cu.to("meta") if kind == "meta" else FakeTensorMode().from_tensor(cu)
    with pytest.raises(ValueError, match="cu_seqlens must have values"):
        prepare_chunks(cu, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_39_bad_input_without_values_is_refused_too(kind):
    call = valueless(draw(), kind)
    with pytest.raises(ValueError, match="v must have shape"):
        wy_fast(call.k, call.v[:, :39], call.beta, call.A, call.g)
    with pytest.raises(ValueError, match="backend must be one of"):
        wy_fast(call.k, call.v, call.beta, call.A, call.g, backend="nonsense")


@pytest.mark.parametrize("fake", ["k", "v", "beta", "A", "g"])
def test_39_one_fake_input_among_real_ones_is_refused_before_a_launch(backend, device, fake):
    call = draw(device=device)
    setattr(call, fake, FakeTensorMode().from_tensor(getattr(call, fake)))
    with pytest.raises(Exception, match="FakeTensor"):
        wy_fast(call.k, call.v, call.beta, call.A, call.g, backend=backend)


class Wrapper(torch.Tensor):
    """A tensor around another one, as DTensor and quantised tensors are."""

    @staticmethod
    def __new__(cls, x):
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device)

    def __init__(self, x):
        self.inner = x

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} reached a wrapper")


@pytest.fixture
def dtensor(tmp_path):
    """Makes a DTensor of a tensor, in a process group of one."""
    from torch import distributed
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield lambda x: distribute_tensor(x, mesh)
    distributed.destroy_process_group()


def refusals(wrap):
    """Every public function with every one of its tensors wrapped in turn: (argument, call)."""
    c = draw()
    inputs = dict(k=c.k, v=c.v, beta=c.beta, A=c.A, g=c.g, gk=torch.zeros_like(c.k))
    for name in inputs:
        yield name, lambda n=name: wy_fast(**(inputs | {n: wrap(inputs[n])}))
    for name in ("q", "k", "do", "g"):
        local = dict(q=c.k, k=c.k, do=c.du, g=c.g)
        yield name, lambda n=name, a=local: chunk_bwd_dv_local(**(a | {n: wrap(a[n])}), chunk_size=16)
    for name in ("k", "beta", "g"):
        stage = dict(k=c.k, beta=c.beta, g=c.g)
        yield name, lambda n=name, a=stage: wy_factor(**(a | {n: wrap(a[n])}), chunk_size=16)
    yield "g", lambda: chunk_local_cumsum(wrap(c.g), 16)
    yield "A", lambda: check_factor(wrap(c.A), c.k, c.beta, c.g)
    yield "cu_seqlens", lambda: prepare_chunks(wrap(torch.tensor([0, 40])), 16)
    yield "cu_seqlens", lambda: wy_fast(c.k, c.v, c.beta, c.A, cu_seqlens=wrap(torch.tensor([0, 40])))
    upstream = dict(dw=c.dw, du=c.du)
    for name in upstream:
        yield name, lambda n=name: fla.prepare_wy_repr_bwd(
            c.k, c.v, c.beta, c.A, **(upstream | {n: wrap(upstream[n])})
        )
    yield "g", lambda: fla.recompute_w_u_fwd(c.k, c.v, c.beta, c.A, wrap(c.g))


def test_39_a_wrapper_subclass_is_refused_by_every_function():
    for name, call in refusals(Wrapper):
        with pytest.raises(TypeError, match=f"{name} must be a plain torch.Tensor, got .*Wrapper"):
            call()


def test_39_a_dtensor_is_refused_by_every_function(dtensor):
    for name, call in refusals(dtensor):
        with pytest.raises(TypeError, match=f"{name} must be a plain torch.Tensor, got .*DTensor"):
            call()


def test_39_a_nested_tensor_is_refused():
    call = draw()
    nested = torch.nested.nested_tensor([call.k[0], call.k[0, :3]], layout=torch.jagged)
    with pytest.raises(TypeError, match="k must be dense and strided"):
        wy_fast(nested, call.v, call.beta, call.A, call.g)
