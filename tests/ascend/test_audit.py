"""The audit: what small kernels move, asserted number by number, and the device instructions behind it."""

import types

import pytest

from wyfast_lib.ascend import compile_kernel, templates
from wyfast_lib.ascend.audit import audit
from wyfast_lib.kernels import teaching

import kernels_for_audit as kernels  # isort: skip

GATE = {"g": "*bf16", "y": "*bf16", "T": "i32"}
SCALE = {"x": "*bf16", "beta": "*bf16", "y": "*bf16", "T": "i32", "s": "*bf16"}
SHARED = {"a": "*bf16", "b": "*bf16", "y": "*bf16"}
PERSISTENT = {"a": "*bf16", "b": "*bf16", "y": "*bf16", "n": "i32", "cores": "i32"}


def gate(contiguous, HV=32, dtype="bf16"):
    constexprs = {"HV": HV, "BT": 64, "G_T_CONTIG": contiguous}
    return compile_kernel(teaching.gate_load_kernel, {**GATE, "g": f"*{dtype}", "y": f"*{dtype}"}, constexprs)


def scale(contiguous, store=False):
    constexprs = {"HV": 8, "BT": 64, "K": 128, "CONTIG": contiguous, "STORE_STRIDED": store}
    return compile_kernel(kernels.row_scale_kernel, SCALE, constexprs)


def row(seen, tensor, direction):
    rows = [r for r in seen.rows if r.argument == tensor and r.direction == direction]
    assert len(rows) == 1
    return rows[0]


# ---- the gate ----


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("fp32", 4)])
def test_a_stride_hv_gate_load_is_64_bursts_of_one_element_into_a_block_each(dtype, size):
    seen = audit(gate(False, dtype=dtype))
    assert not [note for note in seen.notes if "not traced" in note]
    load = row(seen, "g", "in")
    assert (load.bursts, load.bytes, load.moved) == (64, 64 * size, 64 * 32)
    assert load.layout == "discrete" and load.discrete and load.padding == 32 / size
    assert dict(load.instructions)[f"MOV.OUT.TO.UB.ALIGN.b{8 * size}.V220"] == 1  # one instruction, 64 bursts
    assert not load.scalar


def test_a_contiguous_gate_load_is_one_burst_of_128_bytes():
    seen = audit(gate(True))
    load = row(seen, "g", "in")
    assert (load.bursts, load.bytes, load.moved, load.layout, load.padding) == (1, 128, 128, "contiguous", 1)
    assert seen.discrete_rows == [] and seen.padded_rows == []


def test_the_deinterleave_of_a_strided_gate_is_one_masked_reduce_instruction_and_costs_a_synchronisation():
    strided, contiguous = audit(gate(False)), audit(gate(True))
    found = [r for r in strided.rows if r.template.startswith("deinterleave_channel_0")]
    assert len(found) == 1 and "VREDUCEv2.b16" in dict(found[0].instructions)
    assert not any(r.template.startswith("deinterleave") for r in contiguous.rows)
    assert strided.sync_count() > contiguous.sync_count()


def test_a_run_time_stride_keeps_every_vector_operation_on_padded_tiles():
    compiled = compile_kernel(teaching.gate_load_runtime_stride_kernel, {**GATE, "stride": "i32"}, {"BT": 64})
    seen = audit(compiled)
    assert not any(r.template.startswith("deinterleave") for r in seen.rows)
    padded = {r.template for r in seen.padded_rows}
    assert "vexp_2d_float" in padded and row(seen, "g", "in").strides == ("?",)
    exact = audit(compiled, {"stride": 8, "T": 64, "grid": (1,)})
    assert row(exact, "g", "in").strides == (8,) and row(exact, "g", "in").bursts == 64


