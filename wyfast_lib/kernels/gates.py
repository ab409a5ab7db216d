"""A kernel that does nothing but touch the gates, for the stride-HV question: see `bench --suite gates`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["T", "NT"])
def decay_kernel(g, out, T, NT, HV: tl.constexpr, BT: tl.constexpr, G_T_CONTIG: tl.constexpr):
    """out = e^g of one chunk and head; both [B, T, HV], or [B, HV, T] with G_T_CONTIG. Heads run first."""
    i = tl.program_id(0)
    i_h, i_c = i % HV, i // HV
    i_b, i_t = (i_c // NT).to(tl.int64), i_c % NT
    o_t = i_t * BT + tl.arange(0, BT)
    if G_T_CONTIG:
        offsets = (i_b * HV + i_h) * T + o_t
    else:
        offsets = (i_b * T + o_t) * HV + i_h
    tl.store(out + offsets, tl.exp(tl.load(g + offsets, mask=o_t < T)), mask=o_t < T)
