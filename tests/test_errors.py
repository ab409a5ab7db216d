"""Bad input: which argument, what it got, what is allowed; and nothing has run or changed by then."""

import re

import pytest
import torch
from support import draw

from wyfast_lib import (
    ChunkTable,
    check_factor,
    chunk_local_cumsum,
    prepare_chunks,
    wy_factor,
    wy_fast,
)
from wyfast_lib.backends import torch as torch_backend

NAMES = ("k", "v", "beta", "A", "g", "gk", "cu_seqlens")


def arguments(**changed):
    """Keyword arguments of a valid call, B=1 T=40 H=2 Hg=1 K=8 V=12 BT=16, some replaced."""
    call = draw()
    good = {n: getattr(call, n) for n in ("k", "v", "beta", "A", "g")}
    good["gk"], good["cu_seqlens"] = torch.zeros_like(call.k), torch.tensor([0, 5, 40])
    assert set(good) == set(NAMES)
    return good | {n: f(good[n]) for n, f in changed.items()}


def offsets(*values, dtype=torch.int64):
    return lambda _: torch.tensor(values, dtype=dtype)


def table(cu, BT):
    return lambda _: prepare_chunks(torch.tensor(cu), BT)


VALUE_ERRORS = {
    # rank
    "k": [(lambda x: x[0], r"k .*\[B, T, Hg, K\].* got \[40, 1, 8\]")],
    "v": [
        (lambda x: x[0], r"v .*\[B, T, H, V\].* got \[40, 2, 12\]"),
        (lambda x: x[:, :39], r"v .*\[1, 40, 2, 12\], got \[1, 39, 2, 12\]"),
        (lambda x: x[:, :, :1], r"v .*\[1, 40, 2, 12\], got \[1, 40, 1, 12\]"),
        (lambda x: x[..., :0], r"V must be at least 1, got v of shape \[1, 40, 2, 0\]"),
    ],
    "beta": [
        (lambda x: x[..., None], r"beta .*\[B, T, H\].* got \[1, 40, 2, 1\]"),
        (lambda x: x[:, :39], r"beta .*\[1, 40, 2\], got \[1, 39, 2\]"),
    ],
    "A": [
        (lambda x: x[..., 0], r"A .*\[B, T, H, BT\].* got \[1, 40, 2\]"),
        (lambda x: x[..., :15], r"A.shape\[-1\] .*BT.*\(16, 32, 64, 128\), got 15"),
        (lambda x: x[..., :0], r"A.shape\[-1\] .*\(16, 32, 64, 128\), got 0"),
        (lambda x: x[:, :39], r"A .*\[1, 40, 2, 16\], got \[1, 39, 2, 16\]"),
    ],
    "g": [
        (lambda x: x[0], r"g .*\[B, T, H\].* got \[40, 2\]"),
        (lambda x: x[:, :, :1], r"g .*\[1, 40, 2\], got \[1, 40, 1\]"),
    ],
    "gk": [
        (lambda x: x[..., 0], r"gk .*\[B, T, Hg, K\].* got \[1, 40, 1\]"),
        (lambda x: x[..., :7], r"gk .*\[1, 40, 1, 8\], got \[1, 40, 1, 7\]"),
    ],
    "cu_seqlens": [
        (offsets(1, 5, 40), r"cu_seqlens must start at 0, got 1"),
        (offsets(0, 5, 39), r"cu_seqlens must end at T = 40 .*got 39"),
        (offsets(0, 5, 41), r"cu_seqlens must end at T = 40 .*got 41"),
        (offsets(0, 20, 5, 40), r"cu_seqlens must not decrease, got 20 followed by 5"),
        (offsets(0), r"cu_seqlens must have shape \[N \+ 1\].* got \[1\]"),
        (lambda x: x[None], r"cu_seqlens must have shape \[N \+ 1\].* got \[1, 3\]"),
        (table([0, 5, 40], 32), r"chunk table .* 32, this call needs 16"),
        (table([0, 5, 41], 16), r"cu_seqlens must end at T = 40 .*got 41"),
    ],
}
TYPE_ERRORS = {
    **{
        n: [
            (lambda x: x.int(), rf"{n} must be float64, .*bfloat16, got torch.int32"),
            (lambda x: x.to(torch.complex64), rf"{n} must be float64, .*got torch.complex64"),
            (lambda x: x.bool(), rf"{n} must be float64, .*got torch.bool"),
            (lambda x: x.to_sparse(), rf"{n} must be dense and strided, got torch.sparse_coo"),
            (lambda x: x.tolist(), rf"{n} must be a torch.Tensor of shape .*got list"),
        ]
        for n in ("k", "v", "beta", "A", "g", "gk")
    },
    "cu_seqlens": [
        (lambda x: x.tolist(), r"cu_seqlens must be a torch.Tensor of int32 or int64, got list"),
        (lambda x: x.float(), r"cu_seqlens must be int32 or int64, got torch.float32"),
        (lambda x: x.to(torch.int16), r"cu_seqlens must be int32 or int64, got torch.int16"),
    ],
}
CASES = [
    pytest.param(kind, name, change, message, id=f"{kind.__name__}-{name}-{n}")
    for kind, errors in ((ValueError, VALUE_ERRORS), (TypeError, TYPE_ERRORS))
    for name, rows in errors.items()
    for n, (change, message) in enumerate(rows)
]


