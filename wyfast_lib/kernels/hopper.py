"""The kernels for Hopper GPUs, with the memory of the chip managed by hand (Gluon, part of Triton).

Same mathematics as `cuda.py` (see there), for the common case: BT = 64, K and V of 64 or 128, one
half-precision dtype for k, v, A and the incoming gradients. What they add is overlap: every tile is copied to
shared memory by the asynchronous copy unit before the first product, and no operand passes through registers
on its way in.

Tiles are kept as panels of 64 columns: a panel is one 128-byte swizzled block, and a product of one panel
needs half the registers. A buffer is filled again as soon as its last reader has finished: by the next head
of the group (GQA), or by a result on its way out.

How gates that grow are kept finite is said in `cuda.py`, too.

G_T_CONTIG says that beta, g and their gradients are [B, HV, T] (stride 1) instead of [B, T, HV] (stride HV);
dense calls only. The backend leaves it off: `bench --suite gates` measures why.
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
)

LOG2E = gl.constexpr(1.4426950408889634)
# Renamed on the way from Triton 3.6 to 3.9.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def _chunk_span(i_c, cu_seqlens, chunk_indices, T, NT, IS_VARLEN: gl.constexpr):
    """First token (int64) and number of tokens (1..64) of chunk i_c: `pointers.chunk_span` for Gluon."""
    if IS_VARLEN:
        i_n = gl.load(chunk_indices + i_c * 2).to(gl.int64)
        i_t = gl.load(chunk_indices + i_c * 2 + 1).to(gl.int64)
        bos = gl.load(cu_seqlens + i_n).to(gl.int64)
        T_seq = gl.load(cu_seqlens + i_n + 1).to(gl.int64) - bos
    else:
        i_t = (i_c % NT).to(gl.int64)
        T_seq = T.to(gl.int64)
        bos = (i_c // NT).to(gl.int64) * T_seq
    start = bos + i_t * 64
    rows = gl.minimum(T_seq - i_t * 64, 64).to(gl.int32)
    return start, rows


@gluon.jit
def _copy_panels(smem, base, rows, stride, NP: gl.constexpr):
    """Starts the copy of NP panels of 64 columns; rows past the chunk's end become zero."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_t = gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    o_d = gl.arange(0, 64, layout=gl.SliceLayout(0, L))
    pointers = base + (o_t * stride)[:, None] + o_d[None, :]
    mask = (o_t < rows)[:, None]
    for c in gl.static_range(NP):
        async_load(smem.index(c), pointers + c * 64, mask=mask)


@gluon.jit
def _write_panel(base, value, smem, rows, stride):
    """value -> memory by way of a free panel, so that a thread writes 16 bytes."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    barrier()
    smem.store(value)
    barrier()
    o_t = gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    o_d = gl.arange(0, 64, layout=gl.SliceLayout(0, L))
    pointers = base + (o_t * stride)[:, None] + o_d[None, :]
    gl.store(pointers, smem.load(L), mask=(o_t < rows)[:, None])


@gluon.jit
def _gates(start, i_c, i_h, T, NT, HV: gl.constexpr, G_T_CONTIG: gl.constexpr):
    """Where the gates of a chunk and value head i_h start, their stride, the distance to the next head."""
    if G_T_CONTIG:
        i_b = (i_c // NT).to(gl.int64)
        offset = (i_b * HV + i_h) * T + (start - i_b * T)
        return offset, 1, T
    else:
        return start * HV + i_h, HV, 1


@gluon.jit
def _load_gate(base, rows, stride):
    """One scalar a token as float32 [64]; zero past the chunk's end."""
    o_t = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
    return gl.load(base + o_t * stride, mask=o_t < rows, other=0.0).to(gl.float32)


