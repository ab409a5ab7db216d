"""The operator in plain PyTorch: any device, any width, float64 too; the default on CPUs.

All chunks of a head are one batched matrix product on strided views of the inputs. Scales that belong to
rows of k and v (beta, exp(g)) are moved onto the [BT, BT] factor beside them, which is the smaller operand,
so no scaled copy of k or v is made. Products run in float32 (float64 when an input is), whatever the inputs'
dtype; float32 products obey torch's own precision setting (IEEE unless the user asks for TF32).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from wyfast_lib.varlen import ChunkTable


def available() -> tuple[bool, str]:
    """Always: PyTorch is the one thing that the package needs."""
    return True, f"torch {torch.__version__}"


def check_call(k, v, beta, A, g, gk, chunks, needs_grad) -> None:
    """Nothing that `wyfast_lib.checks` accepts is refused here."""


class Strided:
    """n chunks of one length, evenly spaced in time: taken as views, no copy.

    `first` is the token where they begin.
    """

    def __init__(self, first: int, count: int, rows: int):
        self.first, self.count, self.rows = first, count, rows

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, ...] -> [B * n, rows, ...]; a view whenever the strides of B and n can be merged."""
        tiles = x[:, self.first : self.first + self.count * self.rows]
        return tiles.unflatten(1, (self.count, self.rows)).flatten(0, 1)

    def take_factor(self, A: torch.Tensor) -> torch.Tensor:
        """[B, T, BT] -> [B * n, rows, rows]: past the tail there is no column."""
        return self.take(A)[..., : self.rows]

    def put(self, out: torch.Tensor, tiles: torch.Tensor) -> None:
        """Write tiles [B * n, rows, ...] to their tokens of out [B, T, ...]."""
        view = out[:, self.first : self.first + self.count * self.rows].unflatten(1, (self.count, self.rows))
        view.copy_(tiles.unflatten(0, view.shape[:2]))


class Packed:
    """The chunks of packed sequences: gathered by token, short ones filled with zero rows."""

    def __init__(self, chunks: ChunkTable):
        self.tokens, self.valid = chunks.rows()
        self.positions = chunks.positions()

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """[1, T, ...] -> [NT, BT, ...]"""
        tiles = x[0].index_select(0, self.tokens.flatten()).unflatten(0, self.valid.shape)
        return tiles.masked_fill_(~self.valid.view(*self.valid.shape, *[1] * (tiles.dim() - 2)), 0)

    def take_factor(self, A: torch.Tensor) -> torch.Tensor:
        """[1, T, BT] -> [NT, BT, BT], zero past the tail in both directions."""
        return self.take(A).masked_fill_(~self.valid[:, None, :], 0)

    def put(self, out: torch.Tensor, tiles: torch.Tensor) -> None:
        """Write tiles [NT, BT, ...] to their tokens of out [1, T, ...]."""
        out[0].copy_(tiles.flatten(0, 1).index_select(0, self.positions))


def tilings(T: int, BT: int, chunks: ChunkTable | None) -> Iterator[Strided | Packed]:
    """The batches of equally long chunks that cover all tokens: full ones, then the tails; or packed ones."""
    if chunks is not None:
        yield Packed(chunks)
        return
    full, tail = divmod(T, BT)
    if full:
        yield Strided(0, full, BT)
    if tail:
        yield Strided(full * BT, 1, tail)


def compute_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """float32, or float64 when one of the tensors is."""
    wide = any(x is not None and x.dtype == torch.float64 for x in tensors)
    return torch.float64 if wide else torch.float32


