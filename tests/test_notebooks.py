"""The contract of the workbook, over every notebook in the folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from wyfast_lib import notebooks as runner

ROOT = Path(__file__).resolve().parents[1]
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
HEADINGS = ("What you will learn", "What you need", "What runs where")
SAVED = re.compile(r"""save_figure\(\s*\w+\s*,\s*f?["']([^"']+)["']""")

every_notebook = pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(path):
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def outputs(path):
    return [output for cell in code_cells(path) for output in cell.outputs]


def figures_of(path):
    return [name for cell in code_cells(path) for name in SAVED.findall(cell.source)]


def texts_shown(path):
    """All text that a reader of the committed notebook sees in outputs."""
    for output in outputs(path):
        if output.output_type == "stream":
            yield output.text
        for kind, content in output.get("data", {}).items():
            if kind.startswith("text/"):
                yield content


def test_notebooks_are_numbered_without_gaps_from_00():
    assert [path.stem[:3] for path in PATHS] == [f"{number:02d}_" for number in range(len(PATHS))]


def test_the_readme_lists_exactly_these_notebooks_in_order():
    listed = re.findall(r"^\| \[(\w+)\]\(notebooks/(\w+)\.ipynb\)", (ROOT / "README.md").read_text(), re.M)
    assert listed == [(path.stem, path.stem) for path in PATHS]


@every_notebook
def test_it_is_a_valid_notebook_with_the_plain_kernel_and_no_run_metadata(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec == runner.KERNELSPEC
    assert notebook.metadata.language_info == {"name": "python"}
    for cell in notebook.cells:
        assert "execution" not in cell.metadata
        assert cell.id


@every_notebook
def test_it_is_committed_with_the_outputs_of_one_run(path):
    cells = [cell for cell in code_cells(path) if cell.source.strip()]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert outputs(path), "no cell shows anything"


@every_notebook
def test_no_output_is_an_error_or_a_warning(path):
    assert [o for o in outputs(path) if o.output_type == "error" or o.get("name") == "stderr"] == []


@every_notebook
def test_no_cell_may_be_skipped_fail_or_install(path):
    for cell in code_cells(path):
        assert not {"skip-execution", "raises-exception", "nbmake"} & set(cell.metadata.get("tags", ()))
        assert not re.search(r"^\s*(!|%%?(pip|conda|bash|sh|system)\b)", cell.source, re.M), cell.source
    metadata = read(path).metadata
    assert "execution" not in metadata, "nbmake reads allow_errors and timeout from there"


@every_notebook
def test_the_opening_cell_says_what_you_learn_what_you_need_and_what_runs_where(path):
    first = read(path).cells[0]
    assert first.cell_type == "markdown"
    assert first.source.startswith(f"# {path.stem[:2]}"), "the title begins with the notebook's number"
    found = [first.source.find(heading) for heading in HEADINGS]
    assert -1 not in found and found == sorted(found)


@every_notebook
def test_it_imports_the_library_and_asserts_what_it_says(path):
    source = "\n".join(cell.source for cell in code_cells(path))
    assert re.search(r"^(from|import) wyfast_lib", source, re.M)
    assert re.search(r"^\s*assert |\bcheck_\w+\(", source, re.M)


@every_notebook
def test_every_numbered_equation_is_named_by_a_code_cell(path):
    notebook = read(path)
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    code = "\n".join(cell.source for cell in code_cells(path))
    for number in re.findall(r"\\tag\{(\w+)\}", prose):
        assert f"({number})" in code, f"equation ({number}) is not checked anywhere"


@pytest.mark.parametrize("path", [p for p in PATHS if p.stem[:2] in ("04", "05")], ids=lambda path: path.stem)
def test_a_time_in_prose_stands_in_a_cell_that_links_to_who_measured_it(path):
    """Notebooks 04 and 05 time nothing on Ascend, so a time in their prose is somebody else's."""
    for cell in read(path).cells:
        if cell.cell_type == "markdown" and re.search(r"\d (ms|µs|us)\b", cell.source):
            assert "](https://" in cell.source, cell.source


@every_notebook
def test_nothing_in_it_names_a_path_of_the_machine_that_ran_it(path):
    sources = [cell.source for cell in read(path).cells]
    for text in (*sources, *texts_shown(path)):
        assert not re.search(r"(?<![\w.])/(home|root|tmp|work|Users|opt|var|mnt)/", text), text
        assert "0x7f" not in text, "the address of an object"


def test_each_figure_is_written_by_exactly_one_notebook_and_committed_twice():
    written = [name for path in PATHS for name in figures_of(path)]
    assert len(written) == len(set(written)), "two notebooks, or two cells, write one figure"
    committed = {path.name for path in (ROOT / "figures").iterdir() if path.suffix in (".svg", ".png")}
    assert committed == {f"{name}{suffix}" for name in written for suffix in (".svg", ".png")}


def test_every_picture_of_the_readme_is_a_committed_figure():
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert pictures
    for picture in pictures:
        assert (ROOT / picture).is_file(), picture


# The runner, on small notebooks of its own.


@pytest.fixture
def clone(tmp_path):
    """A place that looks like a clone: notebooks 00 and 01 pass, and each writes one figure."""
    for folder in ("notebooks", "figures", "wyfast_lib"):
        (tmp_path / folder).mkdir()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "figures" / "stale.svg").write_text("left over")
    write(tmp_path, "00_first", "print('one')", figure("first"))
    write(tmp_path, "01_second", "print('two')", figure("second"))
    return tmp_path


