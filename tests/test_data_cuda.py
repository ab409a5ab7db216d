"""The committed GPU measurements say what the README claims of them; no GPU needed."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from wyfast_lib import records
from wyfast_lib.inputs import SHAPES

ROOT = Path(__file__).resolve().parent.parent
TRAINING = ("train-4k", "train-8k", "train-32k", "train-32k-gqa", "train-64k")


@pytest.fixture(scope="module")
def rows():
    return records.read(ROOT / "data" / "bench_cuda.csv")


def median(rows, provider, phase, shape, metric, dtype="bfloat16"):
    found = [
        r.p50
        for r in rows
        if (r.suite, r.provider, r.phase, r.metric, r.dtype) == ("operator", provider, phase, metric, dtype)
        and r.shape.split()[0] == shape
    ]
    assert len(found) == 1, f"{provider} {phase} {shape} {metric}: {len(found)} rows"
    return found[0]


def test_every_row_has_its_provenance_and_ordered_percentiles(rows):
    for r in rows:
        assert all(getattr(r, name) for name in records.PROVENANCE), r
        assert r.p20 <= r.p50 <= r.p80
        assert re.fullmatch(r"[0-9a-f]{12}", r.commit), r.commit
        assert not re.search(r"(^|\s)/\w", r.command), "a path of the machine it ran on"


def test_a_speed_is_recorded_only_where_the_gate_is_green(rows):
    assert {r.metric for r in rows if r.gate == "fail"} <= {"error"}
    assert {r.provider for r in rows if r.gate == "none"} == {"copy"}
    for r in rows:
        if r.metric == "error":
            assert (r.p50 <= 1) == (r.gate == "pass")
            if r.provider in ("wyfast", "wy_fast", "fla", "torch"):
                assert r.gate == "pass"


def test_shapes_are_the_ones_of_the_library(rows):
    for r in rows:
        name, *sizes = r.shape.split()
        if r.suite == "operator" and r.provider != "copy":
            assert " ".join(sizes) == str(SHAPES[name])


@pytest.mark.parametrize("shape", TRAINING)
def test_the_backward_is_faster_than_fla_on_every_shape_and_near_the_copy_floor(rows, shape):
    ours, theirs = (median(rows, p, "backward", shape, "kernel") for p in ("wyfast", "fla"))
    assert theirs / ours >= 1.8
    assert median(rows, "wyfast", "backward", shape, "floor") <= 1.45


@pytest.mark.parametrize("shape", TRAINING)
def test_the_forward_is_not_slower_than_fla_and_near_the_copy_floor(rows, shape):
    ours, theirs = (median(rows, p, "forward", shape, "kernel") for p in ("wyfast", "fla"))
    assert ours <= theirs
    assert median(rows, "wyfast", "forward", shape, "floor") <= 1.2


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_float32_is_at_least_as_fast_as_fla(rows, phase):
    ours, theirs = (median(rows, p, phase, "train-8k", "kernel", "float32") for p in ("wyfast", "fla"))
    assert ours <= theirs


def test_no_call_of_ours_allocates_beyond_its_outputs_and_the_peer_does_for_groups(rows):
    for shape in TRAINING:
        for phase in ("forward", "backward"):
            assert median(rows, "wyfast", phase, shape, "extra") == 0
    assert median(rows, "fla", "backward", "train-32k-gqa", "extra") > 1e8


@pytest.mark.parametrize("shape", TRAINING)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_floor_and_bandwidth_agree_with_the_kernel_time(rows, shape, phase):
    kernel = median(rows, "wyfast", phase, shape, "kernel")
    rate = median(rows, "wyfast", phase, shape, "bandwidth")
    floor = median(rows, "wyfast", phase, shape, "floor")
    copies = [r.p50 for r in rows if r.provider == "copy"]
    assert min(copies) * 0.99 <= rate * floor <= max(copies) * 1.01
    s = SHAPES[shape]
    # k, v, A, beta, dw or w, du or u in two bytes, g in four; backward: dk, dv, dbeta, dg on top
    inputs = 2 * (s.Hg * s.K + s.H * (s.V + s.BT + 1)) + 4 * s.H + 2 * s.H * (s.K + s.V)
    outputs = 2 * (s.Hg * s.K + s.H * (s.V + 1)) + 4 * s.H
    needed = s.B * s.T * (inputs + (outputs if phase == "backward" else 0))
    assert abs(needed / (kernel * 1e6) / rate - 1) < 0.01


def test_the_gates_suite_shows_that_stride_1_does_not_pay_on_this_gpu(rows):
    gates = {(r.shape.split()[2], r.op, r.phase, r.provider): r.p50 for r in rows if r.suite == "gates"}
    heads = {key[0] for key in gates}
    assert heads == {"HV=1", "HV=8", "HV=32", "HV=64"}
    for HV in heads - {"HV=1"}:
        turning = gates[HV, "transpose", "both", "g and beta"]
        for phase in ("forward", "backward"):
            gain = gates[HV, "wy_fast", phase, "stride-HV"] - gates[HV, "wy_fast", phase, "stride-1"]
            assert gain < turning, (HV, phase)


def test_packed_rows_cost_at_most_a_fifth_more_than_dense_ones(rows):
    packed = {(r.shape, r.phase, r.provider): r.p50 for r in rows if r.suite == "packed"}
    shapes = {key[:2] for key in packed}
    assert len(shapes) == 6
    for key in shapes:
        assert packed[(*key, "packed")] <= 1.2 * packed[(*key, "dense")], key


def test_every_gpu_test_of_the_tree_ran_green_on_the_borrowed_machine():
    with open(ROOT / "data" / "gpu_tests.csv", newline="", encoding="utf-8") as f:
        report = list(csv.DictReader(f))
    assert {row["outcome"] for row in report} == {"passed"}
    ran = {row["test"].split("[")[0] for row in report}
    for path in (ROOT / "tests" / "gpu").glob("test_*.py"):
        assert set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)) <= ran
