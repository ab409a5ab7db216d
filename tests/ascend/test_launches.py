"""The launches of a recorded row are counted by making the call: ours, and the peer's."""

from pathlib import Path

import pytest
import torch

from wyfast_lib import records
from wyfast_lib.ascend import compile_records, launches, production

DATA = Path(__file__).parents[2] / "data" / "ascend_compile.csv"


def committed() -> dict:
    """(device, provider, op, phase, shape, dtype, note) -> {metric: value} of the recorded launches."""
    found: dict = {}
    for row in records.read(DATA):
        if row.metric.endswith("_launches"):
            key = (row.device, row.provider, row.op, row.phase, row.shape, row.dtype, row.note)
            found.setdefault(key, {})[row.metric] = row.p50
    return found


def test_the_recorded_launches_of_ours_are_those_of_the_call():
    rows = committed()
    seen = 0
    for case in production.cases(tuple(production.NAMES), widths=(128,)):
        H, Hg = production.HEADS[case.heads]
        name = production.NAMES[case.kernel]
        op, phase = ("chunk_bwd_dv_local", "backward") if name == "dv_local" else ("wy_fast", name)
        shape = compile_records.SHAPE.format(H=H, Hg=Hg, width=case.width, chunk=case.chunk)
        note = "varlen" if case.varlen else "dense"
        row = rows[f"{case.target} (compiler only)", "wyfast", op, phase, shape, case.dtype, note]
        kernels, host = launches.own(case)
        assert row == {"kernel_launches": kernels, "host_launches": host}, case
        seen += 1
    assert seen == sum(key[1] == "wyfast" for key in rows)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_recorded_launches_of_the_peer_are_those_of_its_call(phase):
    rows = [r for key, r in committed().items() if key[1].startswith("fla-core") and key[3] == phase]
    kernels, host = launches.beside(phase)
    assert rows and all(r == {"kernel_launches": kernels, "host_launches": host} for r in rows)


def test_views_and_uninitialised_memory_are_no_launches_and_a_copy_is_one():
    x = torch.empty(3, 4, device="meta")
    with launches.HostLaunches() as host:
        x.t().reshape(2, 6)[0]
        torch.empty_like(x), x.new_empty(2)
    assert host.count == 1  # the reshape of a transpose copies
    with launches.HostLaunches() as host:
        x.t().contiguous() + 1
        x.contiguous(), torch.promote_types(x.dtype, torch.float64)
    assert host.count == 2


def test_the_recorded_compiler_versions_are_the_installed_ones():
    versions = dict(compile_records.compilers())
    assert set(versions) == {"triton-ascend", "ascendnpu-ir"}
    recorded = {row.triton for row in records.read(DATA)}
    assert recorded == {", ".join(f"{name} {version}" for name, version in versions.items())}
