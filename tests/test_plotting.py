"""Figures: one style that survives greyscale, and files with the same bytes for the same data."""

from pathlib import Path

import matplotlib
import pytest

from wyfast_lib import plotting

matplotlib.use("agg")

import matplotlib.pyplot as plt


@pytest.fixture
def figures(tmp_path, monkeypatch):
    monkeypatch.setenv("WYFAST_FIGURES", str(tmp_path / "figures"))
    return tmp_path / "figures"


@pytest.fixture(autouse=True)
def settings_do_not_leak():
    with matplotlib.rc_context():
        yield
    plt.close("all")


def draw(style=True):
    if style:
        plotting.use_style()
    fig, ax = plt.subplots()
    for i in range(3):
        ax.plot([0, 1, 2], [i, i + 1, 2 * i], label=f"series {i}")
    ax.set(title="three lines", xlabel="x (tokens)")
    ax.legend()
    return fig


def luminance(colour):
    """Relative luminance of sRGB, what a greyscale print keeps."""
    rgb = matplotlib.colors.to_rgb(colour)
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_save_figure_writes_svg_and_png_and_returns_their_paths(figures):
    paths = plotting.save_figure(draw(), "three_lines")
    assert paths == [figures / "three_lines.svg", figures / "three_lines.png"]
    assert paths[0].read_bytes().lstrip().startswith(b"<?xml")
    assert paths[1].read_bytes().startswith(b"\x89PNG")


def test_the_same_data_gives_the_same_bytes(figures, monkeypatch):
    first = [path.read_bytes() for path in plotting.save_figure(draw(), "again")]
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")  # matplotlib would write this date
    second = [path.read_bytes() for path in plotting.save_figure(draw(), "again")]
    assert first == second
    assert b"dc:date" not in first[0] and matplotlib.__version__.encode() not in first[0] + first[1]


def test_other_data_gives_other_bytes(figures):
    fig = draw()
    first = [path.read_bytes() for path in plotting.save_figure(fig, "moving")]
    fig.axes[0].lines[0].set_ydata([3, 3, 3])
    second = [path.read_bytes() for path in plotting.save_figure(fig, "moving")]
    assert first[0] != second[0] and first[1] != second[1]


@pytest.mark.parametrize("name", ["", "a/b", "plot.png", "../up"])
def test_a_name_that_is_no_plain_stem_is_refused(figures, name):
    with pytest.raises(ValueError, match="plain file stem"):
        plotting.save_figure(draw(), name)
    assert not figures.exists()


def test_every_series_has_its_own_colour_marker_and_line():
    for column in (plotting.COLOURS, plotting.MARKERS, plotting.LINES, plotting.HATCHES):
        assert len(set(column)) == len(column) == len(plotting.COLOURS)
    plotting.use_style()
    entries = list(matplotlib.rcParams["axes.prop_cycle"])
    assert [entry["color"] for entry in entries] == list(plotting.COLOURS)
    assert all({"marker", "linestyle"} <= set(entry) for entry in entries)


def test_neighbours_in_the_cycle_differ_in_greyscale():
    for one, next_one in zip(plotting.COLOURS, plotting.COLOURS[1:], strict=False):
        light, dark = sorted((luminance(one), luminance(next_one)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) > 1.25, (one, next_one)


def test_figures_go_to_build_figures_of_the_clone_when_nothing_is_set(tmp_path, monkeypatch):
    for folder in ("notebooks", "wyfast_lib"):
        (tmp_path / folder).mkdir()
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.delenv("WYFAST_FIGURES", raising=False)
    assert plotting.figures_directory() == tmp_path / "build" / "figures"
    monkeypatch.setenv("WYFAST_FIGURES", "elsewhere")
    assert plotting.figures_directory() == tmp_path / "elsewhere"


def test_outside_a_clone_the_package_says_where_the_clone_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert plotting.project_root() == Path(plotting.__file__).resolve().parents[1]
