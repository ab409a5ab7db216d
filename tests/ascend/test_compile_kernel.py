"""compile_kernel: facts of the Ascend compiler that the workbook teaches, errors, and the cache."""

import linecache
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from wyfast_lib.ascend import (
    CompileError,
    UBOverflowError,
    WorkerCrashed,
    compile_kernel,
    programs,
    run,
    sources,
    worker,
)
from wyfast_lib.ascend.ttir import assert_left_operands_dead, left_operand_reads
from wyfast_lib.kernels import teaching

A2, A5 = "Ascend910B2", "Ascend950PR_9589"
GATE = {"g": "*bf16", "y": "*bf16", "T": "i32"}
DOT = {"a": "*bf16", "b": "*bf16", "y": "*fp32"}


def calls(compiled):
    """Names of the library templates that the HIVM module calls, in order."""
    return re.findall(r"call @(\w+)\(", compiled.hivm)


def tiles(compiled):
    """Shapes and types of the tiles in UB."""
    return set(re.findall(r"pointer_cast\([^)]*\) : memref<([^,]*), #hivm.address_space<ub>>", compiled.hivm))


# ---- facts of the compiler ----


@pytest.mark.parametrize("HV", [8, 32])
def test_a_gate_load_with_a_constant_stride_takes_a_block_an_element_and_a_deinterleave(HV):
    strided = compile_kernel(teaching.gate_load_kernel, GATE, {"HV": HV, "BT": 64, "G_T_CONTIG": False})
    contiguous = compile_kernel(teaching.gate_load_kernel, GATE, {"HV": HV, "BT": 64, "G_T_CONTIG": True})
    assert "64x16xbf16" in tiles(strided) and "64x16xbf16" not in tiles(contiguous)
    assert any(name.startswith("deinterleave_channel_0") for name in calls(strided))
    assert not any(name.startswith("deinterleave") for name in calls(contiguous))
    assert strided.ub_peak >= contiguous.ub_peak + 64 * 32


def test_a_stride_known_only_at_run_time_keeps_the_padding_through_all_vector_work():
    constexprs = {"BT": 64}
    compiled = compile_kernel(teaching.gate_load_runtime_stride_kernel, {**GATE, "stride": "i32"}, constexprs)
    assert not any(name.startswith("deinterleave") for name in calls(compiled))
    assert {"64x16xbf16", "64x8xf32"} <= tiles(compiled)
    assert "vexp_2d_float" in calls(compiled)


def test_a_strided_store_pads_everything_upstream_of_it():
    strided = compile_kernel(teaching.gate_store_kernel, GATE, {"HV": 8, "BT": 64, "G_T_CONTIG": False})
    contiguous = compile_kernel(teaching.gate_store_kernel, GATE, {"HV": 8, "BT": 64, "G_T_CONTIG": True})
    assert "64x8xf32" in tiles(strided) and "64xf32" in tiles(contiguous)
    assert strided.ub_peak > 8 * contiguous.ub_peak


def test_a_transposed_operand_is_free_with_trans_and_a_gather_with_strided_pointers():
    straight = compile_kernel(
        teaching.transposed_dot_kernel, DOT, {"BT": 64, "K": 64, "LOAD_TRANSPOSED": False}
    )
    gathered = compile_kernel(
        teaching.transposed_dot_kernel, DOT, {"BT": 64, "K": 64, "LOAD_TRANSPOSED": True}
    )
    assert "mma_tile_bfloat16_t_to_float_ta" in calls(straight)
    assert straight.ub_peak == 0 and straight.workspace_bytes == 0
    assert any(name.startswith("deinterleave") for name in calls(gathered))
    assert gathered.ub_peak >= 64 * 64 * 32  # one block an element
    assert gathered.workspace_bytes >= 64 * 64 * 2  # the tile goes back through global memory


