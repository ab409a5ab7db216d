"""Packed sequences: each equals itself alone; the table is right, independent and portable."""

import copy
import pickle

import pytest
import torch
from support import assert_bitwise, check, draw, run

from wyfast_lib import chunk_local_cumsum, prepare_chunks, wy_factor, wy_fast
from wyfast_lib.testing import TOLERANCE, error_ratio

CUTS = [
    [0, 40],
    [0, 16, 32, 40],
    [0, 0, 5, 5, 21, 40, 40],
    [0, 1, 2, 3, 40],
    [0, 15, 40],
    [0, 17, 40],
    [0, 0, 40, 40],
]


@pytest.mark.parametrize("cu", CUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_packed_sequences_equal_the_closed_form(backend, device, cu, dtype):
    check(draw(1, 40, 4, 2, cu=cu, dtype=dtype, device=device), backend)


@pytest.mark.parametrize("cu", CUTS, ids=str)
def test_each_sequence_equals_itself_alone(backend, device, cu):
    packed = draw(1, 40, 4, 2, cu=cu, device=device)
    together = run(packed, backend)
    for s, e in zip(cu[:-1], cu[1:], strict=True):
        for name, x in run(packed.tokens(s, e), backend).items():
            assert error_ratio(together[name][:, s:e], x.cpu()) <= TOLERANCE[torch.float32], name


def test_offsets_and_their_table_give_the_same_bits(backend, device):
    call = draw(cu=[0, 5, 5, 40], device=device)
    expected = run(call, backend)
    for dtype in (torch.int32, torch.int64):
        cu = torch.tensor([0, 5, 5, 40], dtype=dtype, device=device)
        w, u = wy_fast(call.k, call.v, call.beta, call.A, call.g, cu_seqlens=cu, backend=backend)
        assert torch.equal(w, expected["w"]) and torch.equal(u, expected["u"])
        assert torch.equal(prepare_chunks(cu, 16).indices, call.chunks.indices)


def test_the_table_lists_every_chunk_of_every_sequence():
    table = prepare_chunks(torch.tensor([0, 0, 5, 5, 38, 40], dtype=torch.int32), 16)
    assert table.indices.tolist() == [[1, 0], [3, 0], [3, 1], [3, 2], [4, 0]]
    assert table.indices.dtype == torch.int32 and table.cu_seqlens.dtype == torch.int64
    assert (table.num_chunks, table.chunk_size, table.total) == (5, 16, 40)


def test_rows_and_positions_are_inverse():
    table = prepare_chunks(torch.tensor([0, 0, 5, 5, 38, 40]), 16)
    tokens, valid = table.rows()
    assert tokens[valid].tolist() == list(range(40))
    assert torch.equal(tokens.flatten()[table.positions()], torch.arange(40))


def test_the_table_does_not_follow_later_writes_into_the_offsets():
    cu = torch.tensor([0, 5, 40])
    table = prepare_chunks(cu, 16)
    cu[1] = 30
    assert table.cu_seqlens.tolist() == [0, 5, 40]


def test_a_reused_buffer_of_offsets_is_read_afresh_each_call(backend, device):
    """Tables cached on a tensor's identity answer with the old cuts."""
    cu = torch.tensor([0, 5, 40], device=device)
    for cut in (5, 30):
        cu[1] = cut
        call = draw(cu=[0, cut, 40], device=device)
        w, u = wy_fast(call.k, call.v, call.beta, call.A, call.g, cu_seqlens=cu, backend=backend)
        expected = run(call, backend)
        assert torch.equal(w, expected["w"]) and torch.equal(u, expected["u"])


def test_a_copied_or_pickled_table_works_and_equality_is_identity():
    call = draw(cu=[0, 5, 40])
    expected = run(call, "torch")
    for table in (copy.deepcopy(call.chunks), pickle.loads(pickle.dumps(call.chunks))):
        w, _ = wy_fast(call.k, call.v, call.beta, call.A, call.g, cu_seqlens=table)
        assert torch.equal(w, expected["w"])
        assert table != call.chunks and table == table and len({table, call.chunks}) == 2


def test_one_sequence_packed_equals_dense(backend, device):
    dense = draw(T=40, device=device)
    packed = draw(T=40, cu=[0, 40], device=device)
    for n in ("k", "A", "g"):
        assert torch.equal(getattr(dense, n), getattr(packed, n)), n
    a, b = run(dense, backend), run(packed, backend)
    for name in a:
        assert error_ratio(a[name], b[name].cpu()) <= TOLERANCE[torch.float32], name


def test_gradients_of_packed_sequences_do_not_mix(backend, device):
    call = draw(cu=[0, 20, 40], device=device)
    other = call.map(torch.clone)
    for x in (other.k, other.v, other.beta, other.g, other.dw, other.du):
        x[:, 20:] *= 0.5
    a, b = run(call, backend), run(other, backend)
    assert_bitwise({n: x[:, :20] for n, x in a.items()}, {n: x[:, :20] for n, x in b.items()})


def test_a_packed_channel_gate_equals_the_closed_form(backend, device):
    call = draw(1, 40, 4, 2, cu=[0, 5, 5, 40], device=device)
    call.gk = -torch.rand(call.k.shape, device=device)
    check(call, backend)


def test_the_stages_before_restart_at_each_sequence_too():
    call = draw(1, 40, 4, 2, cu=[0, 7, 7, 40], dtype=torch.float64)
    step = -torch.rand(1, 40, 4, dtype=torch.float64)
    g = chunk_local_cumsum(step, 16, call.chunks)
    A = wy_factor(call.k, call.beta, g, 16, call.chunks)
    for s, e in ((0, 7), (7, 40)):
        alone = chunk_local_cumsum(step[:, s:e], 16)
        assert torch.equal(g[:, s:e], alone)
        assert error_ratio(A[:, s:e], wy_factor(call.k[:, s:e], call.beta[:, s:e], alone, 16)) < 1e-14
