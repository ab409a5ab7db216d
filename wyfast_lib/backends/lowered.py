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
from wyfast_lib.backends import never_raises
from wyfast_lib.backends.planned import Planned


def target() -> str:
    """Name of the target whose plan is launched."""
    return os.environ.get("WYFAST_LOWERED_TARGET", "Ascend910B2")


@never_raises
def available() -> tuple[bool, str]:
    """Whether the Ascend toolchain is installed; the reason is the command that installs it."""
    from wyfast_lib.ascend import toolchain

    return toolchain.available()


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


# Looked up at each call, so that a replaced `device` or `execute` counts.
_planned = Planned("lowered", "cpu", lambda: device(), lambda launch: execute(launch))
check_call, forward, backward = _planned.check_call, _planned.forward, _planned.backward
check_dv_local, dv_local = _planned.check_dv_local, _planned.dv_local