def test_a_vector_kernel_and_a_cube_kernel_are_told_apart():
    copy = compile_kernel(teaching.copy_kernel, {"x": "*fp32", "y": "*fp32", "T": "i32"}, {"BT": 64})
    dot = compile_kernel(teaching.transposed_dot_kernel, DOT, {"BT": 64, "K": 64, "LOAD_TRANSPOSED": False})
    assert (copy.mix_mode, dot.mix_mode) == ("aiv", "mix")
    assert copy.ub_peak > 0 and copy.l1_peak == copy.l0c_peak == 0
    assert dot.l1_peak == 2 * 64 * 64 * 2 and dot.l0c_peak == 64 * 64 * 4


@pytest.mark.parametrize("target", [A2, A5])
def test_both_targets_compile_without_a_retry(target):
    constexprs = {"BT": 64, "K": 64}
    compiled = compile_kernel(
        teaching.running_product_kernel, {"x": "*bf16", "y": "*fp32", "T": "i32"}, constexprs, target
    )
    assert compiled.target == target and compiled.retries == 0
    assert "hivm.hir.pointer_cast" in compiled.hivm and "tt.dot" in compiled.ttir
    assert "linalg.matmul" in compiled.linalg


def test_a_flag_of_the_caller_takes_the_place_of_ours():
    arguments = teaching.large_tile_kernel, {"x": "*fp32", "y": "*fp32", "n": "i32"}, {"BT": 2048}
    twice = compile_kernel(*arguments)
    once = compile_kernel(*arguments, flags=("--enable-auto-multi-buffer=False",))
    assert 0 < once.ub_peak < twice.ub_peak


def test_no_text_carries_a_path_of_this_machine():
    compiled = compile_kernel(teaching.gate_load_kernel, GATE, {"HV": 8, "BT": 64, "G_T_CONTIG": False})
    for text in (compiled.ttir, compiled.linalg, compiled.hivm, *compiled.notes):
        assert not re.search(r'"/\w+/', text)
    assert 'loc("teaching.py"' in compiled.ttir


# ---- errors ----


def test_an_overflow_names_the_kernel_the_tiles_and_the_bytes():
    with pytest.raises(UBOverflowError) as caught:
        compile_kernel(teaching.large_tile_kernel, {"x": "*fp32", "y": "*fp32", "n": "i32"}, {"BT": 32768})
    error = caught.value
    assert error.available == 192 * 1024 and error.required == 256 * 1024
    assert error.kernel == "large_tile_kernel" and error.constexprs == {"BT": 32768}
    assert "BT=32768" in str(error) and "Shrink BT" in str(error)
    assert sum("retrying" in note for note in error.notes) == 2
    assert "tt.func" in error.ttir


def test_the_largest_tile_that_fits_compiles_with_a_retry_that_is_recorded():
    compiled = compile_kernel(
        teaching.large_tile_kernel, {"x": "*fp32", "y": "*fp32", "n": "i32"}, {"BT": 16384}
    )
    assert compiled.retries >= 1 and any("auto-multi-buffer" in note for note in compiled.notes)
    assert compiled.ub_peak <= 192 * 1024


def test_a_kernel_that_triton_rejects_is_a_compile_error_with_its_line(tmp_path):
    path = tmp_path / "rejected.py"
    path.write_text(
        "import triton\nimport triton.language as tl\n\n@triton.jit\ndef bad(x, N: tl.constexpr):\n"
        "    tl.store(x + tl.arange(0, N), tl.unheard_of(x))\n"
    )
    with pytest.raises(CompileError, match="unheard_of") as caught:
        compile_kernel(f"{path}:bad", {"x": "*fp32"}, {"N": 64})
    assert caught.value.stage == "ttir"


def test_a_module_that_ends_the_worker_is_an_error_and_the_next_call_works(tmp_path):
    path = tmp_path / "deadly.py"
    path.write_text(
        "import sys, os\nprint('last words', file=sys.stderr, flush=True)\nos.abort()\ndef k(x):\n    pass\n"
    )
    with pytest.raises(WorkerCrashed, match="(?s)SIGABRT.*last words"):
        compile_kernel(f"{path}:k", {"x": "*fp32"}, {})
    compile_kernel(teaching.copy_kernel, {"x": "*fp16", "y": "*fp16", "T": "i32"}, {"BT": 32}, cache=False)


