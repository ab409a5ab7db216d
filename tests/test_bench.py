"""What a benchmark writes down is computed: verdicts, names, sizes, sources. Times mean nothing here."""

from __future__ import annotations

import csv
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from recorder import COLUMNS, Recorder

from wyfast_lib import bench, bench_gates, bench_packed, records
from wyfast_lib.backends import torch as torch_backend
from wyfast_lib.bench_cpu_providers import BOTH, FORWARD, PROVIDERS, shape_at
from wyfast_lib.bench_providers import Fla, make_case
from wyfast_lib.bench_timing import COPY_BYTES
from wyfast_lib.inputs import Shape


@pytest.fixture
def tiny_copies(monkeypatch):
    monkeypatch.setitem(COPY_BYTES, "cpu", 1 << 16)


@pytest.fixture
def no_graphs(monkeypatch):
    """Calls in place of CUDA graphs of them."""
    graph = SimpleNamespace(milliseconds=lambda: 1.0)
    for module in (bench_packed, bench_gates):
        monkeypatch.setattr(module, "capture", lambda calls: graph)


def wrong(function, position):
    """The function with one of its results 1 % off."""
    return lambda *a: tuple(1.01 * x if n == position else x for n, x in enumerate(function(*a)))


def test_a_provider_that_is_wrong_fails_its_gate_and_has_no_speed(tiny_copies, monkeypatch):
    monkeypatch.setattr(torch_backend, "backward", wrong(torch_backend.backward, 2))
    rows = bench.run("cpu", ["tiny"], ["float32"], ["torch"], 1)
    copy, *rows = rows
    assert (copy.provider, copy.shape, copy.gate) == ("copy", f"{COPY_BYTES['cpu'] / 2**30:g} GiB", "none")
    forward, backward = ([r for r in rows if r.phase == phase] for phase in ("forward", "backward"))
    assert {r.gate for r in forward} == {"pass"} and {"error", "wall"} < {r.metric for r in forward}
    assert [(r.metric, r.gate) for r in backward] == [("error", "fail")]


def test_a_peers_rows_carry_its_version(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: {"fla-core": "9.8.7"}[name])
    assert Fla().note == "fla-core 9.8.7"


@pytest.mark.parametrize("broken", [None, "dense", "packed"])
def test_dense_and_packed_rows_are_each_held_against_the_closed_form(no_graphs, broken):
    case = make_case(Shape(1, 3000, 2, 1, 16, 16), torch.float32, "cpu")

    def forward(*arguments):
        mine = "dense" if arguments[-1] is None else "packed"
        return wrong(torch_backend.forward, 0 if mine == broken else None)(*arguments)

    backend = SimpleNamespace(forward=forward, backward=torch_backend.backward)
    rows = bench_packed.measure_case("any", case, 1, backend, records.provenance())
    found = {(r.provider, r.metric): r for r in rows if r.phase == "forward"}
    for layout in ("dense", "packed"):
        assert found[layout, "error"].gate == ("fail" if layout == broken else "pass")
        assert ((layout, "kernel") in found) == (layout != broken)
    cu = bench_packed.offsets(3000)
    note = f"{len(cu) - 1} sequences of {3000 / (len(cu) - 1):.0f} tokens on average"
    assert {(r.dtype, r.note) for r in rows} == {("float32", note)}


@pytest.mark.parametrize("name", [("gates", "both"), ("wy_fast", "forward"), ("wy_fast", "backward")])
@pytest.mark.parametrize("broken", [False, True])
def test_a_gate_layout_is_held_against_the_closed_form_and_the_other_layout(
    no_graphs, monkeypatch, name, broken
):
    case = make_case(Shape(2, 100, 4, 4, 16, 16), torch.float32, "cpu")
    k, v, beta, A, g = case.inputs

    def calls(case, contiguous):
        """What the kernels return, by the torch backend, their gates in the layout asked for."""

        def stored(results):
            return tuple(x.mT.contiguous() if contiguous and x.dim() == 3 else x for x in results)

        made = {
            ("gates", "both"): lambda: (g.exp(),),
            ("wy_fast", "forward"): lambda: torch_backend.forward(k, v, beta, A, g, None, None),
            ("wy_fast", "backward"): lambda: torch_backend.backward(
                k, v, beta, A, g, case.dw, case.du, None
            ),
        }
        if broken:
            made[name] = lambda right=made[name]: wrong(right, 0)()
        return {n: lambda f=f: stored(f()) for n, f in made.items()}

    monkeypatch.setattr(bench_gates, "layout_calls", calls)
    if broken:
        with pytest.raises(RuntimeError, match=f"{name[0]}.*{name[1]}.* not within their tolerance"):
            bench_gates.measure_heads(case, 1)
        return
    samples, found = bench_gates.measure_heads(case, 1)
    assert set(samples) == set(found)
    assert {n: x for n, x in found.items() if x != "pass"} == {("transpose", "both", "g and beta"): "none"}


def test_two_layouts_that_differ_are_noticed_though_both_are_in_tolerance(no_graphs, monkeypatch):
    case = make_case(Shape(1, 64, 2, 2, 16, 16), torch.float32, "cpu")
    calls = lambda case, contiguous: {("gates", "both"): lambda: (case.g.exp() + 1e-7 * contiguous,)}  # noqa: E731
    monkeypatch.setattr(bench_gates, "layout_calls", calls)
    with pytest.raises(RuntimeError, match="differs between the two gate layouts"):
        bench_gates.measure_heads(case, 1)


@pytest.mark.parametrize("phase, products", [(FORWARD, 2), (BOTH, 2 + 9)])
def test_the_yardstick_on_a_cpu_is_as_many_products_as_its_description_says(phase, products):
    call = PROVIDERS["bare"].passes(make_case(replace(shape_at(64), H=2, Hg=2), torch.float32, "cpu"))[phase]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    assert sum(e.count for e in profile.key_averages() if e.key == "aten::bmm") == products


def test_the_command_of_a_row_is_that_of_the_process():
    code = "from wyfast_lib import records; print(records.provenance()['command'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == records.shlex.join([records.Path(sys.executable).name, "-c", code])


def test_the_record_of_a_test_run_holds_the_worst_outcome_of_each_test(tmp_path):
    recorder = Recorder(str(tmp_path / "rows.csv"))
    phases = {
        "a.py::good": ["passed", "passed", "passed"],
        "a.py::bad[1-2]": ["passed", "failed", "passed"],
        "a.py::absent": ["skipped", "passed"],
        "a.py::torn": ["passed", "passed", "failed"],
    }
    for nodeid, outcomes in phases.items():
        for outcome in outcomes:
            recorder.pytest_runtest_logreport(SimpleNamespace(nodeid=nodeid, outcome=outcome, duration=0.5))
    recorder.pytest_sessionfinish()
    with open(tmp_path / "rows.csv", newline="", encoding="utf-8") as f:
        reader = csv.DictReader(f)
        rows = list(reader)
    assert tuple(reader.fieldnames) == COLUMNS
    assert {r["test"]: (r["outcome"], r["seconds"]) for r in rows} == {
        "good": ("passed", "1.500"), "bad[1-2]": ("failed", "1.500"),
        "absent": ("skipped", "1.000"), "torn": ("failed", "1.500"),
    }  # fmt: skip
    assert {r["commit"] for r in rows} == {records.provenance()["commit"]}
