"""The HIVM reader and the walker: texts into operations, and operations into what a program does."""

import pytest

from wyfast_lib.ascend import compile_kernel, hivm, symbols, walk
from wyfast_lib.kernels import teaching

import kernels_for_audit as kernels  # isort: skip


@pytest.fixture(scope="module")
def persistent():
    """The persistent kernel: cube and vector half, two tiles a task."""
    signature = {"a": "*bf16", "b": "*bf16", "y": "*bf16", "n": "i32", "cores": "i32"}
    return hivm.parse(compile_kernel(kernels.persistent_dot_kernel, signature, {"BT": 64, "ADD": False}).hivm)


def named(module, core):
    return next(f for f in module.entries if f.core == core)


# ---- unknown integers ----


def test_equal_expressions_of_unknowns_are_equal_and_constants_apart_are_recognised():
    t, i = symbols.unknown("T"), symbols.unknown("i")
    a = symbols.add(symbols.mul(64, i), t)
    b = symbols.add(t, symbols.mul(i, 64))
    assert a == b and hash(a) == hash(b)
    assert symbols.sub(symbols.add(a, 128), b) == 128
    assert symbols.compare("slt", a, symbols.add(b, 1)) == 1
    assert symbols.compare("eq", a, t) is None


def test_the_upper_bound_of_a_clamped_tile_is_the_full_tile():
    start, t = symbols.mul(64, symbols.unknown("i")), symbols.unknown("T")
    end = symbols.minimum(symbols.add(start, 64), symbols.maximum(start, t))
    assert symbols.upper(symbols.sub(end, start)) == 64
    assert symbols.upper(symbols.maximum(0, symbols.minimum(64, symbols.sub(t, start)))) == 64
    assert symbols.upper(t) is None


@pytest.mark.parametrize(
    ("op", "expected"), [("divsi", -2), ("floordiv", -3), ("ceildiv", -2), ("remsi", -1), ("mod", 1)]
)
def test_integer_division_rounds_as_the_operation_says(op, expected):
    assert symbols.binary(op, -5, 2) == expected


# ---- reading ----


def test_memref_types_are_read_with_dynamic_sizes_strides_and_space():
    dynamic = hivm.parse_memref("memref<?x16xbf16, strided<[?, 1], offset: ?>, #hivm.address_space<ub>>")
    assert dynamic == hivm.MemrefType((None, 16), "bf16", (None, 1), "UB")
    assert hivm.parse_memref("memref<4x8xf32, #hivm.address_space<cbuf>>").strides == (8, 1)
    assert hivm.parse_memref("i32") is None


def test_affine_maps_keep_the_precedence_of_their_operators():
    table = hivm.AffineMap.parse("(d0)[s0] -> ((-d0 + s0) ceildiv 24, 4 + d0 * 2 mod 3)")
    values = {"d0": 5, "s0": 100}
    assert [walk._affine(r, values) for r in table.results] == [4, 4 + (5 * 2) % 3]


def test_a_text_without_a_device_function_is_refused():
    with pytest.raises(hivm.HivmError, match="no HIVM module"):
        hivm.parse("module attributes {} {\n}\n")


def test_a_vector_kernel_has_one_function_and_the_plan_of_its_tiles():
    compiled = compile_kernel(
        teaching.gate_load_kernel,
        {"g": "*bf16", "y": "*bf16", "T": "i32"},
        {"HV": 32, "BT": 64, "G_T_CONTIG": False},
    )
    module = hivm.parse(compiled.hivm)
    assert [f.core for f in module.entries] == ["aiv"] and module.vector_units == 1
    assert module.spec["UB_SIZE"] == 192 * 1024 * 8 and module.spec["VECTOR_CORE_COUNT"] == 48
    done = walk.Walker(module, module.entries[0]).run()
    padded = [b for b in done.buffers if b.shape == (64, 16) and b.dtype == "bf16"]
    assert padded and padded[0].bytes == 64 * 32
    assert done.peak("UB") == compiled.ub_peak


def test_a_mixed_kernel_has_a_cube_and_a_vector_half_and_its_workspace(persistent):
    assert sorted(f.core for f in persistent.entries) == ["aic", "aiv"] and persistent.vector_units == 2
    assert persistent.workspace_bytes == 4 * 64 * 64 * 4  # four products in flight, float32


# ---- walking ----


def test_the_task_loop_is_the_outermost_one_without_a_known_trip_count_and_counts_its_tasks(persistent):
    for core in ("aic", "aiv"):
        done = walk.Walker(persistent, named(persistent, core)).run()
        assert list(done.tasks.values()) == [4]  # the compiler pipelines four tasks a turn
    cube = walk.Walker(persistent, named(persistent, "aic")).run()
    assert sum(e.template.startswith("mma_tile") for e in cube.events) == 4


def test_with_values_a_program_does_every_nth_task(persistent):
    function = named(persistent, "aic")
    names = [a[0] for a in function.args if "hacc.arg_type" not in a[2]]
    arguments = dict(zip(names[3:], (50, 24, 24, 1, 1), strict=False))  # n, cores and the grid
    loops = frozenset(walk.Walker(persistent, function).run().tasks)
    counts = []
    for program in (0, 1, 2, 23):
        done = walk.Walker(persistent, function, arguments=arguments, program=program, task_loops=loops).run()
        counts.append(sum(e.template.startswith("mma_tile") for e in done.events))
        assert sum(done.tasks.values()) == counts[-1]
    assert counts == [3, 3, 2, 2]  # tasks 0, 24, 48; 1, 25, 49; 2, 26; 23, 47


def test_every_template_call_of_the_text_is_walked(persistent):
    for function in persistent.entries:
        done = walk.Walker(persistent, function).run()
        written = {op.line for op in function.ops() if op.name in ("func.call", "call")}
        assert {e.line for e in done.events} >= written and not done.unread


def test_both_vector_units_are_walked_apart(persistent):
    function = named(persistent, "aiv")
    first = walk.Walker(persistent, function, sub_block=0).run()
    second = walk.Walker(persistent, function, sub_block=1).run()
    stores = [[e for e in w.events if e.template.startswith("store")] for w in (first, second)]
    assert len(stores[0]) > 0
    assert all(e.limited for e in stores[0]) == (len(stores[1]) == 0)