def forward(k, v, beta, A, g, gk, chunks):
    """w [B, T, H, K] and u [B, T, H, V]; arguments as in `wyfast_lib.wy_fast`."""
    B, T, H, BT = A.shape
    group = H // k.shape[2]
    dtype = compute_dtype(k, v, beta, A, g, gk)
    w, u = k.new_empty(B, T, H, k.shape[3]), v.new_empty(B, T, H, v.shape[3])
    with torch.autocast(k.device.type, enabled=False):
        for tiling in tilings(T, BT, chunks):
            for h in range(H):
                kv = h // group
                keys = tiling.take(k[:, :, kv]).to(dtype)
                if gk is not None:
                    keys = keys * tiling.take(gk[:, :, kv]).to(dtype).exp()
                values, write = tiling.take(v[:, :, h]).to(dtype), tiling.take(beta[:, :, h]).to(dtype)
                factor = tiling.take_factor(A[:, :, h]).to(dtype)
                factor = factor * write[:, None, :]  # columns scaled by beta
                tiling.put(u[:, :, h], factor @ values)
                if g is not None:
                    factor = factor * tiling.take(g[:, :, h]).to(dtype).exp()[:, None, :]
                tiling.put(w[:, :, h], factor @ keys)
    return w, u


def backward(k, v, beta, A, g, dw, du, chunks):
    """dk, dv, dbeta, dg (None when g is) of the shapes and dtypes of k, v, beta, g."""
    B, T, H, BT = A.shape
    Hg = k.shape[2]
    group = H // Hg
    dtype = compute_dtype(k, v, beta, A, g)
    dk, dv, dbeta = (x.new_empty(x.shape) for x in (k, v, beta))
    dg = None if g is None else g.new_empty(g.shape)
    with torch.autocast(k.device.type, enabled=False):
        for tiling in tilings(T, BT, chunks):
            for kv in range(Hg):
                keys, dkeys = tiling.take(k[:, :, kv]).to(dtype), None
                for h in range(kv * group, (kv + 1) * group):
                    own, *rest = head_adjoint(
                        keys,
                        tiling.take_factor(A[:, :, h]).to(dtype),
                        None if g is None else tiling.take(g[:, :, h]).to(dtype),
                        *(tiling.take(x[:, :, h]).to(dtype) for x in (v, beta, dw, du)),
                    )
                    dkeys = own if dkeys is None else dkeys.add_(own)
                    for out, tiles in zip((dv, dbeta, dg), rest, strict=True):
                        if out is not None:
                            tiling.put(out[:, :, h], tiles)
                tiling.put(dk[:, :, kv], dkeys)
    return dk, dv, dbeta, dg


def head_adjoint(k, A, g, v, beta, dw, du):
    """The row form of the adjoint for n chunks of one head.

    k, dw: [n, r, K]; v, du: [n, r, V]; beta, g: [n, r]; A: [n, r, r]. Returns dk, dv, dbeta, dg (None when
    g is). With N = -(A^T dA A^T) exp(g[i] - g[j]) below the diagonal, P = A^T dw, Q = A^T du, X = N k and
    Y = N^T (beta k), every scalar gradient is a row sum of a product that dk needs anyway: no k k^T.
    """
    eg = None if g is None else g.exp()
    read = beta if eg is None else beta * eg
    dA = (dw @ k.mT).mul_(read[:, None, :]).add_((du @ v.mT).mul_(beta[:, None, :]))
    N = A.mT @ (dA @ A.mT)
    lower = torch.ones(N.shape[-2:], dtype=torch.bool, device=N.device).tril(-1)
    if g is not None:
        # The exponent is masked, not the product: above the diagonal exp may be infinite.
        N.mul_((g[:, :, None] - g[:, None, :]).masked_fill_(~lower, -torch.inf).exp_())
    N = N.neg_().masked_fill_(~lower, 0)
    P, Q = A.mT @ dw, A.mT @ du
    X = N @ k
    Y = (N.mT * beta[:, None, :]) @ k
    from_w = _row_dot(P, k) if eg is None else eg * _row_dot(P, k)
    through_k = from_w + _row_dot(X, k)
    dbeta = through_k + _row_dot(Q, v)
    dg = None if g is None else beta * through_k - _row_dot(Y, k)
    dk = P.mul_(read[..., None]).add_(X.mul_(beta[..., None])).add_(Y)
    return dk, Q.mul_(beta[..., None]), dbeta, dg


def _row_dot(a, b):
    return torch.einsum("nik,nik->ni", a, b)