def test_a_worker_that_died_while_idle_is_replaced_without_an_error():
    arguments = teaching.copy_kernel, {"x": "*fp16", "y": "*fp16", "T": "i32"}, {"BT": 32}
    compile_kernel(*arguments, cache=False)
    first = worker.current()
    first.process.kill()
    first.process.wait()
    compile_kernel(*arguments, cache=False)
    assert worker.current() is not first


@pytest.mark.parametrize("crashes", [0, 2, 4])
def test_a_compiler_that_crashes_now_and_then_is_run_again(crashes, tmp_path):
    """As triton-adapter-opt does on 1.4 % of its runs; one that always crashes stays a crash."""
    count, program = tmp_path / "count", tmp_path / "compiler"
    program.write_text(
        f"#!/bin/sh\necho >> {count}\n[ $(wc -l < {count}) -gt {crashes} ] || kill -SEGV $$\necho compiled\n"
    )
    program.chmod(0o755)
    done, crashed = programs.run_program([str(program)])
    runs = len(count.read_text().splitlines())
    assert runs == min(crashes + 1, programs.CRASH_TRIES)
    if crashes < programs.CRASH_TRIES:
        assert (done.returncode, done.stdout, crashed) == (0, "compiled\n", crashes)
    else:
        assert (done.returncode, crashed) == (-signal.SIGSEGV, runs - 1)


def test_a_compiler_that_fails_is_not_run_again(tmp_path):
    count, program = tmp_path / "count", tmp_path / "compiler"
    program.write_text(f"#!/bin/sh\necho >> {count}\nexit 1\n")
    program.chmod(0o755)
    assert programs.run_program([str(program)])[0].returncode == 1
    assert len(count.read_text().splitlines()) == 1


def test_an_interrupt_from_the_keyboard_leaves_an_idle_worker_alone():
    arguments = teaching.copy_kernel, {"x": "*fp16", "y": "*fp16", "T": "i32"}, {"BT": 32}
    compile_kernel(*arguments, cache=False)  # up and running, not on its way there
    live = worker.current()
    os.kill(live.process.pid, signal.SIGINT)
    compile_kernel(*arguments, cache=False)
    assert worker.current() is live


def test_a_worker_that_hangs_is_ended_and_leaves_no_temporary_files(tmp_path):
    path = tmp_path / "slow.py"
    path.write_text(
        "import tempfile, time\nfolder = tempfile.mkdtemp()\ntime.sleep(60)\ndef k(x):\n    pass\n"
    )
    scratch = Path(worker.current().scratch.name)
    source = sources.find(f"{path}:k")
    request = {"module": "", "file": source.file, "name": "k", "target": A2}
    with pytest.raises(WorkerCrashed, match="did not answer"):
        worker.call("compile", timeout=2.0, **request)
    assert not scratch.exists()


def test_what_a_module_prints_does_not_break_the_protocol(tmp_path):
    path = tmp_path / "chatty.py"
    path.write_text(
        "import sys, triton, triton.language as tl\nprint('x' * 100000)\nsys.stdin.read()\n"
        "@triton.jit\ndef k(x):\n    tl.store(x, 1.0)\n"
    )
    assert compile_kernel(f"{path}:k", {"x": "*fp32"}, {}, cache=False).kernel == "k"


@pytest.mark.parametrize(
    ("signature", "constexprs", "target", "words"),
    [
        ({"x": "*fp32", "y": "*fp32"}, {"BT": 64}, A2, "type of T is missing"),
        ({"x": "*fp32", "y": "*fp32", "T": "i32", "z": "i32"}, {"BT": 64}, A2, "no parameter z"),
        ({"x": "*fp32", "y": "*fp32", "T": "i32", "BT": "constexpr"}, {}, A2, "value of BT is missing"),
        ({"x": "*fp32", "y": "*fp32", "T": "i32", "BT": "i32"}, {"BT": 64}, A2, "constant value too"),
        ({"x": "*fp32", "y": "*fp32", "T": "i32"}, {"BT": 64}, "Ascend310", "Ascend910B2, Ascend950PR_9589"),
    ],
)
def test_a_bad_signature_or_target_is_named_before_anything_is_compiled(signature, constexprs, target, words):
    with pytest.raises(ValueError, match=words):
        compile_kernel(teaching.copy_kernel, signature, constexprs, target)


