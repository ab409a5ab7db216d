"""Tables of chunks that do not fit: a caller cannot make or pass one (rows 35 and 36)."""

import copy
import dataclasses
import pickle
import resource
import time

import pytest
import torch
from support import assert_bitwise, draw, run

from wyfast_lib import (
    ChunkTable,
    check_factor,
    chunk_bwd_dv_local,
    chunk_local_cumsum,
    prepare_chunks,
    wy_factor,
    wy_fast,
)
from wyfast_lib.integrations import fla
from wyfast_lib.varlen import Chunks

CU = [0, 40, 100]


def offsets(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


def indices(cu, BT):
    return prepare_chunks(torch.tensor(cu), BT).indices


def drop_last(x):
    return x[:-1]


# (cu_seqlens, indices) beside T = 100 and chunks of 16, and what is said of them
BAD = {
    "made for 32": (offsets(*CU), indices(CU, 32), "indices must list every chunk of 16"),
    "made for 64": (offsets(*CU), indices(CU, 64), "indices must list every chunk of 16"),
    "end before T": (offsets(0, 40, 90), indices([0, 40, 90], 16), "cu_seqlens must end at .*100.*got 90"),
    "end past T": (offsets(0, 40, 120), indices([0, 40, 120], 16), "cu_seqlens must end at .*100.*got 120"),
    "end far past T": (offsets(0, 40, 2**34), indices(CU, 16), "must end at .*100.*got 17179869184"),
    "of other offsets": (offsets(*CU), indices([0, 50, 100], 16), "indices must list every chunk"),
    "not from 0": (offsets(1, 40, 100), indices(CU, 16), "start at 0"),
    "decreasing": (offsets(0, 60, 40, 100), indices(CU, 16), "must not decrease"),
    "overflowing": (offsets(0, 2**63 - 1, -(2**63), 100), indices(CU, 16), "must not decrease"),
    "a chunk missing": (offsets(*CU), drop_last(indices(CU, 16)), "indices must list every chunk"),
    "none": (offsets(*CU), indices(CU, 16)[:0], "indices must list every chunk"),
    "a chunk twice": (offsets(*CU), indices(CU, 16)[[0, 1, 2, 3, 4, 5, 5]], "indices must list every chunk"),
    "out of order": (offsets(*CU), indices(CU, 16).flip(0), "indices must list every chunk"),
    "a sequence too many": (offsets(*CU), indices(CU, 16) + 1, "indices must list every chunk"),
    "negative": (offsets(*CU), -indices(CU, 16), "indices must list every chunk"),
    "columns swapped": (offsets(*CU), indices(CU, 16).flip(1), "indices must list every chunk"),
    "one column": (offsets(*CU), indices(CU, 16)[:, :1], r"indices must have shape \[NT, 2\]"),
    "flat": (offsets(*CU), indices(CU, 16).flatten(), r"indices must have shape \[NT, 2\]"),
    "no sequence": (offsets(0), indices(CU, 16), r"cu_seqlens must have shape \[N \+ 1\]"),
}
BAD_TYPES = {
    "float indices": (offsets(*CU), indices(CU, 16).float(), "indices must be int32 or int64"),
    "short indices": (offsets(*CU), indices(CU, 16).to(torch.int16), "indices must be int32 or int64"),
    "a list": (offsets(*CU), indices(CU, 16).tolist(), "indices must be a torch.Tensor"),
    "float offsets": (offsets(*CU).float(), indices(CU, 16), "cu_seqlens must be int32 or int64"),
    "listed offsets": (CU, indices(CU, 16), "cu_seqlens must be a torch.Tensor"),
}
CASES = [pytest.param(ValueError, *row, id=n) for n, row in BAD.items()]
CASES += [pytest.param(TypeError, *row, id=n) for n, row in BAD_TYPES.items()]


@pytest.mark.parametrize("kind, cu, idx, message", CASES)
def test_35_a_table_cannot_be_built_wrong(kind, cu, idx, message):
    with pytest.raises(kind, match=message):
        ChunkTable(cu, idx, 16, 100)


@pytest.mark.parametrize("waits", [False, True], ids=["cpu", "device"])
@pytest.mark.parametrize("kind, cu, idx, message", CASES)
def test_35_the_adapter_refuses_a_table_that_does_not_fit(monkeypatch, waits, kind, cu, idx, message):
    monkeypatch.setattr(fla, "_reading_waits", lambda _: waits)
    monkeypatch.setattr("wyfast_lib.backends.torch.forward", lambda *_: pytest.fail("it ran"))
    monkeypatch.setattr("wyfast_lib.backends.torch.backward", lambda *_: pytest.fail("it ran"))
    call = draw(T=100)
    with pytest.raises(kind, match=message):
        fla.recompute_w_u_fwd(call.k, call.v, call.beta, call.A, call.g, cu, idx)
    with pytest.raises(kind, match=message):
        fla.prepare_wy_repr_bwd(call.k, call.v, call.beta, call.A, call.dw, call.du, call.g, cu, idx)


def test_35_the_adapter_refuses_indices_without_offsets_or_beside_a_table():
    call = draw(T=100, cu=CU)
    inputs = (call.k, call.v, call.beta, call.A, call.g)
    with pytest.raises(ValueError, match="chunk_indices need the cu_seqlens"):
        fla.recompute_w_u_fwd(*inputs, None, call.chunks.indices)
    with pytest.raises(ValueError, match="chunk_indices must be None beside a table"):
        fla.recompute_w_u_fwd(*inputs, call.chunks, call.chunks.indices)


def test_35_the_adapter_takes_a_table_and_offsets_and_indices_alike():
    call = draw(T=100, cu=CU)
    inputs = (call.k, call.v, call.beta, call.A, call.g)
    narrow, wide = offsets(*CU, dtype=torch.int32), indices(CU, 16).long()
    forms = [(call.chunks, None), (offsets(*CU), None), (narrow, wide)]
    results = [dict(zip("wu", fla.recompute_w_u_fwd(*inputs, *form), strict=True)) for form in forms]
    assert_bitwise(results[0], results[1])
    assert_bitwise(results[0], results[2])


@pytest.fixture
def tables_made(monkeypatch):
    """Counts tables that the adapter checks, as on a device, where a check waits."""
    made = []

    def table(*arguments):
        made.append(arguments)
        return ChunkTable(*arguments)

    monkeypatch.setattr(fla, "_reading_waits", lambda _: True)
    monkeypatch.setattr(fla, "_checked", {})
    counted = type("Counted", (ChunkTable,), {"__new__": lambda _, *arguments: table(*arguments)})
    monkeypatch.setattr(fla, "ChunkTable", counted)
    return made


def test_35_on_a_device_the_same_tensors_are_read_once_and_again_after_a_write(tables_made):
    call = draw(T=100, cu=CU)
    cu, idx = offsets(*CU), indices(CU, 16)
    inputs = (call.k, call.v, call.beta, call.A, call.g)
    for _ in range(3):
        fla.recompute_w_u_fwd(*inputs, cu, idx)
        fla.prepare_wy_repr_bwd(*inputs[:4], call.dw, call.du, call.g, cu, idx)
    assert len(tables_made) == 1
    cu[1] = 41  # the same 7 chunks, other cuts
    other = fla.recompute_w_u_fwd(*inputs, cu, idx)
    assert len(tables_made) == 2
    expected = wy_fast(*inputs[:4], call.g * fla.LN2, cu_seqlens=offsets(0, 41, 100))
    assert torch.equal(other[0], expected[0]) and torch.equal(other[1], expected[1])
    idx[0, 0] = 1
    with pytest.raises(ValueError, match="indices must list every chunk"):
        fla.recompute_w_u_fwd(*inputs, cu, idx)


def test_35_tensors_that_died_are_not_mistaken_for_new_ones_and_few_are_remembered(tables_made):
    call = draw(T=100, cu=CU)
    for n in range(3 * fla._CHECKED_MOST):
        cu = offsets(0, 40 + n, 100)
        fla.recompute_w_u_fwd(
            call.k, call.v, call.beta, call.A, call.g, cu, indices([0, 40 + n, 100], 16)
        )
    assert len(tables_made) == 3 * fla._CHECKED_MOST
    assert len(fla._checked) <= fla._CHECKED_MOST


WRITES = {
    "offsets": lambda t: t.cu_seqlens.fill_(7),
    "one offset": lambda t: t.cu_seqlens.__setitem__(1, 99),
    "indices": lambda t: t.indices.fill_(2**30),
    "one index": lambda t: t.indices.__setitem__((0, 0), -5),
    "resized": lambda t: t.indices.resize_(1000, 2),
    "set": lambda t: t.indices.set_(torch.full((7, 2), 999, dtype=torch.int32)),
}
HIDDEN_WRITES = {
    "numpy": lambda t: t.indices.numpy().fill(2**30),
    "data": lambda t: t.cu_seqlens.data.fill_(2**40),
    "detached storage": lambda t: t.indices.untyped_storage().fill_(255),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_35_a_table_that_was_written_to_is_refused(write):
    call = draw(T=100, cu=CU)
    write(call.chunks)
    with pytest.raises(ValueError, match="written to after it was made"):
        wy_fast(call.k, call.v, call.beta, call.A, call.g, cu_seqlens=call.chunks)
    with pytest.raises(ValueError, match="written to after it was made"):
        chunk_local_cumsum(call.g, 16, call.chunks)


@pytest.mark.parametrize("write", HIDDEN_WRITES.values(), ids=HIDDEN_WRITES)
def test_35_a_write_that_pytorch_does_not_see_reaches_no_kernel(backend, device, write):
    call = draw(T=100, cu=CU, device=device)
    if device != "cpu" and write is HIDDEN_WRITES["numpy"]:
        pytest.skip("numpy has no view of a device's memory")
    expected = run(call, backend)
    write(call.chunks)
    arguments = (call.k, call.v, call.beta, call.A, call.g)
    found = wy_fast(*arguments, cu_seqlens=call.chunks, backend=backend)
    assert_bitwise(dict(zip("wu", found, strict=True)), {n: expected[n] for n in "wu"})


REPLACED = {"total": 90, "chunk_size": 32, "cu_seqlens": offsets(0, 100), "indices": indices(CU, 32)}


@pytest.mark.parametrize("change", [{n: x} for n, x in REPLACED.items()], ids=REPLACED)
def test_35_replacing_a_part_of_a_table_is_checked_and_assigning_to_it_refused(change):
    table = prepare_chunks(offsets(*CU), 16)
    with pytest.raises(ValueError, match="must"):
        dataclasses.replace(table, **change)
    for name, value in change.items():
        with pytest.raises(AttributeError):
            setattr(table, name, value)


def test_35_a_copy_of_a_table_is_a_table():
    table = prepare_chunks(offsets(0, 0, 40, 100), 16)
    copies = [copy.copy(table), copy.deepcopy(table), pickle.loads(pickle.dumps(table))]
    for other in (*copies, dataclasses.replace(table)):
        assert torch.equal(other.indices, table.indices) and torch.equal(other.cu_seqlens, table.cu_seqlens)
        assert (other.chunk_size, other.total, other.num_chunks) == (16, 100, 7)


def test_35_a_table_made_under_inference_mode_serves_outside_too():
    with torch.inference_mode():
        table = prepare_chunks(offsets(*CU), 16)
    call = draw(T=100, cu=CU)
    expected = run(call, "torch")
    call.chunks = table
    assert_bitwise(run(call, "torch"), expected)


OPERATORS = {
    "wy_fast": lambda c, cu: wy_fast(c.k, c.v, c.beta, c.A, c.g, cu_seqlens=cu),
    "wy_factor": lambda c, cu: wy_factor(c.k, c.beta, c.g, 16, cu),
    "chunk_local_cumsum": lambda c, cu: chunk_local_cumsum(c.g, 16, cu),
    "check_factor": lambda c, cu: check_factor(c.A, c.k, c.beta, c.g, cu),
    "chunk_bwd_dv_local": lambda c, cu: chunk_bwd_dv_local(c.k, c.k, c.du, c.g, None, cu, chunk_size=16),
    "fla forward": lambda c, cu: fla.recompute_w_u_fwd(c.k, c.v, c.beta, c.A, c.g, cu),
    "fla backward": lambda c, cu: fla.prepare_wy_repr_bwd(c.k, c.v, c.beta, c.A, c.dw, c.du, c.g, cu),
}
FAR = {
    "2^34": offsets(0, 2**34),
    "2^40 in two": offsets(0, 20, 2**40),
    "the largest": offsets(0, 2**63 - 1),
    "the largest int32": offsets(0, 2**31 - 1, dtype=torch.int32),
}


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
@pytest.mark.parametrize("cu", FAR.values(), ids=FAR)
def test_36_an_end_far_past_the_row_is_refused_at_once_and_allocates_nothing(operator, cu):
    call = draw(T=20)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    with pytest.raises(ValueError, match="cu_seqlens must end at T = 20"):
        operator(call, cu)
    assert time.perf_counter() - start < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


@pytest.mark.parametrize("cu", [x for n, x in FAR.items() if "int32" not in n], ids=str)
def test_36_a_table_of_more_tokens_than_a_kernel_counts_is_refused(cu):
    with pytest.raises(ValueError, match=r"below 2\^31"):
        prepare_chunks(cu, 16)


def test_36_a_table_for_another_row_is_refused():
    call, table = draw(T=20), prepare_chunks(offsets(0, 5, 21), 16)
    for operator in OPERATORS.values():
        with pytest.raises(ValueError, match="cu_seqlens must end at T = 20 .*got 21"):
            operator(call, table)


def test_the_backends_get_the_tables_own_tensors():
    """What a caller holds is a copy; the attributes of both agree."""
    table = prepare_chunks(offsets(*CU), 16)
    chunks = table.unchanged()
    assert type(chunks) is Chunks and isinstance(table, Chunks)
    for name in ("cu_seqlens", "indices"):
        mine, theirs = getattr(chunks, name), getattr(table, name)
        assert torch.equal(mine, theirs) and mine.data_ptr() != theirs.data_ptr()
