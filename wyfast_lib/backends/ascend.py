"""The NPU backend: what the planner picks, launched by Triton-Ascend. Untested on hardware.

It needs torch_npu with CANN, and triton-ascend as the `triton` of this process (on an NPU host it is
installed in place of triton; the two overwrite each other).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util

import torch

from wyfast_lib.backends import ascend_plan as plan
from wyfast_lib.backends import ascend_plan_dv_local as dv_local_plan


def available() -> tuple[bool, str]:
    """Whether torch sees an NPU and `triton` is triton-ascend; the reason names what is missing."""
    try:
        npu = getattr(torch, "npu", None)
        if npu is None or not npu.is_available():
            return False, "torch sees no NPU: torch_npu with CANN is needed, imported before wyfast_lib"
        if importlib.util.find_spec("triton") is None:
            return False, "triton-ascend is not installed"
        if importlib.util.find_spec("triton.backends.ascend") is None:
            return False, "triton is installed over triton-ascend (they share a name): reinstall the latter"
    except Exception as problem:  # a broken installation is a reason, not a crash
        return False, f"{type(problem).__name__}: {problem}"
    return True, f"torch_npu on {npu.device_count()} NPU"


def check_call(k, v, beta, A, g, gk, chunks, needs_grad) -> None:
    """Raise ValueError off the NPU, NotImplementedError naming a limit of the kernels."""
    if k.device.type != "npu":
        raise ValueError(f"backend 'ascend' needs tensors on an NPU, got {k.device}")
    plan.check(k, v, beta, A, g, gk, chunks, needs_grad, device().arch35)


def forward(k, v, beta, A, g, gk, chunks):
    """w [B, T, H, K] and u [B, T, H, V]; arguments as in `wyfast_lib.wy_fast`, on one NPU."""
    launch, w, u = plan.plan_forward(k, v, beta, A, g, gk, chunks, device())
    execute(launch)
    return w, u


def backward(k, v, beta, A, g, dw, du, chunks):
    """dk, dv, dbeta, dg (None when g is) of the shapes and dtypes of k, v, beta, g."""
    launch, *grads = plan.plan_backward(k, v, beta, A, g, dw, du, chunks, device())
    execute(launch)
    return plan.gradients(*grads)


def check_dv_local(q, k, do, g, chunks, chunk_size) -> None:
    """As `check_call`, for `wyfast_lib.chunk_bwd_dv_local`."""
    if k.device.type != "npu":
        raise ValueError(f"backend 'ascend' needs tensors on an NPU, got {k.device}")
    dv_local_plan.check(q, k, do, g, chunks, chunk_size)


def dv_local(q, k, do, g, scale, chunks, chunk_size):
    """dv [B, T, H, V] of do's dtype; arguments as in `wyfast_lib.chunk_bwd_dv_local`, on one NPU."""
    launch, dv = dv_local_plan.plan_dv_local(q, k, do, g, scale, chunks, chunk_size, device())
    execute(launch)
    return dv


def execute(launch: plan.Launch) -> None:
    """Launch on the NPU that holds its tensors, whichever one is current."""
    kernel = getattr(importlib.import_module(launch.module), launch.kernel)
    with torch.npu.device(launch.args["k"].device):
        kernel[launch.grid](**launch.args, **launch.constexprs)


@functools.cache
def device() -> plan.Device:
    """Target name and AI cores, asked of Triton-Ascend's driver."""
    from triton.runtime import driver

    return plan.Device(driver.active.get_current_target().arch, driver.active.utils.get_aicore_num())
