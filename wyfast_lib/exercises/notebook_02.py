"""Checks of the two exercises of notebook 02, the gradient through the inverse. All tensors are float64."""

from __future__ import annotations

from collections.abc import Callable

import torch

from wyfast_lib.factor import chunk_local_cumsum
from wyfast_lib.testing import TOLERANCE, error_ratio

DTYPE = torch.float64


def check_exercise_1(gradient_of_log_decay: Callable) -> None:
    """gradient_of_log_decay(dg, chunk_size) -> da [T], where g is the chunk-local sum of a; dg [T].

    Raises:
        AssertionError: da differs from automatic differentiation through `chunk_local_cumsum`.
    """
    random = torch.Generator().manual_seed(3)
    for T, chunk_size in ((16, 16), (64, 16), (70, 32), (5, 64)):
        a, dg = (torch.randn(T, dtype=DTYPE, generator=random) for _ in range(2))
        leaf = a.requires_grad_()
        g = chunk_local_cumsum(leaf[None, :, None], chunk_size)[0, :, 0]
        (expected,) = torch.autograd.grad(g, leaf, dg)
        da = gradient_of_log_decay(dg.clone(), chunk_size)
        _expect_equal(da, expected, f"da, T={T}, chunks of {chunk_size}")


def check_exercise_2(gradient_without_the_inverse: Callable) -> None:
    """gradient_without_the_inverse(M, dA) -> dM [n, n], strictly lower; M [n, n] strictly lower, dA [n, n].

    Raises:
        AssertionError: dM differs from automatic differentiation through the inverse of I + M.
    """
    random = torch.Generator().manual_seed(4)
    for n in (2, 16, 64):
        M, dA = (torch.randn(n, n, dtype=DTYPE, generator=random) / n**0.5 for _ in range(2))
        leaf = M.tril(-1).requires_grad_()
        A = torch.linalg.inv(torch.eye(n, dtype=DTYPE) + leaf.tril(-1))
        (expected,) = torch.autograd.grad(A, leaf, dA)
        _expect_equal(gradient_without_the_inverse(M.tril(-1), dA.clone()), expected, f"dM, n={n}")


def _expect_equal(x: torch.Tensor, ref: torch.Tensor, what: str) -> None:
    assert isinstance(x, torch.Tensor), f"{what}: expected a tensor, got {type(x).__name__}"
    assert x.shape == ref.shape, f"{what}: expected shape {list(ref.shape)}, got {list(x.shape)}"
    assert torch.isfinite(x).all(), f"{what}: there is a NaN or an infinity"
    error = error_ratio(x, ref)
    assert error <= TOLERANCE[DTYPE], f"{what}: the error ratio is {error:.1e}, allowed {TOLERANCE[DTYPE]}"
