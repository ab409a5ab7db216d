"""chunk_bwd_dv_local against the float64 reference, and the reference against autograd.

The lowered backend compiles every new shape for a second or two: of the grids it takes some, the gate all.
"""

from __future__ import annotations

import pytest
import torch
from support import run_dv_local

from wyfast_lib import chunk_bwd_dv_local, prepare_chunks
from wyfast_lib.backends import ascend_plan, ascend_plan_dv_local, lowered
from wyfast_lib.backends import torch as torch_backend
from wyfast_lib.inputs import Shape, make_inputs
from wyfast_lib.reference import chunk_bwd_dv_local_reference, chunk_ranges, outputs_from_wy
from wyfast_lib.testing import TOLERANCE, error_ratio

HALF = (torch.float16, torch.bfloat16)
LIMIT = TOLERANCE | {torch.bfloat16: 0.005}  # what the field's own test allows: less than ours
RAGGED = [0, 3, 3, 67, 131, 200]


def draw(B, T, H, HV, D, dtype, *, use_g=True, cu=None, BT=64, V=None, gate_dtype=None, device="cpu"):
    """(q, k, do, g, chunks) as a layer makes them; H key heads, HV value heads."""
    chunks = None if cu is None else prepare_chunks(torch.tensor(cu, device=device), BT)
    shape = Shape(B, T, HV, H, D, V or D, BT)
    i = make_inputs(shape, dtype, gated=use_g, chunks=chunks, gate_dtype=gate_dtype, device=device)
    return i.q, i.k, torch.randn(B, T, HV, V or D).to(device, dtype), i.g, chunks


def expected(q, k, do, g, chunks, BT=64, scale=None):
    """The float64 reference on the same inputs."""
    cu = None if chunks is None else chunks.cu_seqlens.cpu()
    q, k, do, g = (None if x is None else x.cpu() for x in (q, k, do, g))
    return chunk_bwd_dv_local_reference(q, k, do, g, scale, BT, cu)


def assert_right(dv, q, k, do, g, chunks, BT=64, scale=None, limit=None):
    """dv has the documented shape, dtype and layout, and is within its limit of the reference."""
    assert dv.shape == do.shape and dv.dtype == do.dtype and dv.is_contiguous()
    error = error_ratio(dv, expected(q, k, do, g, chunks, BT, scale))
    limit = limit or max(LIMIT[x.dtype] for x in (q, k, do))
    assert error <= limit, f"error ratio {error:.3g} is over {limit:.3g}"


def local_layout(call, t_contig, BC=None, BT=64, cores=3):
    """dv of the Ascend kernel with that gate layout and sub-block, run natively."""
    q, k, do, g, chunks = call
    device = ascend_plan.Device(lowered.target(), cores)
    launch, dv = ascend_plan_dv_local.plan_dv_local(
        q, k, do, g, q.shape[-1] ** -0.5, chunks, BT, device, t_contig, BC
    )
    lowered.execute(launch)
    return dv


# ---- the other generation ----


@pytest.mark.parametrize("BT", [16, 64])
def test_the_plan_for_the_ascend_950_is_right_too(BT, monkeypatch):
    monkeypatch.setenv("WYFAST_LOWERED_TARGET", "Ascend950PR_9589")
    q, k, do, g, chunks = draw(1, 100, 1, 2, 32, torch.bfloat16, BT=BT)
    dv = chunk_bwd_dv_local(q, k, do, g, chunk_size=BT, backend="lowered")
    assert_right(dv, q, k, do, g, chunks, BT)


# ---- the gate ----


@pytest.mark.grid
@pytest.mark.parametrize("use_g", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize(
    "B, T, H, HV, D", [(1, 63, 1, 1, 64), (2, 500, 3, 6, 60), (2, 2048, 4, 8, 64), (3, 128, 2, 2, 100)]
)
def test_chunk_bwd_dv_local(backend, device, use_g, B, T, H, HV, D, dtype):
    q, k, do, g, _ = draw(B, T, H, HV, D, dtype, use_g=use_g, device=device)
    dv = chunk_bwd_dv_local(q, k, do, g, backend=backend)
    assert_right(dv, q, k, do, g, None)


def test_float64_is_right_or_refused(backend, device):
    q, k, do, g, _ = draw(2, 130, 2, 4, 32, torch.float64, device=device)
    dv = run_dv_local(q, k, do, g, backend=backend)
    if dv is not None:
        assert_right(dv, q, k, do, g, None)
    assert (dv is None) == (backend != "torch")


@pytest.mark.parametrize("use_g", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.grid)])
def test_chunk_bwd_dv_local_of_ragged_packed_sequences(backend, device, dtype, use_g):
    call = draw(1, 200, 2, 4, 64, dtype, cu=RAGGED, use_g=use_g, device=device)
    q, k, do, g, chunks = call
    dv = chunk_bwd_dv_local(q, k, do, g, None, chunks, backend=backend)
    assert_right(dv, *call)
    from_offsets = chunk_bwd_dv_local(q, k, do, g, None, chunks.cu_seqlens.int(), backend=backend)
    assert torch.equal(dv, from_offsets)


