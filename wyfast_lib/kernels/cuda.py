"""The two kernels for NVIDIA GPUs: w, u forward, and the whole adjoint in one launch.

Names follow the field: H key heads, HV value heads (HV % H == 0), BT tokens a chunk, BK and BV tile widths.
One program computes one chunk of one head (forward) or of one key head with all its value heads (backward),
so
that dk is summed in registers. Programs are numbered head first: neighbours read neighbouring memory, and the
32-byte sectors of the gates are shared in L2.

The backward uses the adjoint in a form in which every operand of a product is a tile as it lies in memory or
the
result of a product, never a scaled copy of k or v. With E = diag(e^g), D = diag(beta), P = A^T dw, Q = A^T
du:

    T = (P k^T E + Q v^T) D                      (= A^T dA, without forming dA)
    N = -(T A^T)[i, j] e^(g[i] - g[j])           for i > j, else 0
    S = k k^T,  x = rowsum(N * S),  y = colsum(D N * S)
    dv = D Q            dk = D E P + (D N + (D N)^T) k
    dbeta = e^g diag(P k^T) + diag(Q v^T) + x
    dg = beta (e^g diag(P k^T) + x) - y

All row sums come from [BT, BT] tiles (<P, k> is the diagonal of P k^T), so no [BT, K] tile is ever multiplied
element by element with k or v. S and the sum of D N over the heads of a group are shared by the group.

Gates may grow. T[i, j] holds e^(g[a] - g[i] + g[j]) for a >= i, an element of A times an e^g[j]: it may
overflow where no result does, also in elements that meet only zeros of A. So T and N are kept times 2^-n,
with n the whole power of two in the largest e^g of the chunk: no larger than A. Where gates decay n is 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from wyfast_lib.kernels.exponents import exp_difference, exp_gate, growth
from wyfast_lib.kernels.pointers import (
    chunk_span,
    load_factor,
    load_gate,
    load_tile,
    store_gate,
    store_tile,
)


@triton.jit(do_not_specialize=["T", "NT"])
def recompute_w_u_fwd_kernel(
    k, v, beta, w, u, A, g, gk, cu_seqlens, chunk_indices, T, NT,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    USE_G: tl.constexpr, USE_GK: tl.constexpr, IS_VARLEN: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """w = A (beta e^g e^gk k), u = A (beta v) for one chunk and one value head.

    The scale goes to the columns of A, so that k and v are used as they lie in memory.

    k [B, T, H, K], v [B, T, HV, V], beta and g [B, T, HV], A [B, T, HV, BT], gk [B, T, H, K] -> w [B, T, HV,
    K],
    u [B, T, HV, V]; all contiguous. DOT: dtype of the products' operands.
    """
    i = tl.program_id(0)
    i_h, i_c = i % HV, i // HV
    start, rows = chunk_span(i_c, cu_seqlens, chunk_indices, T, NT, BT, IS_VARLEN)
    row = start * HV + i_h
    key_row = start * H + i_h // (HV // H)

    b_b = load_gate(beta + row, rows, HV, BT)
    if USE_G:
        b_g = load_gate(g + row, rows, HV, BT)
    b_A = load_factor(A + row * BT, rows, HV * BT, BT).to(tl.float32)
    if V <= BV:
        b_v = load_tile(v + row * V, rows, 0, HV * V, V, BT, BV).to(DOT)
    if K <= BK:
        b_k = load_tile(k + key_row * K, rows, 0, H * K, K, BT, BK)

    b_A *= b_b[None, :]
    b_Au = b_A.to(DOT)
    for i_v in range(tl.cdiv(V, BV)):
        if V > BV:
            b_v = load_tile(v + row * V, rows, i_v, HV * V, V, BT, BV).to(DOT)
        b_u = tl.dot(b_Au, b_v, input_precision=PRECISION)
        store_tile(u + row * V, b_u, rows, i_v, HV * V, V, BT, BV)

    if USE_G:
        b_A *= exp_gate(b_g)[None, :]
    b_Aw = b_A.to(DOT)
    for i_k in range(tl.cdiv(K, BK)):
        if K > BK:
            b_k = load_tile(k + key_row * K, rows, i_k, H * K, K, BT, BK)
        if USE_GK:
            b_gk = load_tile(gk + key_row * K, rows, i_k, H * K, K, BT, BK).to(tl.float32)
            b_kk = (b_k.to(tl.float32) * exp_gate(b_gk)).to(DOT)
        else:
            b_kk = b_k.to(DOT)
        b_w = tl.dot(b_Aw, b_kk, input_precision=PRECISION)
        store_tile(w + row * K, b_w, rows, i_k, HV * K, K, BT, BK)


@triton.jit(do_not_specialize=["T", "NT"])
def prepare_wy_repr_bwd_kernel(
    k, v, beta, g, A, dw, du, dk, dv, db, dg, cu_seqlens, chunk_indices, T, NT,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    USE_G: tl.constexpr, IS_VARLEN: tl.constexpr, KEEP_P: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one chunk, one key head and its HV // H value heads; formulas in the module's docstring.

    dw [B, T, HV, K], du [B, T, HV, V] -> dk [B, T, H, K], dv [B, T, HV, V], db and dg [B, T, HV]; the rest
    as in
    the forward kernel; all contiguous. KEEP_P holds the sum of D E P in registers (one tile must hold all of
    K);
    without it P is computed a second time at the end, from tiles that are still on the chip.
    """
    G: tl.constexpr = HV // H
    NK: tl.constexpr = (K + BK - 1) // BK
    ONE: tl.constexpr = G * NK == 1
    i = tl.program_id(0)
    i_h, i_c = i % H, i // H
    start, rows = chunk_span(i_c, cu_seqlens, chunk_indices, T, NT, BT, IS_VARLEN)
    key_base = k + (start * H + i_h) * K
    o_t = tl.arange(0, BT)

    if ONE:
        row = start * HV + i_h
        b_b = load_gate(beta + row, rows, HV, BT)
        b_c = b_b
        if USE_G:
            b_g = load_gate(g + row, rows, HV, BT)
            b_eg = exp_gate(b_g)
            b_c *= b_eg
        b_A = load_factor(A + row * BT, rows, HV * BT, BT).to(DOT)
        b_dw = load_tile(dw + row * K, rows, 0, HV * K, K, BT, BK).to(DOT)
    if NK == 1:
        b_k = load_tile(key_base, rows, 0, H * K, K, BT, BK).to(DOT)
    b_M = tl.zeros([BT, BT], dtype=tl.float32)  # sum of D N over the group
    b_dk = tl.zeros([BT, BK], dtype=tl.float32)
    for i_g in range(G):
        row = start * HV + i_h * G + i_g
        if not ONE:
            b_b = load_gate(beta + row, rows, HV, BT)
            b_c = b_b
            if USE_G:
                b_g = load_gate(g + row, rows, HV, BT)
                b_eg = exp_gate(b_g)
                b_c *= b_eg
            b_A = load_factor(A + row * BT, rows, HV * BT, BT).to(DOT)
        if V <= BV:
            b_du = load_tile(du + row * V, rows, 0, HV * V, V, BT, BV).to(DOT)
            b_v = load_tile(v + row * V, rows, 0, HV * V, V, BT, BV).to(DOT)
        b_T = tl.zeros([BT, BT], dtype=tl.float32)
        for i_k in range(NK):
            if not ONE:
                b_dw = load_tile(dw + row * K, rows, i_k, HV * K, K, BT, BK).to(DOT)
            if NK > 1:
                b_k = load_tile(key_base, rows, i_k, H * K, K, BT, BK).to(DOT)
            b_P = tl.dot(tl.trans(b_A), b_dw, input_precision=PRECISION)
            b_T = tl.dot(b_P.to(DOT), tl.trans(b_k), b_T, input_precision=PRECISION)
            if KEEP_P:
                b_dk += b_P * b_c[:, None]
        down = 1.0
        up = 1.0
        if USE_G:
            if DOT != tl.float16:  # float16 cannot hold such an A, and would lose Q times 2^-n
                down, up = growth(b_g)
            b_T *= (b_eg * down)[None, :]
        b_p = tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_T, 0.0), 1)  # e^g <P, k>

        for i_v in range(tl.cdiv(V, BV)):
            if V > BV:
                b_du = load_tile(du + row * V, rows, i_v, HV * V, V, BT, BV).to(DOT)
                b_v = load_tile(v + row * V, rows, i_v, HV * V, V, BT, BV).to(DOT)
            b_Q = tl.dot(tl.trans(b_A), b_du, input_precision=PRECISION)
            b_T = tl.dot((b_Q * down).to(DOT), tl.trans(b_v), b_T, input_precision=PRECISION)
            store_tile(dv + row * V, b_Q * b_b[:, None], rows, i_v, HV * V, V, BT, BV)
        b_pq = tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_T, 0.0), 1)  # e^g <P, k> + <Q, v>

        b_T *= -b_b[None, :]
        b_N = tl.dot(b_T.to(DOT), tl.trans(b_A), input_precision=PRECISION)
        below = (o_t[:, None] > o_t[None, :]) & (o_t < rows)[:, None]
        if USE_G:
            b_N *= exp_difference(b_g, below)
        else:
            b_N = tl.where(below, b_N, 0.0)

        b_S = tl.zeros([BT, BT], dtype=tl.float32)
        for i_k in range(NK):
            if NK > 1:
                b_k = load_tile(key_base, rows, i_k, H * K, K, BT, BK).to(DOT)
            b_S = tl.dot(b_k, tl.trans(b_k), b_S, input_precision=PRECISION)
        b_x = tl.sum(b_N * b_S, 1)
        b_N *= (b_b * up)[:, None]
        store_gate(db + row, (b_pq + b_x) * up, rows, HV, BT)
        if USE_G:
            b_y = tl.sum(b_N * b_S, 0)
            store_gate(dg + row, b_b * up * (b_p + b_x) - b_y, rows, HV, BT)
        b_M += b_N

    b_Mk = b_M.to(DOT)
    b_Mk += tl.trans(b_Mk)  # exact: one is below the diagonal, the other above
    dk_base = dk + (start * H + i_h) * K
    for i_k in range(NK):
        if NK > 1:
            b_k = load_tile(key_base, rows, i_k, H * K, K, BT, BK).to(DOT)
        if not KEEP_P:
            b_dk = tl.zeros([BT, BK], dtype=tl.float32)
            for i_g in range(G):
                row = start * HV + i_h * G + i_g
                if not ONE:
                    b_c = load_gate(beta + row, rows, HV, BT)
                    if USE_G:
                        b_c *= exp_gate(load_gate(g + row, rows, HV, BT))
                    b_A = load_factor(A + row * BT, rows, HV * BT, BT).to(DOT)
                    b_dw = load_tile(dw + row * K, rows, i_k, HV * K, K, BT, BK).to(DOT)
                b_Ac = (b_A * b_c[None, :]).to(DOT)
                b_dk = tl.dot(tl.trans(b_Ac), b_dw, b_dk, input_precision=PRECISION)
        b_dk = tl.dot(b_Mk, b_k, b_dk, input_precision=PRECISION)
        store_tile(dk_base, b_dk, rows, i_k, H * K, K, BT, BK)
