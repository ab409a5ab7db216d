"""Who computes in a benchmark, and on what.

A provider is a name, a check whether it can run here, and a function that makes its two passes for a case:
each a callable without arguments that returns (w, u) or (dk, dv, dbeta, dg). To add one, write a class like
those below and put it into `PROVIDERS`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol

import torch

from wyfast_lib import backends
from wyfast_lib.factor import chunk_local_cumsum, wy_factor
from wyfast_lib.inputs import SHAPES, Shape, _log_decay
from wyfast_lib.op import wy_fast

Pass = Callable[[], tuple]


@dataclass
class Case:
    """One set of inputs with upstream gradients; shapes as in `wy_fast`."""

    shape: Shape
    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    A: torch.Tensor
    g: torch.Tensor
    dw: torch.Tensor
    du: torch.Tensor

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.k, self.v, self.beta, self.A, self.g


def make_case(shape: str | Shape, dtype: torch.dtype, device: str, seed: int = 0) -> Case:
    """Realistic inputs drawn on the device itself: normalised keys, sigmoid beta, Gated DeltaNet's decay.

    beta has the dtype of k, as the projections of a model give it; g is float32.
    """
    shape = SHAPES[shape] if isinstance(shape, str) else shape
    B, T, H, Hg, K, V, BT = (getattr(shape, f.name) for f in fields(shape))
    random = torch.Generator(device).manual_seed(seed)

    def draw(*size):
        return torch.randn(*size, generator=random, device=device, dtype=torch.float32)

    k = torch.nn.functional.normalize(draw(B, T, Hg, K), dim=-1).to(dtype)
    v = draw(B, T, H, V).to(dtype)
    beta = draw(B, T, H).sigmoid().to(dtype)
    g = chunk_local_cumsum(_log_decay(draw(B, T, H), random), BT)
    step = 64 * BT  # the factor a stretch of whole chunks at a time: its temporaries are many times its size
    stretches = [slice(t, t + step) for t in range(0, T, step)]
    A = torch.cat([wy_factor(k[:, s], beta[:, s], g[:, s], BT, out_dtype=dtype) for s in stretches], dim=1)
    dw, du = draw(B, T, H, K).to(dtype), draw(B, T, H, V).to(dtype)
    return Case(shape, k, v, beta, A, g, dw, du)


def minimum_bytes(case: Case, phase: str) -> int:
    """Bytes that any implementation must move: each input read once, each output written once."""

    def size(*tensors):
        return sum(x.numel() * x.element_size() for x in tensors)

    read = size(*case.inputs)
    if phase == "forward":
        return read + size(case.dw, case.du)  # w and u have the shapes of their gradients
    return read + size(case.dw, case.du) + size(case.k, case.v, case.beta, case.g)


class Provider(Protocol):
    name: str
    tolerance: float  # error ratio allowed beyond the dtypes' own limits, 0 for most
    note: str  # for the rows: versions that their provenance does not hold

    def available(self, device: str) -> tuple[bool, str]: ...

    def passes(self, case: Case) -> dict[str, Pass]: ...


class Backend:
    """One of our backends, called directly: no checks, no autograd."""

    tolerance, note = 0.0, ""

    def __init__(self, name: str, backend: str | None):
        self.name, self.backend = name, backend

    def available(self, device: str) -> tuple[bool, str]:
        name = self.backend or backends.DEFAULT.get(device, "torch")
        return backends.load(name).available()

    def passes(self, case: Case) -> dict[str, Pass]:
        module = backends.pick(case.k.device.type, self.backend)
        module.check_call(*case.inputs, None, None, True)
        k, v, beta, A, g = case.inputs
        return {
            "forward": lambda: module.forward(k, v, beta, A, g, None, None),
            "backward": lambda: module.backward(k, v, beta, A, g, case.dw, case.du, None),
        }


class Tf32(Backend):
    """Our CUDA backend with TF32 asked for: float32 inputs, about 3e-4 relative error."""

    tolerance = 2e-3

    def __init__(self):
        super().__init__("wyfast-tf32", "cuda")

    def passes(self, case: Case) -> dict[str, Pass]:
        precision = backends.load("cuda").float32_precision

        def opted_in(call: Pass) -> Pass:
            def run():
                with precision("tf32"):
                    return call()

            return run

        return {phase: opted_in(call) for phase, call in super().passes(case).items()}


class PublicCall:
    """`wy_fast` with autograd: what a user's program pays. The backward needs a forward of its own first."""

    name, tolerance, note = "wy_fast", 0.0, ""

    def available(self, device: str) -> tuple[bool, str]:
        return True, ""

    def passes(self, case: Case) -> dict[str, Pass]:
        leaves = [x.detach().requires_grad_(n != "A") for n, x in zip("kvbAg", case.inputs, strict=True)]
        wanted = [x for n, x in zip("kvbAg", leaves, strict=True) if n != "A"]
        outputs = wy_fast(*leaves)

        def backward():
            return torch.autograd.grad(outputs, wanted, (case.dw, case.du), retain_graph=True)

        return {"forward": lambda: tuple(x.detach() for x in wy_fast(*leaves)), "backward": backward}


class Fla:
    """flash-linear-attention's own operators. Their g is in log2 units, their dg in natural ones."""

    name, tolerance = "fla", 0.0

    @property
    def note(self) -> str:
        return f"fla-core {importlib.metadata.version('fla-core')}"

    def available(self, device: str) -> tuple[bool, str]:
        try:
            importlib.import_module("fla.ops.gated_delta_rule.wy_fast")
        except Exception as error:  # an optional package that may fail in many ways
            return False, f"fla-core is not usable: {error}"
        return device == "cuda", "fla-core runs on accelerators only"

    def passes(self, case: Case) -> dict[str, Pass]:
        module = importlib.import_module("fla.ops.gated_delta_rule.wy_fast")
        k, v, beta, A, g = case.inputs
        g2 = g / math.log(2)
        return {
            "forward": lambda: module.recompute_w_u_fwd(k, v, beta, A, g2),
            "backward": lambda: module.prepare_wy_repr_bwd(k, v, beta, A, case.dw, case.du, g2),
        }


PROVIDERS: dict[str, Provider] = {
    p.name: p for p in (Backend("wyfast", None), Tf32(), Backend("torch", "torch"), PublicCall(), Fla())
}
