"""run: what the Ascend front end made of a kernel gives the right numbers on this CPU, and nothing else."""

import os
import time
from pathlib import Path

import pytest
import torch

from wyfast_lib.ascend import CompileError, WorkerCrashed, compile_kernel, run, worker
from wyfast_lib.ascend.run import _key
from wyfast_lib.kernels import teaching

POINTER = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}


def nans(*shape, dtype=torch.float32):
    return torch.full(shape, float("nan"), dtype=dtype)


def error_ratio(x, reference):
    return ((x.double() - reference).square().mean().sqrt() / reference.square().mean().sqrt()).item()


def copy_for(dtype, BT=64):
    pointer = POINTER[dtype]
    return compile_kernel(teaching.copy_kernel, {"x": pointer, "y": pointer, "T": "i32"}, {"BT": BT})


# ---- right results ----


@pytest.mark.parametrize("dtype", POINTER)
@pytest.mark.parametrize("T", [1, 63, 64, 65, 160])
def test_a_masked_tail_copies_every_element_and_writes_none_behind_it(dtype, T):
    x, y = torch.randn(T).to(dtype), nans(T + 64, dtype=dtype)
    run(copy_for(dtype), {"x": x, "y": y, "T": T}, (-(-T // 64),))
    assert torch.equal(y[:T], x) and y[T:].isnan().all()


@pytest.mark.parametrize("dtype", POINTER)
@pytest.mark.parametrize("contiguous", [False, True])
def test_both_gate_layouts_give_the_same_gates(dtype, contiguous):
    T, HV = 100, 8
    g, y = torch.randn(T, HV).to(dtype), nans(HV, T)
    constexprs = {"HV": HV, "BT": 64, "G_T_CONTIG": contiguous}
    signature = {"g": POINTER[dtype], "y": "*fp32", "T": "i32"}
    compiled = compile_kernel(teaching.gate_load_kernel, signature, constexprs)
    run(compiled, {"g": g.t().contiguous() if contiguous else g, "y": y, "T": T}, (2, HV))
    assert error_ratio(y, g.double().exp().t()) < 2e-6


@pytest.mark.parametrize("stride", [1, 3, 32])
def test_a_stride_known_only_at_run_time_is_followed(stride):
    g, y = torch.randn(64 * stride), nans(64)
    signature = {"g": "*fp32", "y": "*fp32", "T": "i32", "stride": "i32"}
    compiled = compile_kernel(teaching.gate_load_runtime_stride_kernel, signature, {"BT": 64})
    run(compiled, (g, y, 64, stride), (1,))
    assert error_ratio(y, g[::stride].double().exp()) < 2e-6


def test_a_strided_store_writes_its_column_only():
    g, y = torch.randn(64), nans(64, 8)
    constexprs = {"HV": 8, "BT": 64, "G_T_CONTIG": False}
    compiled = compile_kernel(
        teaching.gate_store_kernel, {"g": "*fp32", "y": "*fp32", "T": "i32"}, constexprs
    )
    run(compiled, (g, y[:, 3], 50), (1,))
    assert error_ratio(y[:50, 3], g[:50].double().exp()) < 2e-6
    assert y[50:].isnan().all() and y[:, :3].isnan().all() and y[:, 4:].isnan().all()


@pytest.mark.parametrize("dtype", POINTER)
@pytest.mark.parametrize("load_transposed", [False, True])
def test_a_dot_with_a_transposed_operand_is_right_both_ways(dtype, load_transposed):
    a, b, y = torch.randn(64, 64).to(dtype), torch.randn(64, 32).to(dtype), nans(64, 32)
    constexprs = {"BT": 64, "K": 32, "LOAD_TRANSPOSED": load_transposed}
    signature = {"a": POINTER[dtype], "b": POINTER[dtype], "y": "*fp32"}
    run(compile_kernel(teaching.transposed_dot_kernel, signature, constexprs), (a, b, y), (1,))
    assert error_ratio(y, a.double().t() @ b.double()) < 2e-6


@pytest.mark.parametrize("dtype", POINTER)
def test_a_dot_sums_in_order_in_float32_and_is_the_same_to_the_last_bit_everywhere(dtype):
    a, b, y = torch.randn(64, 64).to(dtype), torch.randn(64, 32).to(dtype), nans(64, 32)
    constexprs = {"BT": 64, "K": 32, "LOAD_TRANSPOSED": False}
    signature = {"a": POINTER[dtype], "b": POINTER[dtype], "y": "*fp32"}
    run(compile_kernel(teaching.transposed_dot_kernel, signature, constexprs), (a, b, y), (1,))
    total = torch.zeros(64, 32)
    for left, right in zip(a.float(), b.float(), strict=True):
        total += left[:, None] * right[None, :]
    assert torch.equal(y, total)


def test_a_tile_carried_through_a_loop_is_right_and_its_buffers_are_freed():
    T, K = 160, 32
    x, y = torch.randn(T, K).bfloat16(), nans(3, K, K)
    signature = {"x": "*bf16", "y": "*fp32", "T": "i32"}
    compiled = compile_kernel(teaching.running_product_kernel, signature, {"BT": 64, "K": K})
    run(compiled, (x, y, T), (1,))
    reference = torch.stack([x[:n].double().t() @ x[:n].double() for n in (64, 128, 160)])
    assert error_ratio(y, reference) < 2e-6
    key = _key(compiled)
    x_bytes, y_bytes = x.numel() * 2, y.numel() * 4
    arguments = [("ptr", 256, x.numel()), ("ptr", 256 + x_bytes + 256, y.numel()), ("i", T, 1)]
    size = worker.current().shared_view.size
    assert size > x_bytes + y_bytes + 1024
    reply = worker.call("run", key=key, size=size, used=size, grid=(1, 1, 1), arguments=arguments)
    worker.current().shared_view.poison(0, size)  # as `run` leaves it
    assert reply == {"kept": 0}


def test_bfloat16_arithmetic_rounds_to_nearest_even_and_keeps_nan_and_infinity():
    special = [float("nan"), float("inf"), -float("inf"), 3.0e38, -3.0e38, 0.0, -0.0, 1e-40]
    x = torch.cat([torch.tensor(special), torch.randn(56)]).bfloat16()
    y = nans(64, dtype=torch.bfloat16)
    run(compile_kernel(teaching.half_sum_kernel, {"x": "*bf16", "y": "*bf16"}, {"BT": 64}), (x, y), (1,))
    assert torch.equal(y.view(torch.int16)[1:], (x + x).view(torch.int16)[1:]) and y[0].isnan()


def test_views_of_one_tensor_stay_views_of_one_tensor():
    whole = torch.arange(256.0)
    run(copy_for(torch.float32), {"x": whole[:64], "y": whole[128:192], "T": 64}, (1,))
    assert torch.equal(whole[128:192], whole[:64])
    assert torch.equal(whole[64:128], torch.arange(64.0, 128.0))
    assert torch.equal(whole[192:], torch.arange(192.0, 256.0))


def test_a_grid_has_up_to_three_axes_and_may_be_empty():
    y = nans(8, 128)
    g = torch.randn(128, 8)
    constexprs = {"HV": 8, "BT": 64, "G_T_CONTIG": False}
    compiled = compile_kernel(teaching.gate_load_kernel, {"g": "*fp32", "y": "*fp32", "T": "i32"}, constexprs)
    run(compiled, (g, y, 128), (0,))
    assert y.isnan().all()
    run(compiled, (g, y, 128), (2, 3, 1))
    assert not y[:3].isnan().any() and y[3:].isnan().all()
    for grid in ((), (1, 1, 1, 1), (-1,), (1.0,)):
        with pytest.raises(ValueError, match="grid"):
            run(compiled, (g, y, 128), grid)


# ---- inputs stay as they are ----


def test_inputs_are_not_written_and_outputs_get_a_new_version():
    x, y = torch.randn(64, requires_grad=True), nans(64)
    versions = x._version, y._version
    run(copy_for(torch.float32), (x, y, 64), (1,))
    assert x._version == versions[0] and y._version > versions[1]


def test_a_store_behind_a_tensor_is_an_error_and_leaves_the_tensors_alone():
    x, y = torch.randn(64), nans(60)
    with pytest.raises(RuntimeError, match="stored outside its tensors"):
        run(copy_for(torch.float32), (x, y, 64), (1,))
    assert y.isnan().all()


def test_a_load_behind_a_tensor_reads_nan():
    x, y = torch.ones(60), torch.zeros(64)
    run(copy_for(torch.float32), (x, y, 64), (1,))
    assert (y[:60] == 1).all() and y[60:].isnan().all()


WILD = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64"}


def wild(kernel, dtype, **pointers):
    return compile_kernel(kernel, {**{n: WILD[dtype] for n in pointers}, "offset": "i64"}, {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("offset", [-10_000, -128, -1, 64, 10_000, 50_000])
def test_45_a_store_outside_the_tensors_names_the_argument_and_changes_nothing(dtype, offset):
    y = torch.zeros(64, dtype=dtype)
    sign = "-" if offset < 0 else r"\+"
    with pytest.raises(RuntimeError, match=rf"outside its tensors: at y {sign} {abs(offset)} elements"):
        run(wild(teaching.wild_store_kernel, dtype, y=y), (y, offset), (1,))
    assert (y == 0).all()
    run(wild(teaching.wild_store_kernel, dtype, y=y), (y, 3), (1,))  # the next call is not disturbed
    assert y[3] == 1 and y.sum() == 1


@pytest.mark.parametrize("offset", [-128, -1, 64, 10_000, 100_000])
def test_45_a_load_outside_the_tensors_gives_nan_also_after_larger_calls(offset):
    x, y = torch.ones(1 << 20), torch.zeros(1 << 20)
    run(copy_for(torch.float32), (x, y, 1 << 20), (1 << 14,))  # leaves ones all over the arena, if anything
    x, y = torch.ones(64), torch.zeros(1)
    run(wild(teaching.wild_load_kernel, torch.float32, x=x, y=y), (x, y, offset), (1,))
    assert y.isnan().all()


def test_45_the_gaps_of_a_strided_view_are_outside_it():
    whole = torch.zeros(64, 8)
    column, y = whole[:, 3], torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"at y \+ 1 elements"):
        run(wild(teaching.wild_store_kernel, torch.float32, y=column), (column, 1), (1,))
    assert (whole == 0).all()
    run(wild(teaching.wild_load_kernel, torch.float32, x=column, y=y), (column, y, 1), (1,))
    assert y.isnan().all()
    run(wild(teaching.wild_store_kernel, torch.float32, y=column), (column, 8), (1,))
    assert whole[1, 3] == 1 and whole.sum() == 1
    expanded = torch.zeros(1).expand(5)
    with pytest.raises(RuntimeError, match=r"at y \+ 1 elements"):
        run(wild(teaching.wild_store_kernel, torch.float32, y=expanded), (expanded, 1), (1,))


def test_45_the_storage_around_a_view_is_outside_it():
    whole, y = torch.ones(256), torch.zeros(1)
    view = whole[64:128]
    for offset in (-1, 64):
        run(wild(teaching.wild_load_kernel, torch.float32, x=view, y=y), (view, y, offset), (1,))
        assert y.isnan().all()
        with pytest.raises(RuntimeError, match="at y"):
            run(wild(teaching.wild_store_kernel, torch.float32, y=view), (view, offset), (1,))
    assert (whole == 1).all()


def test_45_a_store_among_several_arguments_names_the_nearest():
    x, y = torch.zeros(100), torch.zeros(100)
    with pytest.raises(RuntimeError, match=r"at y \+ 500 elements; y has shape \[100\]"):
        run(wild(teaching.wild_copy_kernel, torch.float32, x=x, y=y), (x, y, 500), (1,))


def test_40_a_lazily_negated_argument_keeps_its_sign():
    x, y = torch.arange(64.0), nans(64)
    run(copy_for(torch.float32), (torch._neg_view(x), y, 64), (1,))
    assert torch.equal(y, -x)
    z = torch.complex(torch.zeros(64), torch.arange(64.0)).conj().imag
    run(copy_for(torch.float32), (z, y, 64), (1,))
    assert torch.equal(y, -x)
    target = torch._neg_view(torch.zeros(64))
    run(copy_for(torch.float32), (x, target, 64), (1,))
    assert torch.equal(target, x)


def test_a_kernel_that_dies_is_an_error_and_the_next_launch_works():
    compiled = compile_kernel(teaching.wild_store_kernel, {"y": "*fp32", "offset": "i64"}, {})
    y = torch.zeros(4)
    with pytest.raises(WorkerCrashed, match="SIGSEGV"):
        run(compiled, (y, 1 << 40), (1,))
    run(compiled, (y, 2), (1,))
    assert y.tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"x": torch.zeros(64, dtype=torch.float16)}, TypeError, r"x: the kernel was compiled for \*fp32"),
        ({"y": 3}, TypeError, "y: expected a tensor"),
        ({"T": 64.0}, TypeError, "T: expected an int"),
        ({"T": 1 << 31}, ValueError, "T: 2147483648 does not fit i32"),
        ({"x": torch.zeros(64, device="meta")}, ValueError, "x: expected a strided CPU tensor"),
        ({"z": 1}, ValueError, "z not among them"),
    ],
)
def test_a_bad_argument_is_named_before_anything_runs(change, kind, words):
    args = {"x": torch.zeros(64), "y": torch.zeros(64), "T": 64, **change}
    with pytest.raises(kind, match=words):
        run(copy_for(torch.float32), args, (1,))


