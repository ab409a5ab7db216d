"""Kernels that only the audit's tests need: a persistent one, row scaling, row-mapped loops, data-dependent
branches.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n", "cores"])
def persistent_dot_kernel(a, b, y, n, cores, BT: tl.constexpr, ADD: tl.constexpr):
    """y_i = 2 a_i b_i (+ exp b_i with ADD) for n pairs of [BT, BT] tiles, on a grid of `cores` programs."""
    r = tl.arange(0, BT)
    tile = r[:, None] * BT + r[None, :]
    for i in tl.range(tl.program_id(0), n, cores):
        left, right = tl.load(a + i * BT * BT + tile), tl.load(b + i * BT * BT + tile)
        product = tl.dot(left, right) * 2.0
        if ADD:
            product += tl.exp(right.to(tl.float32))
        tl.store(y + i * BT * BT + tile, product.to(y.dtype.element_ty))


@triton.jit
def row_scale_kernel(
    x,
    beta,
    y,
    T,
    HV: tl.constexpr,
    BT: tl.constexpr,
    K: tl.constexpr,
    CONTIG: tl.constexpr,
    STORE_STRIDED: tl.constexpr,
    s,
):
    """y = x * beta[:, None] for one [BT, K] block a program; beta with stride HV or 1; STORE_STRIDED also
    writes the row sums with stride HV, which keeps the padded layout alive.
    """
    o = tl.program_id(0) * BT + tl.arange(0, BT)
    c = tl.arange(0, K)
    b = tl.load(beta + (o if CONTIG else o * HV), mask=o < T, other=0.0).to(tl.float32)
    v = tl.load(x + o[:, None] * K + c[None, :], mask=(o < T)[:, None], other=0.0).to(tl.float32) * b[:, None]
    tl.store(y + o[:, None] * K + c[None, :], v.to(y.dtype.element_ty), mask=(o < T)[:, None])
    if STORE_STRIDED:
        tl.store(s + o * HV, (tl.sum(v, 1) * b).to(s.dtype.element_ty), mask=o < T)


@triton.jit
def table_lookup_kernel(x, table, y, BT: tl.constexpr):
    """Copies block table[program] of x: an address that is read from memory."""
    i = tl.load(table + tl.program_id(0)).to(tl.int32)
    o = tl.arange(0, BT)
    tl.store(y + tl.program_id(0) * BT + o, tl.load(x + i * BT + o))


@triton.jit
def twice_read_kernel(x, y, BT: tl.constexpr):
    """y = x + exp(x) with x loaded again after a store, so that it crosses twice."""
    o = tl.program_id(0) * BT + tl.arange(0, BT)
    tl.store(y + o, tl.load(x + o))
    tl.store(y + o, tl.exp(tl.load(x + o)) + 1.0)


@triton.jit
def shared_tile_kernel(a, b, y, BT: tl.constexpr):
    """y = a b + exp b for one pair of [BT, BT] tiles a program: the cube and the vector unit both need b."""
    r = tl.arange(0, BT)
    tile = tl.program_id(0) * BT * BT + r[:, None] * BT + r[None, :]
    right = tl.load(b + tile)
    product = tl.dot(tl.load(a + tile), right)
    tl.store(y + tile, (product + tl.exp(right.to(tl.float32))).to(y.dtype.element_ty))
