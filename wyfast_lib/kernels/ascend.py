"""Triton-Ascend kernels: the forward pass, and the whole backward pass in one launch.

An AI core of the NPU is a cube (matrix products, fed from L1) beside two vector units (everything else, fed
from UB), and what passes from one to the other crosses global memory. So the backward pass keeps every
K- or V-wide tile on the cube and gives the vector units chunk-wide tiles [BT, BT] only:

    S1 = dw k^T, S2 = du v^T, G = k k^T                       cube
    dA = S1 (beta e^g)_j + S2 beta_j                          vector
    N' = -beta_i (A^T dA A^T)_ij e^(g_i - g_j) for i > j      cube, cube, vector
    dv = (A beta_j)^T du                                      cube, straight to global memory
    dk = (A beta_j e^g_j)^T dw + N' k + N'^T k                cube, one accumulator, straight to global memory
    dbeta_j = sum_i A (S1 e^g_j + S2) + sum_i (N G)_ji        N = N' / beta_i before the multiplication
    dg_j = sum_i (A beta_j S1 e^g_j - N' G)_ij + beta_j sum_i (N G)_ji

A sum over rows (axis 0) would keep the compiler from splitting the vector work over the two vector units; a
product with a tile of ones gives the same sum on the cube. For a group of heads that share a key head the
accumulator of dk stays in L0C over the whole group, so no per-head dk ever exists.

Rules that every line here keeps (each was seen to matter in the compiler's output):
- a tile that was the left operand of a dot is dead afterwards;
- the cube multiplies valid rows only and then writes the whole tile out, so right of and below the valid part
  a product holds whatever the accumulator held before: vector code masks it with `where`, never by a product;
- dA A^T comes before A^T: A^T dA overflows where gates grow. A gate that grows, falls and grows again in one
  chunk still passes through e^(2 g): up to g = 44 it is right, beyond that dk, dbeta and dg are not finite;
- the exponent is masked before `exp`; indices are int64 before they meet a stride; pointers are rebuilt for
  each task; both sides of a layout flag are never live in one compile.
"""

import triton
import triton.language as tl


