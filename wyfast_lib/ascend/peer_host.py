"""Lets the modules of fla-core's Ascend kernels be imported in the worker process, which has no NPU."""

from __future__ import annotations


def prepare() -> None:
    """Give torch the empty namespace `torch.npu` that fla-core looks for when it takes the device to be an NPU."""
    import types
    import warnings

    import torch

    if not hasattr(torch, "npu"):
        torch.npu = types.SimpleNamespace()
    warnings.filterwarnings("ignore", module=r"fla\b")
