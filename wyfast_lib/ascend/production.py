"""The production kernels at the production shapes through the Ascend compiler: what `make gate` and
`python -m wyfast_lib ascend` compile, count and print.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

KERNELS = ("recompute_w_u_fwd_kernel", "prepare_wy_repr_bwd_kernel")
DV_LOCAL = "chunk_bwd_dv_local_kernel"
NAMES = {KERNELS[0]: "forward", KERNELS[1]: "backward", DV_LOCAL: "dv_local"}
TARGETS = ("Ascend910B2", "Ascend950PR_9589")
DTYPES = ("bfloat16", "float16", "float32")
HEADS = {"MHA": (32, 32), "GQA": (32, 8), "MQA": (32, 1)}  # name -> (H, Hg)
WIDTHS = (64, 128, 256)
CORES = 24  # AI cores to plan for: decides the grid alone, which no compiled kernel depends on


@dataclass(frozen=True)
class Case:
    """One compilation: a kernel with the plan of one call.

    `strided`: those of g, beta, dg, db that are stored [B, T, H].
    """

    kernel: str
    target: str = "Ascend910B2"
    dtype: str = "bfloat16"
    heads: str = "MHA"
    varlen: bool = False
    width: int = 128
    chunk: int = 64
    strided: tuple[str, ...] = ()
    gated: bool = True

    def __str__(self) -> str:
        name = NAMES[self.kernel]
        packed = "varlen" if self.varlen else "dense"
        strided = f" strided {','.join(self.strided)}" if self.strided else ""
        sizes = f"K=V={self.width} BT={self.chunk}" + ("" if self.gated else " no gate")
        return f"{name} {self.dtype} {packed} {self.heads} {sizes}{strided} {self.target}"


def cases(kernels=KERNELS, targets=TARGETS, dtypes=DTYPES, heads=tuple(HEADS), widths=WIDTHS) -> list[Case]:
    """Every production case of these choices, dense and packed, without those that the planner refuses."""
    every = itertools.product(kernels, targets, dtypes, heads, (False, True), widths)
    return [case for choice in every if not refusal(case := Case(*choice))]


def refusal(case: Case) -> str | None:
    """Why the planner refuses such a call, or None."""
    from wyfast_lib.backends import ascend_plan as plan

    k, v, beta, A, *_ = _tensors(case)
    if case.kernel == DV_LOCAL:
        return None  # its planner takes every width and chunk of a case
    backward = case.kernel == plan.BACKWARD
    try:
        plan.check(k, v, beta, A, beta, None, None, backward, plan.Device(case.target, 1).arch35)
    except NotImplementedError as limit:
        return str(limit)
    return None


def launch(case: Case):
    """The planner's `Launch` for a case, on tensors without storage."""
    from wyfast_lib.backends import ascend_plan as plan

    k, v, beta, A, chunks = _tensors(case)
    g = beta if case.gated else None
    layout = plan.Layout(**{name: name not in case.strided for name in ("g", "beta", "dg", "db")})
    if case.kernel == DV_LOCAL:
        from wyfast_lib.backends.ascend_plan_dv_local import plan_dv_local

        return plan_dv_local(k, k, v, g, 1.0, chunks, case.chunk, device(case.target), layout.g)[0]
    if case.kernel == plan.FORWARD:
        return plan.plan_forward(k, v, beta, A, g, None, chunks, device(case.target), layout)[0]
    dw = v.new_empty(*v.shape[:3], k.shape[3])
    return plan.plan_backward(k, v, beta, A, g, dw, v, chunks, device(case.target), layout)[0]


def device(target: str):
    """The planner's `Device` of a target."""
    from wyfast_lib.backends.ascend_plan import Device

    return Device(target, CORES)


def build(case: Case):
    """Compile one case -> `Compiled`; raises as `compile_kernel` does (UBOverflowError, ...)."""
    return _compile(launch(case), case.target)