def test_a_strided_store_is_discrete_and_pads_what_produces_it():
    constexprs = {"HV": 8, "BT": 64, "G_T_CONTIG": False}
    seen = audit(compile_kernel(teaching.gate_store_kernel, GATE, constexprs))
    store = row(seen, "y", "out")
    assert (store.layout, store.bursts, store.moved) == ("discrete", 64, 64 * 32)
    load = row(seen, "g", "in")  # contiguous in global memory, and yet an element a block
    assert load.strides == (1,) and load.layout == "discrete" and load.bursts == 64
    assert {"vexp_2d_float", "store_ubuf_to_gm_1d_bfloat16_t"} <= {r.template for r in seen.padded_rows}


def test_scaling_rows_by_a_padded_vector_runs_on_the_scalar_unit_element_by_element():
    padded, dense = audit(scale(False, store=True)), audit(scale(True))
    slow = [r for r in padded.rows if r.template == "vmul_2d_float" and r.shape == (64, 128)]
    assert len(slow) == 1 and slow[0].padding == 8
    assert (
        slow[0].scalar == 3 * 64 * 128 and slow[0].repeats == 0
    )  # two reads and a write an element, no vector work
    fast = [r for r in dense.rows if r.template == "vmul_2d_float"]
    assert len(fast) == 1 and fast[0].scalar == 0 and fast[0].repeats >= 64 * 128 * 4 // 256
    assert {"VBRCB.b32", "VMUL.f32"} <= set(dict(fast[0].instructions))  # the vector unit's own row broadcast
    assert padded.scalar_rows and not dense.scalar_rows
    facts = templates.describe(slow[0].template, slow[0].arguments)  # the very call of the audit
    assert facts.base.by_scalar and facts.condition.startswith("the example call itself: 24576 elements")


# ---- sizes at run-time values ----


def test_a_masked_tail_is_a_full_tile_without_values_and_exact_with_them():
    compiled = compile_kernel(teaching.copy_kernel, {"x": "*fp32", "y": "*fp32", "T": "i32"}, {"BT": 64})
    assert audit(compiled).argument_bytes("in") == 64 * 4
    tail = audit(compiled, {"T": 160, "grid": (3,), "program": 2})
    assert tail.argument_bytes("in") == tail.argument_bytes("out") == 32 * 4
    assert tail.minimum == {"x": 128, "y": 128}
    full = audit(compiled, {"T": 160, "grid": (3,), "program": 1})
    assert full.argument_bytes("in") == 64 * 4


@pytest.mark.parametrize("target", ["Ascend910B2", "Ascend950PR_9589"])
def test_a_program_of_a_two_dimensional_grid_is_found_on_both_targets(target):
    constexprs = {"HV": 4, "BT": 64, "G_T_CONTIG": True}
    compiled = compile_kernel(teaching.gate_load_kernel, GATE, constexprs, target)
    for program, rows in (((0, 3), 64), ((1, 0), 36), ((1, 3), 36)):
        seen = audit(compiled, {"T": 100, "grid": (2, 4), "program": program})
        assert row(seen, "g", "in").bytes == 2 * rows


def test_an_address_read_from_memory_is_followed_when_its_values_are_given():
    signature = {"x": "*fp32", "table": "*i64", "y": "*fp32"}
    compiled = compile_kernel(kernels.table_lookup_kernel, signature, {"BT": 64})
    seen = audit(compiled, {"table": [7, 3], "grid": (2,), "program": 1})
    assert row(seen, "table", "in").bytes == 8
    assert row(seen, "x", "in").bytes == 64 * 4
    with pytest.raises(ValueError, match="'tables' is no run-time argument"):
        audit(compiled, {"tables": [7, 3]})


def test_the_minimum_counts_each_byte_once_and_the_traffic_each_time():
    compiled = compile_kernel(kernels.twice_read_kernel, {"x": "*fp32", "y": "*fp32"}, {"BT": 256})
    seen = audit(compiled)
    assert seen.argument_bytes(name="x") == 2 * 1024 and seen.minimum == {"x": 1024, "y": 1024}
    assert audit(compiled, minimum=4096).minimum_bytes == 4096


# ---- cube and vector ----


