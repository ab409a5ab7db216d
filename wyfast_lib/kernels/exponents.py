"""Exponentials of gates, natural log in: shared by the CUDA kernels.

The hardware's exponential has base 2. A gate times log2(e) rounds by up to |g| 2^-24, an error of 6e-6 in e^g
at |g| = 100, so gates are subtracted before they are scaled, and what the scaling loses is put back.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# ln 2 in two parts: a whole number below 2^14 times the first is exact
LN2_HIGH: tl.constexpr = tl.constexpr(0.693359375)
LN2_LOW: tl.constexpr = tl.constexpr(-2.121944400546905827679e-4)


@triton.jit
def _parts(x):
    """(n, r) with e^x = 2^n e^r: n whole, r = x - n ln 2 taken exactly, |r| <= 0.35; x float32."""
    n = tl.floor(x * LOG2E + 0.5)
    return n, (x - n * LN2_HIGH) - n * LN2_LOW


@triton.jit
def exp_gate(x):
    """e^x to float32 rounding, x float32."""
    n, r = _parts(x)
    e = tl.exp2(n - 1.0) * tl.exp2(r * LOG2E + 1.0)  # 2^n alone is infinite for the largest finite e^x
    return tl.where(tl.abs(x) < 200.0, e, tl.exp2(x * LOG2E))  # else 0, infinite or NaN, as r need not be


@triton.jit
def exp_difference(g, keep):
    """e^(g[i] - g[j]) where keep, else 0; g [n] float32, keep [n, n]. The exponent is masked, not the result.

    Whole powers of two subtract exactly, the rest is a factor of its row and one of its column.
    """
    n, r = _parts(g)
    r *= LOG2E
    whole = tl.exp2(tl.where(keep, n[:, None] - n[None, :], float("-inf")))
    return whole * tl.exp2(r)[:, None] * tl.exp2(-r)[None, :]


@triton.jit
def growth(g):
    """(2^-n, 2^n), n >= 0 the whole power of two in the largest e^g; both exact, 1 where gates only decay."""
    n = tl.minimum(tl.floor(tl.maximum(tl.max(g, 0), 0.0) * LOG2E), 126.0)
    return tl.exp2(-n), tl.exp2(n)
