"""The operator in plain PyTorch: any device, any width, float64 too; the default on CPUs.

Chunks of all heads are gathered into one batch of matrix products, a block of chunks at a time, through
buffers that all blocks of a call share: what one block needs stays in a CPU's cache, and no block pays for
fresh pages. Products run in float32 (float64 when an input is), whatever the inputs' dtype, and obey torch's
own precision setting (IEEE unless the user asks for TF32).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from wyfast_lib.varlen import Chunks

# Elements of one [BT, K] operand over the chunks and heads of a block: 4 MB of float32, the best of 0.5 to
# 8 MB on a server CPU (larger ones leave its cache, smaller ones pay for more calls); an accelerator
# wants few large launches instead.
CPU_BLOCK, DEVICE_BLOCK = 1 << 20, 1 << 26


def available() -> tuple[bool, str]:
    """Always: PyTorch is the one thing that the package needs."""
    return True, f"torch {torch.__version__}"


def check_call(k, v, beta, A, g, gk, chunks, needs_grad) -> None:
    """Nothing that `wyfast_lib.checks` accepts is refused here."""


class Workspace:
    """Named buffers of one call, one dtype; a name asked for again gives the same memory."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device, self.buffers = dtype, device, {}

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        size = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = torch.empty(size, dtype=self.dtype, device=self.device)
        return self.buffers[name][:size].view(shape)


class Strided:
    """`count` consecutive chunks of `rows` tokens in each batch row, the first at token `first`."""

    def __init__(self, first: int, count: int, rows: int):
        self.tokens, self.shape = slice(first, first + count * rows), (count, rows)

    def tiles(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, h, ...] -> view [B * count, h, rows, ...] (a copy when B > 1 and B and T do not merge)."""
        return x[:, self.tokens].unflatten(1, self.shape).flatten(0, 1).transpose(1, 2)

    def factor(self, A: torch.Tensor) -> torch.Tensor:
        """[B, T, H, BT] -> [B * count, H, rows, rows]: past the tail there is no column."""
        return self.tiles(A[..., : self.shape[1]])

    def gate(self, g: torch.Tensor) -> torch.Tensor:
        """[B, T, H] -> [B * count, H, rows]"""
        return self.tiles(g)

    def put(self, out: torch.Tensor, tiles: torch.Tensor) -> None:
        """Write tiles [B * count, h, rows, ...] to their tokens of out [B, T, h, ...]."""
        target = out[:, self.tokens].unflatten(1, self.shape).transpose(2, 3)
        target.copy_(tiles.view(target.shape))


class Packed:
    """Some chunks of packed sequences: gathered by token, short ones filled with zero rows."""

    def __init__(self, tokens: torch.Tensor, valid: torch.Tensor):
        self.index, self.valid = tokens, valid
        row = torch.arange(valid.shape[1], device=valid.device)
        self.chunk = torch.arange(valid.shape[0], device=valid.device)[:, None]
        self.row = torch.minimum(row, valid.sum(1, keepdim=True) - 1)  # absent rows stand for the last one
        self.last = tokens.gather(1, self.row)

    def tiles(self, x: torch.Tensor) -> torch.Tensor:
        """[1, T, h, ...] -> [n, h, BT, ...]"""
        tiles = x[0, self.index]
        absent = ~self.valid.view(*self.valid.shape, *[1] * (tiles.dim() - 2))
        return tiles.masked_fill_(absent, 0).transpose(1, 2)

    def factor(self, A: torch.Tensor) -> torch.Tensor:
        """[1, T, H, BT] -> [n, H, BT, BT], zero past the tail in both directions."""
        return self.tiles(A).masked_fill_(~self.valid[:, None, None, :], 0)

    def gate(self, g: torch.Tensor) -> torch.Tensor:
        """[1, T, H] -> [n, H, BT]; past the tail the last gate again, for exp(0 - g) would overflow."""
        return g[0, self.last].transpose(1, 2)

    def put(self, out: torch.Tensor, tiles: torch.Tensor) -> None:
        """Write tiles [n, h, BT, ...] to their tokens of out [1, T, h, ...]; absent rows repeat the last."""
        rows = tiles[self.chunk, :, self.row].flatten(0, 1)
        out[0].index_copy_(0, self.last.flatten(), rows.to(out.dtype))


def blocks(A: torch.Tensor, width: int, chunks: Chunks | None) -> Iterator[Strided | Packed]:
    """Blocks of equally long chunks that together hold every token; width is the larger of K and V."""
    B, T, H, BT = A.shape
    budget = CPU_BLOCK if A.device.type == "cpu" else DEVICE_BLOCK
    step = max(1, budget // (B * H * BT * width))
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


def new_output(like: torch.Tensor, heads: int) -> torch.Tensor:
    """Empty [B, T, heads, ...] of like's dtype, contiguous."""
    return like.new_empty(*like.shape[:2], heads, *like.shape[3:])


