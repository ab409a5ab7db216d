"""The committed GPU measurements say what the README claims of them; no GPU needed."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from wyfast_lib import bench_gates, bench_packed, records
from wyfast_lib.bench import MAY_FAIL, TRAINING
from wyfast_lib.bench_cpu_providers import BOTH, shape_at
from wyfast_lib.inputs import SHAPES

ROOT = Path(__file__).resolve().parent.parent


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
            if r.provider not in MAY_FAIL or r.provider == "fla":
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


README = (ROOT / "README.md").read_text(encoding="utf-8")
SPEEDS = re.compile(
    r"^\| T = (\d+), (\d+) heads(?: over (\d+) key heads)? "
    r"\| ([\d.]+)x faster \| ([\d.]+)x \| ([\d.]+)x faster \| ([\d.]+)x \|$",
    re.M,
)


def test_the_speeds_in_the_readme_are_those_of_the_rows(rows):
    claims = SPEEDS.findall(README)
    assert len(claims) == README.count("x faster |") / 2 > 0, "a line of the table is not read"
    for T, H, Hg, *numbers in claims:
        sizes = (int(T), int(H), int(Hg or H))
        (shape,) = [n for n in TRAINING if (SHAPES[n].T, SHAPES[n].H, SHAPES[n].Hg) == sizes]
        measured = []
        for phase in ("forward", "backward"):
            ours, theirs = (median(rows, p, phase, shape, "kernel") for p in ("wyfast", "fla"))
            measured += [theirs / ours, median(rows, "wyfast", phase, shape, "floor")]
        assert [float(x) for x in numbers] == [pytest.approx(x, abs=0.0051) for x in measured], shape


def test_the_cost_over_bare_products_in_the_readme_is_that_of_the_rows():
    (claim,) = re.findall(r"about ([\d.]+) times the bare matrix products", README.replace("\n", " "))
    (row,) = [
        r for r in records.read(ROOT / "data" / "bench_cpu.csv")
        if (r.provider, r.phase, r.metric, r.shape) == ("wyfast", BOTH, "best-ratio", str(shape_at(4096)))
    ]  # fmt: skip
    assert float(claim) == pytest.approx(row.p50, abs=0.051)


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
    assert heads == {f"HV={n}" for n in bench_gates.HEADS}
    for HV in heads - {"HV=1"}:
        turning = gates[HV, "transpose", "both", "g and beta"]
        for phase in ("forward", "backward"):
            gain = gates[HV, "wy_fast", phase, "stride-HV"] - gates[HV, "wy_fast", phase, "stride-1"]
            assert gain < turning, (HV, phase)


def test_packed_rows_cost_at_most_a_fifth_more_than_dense_ones(rows):
    packed = {(r.shape, r.phase, r.provider): r.p50 for r in rows
              if (r.suite, r.metric) == ("packed", "kernel")}  # fmt: skip
    shapes = {key[:2] for key in packed}
    assert shapes == {(shape, phase) for shape in bench_packed.SHAPES for phase in ("forward", "backward")}
    for key in shapes:
        assert packed[(*key, "packed")] <= 1.2 * packed[(*key, "dense")], key


def test_every_gpu_test_of_the_tree_ran_green_on_the_borrowed_machine():
    with open(ROOT / "data" / "gpu_tests.csv", newline="", encoding="utf-8") as f:
        report = list(csv.DictReader(f))
    assert {row["outcome"] for row in report} == {"passed"}
    ran = {row["test"].split("[")[0] for row in report}
    for path in (ROOT / "tests" / "gpu").glob("test_*.py"):
        assert set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)) <= ran
