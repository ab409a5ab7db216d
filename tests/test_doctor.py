"""The doctor: right about healthy machines, right about sick ones, and never a traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from wyfast_lib import __main__ as cli
from wyfast_lib import doctor
from wyfast_lib.backends import NAMES
from wyfast_lib.backends import torch as torch_backend

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def only_the_torch_backend_on_the_cpu(monkeypatch):
    """The other backends, and other devices, have tests of their own."""
    monkeypatch.setattr("wyfast_lib.backends.NAMES", ("torch",))
    monkeypatch.setattr("wyfast_lib.devices.device_names", lambda: {"cpu": "2 threads"})


@pytest.fixture
def run_doctor(capsys):
    def run(*arguments):
        status = cli.main(["doctor", *arguments])
        return status, capsys.readouterr().out

    return run


def run_beside(folder, *arguments):
    """The doctor in a process where `folder` comes first on the path."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    command = [sys.executable, "-m", "wyfast_lib", "doctor", *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def fake_module(folder, name, body):
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(body)


def fake_package(folder, name, version="1.0"):
    """Metadata only: to `importlib.metadata` the package is installed."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_a_healthy_machine_passes_with_exit_status_0(only_the_torch_backend_on_the_cpu, run_doctor):
    status, text = run_doctor()
    assert status == 0
    assert "backend    torch: available" in text
    for dtype in doctor.CHECK_DTYPES:
        assert f"cpu {dtype}: pass, largest error ratio" in text
    assert text.rstrip().endswith("all checks passed")


def test_json_holds_versions_devices_and_every_output_and_gradient_of_every_check(
    only_the_torch_backend_on_the_cpu, run_doctor
):
    status, text = run_doctor("--json")
    report = json.loads(text)
    assert status == 0 and report["ok"] is True
    assert report["packages"]["torch"] and report["python"] and report["devices"] == {"cpu": "2 threads"}
    (backend,) = report["backends"]
    assert [check["dtype"] for check in backend["checks"]] == list(doctor.CHECK_DTYPES)
    for check in backend["checks"]:
        assert set(check["errors"]) == {"w", "u", "dk", "dv", "dbeta", "dg"}
        assert all(0 <= error <= check["limit"] for error in check["errors"].values())


@pytest.mark.parametrize("position, name", list(enumerate(("w", "u"))))
def test_a_wrong_output_fails_with_exit_status_1(
    position, name, only_the_torch_backend_on_the_cpu, run_doctor, monkeypatch
):
    right = torch_backend.forward
    wrong = lambda *call: tuple(x * 1.01 if i == position else x for i, x in enumerate(right(*call)))  # noqa: E731
    monkeypatch.setattr(torch_backend, "forward", wrong)
    status, text = run_doctor()
    assert status == 1
    assert f"cpu float32: FAIL, largest error ratio 1.0e-02 ({name})" in text
    assert "do not trust backend 'torch' on cpu in float32" in text
    assert text.rstrip().endswith("NOT WELL: see above")


@pytest.mark.parametrize("position, name", list(enumerate(("dk", "dv", "dbeta", "dg"))))
def test_a_wrong_gradient_fails_with_exit_status_1(
    position, name, only_the_torch_backend_on_the_cpu, run_doctor, monkeypatch
):
    right = torch_backend.backward
    wrong = lambda *call: tuple(x * 1.01 if i == position else x for i, x in enumerate(right(*call)))  # noqa: E731
    monkeypatch.setattr(torch_backend, "backward", wrong)
    status, text = run_doctor()
    assert status == 1 and f"({name})" in text


def test_nan_is_named_and_the_json_stays_valid(only_the_torch_backend_on_the_cpu, run_doctor, monkeypatch):
    right = torch_backend.forward
    monkeypatch.setattr(torch_backend, "forward", lambda *call: tuple(x * float("nan") for x in right(*call)))
    status, text = run_doctor("--json")
    checks = json.loads(text, parse_constant=pytest.fail)["backends"][0]["checks"]
    assert status == 1
    assert all(check["problem"] == "NaN or infinity in w, u" for check in checks)


def test_a_backend_that_raises_is_reported_in_one_line(
    only_the_torch_backend_on_the_cpu, run_doctor, monkeypatch
):
    def crash(*call):
        raise RuntimeError("the card is on fire\nsecond line")

    monkeypatch.setattr(torch_backend, "forward", crash)
    status, text = run_doctor()
    assert status == 1
    assert "cpu float32: FAIL, RuntimeError: the card is on fire\n" in text
    assert "second line" not in text and "Traceback" not in text


def test_a_device_whose_own_backend_is_missing_gets_a_hint(monkeypatch, run_doctor):
    class Unavailable:
        @staticmethod
        def available():
            return False, "triton is not installed"

    monkeypatch.setattr("wyfast_lib.backends.NAMES", ("cuda",))
    monkeypatch.setattr("wyfast_lib.backends.load", lambda name: Unavailable)
    monkeypatch.setattr("wyfast_lib.devices.device_names", lambda: {"cpu": "", "cuda:0": "a card"})
    _, text = run_doctor()
    assert "wy_fast on cuda tensors raises until this is solved: triton is not installed" in text


def test_every_backend_is_asked_and_an_absent_one_says_so():
    report = doctor.examine_backend("cuda", {"cpu": ""})
    assert report["checks"] == [], "there is no CUDA device to check it on"
    assert {doctor.examine_backend(name, {})["name"] for name in NAMES} == set(NAMES)
    for name in NAMES:
        assert doctor.examine_backend(name, {})["reason"]


def test_without_torch_it_says_how_to_get_it(tmp_path):
    fake_module(tmp_path, "torch", "raise ModuleNotFoundError(\"No module named 'torch'\")")
    result = run_beside(tmp_path)
    assert result.returncode == 1
    assert "import     torch fails: ModuleNotFoundError: No module named 'torch'" in result.stdout
    assert "PyTorch is not installed" in result.stdout
    assert result.stderr == ""


def test_a_torch_that_torch_npu_breaks_gets_the_variable_to_set(tmp_path):
    message = "Failed to load the backend extension: torch_npu. You can disable extension auto-loading"
    fake_module(tmp_path, "torch", f"raise RuntimeError({message!r})")
    result = run_beside(tmp_path)
    assert result.returncode == 1
    assert "set TORCH_DEVICE_BACKEND_AUTOLOAD=0" in result.stdout
    assert result.stderr == ""
    assert json.loads(run_beside(tmp_path, "--json").stdout)["ok"] is False


def test_a_torch_npu_without_cann_and_two_tritons_get_their_hints(tmp_path):
    for name in ("torch-npu", "triton", "triton-ascend"):
        fake_package(tmp_path, name)
    fake_module(tmp_path, "torch_npu", "raise ImportError('libhccl.so: cannot open shared object file')")
    result = run_beside(tmp_path)
    assert result.returncode == 0, "the CPU is well all the same"
    assert "import     torch_npu fails: ImportError: libhccl.so" in result.stdout
    assert "torch_npu is installed but does not load" in result.stdout
    assert "triton and triton-ascend are in one environment" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr
