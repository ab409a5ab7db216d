"""Who computes in the benchmark on a CPU: four ways to the same w, u and gradients, and the products alone.

A provider here makes two passes for a case: "forward", a callable that returns (w, u), and
"forward+backward", one that returns (w, u, dk, dv, dbeta, dg).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from wyfast_lib.bench_providers import Case, Pass
from wyfast_lib.factor import wy_factor
from wyfast_lib.inputs import SHAPES, Shape
from wyfast_lib.op import wy_fast
from wyfast_lib.reference import expand_heads, wy_matrix

FORWARD, BOTH = "forward", "forward+backward"
LOOP_BYTES = 5 << 30  # what a token loop may keep for its backward ...
LOOP_TOKENS = 1024  # ... and how far its forward goes: milliseconds a token


def shape_at(T: int) -> Shape:
    """The benchmark's shape at T tokens."""
    return replace(SHAPES["laptop"], T=T)


def with_factor(k, v, beta, A, g):
    """The whole chain of a layer: the factor of this step's k, beta and g, then the operator."""
    return wy_fast(k, v, beta, wy_factor(k, beta, g, A.shape[-1]), g)


def through_the_solve(k, v, beta, A, g):
    """The whole chain for autograd: A = solve(I + M, I), then the two products. T a multiple of BT."""
    BT, H = A.shape[-1], A.shape[2]
    k, v, beta, g = (x.unflatten(1, (-1, BT)).transpose(2, 3) for x in (expand_heads(k, H), v, beta, g))
    unit = torch.eye(BT, dtype=k.dtype)
    M = wy_matrix(k, beta, g)
    A = torch.linalg.solve_triangular(unit + M, unit.expand_as(M), upper=False, unitriangular=True)
    rows = ((beta * g.exp())[..., None] * k, beta[..., None] * v)
    return tuple((A @ x).transpose(2, 3).flatten(1, 2).contiguous() for x in rows)


def token_loop(k, v, beta, A, g):
    """The recurrence, token by token, all heads in one operation; only the chunk size of A is used.

    A memory S [K, K + V] that is emptied at each chunk: fade by exp(g[t] - g[t - 1]), read what stands under
    k[t], write beta[t] times the difference to the row (e^g k, v)[t]. What is written is the row (w, u)[t].
    """
    BT, (B, T, H, V), K = A.shape[-1], v.shape, k.shape[-1]
    k = expand_heads(k, H)
    rows = torch.cat([g.exp()[..., None] * k, v], dim=-1).transpose(1, 2).reshape(B * H, T, K + V)
    k, beta, g = (x.transpose(1, 2).reshape(B * H, T, -1) for x in (k, beta, g))
    written = []
    for t in range(T):
        key = k[:, t, :, None]
        if t % BT == 0:
            row = beta[:, t, None] * rows[:, t : t + 1]
            S = key @ row
        else:
            S = S * (g[:, t] - g[:, t - 1]).exp()[:, None]
            row = beta[:, t, None] * (rows[:, t : t + 1] - key.mT @ S)
            S = torch.baddbmm(S, key, row)
        written.append(row)
    both = torch.cat(written, dim=1).view(B, H, T, K + V).transpose(1, 2)
    return both[..., :K].contiguous(), both[..., K:].contiguous()


@dataclass(frozen=True)
class Way:
    """A differentiable function of (k, v, beta, A, g) as a provider. `makes_factor`: it does not read A."""

    name: str
    call: Callable
    makes_factor: bool = True

    def limit(self, shape: Shape, phase: str) -> str:
        """Why this is not measured at such a shape; empty when it is."""
        if self.call is not token_loop:
            return ""
        state = 4 * shape.B * shape.H * shape.K * (shape.K + shape.V)
        kept = 2 * shape.T * state  # before and after fading
        if phase == BOTH and kept > LOOP_BYTES:
            return f"autograd would keep {kept / 2**30:.0f} GiB"
        if shape.T > LOOP_TOKENS:
            return f"{shape.T} tokens, one after the other, take seconds a call"
        return ""

    def passes(self, case: Case) -> dict[str, Pass]:
        names = ("k", "v", "beta", "A", "g")
        leaves = [x.detach().requires_grad_(n != "A") for n, x in zip(names, case.inputs, strict=True)]
        wanted = [x for n, x in zip(names, leaves, strict=True) if n != "A"]

        def forward():
            with torch.no_grad():
                return self.call(*leaves)

        def both():
            outputs = self.call(*leaves)
            gradients = torch.autograd.grad(outputs, wanted, (case.dw, case.du))
            return (*(x.detach() for x in outputs), *gradients)

        return {FORWARD: forward, BOTH: both}


class BareProducts:
    """The matrix products that the formulas need, and nothing else: the yardstick of the ratios.

    Contiguous batches of all chunks and heads, results into memory that exists already. Forward: A x for the
    scaled keys and values. Backward: the nine of the textbook order, among them k k^T, which ours avoids.
    """

    name, makes_factor = "bare", False

    def limit(self, shape: Shape, phase: str) -> str:
        return "" if shape.T % shape.BT == 0 else "needs whole chunks"

    def passes(self, case: Case) -> dict[str, Pass]:
        BT, H = case.shape.BT, case.shape.H

        def tiles(x):
            """[B, T, H, D] -> [B * n * H, BT, D], contiguous"""
            return x.unflatten(1, (-1, BT)).transpose(2, 3).reshape(-1, BT, x.shape[-1])

        raw = expand_heads(case.k, H)
        A, k, dw, du = (tiles(x) for x in (case.A, raw, case.dw, case.du))
        keys = tiles(raw * (case.beta * case.g.exp())[..., None])
        values = tiles(case.v * case.beta[..., None])
        wide_k, wide_v, square = torch.empty_like(k), torch.empty_like(values), torch.empty_like(A)
        w, u, dA, N = (torch.empty_like(x) for x in (k, values, A, A))

        def forward():
            return torch.bmm(A, keys, out=w), torch.bmm(A, values, out=u)

        def both():
            forward()
            torch.bmm(dw, k.mT, out=dA)
            torch.bmm(du, values.mT, out=square)
            torch.bmm(A.mT, dw, out=wide_k)
            torch.bmm(A.mT, du, out=wide_v)
            torch.bmm(dA, A.mT, out=square)
            torch.bmm(A.mT, square, out=N)
            torch.bmm(k, k.mT, out=square)
            torch.bmm(N, k, out=wide_k)
            torch.bmm(N.mT, k, out=wide_k)
            return w, u

        return {FORWARD: forward, BOTH: both}


PROVIDERS = {
    p.name: p
    for p in (
        Way("wyfast", wy_fast, makes_factor=False),
        Way("wyfast+factor", with_factor),
        Way("autograd-solve", through_the_solve),
        Way("token-loop", token_loop),
        BareProducts(),
    )
}
