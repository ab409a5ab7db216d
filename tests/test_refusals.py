"""Every row of the table of refusals, from both sides: what it names is refused, its neighbour runs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product

import pytest
import refusals
import torch
from refusals import ASCEND, BOTH, DV_LOCAL, HALF, TABLE, WY_FAST, Machine
from support import assert_refused, check, draw, operate, run
from torch._subclasses.fake_tensor import FakeTensorMode

from wyfast_lib import backends, chunk_bwd_dv_local, wy_fast
from wyfast_lib.backends import ascend_plan
from wyfast_lib.inputs import Shape

A2, A5 = "Ascend910B2", "Ascend950PR_9589"
MACHINES = {
    "lowered for 910B2": Machine("lowered", "cpu"),
    "lowered for 950": Machine("lowered", "cpu", arch35=True),
    "910B2": Machine("ascend", "npu"),
    "950": Machine("ascend", "npu", arch35=True),
    "the interpreter": Machine("cuda", "cpu", interpreted=True),
    "Turing": Machine("cuda", "cuda", capability=(7, 5), shared_memory=64 << 10),
    "Hopper": Machine("cuda", "cuda"),
}
FAKE = {"npu": "cpu"}  # PyTorch makes no tensor for a device that it does not know, not even a fake one


class Reached(Exception):
    """The call was accepted: the backend was told to compute."""


@cache  # a fake tensor takes a tenth of a millisecond to make
def hollow(size: tuple[int, ...], dtype: torch.dtype, place: str) -> torch.Tensor:
    return torch.zeros((), dtype=dtype, device=place).expand(size)


@dataclass
class Hollow:
    """A call without memory: every tensor is one number, expanded. Of any size, checked like any other."""

    operator: str
    shape: Shape
    dtypes: dict = field(default_factory=dict)  # float32 where nothing else is said
    gk: bool = False
    needs_grad: bool = False
    place: str | None = None  # the machine's own by default

    def tensors(self, place: str) -> dict[str, torch.Tensor]:
        """By the names of the operator's arguments."""
        s = self.shape
        keys, values, gates = (s.B, s.T, s.Hg, s.K), (s.B, s.T, s.H, s.V), (s.B, s.T, s.H)
        if self.operator == DV_LOCAL:
            sizes = {"q": keys, "k": keys, "do": values, "g": gates}
        else:
            sizes = {"k": keys, "v": values, "beta": gates, "A": (*gates, s.BT), "g": gates}
            sizes |= {"gk": keys} if self.gk else {}
        return {n: hollow(size, self.dtypes.get(n, torch.float32), place) for n, size in sizes.items()}


@pytest.fixture
def on(monkeypatch):
    """on(machine): its backend is ready, believes to be there, and raises Reached where it would compute."""

    def reached(*_):
        raise Reached

    def arrange(where: Machine):
        module = backends.load(where.backend)
        monkeypatch.setattr(backends, "_ready", {where.backend: module})
        for name in ("forward", "backward", "dv_local"):
            monkeypatch.setattr(module, name, reached)
        if where.backend in ASCEND:
            device = ascend_plan.Device(A5 if where.arch35 else A2, 20)
            monkeypatch.setattr(module, "device", lambda: device)
            place = FAKE.get(where.place, where.place)
            monkeypatch.setattr(module._planned, "tensors", place)
            return replace(where, place=place)
        monkeypatch.setattr(module, "INTERPRET", where.interpreted)
        monkeypatch.setattr(module, "_device", lambda _: where)
        return where

    return arrange


def attempt(call: Hollow, where: Machine):
    """The public operator on that machine; where the tensors are fake, the backend's own check alone."""
    place = call.place or where.place
    if place == "cuda":
        with FakeTensorMode():
            return ask(call, where, place)
    x = call.tensors(place)
    if call.operator == DV_LOCAL:
        return chunk_bwd_dv_local(**x, chunk_size=call.shape.BT, backend=where.backend)
    x["k"] = x["k"].detach().requires_grad_(call.needs_grad)
    return wy_fast(**x, backend=where.backend)


def ask(call: Hollow, where: Machine, place: str):
    """The backend's check; Reached when it lets the call pass."""
    x, module = call.tensors(place), backends.load(where.backend)
    if call.operator == DV_LOCAL:
        module.check_dv_local(**x, chunks=None, chunk_size=call.shape.BT)
    else:
        module.check_call(**{"gk": None} | x, chunks=None, needs_grad=call.needs_grad)
    raise Reached


