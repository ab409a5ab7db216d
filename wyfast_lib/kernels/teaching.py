"""Small kernels, each for one fact about the Ascend compiler; notebooks print them, tests assert the facts.

Offsets and strides are in elements. The kernels are written for one vector or cube core and no speed.
"""

import triton
import triton.language as tl


@triton.jit
def copy_kernel(x, y, T, BT: tl.constexpr):
    """y[0:T] = x[0:T], one block of BT a program; the last one is masked."""
    o = tl.program_id(0) * BT + tl.arange(0, BT)
    tl.store(y + o, tl.load(x + o, mask=o < T, other=0.0), mask=o < T)


@triton.jit
def gate_load_kernel(g, y, T, HV: tl.constexpr, BT: tl.constexpr, G_T_CONTIG: tl.constexpr):
    """y[h, t] = exp(g): g is [T, HV], read with stride HV, or with G_T_CONTIG [HV, T], read contiguously."""
    o = tl.program_id(0) * BT + tl.arange(0, BT)
    h = tl.program_id(1)
    if G_T_CONTIG:
        p = g + h * T + o
    else:
        p = g + o * HV + h
    value = tl.load(p, mask=o < T, other=0.0).to(tl.float32)
    tl.store(y + h * T + o, tl.exp(value).to(y.dtype.element_ty), mask=o < T)


@triton.jit
def gate_load_runtime_stride_kernel(g, y, T, stride, BT: tl.constexpr):
    """As `gate_load_kernel` for one head, with a stride that the compiler does not know."""
    o = tl.arange(0, BT)
    value = tl.load(g + o * stride, mask=o < T, other=0.0).to(tl.float32)
    tl.store(y + o, tl.exp(value).to(y.dtype.element_ty), mask=o < T)


@triton.jit
def gate_store_kernel(g, y, T, HV: tl.constexpr, BT: tl.constexpr, G_T_CONTIG: tl.constexpr):
    """exp(g) of one contiguous row, stored with stride HV into y [T, HV], or with G_T_CONTIG contiguously."""
    o = tl.arange(0, BT)
    value = tl.exp(tl.load(g + o, mask=o < T, other=0.0).to(tl.float32)).to(y.dtype.element_ty)
    if G_T_CONTIG:
        tl.store(y + o, value, mask=o < T)
    else:
        tl.store(y + o * HV, value, mask=o < T)


@triton.jit
def transposed_dot_kernel(a, b, y, BT: tl.constexpr, K: tl.constexpr, LOAD_TRANSPOSED: tl.constexpr):
    """y = a^T b for a [BT, BT], b [BT, K]: a^T by pointers with inner stride BT, or loaded straight and
    tl.trans.
    """
    r = tl.arange(0, BT)
    c = tl.arange(0, K)
    if LOAD_TRANSPOSED:
        left = tl.load(a + r[None, :] * BT + r[:, None])
    else:
        left = tl.trans(tl.load(a + r[:, None] * BT + r[None, :]))
    right = tl.load(b + r[:, None] * K + c[None, :])
    tl.store(y + r[:, None] * K + c[None, :], tl.dot(left, right).to(y.dtype.element_ty))


@triton.jit
def reused_left_kernel(a, b, y, BT: tl.constexpr, RELOAD: tl.constexpr):
    """y[0] = a b, y[1] = a^T b, all [BT, BT]: `a` read again after it was a left operand, or with RELOAD
    loaded anew.

    The reload stands behind a store: two equal loads with nothing between them become one in the compiler.
    """
    r = tl.arange(0, BT)
    tile = r[:, None] * BT + r[None, :]
    left, right = tl.load(a + tile), tl.load(b + tile)
    tl.store(y + tile, tl.dot(left, right))
    if RELOAD:
        left = tl.load(a + tile)
    tl.store(y + BT * BT + tile, tl.dot(tl.trans(left), right))


@triton.jit
def running_product_kernel(x, y, T, BT: tl.constexpr, K: tl.constexpr):
    """y[i] = sum over the chunks j <= i of x_j^T x_j, x [T, K], y [ceil(T / BT), K, K]: a loop that
    carries a tile.
    """
    o, c = tl.arange(0, BT), tl.arange(0, K)
    total = tl.zeros([K, K], dtype=tl.float32)
    for i in range(0, tl.cdiv(T, BT)):
        t = i * BT + o
        tile = tl.load(x + t[:, None] * K + c[None, :], mask=(t < T)[:, None], other=0.0)
        total += tl.dot(tl.trans(tile), tile)
        tl.store(y + i * K * K + c[:, None] * K + c[None, :], total.to(y.dtype.element_ty))


@triton.jit
def half_sum_kernel(x, y, BT: tl.constexpr):
    """y = x + x in the dtype of x: half-precision arithmetic that stays in half precision."""
    o = tl.arange(0, BT)
    value = tl.load(x + o)
    tl.store(y + o, value + value)


@triton.jit
def large_tile_kernel(x, y, n, BT: tl.constexpr):
    """y[i] = exp(x[i, 0]) x[i, 1] + x[i, 2], x [n, 3, BT] float32: several tiles of BT live at once in UB.

    In a loop the compiler keeps two copies of what it loads and stores, to work on one while the other moves.
    """
    o = tl.arange(0, BT)
    for i in range(0, n):
        p = x + i * 3 * BT + o
        tl.store(y + i * BT + o, tl.exp(tl.load(p)) * tl.load(p + BT) + tl.load(p + 2 * BT))


@triton.jit
def wild_store_kernel(y, offset):
    """One store at y + offset, wherever that is."""
    tl.store(y + offset, 1.0)


@triton.jit
def wild_load_kernel(x, y, offset):
    """One load at x + offset, wherever that is; y holds one element."""
    tl.store(y, tl.load(x + offset))


@triton.jit
def wild_copy_kernel(x, y, offset):
    """The first element of x to y + offset, wherever that is."""
    tl.store(y + offset, tl.load(x))
