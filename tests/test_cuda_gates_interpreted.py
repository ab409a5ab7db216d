"""The CUDA kernels' exponentials and `chunk_bwd_dv_local`, in Triton's interpreter: no GPU, float32 only."""

from __future__ import annotations

import json

import pytest
import torch
from test_cuda_interpreted import interpret
from test_gates_that_grow import GROWING, TWICE

pytest.importorskip("triton")
SCRIPT = """
import json
import torch
import test_gates_that_grow as gates
from wyfast_lib import chunk_bwd_dv_local, prepare_chunks
from wyfast_lib.inputs import Shape, make_inputs
from wyfast_lib.reference import chunk_bwd_dv_local_reference
from wyfast_lib.testing import error_ratio

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
for kind, (BT, log_gates) in {**gates.GROWING, **gates.TWICE}.items():
    call = gates.with_gate(log_gates, BT, torch.float32, "cpu", 16, 16)
    gates.assert_finite_and_equal(call, "cuda")
errors = {}
for name, (H, Hg, K, V, BT, cu, gated) in {
    "a group": (4, 2, 20, 36, 16, None, True),
    "no gate": (2, 1, 16, 16, 32, None, False),
    "packed": (2, 2, 16, 40, 16, [0, 0, 5, 22, 45], True),
}.items():
    T = 45
    chunks = None if cu is None else prepare_chunks(torch.tensor(cu), BT)
    i = make_inputs(Shape(1, T, H, Hg, K, V, BT), gated=gated, chunks=chunks)
    do = torch.randn(i.v.shape)
    dv = chunk_bwd_dv_local(i.q, i.k, do, i.g, 0.3, chunks, chunk_size=BT, backend="cuda")
    offsets = None if cu is None else chunks.cu_seqlens
    errors[name] = error_ratio(dv, chunk_bwd_dv_local_reference(i.q, i.k, do, i.g, 0.3, BT, offsets))
print(json.dumps(errors))
"""


def test_37_the_portable_kernels_take_gates_that_grow_and_dv_local_equals_the_reference():
    assert GROWING and TWICE
    done = interpret(SCRIPT)
    assert done.returncode == 0, done.stderr[-2000:]
    errors = json.loads(done.stdout.splitlines()[-1])
    assert len(errors) == 3 and all(error <= 2e-6 for error in errors.values()), errors


def test_the_exponential_of_a_gate_is_exact_to_rounding_over_its_whole_range():
    done = interpret(
        "import torch, triton, triton.language as tl\n"
        "from wyfast_lib.kernels.exponents import exp_gate\n"
        "@triton.jit\n"
        "def kernel(x, y, n: tl.constexpr):\n"
        "    o = tl.arange(0, n)\n"
        "    tl.store(y + o, exp_gate(tl.load(x + o)))\n"
        "x = torch.cat([torch.linspace(-87, 88.72, 4093), torch.tensor([0.0, -torch.inf, torch.inf])])\n"
        "y = torch.empty_like(x)\n"
        "kernel[(1,)](x, y, 4096)\n"
        "exact = x.double().exp()\n"
        "assert y[-2] == 0 and y[-1] == torch.inf, y[-3:]\n"
        "print(float(((y - exact) / exact)[:-2].abs().max()))\n"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout.splitlines()[-1]) <= 4 * torch.finfo(torch.float32).eps