@pytest.mark.parametrize("t_contig", [True, False])
@pytest.mark.parametrize("packed", [False, True])
def test_a_wrong_base_pointer_would_show_at_2048_tokens_of_ragged_sequences(t_contig, packed):
    cu = [0, 1, 700, 700, 1301, 2048] if packed else None
    call = draw(1 if packed else 2, 2048, 1, 8, 16, torch.float32, cu=cu)
    assert_right(local_layout(call, t_contig), *call)


# ---- the mathematics ----


@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_formula_is_the_gradient_of_the_local_output(scale):
    q, k, do, g, _ = draw(2, 90, 2, 4, 8, torch.float64, V=12)
    w = torch.zeros(2, 90, 4, 8, dtype=torch.float64)  # n = u - w S: with w = 0, u is what the chunk writes
    u = torch.randn(2, 90, 4, 12, dtype=torch.float64, requires_grad=True)
    parts = []
    for s, e in chunk_ranges(90, 16):  # each chunk alone starts from a zero state: the local part only
        cut = (x[:, s:e] for x in (q, k, w, u, g))
        parts.append(outputs_from_wy(*cut, 16, scale)[0])
    (dv,) = torch.autograd.grad(torch.cat(parts, 1), u, do)
    assert error_ratio(chunk_bwd_dv_local_reference(q, k, do, g, scale, 16), dv) < 1e-14


def test_no_gate_is_a_zero_gate(backend, device):
    q, k, do, _, _ = draw(1, 40, 1, 2, 16, torch.float32, use_g=False, BT=16, device=device)
    zeros = do.new_zeros(do.shape[:3])
    zero = chunk_bwd_dv_local(q, k, do, zeros, chunk_size=16, backend=backend)
    plain = chunk_bwd_dv_local(q, k, do, chunk_size=16, backend=backend)
    assert error_ratio(plain, zero) < 1e-7


def test_the_gate_is_a_similarity_and_its_level_in_a_chunk_is_free(backend, device):
    q, k, do, g, _ = draw(1, 40, 1, 2, 16, torch.float32, BT=16, device=device)
    g = g.clamp(min=-4)

    def dv(do, g):
        return chunk_bwd_dv_local(q, k, do, g, chunk_size=16, backend=backend)

    gated = dv(do, g)
    through = dv(do * g.exp()[..., None], None) * (-g).exp()[..., None]
    assert error_ratio(gated, through) < 1e-6  # natural log: no ln 2 anywhere
    level = torch.tensor([0.7, -2.0, 3.0]).repeat_interleave(16)[:40].to(device)
    assert error_ratio(dv(do, g + level[None, :, None]), gated) < 2e-6


def test_it_is_linear_in_do_and_in_the_scale(backend, device):
    q, k, do, g, _ = draw(1, 40, 1, 2, 16, torch.float32, BT=16, device=device)

    def dv(do, scale=1.0):
        return chunk_bwd_dv_local(q, k, do, g, scale, chunk_size=16, backend=backend)

    other = torch.randn_like(do)
    assert error_ratio(dv(2 * do - 3 * other), 2 * dv(do) - 3 * dv(other)) < 1e-6
    assert torch.equal(dv(do, 0.25), 0.25 * dv(do))
    assert torch.equal(dv(do, 0), torch.zeros_like(do))


def test_the_last_row_of_a_chunk_reads_itself_only():
    q, k, do, g, _ = draw(1, 32, 1, 1, 8, torch.float64, BT=16)
    dv = chunk_bwd_dv_local(q, k, do, g, 1.0, chunk_size=16)
    for last in (15, 31):
        assert torch.allclose(dv[0, last, 0], (q[0, last, 0] @ k[0, last, 0]) * do[0, last, 0], atol=1e-15)


# ---- what the kernels must survive ----


def test_steep_decays_stay_finite_and_right(backend, device):
    q, k, do, _, _ = draw(1, 40, 1, 2, 16, torch.float32, BT=16, device=device)
    decay = -20 * torch.rand(1, 40, 2).to(device)
    g = torch.cat([x.cumsum(1) for x in decay.split(16, 1)], 1)
    dv = chunk_bwd_dv_local(q, k, do, g, chunk_size=16, backend=backend)
    assert_right(dv, q, k, do, g, None, 16)
    rising = -g / 4  # gates may grow: above the diagonal the exponent is steeply positive then
    dv = chunk_bwd_dv_local(q, k, do, rising, chunk_size=16, backend=backend)
    assert_right(dv, q, k, do, rising, None, 16)