def gather(tiles: torch.Tensor, out: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Copy tiles [n, h, rows, D] to out [n, h * group, rows, D], each head group times, rows times scale."""
    n, h, *rest = tiles.shape
    source, target = tiles.unsqueeze(2), out.view(n, h, -1, *rest)
    if scale is None:
        target.copy_(source.expand(target.shape))
    else:
        torch.mul(source, scale.view(n, h, -1, rest[0], 1), out=target)
    return out.flatten(0, 1)


def forward(k, v, beta, A, g, gk, chunks, precision=None):
    """w [B, T, H, K] and u [B, T, H, V]; arguments as in `wyfast_lib.wy_fast`; precision has no effect."""
    H, K, V = A.shape[2], k.shape[3], v.shape[3]
    work = Workspace(compute_dtype(k, v, beta, A, g, gk), k.device)
    w, u = new_output(k, H), new_output(v, H)
    with torch.autocast(k.device.type, enabled=False):
        for block in blocks(A, max(K, V), chunks):
            write = block.tiles(beta).to(work.dtype)
            n, _, r = write.shape
            factor = gather(block.factor(A), work("factor", n, H, r, r))
            values = gather(block.tiles(v), work("tile", n, H, r, V), write)
            block.put(u, torch.bmm(factor, values, out=work("product", n * H, r, V)).view(n, H, r, V))
            read = write if g is None else write * block.tiles(g).to(work.dtype).exp()
            keys = gather(block.tiles(k), work("tile", n, H, r, K), read)
            if gk is not None:
                keys.mul_(gather(block.tiles(gk), work("gk", n, H, r, K)).exp_())
            block.put(w, torch.bmm(factor, keys, out=work("product", n * H, r, K)).view(n, H, r, K))
    return w, u


def backward(k, v, beta, A, g, dw, du, chunks, precision=None):
    """dk, dv, dbeta, dg (None when g is) of the shapes and dtypes of k, v, beta, g; precision: no effect."""
    H, Hg, K, V = A.shape[2], k.shape[2], k.shape[3], v.shape[3]
    work = Workspace(compute_dtype(k, v, beta, A, g), k.device)
    dk, dv, dbeta = new_output(k, Hg), new_output(v, H), new_output(beta, H)
    dg = None if g is None else new_output(g, H)
    with torch.autocast(k.device.type, enabled=False):
        for block in blocks(A, max(K, V), chunks):
            write = block.tiles(beta).to(work.dtype).contiguous()
            n, _, r = write.shape
            gate = None if g is None else block.gate(g).to(work.dtype).contiguous()
            keys = gather(block.tiles(k), work("k", n, H, r, K))
            factor = gather(block.factor(A), work("A", n, H, r, r))
            others = (
                gather(block.tiles(x), work(name, n, H, r, x.shape[3]))
                for name, x in (("v", v), ("dw", dw), ("du", du))
            )
            flat = (None if x is None else x.flatten(0, 1) for x in (gate, write))
            tiles = [x if x is None else x.view(n, H, *x.shape[1:])
                     for x in chunk_adjoint(work, keys, factor, *flat, *others)]
            if H != Hg:
                tiles[0] = tiles[0].view(n, Hg, H // Hg, r, K).sum(2)
            for out, tile in zip((dk, dv, dbeta, dg), tiles, strict=True):
                if out is not None:
                    block.put(out, tile)
    return dk, dv, dbeta, dg


def growth(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(2^-n [m, 1], -2^n [m, 1, 1]) for g [m, r]: n the whole power of two in the largest e^g of a row, or 0.

    A^T dA A^T holds e^(g[a] - g[i] + g[j]): where a gate grows, falls and grows again it overflows although
    the gradient, which is that times e^(g[i] - g[j]), does not. Scaled down before and up after, nothing is
    lost: powers of two are exact, and n is 0 wherever gates only decay.
    """
    n = (g.amax(1, keepdim=True).clamp(min=0) * math.log2(math.e)).floor().clamp(max=1000.0)
    return torch.exp2(-n), -torch.exp2(n)[:, :, None]


def split_gate(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """g [m, r] = coarse + fine, exactly; differences of coarse gates are exact, |fine| <= 2^-20 max |g|.

    e^(g[i] - g[j]) = e^(coarse[i] - coarse[j]) e^fine[i] e^-fine[j]: the difference of two gates itself would
    lose up to |g| 2^-24, an error of 3e-6 in the largest terms where gates grow to 50.
    """
    top = g.abs().amax(1, keepdim=True)
    ruler = 1.5 * torch.exp2(top.log2().ceil() + 1)  # its last digit is worth the same at any g + ruler
    coarse = (g + ruler) - ruler
    return coarse, g - coarse


def decay_(x: torch.Tensor, g: torch.Tensor, above: torch.Tensor, free: torch.Tensor) -> None:
    """x [m, r, r] *= e^(g[i] - g[j]) outside `above`, 0 inside (NaN where x is infinite there); g [m, r].

    free: a buffer like x.
    """
    coarse, fine = split_gate(g)
    # The exponent is masked, not the product: above the diagonal exp may be infinite.
    exponent = torch.sub(coarse[:, :, None], coarse[:, None, :], out=free).masked_fill_(above, -torch.inf)
    x.mul_(exponent.exp_()).mul_(fine.exp()[:, :, None]).mul_((-fine).exp()[:, None, :])


def chunk_adjoint(work, k, A, g, beta, v, dw, du):
    """The row form of the adjoint: k, dw [n, r, K]; v, du [n, r, V]; beta, g [n, r]; A [n, r, r].

    Returns dk, dv, dbeta, dg (None when g is), in buffers of `work`. With N = -(A^T dA A^T) exp(g[i] - g[j])
    below the diagonal and Z = e^g A^T dw + N k, Y = N^T (beta k), Q = A^T du, every scalar gradient is a row
    sum of a product that dk = beta Z + Y or dv = beta Q needs anyway, so k k^T is never formed.
    """
    eg = None if g is None else g.exp()
    inner = torch.bmm(dw, k.mT, out=work("inner", *A.shape))
    if g is not None:
        inner.mul_(eg[:, None, :])
    down, up = (1.0, -1.0) if g is None else growth(g)
    inner.baddbmm_(du, v.mT).mul_((beta * down)[:, None, :])  # dA
    # A^T (dA A^T): where gates grow, A^T dA has entries, never needed, that overflow and meet the zeros of A.
    N = torch.bmm(A.mT, torch.bmm(inner, A.mT, out=work("half", *A.shape)), out=inner)
    above = torch.ones(N.shape[-2:], dtype=torch.bool, device=N.device).triu()
    if g is not None:
        decay_(N, g, above, work("half", *A.shape))
    N.mul_(up).masked_fill_(above, 0)
    Q = torch.bmm(A.mT, du, out=work("Q", *du.shape))
    weighted = A if eg is None else torch.mul(A, eg[:, None, :], out=work("scaled", *A.shape))
    Z = torch.bmm(weighted.mT, dw, out=work("Z", *k.shape)).baddbmm_(N, k)
    Y = torch.bmm(torch.mul(N, beta[:, :, None], out=work("half", *A.shape)).mT, k, out=work("Y", *k.shape))

    def row_dot(a, b):
        return torch.mul(a, b, out=work("dot", *a.shape)).sum(-1)

    from_keys = row_dot(Z, k)
    dbeta = from_keys + row_dot(Q, v)
    dg = None if g is None else beta * from_keys - row_dot(Y, k)
    return Y.addcmul_(beta[..., None], Z), Q.mul_(beta[..., None]), dbeta, dg


def check_dv_local(q, k, do, g, chunks, chunk_size) -> None:
    """Nothing that `wyfast_lib.checks` accepts is refused here."""


def dv_local(q, k, do, g, scale, chunks, chunk_size, precision=None):
    """dv [B, T, H, V] of do's dtype; arguments as in `wyfast_lib.chunk_bwd_dv_local`."""
    (B, T, H, V), Hg, K = do.shape, k.shape[2], k.shape[3]
    work = Workspace(compute_dtype(q, k, do, g), do.device)
    dv = new_output(do, H)
    shape = do.new_empty(()).expand(B, T, H, chunk_size)  # `blocks` reads sizes and device only
    with torch.autocast(do.device.type, enabled=False):
        for block in blocks(shape, max(K, V), chunks):
            keys = block.tiles(k)
            n, _, r, _ = keys.shape
            keys = gather(keys, work("k", n, Hg, r, K))
            queries = gather(block.tiles(q), work("q", n, Hg, r, K))
            scores = torch.bmm(queries, keys.mT, out=work("inner", n * Hg, r, r)).mul_(scale)
            scores = gather(scores.view(n, Hg, r, r), work("scores", n, H, r, r))
            above = torch.ones(r, r, dtype=torch.bool, device=do.device).triu(1)
            if g is not None:
                gate = block.gate(g).to(work.dtype).flatten(0, 1)
                decay_(scores, gate, above, work("decay", n * H, r, r))
            scores.masked_fill_(above, 0)
            upstream = gather(block.tiles(do), work("do", n, H, r, V))
            product = torch.bmm(scores.mT, upstream, out=work("product", n * H, r, V))
            block.put(dv, product.view(n, H, r, V))
    return dv