def test_a_task_of_a_persistent_kernel_is_one_turn_of_its_loop_however_the_compiler_pipelines_it():
    seen = audit(compile_kernel(kernels.persistent_dot_kernel, PERSISTENT, {"BT": 64, "ADD": False}))
    tile = 64 * 64 * 2
    assert seen.argument_bytes("in") == 2 * tile and seen.argument_bytes("out") == tile
    assert seen.minimum_bytes == 3 * tile
    assert seen.totals["macs"] == 64**3 and seen.totals["cube_calls"] == 1
    assert seen.totals["l1_to_l0_bytes"] == 2 * tile


def test_a_tensor_that_cube_and_vector_both_read_counts_once_in_the_minimum():
    compiled = compile_kernel(kernels.shared_tile_kernel, SHARED, {"BT": 64})
    seen, tile = audit(compiled), 64 * 64 * 2
    assert {r.unit for r in seen.rows if r.argument == "b"} == {"aic", "aiv"}
    assert seen.argument_bytes(name="b") >= 2 * tile and seen.minimum == {"a": tile, "b": tile, "y": tile}


def test_the_same_holds_in_a_task_loop_whose_counter_each_half_names_for_itself():
    constexprs = {"BT": 64, "ADD": True}
    flags = ("--set-workspace-multibuffer=1",)
    seen = audit(compile_kernel(kernels.persistent_dot_kernel, PERSISTENT, constexprs, flags=flags))
    assert {r.unit for r in seen.rows if r.argument == "b"} == {"aic", "aiv"}
    assert seen.minimum == dict.fromkeys("aby", 64 * 64 * 2) and seen.split and not seen.unwritten


def test_a_pipelined_task_loop_loses_the_vector_units_load_of_a_shared_tile_and_the_audit_says_so():
    seen = audit(compile_kernel(kernels.persistent_dot_kernel, PERSISTENT, {"BT": 64, "ADD": True}))
    assert {r.unit for r in seen.rows if r.argument == "b"} == {"aic"}  # exp(b) is on the vector unit
    assert len(seen.unwritten) == 1 and "nothing writes" in seen.unwritten[0]
    assert "MISCOMPILED" in str(seen)
    assert not audit(
        compile_kernel(kernels.persistent_dot_kernel, PERSISTENT, {"BT": 64, "ADD": False})
    ).unwritten


def test_without_workspace_buffers_in_flight_the_same_kernel_is_split_over_both_vector_units():
    constexprs = {"BT": 64, "ADD": False}
    flags = ("--set-workspace-multibuffer=1",)
    single = audit(compile_kernel(kernels.persistent_dot_kernel, PERSISTENT, constexprs, flags=flags))
    several = audit(compile_kernel(kernels.persistent_dot_kernel, PERSISTENT, constexprs))
    assert (single.split, several.split) == (True, False)
    assert single.workspace_bytes < several.workspace_bytes


def test_the_workspace_is_apart_and_stores_left_to_one_vector_unit_are_reported():
    seen = audit(compile_kernel(kernels.persistent_dot_kernel, PERSISTENT, {"BT": 64, "ADD": False}))
    product = 64 * 64 * 4
    written = sum(r.bytes * r.times for r in seen.rows if r.argument == "workspace" and r.direction == "out")
    read = sum(r.bytes * r.times for r in seen.rows if r.argument == "workspace" and r.direction == "in")
    assert written == product
    assert read == (product if seen.split else 2 * product)  # without a split both units read all of it
    assert seen.split is False and [r.argument for r in seen.one_unit_rows] == ["y"]
    assert "NOT split" in str(seen)


def test_totals_at_given_values_agree_with_the_symbolic_ones_on_full_tiles():
    compiled = compile_kernel(kernels.persistent_dot_kernel, PERSISTENT, {"BT": 64, "ADD": False})
    exact = audit(compiled, {"n": 96, "cores": 24, "grid": (24,), "program": 5})
    assert exact.tasks == 4 and exact.totals == audit(compiled).totals


