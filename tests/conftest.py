"""Fixtures: the backends of this machine, their devices, fixed seeds, and memory that starts as NaN."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import hypothesis
import pytest
import torch

from wyfast_lib import backends

sys.path.insert(0, str(Path(__file__).parent))  # for `support`, also from folders below this one

from recorder import Recorder
from support import only

# The same examples in every run: a red pipeline can be repeated. `--hypothesis-profile=explore` searches on.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, max_examples=40, database=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("ci")

# The tensors are small: waking a second thread costs more than it computes. Reproducibility uses two.
torch.set_num_threads(1)

DEVICES = {"torch": "cpu", "lowered": "cpu", "cuda": "cuda", "ascend": "npu"}
DEFAULT_BACKENDS = "torch,lowered,cuda,ascend"


def pytest_addoption(parser):
    parser.addoption(
        "--backends",
        default=DEFAULT_BACKENDS,
        help="comma-separated backends that the operator's tests run on, as far as this machine has them",
    )
    parser.addoption("--record", metavar="CSV", help="write outcomes there: so data/gpu_tests.csv is made")


def runnable(name: str) -> bool:
    """Is this backend part of the package and available on this machine?"""
    found = importlib.util.find_spec(f"wyfast_lib.backends.{name}") is not None
    return found and backends.load(name).available()[0]


def pytest_configure(config):
    config.addinivalue_line("markers", "on_cpu: only for backends that take CPU tensors")
    if config.getoption("--record") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config.getoption("--record")))


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--backends").split(",")
        if metafunc.definition.get_closest_marker("on_cpu"):
            asked = [name for name in asked if DEVICES[name] == "cpu"]
        metafunc.parametrize("backend", [name for name in asked if runnable(name)])


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    """`lowered` compiles for seconds a case: of a grid, every seventh now, the others under `make gate`.

    Seven divides no side of a grid, so those that stay differ in every parameter.
    """
    seen = Counter()
    for item in items:
        if item.get_closest_marker("grid") and item.callspec.params.get("backend") == "lowered":
            if seen[item.originalname] % 7:
                item.add_marker("gate")
            seen[item.originalname] += 1


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test that is given a backend asks it, and never computes on another one under its name."""
    backend = pyfuncitem.funcargs.get("backend")
    with only(backend) if backend else nullcontext():
        return (yield)


@pytest.fixture
def device(backend) -> str:
    """Where the inputs of this backend live."""
    return DEVICES[backend]


@pytest.fixture(autouse=True)
def same_seed_everywhere():
    """No test depends on which ones ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def memory_starts_as_nan():
    """torch.empty and its kin return NaN, so an element that is never written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