@triton.jit
def _chunk_of(i_c, cu_seqlens, chunk_indices, T, BT: tl.constexpr, IS_VARLEN: tl.constexpr):
    """Chunk number -> (batch index, first row of its sequence, rows of its sequence, first row in it)."""
    if IS_VARLEN:
        i_n = tl.load(chunk_indices + i_c * 2).to(tl.int64)
        i_t = tl.load(chunk_indices + i_c * 2 + 1)
        bos = tl.load(cu_seqlens + i_n).to(tl.int64)
        eos = tl.load(cu_seqlens + i_n + 1).to(tl.int64)
        T_local = (eos - bos).to(tl.int32)
        i_b = tl.zeros([], tl.int64)
    else:
        NT = tl.cdiv(T, BT)
        i_b = (i_c // NT).to(tl.int64)
        i_t = i_c % NT
        bos = i_b * T
        T_local = T
    return i_b, bos, T_local, i_t * BT


@triton.jit
def _gate_base(i_b, bos, i_h, T_seq, H: tl.constexpr, T_CONTIG: tl.constexpr, IS_VARLEN: tl.constexpr):
    """Offset of head i_h's first row of the sequence, in storage [B, H, T] (T_CONTIG) or [B, T, H].

    T_seq is the length of the storage (the packed total), not of the sequence.
    """
    if T_CONTIG:
        if IS_VARLEN:
            base = bos + i_h.to(tl.int64) * T_seq
        else:
            base = (i_b * H + i_h) * T_seq
    else:
        base = bos * H + i_h
    return base


@triton.jit
def _load_gate(p, o, m, H: tl.constexpr, T_CONTIG: tl.constexpr):
    """Rows o of one head as float32 [BT]; rows outside m are 0."""
    if T_CONTIG:
        x = tl.load(p + o, mask=m, other=0.0)
    else:
        x = tl.load(p + o.to(tl.int64) * H, mask=m, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _store_gate(p, x, o, m, H: tl.constexpr, T_CONTIG: tl.constexpr):
    """Write [BT] values of one head at rows o."""
    if T_CONTIG:
        tl.store(p + o, x.to(p.dtype.element_ty), mask=m)
    else:
        tl.store(p + o.to(tl.int64) * H, x.to(p.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["T", "n_tasks"])
def recompute_w_u_fwd_kernel(
    k, v, beta, A, g, gk, w, u, cu_seqlens, chunk_indices, T, n_tasks,
    H: tl.constexpr, Hg: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    USE_G: tl.constexpr, USE_GK: tl.constexpr, IS_VARLEN: tl.constexpr,
    G_T_CONTIG: tl.constexpr, BETA_T_CONTIG: tl.constexpr,
):  # fmt: skip
    """w = A (k beta e^g [e^gk]), u = A (v beta), one task a chunk and head.

    Row scales of k and v are column scales of A: the vector units touch [BT, BT] only (with gk, k too).
    k, gk [B, T, Hg, K]; v [B, T, H, V]; A [B, T, H, BT]; beta, g [B, H, T] (T_CONTIG) or [B, T, H];
    w [B, T, H, K]; u [B, T, H, V]. n_tasks = chunks * H.
    """
    o_j = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = tl.arange(0, BV)
    dtype = k.dtype.element_ty
    for task in range(tl.program_id(0), n_tasks, tl.num_programs(0)):
        i_h = task % H
        i_b, bos, T_local, t0 = _chunk_of(task // H, cu_seqlens, chunk_indices, T, BT, IS_VARLEN)
        o_t = t0 + tl.arange(0, BT)
        m_t = o_t < T_local
        m_k = m_t[:, None] & (o_k < K)[None, :]
        m_v = m_t[:, None] & (o_v < V)[None, :]
        row = bos + o_t.to(tl.int64)
        p_k = ((row * Hg + i_h // (H // Hg)) * K)[:, None] + o_k[None, :]
        p_w = ((row * H + i_h) * K)[:, None] + o_k[None, :]
        p_v = ((row * H + i_h) * V)[:, None] + o_v[None, :]
        p_A = ((row * H + i_h) * BT)[:, None] + o_j[None, :]

        m_A = m_t[:, None] & (t0 + o_j < T_local)[None, :]
        b_A = tl.load(A + p_A, mask=m_A, other=0.0).to(tl.float32)
        p_beta = beta + _gate_base(i_b, bos, i_h, T, H, BETA_T_CONTIG, IS_VARLEN)
        b_Ab = b_A * _load_gate(p_beta, o_t, m_t, H, BETA_T_CONTIG)[None, :]
        # Without g a copy: both are left operands, and a left operand is not read twice.
        b_Aw = tl.where(m_A, b_Ab, 0.0)
        if USE_G:
            p_g = g + _gate_base(i_b, bos, i_h, T, H, G_T_CONTIG, IS_VARLEN)
            b_Aw = b_Ab * tl.exp(_load_gate(p_g, o_t, m_t, H, G_T_CONTIG))[None, :]

        b_v = tl.load(v + p_v, mask=m_v, other=0.0)
        b_u = tl.dot(b_Ab.to(dtype), b_v, input_precision="ieee")
        tl.store(u + p_v, b_u.to(u.dtype.element_ty), mask=m_v)
        b_k = tl.load(k + p_k, mask=m_k, other=0.0)
        if USE_GK:
            b_gk = tl.load(gk + p_k, mask=m_k, other=0.0).to(tl.float32)
            b_k = (b_k.to(tl.float32) * tl.exp(b_gk)).to(dtype)
        b_w = tl.dot(b_Aw.to(dtype), b_k, input_precision="ieee")
        tl.store(w + p_w, b_w.to(w.dtype.element_ty), mask=m_k)


@triton.jit
def _sum_rows(x, b_one, SUM_ON_CUBE: tl.constexpr):
    """Sum of x [BT, BT] float32 over axis 0, float32 [BT].

    On the cube: a product with 16 equal columns of ones, operands in the dtype of b_one.
    """
    if SUM_ON_CUBE:
        s = tl.sum(tl.dot(tl.trans(x.to(b_one.dtype)), b_one, input_precision="ieee"), 1) * 0.0625
    else:
        s = tl.sum(x, 0)
    return s


@triton.jit
def _head_bwd(
    k, v, beta, A, g, dw, du, dv, dbeta, dg, p_row, b_k, b_G, b_one, m_valid, m_lower, acc, row, o_t, o_c,
    m_t, m_c, i_k, i_b, bos, i_h, T, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, IS_VARLEN: tl.constexpr, FIRST: tl.constexpr,
    G_T_CONTIG: tl.constexpr, BETA_T_CONTIG: tl.constexpr,
    DG_T_CONTIG: tl.constexpr, DB_T_CONTIG: tl.constexpr, SUM_ON_CUBE: tl.constexpr,
):  # fmt: skip
    """One head of one chunk: writes dv, dbeta, dg; returns (N' [BT, BT] float32, acc + (A beta e^g)^T dw)."""
    dtype = b_k.dtype
    o_j = tl.arange(0, BT)
    o_k = i_k * BK + tl.arange(0, BK)
    m_k = m_t[:, None] & (o_k < K)[None, :]
    p_w = (row * H + i_h) * K
    p_v = (row * H + i_h) * V
    p_A = ((row * H + i_h) * BT)[:, None] + o_j[None, :]
    p_beta = beta + _gate_base(i_b, bos, i_h, T, H, BETA_T_CONTIG, IS_VARLEN)

    # Columns (c_*) and rows (r_*) of beta and g are loaded apart: one tensor used along both axes would keep
    # the vector work from being split.
    c_beta = _load_gate(p_beta, o_c, m_c, H, BETA_T_CONTIG)
    b_A = tl.load(A + p_A, mask=m_valid, other=0.0).to(tl.float32)
    b_Ab = b_A * c_beta[None, :]
    p_g = g + _gate_base(i_b, bos, i_h, T, H, G_T_CONTIG, IS_VARLEN)
    c_g = _load_gate(p_g, o_c, m_c, H, G_T_CONTIG)
    b_Aw = b_Ab * tl.exp(c_g)[None, :]

    # du and dw are right operands first and left operands last, because a left operand is dead afterwards.
    for i_v in tl.static_range((V + BV - 1) // BV):
        o_v = i_v * BV + tl.arange(0, BV)
        m_v = m_t[:, None] & (o_v < V)[None, :]
        b_du = tl.load(du + p_v[:, None] + o_v[None, :], mask=m_v, other=0.0).to(dtype)
        b_left = b_Ab
        if i_v > 0:
            b_left = tl.where(m_valid, b_Ab, 0.0)
        b_dv = tl.dot(tl.trans(b_left.to(dtype)), b_du, input_precision="ieee")
        tl.store(dv + p_v[:, None] + o_v[None, :], b_dv.to(dv.dtype.element_ty), mask=m_v)
        b_v = tl.load(v + p_v[:, None] + o_v[None, :], mask=m_v, other=0.0)
        if i_v == 0:
            b_S2 = tl.dot(b_du, tl.trans(b_v), input_precision="ieee")
        else:
            b_S2 += tl.dot(b_du, tl.trans(b_v), input_precision="ieee")
    b_S2 = tl.where(m_valid, b_S2, 0.0)
    b_dw = tl.load(dw + p_w[:, None] + o_k[None, :], mask=m_k, other=0.0).to(dtype)
    if FIRST:
        acc = tl.dot(tl.trans(b_Aw.to(dtype)), b_dw, input_precision="ieee")
    else:
        acc = tl.dot(tl.trans(b_Aw.to(dtype)), b_dw, acc, input_precision="ieee")
    b_S1 = tl.dot(b_dw, tl.trans(b_k), input_precision="ieee")
    for i_s in tl.static_range(1, (K + BK - 1) // BK):  # the tiles of k and dw that are not this task's own
        o_s = (i_k * BK + i_s * BK) % ((K + BK - 1) // BK * BK) + tl.arange(0, BK)
        m_s = m_t[:, None] & (o_s < K)[None, :]
        b_dws = tl.load(dw + p_w[:, None] + o_s[None, :], mask=m_s, other=0.0).to(dtype)
        b_ks = tl.load(k + p_row[:, None] + o_s[None, :], mask=m_s, other=0.0)
        b_S1 += tl.dot(b_dws, tl.trans(b_ks), input_precision="ieee")
    b_S1 = tl.where(m_valid, b_S1, 0.0) * tl.exp(c_g)[None, :]

    b_dAs = b_S1 + b_S2
    c_A = tl.load(A + p_A, mask=m_valid, other=0.0).to(dtype)
    b_R = tl.dot((b_dAs * c_beta[None, :]).to(dtype), tl.trans(c_A), input_precision="ieee")
    b_N = tl.dot(tl.trans(c_A), b_R.to(dtype), input_precision="ieee")
    r_g = _load_gate(p_g, o_t, m_t, H, G_T_CONTIG)
    b_N = b_N * tl.exp(tl.where(m_lower, r_g[:, None] - c_g[None, :], 0.0))
    b_N = tl.where(m_lower, -b_N, 0.0)
    r_NG = tl.sum(b_N * b_G, 1)
    r_beta = _load_gate(p_beta, o_t, m_t, H, BETA_T_CONTIG)
    b_N = b_N * r_beta[:, None]

    c_E = _sum_rows(b_A * b_dAs, b_one, SUM_ON_CUBE)
    p_db = dbeta + _gate_base(i_b, bos, i_h, T, H, DB_T_CONTIG, IS_VARLEN)
    _store_gate(p_db, c_E + r_NG, o_t, m_t, H, DB_T_CONTIG)
    c_F = _sum_rows(b_Ab * b_S1 - b_N * b_G, b_one, SUM_ON_CUBE)
    p_dg = dg + _gate_base(i_b, bos, i_h, T, H, DG_T_CONTIG, IS_VARLEN)
    _store_gate(p_dg, c_F + r_beta * r_NG, o_t, m_t, H, DG_T_CONTIG)
    return b_N, acc


@triton.jit(do_not_specialize=["T", "n_tasks"])
def prepare_wy_repr_bwd_kernel(
    k, v, beta, A, g, dw, du, dk, dv, dbeta, dg, cu_seqlens, chunk_indices, T, n_tasks,
    H: tl.constexpr, Hg: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, IS_VARLEN: tl.constexpr,
    G_T_CONTIG: tl.constexpr, BETA_T_CONTIG: tl.constexpr,
    DG_T_CONTIG: tl.constexpr, DB_T_CONTIG: tl.constexpr, SUM_ON_CUBE: tl.constexpr,
):  # fmt: skip
    """dk, dv, dbeta, dg from dw, du: one task a chunk and key head, looping over the heads of its group.

    Shapes as in the forward kernel; dw like w, du like u, dk like k, dv like v, dbeta and dg [B, H, T]
    (DB_T_CONTIG, DG_T_CONTIG) or [B, T, H]. g is not optional: zeros stand for no gate. n_tasks = chunks * Hg
    * cdiv(K, BK): where a row of k does not fit in one tile, each tile of dk is a task of its own, which
    works out all the rest again and writes the same bits.
    """
    o_i = tl.arange(0, BT)
    o_j = tl.arange(0, BT)
    dtype = k.dtype.element_ty
    b_one = tl.full([BT, 16], 1.0, dtype)
    GROUP: tl.constexpr = H // Hg
    NK: tl.constexpr = (K + BK - 1) // BK
    for task in range(tl.program_id(0), n_tasks, tl.num_programs(0)):
        i_k = task % NK
        i_hg = task // NK % Hg
        i_b, bos, T_local, t0 = _chunk_of(task // (NK * Hg), cu_seqlens, chunk_indices, T, BT, IS_VARLEN)
        o_t = t0 + o_i
        o_c = t0 + o_j
        m_t = o_t < T_local
        m_c = o_c < T_local
        m_valid = m_t[:, None] & m_c[None, :]
        m_lower = m_valid & (o_i[:, None] > o_j[None, :])
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = m_t[:, None] & (o_k < K)[None, :]
        row = bos + o_t.to(tl.int64)
        p_row = (row * Hg + i_hg) * K
        p_k = p_row[:, None] + o_k[None, :]
        b_k = tl.load(k + p_k, mask=m_k, other=0.0)
        # The left operand of G is a load of its own; the policy keeps the two loads from being merged again.
        b_k_left = tl.load(k + p_k, mask=m_k, other=0.0, eviction_policy="evict_first")
        b_G = tl.dot(b_k_left, tl.trans(b_k), input_precision="ieee")
        for i_s in tl.static_range(1, NK):
            o_s = (i_k * BK + i_s * BK) % (NK * BK) + tl.arange(0, BK)
            m_s = m_t[:, None] & (o_s < K)[None, :]
            b_s = tl.load(k + p_row[:, None] + o_s[None, :], mask=m_s, other=0.0)
            b_G += tl.dot(b_s, tl.trans(b_s), input_precision="ieee")
        b_G = tl.where(m_valid, b_G, 0.0)
        if GROUP == 1:
            b_N, acc = _head_bwd(
                k, v, beta, A, g, dw, du, dv, dbeta, dg, p_row, b_k, b_G, b_one, m_valid, m_lower, 0.0,
                row, o_t, o_c, m_t, m_c, i_k, i_b, bos, i_hg, T, H, K, V, BT, BK, BV, IS_VARLEN, True,
                G_T_CONTIG, BETA_T_CONTIG, DG_T_CONTIG, DB_T_CONTIG, SUM_ON_CUBE,
            )  # fmt: skip
        else:
            acc = tl.zeros([BT, BK], tl.float32)
            b_N = tl.zeros([BT, BT], tl.float32)
            for i_r in range(GROUP):
                b_n, acc = _head_bwd(
                    k, v, beta, A, g, dw, du, dv, dbeta, dg, p_row, b_k, b_G, b_one, m_valid, m_lower, acc,
                    row, o_t, o_c, m_t, m_c, i_k, i_b, bos, i_hg * GROUP + i_r, T, H, K, V, BT, BK, BV,
                    IS_VARLEN, False, G_T_CONTIG, BETA_T_CONTIG, DG_T_CONTIG, DB_T_CONTIG, SUM_ON_CUBE,
                )  # fmt: skip
                b_N += b_n
        # Two tiles, because each is the left operand of a dot.
        b_X = b_N.to(dtype)
        b_Y = tl.where(m_lower, b_N, 0.0).to(dtype)
        acc = tl.dot(b_X, b_k, acc, input_precision="ieee")
        acc = tl.dot(tl.trans(b_Y), b_k, acc, input_precision="ieee")
        tl.store(dk + p_k, acc.to(dk.dtype.element_ty), mask=m_k)