@pytest.mark.parametrize("packed", [False, True])
def test_a_padded_tail_against_a_large_gate_stays_finite_and_right(backend, device, packed):
    cu = [0, 5, 24, 40] if packed else None
    q, k, do, g, chunks = draw(1, 40, 1, 2, 16, torch.float32, BT=16, cu=cu, device=device)
    g = g - 120  # the level in a chunk is free, but exp(0 - g) of an absent row would overflow
    dv = chunk_bwd_dv_local(q, k, do, g, None, chunks, chunk_size=16, backend=backend)
    assert_right(dv, q, k, do, g, chunks, 16)


def test_slices_of_nan_filled_memory_give_the_same_bits(backend, device):
    call = draw(1, 40, 1, 2, 16, torch.float32, BT=16, device=device)[:4]
    views = []
    for x in call:
        around = x.new_full([n + 5 for n in x.shape], torch.nan)
        view = around[tuple(slice(2, 2 + n) for n in x.shape)]
        views.append(view.copy_(x))
    results = [chunk_bwd_dv_local(*c, chunk_size=16, backend=backend) for c in (call, views)]
    assert torch.equal(*results)


def test_nan_stays_in_its_chunk_and_head(backend, device):
    q, k, do, g, _ = draw(1, 40, 2, 2, 16, torch.float32, BT=16, device=device)
    clean = chunk_bwd_dv_local(q, k, do, g, chunk_size=16, backend=backend)
    g = g.clone()
    g[0, 20, 1] = torch.nan
    dv = chunk_bwd_dv_local(q, k, do, g, chunk_size=16, backend=backend)
    assert dv[0, 20, 1].isnan().all()
    mine = torch.zeros_like(dv, dtype=torch.bool)
    mine[0, 16:32, 1] = True
    assert torch.equal(dv[~mine], clean[~mine])


def test_dtypes_may_be_mixed_and_dv_has_that_of_do(backend, device):
    q, k, do, g, _ = draw(1, 40, 1, 2, 16, torch.float32, BT=16, device=device)
    q, k, g = q.bfloat16(), k.half(), g.bfloat16()
    dv = chunk_bwd_dv_local(q, k, do, g, chunk_size=16, backend=backend)
    assert_right(dv, q, k, do, g, None, 16, limit=LIMIT[torch.float32])
    narrow = chunk_bwd_dv_local(q, k, do.half(), g, chunk_size=16, backend=backend)
    assert_right(narrow, q, k, do.half(), g, None, 16)


@pytest.mark.parametrize("BT", [16, 32, 64, 128])
def test_every_chunk_size_is_right(BT):
    call = draw(2, 150, 1, 2, 24, torch.float32, BT=BT)
    assert_right(chunk_bwd_dv_local(*call[:4], chunk_size=BT), *call, BT)


@pytest.mark.parametrize("BT, BC", [(64, 16), (64, 32), (128, 64)])
def test_every_sub_block_of_the_ascend_kernel_is_right_in_both_gate_layouts(BT, BC):
    call = draw(1, 150, 1, 3, 20, torch.float32, BT=BT, V=36)
    results = [local_layout(call, t_contig, BC, BT) for t_contig in (True, False)]
    assert_right(results[0], *call, BT)
    assert torch.equal(*results)


@pytest.mark.parametrize("cores", [1, 5, 6, 7])
def test_no_task_is_lost_whatever_the_number_of_cores(cores):
    call = draw(1, 40, 1, 2, 16, torch.float32, BT=16)  # 3 chunks of 2 heads
    assert_right(local_layout(call, True, BT=16, cores=cores), *call, 16)


def test_one_head_is_not_transposed():
    q, k, do, g, _ = draw(2, 40, 1, 1, 16, torch.float32, BT=16)
    device = ascend_plan.Device("Ascend910B2", 1)
    launch, _ = ascend_plan_dv_local.plan_dv_local(q, k, do, g, 1.0, None, 16, device)
    assert launch.args["g"].data_ptr() == g.data_ptr()


def test_no_tokens_give_no_rows(backend, device):
    q, k, do, g = (x[:, :0] for x in draw(2, 40, 1, 2, 16, torch.float32, device=device)[:4])
    assert chunk_bwd_dv_local(q, k, do, g, backend=backend).shape == (2, 0, 2, 16)
    none = torch.tensor([0, 0], device=device)
    dv = chunk_bwd_dv_local(q[:1], k[:1], do[:1], g[:1], None, none, backend=backend)
    assert dv.shape == (1, 0, 2, 16)


