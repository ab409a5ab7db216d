"""How a figure is drawn and saved: one style, one place that writes files."""

from __future__ import annotations

import os
from pathlib import Path

# Okabe and Ito's eight colours, told apart with any kind of colour vision; marker and line say the same once
# more.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", "-.", ":", "-", "--", "-.", ":")


def use_style() -> None:
    """Sets matplotlib's defaults for every figure of the project: colour, line and marker change together."""
    import matplotlib
    from cycler import cycler

    matplotlib.rcParams.update({
        "axes.prop_cycle": cycler(color=COLOURS) + cycler(marker=MARKERS) + cycler(linestyle=LINES),
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.alpha": 0.3,
        "figure.constrained_layout.use": True,
        "savefig.dpi": 144,
        "svg.hashsalt": "wyfast",
        "svg.fonttype": "none",
    })


def figures_directory() -> Path:
    """Where figures go: $WYFAST_FIGURES, `build/figures` below the working directory when it is not set."""
    return Path(os.environ.get("WYFAST_FIGURES") or "build/figures")


def save_figure(fig, name: str) -> list[Path]:
    """Writes `fig` as NAME.svg and NAME.png, the same bytes for the same data, and returns both paths.

    `name` is a plain file stem; ValueError otherwise.
    """
    if not name or name != Path(name).name or "." in name:
        raise ValueError(f"save_figure: name {name!r} must be a plain file stem")
    import matplotlib

    directory = figures_directory()
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{name}.svg", directory / f"{name}.png"]
    with matplotlib.rc_context({"svg.hashsalt": "wyfast"}):
        fig.savefig(paths[0], metadata={"Date": None, "Creator": None})
    fig.savefig(paths[1], metadata={"Software": None})
    return paths
