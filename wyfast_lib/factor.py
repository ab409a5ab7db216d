"""The stage before the operator: the chunk-local gate and the factor A = (I + M)^-1.

Both work on padded chunks: a chunk that is cut short by its sequence's end is filled with tokens that write
nothing (k = 0) and never decay.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from wyfast_lib.checks import (
    FLOATS,
    check_keys_and_gates,
    check_same_device,
    check_shape,
    check_tensor,
    warn_if_heads_first,
)
from wyfast_lib.tensors import fake_mode_of, is_batched, shapes_only
from wyfast_lib.testing import error_ratio
from wyfast_lib.varlen import Chunks, ChunkTable, check_chunk_size, resolve_chunks


def chunk_local_cumsum(
    g: torch.Tensor, chunk_size: int, cu_seqlens: torch.Tensor | ChunkTable | None = None
) -> torch.Tensor:
    """Sum the log decay inside each chunk: out[t] = sum of g[s] from the chunk's first token to t.

    Differentiable. Natural log in, natural log out.

    Args:
        g: [B, T, H], each token's own log decay, any floating dtype.
        chunk_size: BT, one of 16, 32, 64, 128.
        cu_seqlens: int32 / int64 [N + 1] or a table of `prepare_chunks`; B must be 1 then.

    Returns:
        [B, T, H]; float64 for float64, else float32: a cumulated gate in bfloat16 is off by up to 0.125
        between 32 and 64, which is up to 28 % in exp(g[i] - g[j]).

    Raises:
        TypeError, ValueError: as `wy_fast`.
    """
    check_tensor("g", g, "[B, T, H]", 3)
    check_chunk_size(chunk_size)
    warn_if_heads_first("g", *g.shape[1:], cu_seqlens)
    chunks = resolve_chunks(cu_seqlens, chunk_size, g, "g")
    with fake_mode_of(g):
        tiles = _pad_to_chunks(g.to(_compute_dtype(g)), chunk_size, chunks)
        # cumsum is on autocast's list of float32 operations, so no autocast guard is needed here.
        return _unpad(tiles.cumsum(2), g.shape[1], chunks)


@torch.no_grad()
def wy_factor(
    k: torch.Tensor,
    beta: torch.Tensor,
    g: torch.Tensor | None,
    chunk_size: int,
    cu_seqlens: torch.Tensor | ChunkTable | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A = (I + M)^-1 of every chunk, M[i, j] = beta[i] <k[i], k[j]> exp(g[i] - g[j]) for i > j.

    A blocked inverse by matrix products, so that it runs on devices without a triangular solve. Detached:
    the gradient through A is part of `wy_fast`'s backward. Normalise k: with unnormalised keys A grows
    without bound (randn keys, K = 64: 1e16 and far more, infinite in float16); with L2-normalised keys and
    beta <= 1 no element exceeds 1.

    Args:
        k: [B, T, Hg, K] keys; beta: [B, T, H]; g: [B, T, H] chunk-local cumulated log decay, or None.
        chunk_size: BT, one of 16, 32, 64, 128.
        cu_seqlens: int32 / int64 [N + 1] or a table of `prepare_chunks`; B must be 1 then.
        out_dtype: dtype of A; default the dtype of k. Inside it is float32, float64 for float64 inputs.

    Returns:
        A: [B, T, H, BT], unit lower triangular a chunk; zero right of the diagonal and past a chunk's tail.

    Raises:
        TypeError, ValueError: as `wy_fast`.
    """
    B, T, H, Hg, K = check_keys_and_gates(k, beta, g)
    check_chunk_size(chunk_size)
    if out_dtype is not None and out_dtype not in FLOATS:
        raise TypeError(f"out_dtype must be float64, float32, float16 or bfloat16, got {out_dtype!r}")
    check_same_device(k=k, beta=beta, g=g)
    warn_if_heads_first("beta", T, H, cu_seqlens)
    chunks = resolve_chunks(cu_seqlens, chunk_size, k, "k")
    with fake_mode_of(k):
        return _factor(k, beta, g, chunk_size, chunks, out_dtype or k.dtype)


def _factor(k, beta, g, chunk_size: int, chunks: Chunks | None, out_dtype: torch.dtype) -> torch.Tensor:
    """`wy_factor` of checked arguments."""
    T, Hg, H = *k.shape[1:3], beta.shape[2]
    dtype = _compute_dtype(k, beta, g)
    gate = torch.zeros_like(beta, dtype=dtype) if g is None else g.to(dtype)
    with torch.autocast("cpu" if k.is_meta else k.device.type, enabled=False):  # meta has no autocast
        tiles = (_pad_to_chunks(x.to(dtype), chunk_size, chunks) for x in (k, beta, gate))
        keys, write, gate = (x.transpose(2, 3) for x in tiles)  # [B, n, heads, BT, ...]
        gram = (keys @ keys.mT).repeat_interleave(H // Hg, dim=2)
        valid = _valid_rows(T, chunk_size, chunks, k.device)[:, None, :, None]  # [n, 1, BT, 1]
        mask = valid & torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=k.device).tril(-1)
        decay = (gate[..., :, None] - gate[..., None, :]).masked_fill(~mask, -torch.inf).exp()
        M = (write[..., :, None] * gram * decay).masked_fill(~mask, 0.0)
        A = invert_unit_lower(M).to(out_dtype)
    return _unpad(A.transpose(2, 3), T, chunks)


