"""wy_fast against the float64 closed form: outputs, gradients, layouts, isolation of faults."""

from dataclasses import replace

import pytest
import torch
from support import GRADIENTS, INPUTS, assert_bitwise, assert_equal, check, draw, reference, run

from wyfast_lib import WyFastFunction, backends, wy_fast
from wyfast_lib.backends import torch as torch_backend
from wyfast_lib.testing import TOLERANCE, error_ratio, tolerance

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("BT", [16, 32, 64, 128])
def test_every_dtype_and_chunk_size_equals_the_closed_form(backend, device, dtype, BT):
    check(draw(2, 2 * BT + 5, 4, 2, 64, 64, BT, dtype=dtype, device=device), backend)


def test_a_wrong_result_is_over_the_tolerance():
    call = draw()
    wrong = run(call, "torch")
    wrong["dg"] = wrong["dg"] * (1 + 1e-5)
    with pytest.raises(AssertionError, match="dg"):
        assert_equal(wrong, reference(call), call)


def test_a_single_nan_is_an_infinite_error():
    x = torch.ones(1000)
    x[7] = torch.nan
    assert error_ratio(x, torch.ones(1000)) == float("inf")


def test_the_tolerance_is_the_looser_of_result_and_operands():
    half, single = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
    assert tolerance("dbeta", single, half, single) == TOLERANCE[torch.bfloat16]
    assert tolerance("dbeta", half, single, single) == TOLERANCE[torch.bfloat16]
    assert tolerance("u", single, half, single) == TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_channel_gate_equals_the_closed_form(backend, device, dtype):
    call = draw(2, 40, 4, 2, dtype=dtype, device=device)
    gk = -torch.rand(call.k.shape, device=device).to(dtype)
    check(replace(call, gk=gk), backend)


def strided_views(call):
    """Every tensor as an inner view of a larger one full of NaN, heads outermost, no stride of one."""

    def view(x):
        B, T, H, *width = x.shape
        wide = x.new_full((H, B, T + 3, *(2 * n + 1 for n in width)), torch.nan)
        inner = wide.permute(1, 2, 0, *range(3, x.dim()))[:, 1 : T + 1]
        if x.dim() == 4:
            inner = inner[..., 1::2]
        assert not inner.is_contiguous()
        return inner.copy_(x)

    return call.map(view)


@pytest.mark.parametrize("cu", [None, [0, 5, 40]])
def test_any_strides_give_the_same_results_and_contiguous_outputs(backend, device, cu):
    call = draw(1 if cu else 2, 40, 4, 2, cu=cu, device=device)
    results = run(strided_views(call), backend)
    assert_equal(results, reference(call), call)
    assert all(x.is_contiguous() for x in results.values())


@pytest.mark.parametrize("cu", [None, [0, 5, 40]])
def test_expanded_inputs_and_upstream_gradients_of_stride_zero_work(backend, device, cu):
    call = draw(1 if cu else 2, 40, 4, 2, cu=cu, device=device)
    one = torch.ones((), device=device)
    call = replace(
        call, beta=(0.5 * one).expand_as(call.beta), v=call.v[:, :, :1, :1].expand_as(call.v),
        dw=one.expand_as(call.dw), du=call.du[:, :1].expand_as(call.du),
    )  # fmt: skip
    check(call, backend)


def test_heads_first_and_transposed_storage_work(backend, device):
    call = draw(2, 40, 4, 2, device=device)
    mirrored = call.map(lambda x: x.transpose(1, -1).contiguous().transpose(1, -1))
    assert_equal(run(mirrored, backend), reference(call), call)


def test_no_input_and_no_upstream_gradient_is_modified(backend, device):
    for cu in (None, [0, 5, 40]):
        call = draw(1, 40, 2, 1, cu=cu, device=device)
        before = call.map(torch.clone)
        run(call, backend)
        for name in (*INPUTS, "dw", "du"):
            if getattr(call, name) is not None:
                assert torch.equal(getattr(call, name), getattr(before, name)), name


@pytest.mark.parametrize("wanted", ["k", "v", "beta", "g", "kv", "beta g"])
def test_a_gradient_is_the_same_whichever_others_are_asked_for(backend, device, wanted):
    call = draw(device=device)
    wanted = wanted.split() if " " in wanted else list(wanted) if wanted == "kv" else [wanted]
    everything = run(call, backend)
    tensors = {n: getattr(call, n).detach() for n in ("k", "v", "beta", "A", "g")}
    for n in wanted:
        tensors[n].requires_grad_()
    w, u = wy_fast(**tensors, backend=backend)
    torch.autograd.backward((w, u), (call.dw, call.du))
    for d, n in GRADIENTS.items():
        if n in wanted:
            assert torch.equal(tensors[n].grad, everything[d]), d
        else:
            assert tensors[n].grad is None


