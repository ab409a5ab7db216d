"""`python -m wyfast_lib bench`: the operator's speed beside others on the same inputs, gated by correctness.

Every provider of a row is checked against the float64 closed form first; a speed is recorded only when that
passes. Timings of all providers are interleaved, round after round, over several sets of inputs, so that
neither a change of clocks nor a warm L2 favours one. Metrics:

    kernel      ms on the device, from CUDA graphs of many calls (CUDA only)
    wall        ms of one call including the wait for its result
    host        us until a call returns, the device idle before it (CUDA only)
    extra       bytes allocated at the peak of a call beyond its outputs (CUDA only)
    bandwidth   GB/s: bytes that any implementation must move over the kernel (or wall) time
    floor       kernel (or wall) time over the time of a plain copy of as many bytes, measured in the same run
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from wyfast_lib import records
from wyfast_lib.bench_timing import (
    COPY_BYTES,
    capture,
    copy_rates,
    extra_bytes,
    gate,
    release,
    time_calls,
    time_graphs,
    verdict,
)
from wyfast_lib.records import Record, percentiles

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TRAINING = ("train-4k", "train-8k", "train-32k", "train-32k-gqa", "train-64k")
DEFAULT_SHAPES = {"cuda": TRAINING, "cpu": ("small",)}
L2_BYTES = 200 << 20  # inputs are rotated until a round touches this much: several times any L2 ...
MAY_FAIL = ("fla", "wyfast-tf32")  # what others compute, and what is asked to be inexact
MAX_SETS = 8  # ... with at most so many sets: shapes too small for that are cached in a real program as well


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line; every option has a default that suits the machine."""
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda when there is one")
    parser.add_argument("--suite", choices=("operator", "gates", "packed", "cpu"),
                        help="operator: backends at named shapes (default with CUDA, --shapes or --dtypes);"
                        " gates: stride-HV against stride-1 gates (CUDA); packed: packed against dense rows"
                        " (CUDA); cpu: against T, beside bare products, autograd, a token loop (default on a"
                        " CPU)")  # fmt: skip
    parser.add_argument("--lengths", help="suite cpu: comma-separated T; default 64 to 4096")
    parser.add_argument("--shapes", help="comma-separated names of wyfast_lib.inputs.SHAPES")
    parser.add_argument("--dtypes", help="comma-separated: float32, float16, bfloat16")
    parser.add_argument("--providers", help="comma-separated; default: all that run here")
    parser.add_argument("--rounds", type=int, help="samples a metric; default 15, suite cpu 30")
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    parser.add_argument("--replace", action="store_true", help="with --csv: replace the file's rows")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON lines")
    parser.add_argument("--tune", action="store_true", help="rank launch candidates for backends/cuda.py")
    parser.add_argument("--plot", type=Path, metavar="CSV", help="only draw the figures of a data file")


def main(args: argparse.Namespace) -> int:
    """Run the command; exit status 1 when a provider of ours failed its correctness gate."""
    if args.plot:
        rows = records.read(args.plot)
        from wyfast_lib.bench_figures import plot_cpu

        for path in plot_cpu(rows) if any(r.suite == "cpu" for r in rows) else plot(rows):
            print(path)
        return 0
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    shapes = args.shapes.split(",") if args.shapes else list(DEFAULT_SHAPES[device])
    dtypes = args.dtypes.split(",") if args.dtypes else ["bfloat16" if device == "cuda" else "float32"]
    rounds, names = args.rounds or 15, args.providers.split(",") if args.providers else None
    if args.tune:
        return tune(shapes, dtypes, rounds)
    suite = args.suite or ("operator" if device == "cuda" or args.shapes or args.dtypes else "cpu")
    if suite == "gates":
        from wyfast_lib.bench_gates import run_gates

        rows = run_gates(rounds)
    elif suite == "packed":
        from wyfast_lib.bench_packed import run_packed

        rows = run_packed(rounds)
    elif suite == "cpu":
        from wyfast_lib import bench_cpu

        lengths = [int(T) for T in args.lengths.split(",")] if args.lengths else bench_cpu.LENGTHS
        rows = bench_cpu.run(lengths, names, args.rounds or 30)
        bench_cpu.say(bench_cpu.summary(rows))
    else:
        rows = run(device, shapes, dtypes, names, rounds)
    if args.csv:
        records.write(args.csv, rows, append=not args.replace)
    for row in rows:
        print(json.dumps(asdict(row)) if args.json else line(row), flush=True)
    return int(any(r.gate == "fail" and r.provider not in MAY_FAIL for r in rows))


def line(row: Record) -> str:
    """One row as text."""
    return (
        f"{row.shape:<40} {row.dtype:<9} {row.phase:<9} {row.provider:<10} {row.metric:<10} "
        f"{row.p50:>12.4g} {row.unit:<6} [{row.p20:.4g}, {row.p80:.4g}] {row.gate}"
    )