def invert_unit_lower(M: torch.Tensor) -> torch.Tensor:
    """(I + M)^-1 for M [..., n, n] strictly lower triangular, n a power of two.

    Doubles the size of the inverted diagonal blocks: with X and Z inverted,
    [[X, 0], [C, Z]]^-1 = [[X^-1, 0], [-Z^-1 C X^-1, Z^-1]]; log2(n) steps of batched products.
    """
    n = M.shape[-1]
    A = torch.zeros_like(M) + torch.eye(n, dtype=M.dtype, device=M.device)  # of M: batched when M is
    size = 1
    while size < n:
        blocks = (*M.shape[:-2], n // (2 * size), 2, size, n // (2 * size), 2, size)

        def block(x, row, column, blocks=blocks):
            diagonal = x.view(blocks).diagonal(dim1=-6, dim2=-3)  # [..., 2, size, 2, size, n / (2 size)]
            return diagonal[..., row, :, column, :, :].movedim(-1, -3)

        X, Z, C = block(A, 0, 0), block(A, 1, 1), block(M, 1, 0)
        block(A, 1, 0).copy_(-(Z @ (C @ X)))
        size *= 2
    return A


def check_factor(
    A: torch.Tensor,
    k: torch.Tensor,
    beta: torch.Tensor,
    g: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | ChunkTable | None = None,
) -> float:
    """Error ratio of A against the float64 factor of these inputs.

    The backward of `wy_fast` is the true gradient only when A is the factor of the same (k, beta, g). A
    factor kept in half precision gives about that dtype's rounding error (1e-3 in bfloat16); a value well
    above means that A belongs to other inputs (about 1), to another chunk size, or to a gate in log2 instead
    of natural log (a few percent at usual gates).

    Args:
        A: [B, T, H, BT]; k: [B, T, Hg, K]; beta: [B, T, H]; g: [B, T, H] or None; cu_seqlens as in `wy_fast`.

    Returns:
        rms(A - factor) / rms(factor), 0 when they agree.

    Raises:
        TypeError, ValueError: as `wy_fast`; ValueError too for meta and fake tensors, inside torch.func.vmap
            and inside a graph of torch.compile, which have no number to return.
    """
    check_tensor("A", A, "[B, T, H, BT]", 4)
    B, T, H, Hg, K = check_keys_and_gates(k, beta, g)
    BT = A.shape[3]
    check_chunk_size(BT, "A.shape[-1]")
    check_shape("A", A, "[B, T, H, BT]", (B, T, H, BT))
    check_same_device(A=A, k=k, beta=beta, g=g)
    _check_has_values(A, k, beta, g)
    warn_if_heads_first("A", T, H, cu_seqlens)
    chunks = resolve_chunks(cu_seqlens, BT, k, "k")
    k, beta, g = (None if x is None else x.detach().to("cpu", torch.float64) for x in (k, beta, g))
    if chunks is not None:
        chunks = Chunks(chunks.cu_seqlens.cpu(), chunks.indices.cpu(), BT, T)  # some devices have no float64
    with torch.no_grad():
        return error_ratio(A, _factor(k, beta, g, BT, chunks, torch.float64))


def _check_has_values(*tensors: torch.Tensor | None) -> None:
    """Raise ValueError where a number cannot be computed from these tensors now."""
    if torch.compiler.is_compiling():
        raise ValueError("check_factor must be called outside of torch.compile: it returns a number")
    for x in tensors:
        if x is not None and (shapes_only(x) or is_batched(x)):
            raise ValueError(
                "check_factor returns a number and needs values: it cannot take meta or fake tensors, nor be "
                "called inside torch.func.vmap"
            )


def _compute_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    wide = any(x is not None and x.dtype == torch.float64 for x in tensors)
    return torch.float64 if wide else torch.float32


def _pad_to_chunks(x: torch.Tensor, BT: int, chunks: Chunks | None) -> torch.Tensor:
    """[B, T, ...] -> [B, n, BT, ...], zero where a chunk has no token."""
    if chunks is not None:
        tokens, valid = chunks.rows()
        return torch.where(valid.view(1, *valid.shape, *[1] * (x.dim() - 2)), x[:, tokens], 0)
    n = (x.shape[1] + BT - 1) // BT
    padded = F.pad(x, (0, 0) * (x.dim() - 2) + (0, n * BT - x.shape[1]))
    return padded.unflatten(1, (n, BT))


def _unpad(tiles: torch.Tensor, T: int, chunks: Chunks | None) -> torch.Tensor:
    """[B, n, BT, ...] -> [B, T, ...], contiguous."""
    if chunks is None:
        return tiles.flatten(1, 2)[:, :T].contiguous()
    return tiles.flatten(1, 2)[:, chunks.positions()].contiguous()


def _valid_rows(T: int, BT: int, chunks: Chunks | None, device: torch.device) -> torch.Tensor:
    """bool [n, BT]: does this chunk row hold a token?"""
    if chunks is not None:
        return chunks.rows()[1]
    n = (T + BT - 1) // BT
    return (torch.arange(n * BT, device=device) < T).view(n, BT)
