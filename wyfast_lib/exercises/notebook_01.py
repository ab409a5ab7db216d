"""Checks of the two exercises of notebook 01, the WY representation. All tensors are float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from wyfast_lib.testing import TOLERANCE, error_ratio

DTYPE = torch.float64


def check_exercise_1(merge_factors: Callable) -> None:
    """merge_factors(A1, A2, C) -> A: the factor of two neighbouring blocks from the factors of each.

    A1 [n, n] = (I + M1)^-1, A2 [m, m] = (I + M2)^-1, C [m, n] the block of M below M1 and left of M2;
    A [n + m, n + m] = (I + M)^-1.

    Raises:
        AssertionError: A is not the inverse.
    """
    random = torch.Generator().manual_seed(1)
    for n, m in ((1, 1), (8, 8), (16, 5)):
        M = torch.randn(n + m, n + m, dtype=DTYPE, generator=random).tril(-1) / (n + m) ** 0.5
        whole = torch.linalg.inv(torch.eye(n + m, dtype=DTYPE) + M)
        A = merge_factors(whole[:n, :n].clone(), whole[n:, n:].clone(), M[n:, :n].clone())
        _expect_shape(A, (n + m, n + m))
        for name, rows, columns in (
            ("upper left", slice(None, n), slice(None, n)),
            ("upper right", slice(None, n), slice(n, None)),
            ("lower right", slice(n, None), slice(n, None)),
            ("lower left", slice(n, None), slice(None, n)),
        ):
            _expect_equal(A[rows, columns], whole[rows, columns], f"the {name} block, n={n}, m={m}")


def check_exercise_2(read_before_write: Callable) -> None:
    """read_before_write(q, k, w, u, g, S) -> o: outputs of one chunk when o[t] = S[t-1]^T q[t], unscaled.

    q, k, w [r, K]; u [r, V]; g [r] the cumulated log decay; S [K, V] the state before the chunk; o [r, V].

    Raises:
        AssertionError: o differs from the rule run token by token, at mild or at strong decay.
    """
    for r, strength in ((1, 0.1), (16, 0.1), (16, 60.0)):
        q, k, v, beta, log_decay, S = _chunk(r, strength)
        g = log_decay.cumsum(0)
        below = torch.ones(r, r, dtype=torch.bool).tril(-1)
        decay = (g[:, None] - g[None, :]).masked_fill(~below, -torch.inf).exp()
        A = torch.linalg.inv(torch.eye(r, dtype=DTYPE) + beta[:, None] * (k @ k.mT) * decay)
        w, u = A @ (k * (beta * g.exp())[:, None]), A @ (v * beta[:, None])
        o = read_before_write(q, k, w, u, g, S.clone())
        _expect_shape(o, v.shape)
        _expect_equal(o, _read_before_write_loop(q, k, v, beta, log_decay, S), f"o, r={r}, decay x{strength}")


def _read_before_write_loop(q, k, v, beta, log_decay, S):
    outputs = []
    for t in range(len(q)):
        outputs.append(S.mT @ q[t])
        S = log_decay[t].exp() * S
        S = S + torch.outer(k[t], beta[t] * (v[t] - S.mT @ k[t]))
    return torch.stack(outputs)


def _chunk(r: int, strength: float, K: int = 8, V: int = 6):
    random = torch.Generator().manual_seed(2)

    def draw(*size):
        return torch.randn(*size, dtype=DTYPE, generator=random)

    q, k = F.normalize(draw(r, K), dim=-1), F.normalize(draw(r, K), dim=-1)
    return q, k, draw(r, V), draw(r).sigmoid(), -strength * draw(r).abs(), draw(K, V)


def _expect_shape(x: torch.Tensor, shape: tuple[int, ...]) -> None:
    assert isinstance(x, torch.Tensor), f"expected a tensor, got {type(x).__name__}"
    assert tuple(x.shape) == tuple(shape), f"expected shape {list(shape)}, got {list(x.shape)}"


def _expect_equal(x: torch.Tensor, ref: torch.Tensor, what: str) -> None:
    assert torch.isfinite(x).all(), f"{what}: there is a NaN or an infinity"
    error = error_ratio(x, ref)
    assert error <= TOLERANCE[DTYPE], f"{what}: the error ratio is {error:.1e}, allowed {TOLERANCE[DTYPE]}"
