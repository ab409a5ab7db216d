"""Checks of the two exercises of notebook 00, the quickstart. All tensors are float64."""

from __future__ import annotations

from collections.abc import Callable

import torch

from wyfast_lib.factor import chunk_local_cumsum, wy_factor
from wyfast_lib.inputs import Shape, make_inputs
from wyfast_lib.op import wy_fast
from wyfast_lib.testing import TOLERANCE, error_ratio

DTYPE = torch.float64
BT = 16


def check_exercise_1(shared_key_gradient: Callable) -> None:
    """shared_key_gradient(copies, Hg) -> dk: from the gradient of each head's own copy to that of the keys.

    copies [B, T, H, K]: what k's gradient would be if every value head had a key of its own;
    dk [B, T, Hg, K]: the gradient when head h reads key head h // (H // Hg).

    Raises:
        AssertionError: dk is not the gradient that `wy_fast` gives.
    """
    for H, Hg in ((4, 2), (6, 1), (3, 3), (12, 4)):
        x = make_inputs(Shape(B=2, T=20, H=H, Hg=Hg, K=8, V=6, BT=BT), DTYPE)
        shared, copies = x.k.clone().requires_grad_(), x.k.repeat_interleave(H // Hg, dim=2).requires_grad_()
        for keys in (shared, copies):
            w, u = wy_fast(keys, x.v, x.beta, x.A, x.g)
            (w.square().sum() + u.square().sum()).backward()
        dk = shared_key_gradient(copies.grad.clone(), Hg)
        _expect_equal(dk, shared.grad, f"dk for H = {H}, Hg = {Hg}")


def check_exercise_2(packed: Callable) -> None:
    """packed(lengths, k, v, beta, log_decay, BT) -> (w, u): sequences behind each other in one row.

    lengths: a list of ints, 0 allowed; k [1, T, H, K], v [1, T, H, V], beta and log_decay [1, T, H] with
    T = sum(lengths); w and u as `wy_fast` returns them, equal to those of each sequence alone.

    Raises:
        AssertionError: a sequence's rows differ from what it gives alone.
    """
    for lengths in ([40], [5, 0, 35], [16, 16, 8], [1, 39]):
        x = make_inputs(Shape(B=1, T=40, H=2, Hg=2, K=8, V=6, BT=BT), DTYPE)
        row = (x.k, x.v, x.beta, x.log_decay)
        results = packed(list(lengths), *(t.clone() for t in row), BT)
        assert isinstance(results, (tuple, list)) and len(results) == 2, "expected the pair (w, u)"
        begin = 0
        for number, length in enumerate(lengths):
            k, v, beta, log_decay = (t[:, begin : begin + length] for t in row)
            g = chunk_local_cumsum(log_decay, BT)
            alone = wy_fast(k, v, beta, wy_factor(k, beta, g, BT), g)
            for name, whole, part in zip("wu", results, alone, strict=True):
                assert isinstance(whole, torch.Tensor), f"expected tensors, got {type(whole).__name__}"
                rows = whole[:, begin : begin + length]
                _expect_equal(rows, part, f"{name} of sequence {number} of lengths {lengths}")
            begin += length


def _expect_equal(x: torch.Tensor, ref: torch.Tensor, what: str) -> None:
    assert isinstance(x, torch.Tensor), f"{what}: expected a tensor, got {type(x).__name__}"
    assert x.shape == ref.shape, f"{what}: expected shape {list(ref.shape)}, got {list(x.shape)}"
    error = error_ratio(x, ref)
    assert error <= TOLERANCE[DTYPE], f"{what}: the error ratio is {error:.1e}, allowed {TOLERANCE[DTYPE]}"
