"""The report for whoever has an NPU, its logic run with the lowered backend: its times mean nothing here."""

import csv
import io

import pytest

from wyfast_lib import doctor, npu_report
from wyfast_lib.backends import BackendUnavailable


def test_every_output_is_judged_and_every_shape_is_timed():
    small = {"one": dict(T=32, H=2, Hg=2), "two": dict(T=32, H=2, Hg=1)}
    rows = npu_report.report(
        "lowered", "cpu", timed_shapes=small, widths=dict(K=16, V=16, BT=16), dtypes=("bfloat16",)
    )
    judged = [row for row in rows if row["suite"] == "accuracy"]
    assert len(judged) == 3 * 2 * 6 and all(row["passed"] is True for row in judged)
    timed = {(row["suite"], row["phase"], row["shape"], row["metric"]) for row in rows if row["unit"] == "ms"}
    assert timed == {("source_table", "backward", name, "median") for name in small} | {
        ("layout", phase, "one", f"{layout}_median")
        for phase in ("forward", "backward")
        for layout in ("contiguous", "strided")
    }
    file = io.StringIO()
    npu_report.write(rows, file)
    file.seek(0)
    assert [row["device"] for row in csv.DictReader(file)] == ["cpu"] * len(rows)


def test_the_source_documents_five_shapes_and_protocol_are_the_default():
    assert len(npu_report.SOURCE_SHAPES) == 5
    assert (npu_report.WARM_UP, npu_report.REPEATS) == (3, 10)
    calls = []
    assert npu_report.median_ms(lambda: calls.append(1), "cpu") >= 0
    assert len(calls) == 13


def test_without_an_npu_the_reason_is_said(capsys):
    with pytest.raises(BackendUnavailable, match="NPU"):
        npu_report.report()
    parser = doctor.argparse.ArgumentParser()
    doctor.add_arguments(parser)
    assert doctor.main(parser.parse_args(["--npu-report"])) == 1
    assert "NPU" in capsys.readouterr().err
