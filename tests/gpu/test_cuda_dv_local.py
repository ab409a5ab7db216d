"""chunk_bwd_dv_local on an NVIDIA GPU: every launch configuration, the tests of the field, packed rows."""

from __future__ import annotations

import pytest
import torch

from wyfast_lib import backends, chunk_bwd_dv_local, prepare_chunks
from wyfast_lib.inputs import Shape, make_inputs
from wyfast_lib.reference import chunk_bwd_dv_local_reference
from wyfast_lib.testing import TOLERANCE, error_ratio

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ENTRIES = [
    (size, BT, tiles)
    for (phase, _, size, BT), choices in backends.load("cuda").LAUNCH.items()
    for tiles in choices
    if phase == "dv_local"
]


def error_of(shape: Shape, dtype, *, gated=True, cu=None, gate_dtype=None, device="cuda") -> float:
    chunks = None if cu is None else prepare_chunks(torch.tensor(cu, device=device), shape.BT)
    i = make_inputs(shape, dtype, gated=gated, chunks=chunks, gate_dtype=gate_dtype, device=device)
    do = torch.randn(i.v.shape).to(device, dtype)
    dv = chunk_bwd_dv_local(i.q, i.k, do, i.g, None, chunks, chunk_size=shape.BT)
    cpu = [None if x is None else x.cpu() for x in (i.q, i.k, do, i.g)]
    offsets = None if chunks is None else chunks.cu_seqlens.cpu()
    return error_ratio(dv, chunk_bwd_dv_local_reference(*cpu, None, shape.BT, offsets))


@pytest.mark.parametrize("size, BT, tiles", ENTRIES)
def test_every_entry_of_the_launch_table_is_right(monkeypatch, size, BT, tiles):
    module = backends.load("cuda")
    monkeypatch.setattr(module, "candidates", lambda *_: (tiles,))
    for dtype in (torch.float32,) if size == 4 else (torch.bfloat16, torch.float16):
        for K, V, H, Hg in ((64, 64, 2, 2), (128, 128, 4, 1), (100, 36, 2, 1)):
            module._plans.clear()
            assert error_of(Shape(2, 2 * BT + 3, H, Hg, K, V, BT), dtype) <= TOLERANCE[dtype]
            assert all(plan.tiles == tiles for plan in module._plans.values())
    module._plans.clear()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("cu", [None, [0, 3, 3, 67, 131, 200, 2048]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chunk_bwd_dv_local(dtype, cu, gated):
    shape = Shape(2 if cu is None else 1, 2048, 8, 4, 64, 64)
    for gate_dtype in (torch.float32, dtype):
        # The field's own test allows 0.005.
        limit = min(0.005, TOLERANCE[dtype])
        assert error_of(shape, dtype, gated=gated, cu=cu, gate_dtype=gate_dtype) <= limit


@pytest.mark.parametrize("K, V", [(1, 1), (20, 257), (256, 512), (512, 16)])
def test_odd_and_wide_rows(K, V):
    assert error_of(Shape(1, 130, 2, 1, K, V), torch.float32) <= TOLERANCE[torch.float32]
