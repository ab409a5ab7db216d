"""The files that describe the environment agree with each other and with the package."""

import re
from pathlib import Path

import pytest
import yaml

import wyfast_lib
import wyfast_lib.ascend.toolchain

tomllib = pytest.importorskip("tomllib", reason="in the standard library since Python 3.11")

ROOT = Path(__file__).resolve().parent.parent
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.+]*)(?: *; *(.+))?$")
PYTHON = "3.11"
TOOLCHAIN = "wyfast_lib/ascend/requirements-ascend.txt"  # package data, so that an installed package has it


def read(name: str) -> str:
    return (ROOT / name).read_text()


def lines(name: str) -> list[str]:
    text = (line.strip() for line in read(name).splitlines())
    return [line for line in text if line and not line.startswith("#")]


def pins(name: str) -> dict[str, str]:
    """{normalised package: version}; fails on a line that is no exact pin."""
    found = {}
    for line in lines(name):
        match = PIN.match(line)
        assert match, f"{name}: {line!r} is not an exact pin"
        package = normal(match[1])
        assert package not in found, f"{name} pins {package} twice"
        found[package] = match[2]
    return found


def normal(requirement: str) -> str:
    """'PyYAML>=6' -> 'pyyaml'"""
    return re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", requirement)[0]).lower()


def project() -> dict:
    return tomllib.loads(read("pyproject.toml"))


def environment() -> dict:
    return yaml.safe_load(read("environment.yml"))


def conda_and_pip() -> tuple[list[str], list[str]]:
    dependencies = environment()["dependencies"]
    conda = [d for d in dependencies if isinstance(d, str)]
    pip = [d["pip"] for d in dependencies if isinstance(d, dict)]
    assert len(pip) == 1, "one pip section"
    return conda, pip[0]


def test_the_environment_is_pinned_exactly():
    assert len(pins("requirements.txt")) >= 10


def test_torch_and_triton_are_the_pair_that_belongs_together():
    environment = pins("requirements.txt")
    assert environment["torch"] == "2.13.0" and environment["triton"] == "3.7.1"
    (triton,) = [line for line in lines("requirements.txt") if line.startswith("triton")]
    assert PIN.match(triton)[3] == 'sys_platform == "linux"', "PyPI has Triton for Linux only"


def test_the_ascend_toolchain_is_pinned_in_its_own_file_only():
    assert lines("requirements-ascend.txt") == [f"-r {TOOLCHAIN}"]
    ascend = pins(TOOLCHAIN)
    assert "triton-ascend" in ascend and "ascendnpu-ir" in ascend
    assert not {"torch", "triton"} & set(ascend)
    for name in ("requirements.txt", "environment.yml", "pyproject.toml"):
        requirements = "\n".join(line.partition("#")[0] for line in read(name).splitlines())
        assert "triton-ascend" not in requirements and "triton_ascend" not in requirements, name


def test_the_pins_of_the_toolchain_are_package_data():
    data = project()["tool"]["setuptools"]["package-data"]["wyfast_lib"]
    assert TOOLCHAIN.removeprefix("wyfast_lib/") in data
    assert tuple(lines(TOOLCHAIN)) == wyfast_lib.ascend.toolchain.pins()


def test_the_environment_holds_every_package_of_the_extras():
    declared = project()["project"]
    pinned = set(pins("requirements.txt"))
    for extra in ("cuda", "notebooks", "test"):
        missing = {normal(r) for r in declared["optional-dependencies"][extra]} - pinned
        assert not missing, f"extra {extra}: {missing} not in requirements.txt"
    assert [normal(r) for r in declared["dependencies"]] == ["torch"]


