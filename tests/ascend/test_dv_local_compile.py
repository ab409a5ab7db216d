"""The compile gate of chunk_bwd_dv_local, and what each gate layout costs a chunk, read off the compiler."""

import re
from pathlib import Path

import pytest

from wyfast_lib.ascend import production
from wyfast_lib.ascend.audit import audit
from wyfast_lib.ascend.production import DV_LOCAL, Case, build_dv_local
from wyfast_lib.ascend.ttir import assert_left_operands_dead

A2, ARCH35 = production.TARGETS
REDUCED = [
    Case(DV_LOCAL),
    Case(DV_LOCAL, dtype="float16", heads="GQA", width=64),
    Case(DV_LOCAL, dtype="float32", heads="MQA", varlen=True, width=256),
    Case(DV_LOCAL, dtype="float32", width=256, chunk=128),
    Case(DV_LOCAL, gated=False),
    Case(DV_LOCAL, target=ARCH35),
]
UNITS = 2  # vector units a core: each loads the gate for its own half of the work


def assert_ships(compiled) -> None:
    """It fits at the first try, gathers nothing, shares the vector work, and leaves dead operands alone."""
    counts = audit(compiled)
    assert compiled.retries == 0, compiled.notes
    assert not counts.discrete_rows and not counts.padded_rows and not counts.one_unit_rows
    if compiled.target == A2:  # on arch35 the compiler reverts the split of every kernel with a cube half
        assert counts.split
    assert_left_operands_dead(compiled.ttir)


def gates(compiled) -> dict:
    """What loading the gate costs a chunk and head: loads, bursts, bytes of whole blocks, deinterleaves."""
    counts = audit(compiled)
    loads = [r for r in counts.rows if r.argument == "g"]
    interleaved = [r for r in counts.rows if r.template.startswith("deinterleave")]
    return {
        "loads": round(sum(r.times for r in loads)),
        "bursts": round(sum(r.times * r.bursts for r in loads)),
        "asked": round(sum(r.times * r.bytes for r in loads)),
        "moved": round(sum(r.times * r.moved for r in loads)),
        "deinterleaves": round(sum(r.times for r in interleaved)),
        "layouts": {r.layout for r in loads},
    }


@pytest.mark.parametrize("case", REDUCED, ids=str)
def test_the_shipped_kernel_fits_and_gathers_nothing(case):
    assert_ships(production.build(case))


@pytest.mark.gate
@pytest.mark.parametrize("case", production.cases(kernels=(DV_LOCAL,)), ids=str)
def test_every_production_case_fits_and_gathers_nothing(case):
    assert_ships(production.build(case))


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("BC", [16, 32, 64])
def test_at_the_published_shape_every_sub_block_ships_and_the_strided_gate_compiles(BC, varlen):
    assert_ships(build_dv_local(BC=BC, varlen=varlen))
    assert build_dv_local(BC=BC, varlen=varlen, t_contig=False).retries == 0


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("BC", [16, 32])
def test_a_chunk_pays_for_its_gate_once_a_pair_of_sub_blocks(BC, varlen):
    n = 64 // BC
    pairs = n * (n + 1) // 2
    contiguous = gates(build_dv_local(BC=BC, varlen=varlen))
    strided = gates(build_dv_local(BC=BC, varlen=varlen, t_contig=False))
    assert contiguous["loads"] == strided["loads"] == 2 * pairs * UNITS  # rows and columns
    assert contiguous["bursts"] == contiguous["loads"] and contiguous["layouts"] == {"contiguous"}
    assert contiguous["deinterleaves"] == 0
    # The rows of a pair are shared between the two units, its columns are needed by both.
    assert strided["bursts"] == pairs * (BC + UNITS * BC) and strided["layouts"] == {"discrete"}
    assert strided["deinterleaves"] == strided["loads"]
    # The bytes asked for do not show it; each travels in a 32-byte block of its own.
    assert strided["asked"] == contiguous["asked"] == 4 * strided["bursts"]
    assert strided["moved"] == 32 * strided["bursts"]


def test_a_whole_chunk_as_one_sub_block_loads_its_gate_once_a_unit():
    contiguous, strided = (gates(build_dv_local(t_contig=c)) for c in (True, False))
    assert contiguous["loads"] == strided["loads"] == UNITS
    assert (contiguous["bursts"], strided["bursts"]) == (UNITS, 64 * UNITS)
    assert (contiguous["deinterleaves"], strided["deinterleaves"]) == (0, UNITS)


@pytest.mark.parametrize("HV", [1, 2, 8, 32, 64])
def test_the_burst_count_of_a_strided_gate_does_not_depend_on_the_stride_unless_it_is_one(HV):
    seen = gates(build_dv_local(H=1, HV=HV, BC=32, t_contig=False))
    assert seen["bursts"] == (12 if HV == 1 else 288)
    assert seen["deinterleaves"] == (0 if HV == 1 else 12)


def test_with_one_sub_block_the_kernel_moves_what_it_must_and_its_scores():
    counts = audit(build_dv_local())
    assert counts.argument_bytes() <= 1.01 * counts.minimum_bytes
    scores = 64 * 64
    assert counts.workspace_bytes == 2 * (4 + 2) * scores  # float32 to the vector units, bfloat16 back


@pytest.mark.parametrize("BC", [16, 32, 64])
def test_no_tile_is_moved_or_compared_by_the_scalar_unit(BC):
    counts = audit(build_dv_local(BC=BC))
    selects = [r for r in counts.scalar_rows if r.template.startswith("vsel")]  # their number
    assert counts.totals["scalar_elements"] == round(sum(r.scalar * r.times for r in selects))
    assert all(r.scalar == 1 for r in selects)


def test_the_two_layouts_are_never_both_in_one_compile():
    for t_contig in (True, False):
        compiled = build_dv_local(BC=32, t_contig=t_contig)
        assert {r.layout for r in audit(compiled).rows if r.argument == "g"} == (
            {"contiguous"} if t_contig else {"discrete"}
        )


def test_nothing_that_the_npu_ignores_or_miscompiles_is_written():
    source = Path(production.__file__).parents[1] / "kernels" / "ascend_dv_local.py"
    text = source.read_text()
    for forbidden in ("num_warps", "num_stages", "autotune", "make_block_ptr", "exp2"):
        assert forbidden not in text, forbidden
    assert not re.search(r"\bp_\w+ \+=", text), "pointers are rebuilt for each task"
