"""The environments that the README promises, made from nothing; minutes and gigabytes: `make gate` only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.gate

ROOT = Path(__file__).resolve().parents[2]
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
NUMERIC_CALL = """
import sys
import torch
brought_by_torch = set(sys.modules)
import wyfast_lib
from wyfast_lib.inputs import Shape, make_inputs
from wyfast_lib.reference import wy_fast_reference
from wyfast_lib.testing import error_ratio
x = make_inputs(Shape(B=1, T=40, H=2, Hg=1, K=8, V=12, BT=16))
outputs = wyfast_lib.wy_fast(*x.call)
worst = max(map(error_ratio, outputs, wy_fast_reference(*x.call)))
assert worst <= 2e-6, worst
new = {name.partition(".")[0] for name in set(sys.modules) - brought_by_torch}
assert not new & {"triton", "torch_npu", "matplotlib", "numpy"}, new
print(wyfast_lib.__file__)
"""


def run(command, cwd, expected=0, minutes=2, **variables):
    """Run a command without this process's own Python settings; returns its output, stderr included."""
    ours = ("PYTHON", "WYFAST_", "TORCH_DEVICE", "VIRTUAL_ENV")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)} | variables
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, text=True, timeout=60 * minutes,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == expected, done.stdout[-4000:]
    return done.stdout


def new_environment(folder: Path) -> Path:
    """A fresh virtual environment; returns its interpreter."""
    run([sys.executable, "-m", "venv", folder], cwd=folder.parent)
    return folder / "bin" / "python"


def install(python: Path, *arguments, cwd: Path) -> None:
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, *arguments], cwd=cwd, minutes=30)


def test_an_installed_package_without_a_clone_can_install_the_toolchain(tmp_path):
    """The pins travel with the wheel; the installation itself would take a gigabyte and is not made here."""
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".venv*", ".git", "build", ".w*", ".gpu"))
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, source]
    run(wheel, cwd=tmp_path, minutes=10)
    (found,) = tmp_path.glob("wyfast-*.whl")
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, found]
    run(command, cwd=tmp_path)
    shutil.rmtree(source)
    code = (
        "import subprocess, sys\n"
        "from wyfast_lib.ascend import toolchain\n"
        "asked = []\n"
        "def run(command, **_):\n"
        "    asked.append(command)\n"
        "    return subprocess.CompletedProcess(command, 1)\n"
        "subprocess.run = run\n"
        "try: toolchain.install(print)\n"
        "except toolchain.ToolchainMissing as problem: print(problem)\n"
        "print(toolchain.__file__, *asked[0])\n"
    )
    cache = {"PYTHONPATH": str(target), "WYFAST_CACHE": str(tmp_path / "cache")}
    output = run([sys.executable, "-c", code], cwd=tmp_path, **cache)
    assert str(target) in output and "triton-ascend==" in output and "pip ended with status 1" in output
    pins = target / "wyfast_lib" / "ascend" / "requirements-ascend.txt"
    assert f"-r {pins}" in output and "ascendnpu-ir==" in pins.read_text()


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """The files that git knows, as they are now: building must leave the work tree clean."""
    target = tmp_path_factory.mktemp("clone") / "wyfast"
    files = run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT)
    for name in files.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


@pytest.fixture(scope="module")
def torch_alone(clone, tmp_path_factory) -> Path:
    """An environment with the built wheel and what it requires, at the versions of requirements.txt."""
    folder = tmp_path_factory.mktemp("wheel")
    python = new_environment(folder / "environment")
    pip = [python, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    run([*pip, "--wheel-dir", folder, clone], cwd=folder, minutes=5)
    (wheel,) = folder.glob("wyfast-*.whl")
    install(python, wheel, "--constraint", clone / "requirements.txt", cwd=folder)
    return python


@pytest.fixture(scope="module")
def with_torch_npu(clone, tmp_path_factory) -> Path:
    """An environment with the pip section of environment.yml: torch_npu is in it, CANN is not."""
    folder = tmp_path_factory.mktemp("conda")
    python = new_environment(folder / "environment")
    dependencies = yaml.safe_load((clone / "environment.yml").read_text())["dependencies"]
    (section,) = [d["pip"] for d in dependencies if isinstance(d, dict)]
    listed = folder / "section.txt"  # conda, too, hands the section to pip as a requirements file
    listed.write_text("\n".join(section).replace("-r ", f"-r {clone}/").replace("-e .", f"-e {clone}"))
    install(python, "--requirement", listed, cwd=clone)
    return python


@pytest.mark.xdist_group("wheel")
def test_the_wheel_needs_torch_alone_and_computes_right(torch_alone, tmp_path):
    where = run([torch_alone, "-c", NUMERIC_CALL], cwd=tmp_path).split()[-1]
    assert Path(where).is_relative_to(torch_alone.parents[1]), "the wheel was tested, not the source tree"
    listed = run([torch_alone, "-m", "pip", "list", "--format=freeze"], cwd=tmp_path).lower()
    for package in ("matplotlib", "jupyterlab", "pytest", "triton-ascend", "torch_npu"):
        assert f"{package}==" not in listed


@pytest.mark.xdist_group("wheel")
def test_the_doctor_is_content_with_the_wheel(torch_alone, tmp_path):
    report = run([torch_alone, "-m", "wyfast_lib", "doctor"], cwd=tmp_path)
    assert "backend    torch: available" in report
    assert report.rstrip().endswith("all checks passed")


@pytest.mark.xdist_group("torch_npu")
def test_torch_imports_beside_torch_npu_without_cann_when_autoload_is_off(with_torch_npu, tmp_path):
    assert run([with_torch_npu, "-m", "pip", "show", "torch_npu"], cwd=tmp_path)
    call = "import torch, wyfast_lib; torch.ones(3).sum()"
    run([with_torch_npu, "-c", call], tmp_path, **{AUTOLOAD: "0"})


@pytest.mark.xdist_group("torch_npu")
def test_the_doctor_is_content_beside_torch_npu_when_autoload_is_off(with_torch_npu, tmp_path):
    report = run([with_torch_npu, "-m", "wyfast_lib", "doctor"], tmp_path, **{AUTOLOAD: "0"})
    assert report.rstrip().endswith("all checks passed")
    assert "torch_npu is installed but does not load" in report


@pytest.mark.xdist_group("torch_npu")
def test_the_doctor_explains_what_to_do_when_autoload_is_on_and_cann_is_missing(with_torch_npu, tmp_path):
    report = run([with_torch_npu, "-m", "wyfast_lib", "doctor"], tmp_path, expected=1)
    assert "backend extension" in report
    assert f"set {AUTOLOAD}=0" in report
    assert "Traceback" not in report