def test_an_undefined_symbol_is_an_error_and_not_a_crash():
    from dataclasses import replace

    text = copy_for(torch.float32).linalg
    body = text.index("{\n", text.index("attributes")) + 2
    strange = text[:body] + "    func.call @nobody_has_this() : () -> ()\n" + text[body:]
    strange = strange.replace("  func.func @", "  func.func private @nobody_has_this()\n  func.func @", 1)
    with pytest.raises(CompileError, match="nobody_has_this"):
        run(replace(copy_for(torch.float32), linalg=strange), (torch.zeros(64), torch.zeros(64), 64), (1,))


# ---- cost ----


def memory_kib(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def test_a_thousand_launches_do_not_grow_the_memory_of_either_process():
    x, y = torch.randn(320, 64).bfloat16(), nans(5, 64, 64)
    signature = {"x": "*bf16", "y": "*fp32", "T": "i32"}
    compiled = compile_kernel(teaching.running_product_kernel, signature, {"BT": 64, "K": 64})
    for _ in range(50):
        run(compiled, (x, y, 320), (2,))
    pids = os.getpid(), worker.current().process.pid
    before = [memory_kib(pid) for pid in pids]
    for _ in range(1000):
        run(compiled, (x, y, 320), (2,))
    growth = [memory_kib(pid) - start for pid, start in zip(pids, before, strict=True)]
    assert max(growth) < 1024, growth  # KiB; the tiles of one launch alone are 400 KiB


def test_a_launch_costs_a_few_milliseconds():
    x, y = torch.randn(64), nans(64)
    compiled = copy_for(torch.float32)
    run(compiled, (x, y, 64), (1,))
    times = []
    for _ in range(50):
        start = time.perf_counter()
        run(compiled, (x, y, 64), (1,))
        times.append(time.perf_counter() - start)
    assert sorted(times)[25] < 0.005


def test_a_second_process_finds_the_machine_code_on_disk(fresh_cache):
    compiled = copy_for(torch.float32)
    x, y = torch.randn(64), nans(64)
    worker.close()
    run(compiled, (x, y, 64), (1,))
    assert len(list((fresh_cache / "native").rglob("*.o"))) == 1
    worker.close()
    reply = worker.call(
        "load", key=_key(compiled), name="copy_kernel", linalg="not used", cache=str(fresh_cache / "native")
    )
    assert reply == {"cached": True, "keep": None}
