"""What each backend refuses: the one table, asserted in both directions.

A call that a row describes must be refused with that row's exception and message before anything runs; any
other call must run. `support.run` holds every test of an operator to it, tests/test_refusals.py each row.
Of bad arguments, which no backend ever sees, tests/test_errors.py speaks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from wyfast_lib.inputs import Shape
from wyfast_lib.varlen import ChunkTable

WY_FAST, DV_LOCAL = "wy_fast", "chunk_bwd_dv_local"
BOTH = (WY_FAST, DV_LOCAL)
ASCEND = ("ascend", "lowered")  # they share the kernels and their planner
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Facts:
    """What a refusal may depend on in a call. dtypes: of the tensors that are given, by name."""

    operator: str
    place: str
    shape: Shape
    dtypes: dict[str, torch.dtype]
    chunks: int
    needs_grad: bool = False

    def has(self, *dtypes: torch.dtype) -> bool:
        """Does any tensor have one of these dtypes?"""
        return any(x in dtypes for x in self.dtypes.values())


@dataclass(frozen=True)
class Machine:
    """What a refusal may depend on where the call would run. place: the device type that is taken."""

    backend: str
    place: str
    arch35: bool = False
    interpreted: bool = False
    capability: tuple[int, int] = (9, 0)
    shared_memory: int = 227 << 10


@dataclass(frozen=True)
class Refusal:
    """One row. late: seen only when the kernel is compiled, so the call gets as far as the backend."""

    name: str
    backends: tuple[str, ...]
    operators: tuple[str, ...]
    when: Callable[[Facts, Machine], bool]
    kind: type[Exception]
    message: str
    late: bool = False


TABLE = (
    Refusal(
        "tensors on another device", ASCEND, BOTH, lambda c, m: c.place != m.place,
        ValueError, r"backend '(ascend|lowered)' takes tensors on '(npu|cpu)', got \w+",
    ),
    Refusal(
        "float64", ASCEND, BOTH, lambda c, m: c.has(torch.float64),
        NotImplementedError, r"^\w+: the Ascend kernels compute in float32, got float64",
    ),
    Refusal(
        "rows over 256 wide", ASCEND, BOTH, lambda c, m: max(c.shape.K, c.shape.V) > 256,
        NotImplementedError, r"^[KV] = \d+: the Ascend kernels hold whole rows in L1.* 256",
    ),
    Refusal(
        "a channel gate on wide half-precision rows of chunks of 128", ASCEND, (WY_FAST,),
        lambda c, m: "gk" in c.dtypes and c.shape.BT == 128 and c.shape.K > 128
        and torch.promote_types(c.dtypes["k"], c.dtypes["v"]) != torch.float32,
        NotImplementedError, r"chunks of 128 with gk .*240 KiB .*192 KiB: use BT <= 64",
    ),
    Refusal(
        "the backward of chunks of 128", ASCEND, (WY_FAST,), lambda c, m: c.needs_grad and c.shape.BT > 64,
        NotImplementedError, r"^BT = 128: the backward .*192 KiB: use BT <= 64",
    ),
    Refusal(
        "the backward in float16 on the Ascend 950", ASCEND, (WY_FAST,),
        lambda c, m: c.needs_grad and m.arch35 and torch.float16 in (c.dtypes["k"], c.dtypes["v"]),
        NotImplementedError, r"float16 is not supported on arch35 \(Ascend 950\): use bfloat16",
    ),
    Refusal(
        "2^31 tokens times heads", ASCEND, BOTH,
        lambda c, m: c.shape.T >= 2**31 or c.shape.B * c.shape.T * c.shape.H >= 2**31,
        NotImplementedError, r"must be below 2\*\*31",
    ),
    Refusal(
        "tensors on another device", ("cuda",), BOTH, lambda c, m: c.place != m.place,
        ValueError, r"^backend 'cuda': .*needs (CUDA|CPU) tensors, got k on \w+",
    ),
    Refusal(
        "rows over 512 wide", ("cuda",), BOTH, lambda c, m: max(c.shape.K, c.shape.V) > 512,
        ValueError, r"K and V must be at most 512, got K = \d+, V = \d+",
    ),
    Refusal(
        "2^24 elements a token", ("cuda",), BOTH,
        lambda c, m: c.shape.H * max(c.shape.K, c.shape.V, c.shape.BT) >= 2**24,
        ValueError, r"heads x width must be below 2\^24, got \d+ heads",
    ),
    Refusal(
        "2^31 programs", ("cuda",), BOTH, lambda c, m: c.chunks * c.shape.H >= 2**31,
        ValueError, r"chunks x heads must be below 2\^31",
    ),
    Refusal(
        "float64", ("cuda",), BOTH, lambda c, m: c.has(torch.float64),
        NotImplementedError, r"no float64: use float32, or backend='torch'",
    ),
    Refusal(
        "bfloat16 in the interpreter", ("cuda",), BOTH, lambda c, m: m.interpreted and c.has(torch.bfloat16),
        NotImplementedError, r"interpreter multiplies bfloat16 bit patterns .*use float32 or float16",
    ),
    Refusal(
        "bfloat16 before Ampere", ("cuda",), BOTH,
        lambda c, m: not m.interpreted and m.capability < (8, 0) and c.has(torch.bfloat16),
        NotImplementedError, r"bfloat16 needs compute capability 8\.0: use float16",
    ),
    # What a kernel needs is known once it is compiled; a tile of A that fills half of the memory never fits.
    Refusal(
        "shared memory that holds less than two tiles of A", ("cuda",), (WY_FAST,),
        lambda c, m: not m.interpreted and m.shared_memory < 2 * c.shape.BT**2 * _operand_bytes(c),
        RuntimeError, r"needs at least \d+ bytes of shared memory a block, the device has \d+", late=True,
    ),
)  # fmt: skip


def rows(facts: Facts, where: Machine) -> list[Refusal]:
    """The rows that refuse this call there; a call with none must run. The torch backend has no row."""
    return [
        row for row in TABLE
        if where.backend in row.backends and facts.operator in row.operators and row.when(facts, where)
    ]  # fmt: skip


def facts(
    operator: str, tensors: dict[str, torch.Tensor | None], BT: int, chunks: ChunkTable | None, grad=False
) -> Facts:
    """What the table reads, from the tensors of a call by the names of its arguments."""
    given = {n: x for n, x in tensors.items() if x is not None}
    values = given["v" if operator == WY_FAST else "do"]
    (B, T, H, V), (Hg, K) = values.shape, given["k"].shape[2:]
    count = B * -(-T // BT) if chunks is None else chunks.num_chunks
    dtypes = {n: x.dtype for n, x in given.items()}
    return Facts(operator, given["k"].device.type, Shape(B, T, H, Hg, K, V, BT), dtypes, count, grad)


def machine(backend: str) -> Machine:
    """What the table reads of this machine."""
    module = importlib.import_module(f"wyfast_lib.backends.{backend}")
    if backend in ASCEND:
        return Machine(backend, module._planned.tensors, arch35=module.device().arch35)
    if backend == "cuda":
        if module.INTERPRET:
            return Machine(backend, "cpu", interpreted=True)
        device = module._device(torch.cuda.current_device())
        return Machine(
            backend, "cuda", capability=device.capability, shared_memory=device.shared_memory
        )
    return Machine(backend, "any")


def _operand_bytes(c: Facts) -> int:
    return torch.promote_types(c.dtypes["k"], c.dtypes["v"]).itemsize
