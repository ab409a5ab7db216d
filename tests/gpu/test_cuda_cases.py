"""What only an NVIDIA GPU can show: every launch configuration, long addresses, limits, two devices."""

from __future__ import annotations

import dataclasses
import math
import time

import pytest
import torch
from support import assert_bitwise, assert_equal, check, draw, reference, run

from wyfast_lib import backends, prepare_chunks, wy_fast
from wyfast_lib.testing import TOLERANCE, error_ratio

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HALF = (torch.bfloat16, torch.float16)


@pytest.fixture
def cuda():
    """The backend with an empty plan cache before and after."""
    module = backends.load("cuda")
    module._plans.clear()
    yield module
    module._plans.clear()


@pytest.fixture
def portable(cuda, monkeypatch):
    """The backend with Hopper's own kernel switched off."""
    monkeypatch.setattr(cuda, "_fits_hopper_kernel", lambda *_: False)
    return cuda


def table():
    """Every entry of the launch table with every tile choice; dv_local's have a test of their own."""
    module, found = backends.load("cuda"), []
    for (phase, arch, size, BT), choices in module.LAUNCH.items():
        for tiles in choices if phase != "dv_local" else ():
            found.append((phase, arch, size, BT, tiles))
    return found


def name(value) -> str:
    if dataclasses.is_dataclass(value):
        return "-".join(str(x) for x in dataclasses.astuple(value))
    return str(value)


@pytest.mark.parametrize("phase, arch, size, BT, tiles", table(), ids=name)
def test_every_entry_of_the_launch_table_is_right(portable, monkeypatch, phase, arch, size, BT, tiles):
    monkeypatch.setattr(portable, "candidates", lambda *_: (tiles,))
    wide = (128, 128, 2, 2)
    if size == 2:
        kinds = [(torch.bfloat16, s) for s in ((64, 64, 2, 2), wide, (128, 64, 4, 1), (100, 36, 2, 1))]
        kinds.append((torch.float16, wide))
    else:
        kinds = [(torch.float32, s) for s in (wide, (100, 36, 2, 1))]
    for dtype, (K, V, H, Hg) in kinds:
        if tiles.KEEP_P and tiles.BK < K:
            continue
        call = draw(B=2, T=2 * BT + 3, H=H, Hg=Hg, K=K, V=V, BT=BT, dtype=dtype, device="cuda")
        if phase == "forward":
            found = portable.forward(call.k, call.v, call.beta, call.A, call.g, None, None)
            names = ("w", "u")
        else:
            found = portable.backward(call.k, call.v, call.beta, call.A, call.g, call.dw, call.du, None)
            names = ("dk", "dv", "dbeta", "dg")
        expected = reference(call)
        assert_equal(dict(zip(names, found, strict=True)), {n: expected[n] for n in names}, call)
    assert all(plan.tiles == tiles for plan in portable._plans.values())


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("K, V", [(64, 64), (64, 128), (128, 64), (128, 128)])
@pytest.mark.parametrize("H, Hg", [(2, 2), (4, 2), (3, 1), (8, 1)])
@pytest.mark.parametrize("gated", [True, False])
def test_the_hopper_kernels_are_right_for_every_shape_they_take(cuda, dtype, K, V, H, Hg, gated):
    if not cuda._device(0).hopper:
        pytest.skip("no Hopper GPU")
    for T in (1, 64, 200):
        for cu in (None, [0, 0, min(T, 5), T]):
            B = 2 if cu is None else 1
            call = draw(B, T, H, Hg, K, V, 64, dtype=dtype, gated=gated, cu=cu, device="cuda", seed=T)
            check(call, "cuda")
    assert all(key[1] for key in cuda._plans), "the portable kernel was used"


@pytest.mark.parametrize("limit", [48, 64, 99, 164, 228])
def test_smaller_tiles_are_chosen_where_shared_memory_is_small(portable, monkeypatch, limit):
    device = portable._device(0)
    small = type(device)(**{**vars(device), "shared_memory": limit << 10})
    monkeypatch.setattr(portable, "_device", lambda index: small)
    for dtype, BT in ((torch.bfloat16, 64), (torch.float32, 64), (torch.bfloat16, 128)):
        call = draw(B=1, T=BT + 7, H=2, Hg=1, K=256, V=512, BT=BT, dtype=dtype, device="cuda")
        # Two tiles of A in chunks of 128 are 64 KiB: more than 48, and the message has to say so.
        assert bool(check(call, "cuda")) == ((limit, BT) != (48, 128))