# ---- cache, sources ----


def test_a_cached_call_takes_less_than_a_tenth_of_a_second_and_needs_no_worker(fresh_cache):
    arguments = teaching.transposed_dot_kernel, DOT, {"BT": 64, "K": 64, "LOAD_TRANSPOSED": False}
    first = compile_kernel(*arguments)
    worker.close()
    start = time.perf_counter()
    second = compile_kernel(*arguments)
    assert time.perf_counter() - start < 0.1
    assert not first.from_cache and second.from_cache and second.hivm == first.hivm
    assert worker._worker is None


def test_an_overflow_is_cached_too(fresh_cache):
    for _ in range(2):
        with pytest.raises(UBOverflowError):
            compile_kernel(
                teaching.large_tile_kernel, {"x": "*fp32", "y": "*fp32", "n": "i32"}, {"BT": 32768}
            )
        worker.close()
    assert worker._worker is None
    assert len(list(fresh_cache.rglob("*.json.gz"))) == 1


def test_a_damaged_cache_entry_is_compiled_anew(fresh_cache):
    arguments = teaching.copy_kernel, {"x": "*fp32", "y": "*fp32", "T": "i32"}, {"BT": 64}
    compile_kernel(*arguments)
    (entry,) = fresh_cache.rglob("*.json.gz")
    entry.write_bytes(entry.read_bytes()[:100])
    assert not compile_kernel(*arguments).from_cache
    assert compile_kernel(*arguments).from_cache


def test_a_changed_helper_module_changes_the_kernel(fresh_cache, tmp_path):
    (tmp_path / "my_helper.py").write_text("import triton\n\n@triton.jit\ndef f(x):\n    return x + 1.0\n")
    (tmp_path / "my_kernel.py").write_text(
        "import triton, triton.language as tl\nfrom my_helper import f\n\n"
        "@triton.jit\ndef k(x):\n    tl.store(x, f(tl.load(x)))\n"
    )
    first = compile_kernel(f"{tmp_path / 'my_kernel.py'}:k", {"x": "*fp32"}, {})
    (tmp_path / "my_helper.py").write_text("import triton\n\n@triton.jit\ndef f(x):\n    return x * 7.0\n")
    second = compile_kernel(f"{tmp_path / 'my_kernel.py'}:k", {"x": "*fp32"}, {})
    assert not second.from_cache
    assert "arith.addf" in first.ttir and "arith.mulf" in second.ttir and "7.0" in second.ttir


def test_every_way_to_name_a_kernel_finds_the_same_source():
    by_object = sources.find(teaching.copy_kernel)
    by_module = sources.find("wyfast_lib.kernels.teaching:copy_kernel")
    by_file = sources.find(f"{by_object.file}:copy_kernel")
    assert by_object == by_module
    assert (by_file.file, by_file.name, by_file.parameters) == by_object_parts(by_object)
    for bad in ("copy_kernel", "no.such.module:k", "wyfast_lib.kernels.teaching:absent"):
        with pytest.raises(ValueError, match="kernel"):
            sources.find(bad)


def by_object_parts(source):
    return source.file, source.name, source.parameters


