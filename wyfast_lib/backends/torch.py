"""The operator in plain PyTorch: any device, any width, float64 too; the default on CPUs.

Chunks of all heads are gathered into one batch of matrix products, a block of chunks at a time so that a
CPU's cache holds what one block needs. Scales that belong to rows of k and v (beta, exp(g)) are moved onto the
[BT, BT] factor beside them, which is the smaller operand. Products run in float32 (float64 when an input
is), whatever the inputs' dtype, and obey torch's own precision setting (IEEE unless the user asks for TF32).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from wyfast_lib.varlen import ChunkTable

# Elements of one [BT, K] operand over the chunks and heads of a block: 2 MB of float32 stay in a CPU's L2
# cache; an accelerator wants few large launches instead.
CPU_BLOCK, DEVICE_BLOCK = 1 << 19, 1 << 26


def available() -> tuple[bool, str]:
    """Always: PyTorch is the one thing that the package needs."""
    return True, f"torch {torch.__version__}"


def check_call(k, v, beta, A, g, gk, chunks, needs_grad) -> None:
    """Nothing that `wyfast_lib.checks` accepts is refused here."""


class Strided:
    """`count` consecutive chunks of `rows` tokens in each batch row, the first at token `first`."""

    def __init__(self, first: int, count: int, rows: int):
        self.tokens, self.shape = slice(first, first + count * rows), (count, rows)

    def take(self, x: torch.Tensor, dtype: torch.dtype, group: int = 1) -> torch.Tensor:
        """[B, T, h, ...] -> contiguous [h * group * B * count, rows, ...], each head repeated group times."""
        return _heads_first(x[:, self.tokens].unflatten(1, self.shape), dtype, group)

    def take_factor(self, A: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[B, T, H, BT] -> [H * B * count, rows, rows]: past the tail there is no column."""
        return self.take(A[..., : self.shape[1]], dtype)

    def put(self, out: torch.Tensor, tiles: torch.Tensor) -> None:
        """Write tiles [h * B * count, rows, ...] to their tokens of out [B, T, h, ...]."""
        target = out[:, self.tokens].unflatten(1, self.shape).movedim(3, 0)
        target.copy_(tiles.view(target.shape))


