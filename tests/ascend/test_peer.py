"""The peer's kernels (fla-core 0.6.0, imported, never copied) through the same compiler and audit."""

import importlib.metadata

import pytest

from wyfast_lib.ascend import compile_kernel, peer
from wyfast_lib.ascend.audit import audit


@pytest.fixture(scope="module")
def table():
    return peer.peer_table()


def test_a_missing_peer_names_the_pip_command(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(ModuleNotFoundError, match='pip install "fla-core==0.6.0"'):
        peer.require()


def test_tile_sizes_come_from_the_peers_own_model_of_ub():
    tiles = {
        k.name: (k.constexprs.get("BK"), k.constexprs.get("BV")) for k in peer.peer_kernels(K=256, V=256)
    }
    assert tiles["recompute_w_u_fwd_kernel_npu"] == (128, 128)
    assert tiles["prepare_wy_repr_bwd_kv_npu"] == (256, 256)


def test_the_minimum_of_a_backward_is_104_5_kb():
    assert peer.backward_minimum(128, 128, 64, 2) == 104.5 * 1024
    assert peer.forward_minimum(128, 128, 64, 2) == 72.25 * 1024


def test_all_seven_kernels_compile_with_contiguous_gates_and_none_is_discrete(table):
    rows = [r for r in table.rows if r.layout == "contiguous"]
    assert len(rows) == 7 and not any(r.error for r in rows)
    assert all(r.discrete == 0 and r.retries == 0 for r in rows)


def test_the_backward_moves_twelve_times_its_minimum_most_of_it_workspace(table):
    sums = table.sums("backward", "contiguous")
    assert sums["kernels"] == 6 and sums["failed"] == 0
    assert (
        sums["scratch"] == 160 * 1024
    )  # three float32 tensors of 16 KB, written once and read, some of it twice
    assert sums["workspace"] > 2 * (sums["arguments"] + sums["scratch"])
    assert 12 < sums["total"] / table.minimum["backward"] < 12.5


def test_the_main_backward_kernel_reads_and_writes_each_argument_once(table):
    row = next(r for r in table.rows if r.kernel == "prepare_wy_repr_bwd_kv_npu" and r.layout == "contiguous")
    assert row.audit.argument_bytes() == row.audit.minimum_bytes == row.arguments + row.scratch
    assert row.arguments == 104.5 * 1024 and row.split is True


def test_strided_gates_send_row_scaling_to_the_scalar_unit_and_one_kernel_out_of_ub(table):
    strided = {r.kernel: r for r in table.rows if r.layout == "strided"}
    dense = {r.kernel: r for r in table.rows if r.layout == "contiguous"}
    name = "prepare_wy_repr_bwd_kv_npu"
    assert dense[name].scalar_elements == 0
    assert strided[name].scalar_elements > 90_000  # four [64, 128] products, two reads and a write an element
    assert strided["prepare_wy_repr_bwd_finalize_a2_dg_npu"].error.startswith(
        "does not fit: needs 384 KB of 192 KB"
    )
    assert "1 of 6 do not compile" in str(table)


def test_dv_local_at_the_published_shape_differs_by_bursts_and_deinterleaves_only():
    strided, dense = (audit(peer.peer_dv_local(t_contig=c).compile()) for c in (False, True))
    gates = [r for r in strided.rows if r.argument == "g"]
    assert len(gates) == 2 and all(r.layout == "discrete" and r.bursts == 32 and r.times == 2 for r in gates)
    assert all(r.bursts == 1 for r in dense.rows if r.argument == "g")
    assert sum(r.template.startswith("deinterleave") for r in strided.rows) == 2
    assert strided.totals["scalar_elements"] == dense.totals["scalar_elements"]
    assert strided.totals["vector_calls"] - dense.totals["vector_calls"] == 4
    assert strided.argument_bytes() == dense.argument_bytes()


def test_dv_local_with_a_stride_known_only_at_run_time_is_padded_through_all_its_vector_work():
    kernel = peer.peer_dv_local(t_contig=False)
    constexprs = {name: value for name, value in kernel.constexprs.items() if name != "HV"}
    known = audit(kernel.compile()).totals
    unknown = audit(compile_kernel(kernel.kernel, {**kernel.signature, "HV": "i32"}, constexprs)).totals
    assert (known["bursts"], unknown["bursts"]) == (588, 6720)
    assert (known["vector_instructions"], unknown["vector_instructions"]) == (128, 6754)
    assert unknown["scalar_elements"] > 30 * known["scalar_elements"]
    assert unknown["ub_peak"] > 5 * known["ub_peak"]