@pytest.mark.parametrize("used", ["w", "u"])
def test_one_output_alone_can_be_differentiated(backend, device, used):
    call = draw(device=device)
    silent = {"w": "du", "u": "dw"}[used]
    expected = reference(replace(call, **{silent: torch.zeros_like(getattr(call, silent))}))
    leaves = [x.detach().requires_grad_() for x in (call.k, call.v, call.beta, call.g)]
    k, v, beta, g = leaves
    outputs = dict(zip("wu", wy_fast(k, v, beta, call.A, g, backend=backend), strict=True))
    gradients = torch.autograd.grad(outputs[used], leaves, getattr(call, "d" + used))
    for name, x in zip(GRADIENTS, gradients, strict=True):
        assert error_ratio(x, expected[name]) <= TOLERANCE[torch.float32], name


def test_the_factor_and_the_channel_gate_get_no_gradient(backend, device):
    call = draw(device=device)
    A = call.A.requires_grad_()
    k = call.k.requires_grad_()
    w, u = wy_fast(k, call.v, call.beta, A, call.g, backend=backend)
    (w.sum() + u.sum()).backward()
    assert A.grad is None and k.grad is not None


def test_without_a_request_for_gradients_no_graph_is_kept(backend, device):
    call = draw(device=device)
    w, u = wy_fast(call.k, call.v, call.beta, call.A, call.g, backend=backend)
    assert w.grad_fn is None and u.grad_fn is None


def test_backward_with_a_channel_gate_raises_instead_of_being_wrong(backend, device):
    call = draw(device=device)
    gk = torch.zeros_like(call.k)
    w, _ = wy_fast(call.k.requires_grad_(), call.v, call.beta, call.A, call.g, gk, backend=backend)
    with pytest.raises(NotImplementedError, match="gk"):
        w.sum().backward()


def test_changing_a_saved_input_in_place_is_noticed(backend, device):
    call = draw(device=device)
    w, _ = wy_fast(call.k.requires_grad_(), call.v, call.beta, call.A, call.g, backend=backend)
    call.v.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        w.sum().backward()


NAN_CASES = [
    (name, cu) for name in ("k", "v", "beta", "A", "g", "dw", "du") for cu in (None, [0, 20, 20, 40, 60])
]


@pytest.mark.parametrize("name, cu", NAN_CASES)
def test_nan_stays_inside_its_row_chunk_and_head(backend, device, name, cu):
    """One NaN at token 25: the dense chunk [16, 32) of row 1, or the packed chunk [20, 36)."""
    B = 1 if cu else 3
    call = draw(B, 60, 4, 2, cu=cu, device=device)
    row, head = (0 if cu else 1), (1 if name == "k" else 2)
    clean, bad = run(call, backend), call.map(torch.clone)
    getattr(bad, name)[row, 25, head] = torch.nan
    first, last = (20, 36) if cu else (16, 32)
    dirty = run(bad, backend)
    for result, x in dirty.items():
        reached = torch.zeros(x.shape[:3], dtype=torch.bool)
        if result == "dk":  # key head 1 collects from heads 2 and 3
            reached[row, first:last, 1] = True
        else:
            reached[row, first:last, (slice(2, 4) if name == "k" else 2)] = True
        same = (x == clean[result]).cpu()
        same = same.all(-1) if same.dim() == 4 else same
        assert same[~reached].all(), f"NaN in {name} changed {result} elsewhere"
    assert any(x.isnan().any() for x in dirty.values())


@pytest.mark.parametrize("cu", [None, [0, 20, 20, 40, 60]])
def test_what_stands_past_the_tail_of_the_factor_is_never_read(backend, device, cu):
    call = draw(1, 60, 2, 1, cu=cu, device=device)
    filled = call.A.clone()
    for s, e in [(48, 60)] if cu is None else [(16, 20), (36, 40), (56, 60)]:
        filled[:, s:e, :, e - s :] = torch.nan
    assert_bitwise(run(replace(call, A=filled), backend), run(call, backend))