def build_dv_local(
    *, H: int = 4, HV: int = 8, K: int = 64, V: int = 64, BT: int = 64, BC: int | None = None,
    dtype: str = "bfloat16", gate_dtype: str = "float32", t_contig: bool = True, varlen: bool = False,
    use_g: bool = True, target: str = TARGETS[0],
):  # fmt: skip
    """Compile `chunk_bwd_dv_local_kernel` -> `Compiled`; by default at the published shape of its pathology.

    H key heads, HV value heads; BT rows a chunk, BC a sub-block (default: the planner's). t_contig: the gate
    is stored [B, HV, T], else [B, T, HV].
    """
    import torch

    from wyfast_lib.backends.ascend_plan import Device
    from wyfast_lib.backends.ascend_plan_dv_local import plan_dv_local

    T = 4 * BT
    k = torch.empty(1, T, H, K, dtype=getattr(torch, dtype), device="meta")
    do, g = k.new_empty(1, T, HV, V), k.new_empty(1, T, HV, dtype=getattr(torch, gate_dtype))
    arguments = (k, k, do, g if use_g else None, 1.0, _packed(BT) if varlen else None, BT)
    return _compile(plan_dv_local(*arguments, Device(target, CORES), t_contig, BC)[0], target)


def _compile(planned, target: str):
    from wyfast_lib.ascend import compile_kernel

    kernel = f"{planned.module}:{planned.kernel}"
    return compile_kernel(kernel, planned.signature, planned.constexprs, target)


def count(case: Case, compiled) -> dict:
    """One row of the table: bytes a chunk and head (a group's divided by its heads), and the verdict."""
    from wyfast_lib.ascend.audit import audit

    counted = audit(compiled)
    H, Hg = HEADS[case.heads]
    share = H // Hg if case.kernel == KERNELS[1] else 1
    per_head = {
        name: counted.totals[name] / share
        for name in ("argument_bytes", "workspace_bytes", "global_bytes", "bursts", "sync_instructions")
    }
    return {
        "case": str(case), "kernel": case.kernel, "target": case.target, "dtype": case.dtype,
        "heads": case.heads, "varlen": case.varlen, "width": case.width, "chunk": case.chunk,
        "strided": ",".join(case.strided), **per_head, "ideal_bytes": ideal_bytes(case),
        "ub_peak": compiled.ub_peak, "l1_peak": compiled.l1_peak,
        "discrete_calls": counted.totals["discrete_calls"], "padded_calls": counted.totals["padded_calls"],
        "split": counted.split, "retries": compiled.retries,
    }  # fmt: skip


def ideal_bytes(case: Case) -> float:
    """Each input read once, each output written once, a full chunk and head; a group shares k and dk."""
    item = 4 if case.dtype == "float32" else 2
    H, Hg = HEADS[case.heads]
    rows, shared = case.chunk * item, Hg / H
    if case.kernel == DV_LOCAL:  # q, k, do, g -> dv, a task a head
        return rows * (4 * case.width + case.gated)
    if case.kernel == KERNELS[0]:  # k, v, A, beta, g -> w, u
        shared = 1  # a task a head: k is read for each
        return rows * (3 * case.width + case.width * shared + case.chunk + 2)
    # k, v, A, beta, g, dw, du -> dk, dv, dbeta, dg
    return rows * (4 * case.width + 2 * case.width * shared + case.chunk + 4)


def _tensors(case: Case):
    """(k, v, beta, A, chunks) of a small call of this case, without storage."""
    import torch

    H, Hg = HEADS[case.heads]
    T, dtype = 4 * case.chunk, getattr(torch, case.dtype)

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    chunks = _packed(case.chunk) if case.varlen else None
    k, v = empty(1, T, Hg, case.width), empty(1, T, H, case.width)
    return k, v, empty(1, T, H), empty(1, T, H, case.chunk), chunks


def _packed(chunk: int):
    """A table of two sequences in four chunks, without storage."""
    import torch

    from wyfast_lib.varlen import ChunkTable

    offsets = torch.empty(3, dtype=torch.int64, device="meta")
    indices = torch.empty(4, 2, dtype=torch.int32, device="meta")
    return ChunkTable(offsets, indices, chunk, 4 * chunk)