def run(
    device: str, shapes: Sequence[str], dtypes: Sequence[str], names: Sequence[str] | None, rounds: int
) -> list[Record]:
    """Measure all providers on all shapes and dtypes. A provider that cannot run is named and left out.

    Raises:
        KeyError: no such shape, dtype or provider.
    """
    from wyfast_lib.bench_providers import PROVIDERS

    chosen = {}
    for name in names or PROVIDERS:
        ok, reason = PROVIDERS[name].available(device)
        if ok:
            chosen[name] = PROVIDERS[name]
        else:
            print(f"# {name} left out: {reason}", flush=True)
    origin = records.provenance(device=device)
    p20, rate, p80 = percentiles(copy_rates(device))
    rows = [Record(suite="operator", provider="copy", op="copy", phase="both",
                   shape=f"{COPY_BYTES[device] / 2**30:g} GiB", dtype="float32", metric="bandwidth",
                   unit="GB/s", p20=p20, p50=rate, p80=p80, gate="none", **origin)]  # fmt: skip
    for dtype in dtypes:
        for shape in shapes:
            wanted = {n: p for n, p in chosen.items() if dtype == "float32" or n != "wyfast-tf32"}
            rows += measure_shape(device, shape, dtype, wanted, rounds, rate, origin)
            release(device)
    return rows