def test_the_result_carries_no_graph_and_the_inputs_are_untouched():
    call = draw(1, 40, 1, 2, 16, torch.float32)[:4]
    before = [x.clone() for x in call]
    leaves = [x.requires_grad_() for x in call]
    dv = chunk_bwd_dv_local(*leaves)
    assert not dv.requires_grad and dv.grad_fn is None
    assert all(torch.equal(a, b) for a, b in zip(before, leaves, strict=True))


def test_autocast_does_not_reach_inside():
    call = draw(1, 40, 1, 2, 16, torch.float32)[:4]
    with torch.autocast("cpu", torch.bfloat16):
        inside = chunk_bwd_dv_local(*call)
    assert torch.equal(inside, chunk_bwd_dv_local(*call))


# ---- what bad input gets ----


def good():
    """Arguments of a call that is accepted."""
    q, k, do, g, _ = draw(1, 40, 1, 2, 8, torch.float32)
    return {"q": q, "k": k, "do": do, "g": g, "scale": None, "cu_seqlens": None, "chunk_size": 64}


BAD = [
    ("q", lambda a: a["q"][..., :7], ValueError, r"q must have shape .*\[1, 40, 1, 8\], got \[1, 40, 1, 7\]"),
    ("q", lambda a: a["q"][0], ValueError, r"q must have shape \[B, T, Hg, K\], got \[40, 1, 8\]"),
    ("k", lambda a: a["k"].int(), TypeError, "k must be float64, .*got torch.int32"),
    ("do", lambda a: a["do"][:, 1:], ValueError, r"do must have shape .*40, .*got \[1, 39, 2, 8\]"),
    ("do", lambda a: a["do"].tolist(), TypeError, "do must be a torch.Tensor .*got list"),
    ("do", lambda a: a["do"][..., :0], ValueError, "V must be at least 1"),
    ("g", lambda a: a["g"][..., :1], ValueError, r"g must have shape .*\[1, 40, 2\], got \[1, 40, 1\]"),
    ("g", lambda a: a["g"].to("meta"), ValueError, "g is on meta, q on cpu"),
    ("scale", lambda a: "1", TypeError, "scale must be a real number or None, got str"),
    ("scale", lambda a: True, TypeError, "scale must be a real number or None, got bool"),
    ("scale", lambda a: float("nan"), ValueError, "scale must be finite, got nan"),
    ("chunk_size", lambda a: 48, ValueError, r"chunk_size must be one of \(16, 32, 64, 128\), got 48"),
    ("chunk_size", lambda a: 64.0, TypeError, "chunk_size must be an int, got float"),
    ("cu_seqlens", lambda a: torch.tensor([0, 39]), ValueError, "must end at T = 40 .*got 39"),
    ("cu_seqlens", lambda a: torch.tensor([1, 40]), ValueError, "must start at 0, got 1"),
    ("cu_seqlens", lambda a: prepare_chunks(torch.tensor([0, 40]), 32), ValueError, "32, this call needs 64"),
]


@pytest.mark.parametrize("name, change, kind, message", BAD, ids=[f"{b[0]}-{n}" for n, b in enumerate(BAD)])
def test_bad_input_is_named_before_anything_runs(name, change, kind, message, monkeypatch):
    monkeypatch.setattr(torch_backend, "dv_local", lambda *_: pytest.fail("ran with bad input"))
    arguments = good()
    arguments[name] = change(arguments)
    with pytest.raises(kind, match=message) as raised:
        chunk_bwd_dv_local(**arguments)
    assert type(raised.value) is kind


def test_three_heads_over_two_key_heads_are_refused():
    q, k, do, g, _ = draw(1, 40, 1, 3, 8, torch.float32)
    q, k = (x.expand(1, 40, 2, 8) for x in (q, k))
    with pytest.raises(ValueError, match="H = 3 heads over Hg = 2 key heads"):
        chunk_bwd_dv_local(q, k, do, g)


def test_packed_sequences_need_one_row():
    q, k, do, g, _ = draw(2, 40, 1, 2, 8, torch.float32)
    with pytest.raises(ValueError, match="B must be 1, got k with B = 2"):
        chunk_bwd_dv_local(q, k, do, g, None, torch.tensor([0, 40]))


def test_the_ascend_kernel_names_its_limits():
    arguments = good()
    with pytest.raises(NotImplementedError, match="q: the Ascend kernels compute in float32, got float64"):
        chunk_bwd_dv_local(**{**arguments, "q": arguments["q"].double()}, backend="lowered")
    wide = torch.zeros(1, 40, 1, 257)
    with pytest.raises(NotImplementedError, match="K = 257: .*up to 256"):
        chunk_bwd_dv_local(wide, wide, arguments["do"], backend="lowered")
    q, k, do = (x.to("meta") for x in (arguments["q"], arguments["k"], arguments["do"]))
    with pytest.raises(ValueError, match="'lowered' takes tensors on 'cpu', got meta"):
        lowered.check_dv_local(q, k, do, None, None, 64)
