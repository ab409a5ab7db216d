"""The doctor and the caller's WYFAST_* variables: what they spoil is said, and is not well (row 48)."""

import json
import re
from pathlib import Path

import pytest

import wyfast_lib
from wyfast_lib import __main__ as cli
from wyfast_lib import doctor


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in doctor.VARIABLES:
        if name != "WYFAST_CACHE":  # where this machine keeps the toolchain
            monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run_doctor(capsys, monkeypatch):
    def run(*arguments):
        monkeypatch.setattr("wyfast_lib.devices.device_names", lambda: {"cpu": "2 threads"})
        status = cli.main(["doctor", *arguments])
        return status, capsys.readouterr().out

    return run


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr("wyfast_lib.backends.cuda.available", lambda: (False, "no CUDA device"))


BAD = {
    "a backend without its device": ("WYFAST_BACKEND", "cuda", "every call raises, no CUDA device"),
    "another one": ("WYFAST_BACKEND", "ascend", "every call raises, torch sees no NPU"),
    "an unknown backend": ("WYFAST_BACKEND", "gpu", "it must be one of torch, cuda, ascend, lowered"),
    "a backend in capitals": ("WYFAST_BACKEND", "CUDA", "it must be one of torch, cuda, ascend, lowered"),
    "an unknown precision": ("WYFAST_FLOAT32_PRECISION", "tf19", "must be 'ieee' or 'tf32', got 'tf19'"),
    "a toolchain that is none": ("WYFAST_ASCEND_TOOLCHAIN", "/nowhere", "/nowhere has no triton"),
    "an unknown chip": ("WYFAST_LOWERED_TARGET", "Ascend1", "expected one of .*, got 'Ascend1'"),
}


@pytest.mark.parametrize("name, value, message", BAD.values(), ids=BAD)
def test_48_a_setting_that_makes_calls_fail_is_said_and_fails(
    run_doctor, no_gpu, monkeypatch, name, value, message
):
    monkeypatch.setenv(name, value)
    status, text = run_doctor()
    assert status == 1 and text.rstrip().endswith("NOT WELL: see above")
    (line,) = [line for line in text.splitlines() if line.startswith("setting ")]
    assert name in line and re.search(message, line)
    assert "do not trust" not in text, "a wrong setting is no fault of a backend"
    assert f"variable   {name}={value}" in text
    status, text = run_doctor("--json")
    report = json.loads(text)
    assert status == 1 and report["ok"] is False and re.search(message, report["settings"][0])


def test_48_a_forced_backend_that_has_no_device_to_check_fails(run_doctor, monkeypatch):
    monkeypatch.setattr("wyfast_lib.backends.cuda.available", lambda: (True, "switched on"))
    monkeypatch.setenv("WYFAST_BACKEND", "cuda")
    status, text = run_doctor()
    assert status == 1 and "WYFAST_BACKEND=cuda: nothing could be checked" in text


@pytest.mark.parametrize(
    "name, value",
    [("WYFAST_BACKEND", "torch"), ("WYFAST_BACKEND", ""), ("WYFAST_FLOAT32_PRECISION", "tf32")],
)
def test_48_a_setting_that_fits_passes(run_doctor, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    status, text = run_doctor()
    assert status == 0 and text.rstrip().endswith("all checks passed")
    assert json.loads(run_doctor("--json")[1])["settings"] == []


def test_48_a_misspelt_variable_is_a_hint(run_doctor, monkeypatch):
    monkeypatch.setenv("WYFAST_BACKENDS", "torch")
    status, text = run_doctor()
    assert status == 0
    assert "hint       WYFAST_BACKENDS is no variable of wyfast, it has no effect" in text


def test_48_the_doctor_knows_every_variable_that_the_package_reads():
    sources = Path(wyfast_lib.__file__).parent.rglob("*.py")
    read = {name for path in sources for name in re.findall(r"WYFAST_[A-Z0-9_]+[A-Z0-9]", path.read_text())}
    assert read == doctor.VARIABLES
