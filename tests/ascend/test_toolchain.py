"""The toolchain's directory, its installation, and what a machine without it is told."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from wyfast_lib.ascend import ToolchainMissing, cli, compile_kernel, toolchain
from wyfast_lib.kernels import teaching

COPY = {"x": "*fp32", "y": "*fp32", "T": "i32"}


@pytest.fixture
def nothing_installed(tmp_path, monkeypatch):
    monkeypatch.delenv("WYFAST_ASCEND_TOOLCHAIN", raising=False)
    monkeypatch.setenv("WYFAST_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def stand_in_pip(monkeypatch):
    """Replaces pip: makes the directories that a complete installation has, after `delay` seconds."""
    calls = []

    def run(command, **options):
        target = Path(command[command.index("--target") + 1])
        calls.append(target)
        time.sleep(stand_in.delay)
        for part in stand_in.parts:
            (target / part).parent.mkdir(parents=True, exist_ok=True)
            (target / part).write_text("")
        for pin in toolchain.pins():
            name, _, version = pin.partition("==")
            (target / f"{name.replace('-', '_')}-{version}.dist-info").mkdir(parents=True)
        return subprocess.CompletedProcess(command, stand_in.status)

    stand_in = type("StandIn", (), {})()
    stand_in.calls, stand_in.delay, stand_in.status = calls, 0.0, 0
    stand_in.parts = ["triton/backends/ascend/triton-adapter-opt", "ascendnpuir/bin/bishengir-compile"]
    monkeypatch.setattr(toolchain.subprocess, "run", run)
    return stand_in


# ---- the real one ----


def test_the_toolchain_is_installed_and_holds_every_pin():
    path = toolchain.locate()  # the message of a failure names the command that installs it
    assert toolchain._problem(path) is None
    assert toolchain.available() == (True, str(path))


def test_the_worker_has_the_ascend_triton_and_this_process_keeps_its_own():
    import triton

    path = toolchain.locate()
    compile_kernel(teaching.copy_kernel, COPY, {"BT": 64}, cache=False)
    assert not Path(triton.__file__).is_relative_to(path)
    with pytest.raises(RuntimeError, match="imported already"):
        toolchain.activate()


def test_importing_needs_torch_only_and_activate_then_brings_the_ascend_triton():
    code = (
        "import sys; sys.modules['numpy'] = None\n"  # torch itself imports numpy when it can
        "import wyfast_lib, wyfast_lib.ascend\n"
        "print([name for name in ('triton', 'filelock', 'matplotlib') if name in sys.modules])\n"
        "del sys.modules['numpy']\n"
        "from wyfast_lib.ascend import toolchain; path = toolchain.activate(); import triton\n"
        "from pathlib import Path; assert Path(triton.__file__).is_relative_to(path)\n"
        "assert triton.__version__.startswith('3.2.'); assert toolchain.activate() == path; print('right')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[:2] == ["[]", "right"], done.stderr


# ---- a machine without it ----


def test_without_the_toolchain_the_error_names_the_install_command(nothing_installed):
    with pytest.raises(
        ToolchainMissing, match="python -m wyfast_lib ascend install"
    ):  # a live worker is left
        compile_kernel(teaching.copy_kernel, COPY, {"BT": 64}, cache=False)
    ready, reason = toolchain.available()
    assert not ready and "python -m wyfast_lib ascend install" in reason


def test_an_incomplete_directory_in_the_variable_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WYFAST_ASCEND_TOOLCHAIN", str(tmp_path))
    with pytest.raises(ToolchainMissing, match="WYFAST_ASCEND_TOOLCHAIN.*has no triton"):
        toolchain.locate()


@pytest.mark.parametrize(
    ("system", "machine", "version", "words"),
    [
        ("darwin", "arm64", (3, 11, 9), "Linux on x86-64 and aarch64 only"),
        ("linux", "riscv64", (3, 11, 9), "Linux on x86-64 and aarch64 only"),
        ("linux", "x86_64", (3, 12, 1), "CPython 3.9 to 3.11 only"),
        ("linux", "aarch64", (3, 10, 1), None),
    ],
)
def test_a_platform_without_wheels_is_told_so(system, machine, version, words, monkeypatch):
    monkeypatch.setattr(toolchain.sys, "platform", system)
    monkeypatch.setattr(toolchain.platform, "machine", lambda: machine)
    monkeypatch.setattr(toolchain.sys, "version_info", version)
    problem = toolchain.platform_problem()
    assert problem is None if words is None else words in problem


# ---- installing ----


def test_an_installation_appears_whole_or_not_at_all(nothing_installed, stand_in_pip):
    stand_in_pip.status = 1
    with pytest.raises(ToolchainMissing, match="status 1"):
        toolchain.install(report=lambda line: None)
    assert not toolchain.directory().exists() and not toolchain.available()[0]
    stand_in_pip.status = 0
    path = toolchain.install(report=lambda line: None)
    assert path == toolchain.directory() == toolchain.locate()
    assert sorted(entry.name for entry in nothing_installed.iterdir() if entry.is_dir()) == [path.name]


def test_an_interrupted_installation_is_started_anew(nothing_installed, stand_in_pip):
    leftover = toolchain.directory().with_name(toolchain.directory().name + ".partial")
    (leftover / "triton").mkdir(parents=True)
    (leftover / "triton" / "half_a_file").write_text("")
    path = toolchain.install(report=lambda line: None)
    assert not (path / "triton" / "half_a_file").exists()


def test_two_installers_at_once_install_once(nothing_installed, stand_in_pip):
    stand_in_pip.delay = 0.5
    lines = []
    threads = [threading.Thread(target=toolchain.install, args=(lines.append,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stand_in_pip.calls) == 1
    assert any("waiting" in line for line in lines)


def test_other_pins_get_another_directory(nothing_installed, monkeypatch):
    before = toolchain.directory()
    monkeypatch.setattr(toolchain, "pins", lambda: ("triton-ascend==9.9.9",))
    assert toolchain.directory() != before


# ---- command line ----


def ascend(*words):
    import argparse

    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.main(parser.parse_args(words))


def test_the_command_line_compiles_a_readers_own_kernel(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(
        "import triton, triton.language as tl\n\n@triton.jit\ndef scale(x, s, N: tl.constexpr):\n"
        "    o = tl.arange(0, N)\n    tl.store(x + o, tl.load(x + o) * s)\n"
    )
    monkeypatch.chdir(tmp_path)
    for kernel in ("mine:scale", "mine.py:scale"):
        words = ("compile", kernel, "--signature", "x=*fp32, s=fp32", "--constexpr", "N=64", "--save", "out")
        assert ascend(*words) == 0
    assert "scale for Ascend910B2: vector only" in capsys.readouterr().out
    assert (tmp_path / "out" / "scale.hivm.mlir").is_file()


def test_the_command_line_reports_an_error_in_one_line_and_status_one(capsys):
    words = (
        "compile",
        "wyfast_lib.kernels.teaching:copy_kernel",
        "--signature",
        "x=*fp32",
        "--constexpr",
        "BT=64",
    )
    assert ascend(*words) == 1
    assert capsys.readouterr().err.startswith("ValueError: signature: the type of y is missing")
    assert ascend("compile", "nothing:here") == 1
    assert "no module nothing" in capsys.readouterr().err


def test_values_on_the_command_line_are_python_literals():
    parsed = cli.parse_values(["BT=64, USE_G=True", "gk=None, MODE=fast"])
    assert parsed == {"BT": 64, "USE_G": True, "gk": None, "MODE": "fast"}
    assert cli.parse_pairs(["x=*bf16, T:i32"]) == {"x": "*bf16", "T": "i32"}
    with pytest.raises(ValueError, match="NAME=VALUE"):
        cli.parse_pairs(["x"])
