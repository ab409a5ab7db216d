"""The Ascend kernels as the NPU would get them, run natively: the faults of such operators, one test each."""

from dataclasses import replace

import pytest
import torch
from support import assert_bitwise, assert_equal, check, draw, only, reference, run

from wyfast_lib import wy_fast
from wyfast_lib.backends import ascend_plan as plan
from wyfast_lib.backends import lowered

B = "lowered"


@pytest.fixture(autouse=True)
def no_other_backend_runs(request):
    if request.node.originalname == "test_the_toolchain_is_installed":
        yield
        return
    with only(B):
        yield


def test_the_toolchain_is_installed():
    ok, reason = lowered.available()
    assert ok, reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype_is_right_with_grouped_heads_and_a_tail(dtype):
    check(draw(2, 100, 4, 2, 64, 32, 64, dtype=dtype), B)


def test_packed_sequences_with_empty_ones_equal_each_sequence_alone():
    cu = [0, 0, 5, 5, 70, 70]
    results = check(draw(1, 70, 2, 1, cu=cu), B)
    assert results["dk"].shape == (1, 70, 1, 8)


@pytest.mark.parametrize(
    "dtype, sizes",
    [
        (torch.bfloat16, (1, 70, 4, 2, 64, 32, 64)),
        (torch.float32, (1, 40, 2, 1, 160, 200, 32)),  # two tiles a row
        (torch.bfloat16, (1, 40, 2, 1, 20, 36, 16)),  # the compiler takes such chunks in float32 only
    ],
)
def test_the_plan_for_the_ascend_950_is_right_too(dtype, sizes, monkeypatch):
    monkeypatch.setenv("WYFAST_LOWERED_TARGET", "Ascend950PR_9589")
    check(draw(*sizes, dtype=dtype), B)


def test_float16_on_the_ascend_950_runs_forward_and_is_refused_before_a_backward(monkeypatch):
    monkeypatch.setenv("WYFAST_LOWERED_TARGET", "Ascend950PR_9589")
    call = draw(1, 40, 2, 1, dtype=torch.float16)
    arguments = (call.k, call.v, call.beta, call.A, call.g)
    w, u = wy_fast(*arguments, backend=B)
    expected = reference(call)
    assert_equal({"w": w, "u": u}, {"w": expected["w"], "u": expected["u"]}, call)
    with pytest.raises(NotImplementedError, match="bfloat16"):
        wy_fast(call.k.clone().requires_grad_(), *arguments[1:], backend=B)


@pytest.mark.parametrize("K, V", [(1, 36), (20, 257)])
def test_odd_widths_are_right_or_refused(K, V):
    check(draw(1, 20, 2, 2, K, V), B)


def test_without_a_gate_the_results_are_those_of_a_zero_gate():
    call = draw(1, 40, 2, 1, gated=False)
    plain = check(call, B)
    zero = run(replace(call, g=torch.zeros_like(call.beta)), B)
    del zero["dg"]
    assert_equal(zero, {n: x.double() for n, x in plain.items()}, call)


def test_large_decays_and_a_padded_tail_stay_finite_and_right():
    call = draw(1, 40, 2, 1)
    decay = 20 * torch.rand(1, 40, 2)
    g = -torch.cat([x.cumsum(1) for x in decay.split(16, 1)], 1)
    g[:, -1] = -120
    check(replace(call, g=g), B)


@pytest.mark.parametrize("v", [torch.bfloat16, torch.float32])
def test_float32_gates_and_factor_beside_bfloat16_keys(v):
    call = draw(1, 40, 2, 1, dtype=torch.bfloat16, gate_dtype=torch.float32)
    call = replace(call, A=call.A.float(), v=call.v.to(v), du=call.du.to(v))
    check(call, B)


def test_upstream_gradients_of_another_dtype_are_taken():
    call = draw(1, 40, 2, 1)
    w, u = lowered.forward(call.k, call.v, call.beta, call.A, call.g, None, None)
    assert w.dtype == u.dtype == torch.float32
    dw, du = call.dw.bfloat16(), call.du.bfloat16()
    grads = lowered.backward(call.k, call.v, call.beta, call.A, call.g, dw, du, None)
    expected = reference(replace(call, dw=dw, du=du))
    results = {"w": w, "u": u, **dict(zip(("dk", "dv", "dbeta", "dg"), grads, strict=True))}
    assert_equal(results, expected, call)


def test_a_channel_gate_scales_the_keys():
    call = draw(1, 40, 2, 1, dtype=torch.bfloat16)
    check(replace(call, gk=-torch.rand(call.k.shape).bfloat16()), B)


def test_strided_gates_give_the_same_bits():
    call = draw(1, 40, 2, 1)
    arguments = (call.k, call.v, call.beta, call.A, call.g, call.dw, call.du, None, lowered.device())
    results = []
    for layout in (plan.Layout(), plan.Layout(False, False, False, False)):
        launch, *grads = plan.plan_backward(*arguments, layout)
        lowered.execute(launch)
        results.append(dict(zip(("dk", "dv", "dbeta", "dg"), plan.gradients(*grads, layout), strict=True)))
    assert_bitwise(*results)


@pytest.mark.parametrize("cores", [4, 5, 6, 7, 13])
def test_no_task_is_lost_whatever_the_number_of_cores(cores, monkeypatch):
    call = draw(1, 40, 2, 2)  # 3 chunks x 2 key heads = 6 tasks
    monkeypatch.setattr(lowered, "device", lambda: plan.Device(lowered.target(), cores))
    check(call, B)


def test_repeated_runs_are_bitwise_equal():
    call = draw(1, 40, 4, 2, dtype=torch.bfloat16)
    first = run(call, B)
    for _ in range(20):
        assert_bitwise(run(call, B), first)


def test_nan_stays_inside_its_chunk_and_head():
    call = draw(1, 40, 2, 2)
    clean, bad = run(call, B), call.map(torch.clone)
    bad.v[0, 20, 1] = torch.nan
    dirty = run(bad, B)
    for name, x in dirty.items():
        elsewhere = torch.ones(x.shape[:3], dtype=torch.bool)
        elsewhere[:, 16:32, 1] = False
        assert torch.equal(x[elsewhere], clean[name][elsewhere]), name
    assert dirty["u"][0, 20, 1].isnan().all()


def test_seventy_thousand_chunks_run():
    T = 70_000 * 16
    k = torch.nn.functional.normalize(torch.randn(1, T, 1, 8), dim=-1)
    A = torch.eye(16).repeat(70_000, 1).view(1, T, 1, 16)
    w, u = wy_fast(k, k, torch.ones(1, T, 1), A, backend=B)
    assert torch.allclose(w, k) and torch.allclose(u, k)


def test_a_tensor_elsewhere_is_refused_before_anything_runs():
    call = draw().map(lambda x: x.to("meta"))
    with pytest.raises(ValueError, match="'lowered' takes tensors on 'cpu'"):
        lowered.check_call(call.k, call.v, call.beta, call.A, call.g, None, None, False)