def test_an_impossible_shared_memory_limit_is_named(portable, monkeypatch):
    device = portable._device(0)
    tiny = type(device)(**{**vars(device), "shared_memory": 1024})
    monkeypatch.setattr(portable, "_device", lambda index: tiny)
    call = draw(T=64, BT=64, K=64, V=64, device="cuda")
    assert run(call, "cuda") == {}, "the table of refusals names it"
    with pytest.raises(RuntimeError, match="the device has 1024"):
        wy_fast(call.k, call.v, call.beta, call.A, call.g, backend="cuda")


def huge(T, H, K, V, dtype=torch.bfloat16):
    """A call too large for the helpers: drawn on the device, A any unit lower triangular tile."""
    random = torch.Generator("cuda").manual_seed(0)

    def normal(*size):
        return torch.empty(*size, dtype=dtype, device="cuda").normal_(generator=random)

    k, v, dw, du = normal(1, T, H, K), normal(1, T, H, V), normal(1, T, H, K), normal(1, T, H, V)
    k *= K**-0.5
    beta = torch.rand(1, T, H, device="cuda", generator=random)
    g = -torch.rand(1, T, H, device="cuda", generator=random)
    tile = torch.randn(64, 64, device="cuda", generator=random) * 0.1
    tile = tile.tril(-1) + torch.eye(64, device="cuda")
    A = tile.to(dtype)[torch.arange(T, device="cuda") % 64][None, :, None].expand(1, T, H, 64).contiguous()
    return k, v, beta, A, g, dw, du


@pytest.mark.parametrize("T, H, K", [((1 << 23) + 64, 1, 256), ((1 << 23) + 64, 2, 128)])
def test_addresses_past_two_to_the_31st_are_right(cuda, T, H, K):
    x = huge(T, H, K, K)
    for chunks in (None, prepare_chunks(torch.tensor([0, T - 64, T], device="cuda"), 64)):
        whole = cuda.forward(*x[:5], None, chunks) + cuda.backward(*x, chunks)
        last = tuple(t[:, -64:].clone() for t in x)
        alone = cuda.forward(*last[:5], None, None) + cuda.backward(*last, None)
        for a, b in zip(whole, alone, strict=True):
            assert torch.equal(a[:, -64:], b)
        del whole


@pytest.mark.parametrize("B, T, H", [(70_000, 16, 1), (1, 70_000 * 16, 1)])
def test_seventy_thousand_heads_or_chunks_run(cuda, B, T, H):
    call = draw(B=B, T=T, H=H, Hg=H, K=16, V=16, BT=16, device="cuda")
    results = run(call, "cuda")
    picked = slice(B - 2, B) if B > 1 else slice(0, 1)
    few = call.rows(picked) if B > 1 else call.tokens(T - 64, T)
    part = {n: x[picked] if B > 1 else x[:, T - 64 :] for n, x in results.items()}
    assert_equal(part, reference(few), few)


def test_twenty_lengths_cost_no_new_compile(cuda):
    run(draw(T=100, H=2, Hg=2, K=64, V=64, BT=64, dtype=torch.bfloat16, device="cuda"), "cuda")
    before, begin = len(cuda._plans), time.perf_counter()
    for T in (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 160, 192, 200, 255, 256):
        run(draw(T=T, H=2, Hg=2, K=64, V=64, BT=64, dtype=torch.bfloat16, device="cuda"), "cuda")
    torch.cuda.synchronize()
    assert len(cuda._plans) == before == 2
    assert time.perf_counter() - begin < 20, "a compile hides in the later calls"


def test_fifty_runs_agree_bit_for_bit(cuda):
    call = draw(T=300, H=8, Hg=2, K=128, V=128, BT=64, dtype=torch.bfloat16, device="cuda")
    first = run(call, "cuda")
    for _ in range(50):
        assert_bitwise(run(call, "cuda"), first)


