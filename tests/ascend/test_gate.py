"""The compile gate: every production kernel through the Ascend compiler; the whole grid under `-m gate`."""

import itertools
import json

import pytest
import torch
from support import check, draw

from wyfast_lib.ascend import production
from wyfast_lib.ascend.audit import audit
from wyfast_lib.ascend.production import Case

FORWARD, BACKWARD = production.KERNELS
A2, ARCH35 = production.TARGETS

REDUCED = [
    Case(FORWARD),
    Case(FORWARD, dtype="float32", heads="GQA", varlen=True, width=256),
    Case(BACKWARD),
    Case(BACKWARD, dtype="float16", heads="MQA", width=64),
    Case(BACKWARD, dtype="float32", heads="GQA", varlen=True, width=256),
    Case(FORWARD, ARCH35),
]


def assert_ships(case: Case) -> None:
    """It fits at the first try, moves nothing element by element, and no store is left to one vector unit."""
    compiled = production.build(case)
    counts = audit(compiled)
    assert compiled.retries == 0, compiled.notes
    assert not counts.discrete_rows, [str(row) for row in counts.discrete_rows]
    assert not counts.padded_rows
    assert not counts.one_unit_rows and "limit_sub_block_id0" not in compiled.hivm
    assert not counts.unwritten, "the compiler lost a load: a unit reads what nothing wrote"
    reverted = [note for note in compiled.notes if "revert" in note.lower()]
    if case.target == A2:
        assert counts.split, "the two vector units do the same work"
        assert not reverted
    else:  # the compiler for arch35 gives up the split of every kernel that has a cube half, and says so
        assert counts.split is False and reverted


@pytest.mark.parametrize("case", REDUCED, ids=str)
def test_the_shipped_kernel_fits_and_gathers_nothing(case):
    assert_ships(case)


@pytest.mark.gate
@pytest.mark.parametrize("case", production.cases(), ids=str)
def test_every_production_kernel_fits_and_gathers_nothing(case):
    assert_ships(case)


VARIANTS = [
    *(dict(chunk=chunk, width=256) for chunk in (16, 32, 128)),
    *(dict(gated=False, heads=heads) for heads in production.HEADS),
]


EVERY_VARIANT = [
    Case(kernel, target, dtype, **variant)
    for kernel, target, dtype, variant in itertools.product(
        production.KERNELS, production.TARGETS, production.DTYPES, VARIANTS
    )
]


def test_the_gate_leaves_out_long_chunks_and_float16_on_the_950_in_the_backward_alone():
    sides = (production.KERNELS, production.TARGETS, production.DTYPES, production.HEADS)
    grid = [Case(*choice) for choice in itertools.product(*sides, (False, True), production.WIDTHS)]
    for case in [*EVERY_VARIANT, *grid]:
        float16_on_950 = case.target == ARCH35 and case.dtype == "float16"
        left_out = case.kernel == BACKWARD and (case.chunk == 128 or float16_on_950)
        assert bool(production.refusal(case)) == left_out, case


@pytest.mark.gate
@pytest.mark.parametrize("case", [case for case in EVERY_VARIANT if not production.refusal(case)], ids=str)
def test_other_chunks_and_calls_without_a_gate_fit_too(case):
    assert_ships(case)


@pytest.mark.gate
@pytest.mark.parametrize("width", production.WIDTHS)
@pytest.mark.parametrize("Hg", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_plan_for_the_ascend_950_computes_right(dtype, Hg, width, monkeypatch):
    monkeypatch.setenv("WYFAST_LOWERED_TARGET", ARCH35)
    check(draw(1, 150, 4, Hg, width, width, 64, dtype=dtype, cu=[0, 1, 1, 70, 150]), "lowered")


# ---- python -m wyfast_lib ascend ----


def _command(*arguments):
    from wyfast_lib.__main__ import main

    return main(["ascend", *arguments])


def test_the_command_prints_the_table_with_progress(monkeypatch, capsys):
    monkeypatch.setattr(production, "cases", lambda *a, **k: [Case(FORWARD), Case(BACKWARD)])
    assert _command() == 0
    out, err = capsys.readouterr()
    assert "401.0" in out and "104.5" in out  # total and ideal of the backward, KiB
    assert "[2/2] backward bfloat16" in err


def test_the_command_fails_when_a_kernel_does_not_fit(monkeypatch, capsys):
    too_long = Case(BACKWARD, width=64, chunk=128)
    monkeypatch.setattr(production, "cases", lambda *a, **k: [Case(FORWARD), too_long])
    assert _command("--json") == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert [row["kernel"] for row in found["rows"]] == [FORWARD] and found["failures"] == [str(too_long)]
    assert "UB" in err


@pytest.mark.parametrize(
    "wrong, named",
    [
        (("--kernel", "nothing"), ("--kernel", "nothing")),
        (("--target", "Ascend000"), ("--target", "Ascend000")),
        (("--csv", "rows.csv", "--kernel", "bwd"), ("--csv", "--kernel")),
    ],
)
def test_the_command_names_the_option_that_it_cannot_take(wrong, named, capsys):
    assert _command(*wrong) == 1
    err = capsys.readouterr().err
    assert all(word in err for word in named)
