"""The production kernels at the production shapes through the Ascend compiler: what `make gate` and
`python -m wyfast_lib ascend` compile, count and print.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from dataclasses import dataclass

KERNELS = ("recompute_w_u_fwd_kernel", "prepare_wy_repr_bwd_kernel")
TARGETS = ("Ascend910B2", "Ascend950PR_9589")
DTYPES = ("bfloat16", "float16", "float32")
HEADS = {"MHA": (32, 32), "GQA": (32, 8), "MQA": (32, 1)}  # name -> (H, Hg)
WIDTHS = (64, 128, 256)
#: Without the last code generator the compiler for arch35 repeats all its work five times, each time with
#: fewer optimisations; with this flag it stops after the first, which is the one that counts.
FIRST_TRY_ONLY = ("--enable-tuning-mode",)


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

    def __str__(self) -> str:
        name = "forward" if self.kernel == KERNELS[0] else "backward"
        packed = "varlen" if self.varlen else "dense"
        strided = f" strided {','.join(self.strided)}" if self.strided else ""
        sizes = f"K=V={self.width} BT={self.chunk}"
        return f"{name} {self.dtype} {packed} {self.heads} {sizes}{strided} {self.target}"


def cases(kernels=KERNELS, targets=TARGETS, dtypes=DTYPES, heads=tuple(HEADS), widths=WIDTHS) -> list[Case]:
    """Every production case of these choices, dense and packed, without those that the planner refuses."""
    every = itertools.product(kernels, targets, dtypes, heads, (False, True), widths)
    return [case for choice in every if not refusal(case := Case(*choice))]


def refusal(case: Case) -> str | None:
    """Why the planner refuses such a call, or None."""
    from wyfast_lib.backends import ascend_plan as plan

    k, v, beta, A, *_ = _tensors(case)
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
    layout = plan.Layout(**{name: name not in case.strided for name in ("g", "beta", "dg", "db")})
    device = plan.Device(case.target, 24)
    if case.kernel == plan.FORWARD:
        return plan.plan_forward(k, v, beta, A, beta, None, chunks, device, layout)[0]
    dw = v.new_empty(*v.shape[:3], k.shape[3])
    return plan.plan_backward(k, v, beta, A, beta, dw, v, chunks, device, layout)[0]


def build(case: Case):
    """Compile one case -> `Compiled`; raises as `compile_kernel` does (UBOverflowError, ...)."""
    from wyfast_lib.ascend import compile_kernel
    from wyfast_lib.backends import ascend_plan as plan

    planned = launch(case)
    flags = FIRST_TRY_ONLY if plan.Device(case.target, 1).arch35 else ()
    kernel = f"{plan.MODULE}:{planned.kernel}"
    return compile_kernel(kernel, planned.signature, planned.constexprs, case.target, flags=flags)


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
    if case.kernel == KERNELS[0]:  # k, v, A, beta, g -> w, u
        shared = 1  # a task a head: k is read for each
        return rows * (3 * case.width + case.width * shared + case.chunk + 2)
    # k, v, A, beta, g, dw, du -> dk, dv, dbeta, dg
    return rows * (4 * case.width + 2 * case.width * shared + case.chunk + 4)


def _tensors(case: Case):
    """(k, v, beta, A, chunks) of a small call of this case, without storage."""
    import torch

    from wyfast_lib.varlen import ChunkTable

    H, Hg = HEADS[case.heads]
    T, dtype = 4 * case.chunk, getattr(torch, case.dtype)

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    chunks = None
    if case.varlen:
        chunks = ChunkTable(empty(3, dtype=torch.int64), empty(4, 2, dtype=torch.int32), case.chunk, T)
    k, v = empty(1, T, Hg, case.width), empty(1, T, H, case.width)
    return k, v, empty(1, T, H), empty(1, T, H, case.chunk), chunks


# ---- python -m wyfast_lib ascend [--kernel NAME] [--target T] [--json] ----


def main(args: argparse.Namespace) -> int:
    """Compile the production kernels at K = V = 128 and print the table; status 1 if one does not fit.

    args: kernel (a part of its name, or None), target, json. Progress goes to stderr.
    """
    from wyfast_lib.ascend.errors import CompileError, WorkerCrashed

    kernels = [name for name in KERNELS if not args.kernel or args.kernel in name]
    if not kernels:
        print(f"--kernel: expected a part of {' or '.join(KERNELS)}, got {args.kernel!r}", file=sys.stderr)
        return 1
    if args.target not in TARGETS:
        print(f"--target: expected one of {', '.join(TARGETS)}, got {args.target!r}", file=sys.stderr)
        return 1
    todo = cases(kernels, (args.target,), widths=(128,))
    rows, failures = [], []
    for number, case in enumerate(todo, 1):
        begin = time.perf_counter()
        try:
            rows.append(count(case, build(case)))
        except (CompileError, WorkerCrashed) as problem:
            failures.append(str(case))
            print(f"{case}: {problem}", file=sys.stderr)
        seconds = time.perf_counter() - begin
        print(f"[{number}/{len(todo)}] {case}: {seconds:.1f} s", file=sys.stderr)
    print(json.dumps({"rows": rows, "failures": failures}, indent=1) if args.json else table(rows))
    return 1 if failures else 0


def table(rows: list[dict]) -> str:
    """The rows of `count` as aligned text; sizes in KiB a chunk and head."""
    sizes = ("argument_bytes", "ideal_bytes", "workspace_bytes", "global_bytes", "ub_peak")
    columns = ("arguments", "ideal", "workspace", "total", "UB peak")
    columns += ("bursts", "sync", "discrete", "split", "retries")
    width = max([len(row["case"]) for row in rows] + [4])
    lines = [" ".join([f"{'case':{width}}", *(f"{name:>9}" for name in columns)])]
    for row in rows:
        rest = [f"{row[name]:9.0f}" for name in ("bursts", "sync_instructions", "discrete_calls")]
        split = {True: "yes", False: "NO", None: "-"}[row["split"]]
        cells = [*(f"{row[name] / 1024:9.1f}" for name in sizes), *rest, f"{split:>9}", f"{row['retries']:9}"]
        lines.append(" ".join([f"{row['case']:{width}}", *cells]))
    return "\n".join(lines)
