"""The numbers that the exercises of notebook 04 expect are those that the compiler's audit counts."""

import pytest
import torch

from wyfast_lib.ascend import compile_kernel
from wyfast_lib.ascend.audit import audit
from wyfast_lib.backends import ascend_plan, ascend_plan_dv_local
from wyfast_lib.exercises import notebook_04
from wyfast_lib.kernels import teaching


@pytest.mark.parametrize("load", notebook_04.LOADS)
def test_the_expected_cost_of_a_load_is_what_the_compiler_makes(load):
    n, itemsize, stride = load
    kind = {2: "*bf16", 4: "*fp32"}[itemsize]
    signature = {"g": kind, "y": kind, "T": "i32"}
    constexprs = {"HV": stride, "BT": n, "G_T_CONTIG": stride == 1}
    seen = audit(compile_kernel(teaching.gate_load_kernel, signature, constexprs))
    (row,) = [r for r in seen.rows if r.argument == "g"]
    assert (row.bursts, row.moved, row.bytes * row.padding) == notebook_04.LOADS[load]


@pytest.mark.parametrize("chunk", notebook_04.CHUNKS)
def test_the_expected_bursts_of_a_chunk_are_what_the_compiler_makes(chunk):
    BT, BC, contiguous = chunk
    q, do, g = (
        torch.empty(s, dtype=torch.bfloat16, device="meta")
        for s in ((2, 2048, 4, 64), (2, 2048, 8, 64), (2, 2048, 8))
    )
    device = ascend_plan.Device("Ascend910B2", 24)
    launch, _ = ascend_plan_dv_local.plan_dv_local(q, q, do, g, 0.125, None, BT, device, contiguous, BC)
    seen = audit(compile_kernel(f"{launch.module}:{launch.kernel}", launch.signature, launch.constexprs))
    assert sum(r.bursts * r.times for r in seen.rows if r.argument == "g") == notebook_04.CHUNKS[chunk]
