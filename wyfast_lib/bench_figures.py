"""Figures of the measured data files: each takes rows and returns a figure, for a notebook to show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wyfast_lib.records import Record

CPU_FIGURE = "cpu_time_and_memory"
LABELS = {
    "wyfast": "wy_fast, A given",
    "wyfast+factor": "wy_factor and wy_fast",
    "autograd-solve": "autograd through the solve",
    "token-loop": "token loop",
    "bare": "bare matrix products",
}


def curve(rows: Sequence[Record], provider: str, metric: str) -> dict[int, Record]:
    """{T: row} of a provider's forward and backward, T rising; of rows measured twice the later one."""
    found = {
        int(r.shape.split("T=")[1].split()[0]): r
        for r in rows
        if (r.suite, r.provider, r.phase, r.metric) == ("cpu", provider, "forward+backward", metric)
        and r.gate != "fail"
    }
    return dict(sorted(found.items()))


def cpu_figure(rows: Sequence[Record]):
    """Time and peak memory of forward and backward against T, from the rows of suite "cpu".

    Args:
        rows: `records.read` of data/bench_cpu.csv; of rows measured twice the later one counts.

    Returns:
        A matplotlib figure: the least time of all rounds, as work of others only adds to it, and the peak
        memory of a call, results included.

    Raises:
        ValueError: no rows of wyfast and token-loop in suite "cpu".
    """
    import matplotlib.pyplot as plt

    from wyfast_lib.plotting import COLOURS, LINES, MARKERS

    if not all(curve(rows, name, metric) for name in ("wyfast", "token-loop") for metric in ("best", "peak")):
        raise ValueError("no rows of suite 'cpu': make them with `python -m wyfast_lib bench --csv FILE`")
    figure, axes = plt.subplots(1, 2, figsize=(8.6, 4.0))
    for ax, metric, scale in zip(axes, ("best", "peak"), (1.0, 2.0**20), strict=True):
        for n, (name, label) in enumerate(LABELS.items()):
            if points := curve(rows, name, metric):
                ax.loglog(list(points), [r.p50 / scale for r in points.values()], label=label,
                          color=COLOURS[n], marker=MARKERS[n], linestyle=LINES[n])  # fmt: skip
        lengths = list(curve(rows, "wyfast", metric))
        ax.set_xticks(lengths, [str(T) for T in lengths])
        ax.minorticks_off()
        ax.set_xlabel("sequence length T (tokens)")
    axes[0].set_ylabel("forward + backward (ms)")
    axes[1].set_ylabel("peak memory, results included (MiB)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    T = max(set(curve(rows, "token-loop", "best")) & set(curve(rows, "wyfast", "best")))
    faster, smaller = (
        curve(rows, "token-loop", metric)[T].p50 / curve(rows, "wyfast+factor", metric)[T].p50
        for metric in ("best", "peak")
    )
    example = curve(rows, "wyfast", "best")[T]
    figure.suptitle(
        f"At {T} tokens, chunks are {faster:.0f} times faster than the token loop,"
        f" in {smaller:.0f} times less memory"
        f"\n{example.shape.split(' ', 2)[2]}, float32, {example.device}, {example.note.split(',')[0]}",
        fontsize=10, x=0.01, ha="left",
    )  # fmt: skip
    return figure


def plot_cpu(rows: Sequence[Record]) -> list[Path]:
    """Save the figure of `cpu_figure`; returns its two paths."""
    import matplotlib.pyplot as plt

    from wyfast_lib.plotting import save_figure, use_style

    use_style()
    figure = cpu_figure(rows)
    paths = save_figure(figure, CPU_FIGURE)
    plt.close(figure)
    return paths
