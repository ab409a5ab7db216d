"""The report as one figure: time a variant on the left, busy shares or the counts' factors on the right."""

from __future__ import annotations

from pathlib import Path

from wyfast_lib.profile.report import Report, number

# Measured bars are filled, a model's hatched, others' figures empty: the three are told apart without colour.
LOOK = {
    "measured": {"alpha": 1.0},
    "modelled": {"alpha": 0.55, "hatch": "///"},
    "published": {"fill": False, "linewidth": 1.6},
}
PIPES = ("mac", "mte1", "mte2", "mte3", "fixpipe", "vec", "scalar")


def save(report: Report, folder: Path, name: str = "profile") -> list[Path]:
    """Write NAME.svg and NAME.png into `folder` and return their paths."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from wyfast_lib.plotting import save_figure, style

    with matplotlib.rc_context(style()):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11.0, 4.2))
        if any(row.unit == "us" and row.quantity == "time" for row in report.rows):
            draw_time(left, report)
        else:
            left.set_axis_off()
            left.text(0.0, 0.5, "no time: neither a device nor a timeline", transform=left.transAxes)
        if shares(report):
            draw_shares(right, report)
        else:
            draw_factors(right, report)
        figure.suptitle(finding(report), x=0.01, ha="left")
        paths = save_figure(figure, name, folder)
        plt.close(figure)
    return paths


def finding(report: Report) -> str:
    """The title: the factor of time, or else the largest of the counts, with its source; never another's."""
    known = [each for each in report.factors() if each.factor and each.source != "published"]
    timed = [each for each in known if each.quantity == "time"]
    best = timed[0] if timed else max(known, key=lambda each: each.factor, default=None)
    if best is None:
        return f"{report.kernel}, {report.sizes}, {report.dtype}"
    what = "time" if timed else best.quantity
    return f"{report.kernel}: {best.factor:.3g} times less {what} with {best.after} ({best.source})"


def draw_time(ax, report: Report) -> None:
    """A group of bars a source, a bar a variant, its range as an error bar."""
    from wyfast_lib.plotting import COLOURS

    groups = {key: found for key, found in report.lines().items() if key[0] == "time"}
    width = 0.8 / len(report.variants)
    for at, (key, found) in enumerate(groups.items()):
        for n, variant in enumerate(report.variants):
            if variant not in found:
                continue
            row, x = found[variant], at - 0.4 + (n + 0.5) * width
            label = variant if at == 0 else None
            ax.bar(x, row.value, width * 0.9, color=COLOURS[n % len(COLOURS)], label=label,
                   edgecolor=COLOURS[n % len(COLOURS)], **LOOK[key[2]])  # fmt: skip
            if row.low is not None:
                ends = [[row.value - row.low], [row.high - row.value]]
                ax.errorbar(x, row.value, ends, color="black", marker="none", capsize=3)
            place = {"xytext": (0, 4), "textcoords": "offset points", "ha": "center"}
            ax.annotate(number(row.value), (x, row.value), **place)
    ax.margins(y=0.15)
    ax.set_xticks(range(len(groups)), [f"{source}\n{_short(how)}" for _, _, source, how in groups])
    ax.set_ylabel("time of a launch (us)")
    ax.legend()


def shares(report: Report) -> dict[tuple[str, str], dict[str, float]]:
    """{(source, variant): {pipe: busy share}} of the rows named like the profiler's, aiv_mte2_ratio."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in report.rows:
        unit, _, rest = row.quantity.partition("_")
        if unit in ("aic", "aiv") and rest.removesuffix("_ratio") in PIPES and rest.endswith("_ratio"):
            found.setdefault((row.source, row.variant), {})[row.quantity.removesuffix("_ratio")] = row.value
    return found


def draw_shares(ax, report: Report) -> None:
    """Busy share a pipe, a bar a source and variant."""
    from wyfast_lib.plotting import COLOURS

    found = shares(report)
    pipes = list(dict.fromkeys(pipe for values in found.values() for pipe in values))
    width = 0.8 / len(found)
    for n, ((source, variant), values) in enumerate(found.items()):
        colour = COLOURS[report.variants.index(variant) % len(COLOURS)]
        x = [at - 0.4 + (n + 0.5) * width for at in range(len(pipes))]
        y = [100 * values.get(pipe, 0.0) for pipe in pipes]
        look = {"color": colour, "edgecolor": colour, **LOOK[source]}
        ax.bar(x, y, width * 0.9, label=f"{variant}, {source}", **look)
    ax.set_xticks(range(len(pipes)), pipes, rotation=45, ha="right")
    ax.set_ylabel("busy share of the kernel (%)")
    ax.legend()


def draw_factors(ax, report: Report) -> None:
    """How many times less of each quantity the last variant has, time and others' figures aside."""
    from wyfast_lib.plotting import COLOURS

    last = [f for f in report.factors() if f.factor and f.after == report.variants[-1]]
    factors = [f for f in last if f.quantity != "time" and f.source != "published"]
    if not factors:
        ax.set_axis_off()
        return
    names = [f"{each.quantity} ({each.source})" for each in factors]
    ax.barh(range(len(factors)), [each.factor - 1 for each in factors], left=1.0, color=COLOURS[0])
    ax.axvline(1.0, color="black", linewidth=1, marker="none")
    ax.set_yticks(range(len(factors)), names)
    ax.set_xlabel(f"{report.variants[0]} over {report.variants[-1]}")


def _short(how: str) -> str:
    return how if len(how) < 24 else f"{how[:21]}..."