class Packed:
    """The chunks [first, last) of packed sequences: gathered by token, short ones filled with zero rows."""

    def __init__(self, tokens: torch.Tensor, valid: torch.Tensor):
        self.tokens, self.valid = tokens, valid

    def take(self, x: torch.Tensor, dtype: torch.dtype, group: int = 1) -> torch.Tensor:
        """[1, T, h, ...] -> contiguous [h * group * n, BT, ...], each head repeated group times."""
        tiles = x[0, self.tokens]  # [n, BT, h, ...]
        absent = ~self.valid.view(*self.valid.shape, *[1] * (tiles.dim() - 2))
        return _heads_first(tiles.masked_fill_(absent, 0)[None], dtype, group)

    def take_factor(self, A: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[1, T, H, BT] -> [H * n, BT, BT], zero past the tail in both directions."""
        tiles = self.take(A, dtype).unflatten(0, (A.shape[2], -1))
        return tiles.masked_fill_(~self.valid[None, :, None, :], 0).flatten(0, 1)

    def put(self, out: torch.Tensor, tiles: torch.Tensor) -> None:
        """Write tiles [h * n, BT, ...] to their tokens of out [1, T, h, ...]; out has a spare token at its end."""
        rows = tiles.unflatten(0, (out.shape[2], -1)).movedim(0, 2).flatten(0, 1)
        target = torch.where(self.valid, self.tokens, out.shape[1] - 1).flatten()
        out[0].index_copy_(0, target, rows.to(out.dtype))


def _heads_first(tiles: torch.Tensor, dtype: torch.dtype, group: int) -> torch.Tensor:
    """[B, n, rows, h, ...] -> contiguous [h * group * B * n, rows, ...] in dtype, in one copy."""
    view = tiles.movedim(3, 0).unsqueeze(1)
    view = view.expand(view.shape[0], group, *view.shape[2:])
    out = torch.empty(view.shape, dtype=dtype, device=view.device)
    return out.copy_(view).flatten(0, 3)


def blocks(x: torch.Tensor, A: torch.Tensor, chunks: ChunkTable | None) -> Iterator[Strided | Packed]:
    """Blocks of equally long chunks that together hold every token; x is the wider of k and v over H heads."""
    B, T, H, BT = A.shape
    budget = CPU_BLOCK if x.device.type == "cpu" else DEVICE_BLOCK
    step = max(1, budget // (B * H * BT * x.shape[3]))
    if chunks is not None:
        tokens, valid = chunks.rows()
        for i in range(0, chunks.num_chunks, step):
            yield Packed(tokens[i : i + step], valid[i : i + step])
        return
    full, tail = divmod(T, BT)
    for i in range(0, full, step):
        yield Strided(i * BT, min(step, full - i), BT)
    if tail:
        yield Strided(full * BT, 1, tail)


def compute_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """float32, or float64 when one of the tensors is."""
    wide = any(x is not None and x.dtype == torch.float64 for x in tensors)
    return torch.float64 if wide else torch.float32


def new_output(like: torch.Tensor, heads: int, width: int | None, chunks: ChunkTable | None) -> torch.Tensor:
    """Empty [B, T, heads(, width)] of like's dtype; packed outputs get a spare token that absent rows go to."""
    B, T = like.shape[:2]
    return like.new_empty(B, T + (chunks is not None), heads, *([] if width is None else [width]))


def forward(k, v, beta, A, g, gk, chunks):
    """w [B, T, H, K] and u [B, T, H, V]; arguments as in `wyfast_lib.wy_fast`."""
    T, H, Hg = A.shape[1], A.shape[2], k.shape[2]
    dtype = compute_dtype(k, v, beta, A, g, gk)
    w, u = new_output(k, H, k.shape[3], chunks), new_output(v, H, v.shape[3], chunks)
    with torch.autocast(k.device.type, enabled=False):
        for block in blocks(v if v.shape[3] > k.shape[3] else k, A, chunks):
            keys = block.take(k, dtype, H // Hg)
            if gk is not None:
                keys.mul_(block.take(gk, dtype, H // Hg).exp_())
            factor = block.take_factor(A, dtype)
            factor.mul_(block.take(beta, dtype)[:, None, :])
            block.put(u, torch.bmm(factor, block.take(v, dtype)))
            if g is not None:
                factor.mul_(block.take(g, dtype).exp_()[:, None, :])
            block.put(w, torch.bmm(factor, keys))
    return w[:, :T], u[:, :T]


def backward(k, v, beta, A, g, dw, du, chunks):
    """dk, dv, dbeta, dg (None when g is) of the shapes and dtypes of k, v, beta, g."""
    T, H, Hg = A.shape[1], A.shape[2], k.shape[2]
    dtype = compute_dtype(k, v, beta, A, g)
    dk, dv = new_output(k, Hg, k.shape[3], chunks), new_output(v, H, v.shape[3], chunks)
    dbeta = new_output(beta, H, None, chunks)
    dg = None if g is None else new_output(g, H, None, chunks)
    with torch.autocast(k.device.type, enabled=False):
        for block in blocks(v if v.shape[3] > k.shape[3] else k, A, chunks):
            tiles = chunk_adjoint(
                block.take(k, dtype, H // Hg),
                block.take_factor(A, dtype),
                None if g is None else block.take(g, dtype),
                *(block.take(x, dtype) for x in (v, beta, dw, du)),
            )
            grouped = tiles[0].unflatten(0, (Hg, H // Hg, -1))
            summed = grouped.flatten(0, 2) if H == Hg else grouped.sum(1).flatten(0, 1)
            for out, tile in zip((dk, dv, dbeta, dg), (summed, *tiles[1:]), strict=True):
                if out is not None:
                    block.put(out, tile)
    return tuple(None if x is None else x[:, :T] for x in (dk, dv, dbeta, dg))


def chunk_adjoint(k, A, g, v, beta, dw, du):
    """The row form of the adjoint for n chunks: k, dw [n, r, K]; v, du [n, r, V]; beta, g [n, r]; A [n, r, r].

    Returns dk, dv, dbeta, dg (None when g is). With N = -(A^T dA A^T) exp(g[i] - g[j]) below the diagonal and
    Z = e^g A^T dw + N k, Y = N^T (beta k), Q = A^T du, every scalar gradient is a row sum of a product that
    dk = beta Z + Y or dv = beta Q needs anyway, so k k^T is never formed.
    """
    eg = None if g is None else g.exp()
    inner = torch.bmm(dw, k.mT)
    if g is not None:
        inner.mul_(eg[:, None, :])
    inner.baddbmm_(du, v.mT)  # dA without the column factor beta, which goes to A^T on its right
    N = torch.bmm(torch.bmm(A.mT, inner), (A * beta[:, None, :]).mT)
    above = torch.ones(N.shape[-2:], dtype=torch.bool, device=N.device).triu()
    if g is not None:
        # The exponent is masked, not the product: above the diagonal exp may be infinite.
        N.mul_((g[:, :, None] - g[:, None, :]).masked_fill_(above, -torch.inf).exp_())
    N = N.masked_fill_(above, 0).neg_()
    Q = torch.bmm(A.mT, du)
    Z = torch.bmm((A if eg is None else A * eg[:, None, :]).mT, dw).baddbmm_(N, k)
    Y = torch.bmm((N * beta[:, :, None]).mT, k)
    from_keys = _row_dot(Z, k)
    dbeta = from_keys + _row_dot(Q, v)
    dg = None if g is None else beta * from_keys - _row_dot(Y, k)
    return Y.addcmul_(beta[..., None], Z), Q.mul_(beta[..., None]), dbeta, dg


def _row_dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a * b).sum(-1)
