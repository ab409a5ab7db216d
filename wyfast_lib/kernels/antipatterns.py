"""Kernels that are wrong or slow on purpose, beside their right forms; notebooks 04 and 05 run them.

A constexpr MISTAKE or a flag picks the wrong form, so that one source holds both. Offsets and strides are in
elements. Nothing outside the workbook and its tests calls these.
"""

import triton
import triton.language as tl


@triton.jit
def row_scale_kernel(
    x, beta, y, total, HV: tl.constexpr, BT: tl.constexpr, K: tl.constexpr, STORE_STRIDED: tl.constexpr
):
    """y = beta[:, None] * x, and the row sums of y into `total`, times beta; x, y [BT, K], beta contiguous.

    STORE_STRIDED: the row sums go out with stride HV instead of 1. Nothing else changes.
    """
    o = tl.arange(0, BT)
    c = tl.arange(0, K)
    b = tl.load(beta + o).to(tl.float32)
    v = tl.load(x + o[:, None] * K + c[None, :]).to(tl.float32) * b[:, None]
    tl.store(y + o[:, None] * K + c[None, :], v.to(y.dtype.element_ty))
    p = total + o * HV if STORE_STRIDED else total + o
    tl.store(p, (tl.sum(v, 1) * b).to(total.dtype.element_ty))


