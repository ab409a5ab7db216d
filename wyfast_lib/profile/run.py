"""`profile`: one report of all variants from the devices of this machine, or from the model."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from wyfast_lib.profile import files, gpu, metrics, model, npu, published, targets
from wyfast_lib.profile.report import Report, Row
from wyfast_lib.profile.request import ProfileError, Request

PLACES = ("npu", "gpu", "model")


def profile(
    request: Request,
    flags: Sequence[dict] = ({},),
    *,
    groups: str | None = None,
    on: Sequence[str] = (),
    tool: str = "torch_npu",
    launches: int = 10,
    measured: Sequence[str] = (),
    folder: Path | None = None,
) -> Report:
    """Profile a kernel in every variant.

    flags: one set a variant. groups: counters, as "PipeUtilization,Memory". on: some of PLACES; default: the
    device that is there, else the model. tool: "torch_npu" or "msprof". launches: recorded a variant.
    measured: files that profilers wrote elsewhere, one a variant, several groups of a variant as "A,B".
    folder: where the tools' own files stay; default: thrown away.

    Raises ProfileError for a request that cannot be profiled, and what the compiler raises.
    """
    requests = request.variants(flags)
    targets.is_ours(request)
    if len(measured) > len(requests):
        raise ProfileError(f"--csv: {len(measured)} files for {len(requests)} variants: one each, in order")
    chosen, places = metrics.groups(groups), tuple(on) or default_places()
    rows: list[list[Row]] = [[] for _ in requests]
    notes: list[str] = []
    for number, names in enumerate(measured):
        rows[number] += files.rows(names.split(","), request.name)
    with tempfile.TemporaryDirectory() as scratch:
        for place in places:
            more, said = _profile_on(place, requests, chosen, tool, launches, folder or Path(scratch))
            notes += said
            for own, new in zip(rows, more, strict=True):
                own += new
    return _report(requests, rows, notes, places)


def default_places() -> tuple[str, ...]:
    """The device of this machine; the model where there is none."""
    return ("npu",) if npu.available() else ("gpu",) if gpu.available() else ("model",)


def _profile_on(place, requests, groups, tool, launches, folder) -> tuple[list[list[Row]], list[str]]:
    if place == "npu":
        if not npu.available():
            raise ProfileError("--on npu: torch sees no NPU; torch_npu with CANN is needed")
        return npu.profile(requests, groups, launches, folder, tool)
    if place == "gpu":
        if not gpu.available():
            raise ProfileError("--on gpu: torch sees no CUDA device")
        return gpu.profile(requests, groups, launches, folder)
    if place != "model":
        raise ProfileError(f"--on: expected some of {', '.join(PLACES)}, got {place!r}")
    found = [model.profile(request, targets.plan(request)) for request in requests]
    return [rows for rows, _ in found], [note for _, notes in found for note in notes]


def _report(requests, rows, notes, places) -> Report:
    """The rows with their variants; published ones are added, counts that are zero everywhere left out."""
    from wyfast_lib import records

    every = [
        replace(row, variant=request.variant)
        for request, found in zip(requests, rows, strict=True)
        for row in (*found, *published.rows(request))
    ]
    alive = {row.key for row in every if row.value}
    origin = records.provenance(device="cuda" if "gpu" in places else None)
    if "npu" in places:
        import torch

        origin["device"] = torch.npu.get_device_name(0)
    first = requests[0]
    return Report(
        kernel=first.kernel, sizes=first.sizes, dtype=first.dtype, variants=[r.variant for r in requests],
        rows=[row for row in every if row.key in alive], notes=list(dict.fromkeys(notes)), provenance=origin,
    )  # fmt: skip
