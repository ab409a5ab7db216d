"""The report for whoever has an NPU, its logic run with the lowered backend: its times mean nothing here."""

import csv
import io
import statistics

import pytest

from wyfast_lib import doctor, npu_report, records
from wyfast_lib.backends import BackendUnavailable
from wyfast_lib.inputs import SHAPES


def test_every_output_is_judged_and_every_shape_is_timed():
    small = [dict(T=32, H=2, Hg=2), dict(T=32, H=2, Hg=1)]
    rows = npu_report.report(
        "lowered", "cpu", timed_shapes=small, widths=dict(K=16, V=16, BT=16), dtypes=("bfloat16",)
    )
    judged = [row for row in rows if row["suite"] == "accuracy"]
    outputs = ("w", "u", "dk", "dv", "dbeta", "dg")
    assert [(row["shape"], row["phase"]) for row in judged] == [
        (f"{heads} {layout}", name)
        for heads in npu_report.HEADS
        for layout in ("dense", "varlen")
        for name in outputs
    ]
    assert all(row["passed"] is True for row in judged)
    timed = {(row["suite"], row["phase"], row["shape"], row["metric"]) for row in rows if row["unit"] == "ms"}
    assert timed == {("source_table", "backward", f"T=32 H=2 {h}", "median") for h in ("MHA", "GQA-2:1")} | {
        ("layout", phase, "T=32 H=2 MHA", f"{layout}_median")
        for phase in ("forward", "backward")
        for layout in ("contiguous", "strided")
    }
    file = io.StringIO()
    npu_report.write(rows, file)
    file.seek(0)
    read = list(csv.DictReader(file))
    assert len(read) == len(rows) and {row["dtype"] for row in read} == {"bfloat16", "float32"}
    origin = records.provenance()
    for row in read:
        assert (row["device"], row["backend"]) == ("cpu", "lowered")
        assert all(row[n] == origin[n] for n in ("torch", "commit", "command")), "of this very process"


def test_a_time_is_the_median_of_the_repeats_after_the_warm_up(monkeypatch):
    durations = [100.0] * npu_report.WARM_UP + [float(n) for n in range(npu_report.REPEATS)]
    clock, left = [0.0], iter(durations)

    def call():
        clock[0] += next(left)

    monkeypatch.setattr(npu_report.time, "perf_counter", lambda: clock[0])
    assert npu_report.median_ms(call, "cpu") == 1000 * statistics.median(durations[npu_report.WARM_UP :])
    assert next(left, None) is None


def test_a_timed_shape_is_one_of_the_benchmarks_own_and_named_by_its_sizes():
    named = {npu_report.name(sizes): sizes for sizes in npu_report.SOURCE_SHAPES}
    assert len(named) == len(npu_report.SOURCE_SHAPES)
    trained = {(s.T, s.H, s.Hg) for n, s in SHAPES.items() if n.startswith("train-")}
    assert {tuple(sizes.values()) for sizes in npu_report.SOURCE_SHAPES} == trained
    assert "T=32K H=32 GQA-4:1" in named


def test_without_an_npu_the_reason_is_said(capsys):
    with pytest.raises(BackendUnavailable, match="NPU"):
        npu_report.report()
    parser = doctor.argparse.ArgumentParser()
    doctor.add_arguments(parser)
    assert doctor.main(parser.parse_args(["--npu-report"])) == 1
    assert "NPU" in capsys.readouterr().err
