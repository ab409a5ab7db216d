"""Our kernels beside those of fla-core 0.6.0, counted by the same audit."""

import pytest

from wyfast_lib.ascend import compile_records, production


def _counts(rows, phase):
    return {row.metric: row.p50 for row in rows if row.phase == phase}


@pytest.mark.gate
def test_half_the_peers_bytes_in_a_sixth_of_its_launches():
    peers = compile_records.beside("Ascend910B2")
    ours = [row for kernel in production.KERNELS for row in compile_records.own(production.Case(kernel))]
    for phase in ("forward", "backward"):
        mine, other = _counts(ours, phase), _counts(peers, phase)
        assert mine["global_bytes"] <= (0.75 if phase == "forward" else 0.33) * other["global_bytes"]
        assert mine["kernel_launches"] <= other["kernel_launches"]
        assert mine["host_launches"] <= other["host_launches"]
        assert mine["bursts"] < other["bursts"] and mine["sync_instructions"] < other["sync_instructions"]
    assert _counts(ours, "backward")["scratch_bytes"] == 0 < _counts(peers, "backward")["scratch_bytes"]
