"""The backward cut in two, for comparison only: the first launch leaves N' in scratch, the second makes dk.

One head a key head, whole rows of k in a tile, dense.
"""

import triton
import triton.language as tl

from wyfast_lib.kernels.ascend import _chunk_of, _gate_base, _head_bwd, _load_gate


@triton.jit(do_not_specialize=["T", "n_tasks"])
def all_but_dk_kernel(
    k, v, beta, A, g, dw, du, N, dv, dbeta, dg, T, n_tasks,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """dv, dbeta, dg and N' [B, T, H, BT]."""
    o_i, o_j, o_k = tl.arange(0, BT), tl.arange(0, BT), tl.arange(0, K)
    b_one = tl.full([BT, 16], 1.0, k.dtype.element_ty)
    for task in range(tl.program_id(0), n_tasks, tl.num_programs(0)):
        i_h = task % H
        i_b, bos, T_local, t0 = _chunk_of(task // H, k, k, T, BT, False)
        o_t, o_c = t0 + o_i, t0 + o_j
        m_t, m_c = o_t < T_local, o_c < T_local
        m_valid = m_t[:, None] & m_c[None, :]
        m_lower = m_valid & (o_i[:, None] > o_j[None, :])
        row = bos + o_t.to(tl.int64)
        p_row = (row * H + i_h) * K
        p_k = p_row[:, None] + o_k[None, :]
        b_k = tl.load(k + p_k, mask=m_t[:, None], other=0.0)
        b_left = tl.load(k + p_k, mask=m_t[:, None], other=0.0, eviction_policy="evict_first")
        b_G = tl.where(m_valid, tl.dot(b_left, tl.trans(b_k), input_precision="ieee"), 0.0)
        b_N, _ = _head_bwd(
            k, v, beta, A, g, dw, du, dv, dbeta, dg, p_row, b_k, b_G, b_one, m_valid, m_lower, 0.0, row, o_t,
            o_c, m_t, m_c, 0, i_b, bos, i_h, T, H, K, V, BT, K, V, False, True, True, True, True, True, True,
        )  # fmt: skip
        p_N = ((row * H + i_h) * BT)[:, None] + o_j[None, :]
        tl.store(N + p_N, b_N.to(N.dtype.element_ty), mask=m_valid)


@triton.jit(do_not_specialize=["T", "n_tasks"])
def dk_kernel(
    k, beta, A, g, dw, N, dk, T, n_tasks,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """dk = (A beta e^g)^T dw + N' k + N'^T k."""
    o_j, o_k = tl.arange(0, BT), tl.arange(0, K)
    for task in range(tl.program_id(0), n_tasks, tl.num_programs(0)):
        i_h = task % H
        i_b, bos, T_local, t0 = _chunk_of(task // H, k, k, T, BT, False)
        o_t = t0 + tl.arange(0, BT)
        m_t = o_t < T_local
        m_valid = m_t[:, None] & (t0 + o_j < T_local)[None, :]
        row = bos + o_t.to(tl.int64)
        p_k = ((row * H + i_h) * K)[:, None] + o_k[None, :]
        p_A = ((row * H + i_h) * BT)[:, None] + o_j[None, :]
        p_gate = _gate_base(i_b, bos, i_h, T, H, True, False)
        c_beta = _load_gate(beta + p_gate, o_t, m_t, H, True)
        c_g = _load_gate(g + p_gate, o_t, m_t, H, True)
        b_A = tl.load(A + p_A, mask=m_valid, other=0.0).to(tl.float32)
        b_Aw = (b_A * (c_beta * tl.exp(c_g))[None, :]).to(k.dtype.element_ty)
        b_dw = tl.load(dw + p_k, mask=m_t[:, None], other=0.0)
        acc = tl.dot(tl.trans(b_Aw), b_dw, input_precision="ieee")
        b_k = tl.load(k + p_k, mask=m_t[:, None], other=0.0)
        b_X = tl.load(N + p_A, mask=m_valid, other=0.0)
        b_Y = tl.load(N + p_A, mask=m_valid, other=0.0, eviction_policy="evict_first")
        acc = tl.dot(b_X, b_k, acc, input_precision="ieee")
        acc = tl.dot(tl.trans(b_Y), b_k, acc, input_precision="ieee")
        tl.store(dk + p_k, acc.to(dk.dtype.element_ty), mask=m_t[:, None])