@pytest.fixture
def nothing_runs(monkeypatch):
    """A backend that is reached fails the test."""

    def reached(*_):
        raise AssertionError("the backend was called with bad input")

    monkeypatch.setattr(torch_backend, "forward", reached)
    monkeypatch.setattr(torch_backend, "backward", reached)


def unchanged(before: dict, after: dict):
    for n, x in after.items():
        if isinstance(x, torch.Tensor) and x.layout == torch.strided:
            assert torch.equal(x, before[n]), f"{n} was modified"


@pytest.mark.parametrize("kind, name, change, message", CASES)
def test_bad_input_is_named_before_anything_runs(nothing_runs, kind, name, change, message):
    bad = arguments(**{name: change})
    before = {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in bad.items()}
    with pytest.raises(kind, match=message) as raised:
        wy_fast(**bad)
    assert type(raised.value) is kind
    unchanged(before, bad)


def test_heads_that_key_heads_do_not_divide_are_refused(nothing_runs):
    call = draw(H=5, Hg=5)
    with pytest.raises(ValueError, match="H must be a multiple of Hg, got H = 5 heads over Hg = 2"):
        wy_fast(call.k[:, :, :2], call.v, call.beta, call.A, call.g)
    with pytest.raises(ValueError, match="multiple"):
        wy_factor(call.k[:, :, :2], call.beta, call.g, 16)


def test_more_key_heads_than_heads_are_refused(nothing_runs):
    call = draw(H=4, Hg=4)
    two = [x[:, :, :2] for x in (call.v, call.beta, call.A, call.g)]
    with pytest.raises(ValueError, match="got H = 2 heads over Hg = 4"):
        wy_fast(call.k, *two)


def test_widths_of_zero_are_refused(nothing_runs):
    call = draw()
    with pytest.raises(ValueError, match="at least 1, got H = 2, Hg = 1, K = 0"):
        wy_fast(call.k[..., :0], call.v, call.beta, call.A, call.g)
    with pytest.raises(ValueError, match="at least 1, got H = 2, Hg = 0, K = 8"):
        wy_fast(call.k[:, :, :0], call.v, call.beta, call.A, call.g)


def test_packed_sequences_need_a_single_row(nothing_runs):
    call = draw(B=2)
    for cu in (torch.tensor([0, 5, 40]), prepare_chunks(torch.tensor([0, 5, 40]), 16)):
        with pytest.raises(ValueError, match="B must be 1, got k with B = 2"):
            wy_fast(call.k, call.v, call.beta, call.A, call.g, cu_seqlens=cu)


@pytest.mark.parametrize("name", ["v", "beta", "A", "g", "gk"])
def test_inputs_on_two_devices_are_refused(nothing_runs, name):
    bad = arguments(**{name: lambda x: x.to("meta")})
    with pytest.raises(ValueError, match=f"{name} is on meta, k on cpu: one device is needed"):
        wy_fast(**bad)


