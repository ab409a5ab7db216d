"""Gradients against finite differences in float64, for every subset of inputs that may ask for one."""

from itertools import combinations

import pytest
import torch
from support import draw
from torch.autograd import gradcheck
from torch.autograd.gradcheck import GradcheckError

from wyfast_lib import chunk_local_cumsum, wy_factor, wy_fast

NAMES = ("k", "v", "beta", "g")
SUBSETS = [s for n in range(1, 5) for s in combinations(NAMES, n)]


def tensors(gated=True, cu=None):
    call = draw(1, 19, 2, 1, 3, 2, 16, dtype=torch.float64, gated=gated, cu=cu)
    return {n: getattr(call, n) for n in NAMES}, call


# The fast mode compares one random projection; the full one, every element, runs once a question.


def through_the_factor(inputs, wanted, chunks=None, fixed=None):
    """A function of the wanted inputs for gradcheck, the others constant; `fixed` replaces the factor."""

    def f(*values):
        x = inputs | dict(zip(wanted, values, strict=True))
        A = wy_factor(x["k"], x["beta"], x["g"], 16, chunks) if fixed is None else fixed
        return wy_fast(x["k"], x["v"], x["beta"], A, x["g"], cu_seqlens=chunks)

    return f, tuple(inputs[n].clone().requires_grad_() for n in wanted)


@pytest.mark.parametrize("wanted", SUBSETS, ids="-".join)
def test_gradients_of_every_subset_pass(wanted):
    inputs, _ = tensors()
    assert gradcheck(*through_the_factor(inputs, wanted), fast_mode=len(wanted) < 4)


@pytest.mark.parametrize("wanted", [s for s in SUBSETS if "g" not in s], ids="-".join)
def test_gradients_without_a_gate_pass(wanted):
    inputs, _ = tensors(gated=False)
    assert gradcheck(*through_the_factor(inputs, wanted), fast_mode=True)


def test_gradients_of_packed_sequences_pass():
    inputs, call = tensors(cu=[0, 3, 3, 19])
    assert gradcheck(*through_the_factor(inputs, NAMES, call.chunks), fast_mode=True)


@pytest.mark.parametrize("wanted", [("k",), ("beta",), ("g",), NAMES], ids="-".join)
def test_gradients_with_a_fixed_factor_fail(wanted):
    """The backward is the adjoint of the whole chain: with A held constant it is not the derivative."""
    inputs, call = tensors()
    with pytest.raises(GradcheckError):
        gradcheck(*through_the_factor(inputs, wanted, fixed=call.A), fast_mode=True)


def test_the_value_gradient_alone_does_not_go_through_the_factor():
    inputs, call = tensors()
    assert gradcheck(*through_the_factor(inputs, ("v",), fixed=call.A))


def test_gradients_reach_the_raw_gate():
    inputs, _ = tensors()
    step = -torch.rand(1, 19, 2, dtype=torch.float64)

    def f(k, v, beta, step):
        g = chunk_local_cumsum(step, 16)
        return wy_fast(k, v, beta, wy_factor(k, beta, g, 16), g)

    leaves = (inputs["k"], inputs["v"], inputs["beta"], step)
    assert gradcheck(f, tuple(x.clone().requires_grad_() for x in leaves), fast_mode=True)