@gluon.jit
def _clear_tail_columns(s_A, rows):
    """Columns of A past the chunk's end become zero, whatever memory held there."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_d = gl.arange(0, 64, layout=gl.SliceLayout(0, L))
    barrier()
    tile = s_A.load(L)
    keep = gl.expand_dims(o_d, 0) + gl.zeros([64, 64], gl.int32, layout=L) < rows
    tile = gl.where(keep, tile, gl.zeros([64, 64], tile.dtype, layout=L))
    barrier()
    s_A.store(tile)


@gluon.jit
def _transposed(tile, smem):
    """The transpose of a [64, 64] tile by way of a free buffer, in the same layout."""
    barrier()
    smem.store(tile)
    barrier()
    return smem.permute([1, 0]).load(tile.type.layout)


@gluon.jit
def _growth(g):
    """(2^-n, 2^n), n >= 0 the whole power of two in the largest e^g: `exponents.growth` for Gluon."""
    g = gl.convert_layout(g, gl.BlockedLayout([2], [32], [4], [0]))  # every warp holds all: no barrier
    n = gl.minimum(gl.floor(gl.maximum(gl.max(g, 0), 0.0) * LOG2E), 126.0)
    return gl.exp2(-n), gl.exp2(n)


@gluon.jit
def _through_factor(s_A, s_y, s_z, acc, down):
    """X = A^T y (float32) and acc + X z^T down, for one panel."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    x = warpgroup_mma(s_A.permute([1, 0]), s_y, gl.zeros([64, 64], gl.float32, layout=mma), use_acc=False)
    acc = warpgroup_mma(gl.convert_layout((x * down).to(s_A.dtype), left), s_z.permute([1, 0]), acc)
    return x, acc


