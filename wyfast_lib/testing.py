"""How far a result may be from the truth: the measure and the limits that all checks share."""

from __future__ import annotations

import torch

# Largest error ratio of an output or a gradient against the float64 closed form on the same rounded inputs.
# A float32 product through TF32 has about 3e-4, so the float32 limit fails when TF32 is on.
TOLERANCE = {
    torch.float64: 1e-13,
    torch.float32: 2e-6,
    torch.float16: 8e-4,
    torch.bfloat16: 6e-3,
}

# The inputs whose dtype a result's matrix products may run in. A kernel feeds its matrix unit operands in the
# dtype of k (products with keys) or of v (with values), whatever the dtype of the result: beta's float32
# gradient out of bfloat16 keys carries bfloat16 rounding. beta, g and A are no operands in this sense:
# scales are applied in float32, and A is widened to the dtype of the key or value beside it.
_OPERANDS = {"w": "k", "u": "v", "dk": "kv", "dv": "v", "dbeta": "kv", "dg": "kv"}


def tolerance(name: str, result: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """Largest error ratio allowed for one result of a call: the looser of its own dtype and its operands'.

    Args:
        name: "w", "u", "dk", "dv", "dbeta" or "dg".
        result: that tensor; k, v: the inputs of the call. Only dtypes are read.

    Raises:
        KeyError: no result of that name.
    """
    operands = {"k": k, "v": v}
    dtypes = [result.dtype, *(operands[x].dtype for x in _OPERANDS[name])]
    return max(TOLERANCE[dtype] for dtype in dtypes)


def error_ratio(x: torch.Tensor, ref: torch.Tensor) -> float:
    """rms(x - ref) / rms(ref), computed in float64 on the CPU.

    A NaN or an infinity in x gives inf; where ref is zero everywhere, the ratio is 0 if x is too, else inf.

    Args:
        x, ref: tensors of one shape, any floating dtype, any device.

    Raises:
        ValueError: the shapes differ.
    """
    if x.shape != ref.shape:
        raise ValueError(f"shapes differ: {list(x.shape)} against {list(ref.shape)}")
    if x.numel() == 0:
        return 0.0
    x64, ref64 = (t.detach().to("cpu", torch.float64) for t in (x, ref))
    if not torch.isfinite(x64).all():
        return float("inf")
    error, size = (x64 - ref64).square().mean().sqrt(), ref64.square().mean().sqrt()
    if size == 0:
        return 0.0 if error == 0 else float("inf")
    return float(error / size)