def measure_shape(device, shape, dtype, providers, rounds, rate, origin) -> list[Record]:
    """All rows of one shape and dtype."""
    from wyfast_lib.bench_providers import make_case, minimum_bytes

    case = make_case(shape, DTYPES[dtype], device)
    size = sum(x.numel() * x.element_size() for x in (*case.inputs, case.dw, case.du))
    sets = min(MAX_SETS, 1 + L2_BYTES // size)
    cases = [case] + [make_case(shape, DTYPES[dtype], device, seed) for seed in range(1, sets)]
    rows = []
    for phase in ("forward", "backward"):
        passes, verdicts = {}, {}
        for name, provider in providers.items():
            passes[name] = [provider.passes(c)[phase] for c in cases]
            verdicts[name] = gate(case, phase, passes[name][0](), provider.tolerance)
        common = {"suite": "operator", "op": "wy_fast", "phase": phase, "shape": f"{shape} {case.shape}",
                  "dtype": dtype, **origin}  # fmt: skip
        green = {n: p for n, p in passes.items() if verdicts[n][0]}
        for name, (ok, worst) in verdicts.items():
            rows.append(Record(provider=name, metric="error", unit="ratio", p20=worst, p50=worst, p80=worst,
                               gate=verdict(ok), note=providers[name].note, **common))  # fmt: skip
        needed = minimum_bytes(case, phase)
        for name, metrics in measure(device, green, rounds, needed, rate).items():
            for metric, (unit, samples) in metrics.items():
                p20, p50, p80 = percentiles(samples)
                rows.append(Record(provider=name, metric=metric, unit=unit, p20=p20, p50=p50, p80=p80,
                                   gate=verdict(verdicts[name][0]), note=providers[name].note,
                                   **common))  # fmt: skip
    return rows


def measure(
    device: str, passes: dict[str, list[Callable]], rounds: int, needed: int, rate: float
) -> dict[str, dict[str, tuple[str, list[float]]]]:
    """Samples of every metric of every provider: {provider: {metric: (unit, samples)}}."""
    out: dict[str, dict[str, tuple[str, list[float]]]] = {name: {} for name in passes}
    wall, host = time_calls(device, passes, rounds)
    kernel = time_graphs(passes, rounds) if device == "cuda" else {}
    for name in passes:
        out[name]["wall"] = ("ms", wall[name])
        if device == "cuda":
            out[name]["host"] = ("us", host[name])
            out[name]["extra"] = ("bytes", [float(extra_bytes(passes[name][0]))])
        if name in kernel:
            out[name]["kernel"] = ("ms", kernel[name])
        base = kernel.get(name, wall[name])
        out[name]["bandwidth"] = ("GB/s", [needed / t / 1e6 for t in base])
        out[name]["floor"] = ("ratio", [t * rate * 1e6 / needed for t in base])
    return out


def tune(shapes: Sequence[str], dtypes: Sequence[str], rounds: int) -> int:
    """Rank launch candidates of the portable kernels on this device; the winners are lines for `LAUNCH`."""
    from wyfast_lib.backends import cuda as backend
    from wyfast_lib.bench_providers import make_case

    arch = torch.cuda.get_device_capability()[0]
    for dtype in dtypes:
        for shape in shapes:
            case = make_case(shape, DTYPES[dtype], "cuda")
            for phase in ("forward", "backward"):
                tried = [try_tiles(case, phase, tiles, rounds) for tiles in candidates(phase, case)]
                ranked = sorted((t for t in tried if t is not None), key=lambda t: t[0])
                key = (phase, arch, case.k.element_size(), case.shape.BT)
                print(f"# {shape} {dtype} {key}", flush=True)
                for milliseconds, tiles, worst in ranked[:6]:
                    print(f"{milliseconds:.4f} ms  error/limit {worst:.2f}  {tiles}", flush=True)
            del case
            release("cuda")
    backend._plans.clear()
    return 0


def candidates(phase: str, case) -> list:
    """The search space of `tune`: tile widths, warps, pipeline stages, register caps."""
    from wyfast_lib.backends.cuda import Tiles

    widths = [(w, w) for w in (16, 32, 64, 128)] + [(128, 64), (64, 32)]
    wide = max(case.shape.K, case.shape.V)
    space = []
    for BK, BV in widths:
        if BK > wide:
            continue
        for warps in (2, 4, 8):
            space.append(Tiles(BK, BV, warps))
            if phase == "forward":
                space.append(Tiles(BK, BV, warps, 3))
            elif warps == 4:
                space.append(Tiles(BK, BV, warps, maxnreg=168))
                if BK >= case.shape.K:
                    space.append(Tiles(BK, BV, warps, KEEP_P=True))
    return space


def try_tiles(case, phase: str, tiles, rounds: int):
    """(ms, tiles, error over tolerance) of one candidate, None when it does not compile, fit or pass."""
    from unittest import mock

    from wyfast_lib.backends import cuda as backend
    from wyfast_lib.bench_providers import PROVIDERS

    with (
        mock.patch.object(backend, "candidates", lambda *_: (tiles,)),
        mock.patch.object(backend, "_fits_hopper_kernel", lambda *_: False),
    ):
        backend._plans.clear()
        try:
            call = PROVIDERS["wyfast"].passes(case)[phase]
            ok, worst = gate(case, phase, call())
            if not ok:
                print(f"# wrong: {tiles} error/limit {worst:.3g}", flush=True)
                return None
            graph = capture([call])
            return min(graph.milliseconds() for _ in range(rounds)), tiles, worst
        except Exception as error:  # the compiler refuses some candidates
            print(f"# refused: {tiles} {str(error).splitlines()[0][:90]}", flush=True)
            torch.cuda.synchronize()
            return None


def plot(rows: Sequence[Record]) -> list[Path]:
    """Figures of a data file: time over the copy floor of each provider, and the speed-up over fla-core."""
    import matplotlib.pyplot as plt

    from wyfast_lib.plotting import save_figure, use_style

    use_style()
    paths = []
    rows = [r for r in rows if r.suite == "operator" and r.dtype == "bfloat16" and r.metric == "floor"]
    shapes = list(dict.fromkeys(r.shape for r in rows))
    providers = [p for p in ("wyfast", "fla") if any(r.provider == p for r in rows)]
    if not shapes or len(providers) < 2:
        raise ValueError("the data file has no bfloat16 rows of wyfast and fla with metric 'floor'")
    figure, axes = plt.subplots(1, 2, sharey=True, figsize=(9.0, 3.8))
    for ax, phase in zip(axes, ("forward", "backward"), strict=True):
        for i, provider in enumerate(providers):
            found = {r.shape: r for r in rows if r.provider == provider and r.phase == phase}
            x = [n + 0.12 * (2 * i - 1) for n, s in enumerate(shapes) if s in found]
            y = [found[s].p50 for s in shapes if s in found]
            spread = [[found[s].p50 - found[s].p20 for s in shapes if s in found],
                      [found[s].p80 - found[s].p50 for s in shapes if s in found]]  # fmt: skip
            ax.errorbar(x, y, yerr=spread, linestyle="none", capsize=3, label=provider)
        ax.axhline(1.0, color="black", linestyle=":", marker="none", linewidth=1)
        ax.set_xticks(range(len(shapes)), [s.split()[0].removeprefix("train-") for s in shapes])
        ax.set_xlabel("shape")
        ax.set_title(phase)
    axes[0].set_ylabel("kernel time / time of a copy of the same bytes")
    axes[0].set_ylim(0, None)
    axes[1].legend()
    best = min(r.p50 for r in rows if r.provider == "wyfast" and r.phase == "backward")
    worst = max(r.p50 for r in rows if r.provider == "wyfast" and r.phase == "backward")
    where = f"{rows[0].device}, {rows[0].dtype}"
    figure.suptitle(f"Our backward takes {best:.2f} to {worst:.2f} times a plain copy ({where})")
    paths += save_figure(figure, "cuda_floor")
    plt.close(figure)
    return paths
