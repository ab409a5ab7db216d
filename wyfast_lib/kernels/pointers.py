"""Where a chunk lies in memory: shared by the kernels, plain pointers and masks only.

Base offsets are int64 (a tensor may hold more than 2^31 elements); offsets inside a tile are int32, which the
backend guarantees by its limit on heads x width.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def chunk_span(i_c, cu_seqlens, chunk_indices, T, NT, BT: tl.constexpr, IS_VARLEN: tl.constexpr):
    """First token (int64, counted over all of B x T) and number of tokens (int32, 1..BT) of chunk i_c.

    Dense: chunks are counted batch by batch, NT of length BT each, the last of a batch may be short.
    Packed: chunk_indices[i_c] = (sequence, chunk inside that sequence), cu_seqlens holds the sequences'
    bounds.
    """
    if IS_VARLEN:
        i_n = tl.load(chunk_indices + i_c * 2).to(tl.int64)
        i_t = tl.load(chunk_indices + i_c * 2 + 1).to(tl.int64)
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        eos = tl.load(cu_seqlens + i_n + 1).to(tl.int64)
    else:
        i_n = i_c // NT
        i_t = (i_c % NT).to(tl.int64)
        bos = i_n.to(tl.int64) * T
        eos = bos + T
    T_seq = eos - bos
    left = T_seq - i_t * BT
    return bos + i_t * BT, tl.minimum(left, BT).to(tl.int32)


@triton.jit
def load_tile(base, rows, i_d, stride, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """Rows 0..BT of a chunk, columns i_d * BD .. + BD of D; zero past the chunk's end and past D."""
    o_t = tl.arange(0, BT)
    o_d = i_d * BD + tl.arange(0, BD)
    mask = (o_t < rows)[:, None]
    if D % BD != 0:
        mask = mask & (o_d < D)[None, :]
    return tl.load(base + (o_t * stride)[:, None] + o_d[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(base, value, rows, i_d, stride, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """The counterpart of `load_tile`, in the dtype behind the pointer."""
    o_t = tl.arange(0, BT)
    o_d = i_d * BD + tl.arange(0, BD)
    mask = (o_t < rows)[:, None]
    if D % BD != 0:
        mask = mask & (o_d < D)[None, :]
    pointers = base + (o_t * stride)[:, None] + o_d[None, :]
    tl.store(pointers, value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_factor(base, rows, stride, BT: tl.constexpr):
    """A of one chunk, [BT, BT]; zero in rows and columns past the chunk's end, whatever memory holds there.

    The columns are cleared in registers: a mask along the contiguous dimension would make the load scalar.
    """
    o_t = tl.arange(0, BT)
    tile = tl.load(base + (o_t * stride)[:, None] + o_t[None, :], mask=(o_t < rows)[:, None], other=0.0)
    if rows < BT:
        tile = tl.where((o_t < rows)[None, :], tile, 0.0)
    return tile


@triton.jit
def load_gate(base, rows, stride, BT: tl.constexpr):
    """One scalar a token (beta or g) as float32 [BT]; zero past the chunk's end.

    Gates of one head lie `stride` elements apart, so a load costs a memory sector a token. The compiler would
    repeat a load of BT elements once for every register layout in which they are used; it does not repeat one
    of 4 BT, so each token is read by four lanes (one sector, one request) and the copies are reduced to one.
    """
    o_t = tl.arange(0, BT)
    pointers = base + (o_t * stride)[:, None] + tl.zeros([BT, 4], dtype=tl.int32)
    copies = tl.load(pointers, mask=(o_t < rows)[:, None], other=0.0)
    return tl.max(copies.to(tl.float32), 1)


@triton.jit
def store_gate(base, value, rows, stride, BT: tl.constexpr):
    """The counterpart of `load_gate`, in the dtype behind the pointer."""
    o_t = tl.arange(0, BT)
    tl.store(base + o_t * stride, value.to(base.dtype.element_ty), mask=o_t < rows)
