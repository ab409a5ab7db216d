"""How a figure is drawn and saved: one style, one place that writes files.

matplotlib is imported inside the functions: importing this module costs nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

# Okabe and Ito's colours, told apart with any kind of colour vision. The order keeps neighbours apart in
# lightness too, and each series has its own marker and line, so a greyscale print loses nothing.
COLOURS = ("#0072B2", "#E69F00", "#000000", "#CC79A7", "#D55E00", "#56B4E9", "#009E73")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++", "ooo")  # for bars: pass hatch=HATCHES[i]


def style() -> dict:
    """The project's matplotlib settings, as a dictionary for `matplotlib.rc_context` too."""
    from cycler import cycler

    return {
        "axes.prop_cycle": cycler(color=COLOURS) + cycler(marker=MARKERS) + cycler(linestyle=LINES),
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.labelsize": 10,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 11,
        "figure.constrained_layout.use": True,
        "figure.dpi": 100,
        "figure.figsize": (7.0, 3.8),
        "font.family": "DejaVu Sans",  # ships with matplotlib: the same letters on every machine
        "font.size": 10,
        "grid.alpha": 0.3,
        "hatch.linewidth": 0.6,
        "image.cmap": "cividis",
        "legend.frameon": False,
        "lines.linewidth": 1.8,
        "lines.markersize": 5,
        "savefig.dpi": 144,
        "savefig.facecolor": "white",
        "svg.fonttype": "path",
        "svg.hashsalt": "wyfast",
    }


def use_style() -> None:
    """Draw every following figure in the project's style: colour, marker and line change together."""
    import matplotlib

    matplotlib.rcParams.update(style())


def project_root() -> Path:
    """The clone that the working directory lies in, else the one that holds this package, else the cwd."""
    for start in (Path.cwd(), Path(__file__).resolve().parent):
        for folder in (start, *start.parents):
            if (folder / "pyproject.toml").is_file() and (folder / "wyfast_lib").is_dir():
                return folder
    return Path.cwd()


def figures_directory() -> Path:
    """Where figures go: $WYFAST_FIGURES, else `build/figures`; relative paths start at the project root."""
    return project_root() / (os.environ.get("WYFAST_FIGURES") or "build/figures")


def save_figure(fig, name: str, folder: Path | None = None) -> list[Path]:
    """Write `fig` as NAME.svg and NAME.png into `figures_directory()`: the same bytes for the same data.

    Args:
        fig: a matplotlib Figure.
        name: a plain file stem, e.g. "unnormalised_keys".
        folder: another place for a figure that is not the workbook's.

    Returns:
        The two paths, SVG first.

    Raises:
        ValueError: name is empty, holds a folder or a suffix.
    """
    if not name or name != Path(name).name or "." in name:
        raise ValueError(f"name must be a plain file stem such as 'state_memory', got {name!r}")
    import matplotlib

    folder = figures_directory() if folder is None else folder
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    fixed = {key: value for key, value in style().items() if key.startswith(("svg.", "savefig."))}
    with matplotlib.rc_context(fixed):
        # Dates and the program's version would change the bytes of an unchanged figure.
        fig.savefig(paths[0], metadata={"Date": None, "Creator": None})
        fig.savefig(paths[1], metadata={"Software": None})
    return paths
