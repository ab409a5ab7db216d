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
from wyfast_lib.backends import never_raises
from wyfast_lib.backends.planned import Planned


@never_raises
def available() -> tuple[bool, str]:
    """Whether torch sees an NPU and `triton` is triton-ascend; the reason names what is missing."""
    npu = getattr(torch, "npu", None)
    if npu is None or not npu.is_available():
        return False, "torch sees no NPU: torch_npu with CANN is needed, imported before wyfast_lib"
    if importlib.util.find_spec("triton") is None:
        return False, "triton-ascend is not installed"
    if importlib.util.find_spec("triton.backends.ascend") is None:
        return False, "triton is installed over triton-ascend (they share a name): reinstall the latter"
    return True, f"torch_npu on {npu.device_count()} NPU"


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


# Looked up at each call, so that a replaced `device` or `execute` counts.
_planned = Planned("ascend", "npu", lambda: device(), lambda launch: execute(launch))
check_call, forward, backward = _planned.check_call, _planned.forward, _planned.backward
check_dv_local, dv_local = _planned.check_dv_local, _planned.dv_local