@triton.jit
def chunk_decay_kernel(
    g,
    y,
    cu_seqlens,
    chunk_indices,
    T,
    n_tasks,
    HV: tl.constexpr,
    BT: tl.constexpr,
    IS_VARLEN: tl.constexpr,
    MISTAKE: tl.constexpr,
):
    """y = exp(g_last - g_t), g_last the gate at the last token of t's chunk; g, y [B, HV, T], packed [HV, T].

    One task per chunk and head. MISTAKE "" is right; the others break one rule of the gate's pointer each:
    "old pointer" (that of storage [B, T, HV]), "local length" (in the head's offset), "storage bound" (the
    storage's length as the sequence's), "absolute offset" (the sequence's start counted twice), "other mode"
    (the packed base in a dense call, the dense base in a packed one), "first task's base" (kept for the later
    tasks of a program).
    """
    T_seq = T
    kept = tl.full((), -1, tl.int64)
    for task in range(tl.program_id(0), n_tasks, tl.num_programs(0)):
        i_h = tl.cast(task % HV, tl.int64)
        i_c = task // HV
        if IS_VARLEN:
            i_n = tl.load(chunk_indices + i_c * 2)
            i_t = tl.load(chunk_indices + i_c * 2 + 1)
            bos = tl.load(cu_seqlens + i_n)
            T_local = (tl.load(cu_seqlens + i_n + 1) - bos).to(tl.int32)
            base = bos + i_h * T_seq
        else:
            NT = tl.cdiv(T_seq, BT)
            i_t = i_c % NT
            bos = tl.cast(i_c // NT, tl.int64) * T_seq
            T_local = T_seq
            base = bos * HV + i_h * T_seq
        o = i_t * BT + tl.arange(0, BT)
        p_y = y + base + o
        m = o < T_local
        step = 1
        if MISTAKE == "old pointer":
            base = bos * HV + i_h
            step = HV
        elif MISTAKE == "local length":
            base = (bos if IS_VARLEN else bos * HV) + i_h * T_local
        elif MISTAKE == "absolute offset":
            base += bos
        elif MISTAKE == "other mode":
            base = (0 if IS_VARLEN else bos) + i_h * T_seq
        elif MISTAKE == "first task's base":
            kept = tl.where(kept < 0, base, kept)
            base = kept
        end = T_seq if MISTAKE == "storage bound" else T_local
        last = tl.minimum(i_t * BT + BT, end) - 1
        b_g = tl.load(g + base + o * step, mask=m, other=0.0)
        b_last = tl.load(g + base + last * step)
        tl.store(p_y, tl.exp(b_last - b_g), mask=m)


@triton.jit
def head_offset_kernel(y, i_h, T, WIDE: tl.constexpr):
    """y[0] = i_h * T, the offset of a head in [HV, T]: in int32, or with WIDE in int64. y int64."""
    if WIDE:
        offset = i_h.to(tl.int64) * T
    else:
        offset = (i_h * T).to(tl.int64)
    tl.store(y, offset)


@triton.jit
def indexed_tile_kernel(g, y, BT: tl.constexpr, BC: tl.constexpr):
    """y = the second sub-block of one BT-long load, taken by indexing the tensor."""
    b_g = tl.load(g + tl.arange(0, BT))
    tl.store(y + tl.arange(0, BC), b_g[BC + tl.arange(0, BC)])


@triton.jit
def reshaped_tile_kernel(x, y, BT: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr, TAKE: tl.constexpr):
    """y [BC, BV] = rows BC to 2 BC of x [BT, BV], by way of tl.reshape(x, [2, BC, BV]).

    TAKE: how the second sub-tile is taken out of the reshaped tile: "index", "split" (after a permute), "sum"
    (over a masked axis). Two ways do without the reshape: "slice" (tl.extract_slice, in triton-ascend only)
    and "load" (a load of its own).
    """
    s = tl.arange(0, BC)
    c = tl.arange(0, BV)
    b_x = tl.load(x + tl.arange(0, BT)[:, None] * BV + c[None, :])
    if TAKE == "index":
        b_y = tl.reshape(b_x, [2, BC, BV])[1]
    elif TAKE == "split":
        _, b_y = tl.split(tl.permute(tl.reshape(b_x, [2, BC, BV]), [1, 2, 0]))
    elif TAKE == "sum":
        second = tl.arange(0, 2)[:, None, None] == 1
        b_y = tl.sum(tl.where(second, tl.reshape(b_x, [2, BC, BV]), 0.0), 0)
    elif TAKE == "slice":
        b_y = tl.extract_slice(b_x, (BC, 0), (BC, BV), (1, 1))
    else:
        tl.static_assert(TAKE == "load")
        b_y = tl.load(x + (BC + s)[:, None] * BV + c[None, :])
    tl.store(y + s[:, None] * BV + c[None, :], b_y)


@triton.jit
def joined_store_kernel(a, b, y, BC: tl.constexpr, TRANSPOSE: tl.constexpr):
    """y = a followed by b in one store: join [BC, 2], TRANSPOSE: turned to [2, BC], reshaped to [2 BC]."""
    o = tl.arange(0, BC)
    pair = tl.join(tl.load(a + o), tl.load(b + o))
    if TRANSPOSE:
        pair = tl.trans(pair)
    tl.store(y + tl.arange(0, 2 * BC), tl.reshape(pair, [2 * BC]))


@triton.jit
def head_branch_kernel(x, y, T, n_tasks, HV: tl.constexpr, BT: tl.constexpr, BRANCH: tl.constexpr):
    """y = x on even heads, 2 x on odd ones; x, y [HV, T], T = BT. BRANCH: by a run-time `if` on the head."""
    o = tl.arange(0, BT)
    for task in range(tl.program_id(0), n_tasks, tl.num_programs(0)):
        i_h = task % HV
        b_x = tl.load(x + i_h * T + o)
        if BRANCH:
            if i_h % 2 == 1:
                b_x = b_x * 2.0
        else:
            b_x = b_x * (1.0 + (i_h % 2).to(tl.float32))
        tl.store(y + i_h * T + o, b_x)


@triton.jit
def moved_pointer_kernel(x, y, n_tasks, BT: tl.constexpr, MOVE: tl.constexpr):
    """y = 2 x, a block of BT a task; MOVE: by pointers moved with `+=` from task to task, else rebuilt."""
    o = tl.arange(0, BT)
    step = tl.num_programs(0) * BT
    p_x = x + tl.program_id(0) * BT + o
    p_y = y + tl.program_id(0) * BT + o
    for task in range(tl.program_id(0), n_tasks, tl.num_programs(0)):
        if MOVE:
            tl.store(p_y, tl.load(p_x) * 2.0)
            p_x += step
            p_y += step
        else:
            tl.store(y + task * BT + o, tl.load(x + task * BT + o) * 2.0)


@triton.jit
def both_layouts_kernel(
    g, y, T, contiguous, HV: tl.constexpr, BT: tl.constexpr, RUN_TIME: tl.constexpr, G_T_CONTIG: tl.constexpr
):
    """y = exp(g) of head 0, the layout picked by the constant G_T_CONTIG, or with RUN_TIME by a number."""
    o = tl.arange(0, BT)
    m = o < T
    if RUN_TIME:
        if contiguous == 1:
            b_g = tl.load(g + o, mask=m, other=0.0)
        else:
            b_g = tl.load(g + o * HV, mask=m, other=0.0)
    elif G_T_CONTIG:
        b_g = tl.load(g + o, mask=m, other=0.0)
    else:
        b_g = tl.load(g + o * HV, mask=m, other=0.0)
    tl.store(y + o, tl.exp(b_g.to(tl.float32)).to(y.dtype.element_ty), mask=m)
