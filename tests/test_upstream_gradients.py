"""Upstream gradients that do not fit are refused by name before anything runs, however they come (row 34)."""

from types import SimpleNamespace

import pytest
import torch
from support import GRADIENTS, assert_bitwise, draw, reference, run

from wyfast_lib import WyFastFunction, backends, library
from wyfast_lib.integrations import fla
from wyfast_lib.testing import error_ratio, tolerance

SIZES = dict(B=2, T=40, H=4, Hg=2)
# the changed gradient -> (dw or du, change, exception, message)
UNFIT = {
    "key heads": ("dw", lambda x: x[:, :, :2], ValueError, r"dw must have .*4, 8\], got \[2, 40, 2, 8\]"),
    "one head": ("du", lambda x: x[:, :, :1], ValueError, r"du must have .*\[2, 40, 4, 12\], got"),
    "fewer rows": ("du", lambda x: x[:1], ValueError, r"du must have .*got \[1, 40, 4, 12\]"),
    "more rows": ("dw", lambda x: torch.cat([x, x]), ValueError, r"dw must have .*got \[4, 40, 4, 8\]"),
    "fewer tokens": ("dw", lambda x: x[:, :39], ValueError, r"dw must have .*got \[2, 39, 4, 8\]"),
    "width": ("du", lambda x: x[..., :8], ValueError, r"du must have .*got \[2, 40, 4, 8\]"),
    "rank": ("dw", lambda x: x[0], ValueError, r"dw must have .*got \[40, 4, 8\]"),
    "scalar": ("du", lambda x: x.sum(), ValueError, r"du must have .*got \[\]"),
    "heads first": ("dw", lambda x: x.transpose(1, 2), ValueError, r"dw must have .*got \[2, 4, 40, 8\]"),
    "integers": ("dw", lambda x: x.long(), TypeError, "dw must be float64, .* got torch.int64"),
    "booleans": ("du", lambda x: x.bool(), TypeError, "du must be float64, .* got torch.bool"),
    "complex": ("du", lambda x: x.to(torch.complex64), TypeError, "du must be float64, .* torch.complex64"),
    "sparse": ("dw", lambda x: x.to_sparse(), TypeError, "dw must be dense"),
    "a list": ("dw", lambda x: x.tolist(), TypeError, "dw must be a torch.Tensor"),
    "elsewhere": ("du", lambda x: x.to("meta"), ValueError, "du is on meta, k on"),
}


def context(call, backend, precision="ieee"):
    """What autograd hands to the operator's backward."""
    saved = (call.k, call.v, call.beta, call.A, call.g, None, None)
    return SimpleNamespace(saved_tensors=saved, backend=backend, precision=precision, has_gk=False)


def through_the_function(call, backend, dw, du):
    return WyFastFunction.backward(context(call, backend), dw, du)


def through_the_adapter(call, backend, dw, du):
    g2 = None if call.g is None else call.g / fla.LN2
    return fla.prepare_wy_repr_bwd(call.k, call.v, call.beta, call.A, dw, du, g2)


def through_the_registered_operator(call, backend, dw, du):
    inputs = (call.k, call.v, call.beta, call.A, call.g)
    return library.prepare_wy_repr_bwd(*inputs, dw, du, None, None, backend)


WAYS = [through_the_function, through_the_adapter, through_the_registered_operator]


# PyTorch's own dispatcher turns back lists and sparse tensors, and runs nothing for a meta tensor.
BEFORE_THE_OPERATOR = {"a list", "sparse", "elsewhere"}
REFUSED = [
    pytest.param(way, *case, id=f"{way.__name__}-{n}")
    for way in WAYS
    for n, case in UNFIT.items()
    if way is not through_the_registered_operator or n not in BEFORE_THE_OPERATOR
]


@pytest.mark.parametrize("way, name, change, kind, message", REFUSED)
def test_34_an_upstream_gradient_that_does_not_fit_is_refused(
    backend, device, way, name, change, kind, message, monkeypatch
):
    call = draw(**SIZES, device=device)
    upstream = {"dw": call.dw, "du": call.du}
    upstream[name] = change(upstream[name])
    monkeypatch.setenv("WYFAST_BACKEND", backend)
    monkeypatch.setattr(backends.load(backend), "backward", lambda *_: pytest.fail("the backend was reached"))
    with pytest.raises(kind, match=message):
        way(call, backend, **upstream)


@pytest.mark.parametrize("way", WAYS[:2], ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ["stride zero", "strided", "wider", "half", "negated"])
def test_34_every_upstream_gradient_that_fits_is_taken(backend, device, way, kind, monkeypatch):
    monkeypatch.setenv("WYFAST_BACKEND", backend)
    change = {
        "stride zero": lambda x: x[:, :1, :1].expand(x.shape),
        "strided": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
        "wider": lambda x: x.double(),
        "half": lambda x: x.bfloat16(),
        "negated": lambda x: torch._neg_view(-x),
    }[kind]
    call = draw(**SIZES, device=device)
    call.dw, call.du = change(call.dw), change(call.du)
    found = [x for x in way(call, backend, call.dw, call.du) if x is not None]
    expected = reference(call)
    for name, x in zip(GRADIENTS, found, strict=True):
        assert error_ratio(x, expected[name]) <= tolerance(name, x, call.k, call.v), name


@pytest.mark.parametrize("missing", ["dw", "du"])
def test_34_a_missing_upstream_gradient_counts_as_zeros(backend, device, missing):
    call = draw(**SIZES, device=device)
    upstream = {"dw": call.dw, "du": call.du, missing: None}
    found = [x for x in through_the_function(call, backend, **upstream) if x is not None]
    setattr(call, missing, torch.zeros_like(getattr(call, missing)))
    expected = run(call, backend)
    assert_bitwise(dict(zip(GRADIENTS, found, strict=True)), {n: expected[n] for n in GRADIENTS})


def test_34_the_adapters_build_no_graph_and_take_inputs_that_ask_for_one():
    call = draw(**SIZES)
    k, beta = call.k.clone().requires_grad_(), call.beta.clone().requires_grad_()
    w, u = fla.recompute_w_u_fwd(k, call.v, beta, call.A, call.g)
    gradients = fla.prepare_wy_repr_bwd(k, call.v, beta, call.A, call.dw, call.du, call.g)
    assert not any(x.requires_grad for x in (w, u, *gradients))


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.complex64])
def test_34_a_gate_is_checked_before_the_adapter_scales_it(kind):
    call = draw(**SIZES)
    with pytest.raises(TypeError, match="g must be float64, float32, float16 or bfloat16, got"):
        fla.recompute_w_u_fwd(call.k, call.v, call.beta, call.A, call.g.to(kind))


def test_34_the_forward_adapter_is_not_held_to_the_limits_of_a_backward(monkeypatch):
    monkeypatch.setenv("WYFAST_BACKEND", "lowered")
    call = draw(1, 140, 2, 1, 16, 16, 128)
    w, _ = fla.recompute_w_u_fwd(call.k, call.v, call.beta, call.A, call.g / fla.LN2)
    assert error_ratio(w, reference(call)["w"]) <= tolerance("w", w, call.k, call.v)
    with pytest.raises(NotImplementedError, match="BT = 128"):
        fla.prepare_wy_repr_bwd(call.k, call.v, call.beta, call.A, call.dw, call.du, call.g)