def test_inference_mode_gives_the_same_outputs(backend, device):
    call = draw(device=device)
    plain = wy_fast(call.k, call.v, call.beta, call.A, call.g, backend=backend)
    with torch.inference_mode():
        inside = wy_fast(call.k, call.v, call.beta, call.A, call.g, backend=backend)
    assert torch.equal(plain[0], inside[0]) and torch.equal(plain[1], inside[1])


@pytest.mark.parametrize("B, T", [(0, 40), (2, 0), (0, 0)])
def test_no_rows_or_no_tokens_give_empty_results(backend, device, B, T):
    results = run(draw(B, T, 4, 2, device=device), backend)
    assert results["w"].shape == (B, T, 4, 8) and results["u"].shape == (B, T, 4, 12)
    assert results["dk"].shape == (B, T, 2, 8) and results["dg"].shape == (B, T, 4)


def test_default_dtype_and_default_device_do_not_reach_inside():
    for cu in (None, [0, 5, 40]):
        call = draw(1, cu=cu)
        expected = run(call, "torch")
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        try:
            assert_bitwise(run(call, "torch"), expected)
            again = draw(1, cu=cu)
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)
        for n in ("k", "v", "beta", "A", "g"):
            assert torch.equal(getattr(again, n), getattr(call, n)), n


def test_meta_tensors_get_shapes_forward_and_backward():
    call = draw(2, 40, 4, 2).map(lambda x: x.to("meta"))
    results = run(call, "torch")
    assert {n: tuple(x.shape) for n, x in results.items()} == {
        "w": (2, 40, 4, 8), "u": (2, 40, 4, 12), "dk": (2, 40, 2, 8), "dv": (2, 40, 4, 12),
        "dbeta": (2, 40, 4), "dg": (2, 40, 4),
    }  # fmt: skip
    assert all(x.is_meta for x in results.values())


def test_the_environment_variable_forces_a_backend(monkeypatch):
    call = draw()
    monkeypatch.setenv("WYFAST_BACKEND", "nonsense")
    with pytest.raises(ValueError, match="nonsense"):
        wy_fast(call.k, call.v, call.beta, call.A, call.g)
    wy_fast(call.k, call.v, call.beta, call.A, call.g, backend="torch")  # the argument wins


def test_a_backend_that_cannot_run_says_so_and_nothing_replaces_it(monkeypatch):
    from wyfast_lib.backends import torch as module

    monkeypatch.setattr(backends, "_ready", {})
    monkeypatch.setattr(module, "available", lambda: (False, "switched off"))
    call = draw()
    with pytest.raises(backends.BackendUnavailable, match="switched off"):
        wy_fast(call.k, call.v, call.beta, call.A, call.g)


def test_the_autograd_function_is_public():
    assert issubclass(WyFastFunction, torch.autograd.Function)


@pytest.mark.parametrize("name, cu", NAN_CASES)
def test_nan_does_not_wait_in_a_buffer_for_the_next_chunk(monkeypatch, name, cu):
    """The torch backend reuses its buffers from block to block; here every chunk is a block."""
    monkeypatch.setattr(torch_backend, "CPU_BLOCK", 1)
    test_nan_stays_inside_its_row_chunk_and_head("torch", "cpu", name, cu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cu", [None, [0, 70, 70, 300]])
def test_many_blocks_equal_one(monkeypatch, cu, dtype):
    call = draw(1 if cu else 2, 300, 4, 2, 64, 32, 64, cu=cu, dtype=dtype)
    one = check(call, "torch")
    monkeypatch.setattr(torch_backend, "CPU_BLOCK", 1)
    many = check(call, "torch")
    for n, x in one.items():
        assert error_ratio(many[n], x) <= tolerance(n, x, call.k, call.v)


@pytest.mark.parametrize("cu", [None, [0, 5, 40]])
def test_outputs_may_be_changed_in_place_and_own_their_memory(backend, device, cu):
    call = draw(cu=cu, device=device)
    expected = run(call, backend)
    k = call.k.requires_grad_()
    w, u = wy_fast(k, call.v, call.beta, call.A, call.g, cu_seqlens=call.chunks, backend=backend)
    w.mul_(2)
    u.zero_()
    (dk,) = torch.autograd.grad(w, k, call.dw)
    doubled = reference(replace(call, dw=2 * call.dw, du=torch.zeros_like(call.du)))["dk"]
    assert torch.equal(w, 2 * expected["w"]) and error_ratio(dk, doubled) <= TOLERANCE[torch.float32]
    for x in (w, u, dk):
        assert x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