def test_a_cuda_graph_of_forward_and_backward_follows_new_inputs(cuda):
    sizes = dict(T=200, H=4, Hg=2, K=128, V=128, BT=64, dtype=torch.bfloat16, cu=[0, 70, 200])
    call, other = draw(**sizes, device="cuda"), draw(**sizes, device="cuda", seed=7)
    leaves = [x.detach().requires_grad_() for x in (call.k, call.v, call.beta, call.g)]

    def step():
        w, u = wy_fast(*leaves[:3], call.A, leaves[3], cu_seqlens=call.chunks)
        return (w, u, *torch.autograd.grad((w, u), leaves, (call.dw, call.du)))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    with torch.no_grad():
        for x, n in zip(leaves, ("k", "v", "beta", "g"), strict=True):
            x.copy_(getattr(other, n))
        for n in ("A", "dw", "du"):
            getattr(call, n).copy_(getattr(other, n))
    graph.replay()
    torch.cuda.synchronize()
    names = ("w", "u", "dk", "dv", "dbeta", "dg")
    assert_equal(dict(zip(names, captured, strict=True)), reference(other), other)


def test_a_group_of_heads_needs_no_workspace_for_dk(cuda):
    call = draw(T=4096, H=8, Hg=2, K=128, V=128, BT=64, dtype=torch.bfloat16, device="cuda")
    arguments = (call.k, call.v, call.beta, call.A, call.g, call.dw, call.du, None)
    cuda.backward(*arguments)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    results = cuda.backward(*arguments)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
    del results


def test_float32_is_ieee_unless_tf32_is_asked_for(cuda):
    call = draw(T=128, H=2, Hg=2, K=128, V=128, BT=64, device="cuda")
    check(call, "cuda")
    with cuda.float32_precision("tf32"):
        w = run(call, "cuda")["w"]
    error = error_ratio(w, reference(call)["w"])
    assert 1e-5 < error < 2e-3
    with pytest.raises(ValueError, match="tf19"):
        cuda.float32_precision("tf19").__enter__()


def test_inputs_that_start_off_alignment_are_right(cuda):
    wide = draw(T=130, H=2, Hg=2, K=128, V=128, BT=64, dtype=torch.bfloat16, device="cuda")
    moved = wide.map(lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape))
    assert moved.k.data_ptr() % 16 != 0
    assert_bitwise(run(moved, "cuda"), run(wide, "cuda"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("K", [32, 128])
def test_inputs_on_a_device_that_is_not_the_current_one_are_right(cuda, K):
    call = draw(T=130, H=4, Hg=2, K=K, V=K, BT=64, dtype=torch.bfloat16, device="cuda:1")
    assert torch.cuda.current_device() == 0
    results = run(call, "cuda")
    assert torch.cuda.current_device() == 0
    assert_equal(results, reference(call), call)
    there = run(call.map(lambda x: x.cuda(0)), "cuda")
    assert_bitwise(results, {n: x.to("cuda:1") for n, x in there.items()})


def test_adapters_agree_with_fla_on_its_own_inputs(cuda):
    fla = pytest.importorskip("fla.ops.gated_delta_rule.wy_fast")
    from wyfast_lib.integrations import fla as ours

    call = draw(T=256, H=4, Hg=2, K=128, V=128, BT=64, dtype=torch.bfloat16, device="cuda")
    g2 = call.g / math.log(2)
    forward = (call.k, call.v, call.beta, call.A, g2)
    backward = (call.k, call.v, call.beta, call.A, call.dw, call.du, g2)
    pairs = [*zip(ours.recompute_w_u_fwd(*forward), fla.recompute_w_u_fwd(*forward), strict=True)]
    pairs += [*zip(ours.prepare_wy_repr_bwd(*backward), fla.prepare_wy_repr_bwd(*backward), strict=True)]
    for a, b in pairs:
        # Each is within its tolerance of the closed form, so they are within twice of each other.
        assert a.shape == b.shape and error_ratio(a, b) <= 2 * TOLERANCE[torch.bfloat16]