def figure(name):
    """Source that writes two small files where figures go, as save_figure does, but without matplotlib."""
    return (
        "import os, pathlib\nfor suffix in ('.svg', '.png'):\n"
        f"    pathlib.Path(os.environ['WYFAST_FIGURES'], '{name}' + suffix).write_text('drawn')"
    )


def write(root, name, *sources):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    notebook.metadata.kernelspec = {"display_name": "mine", "language": "python", "name": "mine-3.11"}
    nbformat.write(notebook, root / "notebooks" / f"{name}.ipynb")


def run_command(root, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("WYFAST_FIGURES", None)
    command = [sys.executable, "-m", "wyfast_lib", "notebooks", *arguments]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=240)


def snapshot(root):
    folders = (root / "notebooks", root / "figures")
    return {path: path.read_bytes() for folder in folders for path in folder.iterdir()}


def test_a_plain_run_fills_build_and_leaves_the_sources_alone(clone):
    before = snapshot(clone)
    result = run_command(clone)
    assert result.returncode == 0, result.stderr
    assert snapshot(clone) == before
    assert re.search(r"^00_first passed in \d+\.\d s\n01_second", result.stdout, re.M)
    executed = code_cells(clone / "build" / "notebooks" / "01_second.ipynb")
    assert executed[0].outputs[0].text == "two\n"
    figures = {path.name for path in (clone / "build" / "figures").iterdir()}
    assert figures == {"first.svg", "first.png", "second.svg", "second.png"}


def test_refresh_replaces_outputs_and_figures_and_normalises_the_metadata(clone):
    assert run_command(clone, "--refresh").returncode == 0
    for name in ("00_first", "01_second"):
        path = clone / "notebooks" / f"{name}.ipynb"
        assert [cell.execution_count for cell in code_cells(path)] == [1, 2]
        assert read(path).metadata.kernelspec == runner.KERNELSPEC
    assert {path.name for path in (clone / "figures").iterdir()} == {
        "first.svg", "first.png", "second.svg", "second.png"
    }  # fmt: skip
    once = snapshot(clone)
    assert run_command(clone, "--refresh").returncode == 0
    assert snapshot(clone) == once, "a second run of unchanged notebooks changes nothing"


def test_refresh_replaces_nothing_when_one_notebook_fails(clone):
    write(clone, "01_second", "print('before')", "print(undefined_name)")
    before = snapshot(clone)
    result = run_command(clone, "--refresh")
    assert result.returncode == 1
    assert snapshot(clone) == before
    assert "print(undefined_name)" in result.stderr and "NameError" in result.stderr
    assert "cell 1" in result.stderr and "\x1b[" not in result.stderr
    partial = code_cells(clone / "build" / "notebooks" / "01_second.ipynb")
    assert partial[0].outputs[0].text == "before\n"


def test_one_notebook_can_be_asked_for_by_its_number_and_an_unknown_one_is_refused(clone):
    assert [p.stem for p in runner.select(sorted((clone / "notebooks").iterdir()), ["01"])] == ["01_second"]
    with pytest.raises(ValueError, match="no notebook '07'; there are 00_first, 01_second"):
        runner.select(sorted((clone / "notebooks").iterdir()), ["07"])


def test_a_broken_notebook_fails_through_nbmake(tmp_path):
    (tmp_path / "notebooks").mkdir()
    write(tmp_path, "00_broken", "x = 1", "assert x == 2")
    notebook = read(tmp_path / "notebooks" / "00_broken.ipynb")
    notebook.metadata.kernelspec = dict(runner.KERNELSPEC)
    nbformat.write(notebook, tmp_path / "notebooks" / "00_broken.ipynb")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--nbmake", "notebooks"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert result.returncode == 1, result.stdout
    assert "AssertionError" in result.stdout
