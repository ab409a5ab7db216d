"""What the tests share: one call with its upstream gradients, run on a backend and on the reference."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import refusals
import torch
from refusals import Refusal

from wyfast_lib import backends, chunk_bwd_dv_local, prepare_chunks, wy_fast
from wyfast_lib.inputs import Shape, make_inputs
from wyfast_lib.reference import wy_adjoint_reference, wy_fast_reference
from wyfast_lib.testing import error_ratio, tolerance
from wyfast_lib.varlen import ChunkTable

INPUTS = ("k", "v", "beta", "A", "g", "gk")
GRADIENTS = {"dk": "k", "dv": "v", "dbeta": "beta", "dg": "g"}


@dataclass
class Call:
    """The arguments of one `wy_fast` call and the upstream gradients dw, du."""

    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    A: torch.Tensor
    g: torch.Tensor | None
    dw: torch.Tensor
    du: torch.Tensor
    gk: torch.Tensor | None = None
    chunks: ChunkTable | None = None

    def map(self, f) -> Call:
        """The same call with f applied to every tensor of it."""
        tensors = {n: getattr(self, n) for n in (*INPUTS, "dw", "du")}
        return replace(self, **{n: f(x) for n, x in tensors.items() if x is not None})

    def rows(self, batch: slice) -> Call:
        """Some rows of the batch."""
        return self.map(lambda x: x[batch])

    def tokens(self, begin: int, end: int) -> Call:
        """Some tokens, as a dense call of their own."""
        return replace(self.map(lambda x: x[:, begin:end]), chunks=None)


def draw(
    B=1, T=40, H=2, Hg=1, K=8, V=12, BT=16, *,
    dtype=torch.float32, gate_dtype=None, gated=True, cu=None, device="cpu", seed=0,
) -> Call:  # fmt: skip
    """A realistic call of these sizes; `cu` is a list of offsets of packed sequences."""
    chunks = None if cu is None else prepare_chunks(torch.tensor(cu, device=device, dtype=torch.int64), BT)
    i = make_inputs(
        Shape(B, T, H, Hg, K, V, BT), dtype, gate_dtype=gate_dtype, gated=gated, chunks=chunks,
        device=device, seed=seed,
    )  # fmt: skip
    random = torch.Generator("cpu").manual_seed(seed + 1)
    dw, du = (
        torch.randn(B, T, H, n, generator=random, device="cpu", dtype=torch.float32).to(device, dtype)
        for n in (K, V)
    )
    return Call(i.k, i.v, i.beta, i.A, i.g, dw, du, chunks=chunks)


def run(call: Call, backend: str) -> dict[str, torch.Tensor]:
    """w, u and, unless gk is given, dk, dv, dbeta, dg of the operator: all that the backend does not refuse.

    What the table of refusals names must be refused (it is asserted here): then the results are w and u alone
    where only the backward is refused, else none. Any other call must run.
    """
    needs_grad = call.gk is None
    if refused := refusals_of(call, backend, needs_grad):
        assert_refused(lambda: operate(call, backend, needs_grad), backend, refused)
        if not needs_grad or refusals_of(call, backend, False):
            return {}
        needs_grad = False
    return operate(call, backend, needs_grad)


def operate(call: Call, backend: str, needs_grad: bool) -> dict[str, torch.Tensor]:
    """The results of `wy_fast`; with its gradients for dw and du when they are asked for."""
    leaves = {n: x for n in INPUTS if (x := getattr(call, n)) is not None}
    leaves = {n: x.detach().requires_grad_(needs_grad and n in GRADIENTS.values()) for n, x in leaves.items()}
    w, u = wy_fast(**leaves, cu_seqlens=call.chunks, backend=backend)
    results = {"w": w.detach(), "u": u.detach()}
    if needs_grad:
        wanted = {d: leaves[n] for d, n in GRADIENTS.items() if n in leaves}
        gradients = torch.autograd.grad((w, u), list(wanted.values()), (call.dw, call.du))
        results.update(zip(wanted, gradients, strict=True))
    return results


def refusals_of(call: Call, backend: str, needs_grad: bool) -> list[Refusal]:
    """The rows of the table that refuse this call on this machine."""
    tensors = {n: getattr(call, n) for n in INPUTS}
    facts = refusals.facts(refusals.WY_FAST, tensors, call.A.shape[3], call.chunks, needs_grad)
    return refusals.rows(facts, refusals.machine(backend))


def run_dv_local(
    q, k, do, g=None, scale=None, cu_seqlens=None, *, chunk_size=64, backend: str
) -> torch.Tensor | None:
    """`chunk_bwd_dv_local`, held to the table of refusals like `run`; None where it is refused."""
    chunks = cu_seqlens
    if isinstance(cu_seqlens, torch.Tensor):
        chunks = prepare_chunks(cu_seqlens, chunk_size)
    facts = refusals.facts(refusals.DV_LOCAL, {"q": q, "k": k, "do": do, "g": g}, chunk_size, chunks)

    def call():
        return chunk_bwd_dv_local(q, k, do, g, scale, cu_seqlens, chunk_size=chunk_size, backend=backend)

    if refused := refusals.rows(facts, refusals.machine(backend)):
        assert_refused(call, backend, refused)
        return None
    return call()


COMPUTE = ("forward", "backward", "dv_local", "execute")  # all that a backend runs anything through


def assert_refused(call: Callable[[], object], backend: str, rows: list[Refusal]) -> None:
    """The call raises what one of the rows says, in its very type, and nothing of the backend ran before."""
    module, ran = backends.load(backend), []
    with ExitStack() as patches:
        if not all(row.late for row in rows):
            for name in COMPUTE:
                if hasattr(module, name):
                    spy = lambda *_, name=name: ran.append(name)  # noqa: E731
                    patches.enter_context(mock.patch.object(module, name, spy))
        with pytest.raises(Exception) as raised:
            call()
    error, expected = raised.value, [(row.kind.__name__, row.message) for row in rows]
    assert not ran, f"{ran} ran before {error!r}"
    named = [row for row in rows if type(error) is row.kind and re.search(row.message, str(error))]
    assert named, f"{error!r} is none of {expected}"


@contextmanager
def only(backend: str) -> Iterator[None]:
    """Inside, no backend but this one computes; AssertionError on leaving if one did.

    An error where it happens may be swallowed by a test that expects one, so it is raised again at the end.
    """
    strangers = []

    def forbidden(name, function):
        def stranger(*_):
            strangers.append(f"{name}.{function}")
            raise AssertionError(f"{name}.{function} ran in a test of {backend!r}")

        return stranger

    with ExitStack() as patches:
        for name in backends.NAMES:
            module = backends.load(name)
            for function in COMPUTE if name != backend else ():
                if hasattr(module, function):
                    patches.enter_context(mock.patch.object(module, function, forbidden(name, function)))
        yield
    assert not strangers, f"{strangers} ran in a test of {backend!r}"


def reference(call: Call) -> dict[str, torch.Tensor]:
    """The float64 closed form on the same rounded inputs."""
    call = call.map(lambda x: x.detach().cpu())
    cu = None if call.chunks is None else call.chunks.cu_seqlens.cpu()
    w, u = wy_fast_reference(call.k, call.v, call.beta, call.A, call.g, call.gk, cu)
    results = {"w": w, "u": u}
    if call.gk is None:
        gradients = wy_adjoint_reference(call.k, call.v, call.beta, call.A, call.g, call.dw, call.du, cu)
        results.update(zip(GRADIENTS, gradients, strict=True))
    return {n: x for n, x in results.items() if x is not None}


def assert_equal(results: dict, expected: dict, call: Call) -> None:
    """Every result has its documented shape and dtype and is within its tolerance of the expected one."""
    dtypes = {"w": call.k, "u": call.v} | {d: getattr(call, n) for d, n in GRADIENTS.items()}
    assert set(results) == set(expected)
    for name, x in results.items():
        assert x.dtype == dtypes[name].dtype, f"{name} is {x.dtype}"
        assert x.device == call.k.device
        error, limit = error_ratio(x, expected[name]), tolerance(name, x, call.k, call.v)
        assert error <= limit, f"{name}: error ratio {error:.3g} is over {limit:.3g}"


def check(call: Call, backend: str, stored: Call | None = None) -> dict[str, torch.Tensor]:
    """Run the call and compare all that the backend does not refuse with the reference; returns the results.

    stored: the same call in other memory, to be run in its place.
    """
    results, expected = run(stored or call, backend), reference(call)
    if refusals_of(call, backend, call.gk is None):  # then `run` has seen the refusal, and gave what is left
        forward = not refusals_of(call, backend, False)
        expected = {n: expected[n] for n in ("w", "u") if forward}
    assert_equal(results, expected, call)
    return results


def assert_bitwise(a: dict, b: dict) -> None:
    """The same results, bit for bit."""
    assert set(a) == set(b)
    for name in a:
        assert torch.equal(a[name], b[name]), f"{name} differs"