def verdict(call: Hollow, where: Machine) -> list:
    """The rows of the table for it, as far as they show before a kernel is compiled."""
    x = call.tensors("meta")
    facts = refusals.facts(call.operator, x, call.shape.BT, None, call.needs_grad)
    found = refusals.rows(replace(facts, place=call.place or where.place), where)
    return [row for row in found if not row.late]


def small(operator, K=8, V=8, BT=64, **more) -> Hollow:
    """A call that every machine takes, but for what the caller changes."""
    return Hollow(operator, Shape(1, 16, 2, 1, K, V, BT), **more)


def sized(operator, B=1, T=16, H=1, BT=64) -> Hollow:
    return Hollow(operator, Shape(B, T, H, 1, 8, 8, BT))


# name of a row -> [(what is refused, its neighbour, which is not)], by operator
EDGES = {
    "tensors on another device": lambda o: [(small(o, place="meta"), small(o))],
    "float64": lambda o: [
        (small(o, dtypes={n: torch.float64}), small(o, dtypes={n: torch.float16}))
        for n in small(o).tensors("meta")
    ],
    "rows over 256 wide": lambda o: [
        (small(o, K=257), small(o, K=256)), (small(o, V=257), small(o, V=256)),
    ],
    "a channel gate on wide half-precision rows of chunks of 128": lambda o: [
        (wide_gk(), replace(wide_gk(), shape=Shape(1, 16, 2, 1, 128, 8, 128))),
        (wide_gk(), replace(wide_gk(), shape=Shape(1, 16, 2, 1, 129, 8, 64))),
        (wide_gk(), replace(wide_gk(), gk=False)),
        (wide_gk(), replace(wide_gk(), dtypes={"k": torch.float16, "v": torch.float32})),
    ],
    "the backward of chunks of 128": lambda o: [
        (small(o, BT=128, needs_grad=True), small(o, BT=64, needs_grad=True)),
        (small(o, BT=128, needs_grad=True), small(o, BT=128)),
    ],
    "the backward in float16 on the Ascend 950": lambda o: [
        (small(o, dtypes={n: torch.float16}, needs_grad=True), other)
        for n in "kv"
        for other in (small(o, dtypes={n: torch.float16}), small(o, dtypes={n: HALF[0]}, needs_grad=True))
    ],
    "2^31 tokens times heads": lambda o: [
        (sized(o, T=2**31), sized(o, T=2**31 - 1)), (sized(o, B=2**15, T=2**15, H=2), sized(o, 2**15, 2**15)),
    ],
    "rows over 512 wide": lambda o: [
        (small(o, K=513), small(o, K=512)), (small(o, V=513), small(o, V=512)),
    ],
    "2^24 elements a token": lambda o: [(sized(o, H=2**18), sized(o, H=2**18 - 1))],
    "2^31 programs": lambda o: [(sized(o, B=2**14, H=2**17), sized(o, B=2**14 - 1, H=2**17))],
    "bfloat16 in the interpreter": lambda o: [
        (small(o, dtypes={"k": HALF[0]}), small(o, dtypes={"k": HALF[1]})),
        (small(o, dtypes={"g": HALF[0]}), small(o, dtypes={"g": HALF[1]})),
    ],
    "bfloat16 before Ampere": lambda o: [(small(o, dtypes={"k": HALF[0]}), small(o, dtypes={"k": HALF[1]}))],
}  # fmt: skip


def wide_gk() -> Hollow:
    return Hollow(WY_FAST, Shape(1, 16, 2, 1, 129, 8, 128), {"k": HALF[1], "v": HALF[1]}, gk=True)


CASES = [
    pytest.param(row, operator, name, id=f"{row.name}-{operator}-{name}")
    for row in TABLE
    for operator in row.operators
    for name, where in MACHINES.items()
    if where.backend in row.backends and not row.late
    and ("950" not in row.name or where.arch35)
    and (row.name != "bfloat16 in the interpreter" or where.interpreted)
    and (row.name != "bfloat16 before Ampere" or name == "Turing")
]  # fmt: skip


@pytest.mark.parametrize("row, operator, name", CASES)
def test_what_a_row_names_is_refused_and_its_neighbour_is_not(on, row, operator, name):
    where = on(MACHINES[name])
    for refused, neighbour in EDGES[row.name](operator):
        assert row in verdict(refused, where), "the table does not name its own example"
        # The public call gives meta tensors their shapes whatever the backend: that one is asked itself.
        asked = ask if refused.place else lambda call, where, _: attempt(call, where)
        assert_refused(lambda f=asked, c=refused: f(c, where, c.place), where.backend, [row])
        if where.capability < (8, 0):
            neighbour.dtypes = {n: x if x != HALF[0] else HALF[1] for n, x in neighbour.dtypes.items()}
        assert not verdict(neighbour, where)
        with pytest.raises(Reached):
            attempt(neighbour, where)


