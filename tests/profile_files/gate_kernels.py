"""Kernels of a user's, to be profiled from their file."""

import torch
import triton
import triton.language as tl


@triton.jit
def decay_kernel(g, y, T, scale, H: tl.constexpr, BT: tl.constexpr, G_T_CONTIG: tl.constexpr = 1):
    """y[h, t] = exp(scale * g): g is [T, H], or with G_T_CONTIG [H, T]."""
    o = tl.program_id(0) * BT + tl.arange(0, BT)
    h = tl.program_id(1)
    if G_T_CONTIG:
        p = g + h * T + o
    else:
        p = g + o * H + h
    value = tl.load(p, mask=o < T, other=0.0) * scale
    tl.store(y + h * T + o, tl.exp(value), mask=o < T)


@triton.jit
def copy_kernel(x, y, T, BT: tl.constexpr):
    """y = x."""
    o = tl.program_id(0) * BT + tl.arange(0, BT)
    tl.store(y + o, tl.load(x + o, mask=o < T), mask=o < T)


def profile_case_decay_kernel(shape, device, G_T_CONTIG=1):
    """What decay_kernel is launched with."""
    T, H = shape["T"], shape["H"]
    g = torch.randn(T, H, device=device)
    return {
        "args": {"g": g, "y": torch.empty_like(g), "T": T, "scale": 0.5},
        "constexprs": {"H": H, "BT": 64, "G_T_CONTIG": G_T_CONTIG},
        "grid": (-(-T // 64), H),
    }
