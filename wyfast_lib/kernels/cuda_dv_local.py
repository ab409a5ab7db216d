"""The CUDA kernel of `chunk_bwd_dv_local`: dv[j] = scale sum_{i >= j} <q[i], k[j]> e^(g[i] - g[j]) do[i].

Names follow the field, as in `cuda.py`: H key heads, HV value heads. One program computes one chunk of one
key head with all its value heads, so that q k^T is formed once per group.

The scores are formed transposed, k q^T, as the second product wants them: the transpose of a product's result
as an operand is what Triton 3.4 to 3.7.0 miscompiles on Hopper.
"""

import triton
import triton.language as tl

from wyfast_lib.kernels.exponents import exp_difference
from wyfast_lib.kernels.pointers import chunk_span, load_gate, load_tile, store_tile


@triton.jit(do_not_specialize=["T", "NT"])
def chunk_bwd_dv_local_kernel(
    q, k, do, dv, g, cu_seqlens, chunk_indices, T, NT, scale,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    USE_G: tl.constexpr, IS_VARLEN: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q, k [B, T, H, K]; do [B, T, HV, V]; g [B, T, HV]; scale float32 -> dv [B, T, HV, V]; all contiguous.

    DOT: dtype of the products' operands.
    """
    i = tl.program_id(0)
    i_h, i_c = i % H, i // H
    start, rows = chunk_span(i_c, cu_seqlens, chunk_indices, T, NT, BT, IS_VARLEN)
    o_t = tl.arange(0, BT)
    # [j, i]: the row writes, the column reads, later or at once
    reads = (o_t[:, None] <= o_t[None, :]) & (o_t < rows)[None, :]

    key_row = (start * H + i_h) * K
    b_S = tl.zeros([BT, BT], dtype=tl.float32)
    for i_k in range(tl.cdiv(K, BK)):
        b_k = load_tile(k + key_row, rows, i_k, H * K, K, BT, BK).to(DOT)
        b_q = load_tile(q + key_row, rows, i_k, H * K, K, BT, BK).to(DOT)
        b_S = tl.dot(b_k, tl.trans(b_q), b_S, input_precision=PRECISION)
    b_S *= scale
    for i_g in range(HV // H):
        row = start * HV + i_h * (HV // H) + i_g
        b_s = b_S
        if USE_G:
            # e^(g[i] - g[j]) at [j, i]: of the negated gates
            b_s = b_S * exp_difference(-load_gate(g + row, rows, HV, BT), reads)
        else:
            b_s = tl.where(reads, b_s, 0.0)
        b_s = b_s.to(DOT)
        for i_v in range(tl.cdiv(V, BV)):
            b_do = load_tile(do + row * V, rows, i_v, HV * V, V, BT, BV).to(DOT)
            b_dv = tl.dot(b_s, b_do, input_precision=PRECISION)
            store_tile(dv + row * V, b_dv, rows, i_v, HV * V, V, BT, BV)