@gluon.jit(do_not_specialize=["T", "NT"])
def prepare_wy_repr_bwd_hopper_kernel(
    k, v, beta, g, A, dw, du, dk, dv, db, dg, cu_seqlens, chunk_indices, T, NT,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    USE_G: gl.constexpr, IS_VARLEN: gl.constexpr, G_T_CONTIG: gl.constexpr,
):  # fmt: skip
    """Gradients of one chunk, one key head and its HV // H value heads; arguments as in `cuda.py`."""
    G: gl.constexpr = HV // H
    NK: gl.constexpr = K // 64
    NV: gl.constexpr = V // 64
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    per_row: gl.constexpr = gl.SliceLayout(1, mma)
    per_column: gl.constexpr = gl.SliceLayout(0, mma)
    dtype: gl.constexpr = k.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)

    i = gl.program_id(0)
    i_h = i % H
    i_c = i // H
    start, rows = _chunk_span(i_c, cu_seqlens, chunk_indices, T, NT, IS_VARLEN)
    row = start * HV + i_h * G
    key_row = start * H + i_h

    s_A = gl.allocate_shared_memory(dtype, [1, 64, 64], swizzled)
    s_k = gl.allocate_shared_memory(dtype, [NK, 64, 64], swizzled)
    s_dw = gl.allocate_shared_memory(dtype, [NK, 64, 64], swizzled)
    s_v = gl.allocate_shared_memory(dtype, [NV, 64, 64], swizzled)
    s_du = gl.allocate_shared_memory(dtype, [NV, 64, 64], swizzled)

    _copy_panels(s_A, A + row * 64, rows, HV * 64, 1)
    _copy_panels(s_dw, dw + row * K, rows, HV * K, NK)
    _copy_panels(s_k, k + key_row * K, rows, H * K, NK)
    async_copy.commit_group()
    _copy_panels(s_du, du + row * V, rows, HV * V, NV)
    _copy_panels(s_v, v + row * V, rows, HV * V, NV)
    async_copy.commit_group()
    gate, stride, head = _gates(start, i_c, i_h * G, T, NT, HV, G_T_CONTIG)
    b_b = _load_gate(beta + gate, rows, stride)
    b_g = b_b
    if USE_G:
        b_g = _load_gate(g + gate, rows, stride)

    o_i = gl.arange(0, 64, layout=per_row)
    o_j = gl.arange(0, 64, layout=per_column)
    zero = gl.zeros([64, 64], gl.float32, layout=mma)
    # A group carries its sums from head to head: D N in registers, D E P in shared memory (both in registers
    # would spill). A single head keeps D E P in registers.
    b_M = zero
    b_Mk = zero.to(dtype)
    dk0 = zero
    dk1 = zero
    if G > 1:
        s_dk = gl.allocate_shared_memory(gl.float32, [NK, 64, 64], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
        for c in gl.static_range(NK):
            s_dk.index(c).store(zero)
    for i_g in range(G):
        row = start * HV + i_h * G + i_g
        b_br = gl.convert_layout(b_b, per_row)
        b_beta = b_b  # of this head: the next head's are loaded before the last use
        b_gate = b_g
        down = 1.0
        up = 1.0
        if USE_G:
            b_eg = gl.exp2(b_g * LOG2E)
            if dtype == gl.bfloat16:  # float16 cannot hold the A of a gate that grows so far
                down, up = _growth(b_g)
            b_cr = gl.convert_layout(b_b * b_eg, per_row)
        else:
            b_cr = b_br

        # P = A^T dw, T = P k^T E
        if G == 1:
            async_copy.wait_group(1)
        else:
            async_copy.wait_group(0)
        if rows < 64:
            _clear_tail_columns(s_A.index(0), rows)
        fence_async_shared()
        barrier()
        b_P, b_T = _through_factor(s_A.index(0), s_dw.index(0), s_k.index(0), zero, 1.0)
        if G == 1:
            dk0 = b_P * b_cr[:, None]
        else:
            s_dk.index(0).store(s_dk.index(0).load(mma) + b_P * b_cr[:, None])
        if NK == 2:
            b_P, b_T = _through_factor(s_A.index(0), s_dw.index(1), s_k.index(1), b_T, 1.0)
            if G == 1:
                dk1 = b_P * b_cr[:, None]
            else:
                s_dk.index(1).store(s_dk.index(1).load(mma) + b_P * b_cr[:, None])
        if G > 1:
            barrier()
            if i_g + 1 < G:
                _copy_panels(s_dw, dw + (row + 1) * K, rows, HV * K, NK)
            async_copy.commit_group()
        if USE_G:
            b_T *= gl.convert_layout(b_eg * down, per_column)[None, :]
        b_p = gl.sum(gl.where(o_i[:, None] == o_j[None, :], b_T, 0.0), 1)  # e^g <P, k>

        # Q = A^T du, T += Q v^T
        if G == 1:
            async_copy.wait_group(0)
            fence_async_shared()
            barrier()
        # Times 2^-n. A group is short of registers and scales Q; a single head scales a sum of its own.
        if G == 1:
            b_Q, b_U = _through_factor(s_A.index(0), s_du.index(0), s_v.index(0), zero, 1.0)
        else:
            b_Q, b_T = _through_factor(s_A.index(0), s_du.index(0), s_v.index(0), b_T, down)
        b_Q *= b_br[:, None]
        _write_panel(dv + row * V, b_Q.to(dtype), s_du.index(0), rows, HV * V)
        if NV == 2:
            if G == 1:
                b_Q, b_U = _through_factor(s_A.index(0), s_du.index(1), s_v.index(1), b_U, 1.0)
            else:
                b_Q, b_T = _through_factor(s_A.index(0), s_du.index(1), s_v.index(1), b_T, down)
            b_Q *= b_br[:, None]
            _write_panel(dv + row * V + 64, b_Q.to(dtype), s_du.index(1), rows, HV * V)
        if G == 1:
            b_T += b_U * down
        else:
            barrier()
            if i_g + 1 < G:
                _copy_panels(s_du, du + (row + 1) * V, rows, HV * V, NV)
                _copy_panels(s_v, v + (row + 1) * V, rows, HV * V, NV)
                b_b = _load_gate(beta + gate + head, rows, stride)
                if USE_G:
                    b_g = _load_gate(g + gate + head, rows, stride)
            async_copy.commit_group()
        b_pq = gl.sum(gl.where(o_i[:, None] == o_j[None, :], b_T, 0.0), 1)  # e^g <P, k> + <Q, v>

        # N = -(T D A^T) e^(g_i - g_j), S = k k^T
        b_T *= gl.convert_layout(-b_beta, per_column)[None, :]
        b_N = warpgroup_mma(
            gl.convert_layout(b_T.to(dtype), left), s_A.index(0).permute([1, 0]), zero, use_acc=False
        )
        b_S = warpgroup_mma(s_k.index(0), s_k.index(0).permute([1, 0]), zero, use_acc=False)
        if NK == 2:
            b_S = warpgroup_mma(s_k.index(1), s_k.index(1).permute([1, 0]), b_S)
        below = (o_i[:, None] > o_j[None, :]) & (o_i < rows)[:, None]
        if USE_G:
            # The exponent is masked, not the product: above the diagonal it may be infinite.
            b_gr = gl.convert_layout(b_gate, per_row)
            b_gc = gl.convert_layout(b_gate, per_column)
            b_N *= gl.exp2(gl.where(below, b_gr[:, None] - b_gc[None, :], float("-inf")) * LOG2E)
        else:
            b_N = gl.where(below, b_N, 0.0)
        b_x = gl.sum(b_N * b_S, 1)
        p_db = db + gate + o_i * stride
        gl.store(p_db, ((b_pq + b_x) * up).to(db.dtype.element_ty), mask=o_i < rows)

        b_N *= (b_br * up)[:, None]
        b_Mk = b_N.to(dtype)
        b_Mt = _transposed(b_Mk, s_A.index(0))
        if G == 1:
            b_Mk += b_Mt  # exact: one is below the diagonal, the other above
        else:
            b_M += b_N
        if USE_G:
            # y = colsum(D N * S), as a row sum of the transposed tile
            b_y = gl.sum(b_Mt.to(gl.float32) * b_S, 1)
            p_dg = dg + gate + o_i * stride
            gl.store(p_dg, (b_br * up * (b_p + b_x) - b_y).to(dg.dtype.element_ty), mask=o_i < rows)
        if G > 1:
            barrier()
            if i_g + 1 < G:
                _copy_panels(s_A, A + (row + 1) * 64, rows, HV * 64, 1)
            async_copy.commit_group()
        gate += head

    if G > 1:
        dk0 = s_dk.index(0).load(mma)
        if NK == 2:
            dk1 = s_dk.index(1).load(mma)
        b_Mk = b_M.to(dtype)
        b_Mk += _transposed(b_Mk, s_A.index(0))
    b_Mk = gl.convert_layout(b_Mk, left)
    dk0 = warpgroup_mma(b_Mk, s_k.index(0), dk0)
    if NK == 2:
        dk1 = warpgroup_mma(b_Mk, s_k.index(1), dk1)
    _write_panel(dk + key_row * K, dk0.to(dtype), s_k.index(0), rows, H * K)
    if NK == 2:
        _write_panel(dk + key_row * K + 64, dk1.to(dtype), s_k.index(1), rows, H * K)


@gluon.jit(do_not_specialize=["T", "NT"])
def recompute_w_u_fwd_hopper_kernel(
    k, v, beta, w, u, A, g, cu_seqlens, chunk_indices, T, NT,
    H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    USE_G: gl.constexpr, IS_VARLEN: gl.constexpr, G_T_CONTIG: gl.constexpr,
):  # fmt: skip
    """w and u of one chunk and one value head; arguments as in `cuda.py`."""
    NK: gl.constexpr = K // 64
    NV: gl.constexpr = V // 64
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    per_column: gl.constexpr = gl.SliceLayout(0, left)
    dtype: gl.constexpr = k.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)

    i = gl.program_id(0)
    i_h = i % HV
    i_c = i // HV
    start, rows = _chunk_span(i_c, cu_seqlens, chunk_indices, T, NT, IS_VARLEN)
    row = start * HV + i_h
    key_row = start * H + i_h // (HV // H)

    s_A = gl.allocate_shared_memory(dtype, [1, 64, 64], swizzled)
    s_k = gl.allocate_shared_memory(dtype, [NK, 64, 64], swizzled)
    s_v = gl.allocate_shared_memory(dtype, [NV, 64, 64], swizzled)
    gate, stride, head = _gates(start, i_c, i_h, T, NT, HV, G_T_CONTIG)
    b_b = _load_gate(beta + gate, rows, stride)
    _copy_panels(s_A, A + row * 64, rows, HV * 64, 1)
    _copy_panels(s_v, v + row * V, rows, HV * V, NV)
    async_copy.commit_group()
    _copy_panels(s_k, k + key_row * K, rows, H * K, NK)
    async_copy.commit_group()
    if USE_G:
        b_g = _load_gate(g + gate, rows, stride)

    async_copy.wait_group(1)
    if rows < 64:
        _clear_tail_columns(s_A.index(0), rows)
    fence_async_shared()
    barrier()
    zero = gl.zeros([64, 64], gl.float32, layout=mma)
    b_A = s_A.index(0).load(left).to(gl.float32)
    b_A *= gl.convert_layout(b_b, per_column)[None, :]
    b_Au = b_A.to(dtype)
    b_u = warpgroup_mma(b_Au, s_v.index(0), zero, use_acc=False)
    _write_panel(u + row * V, b_u.to(dtype), s_v.index(0), rows, HV * V)
    if NV == 2:
        b_u = warpgroup_mma(b_Au, s_v.index(1), zero, use_acc=False)
        _write_panel(u + row * V + 64, b_u.to(dtype), s_v.index(1), rows, HV * V)

    if USE_G:
        b_A *= gl.convert_layout(gl.exp2(b_g * LOG2E), per_column)[None, :]
    b_Aw = b_A.to(dtype)
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    b_w = warpgroup_mma(b_Aw, s_k.index(0), zero, use_acc=False)
    _write_panel(w + row * K, b_w.to(dtype), s_k.index(0), rows, HV * K)
    if NK == 2:
        b_w = warpgroup_mma(b_Aw, s_k.index(1), zero, use_acc=False)
        _write_panel(w + row * K + 64, b_w.to(dtype), s_k.index(1), rows, HV * K)
