"""Triton-Ascend kernel: the part of dv that comes out of a chunk's own outputs, in sub-blocks.

    dv[j] = scale * sum_{i >= j} <q[i], k[j]> exp(g[i] - g[j]) do[i]        i, j rows of one chunk

A chunk of BT rows is cut into BT / BC sub-blocks; each pair (rows i, columns j) with i >= j is two products
of the cube with one [BC, BC] tile of the vector units between them. The gate is loaded anew for every pair,
its rows and its columns apart. So what one gate load costs is paid (BT / BC) (BT / BC + 1) times a chunk,
which is why its storage matters here first: G_T_CONTIG selects base pointer and stride at compile time. With
one sub-block (BC = BT) the two loads have one address and the compiler makes them one.

The rules of `wyfast_lib.kernels.ascend` hold here too.
"""

import triton
import triton.language as tl

from wyfast_lib.kernels.ascend import _chunk_of, _gate_base, _load_gate


@triton.jit(do_not_specialize=["T", "n_tasks"])
def chunk_bwd_dv_local_kernel(
    q, k, do, g, dv, cu_seqlens, chunk_indices, scale, T, n_tasks,
    H: tl.constexpr, Hg: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    USE_G: tl.constexpr, IS_VARLEN: tl.constexpr, G_T_CONTIG: tl.constexpr,
):  # fmt: skip
    """dv from q, k, do, g: one task a chunk and head.

    q, k [B, T, Hg, K]; do, dv [B, T, H, V]; g [B, H, T] (G_T_CONTIG) or [B, T, H]; scale float32.
    n_tasks = chunks * H; BC >= 16 divides BT.
    """
    o_k = tl.arange(0, BK)
    o_v = tl.arange(0, BV)
    dtype = k.dtype.element_ty
    NC: tl.constexpr = BT // BC
    for task in range(tl.program_id(0), n_tasks, tl.num_programs(0)):
        i_h = task % H
        i_b, bos, T_local, t0 = _chunk_of(task // H, cu_seqlens, chunk_indices, T, BT, IS_VARLEN)
        i_hg = i_h // (H // Hg)
        p_g = g + _gate_base(i_b, bos, i_h, T, H, G_T_CONTIG, IS_VARLEN)
        rows = T_local - t0
        for i_c in range(NC):
            o_c = t0 + i_c * BC + tl.arange(0, BC)
            n_c = (i_c * BC + tl.arange(0, BC)).to(tl.float32)
            m_c = o_c < T_local
            col = bos + o_c.to(tl.int64)
            m_kc = m_c[:, None] & (o_k < K)[None, :]
            b_k = tl.load(k + ((col * Hg + i_hg) * K)[:, None] + o_k[None, :], mask=m_kc, other=0.0)
            acc = tl.zeros([BC, BV], tl.float32)
            for i_r in range(i_c, NC):
                o_r = t0 + i_r * BC + tl.arange(0, BC)
                m_r = o_r < T_local
                row = bos + o_r.to(tl.int64)
                m_kr = m_r[:, None] & (o_k < K)[None, :]
                # q is a left operand, dead after the product: it is loaded for each pair.
                b_q = tl.load(q + ((row * Hg + i_hg) * K)[:, None] + o_k[None, :], mask=m_kr, other=0.0)
                b_S = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
                # Row i exists and i >= j, so that column j exists too. A row past the tail becomes a negative
                # number, because a comparison of a 1-d tile, or of integers, goes to the scalar unit.
                n_r = i_r * BC + tl.arange(0, BC)
                n_r = (n_r - BT * tl.maximum(n_r - rows + 1, 0)).to(tl.float32)
                m_S = n_r[:, None] >= n_c[None, :]
                if USE_G:
                    r_g = _load_gate(p_g, o_r, m_r, H, G_T_CONTIG)
                    c_g = _load_gate(p_g, o_c, m_c, H, G_T_CONTIG)
                    b_S = b_S * tl.exp(tl.where(m_S, r_g[:, None] - c_g[None, :], 0.0))
                b_S = tl.where(m_S, b_S, 0.0)
                m_vr = m_r[:, None] & (o_v < V)[None, :]
                b_do = tl.load(do + ((row * H + i_h) * V)[:, None] + o_v[None, :], mask=m_vr, other=0.0)
                acc = tl.dot(tl.trans(b_S.to(dtype)), b_do.to(dtype), acc, input_precision="ieee")
            m_vc = m_c[:, None] & (o_v < V)[None, :]
            p_dv = dv + ((col * H + i_h) * V)[:, None] + o_v[None, :]
            tl.store(p_dv, acc.to(dv.dtype.element_ty), mask=m_vc)
