"""Any shape, dtype, layout, gate and cut: the operator equals the closed form."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import Call, assert_bitwise, assert_equal, draw, reference, run

from wyfast_lib import chunk_local_cumsum, prepare_chunks, wy_factor

FIXTURES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])
STRENGTH = {"none": None, "mild": 0.05, "usual": 1.0, "hard": 20.0}


@st.composite
def cuts(draw_from, T):
    """Offsets of packed sequences, empty ones included, or None for dense."""
    if draw_from(st.booleans()):
        return None
    inner = draw_from(st.lists(st.integers(0, T), max_size=4))
    return [0, *sorted(inner), T]


@st.composite
def calls(draw_from):
    """A call of any size with a factor that belongs to it; dtypes mixed, gates from none to hard."""
    T = draw_from(st.integers(0, 70))
    cu = draw_from(cuts(T))
    B = 1 if cu else draw_from(st.integers(1, 3))
    Hg, group = draw_from(st.integers(1, 2)), draw_from(st.integers(1, 3))
    K, V = draw_from(st.integers(1, 24)), draw_from(st.integers(1, 24))
    BT = draw_from(st.sampled_from([16, 32, 64]))
    strength = STRENGTH[draw_from(st.sampled_from(sorted(STRENGTH)))]
    call = draw(B, T, Hg * group, Hg, K, V, BT, gated=False, cu=cu, seed=draw_from(st.integers(0, 999)))
    k, v, gate = (draw_from(DTYPES) for _ in range(3))
    call = replace(call, k=call.k.to(k), dw=call.dw.to(k), v=call.v.to(v), du=call.du.to(v))
    g = None
    if strength is not None:
        g = chunk_local_cumsum(-strength * torch.rand(call.beta.shape), BT, call.chunks)
        g = g.to(torch.float32 if gate in (torch.float16, torch.bfloat16) else gate)
    beta = call.beta.to(gate)
    return replace(call, beta=beta, g=g, A=wy_factor(call.k, beta, g, BT, call.chunks))


@st.composite
def layouts(draw_from):
    """A function that stores a tensor otherwise without changing its values."""
    order = draw_from(st.permutations(range(4)))
    gap = draw_from(st.integers(1, 3))
    offset = draw_from(st.integers(0, 5))

    def store(x):
        dims = [d for d in order if d < x.dim()]
        sizes = [gap * x.shape[d] + 1 for d in dims]
        flat = x.new_full((offset + torch.Size(sizes).numel(),), torch.nan)
        inner = flat[offset:].view(sizes).permute([dims.index(d) for d in range(x.dim())])
        inner = inner[tuple(slice(0, gap * n, gap) for n in x.shape)]
        return inner.copy_(x)

    return store


@given(call=calls(), store=layouts())
@settings(FIXTURES)
def test_every_call_equals_the_closed_form(call, store):
    results = run(call.map(store), "torch")
    assert_equal(results, flushed(reference(call), results), call)


def flushed(expected, results):
    """A reference below the smallest normal number of float32 or of the result is zero to the operator."""
    out = {}
    for name, x in expected.items():
        tiny = torch.finfo(results[name].dtype).tiny
        out[name] = x.masked_fill(x.abs() < tiny, 0)
    return out


@given(call=calls(), store=layouts())
@settings(FIXTURES)
def test_layout_changes_no_bit_in_any_dtype(call: Call, store):
    plain, stored = run(call, "torch"), run(call.map(store), "torch")
    assert_bitwise(stored, plain)
    assert all(x.is_contiguous() for x in stored.values())


@given(T=st.integers(0, 300), BT=st.sampled_from([16, 32, 64, 128]), data=st.data())
@settings(FIXTURES)
def test_the_chunk_table_covers_every_token_once(T, BT, data):
    cu = data.draw(cuts(T)) or [0, T]
    table = prepare_chunks(torch.tensor(cu, dtype=data.draw(st.sampled_from([torch.int32, torch.int64]))), BT)
    tokens, valid = table.rows()
    assert tokens[valid].tolist() == list(range(T))
    assert table.num_chunks == sum((e - s + BT - 1) // BT for s, e in zip(cu[:-1], cu[1:], strict=True))
    assert torch.equal(table.positions(), valid.flatten().nonzero()[:, 0])


@given(cu=st.lists(st.integers(-3, 60), min_size=1, max_size=6))
@settings(FIXTURES)
def test_offsets_are_accepted_exactly_when_they_cut_the_row(cu):
    good = len(cu) >= 2 and cu[0] == 0 and cu == sorted(cu)
    if good:
        assert prepare_chunks(torch.tensor(cu), 16).total == cu[-1]
    else:
        with pytest.raises(ValueError, match="cu_seqlens"):
            prepare_chunks(torch.tensor(cu), 16)
