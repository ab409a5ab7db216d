"""The Ascend kernels, lowered by Triton-Ascend's front end and run natively on this CPU.

Launches exactly what the planner picks for an NPU: kernels, tiles, layouts, grid. It checks the front half of
the lowering (pointers, masks, block shapes, products, bfloat16), not the hardware, and it is not fast. The
target is WYFAST_LOWERED_TARGET, by default the Atlas A2 chip Ascend910B2.
"""

from __future__ import annotations

import functools
import os
import re

from wyfast_lib.backends import ascend_plan as plan
from wyfast_lib.backends import ascend_plan_dv_local as dv_local_plan


def target() -> str:
    """Name of the target whose plan is launched."""
    return os.environ.get("WYFAST_LOWERED_TARGET", "Ascend910B2")


def available() -> tuple[bool, str]:
    """Whether the Ascend toolchain is installed; the reason is the command that installs it."""
    from wyfast_lib.ascend import toolchain

    return toolchain.available()


def check_call(k, v, beta, A, g, gk, chunks, needs_grad) -> None:
    """Raise when a tensor is not on the CPU, or NotImplementedError naming a limit of the Ascend kernels."""
    if k.device.type != "cpu":
        raise ValueError(f"backend 'lowered' runs on the CPU, the tensors are on {k.device}")
    plan.check(k, v, beta, A, g, gk, chunks, needs_grad, plan.Device(target(), 1).arch35)


def forward(k, v, beta, A, g, gk, chunks):
    """w [B, T, H, K] and u [B, T, H, V]; arguments as in `wyfast_lib.wy_fast`, on the CPU."""
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
    if k.device.type != "cpu":
        raise ValueError(f"backend 'lowered' runs on the CPU, the tensors are on {k.device}")
    dv_local_plan.check(q, k, do, g, chunks, chunk_size)


def dv_local(q, k, do, g, scale, chunks, chunk_size):
    """dv [B, T, H, V] of do's dtype; arguments as in `wyfast_lib.chunk_bwd_dv_local`, on the CPU."""
    launch, dv = dv_local_plan.plan_dv_local(q, k, do, g, scale, chunks, chunk_size, device())
    execute(launch)
    return dv


def compiled(launch: plan.Launch, name: str | None = None):
    """The launch through the Ascend compiler (cached on disk) for target `name`, else `target()`."""
    signature, constants = tuple(launch.signature.items()), tuple(launch.constexprs.items())
    return _compiled(f"{launch.module}:{launch.kernel}", signature, constants, name or target())


def execute(launch: plan.Launch) -> None:
    """Compile (cached) and run one launch on the CPU; writes into its tensors."""
    from wyfast_lib.ascend import run

    run(compiled(launch), launch.args, launch.grid)


def device() -> plan.Device:
    """The target with its number of AI cores, asked of the compiler's own description of the chip."""
    return _device(target())


@functools.cache
def _compiled(kernel: str, signature: tuple, constexprs: tuple, name: str):
    from wyfast_lib.ascend import compile_kernel

    return compile_kernel(kernel, dict(signature), dict(constexprs), name)


@functools.cache
def _device(name: str) -> plan.Device:
    """Compiles the smallest forward kernel: its module carries the chip's description."""
    import torch

    x = torch.empty(1, 16, 1, 16, dtype=torch.bfloat16)
    launch, *_ = plan.plan_forward(x, x, x[..., 0], x, None, None, None, plan.Device(name, 1))
    found = re.search(r'"AI_CORE_COUNT",\s*(\d+)', compiled(launch, name).hivm)
    if not found:
        raise RuntimeError(f"the compiler's description of {name} names no AI_CORE_COUNT")
    return plan.Device(name, int(found[1]))