def test_offsets_or_a_table_on_another_device_are_refused(nothing_runs):
    good = prepare_chunks(torch.tensor([0, 5, 40]), 16)
    elsewhere = [
        ChunkTable(good.cu_seqlens.to("meta"), good.indices.to("meta"), 16, 40),
        torch.empty(3, dtype=torch.int64, device="meta"),
    ]
    for cu in elsewhere:
        with pytest.raises(ValueError, match="cu_seqlens is on meta, k on cpu"):
            wy_fast(**arguments(cu_seqlens=lambda _, cu=cu: cu))


@pytest.mark.parametrize("unknown", ["gpu", "", 3])
def test_an_unknown_backend_is_refused_with_the_names_that_exist(unknown, nothing_runs):
    with pytest.raises(ValueError, match=rf"backend must be one of .*'torch'.* got {unknown!r}"):
        wy_fast(**arguments(), backend=unknown)


def factor(call, chunk_size=16, **changed):
    tensors = {n: getattr(call, n) for n in ("k", "beta", "g")}
    return wy_factor(**(tensors | changed), chunk_size=chunk_size)


CU = torch.tensor([0, 39])
COMPANIONS = {
    "cumsum-rank": (ValueError, lambda c: chunk_local_cumsum(c.g[0], 16), r"g .*\[B, T, H\].* got \[40, 2\]"),
    "cumsum-dtype": (TypeError, lambda c: chunk_local_cumsum(c.g.long(), 16), "g must be .*got torch.int64"),
    "cumsum-size": (ValueError, lambda c: chunk_local_cumsum(c.g, 48), "chunk_size must be one of .*got 48"),
    "cumsum-float": (TypeError, lambda c: chunk_local_cumsum(c.g, 16.0), "must be an int, got float"),
    "cumsum-bool": (TypeError, lambda c: chunk_local_cumsum(c.g, True), "must be an int, got bool"),
    "cumsum-end": (ValueError, lambda c: chunk_local_cumsum(c.g, 16, CU), r"T = 40 \(from g\), got 39"),
    "factor-size": (ValueError, lambda c: factor(c, 8), "chunk_size must be one of .*got 8"),
    "factor-end": (ValueError, lambda c: factor(c, cu_seqlens=CU), r"T = 40 \(from k\), got 39"),
    "factor-out": (TypeError, lambda c: factor(c, out_dtype=torch.int32), "out_dtype must be .*int32"),
    "factor-out-str": (TypeError, lambda c: factor(c, out_dtype="bf16"), "out_dtype must be .*'bf16'"),
    "factor-g": (ValueError, lambda c: factor(c, g=c.g[:, :9]), r"g .*\[1, 40, 2\], got \[1, 9, 2\]"),
    "factor-device": (ValueError, lambda c: factor(c, beta=c.beta.to("meta")), "beta is on meta, k on cpu"),
    "check-A": (ValueError, lambda c: check_factor(c.A[:, :9], c.k, c.beta), r"A .*\[1, 40, 2, 16\], got"),
    "check-size": (ValueError, lambda c: check_factor(c.A[..., :9], c.k, c.beta), r"A.shape\[-1\] .*got 9"),
    "chunks-list": (TypeError, lambda c: prepare_chunks([0, 5], 16), "cu_seqlens must be .*got list"),
    "chunks-start": (ValueError, lambda c: prepare_chunks(CU + 2, 16), "must start at 0, got 2"),
    "chunks-size": (ValueError, lambda c: prepare_chunks(CU, 24), "chunk_size must be one of .*got 24"),
    "chunks-table": (TypeError, lambda c: prepare_chunks(prepare_chunks(CU, 16), 16), "got ChunkTable"),
}


@pytest.mark.parametrize("kind, call, message", COMPANIONS.values(), ids=COMPANIONS)
def test_the_companions_refuse_bad_input_too(kind, call, message):
    with pytest.raises(kind, match=message):
        call(draw())


def test_messages_say_what_is_allowed():
    """Every message of the operator holds a requirement, not only a complaint."""
    for kind, name, change, _ in (case.values for case in CASES):
        with pytest.raises(kind) as raised:
            wy_fast(**arguments(**{name: change}))
        assert re.search(r"must|needs|needed", str(raised.value)), raised.value
