"""What the two backends of the Ascend kernels share: check the call, plan its launch, execute it."""

from __future__ import annotations

from collections.abc import Callable

from wyfast_lib.backends import ascend_plan as plan
from wyfast_lib.backends import ascend_plan_dv_local as dv_local_plan
from wyfast_lib.tensors import at_most_float32, resolved


class Planned:
    """The functions of a backend that launches what the planner picks.

    name: the backend's. tensors: the device type that it takes. device() -> the `Device` to plan for;
    execute(launch) runs one launch on its tensors. The kernels' products are always IEEE: precision has no
    effect.
    """

    def __init__(
        self,
        name: str,
        tensors: str,
        device: Callable[[], plan.Device],
        execute: Callable[[plan.Launch], None],
    ) -> None:
        self.name, self.tensors, self.device, self.execute = name, tensors, device, execute

    def check_call(self, k, v, beta, A, g, gk, chunks, needs_grad) -> None:
        """Raise ValueError for tensors elsewhere, NotImplementedError naming a limit of the kernels."""
        self._check_place(k)
        plan.check(k, v, beta, A, g, gk, chunks, needs_grad, self.device().arch35)

    def forward(self, k, v, beta, A, g, gk, chunks, precision=None):
        """w [B, T, H, K] and u [B, T, H, V]; arguments as in `wyfast_lib.wy_fast`."""
        k, v, beta, A, g, gk = map(resolved, (k, v, beta, A, g, gk))
        launch, w, u = plan.plan_forward(k, v, beta, A, g, gk, chunks, self.device())
        self.execute(launch)
        return w, u

    def backward(self, k, v, beta, A, g, dw, du, chunks, precision=None):
        """dk, dv, dbeta, dg (None when g is) of the shapes and dtypes of k, v, beta, g."""
        k, v, beta, A, g, dw, du = map(resolved, (k, v, beta, A, g, dw, du))
        dw, du = at_most_float32(dw), at_most_float32(du)
        launch, *grads = plan.plan_backward(k, v, beta, A, g, dw, du, chunks, self.device())
        self.execute(launch)
        return plan.gradients(*grads)

    def check_dv_local(self, q, k, do, g, chunks, chunk_size) -> None:
        """As `check_call`, for `wyfast_lib.chunk_bwd_dv_local`."""
        self._check_place(k)
        dv_local_plan.check(q, k, do, g, chunks, chunk_size)

    def dv_local(self, q, k, do, g, scale, chunks, chunk_size, precision=None):
        """dv [B, T, H, V] of do's dtype; arguments as in `wyfast_lib.chunk_bwd_dv_local`."""
        q, k, do, g = map(resolved, (q, k, do, g))
        launch, dv = dv_local_plan.plan_dv_local(q, k, do, g, scale, chunks, chunk_size, self.device())
        self.execute(launch)
        return dv

    def _check_place(self, k) -> None:
        if k.device.type != self.tensors:
            raise ValueError(f"backend {self.name!r} takes tensors on {self.tensors!r}, got {k.device}")
