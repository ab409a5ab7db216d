"""How many launches a call costs, its kernels and what the host adds around them: counted by making the call.

The call's Python code runs on tensors without storage: every kernel launch is counted and not made, and every
operation of torch that would compute or copy on a device is one launch of the host's.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wyfast_lib.ascend import peer, production
from wyfast_lib.ascend.production import Case


class HostLaunches(TorchDispatchMode):
    """Counts the operations inside that a device would run; views and uninitialised memory are none."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        free = func._schema.name.split("::")[1].startswith(("empty", "new_empty", "_unsafe_view"))
        self.count += isinstance(out, torch.Tensor) and not (view or free)
        return out


def own(case: Case) -> tuple[int, int]:
    """(kernel launches, host launches) of one call of ours."""
    from wyfast_lib.backends.planned import Planned

    kernels = []
    device = production.device(case.target)
    planned = Planned("ascend", "meta", lambda: device, kernels.append)
    k, v, beta, A, chunks = production._tensors(case)
    g = beta if case.gated else None
    with HostLaunches() as host:
        if case.kernel == production.DV_LOCAL:
            planned.dv_local(k, k, v, g, 1.0, chunks, case.chunk)
        elif production.NAMES[case.kernel] == "forward":
            planned.forward(k, v, beta, A, g, None, chunks)
        else:
            planned.backward(k, v, beta, A, g, v.new_empty(*v.shape[:3], k.shape[3]), v, chunks)
    return len(kernels), host.count


def beside(phase: str) -> tuple[int, int]:
    """The same of a call of the peer's wy_fast ("forward" or "backward"): bfloat16, MHA, gated, dense."""
    case = Case(production.KERNELS[0])
    k, v, beta, A, _ = production._tensors(case)
    with _peer_without_a_device() as (module, kernels), HostLaunches() as host:
        if phase == "forward":
            module.recompute_w_u_fwd_npu(k, v, beta, A, beta)
        else:
            module.prepare_wy_repr_bwd_npu(k, v, beta, A, torch.empty_like(k), torch.empty_like(v), beta)
    return len(kernels), host.count


@contextmanager
def _peer_without_a_device() -> Iterator[tuple]:
    """(the peer's module, the list that its launches go to): its kernels are counted and not run."""
    peer.require()
    module = importlib.import_module(peer.WY_FAST)
    kernels: list = []

    class Counted:
        def __getitem__(self, grid):
            return lambda **arguments: kernels.append(grid)

    names = [n for n in vars(module) if n.endswith("_npu") and hasattr(getattr(module, n), "fn")]
    with mock.patch.multiple(
        module,
        get_npu_properties=lambda: {"num_aicore": 1},
        compute_row_tile_block_size=peer._ub_model().compute_row_tile_block_size,
        **{name: Counted() for name in names},
    ):
        yield module, kernels
