"""`python -m wyfast_lib`: the table of commands, and what importing the package costs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import wyfast_lib
from wyfast_lib import __main__ as cli

ROOT = Path(__file__).resolve().parents[1]


def run_python(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_version_prints_the_package_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"wyfast {wyfast_lib.__version__}\n"


def test_help_lists_every_command_whose_module_exists_and_no_other(capsys, monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "missing", ("wyfast_lib.no_such_module", "is not there"))
    monkeypatch.setitem(cli.COMMANDS, "deeper", ("wyfast_lib.no_such_package.cli", "is not there either"))
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in cli.commands():
        assert f"  {name} " in text
    assert "missing" not in text and "deeper" not in text


@pytest.mark.parametrize("name", list(cli.commands()))
def test_every_listed_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([name, "--help"])
    assert stopped.value.code == 0
    assert f"python -m wyfast_lib {name}" in capsys.readouterr().out


def test_an_unknown_command_is_refused_with_the_list(capsys):
    assert cli.main(["docter"]) == 2
    assert "no command 'docter'; there are: doctor, notebooks" in capsys.readouterr().err


def test_no_command_at_all_prints_the_help_and_fails(capsys):
    assert cli.main([]) == 2
    assert "usage: python -m wyfast_lib COMMAND" in capsys.readouterr().out


def test_the_module_runs_as_a_program():
    result = run_python("-m", "wyfast_lib", "--version")
    assert (result.returncode, result.stderr) == (0, "")


def test_listing_the_commands_imports_none_of_them():
    code = (
        "import sys; from wyfast_lib import __main__ as m; m.overview(); "
        "print(sorted({'torch', 'matplotlib', 'nbclient', 'triton', 'numpy'} & set(sys.modules)))"
    )
    assert run_python("-c", code).stdout == "[]\n"


def test_importing_the_operator_imports_neither_triton_nor_matplotlib():
    code = (
        "import sys, torch; before = set(sys.modules); from wyfast_lib import wy_fast, wy_factor; "
        "import wyfast_lib.plotting; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new & {'triton', 'matplotlib', 'torch_npu'}))"
    )
    result = run_python("-c", code)
    assert result.stdout == "[]\n", result.stderr


def test_every_public_name_exists_and_an_unknown_one_is_an_attribute_error():
    for name in wyfast_lib.__all__:
        assert getattr(wyfast_lib, name) is not None
        assert name in dir(wyfast_lib)
    with pytest.raises(AttributeError, match="no attribute 'wy_slow'"):
        _ = wyfast_lib.wy_slow
