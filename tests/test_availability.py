"""`available()` of every backend: never raises, and starts no device in a process that may fork."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from wyfast_lib import backends
from wyfast_lib.ascend import toolchain
from wyfast_lib.backends import ascend, cuda, lowered

ROOT = Path(__file__).resolve().parents[1]
BROKEN = [RuntimeError("two\nlines"), OSError("a library is missing"), ValueError(""), SystemExit("it left")]


@pytest.fixture(params=BROKEN, ids=lambda e: type(e).__name__)
def broken(request):
    """A function that fails as broken installations do."""

    def fail(*_, **__):
        raise request.param

    return fail


def assert_a_reason(answer):
    ok, reason = answer
    assert ok is False and isinstance(reason, str) and reason and "\n" not in reason


@pytest.mark.parametrize("name", backends.NAMES)
def test_every_backend_answers_with_a_reason_and_load_does_not_start_it(name):
    ok, reason = backends.load(name).available()
    assert isinstance(ok, bool) and isinstance(reason, str) and reason
    assert backends.availability()[name] == (ok, reason)


@pytest.mark.parametrize("part", ["find_spec", "device_count"])
def test_cuda_makes_a_reason_of_any_failure(monkeypatch, broken, part):
    monkeypatch.setattr(cuda, "INTERPRET", False)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    owner = torch.cuda if part == "device_count" else cuda.importlib.util
    monkeypatch.setattr(owner, part, broken)
    assert_a_reason(cuda.available())


def test_cuda_makes_a_reason_of_a_triton_that_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert_a_reason(cuda.available())


@pytest.mark.parametrize("number", ["3.x", "", "three"])
def test_cuda_makes_a_reason_of_a_version_that_is_no_number(monkeypatch, number):
    import triton

    monkeypatch.setattr(triton, "__version__", number)
    assert_a_reason(cuda.available())


def test_cuda_is_there_again_once_the_cause_is_gone(monkeypatch):
    monkeypatch.setattr(cuda, "INTERPRET", False)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert cuda.available() == (False, "no CUDA device")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ok, reason = cuda.available()
    assert ok and reason.endswith("on 2 CUDA devices")


class Npu:
    """torch.npu as torch_npu makes it."""

    def __init__(self, is_available, device_count):
        self.is_available, self.device_count = is_available, device_count


@pytest.mark.parametrize("part", ["is_available", "device_count", "find_spec"])
def test_ascend_makes_a_reason_of_any_failure(monkeypatch, broken, part):
    parts = {"is_available": lambda: True, "device_count": lambda: 1, "find_spec": lambda name: name}
    parts[part] = broken
    monkeypatch.setattr(ascend.importlib.util, "find_spec", parts.pop("find_spec"))
    monkeypatch.setattr(torch, "npu", Npu(**parts), raising=False)
    assert_a_reason(ascend.available())


def test_lowered_makes_a_reason_of_any_failure(monkeypatch, broken):
    monkeypatch.setattr(toolchain, "available", broken)
    assert_a_reason(lowered.available())


def test_a_backend_whose_check_fails_is_unavailable_and_not_a_crash(monkeypatch, broken):
    monkeypatch.setattr(toolchain, "available", broken)
    monkeypatch.setattr(backends, "_ready", {})
    with pytest.raises(backends.BackendUnavailable, match="backend 'lowered' is not available"):
        backends.pick("cpu", "lowered")


FORKING = """
import os, sys
import torch
from wyfast_lib import backends

def touched(*_, **__):
    raise SystemExit("the CUDA runtime was asked")

# What starts CUDA, or makes it unusable in a forked process. NVML, which counts devices, stays.
for name in ("_cuda_init", "_cuda_getDeviceCount", "_cuda_getDevice", "_cuda_setDevice"):
    if hasattr(torch._C, name) and torch.cuda.is_initialized() is False and (
        name != "_cuda_getDeviceCount" or torch.cuda._device_count_nvml() >= 0
    ):
        setattr(torch._C, name, touched)
torch.cuda.get_device_name = torch.cuda.get_device_properties = torch.cuda.current_device = touched
answers = backends.availability()
assert set(answers) == set(backends.NAMES) and answers["torch"][0]
assert not torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    os._exit(int(torch.cuda._is_in_bad_fork() or torch.cuda.is_initialized()))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_asking_starts_no_cuda_and_a_forked_process_can_still_use_it():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", FORKING], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr or result.stdout