def test_a_transposed_operand_by_pointers_is_gathered_and_by_tl_trans_is_read_by_the_cube():
    signature = {"a": "*bf16", "b": "*bf16", "y": "*fp32"}
    by_pointers, by_trans = (
        audit(
            compile_kernel(
                teaching.transposed_dot_kernel, signature, {"BT": 64, "K": 64, "LOAD_TRANSPOSED": p}
            )
        )
        for p in (True, False)
    )
    gathers = [r for r in by_pointers.discrete_rows if r.argument == "a"]
    assert gathers and gathers[0].bursts * gathers[0].times >= 64 * 64
    assert any(r.template.startswith("deinterleave") for r in by_pointers.rows)
    assert by_trans.discrete_rows == [] and by_trans.totals["vector_calls"] == 0
    assert any(r.template.endswith("_ta") for r in by_trans.rows)
    assert by_pointers.ub_peak > 64 * 64 * 16 and by_trans.ub_peak == 0


def test_a_mixed_kernel_of_the_ascend_950_has_no_workspace_in_global_memory():
    constexprs = {"BT": 64, "ADD": False}
    seen = audit(compile_kernel(kernels.persistent_dot_kernel, PERSISTENT, constexprs, "Ascend950PR_9589"))
    tile = 64 * 64 * 2
    assert seen.workspace_bytes == 0 and seen.minimum == dict.fromkeys("aby", tile)
    assert [r.destination for r in seen.rows if r.pipe == "FIX"] == ["UB"]  # the cube writes into UB itself
    assert any("cannot be read" in note for note in seen.notes)


# ---- the template library ----


def memref(space, sizes, strides, bits, address=0, offset=0):
    return {
        "space": space,
        "sizes": sizes,
        "strides": strides,
        "bits": bits,
        "address": address,
        "offset": offset,
    }


def test_a_transposed_two_dimensional_load_runs_on_the_scalar_unit():
    call = (
        "load_gm_to_ubuf_2d_float",
        [memref("GM", [16, 16], [1, 16], 32), memref("UB", [16, 16], [16, 1], 32), 0, 0, 0],
    )
    (found,) = templates.trace([call], "Ascend910B2", "aiv")
    assert found.by_scalar and found.scalar == {"GM read": 256, "UB write": 256} and found.transfers == []


@pytest.mark.parametrize("offset", [0, 1, 3, 8])
def test_a_store_from_an_address_off_the_32_byte_grid_starts_on_the_scalar_unit(offset):
    call = (
        "store_ubuf_to_gm_1d_float",
        [memref("UB", [64], [1], 32, 0, offset), memref("GM", [64], [1], 32), 0],
    )
    (found,) = templates.trace([call], "Ascend910B2", "aiv")
    head = -offset % 8  # elements up to the next block
    assert found.scalar == ({"GM write": head, "UB read": head} if head else {})
    assert [t.bytes for t in found.transfers] == [4 * (64 - head)]


def test_the_910b_libraries_of_the_two_compilers_differ_and_the_traces_use_the_910b_compilers_own():
    assert templates.library_path("Ascend910B2", "aiv").name == "meta_op.aiv.bc"
    call = (
        "load_gm_to_ubuf_1d_bfloat16_t",
        [memref("GM", [64], [1], 16), memref("UB", [64], [1], 16), 0, 0, 0],
    )
    (found,) = templates.trace([call], "Ascend910B2", "aiv")
    assert found.missing_arguments == 0


def test_a_template_that_the_library_has_not_is_an_error_in_its_trace_only():
    calls = [
        ("no_such_template", []),
        ("vexp_1d_float", [memref("UB", [4096], [1], 32)] * 2 + [memref("UB", [0], [1], 32)]),
    ]
    absent, present = templates.trace(calls, "Ascend910B2", "aiv")
    assert absent.error and not present.error
    assert present.vector == [("VEXP.f32", 64)]  # 4096 float32 in steps of 256 bytes


@pytest.mark.parametrize(("width", "repeats"), [(64, 16), (128, 64)])
def test_a_row_sum_is_counted_in_repeats_of_256_bytes(width, repeats):
    tile, column = memref("UB", [16, width], [width, 1], 32), memref("UB", [16, 1], [8, 1], 32, 65536)
    call = ("enablevc_reduce_sum_ar_float", [tile, column, memref("UB", [2048], [1], 32, 98304), 0])
    (found,) = templates.trace([call], "Ascend910B2", "aiv")
    assert not found.by_scalar and {n for n, _ in found.vector} <= {"VADD.f32", "VCADD.f32.order"}
    assert 0 < sum(r for _, r in found.vector) <= repeats


def test_the_command_line_audits_a_kernel_at_given_values(capsys):
    from argparse import ArgumentParser

    from wyfast_lib.ascend import cli

    parser = ArgumentParser()
    cli.add_arguments(parser)
    kernel, signature = "wyfast_lib.kernels.teaching:gate_load_kernel", "g=*bf16, y=*bf16, T=i32"
    given = ["--constexpr", "HV=32, BT=64, G_T_CONTIG=False", "--at", "T=100, grid=(2, 32), program=(1, 0)"]
    assert cli.main(parser.parse_args(["audit", kernel, "--signature", signature, *given])) == 0
    assert "37 bursts" in capsys.readouterr().out  # 36 elements of the tail one by one, and one store


# ---- output ----


def test_an_audit_prints_renders_and_exports_all_its_rows():
    seen = audit(gate(False))
    text, html, plain = str(seen), seen._repr_html_(), seen.to_dict()
    assert "discrete" in text and html.count("<tr>") == 1 + len(seen.moves())
    assert len(plain["rows"]) == len(seen.rows) and plain["totals"]["bursts"] == 65
    assert all(isinstance(v, (str, int, float, bool, type(None))) for r in plain["rows"] for v in r.values())


def test_the_text_alone_is_audited_without_the_template_library():
    compiled = gate(False)
    bare = types.SimpleNamespace(
        kernel="k", target="Ascend910B2", signature=compiled.signature, hivm=compiled.hivm
    )
    seen = audit(bare, device=False)
    load = row(seen, "g", "in")
    assert (load.bursts, load.moved, load.layout, load.instructions) == (64, 2048, "discrete", ())


@pytest.mark.parametrize("contiguous", [True, False])
def test_the_ascend_950_text_is_audited_too(contiguous):
    compiled = compile_kernel(
        teaching.gate_load_kernel, GATE, {"HV": 32, "BT": 64, "G_T_CONTIG": contiguous}, "Ascend950PR_9589"
    )
    seen = audit(compiled)
    assert row(seen, "g", "in").bytes == 128 and row(seen, "y", "out").bytes == 128
    assert row(seen, "g", "in").strides == ((1,) if contiguous else (32,))
    assert seen.totals["vector_instructions"] > 0


def test_describe_names_the_changes_that_send_a_row_product_to_the_scalar_unit():
    tile, column = memref("UB", [64, 128], [128, 1], 32), memref("UB", [64, 1], [1, 1], 32)
    example = [
        tile,
        column,
        memref("UB", [64, 128], [128, 1], 32, 65536),
        memref("UB", [512], [1], 32, 131072),
    ]
    facts = templates.describe("vmul_2d_float", example)
    assert facts.scalar_path and not facts.base.by_scalar
    assert {"VMUL.f32", "VBRCB.b32", "MOVEMASK"} <= set(facts.instructions)
    assert "operand 1 (UB): an element a 32-byte block (24576 elements)" in facts.condition
    assert "operand 0 (UB): rows off the 32-byte grid" not in facts.condition


def test_describe_says_when_a_load_is_a_dma_of_single_elements_and_when_not_a_dma_at_all():
    facts = templates.describe(
        "load_gm_to_ubuf_1d_float", [memref("GM", [64], [1], 32), memref("UB", [64], [1], 32), 0, 0, 0]
    )
    found = {p.change: (p.bursts, p.scalar) for p in facts.probes}
    assert found["operand 1 (UB): an element a 32-byte block"] == (64, 0)
    assert found["operand 0 (GM): an element a 32-byte block"] == (0, 128)  # 64 reads, 64 writes
    with pytest.raises(ValueError, match="no such template"):
        templates.describe("no_such_template")
