"""From a request to something that can be compiled (`plan`) or run (`call`)."""

from __future__ import annotations

from collections.abc import Callable

from wyfast_lib.profile import ours, own
from wyfast_lib.profile.case import Case
from wyfast_lib.profile.request import ProfileError, Request


def is_ours(request: Request) -> bool:
    """True for a name of our kernels, False for FILE.py:KERNEL; ProfileError for anything else."""
    if request.kernel in ours.PHASES:
        return True
    if ":" not in request.kernel:
        raise ProfileError(
            f"no kernel {request.kernel!r}: expected {', '.join(ours.PHASES)}, or FILE.py:KERNEL"
        )
    return False


def plan(request: Request) -> Case:
    """The case to compile for an NPU; its float tensors may have no storage."""
    if not is_ours(request):
        return own.plan(request)
    if request.arguments or request.grid:
        raise ProfileError(f"--arg and --grid are for a kernel of your own; {request.name} has its planner")
    return ours.plan(request)


def call(request: Request, device: str, seed: int = 0) -> Callable[[], object]:
    """A function that launches the kernel once on "cuda" or "npu", on inputs of their own for each seed."""
    if not is_ours(request):
        return own.call(request, device)
    return ours.npu_call(request) if device == "npu" else ours.gpu_call(request, seed)


def gpu_name(request: Request) -> str:
    """A pattern for ncu that names this kernel on a GPU, and no kernel that fills its inputs."""
    return f"regex:{request.name.removesuffix('_kernel')}"
