"""`python -m wyfast_lib bench` on a CPU, against T: the operator, a token loop, autograd, bare products.

One head layout (H = 8, K = V = 128, BT = 64, float32) at growing T. A provider is timed only after its
results met the tolerance; all providers take turns, round after round. Metrics:

    wall      ms of one call
    ratio     that time over the bare products' time in the same round, phase by phase
    best      the least of all rounds: wall time in ms, "best-ratio" the quotient of two of them. Work of
              others on the machine only ever adds time, so these move least
    peak      bytes that a call takes at its peak, results included (`wyfast_lib.bench_memory`)
    extra     the same without the results, as a multiple of the results' bytes
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from wyfast_lib import bench_memory, records
from wyfast_lib.bench_cpu_providers import BOTH, FORWARD, PROVIDERS, shape_at
from wyfast_lib.bench_providers import Case, make_case
from wyfast_lib.bench_timing import gate, verdict
from wyfast_lib.inputs import SHAPES
from wyfast_lib.records import Record, percentiles

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
DTYPE = torch.float32
PHASES = (FORWARD, BOTH)
TARGETS = {FORWARD: 2.0, BOTH: 2.5}  # best-ratio of wyfast at T = 4096
SECONDS = 8.0  # a provider leaves the rounds after so long, with at least ...
SAMPLES = 5  # ... so many samples


def say(text: str) -> None:
    """Progress, apart from the rows."""
    print(f"# {text}", file=sys.stderr, flush=True)


def run(lengths: Sequence[int], names: Sequence[str] | None, rounds: int) -> list[Record]:
    """All rows of suite "cpu". KeyError: no such provider; ValueError: T is no positive multiple of BT."""
    chosen = {name: PROVIDERS[name] for name in names or PROVIDERS}
    BT = SHAPES["laptop"].BT
    for T in lengths:
        if T < 1 or T % BT:
            raise ValueError(f"lengths must be positive multiples of {BT}, got {T}")
    origin = records.provenance(device="cpu")
    say(f"{origin['device']}, {torch.get_num_threads()} threads, torch {origin['torch']}")
    rows = []
    for T in lengths:
        case = make_case(shape_at(T), DTYPE, "cpu")
        for phase in PHASES:
            say(f"T={T} {phase}")
            rows += measure_phase(case, phase, chosen, rounds, origin)
    return rows


def measure_phase(case: Case, phase: str, providers: dict, rounds: int, origin: dict) -> list[Record]:
    """Rows of one length and phase: errors, times, ratios, memory."""
    common = {"suite": "cpu", "op": "wy_fast", "phase": phase, "shape": str(case.shape),
              "dtype": str(case.k.dtype).removeprefix("torch.")}  # fmt: skip
    threads = f"{torch.get_num_threads()} threads"

    def row(name, metric, unit, samples, verdict, note=threads):
        p20, p50, p80 = percentiles(samples)
        return Record(provider=name, metric=metric, unit=unit, p20=p20, p50=p50, p80=p80, gate=verdict,
                      note=note, **common, **origin)  # fmt: skip

    rows, calls, verdicts = [], {}, {}
    for name, provider in providers.items():
        if reason := provider.limit(case.shape, phase):
            say(f"  {name} left out at T={case.shape.T}: {reason}")
            continue
        call = provider.passes(case)[phase]
        ok, worst = correct(case, phase, provider, call())
        verdicts[name] = "none" if name == "bare" else verdict(ok)
        if name != "bare":
            rows.append(row(name, "error", "ratio", [worst], verdicts[name]))
        if ok:
            calls[name] = call
    times = interleave(calls, rounds)
    bare = times.get("bare")
    for name, samples in times.items():
        note = f"{threads}, {len(samples)} samples"
        rows.append(row(name, "wall", "ms", samples, verdicts[name], note))
        rows.append(row(name, "best", "ms", [min(samples)], verdicts[name], note))
        if bare and name != "bare":
            pairs = [a / b for a, b in zip(samples, bare, strict=False)]
            rows.append(row(name, "ratio", "ratio", pairs, verdicts[name], note))
            rows.append(row(name, "best-ratio", "ratio", [min(samples) / min(bare)], verdicts[name], note))
        if name != "bare" and (found := bench_memory.measure(name, case.shape.T, phase)):
            peak, results = found
            rows.append(row(name, "peak", "bytes", [peak], verdicts[name]))
            rows.append(row(name, "extra", "ratio", [(peak - results) / results], verdicts[name]))
    return rows


def correct(case: Case, phase: str, provider, results: tuple) -> tuple[bool, float]:
    """(within tolerance, worst error ratio over its tolerance) against the float64 closed form.

    A provider that makes its own factor is held against the float64 factor, the others against the one given.
    """
    from wyfast_lib.reference import wy_factor_reference

    if provider.name == "bare":  # products of prepared tiles: nothing to hold them against
        return True, 0.0
    if provider.makes_factor:
        case = replace(case, A=wy_factor_reference(case.k, case.beta, case.g, case.shape.BT))
    verdicts = [gate(case, "forward", results[:2])]
    if phase == BOTH:
        verdicts.append(gate(case, "backward", results[2:]))
    return all(ok for ok, _ in verdicts), max(worst for _, worst in verdicts)


def interleave(calls: dict, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every call, taking turns; one that is slow leaves early (SECONDS, SAMPLES)."""
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            if len(times[name]) >= SAMPLES and sum(times[name]) > SECONDS * 1e3:
                continue
            begin = time.perf_counter()
            result = call()
            times[name].append((time.perf_counter() - begin) * 1e3)
            del result
    return times


def summary(rows: Sequence[Record]) -> str:
    """The ratios of wyfast, largest T, beside what they should be at T = 4096."""
    lines = []
    ours = [r for r in rows if r.provider == "wyfast" and r.metric in ("best-ratio", "ratio", "extra")]
    for r in [r for r in ours if r.shape == ours[-1].shape]:
        limit = {"best-ratio": TARGETS[r.phase], "extra": 3.0}.get(r.metric)
        wanted = f", at most {limit} wanted at T=4096" if limit else f" [{r.p20:.2f}, {r.p80:.2f}]"
        over = "results' bytes" if r.metric == "extra" else "bare products"
        lines.append(f"wyfast / {over}, {r.phase}, {r.metric}: {r.p50:.2f}{wanted}")
    return "\n".join(lines)