CELLS = (
    "import triton\nimport triton.language as tl\nSCALE = tl.constexpr(3.0)\n",
    "@triton.jit\ndef helper(v):\n    return v * SCALE + 2.0\n",
    "@triton.jit\ndef kernel(x, BT: tl.constexpr):\n    o = tl.arange(0, BT)\n"
    "    tl.store(x + o, helper(tl.load(x + o)))\n",
)


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_a_kernel_of_a_notebook_cell_compiles_with_its_helpers_and_constants(interpret, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    session = {"__name__": "__main__", "x": torch.zeros(1), "o": [2]}  # names that the kernel has of its own
    for number, text in enumerate(CELLS):
        name = f"<cell {number}>"
        monkeypatch.setitem(linecache.cache, name, (len(text), None, text.splitlines(True), name))
        exec(compile(text, name, "exec"), session)
    compiled = compile_kernel(session["kernel"], {"x": "*fp32"}, {"BT": 16})
    x = torch.arange(16.0)
    run(compiled, {"x": x}, (1,))
    assert torch.equal(x, torch.arange(16.0) * 3 + 2)


def test_a_session_value_that_cannot_be_written_to_a_file_is_named(monkeypatch):
    text = "import triton\n@triton.jit\ndef kernel(x):\n    TABLE[0]\n"
    monkeypatch.setitem(linecache.cache, "<cell 9>", (len(text), None, text.splitlines(True), "<cell 9>"))
    session = {"__name__": "__main__", "TABLE": [1.0]}
    exec(compile(text, "<cell 9>", "exec"), session)
    with pytest.raises(CompileError, match="TABLE, a list of this session"):
        compile_kernel(session["kernel"], {"x": "*fp32"}, {})


# ---- left operands ----


def test_the_ttir_check_finds_a_tile_read_after_it_was_a_left_operand():
    reused = compile_kernel(teaching.reused_left_kernel, DOT, {"BT": 64, "RELOAD": False})
    reloaded = compile_kernel(teaching.reused_left_kernel, DOT, {"BT": 64, "RELOAD": True})
    assert left_operand_reads(reused.ttir)
    assert left_operand_reads(reloaded.ttir) == []
    assert_left_operands_dead(reloaded.ttir)
    with pytest.raises(AssertionError, match="left operand of the dot"):
        assert_left_operands_dead(reused.ttir)


LOOP = """
tt.func public @k(%arg0: !tt.ptr<f32>, %arg1: i32) {
  %cst = arith.constant dense<0.0> : tensor<16x16xf32>
  %0 = tt.load %arg0 : tensor<16x16xf32>
  %1:2 = scf.for %arg2 = %arg1 to %arg1 step %arg1 iter_args(%arg3 = INIT, %arg4 = %cst) -> (t, t)  : i32 {
    %2 = tt.load %arg0 : tensor<16x16xf32>
    %3 = tt.dot LEFT, %2, %arg4 : t * t -> t
    scf.yield NEXT, %3 : t, t
  }
  tt.store %arg0, %1#1 : t
  tt.return
}
"""


@pytest.mark.parametrize(
    ("left", "initial", "following", "wrong"),
    [
        ("%0", "%cst", "%cst", True),  # defined outside: the next iteration reads it again
        ("%2", "%cst", "%cst", False),  # loaded in every iteration
        ("%arg3", "%0", "%2", False),  # carried, and replaced by a fresh tile
        ("%arg3", "%0", "%arg3", True),  # carried on after the dot
    ],
)
def test_the_ttir_check_follows_loops_and_carried_tiles(left, initial, following, wrong):
    text = LOOP.replace("LEFT", left).replace("INIT", initial).replace("NEXT", following)
    assert bool(left_operand_reads(text)) is wrong


def test_the_ttir_check_follows_views_and_tells_branches_apart():
    text = """
tt.func public @k(%arg0: !tt.ptr<f32>, %arg1: i1) {
  %0 = tt.load %arg0 : t
  %1 = tt.trans %0 {order = array<i32: 1, 0>} : t -> t
  %2 = scf.if %arg1 -> (t) {
    %3 = tt.dot %1, %1, %1 : t * t -> t
    scf.yield %3 : t
  } else {
    %3 = arith.addf %0, %0 : t
    scf.yield %3 : t
  }
  AFTER
  tt.return
}
"""
    assert left_operand_reads(text.replace("AFTER", "tt.store %arg0, %2 : t")) == []
    (read,) = left_operand_reads(text.replace("AFTER", "tt.store %arg0, %0 : t"))
    assert read.value == "%0" and read.reader == "tt.store" and not read.next_iteration