def test_the_environment_holds_nothing_that_no_extra_asks_for():
    declared = project()["project"]
    asked = {normal(r) for extra in declared["optional-dependencies"].values() for r in extra}
    assert set(pins("requirements.txt")) <= asked | {normal(r) for r in declared["dependencies"]}


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def test_pins_satisfy_the_lower_bounds_of_the_package():
    declared, pinned = project()["project"], pins("requirements.txt")
    requirements = declared["dependencies"] + sum(declared["optional-dependencies"].values(), [])
    bounds = [r for r in requirements if ">=" in r]
    assert bounds
    for requirement in bounds:
        assert version(pinned[normal(requirement)]) >= version(requirement.split(">=")[1]), requirement


def test_the_conda_environment_takes_the_same_list():
    conda, pip = conda_and_pip()
    assert f"python={PYTHON}" in conda
    assert {normal(d) for d in conda} <= {"python", "pip", "make"}, "packages come from requirements.txt"
    assert pip[:2] == ["-r requirements.txt", "-e ."]
    assert [normal(d) for d in pip[2:]] == ["torch-npu"]


def test_torch_npu_follows_torch_and_does_not_load_by_itself():
    _, pip = conda_and_pip()
    match = re.match(r"torch_npu==([0-9.]+)", pip[2])
    assert match, "torch_npu is pinned exactly"
    major_minor = version(match[1])[:2]
    assert major_minor == version(pins("requirements.txt")["torch"])[:2]
    assert str(environment()["variables"]["TORCH_DEVICE_BACKEND_AUTOLOAD"]) == "0"
    assert re.search(r"^export TORCH_DEVICE_BACKEND_AUTOLOAD := 0$", read("Makefile"), re.M)


def test_one_python_version_everywhere():
    assert re.search(rf"^PYTHON \?= python{re.escape(PYTHON)}$", read("Makefile"), re.M)
    oldest = project()["project"]["requires-python"]
    assert version(oldest) <= version(PYTHON)
    target = project()["tool"]["ruff"]["target-version"]
    assert target == "py" + "".join(str(n) for n in version(oldest))


def test_the_version_is_written_once():
    declared = project()
    assert declared["project"]["dynamic"] == ["version"] and "version" not in declared["project"]
    attribute = declared["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    assert attribute == "wyfast_lib.version.__version__"
    assert re.fullmatch(r"\d+\.\d+\.\d+\w*", wyfast_lib.__version__)
    assert wyfast_lib.__version__ in read("wyfast_lib/version.py")


def test_the_package_is_typed_and_licensed():
    declared = project()
    assert (ROOT / "wyfast_lib" / "py.typed").exists()
    assert declared["tool"]["setuptools"]["package-data"]["wyfast_lib"][0] == "py.typed"
    assert declared["project"]["license"] == "MIT" and read("LICENSE").startswith("MIT License")


def rule(target: str) -> str:
    """Prerequisites and recipe of a Makefile rule."""
    match = re.search(rf"^{re.escape(target)}:(.*(?:\n\t.*)*)", read("Makefile"), re.M)
    assert match, f"Makefile has no target {target}"
    return match[1]


def test_the_two_commands_do_what_the_readme_promises():
    assert "-r requirements.txt" in rule("$(STAMP)") and "--editable ." in rule("$(STAMP)")
    assert "env" in rule("toolchain").split() and "-m wyfast_lib ascend install" in rule("toolchain")
    assert "toolchain" in rule("notebooks").split() and "-m wyfast_lib notebooks" in rule("notebooks")
    assert "unit" in rule("test").split() and "pytest --nbmake notebooks" in rule("test")
    assert "toolchain" in rule("unit").split()
    assert "pytest tests" in rule("unit") and "ruff check" in rule("unit")


def test_continuous_integration_calls_the_readmes_command_and_nothing_else():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111, ".ci/run is executable"
    commands = [c for c in lines(".ci/run") if not c.startswith(("set ", "cd "))]
    assert commands == ["make test"]


def test_what_the_commands_make_is_ignored_by_git():
    ignored = set(lines(".gitignore"))
    assert {".venv/", "build/", "*.egg-info/", "__pycache__/", ".pytest_cache/", ".hypothesis/"} <= ignored
