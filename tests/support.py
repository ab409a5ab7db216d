"""What the tests share: one call with its upstream gradients, run on a backend and on the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from wyfast_lib import backends, prepare_chunks, wy_fast
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
    """w, u and, unless gk is given, dk, dv, dbeta, dg of the operator.

    A call that the backend refuses is skipped with the reason; the torch backend may refuse nothing.
    """
    module = backends.pick(call.k.device.type, backend)
    needs_grad = call.gk is None
    try:
        module.check_call(*(getattr(call, n) for n in INPUTS), call.chunks, needs_grad)
    except (ValueError, NotImplementedError, RuntimeError) as limit:
        if backend == "torch":
            raise
        pytest.skip(f"{backend}: {limit}")
    leaves = {n: x for n in INPUTS if (x := getattr(call, n)) is not None}
    leaves = {n: x.detach().requires_grad_(needs_grad and n in GRADIENTS.values()) for n, x in leaves.items()}
    w, u = wy_fast(**leaves, cu_seqlens=call.chunks, backend=backend)
    results = {"w": w.detach(), "u": u.detach()}
    if needs_grad:
        wanted = {d: leaves[n] for d, n in GRADIENTS.items() if n in leaves}
        gradients = torch.autograd.grad((w, u), list(wanted.values()), (call.dw, call.du))
        results.update(zip(wanted, gradients, strict=True))
    return results


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


def check(call: Call, backend: str) -> dict[str, torch.Tensor]:
    """Run the call and compare everything with the reference; returns the results."""
    results = run(call, backend)
    assert_equal(results, reference(call), call)
    return results


def assert_bitwise(a: dict, b: dict) -> None:
    """The same results, bit for bit."""
    assert set(a) == set(b)
    for name in a:
        assert torch.equal(a[name], b[name]), f"{name} differs"
