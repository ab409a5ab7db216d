"""Faults that users of such operators really met, each test named after its kind."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from support import INPUTS, assert_bitwise, assert_equal, check, draw, reference, run
from torch.utils.checkpoint import checkpoint

from wyfast_lib import chunk_local_cumsum, prepare_chunks, wy_factor, wy_fast
from wyfast_lib.reference import wy_factor_reference, wy_fast_reference
from wyfast_lib.testing import TOLERANCE, error_ratio

HALF = (torch.bfloat16, torch.float16)


def test_01_bfloat16_on_the_cpu(backend, device):
    check(draw(1, 100, 4, 2, 64, 64, 64, dtype=torch.bfloat16, device=device), backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cu", [None, [0, 5, 40]])
def test_02_no_gate_is_a_gate_of_zeros_without_a_gradient(backend, device, cu, dtype):
    call = draw(1, 40, 4, 2, gated=False, cu=cu, dtype=dtype, device=device)
    without = check(call, backend)
    zeros = check(replace(call, g=torch.zeros_like(call.beta)), backend)
    assert "dg" not in without and zeros.pop("dg").isfinite().all()
    for name in without:
        assert error_ratio(without[name], zeros[name].cpu()) <= TOLERANCE[without[name].dtype], name


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("cu", [None, [0, 50, 200]])
def test_03_a_masked_exponent_that_would_overflow(backend, device, cu, dtype):
    """Decay up to 20 a step, |g| to 1280: above the diagonal exp(g[i] - g[j]) is infinite."""
    call = draw(1, 200, 4, 2, 16, 16, 64, cu=cu, dtype=dtype, device=device)  # packed: tails of 50 and 22
    step = -20 * torch.rand(1, 200, 4, device="cpu").to(device)
    g = chunk_local_cumsum(step, 64, call.chunks)
    assert g.min() < -500
    results = check(replace(call, g=g, A=wy_factor(call.k, call.beta, g, 64, call.chunks)), backend)
    assert all(x.isfinite().all() for x in results.values())


def test_03_a_gate_that_grows_is_not_clamped(backend, device):
    call = draw(1, 40, 4, 2, device=device)
    g = chunk_local_cumsum(2 * torch.rand(1, 40, 4, device="cpu").to(device), 16)
    check(replace(call, g=g, A=wy_factor(call.k, 0.1 * call.beta, g, 16), beta=0.1 * call.beta), backend)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("T", [1, 15, 16, 17, 63, 65, 127])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_04_a_padded_tail_against_a_large_gate(backend, device, T, dtype, packed):
    """The rows that fill a chunk up have no gate: from them to the last token exp(0 - -120) is infinite."""
    cu = [0, T // 2, T] if packed else None
    call = draw(1 if packed else 2, T, 2, 1, 16, 16, 64, cu=cu, dtype=dtype, device=device)
    g = call.g.clone()
    g[:, [T // 2 - 1, -1] if packed else -1] = -120
    call = replace(call, g=g, A=wy_factor(call.k, call.beta, g, 64, call.chunks))

    def inside_nan(x):
        wide = x.new_full((x.shape[0] + 2, T + 70, *x.shape[2:]), torch.nan)
        wide[1:-1, 3 : T + 3] = x
        return wide[1:-1, 3 : T + 3]

    results = run(call.map(inside_nan), backend)
    # A single token with exp(-120) has w = 1e-53: the right float32 number is zero.
    tiny = torch.finfo(torch.float32).tiny
    expected = {n: x.masked_fill(x.abs() < tiny, 0) for n, x in reference(call).items()}
    assert_equal(results, expected, call)
    assert all(x.isfinite().all() for x in results.values())


@pytest.mark.on_cpu  # to reserve memory without touching it; tests/gpu fills a card
@pytest.mark.parametrize("cu", [None, [0, 20, 40]])
def test_05_an_element_past_two_to_the_31(backend, cu):
    """Keys and values in a store of more than 2^31 elements, of which only the tokens' pages are touched."""
    call = draw(1, 40, 1, 1, 8, 8, cu=cu, dtype=torch.bfloat16)
    step = 2**31 // 38
    torch.use_deterministic_algorithms(False)  # filling 4 GiB with NaN would touch it all
    store = torch.empty(40 * step, dtype=torch.bfloat16)
    far = [store.as_strided((1, 40, 1, 8), (40 * step, step, 8, 1), n * 8) for n in range(2)]
    assert far[0][0, 39].data_ptr() - store.data_ptr() > 2 * 2**31
    far[0].copy_(call.k)
    far[1].copy_(call.v)
    assert_bitwise(run(replace(call, k=far[0], v=far[1]), backend), run(call, backend))