def test_every_row_has_its_edges_and_a_machine_that_shows_it():
    early = {row.name for row in TABLE if not row.late}
    assert early == set(EDGES)
    shown = {(case.values[0], case.values[1]) for case in CASES}
    assert shown == {(row, operator) for row in TABLE if not row.late for operator in row.operators}


def grid(operator):
    """Sizes at and past each limit, every pair of dtypes of k and v, some of g, a channel gate, gradients."""
    dtypes = (torch.float32, torch.float64, *HALF)
    pairs = list(product(dtypes, repeat=2)) if operator == WY_FAST else [(x, x) for x in dtypes]
    flags = list(product((False, True), repeat=2)) if operator == WY_FAST else [(False, False)]
    values = "v" if operator == WY_FAST else "do"
    for K, V, BT in product((1, 128, 129, 256, 257, 512, 513), (8, 257, 513), (16, 64, 128)):
        for (k, v), gate, (gk, grad) in product(pairs, (torch.float32, HALF[0], torch.float64), flags):
            if not (gk and grad):  # refused by the operator itself, in backward
                yield small(operator, K, V, BT, dtypes={"k": k, values: v, "g": gate}, gk=gk, needs_grad=grad)


@pytest.mark.parametrize("operator", BOTH)
@pytest.mark.parametrize("name", MACHINES)
def test_a_call_is_refused_if_and_only_if_the_table_says_so(on, name, operator):
    where = on(MACHINES[name])
    refused = 0
    with FakeTensorMode() if where.place == "cuda" else torch.no_grad():
        for n, call in enumerate(grid(operator)):
            if n % 5:  # five divides no side of the grid: what stays differs in every direction
                continue
            rows = verdict(call, where)
            refused += bool(rows)
            try:
                ask(call, where, where.place)
            except Reached:
                assert not rows, f"{call} was accepted against {[row.name for row in rows]}"
            except (ValueError, NotImplementedError) as error:
                named = [r for r in rows if type(error) is r.kind and re.search(r.message, str(error))]
                assert named, f"{call}: {error!r} is in no row of {[row.name for row in rows]}"
    assert refused


# ---- the boundaries where a kernel really runs ----


@pytest.mark.parametrize("K, V", [(256, 20), (257, 20), pytest.param(20, 256, marks=pytest.mark.gate)])
def test_the_widest_rows_are_right_and_wider_ones_refused_or_right(backend, device, K, V):
    check(draw(1, 20, 2, 1, K, V, device=device), backend)


@pytest.mark.parametrize("BT", [64, 128])
def test_the_backward_of_long_chunks_is_right_or_refused_and_their_forward_right(backend, device, BT):
    call = draw(1, BT + 5, 2, 1, 16, 16, BT, device=device)
    results = check(call, backend)
    assert {"w", "u"} <= set(results)
    assert ("dk" in results) == (BT == 64 or backend not in ASCEND)


@pytest.mark.parametrize("K, BT", [(128, 128), (129, 128), (129, 64)])
def test_a_channel_gate_on_wide_rows_is_right_or_refused(backend, device, K, BT):
    call = draw(1, 20, 2, 1, K, 16, BT, dtype=torch.float16, device=device)
    results = check(replace(call, gk=-torch.rand(call.k.shape, device=device).half()), backend)
    assert bool(results) == ((K, BT) != (129, 128) or backend not in ASCEND)


def test_float16_on_the_ascend_950_runs_forward_only(monkeypatch):
    monkeypatch.setenv("WYFAST_LOWERED_TARGET", A5)
    call = draw(1, 40, 2, 1, dtype=torch.float16)
    assert set(check(call, "lowered")) == {"w", "u"}


def test_a_refusal_that_the_table_does_not_know_is_an_error():
    call = draw(dtype=torch.float64)
    with pytest.raises(AssertionError, match="is none of"):
        assert_refused(lambda: operate(call, "lowered", True), "lowered", [TABLE[2]])
    with pytest.raises(AssertionError, match="ran before"):
        assert_refused(lambda: operate(draw(), "torch", True), "torch", [TABLE[1]])


def test_a_call_that_is_refused_without_a_row_is_an_error(monkeypatch):
    monkeypatch.setattr(refusals, "TABLE", ())
    with pytest.raises(NotImplementedError, match="got float64"):
        run(draw(dtype=torch.float64), "lowered")
