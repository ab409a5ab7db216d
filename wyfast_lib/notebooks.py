"""`python -m wyfast_lib notebooks`: execute the workbook, in order, on this interpreter.

A plain run writes executed copies to build/notebooks/ and figures to build/figures/ and leaves the sources
alone. `--refresh` replaces the committed outputs and figures/, and only when every notebook passed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from wyfast_lib.plotting import project_root

CELL_TIMEOUT_S = 600
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("names", nargs="*", help="which: 00, 00_quickstart or a path; default all, in order")
    parser.add_argument(
        "--refresh",
        action="store_true",
        help="replace the committed outputs and figures/ when every notebook passed",
    )


def main(args: argparse.Namespace) -> int:
    """Run the command; 0 when every notebook passed, 1 when one failed, 2 for bad names or missing tools."""
    root = project_root()
    try:
        import nbclient  # noqa: F401
        import nbformat  # noqa: F401

        sources = select(sorted((root / "notebooks").glob("*.ipynb")), args.names)
    except ImportError as missing:
        print(f"{missing}: run `pip install -r requirements.txt` (`make env` does it)", file=sys.stderr)
        return 2
    except ValueError as problem:
        print(problem, file=sys.stderr)
        return 2
    if not args.refresh:
        return run_all(root, sources, root / "build" / "notebooks", figures_folder(root))
    with tempfile.TemporaryDirectory(prefix="wyfast-") as scratch:
        executed, figures = Path(scratch, "notebooks"), Path(scratch, "figures")
        status = run_all(root, sources, executed, figures)
        if status:
            keep = root / "build" / "notebooks"
            keep.mkdir(parents=True, exist_ok=True)
            for path in executed.glob("*.ipynb"):
                shutil.copy2(path, keep / path.name)
            print(f"nothing replaced; the partial outputs are in {keep.relative_to(root)}", file=sys.stderr)
            return status
        replace(root, executed, figures, everything=not args.names)
    return 0


def figures_folder(root: Path) -> Path:
    """Where a plain run puts its figures: $WYFAST_FIGURES or build/figures."""
    return root / (os.environ.get("WYFAST_FIGURES") or "build/figures")


def select(available: list[Path], names: list[str]) -> list[Path]:
    """The notebooks that were asked for, in the workbook's order.

    Raises:
        ValueError: a name fits none of them, or there are none.
    """
    if not available:
        raise ValueError("there are no notebooks: run this inside a clone of the project")
    if not names:
        return available
    chosen = set()
    for name in names:
        stem = Path(name).stem
        fitting = [p for p in available if p.stem == stem or p.stem.split("_")[0] == stem]
        if not fitting:
            raise ValueError(f"no notebook {name!r}; there are {', '.join(p.stem for p in available)}")
        chosen.update(fitting)
    return sorted(chosen)


def run_all(root: Path, sources: list[Path], executed: Path, figures: Path) -> int:
    """Execute each source into `executed`; a failed one does not stop the next. Returns the exit status."""
    executed.mkdir(parents=True, exist_ok=True)
    figures.mkdir(parents=True, exist_ok=True)
    failed = []
    for source in sources:
        print(f"{source.stem} ...", flush=True)
        begin = time.perf_counter()
        problem = execute(source, executed / source.name, root, figures)
        seconds = time.perf_counter() - begin
        print(f"{source.stem} {'FAILED' if problem else 'passed'} in {seconds:.1f} s", flush=True)
        if problem:
            print(problem, file=sys.stderr, flush=True)
            failed.append(source.stem)
    if failed:
        print(f"{len(failed)} of {len(sources)} notebooks failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def execute(source: Path, target: Path, root: Path, figures: Path) -> str | None:
    """Execute one notebook and write it, complete or as far as it came, to `target`.

    Returns:
        None, or what went wrong: the failed cell's number, source and traceback.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    notebook = nbformat.read(source, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook,
        kernel_manager_class=kernel_of_this_interpreter(),
        kernel_name=KERNELSPEC["name"],
        timeout=CELL_TIMEOUT_S,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(source.parent)}},
    )
    try:
        client.execute(env=environment(root, figures))
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        return describe_failure(notebook, error)
    finally:
        normalise(notebook)
        nbformat.write(notebook, target)
    return None


def kernel_of_this_interpreter() -> type:
    """A kernel manager class that starts this very interpreter, whatever kernels the user has installed."""
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    class ThisInterpreter(AsyncKernelManager):
        @property
        def kernel_spec(self):
            command = [sys.executable, "-Xfrozen_modules=off", "-m", "ipykernel_launcher"]
            quiet = "--IPKernelApp.log_level=40"  # errors only
            return KernelSpec(
                argv=[*command, quiet, "-f", "{connection_file}"],
                display_name=KERNELSPEC["display_name"],
                language=KERNELSPEC["language"],
            )

    return ThisInterpreter


def environment(root: Path, figures: Path) -> dict[str, str]:
    """The kernel's environment: the clone's library first, figures to `figures`, torch without plug-ins."""
    paths = [str(root), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # a torch_npu without CANN breaks `import torch` otherwise
        "OMP_WAIT_POLICY": "passive",  # threads that spin take minutes on a machine busy with other work
        **os.environ,
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # figures become cell outputs
        "PYTHONPATH": os.pathsep.join(paths),
        "WYFAST_FIGURES": str(figures.resolve()),
    }


def normalise(notebook) -> None:
    """Remove what differs between machines and runs although the notebook is the same."""
    notebook.metadata = {
        **{k: v for k, v in notebook.metadata.items() if k not in ("kernelspec", "language_info", "widgets")},
        "kernelspec": dict(KERNELSPEC),
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        for key in ("execution", "ExecuteTime", "collapsed", "scrolled"):
            cell.metadata.pop(key, None)


def describe_failure(notebook, error: Exception) -> str:
    """The failed cell's number and source, and the traceback without terminal colours."""
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", ()):
            if output.output_type == "error":
                traceback = strip_colours("\n".join(output.traceback))
                return f"cell {number}:\n{indent(cell.source)}\n{traceback}"
    return strip_colours(f"{type(error).__name__}: {error}")


def indent(text: str) -> str:
    """Four spaces before every line."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def strip_colours(text: str) -> str:
    """Without the terminal's escape sequences."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def replace(root: Path, executed: Path, figures: Path, everything: bool) -> None:
    """Put executed notebooks and figures in the place of the committed ones.

    everything: all notebooks ran, so a committed figure that none of them wrote is removed.
    """
    kept = root / "figures"
    kept.mkdir(exist_ok=True)
    for folder, target in ((executed, root / "notebooks"), (figures, kept)):
        for path in sorted(folder.iterdir()):
            fresh = target / f".{path.name}.new"
            shutil.copyfile(path, fresh)
            os.replace(fresh, target / path.name)
    if everything:
        written = {path.name for path in figures.iterdir()}
        for path in kept.iterdir():
            if path.suffix in (".svg", ".png") and path.name not in written:
                path.unlink()
    counts = [len(list(folder.iterdir())) for folder in (executed, figures)]
    print(f"replaced {counts[0]} notebooks and {counts[1]} figure files")