@pytest.mark.parametrize("BT", [16, 32, 64, 128])
@pytest.mark.parametrize("T", [100, 128])
def test_06_the_chunk_size_is_taken_from_the_factor(backend, device, BT, T):
    check(draw(2, T, 2, 1, 16, 16, BT, device=device), backend)


@pytest.mark.grid
@pytest.mark.parametrize("Hg, H", [(1, 1), (1, 8), (2, 4), (4, 12), (3, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_07_grouped_heads(backend, device, Hg, H, dtype):
    call = draw(2, 40, H, Hg, dtype=dtype, device=device)
    results = check(call, backend)
    assert results["w"].shape == (2, 40, H, 8) and results["dk"].shape == (2, 40, Hg, 8)
    spread = replace(call, k=call.k.repeat_interleave(H // Hg, dim=2))
    each = run(spread.map(torch.Tensor.float), backend)["dk"]
    summed = each.unflatten(2, (Hg, H // Hg)).sum(3)
    assert error_ratio(results["dk"], summed.cpu()) <= TOLERANCE[dtype]


@pytest.mark.parametrize("T", [65, 64])
@pytest.mark.parametrize("cu", [None, [0, 1, 1, 40]])
def test_08_unwritten_lanes(backend, device, T, cu):
    """Every torch.empty is full of NaN (conftest); the tail of a row must not touch the next row."""
    call = draw(1, 40, 2, 1, cu=cu, device=device) if cu else draw(2, T, 2, 1, 16, 16, 64, device=device)
    results = run(call, backend)
    assert not any(x.isnan().any() for x in results.values())
    if not cu:
        alone = run(call.rows(slice(1, 2)), backend)
        for name, x in results.items():
            assert error_ratio(x[1:], alone[name].cpu()) <= TOLERANCE[torch.float32], name


WIDTHS = (1, 8, 15, 16, 20, 36, 60, 96, 100, 128, 192, 256, 257)


@pytest.mark.grid
@pytest.mark.parametrize("K, V", list(zip(WIDTHS, WIDTHS[5:] + WIDTHS[:5], strict=True)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_09_odd_widths_with_nan_past_them(backend, device, K, V, dtype):
    call = draw(1, 35, 2, 1, K, V, dtype=dtype, device=device)

    def narrow(x):
        if x.dim() < 4:
            return x
        wide = x.new_full((*x.shape[:3], x.shape[3] + 13), torch.nan)
        wide[..., : x.shape[3]] = x
        return wide[..., : x.shape[3]]

    check(call, backend, call.map(narrow))


@pytest.mark.grid
@pytest.mark.parametrize("upstream", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", [torch.float32, None])
@pytest.mark.parametrize("A, k, v", [(a, k, v) for a in HALF for k in HALF for v in (torch.float32, *HALF)])
def test_10_mixed_dtypes(backend, device, A, k, v, gate, upstream):
    call = draw(1, 40, 4, 2, device=device)
    call = replace(
        call,
        k=call.k.to(k),
        v=call.v.to(v),
        A=call.A.to(A),
        beta=call.beta.to(gate or k),
        g=call.g.to(gate or k),
    )
    results = run(replace(call, dw=call.dw.to(upstream), du=call.du.to(upstream)), backend)
    # Autograd hands an upstream gradient over in the dtype of its output.
    rounded = replace(call, dw=call.dw.to(upstream).to(k), du=call.du.to(upstream).to(v))
    assert_equal(results, reference(rounded), call)


@pytest.mark.parametrize("wide", INPUTS[:5])
def test_10_one_float64_input_beside_float32(backend, device, wide):
    call = draw(1, 40, 4, 2, device=device)
    check(replace(call, **{wide: getattr(call, wide).double()}), backend)


def test_11_the_gate_is_in_natural_log(backend, device):
    call = draw(1, 40, 4, 2, dtype=torch.float64, device=device)
    if backend != "torch":
        call = call.map(torch.Tensor.float)
    results = run(call, backend)
    plain = replace(call, g=torch.zeros_like(call.g), A=wy_factor(call.k, call.beta, None, 16))
    assert error_ratio(results["w"], (call.g.exp()[..., None] * run(plain, backend)["w"]).cpu()) <= 1e-6
    inner = (call.dw * results["w"]).sum(-1)
    for s, e in ((0, 16), (16, 32), (32, 40)):
        dg, expected = results["dg"][:, s:e].double().cpu(), inner[:, s:e].double().sum(1).cpu()
        # dg cancels in its sum, so a float32 backend's rounding is measured by the terms, not by what is left
        # of them; a stray ln 2 would be off by 0.3 of the sum.
        terms = dg.abs().sum(1) if backend != "torch" else expected.abs()
        assert ((dg.sum(1) - expected).norm() / terms.norm()).item() <= 1e-6
        assert error_ratio(dg.sum(1), expected) <= 1e-4


@pytest.mark.parametrize("cu", [[0, 0, 5, 5, 130, 130], [0, 130]], ids=str)
def test_16_empty_segments_equal_each_sequence_alone(backend, device, cu):
    packed = draw(1, 130, 4, 2, 16, 16, 64, cu=cu, device=device)
    together = check(packed, backend)
    for s, e in zip(cu[:-1], cu[1:], strict=True):
        alone = run(packed.tokens(s, e), backend)
        for name, x in together.items():
            assert error_ratio(x[:, s:e], alone[name].cpu()) <= TOLERANCE[torch.float32], name


@pytest.mark.parametrize("cu", [None, [0, 0], [0, 0, 0]])
def test_16_no_tokens_at_all_launch_nothing(backend, device, cu, monkeypatch):
    from wyfast_lib.backends import pick

    module = pick(device, backend)
    monkeypatch.setattr(module, "forward", None)
    monkeypatch.setattr(module, "backward", None)
    results = run(draw(1, 0, 4, 2, cu=cu, device=device), backend)
    assert all(x.numel() == 0 for x in results.values()) and len(results) == 6


@pytest.mark.parametrize(
    "B, cu, kind",
    [
        (2, torch.tensor([0, 40]), ValueError),
        (1, torch.tensor([1, 40]), ValueError),
        (1, torch.tensor([0, 39]), ValueError),
        (1, torch.tensor([0, 30, 20, 40]), ValueError),
        (1, [0, 40], TypeError),
        (1, torch.tensor([0.0, 40.0]), TypeError),
    ],
)
def test_17_the_contract_of_packed_sequences(B, cu, kind):
    call = draw(B)
    with pytest.raises(kind, match="cu_seqlens"):
        wy_fast(call.k, call.v, call.beta, call.A, call.g, cu_seqlens=cu)


def test_18_seventy_thousand_heads_and_rows(backend, device):
    """B * H = 70,000: more than a launch grid's second dimension holds."""
    check(draw(17500, 1, 4, 4, 1, 1, device=device), backend)


def test_18_seventy_thousand_chunks(backend, device):
    call = draw(1, 70_000, 1, 1, 2, 2, cu=list(range(70_001)), device=device)
    assert call.chunks.num_chunks == 70_000
    read, write = (call.beta * call.g.exp())[..., None], call.beta[..., None]
    along = (call.dw * call.k).sum(-1) * call.g.exp()
    expected = {  # one token a sequence: A = 1
        "w": read * call.k, "u": write * call.v, "dk": read * call.dw, "dv": write * call.du,
        "dbeta": along + (call.du * call.v).sum(-1), "dg": call.beta * along,
    }  # fmt: skip
    assert_equal(run(call, backend), {n: x.cpu() for n, x in expected.items()}, call)


@pytest.fixture
def two_threads():
    """A sum whose split depends on the threads would differ from run to run."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("cu", [None, [0, 5, 40, 100]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_20_twenty_repeats_are_bitwise_equal(backend, device, cu, dtype):
    call = draw(1 if cu else 2, 100, 4, 2, 32, 32, 32, cu=cu, dtype=dtype, device=device)
    first = run(call, backend)
    for _ in range(19):
        assert_bitwise(run(call, backend), first)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("T", [64, 100, 5])
def test_20_a_row_alone_is_bitwise_the_row_inside_a_batch(backend, device, T):
    call = draw(8, T, 2, 1, 32, 32, 32, device=device)
    batch, alone = run(call, backend), run(call.rows(slice(5, 6)), backend)
    assert_bitwise({n: x[5:6] for n, x in batch.items()}, alone)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("cu", [None, [0, 5, 40]])
def test_22_activation_checkpointing(backend, device, reentrant, cu):
    call = draw(cu=cu, device=device)
    expected = run(call, backend)
    leaves = [x.detach().requires_grad_() for x in (call.k, call.v, call.beta, call.g)]

    def layer(k, v, beta, g):
        return wy_fast(k, v, beta, call.A, g, cu_seqlens=call.chunks, backend=backend)

    outputs = checkpoint(layer, *leaves, use_reentrant=reentrant)
    torch.autograd.backward(outputs, (call.dw, call.du))
    for name, x in zip(("dk", "dv", "dbeta", "dg"), leaves, strict=True):
        assert torch.equal(x.grad, expected[name]), name


def test_22_a_retained_graph_gives_the_same_gradients_twice(backend, device):
    call = draw(device=device)
    leaves = [x.detach().requires_grad_() for x in (call.k, call.v, call.beta, call.g)]
    k, v, beta, g = leaves
    outputs = wy_fast(k, v, beta, call.A, g, backend=backend)
    upstream = (call.dw, call.du)
    first = torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)
    second = torch.autograd.grad(outputs, leaves, upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(outputs, leaves, upstream)


@pytest.mark.parametrize("loss", ["square", "sum"])
@pytest.mark.parametrize("name", ["k", "v", "beta", "g"])
def test_23_double_backward_raises(backend, device, loss, name):
    """Also after a plain sum, whose upstream gradient has no graph: a gradient penalty must not vanish."""
    call = draw(device=device)
    x = getattr(call, name).requires_grad_()
    w, u = wy_fast(call.k, call.v, call.beta, call.A, call.g, backend=backend)
    total = sum(y.square().sum() if loss == "square" else y.sum() for y in (w, u))
    (gradient,) = torch.autograd.grad(total, x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        (gradient.square().sum() + x.square().sum()).backward()


def test_23_create_graph_alone_changes_nothing(backend, device):
    call = draw(device=device)
    x = call.k.requires_grad_()
    w, _ = wy_fast(x, call.v, call.beta, call.A, call.g, backend=backend)
    (plain,) = torch.autograd.grad(w.sum(), x, retain_graph=True)
    (graph,) = torch.autograd.grad(w.sum(), x, create_graph=True)
    assert torch.equal(plain, graph) and graph.requires_grad and not plain.requires_grad


WITHOUT_TRITON = """
import sys
for name in ("triton", "matplotlib", "numpy", "torch_npu"):
    sys.modules[name] = None  # importing it raises ImportError
import torch, wyfast_lib
from wyfast_lib.inputs import make_inputs
i = make_inputs("tiny").requires_grad_()
w, u = wyfast_lib.wy_fast(*i.call)
(w.sum() + u.sum()).backward()
assert i.k.grad.isfinite().all() and not torch.cuda.is_available()
print("works")
"""


def test_25_import_and_run_without_accelerator_and_triton():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "works"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_26_autocast_does_not_reach_inside(backend, device, dtype):
    call = draw(1, 40, 4, 2, dtype=dtype, device=device)
    expected = run(call, backend)
    with torch.autocast(device, torch.bfloat16):
        assert_bitwise(run(call, backend), expected)  # forward and backward
        assert torch.equal(wy_factor(call.k, call.beta, call.g, 16), call.A)
        step = -torch.rand(1, 40, 4).to(device, dtype)
        inside = chunk_local_cumsum(step, 16)
    assert torch.equal(inside, chunk_local_cumsum(step, 16))


def test_26_autocast_around_the_backward_alone_does_not_reach_inside(backend, device):
    call = draw(device=device)
    expected = run(call, backend)
    k = call.k.detach().requires_grad_()
    outputs = wy_fast(k, call.v, call.beta, call.A, call.g, backend=backend)
    with torch.autocast(device, torch.bfloat16):
        (dk,) = torch.autograd.grad(outputs, k, (call.dw, call.du))
    assert torch.equal(dk, expected["dk"])


@pytest.mark.parametrize("cu", [None, [0, 40, 100]])
def test_29_saved_tensors_are_inputs_only(backend, device, cu):
    call = draw(1, 100, 4, 2, 32, 32, 32, cu=cu, device=device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        w, u = wy_fast(
            call.k.requires_grad_(),
            call.v,
            call.beta,
            call.A,
            call.g,
            cu_seqlens=call.chunks,
            backend=backend,
        )
    inputs = [call.k, call.v, call.beta, call.A, call.g]
    inputs += [] if cu is None else [call.chunks.cu_seqlens, call.chunks.indices]
    own = {x.data_ptr() for x in inputs}
    small = call.beta.numel() * 4  # the contract allows [B, H, T] copies of beta and g in their place
    assert saved and all(x.data_ptr() in own or x.nbytes <= small for x in saved)
    assert sum(x.nbytes for x in saved) <= sum(x.nbytes for x in inputs)


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory is read from /proc")
@pytest.mark.parametrize("cu", [None, [0, 100, 512]])
def test_29_memory_is_flat_over_two_hundred_steps(backend, device, cu):
    """A leak of any tensor of [B, T, H, K], 128 KiB here, would add 25 MiB."""
    call = draw(1, 512, 2, 1, 32, 32, 32, cu=cu, device=device)
    sample = resident_bytes if device == "cpu" else torch.cuda.memory_allocated
    for _ in range(20):
        run(call, backend)
    before = sample()
    for _ in range(200):
        run(call, backend)
    assert sample() - before < 8 * 2**20


@pytest.mark.parametrize("K", [64, 128])
def test_30_float32_is_not_tensorfloat(backend, device, K):
    check(draw(2, 130, 4, 2, K, K, 64, device=device), backend)


def test_30_tensorfloat_rounding_would_be_noticed():
    """Ten bits of mantissa on one operand of one product are over the limit more than fifty times."""
    call = draw(2, 130, 4, 2, 64, 64, 64)
    rounded = ((call.k.view(torch.int32) + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)
    w, _ = wy_fast(rounded, call.v, call.beta, call.A, call.g)
    exact, _ = wy_fast_reference(call.k, call.v, call.beta, call.A, call.g)
    assert error_ratio(w, exact) > 50 * TOLERANCE[torch.float32]


def unnormalised(device):
    call = draw(1, 256, 2, 2, 64, 64, 64, gated=False, device=device)
    k = torch.randn(call.k.shape, device="cpu").to(device)
    return replace(call, k=k, A=wy_factor(k, call.beta, None, 64))


def test_33_unnormalised_keys_in_float32_equal_relative_to_the_factor(backend, device):
    call = unnormalised(device)
    assert call.A.abs().max() > 1e10
    exact = wy_factor_reference(call.k.cpu(), call.beta.cpu(), None, 64)
    assert (call.A.cpu() - exact).abs().max() <= 1e-3 * exact.abs().max()
    w, u = wy_fast(call.k, call.v, call.beta, call.A, backend=backend)
    w_ref, u_ref = wy_fast_reference(*(x.cpu() for x in (call.k, call.v, call.beta, call.A)))
    assert error_ratio(w, w_ref) <= TOLERANCE[torch.float32]
    assert error_ratio(u, u_ref) <= TOLERANCE[torch.float32]


def test_33_unnormalised_keys_in_float16_show_infinities(backend, device):
    call = unnormalised(device).map(torch.Tensor.half)
    assert wy_factor(call.k, call.beta, None, 64).isinf().any()
    w, _ = wy_fast(call.k, call.v, call.beta, call.A, backend=backend)
    assert not w.isfinite().all()


def test_33_the_docstrings_tell_to_normalise_keys():
    assert "ormalise" in wy_factor.__doc__ and "ormalise" in wy_fast.__doc__


def test_17_a_table_in_place_of_offsets_is_checked_too():
    call = draw(B=2)
    with pytest.raises(ValueError, match="B must be 1"):
        wy_fast(
            call.k, call.v, call.beta, call.A, call.g, cu_seqlens=prepare_chunks(torch.tensor([0, 40]), 16)
        )
