"""Inputs as a model makes them, at named shapes.

Plain random tensors hide what matters: the keys of a layer are L2-normalised, beta is a sigmoid, the decay is
-exp(A_log) * softplus(a + dt_bias) with the spread of Gated DeltaNet's initialisation, summed inside a chunk.
A is the factor of these very inputs, so gradients are the true ones.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F

from wyfast_lib.factor import chunk_local_cumsum, wy_factor
from wyfast_lib.varlen import ChunkTable


@dataclass(frozen=True)
class Shape:
    """Sizes of one call: B rows of T tokens, H value heads of width V over Hg key heads of width K."""

    B: int
    T: int
    H: int
    Hg: int
    K: int
    V: int
    BT: int = 64

    def __str__(self) -> str:
        return f"B={self.B} T={self.T} H={self.H} Hg={self.Hg} K={self.K} V={self.V} BT={self.BT}"


SHAPES = {
    # small ones, for tests and for a first look
    "tiny": Shape(1, 40, 2, 1, 8, 12, 16),
    "small": Shape(2, 160, 4, 2, 32, 48),
    "laptop": Shape(1, 4096, 8, 8, 128, 128),
    # what DeltaNet is trained at (sources: README)
    "train-4k": Shape(1, 4096, 32, 32, 128, 128),
    "train-8k": Shape(1, 8192, 32, 32, 128, 128),
    "train-32k": Shape(1, 32768, 32, 32, 128, 128),
    "train-32k-gqa": Shape(1, 32768, 32, 8, 128, 128),
    "train-64k": Shape(1, 65536, 16, 16, 128, 128),
    # two value heads a key head, as in Qwen3-Next's Gated DeltaNet layers
    "qwen3-next": Shape(1, 4096, 32, 16, 128, 128),
}


@dataclass
class Inputs:
    """One layer's tensors; (k, v, beta, A, g) go into `wy_fast` by position.

    q, k: [B, T, Hg, K]; v: [B, T, H, V]; beta, g, log_decay: [B, T, H]; A: [B, T, H, BT]. log_decay is each
    token's own decay, g its sum inside the chunk; both are None without gate. chunks: the table of packed
    sequences or None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    A: torch.Tensor
    g: torch.Tensor | None
    log_decay: torch.Tensor | None
    chunks: ChunkTable | None

    @property
    def call(self) -> tuple[torch.Tensor | None, ...]:
        """(k, v, beta, A, g): the positional arguments of `wy_fast`."""
        return self.k, self.v, self.beta, self.A, self.g

    def requires_grad_(self) -> Inputs:
        """Ask for gradients of k, v, beta and g; returns self."""
        for x in (self.k, self.v, self.beta, self.g):
            if x is not None:
                x.requires_grad_()
        return self

    def to(self, *args, **kwargs) -> Inputs:
        """All tensors through `torch.Tensor.to`; the chunk table is kept as it is."""
        moved = {}
        for f in fields(self):
            x = getattr(self, f.name)
            moved[f.name] = x.to(*args, **kwargs) if isinstance(x, torch.Tensor) else x
        return Inputs(**moved)


def make_inputs(
    shape: str | Shape,
    dtype: torch.dtype = torch.float32,
    *,
    gate_dtype: torch.dtype | None = None,
    gated: bool = True,
    chunks: ChunkTable | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Inputs:
    """Draw realistic inputs; the same seed gives the same numbers on every device.

    Args:
        shape: a name of `SHAPES` or a Shape.
        dtype: of q, k, v and A.
        gate_dtype: of beta, g and log_decay; default float32, float64 when dtype is.
        gated: False for plain DeltaNet, g None.
        chunks: a table of `prepare_chunks` for packed sequences; B must be 1, chunks.total must be T.

    Raises:
        KeyError: no shape of that name; the message lists them.
    """
    if isinstance(shape, str):
        if shape not in SHAPES:
            raise KeyError(f"no shape named {shape!r}; there are {', '.join(SHAPES)}")
        shape = SHAPES[shape]
    B, T, H, Hg, K, V, BT = (getattr(shape, f.name) for f in fields(shape))
    gate_dtype = gate_dtype or (torch.float64 if dtype == torch.float64 else torch.float32)
    random = torch.Generator("cpu").manual_seed(seed)

    def draw(*size):
        # Both named: torch.set_default_device and set_default_dtype must not change the numbers.
        return torch.randn(*size, generator=random, device="cpu", dtype=torch.float32)

    q, k = (F.normalize(draw(B, T, Hg, K), dim=-1).to(device, dtype) for _ in range(2))
    v = draw(B, T, H, V).to(device, dtype)
    beta = draw(B, T, H).sigmoid().to(device, gate_dtype)
    log_decay = g = None
    if gated:
        log_decay = _log_decay(draw(B, T, H), random).to(device, gate_dtype)
        g = chunk_local_cumsum(log_decay, BT, chunks).to(gate_dtype)
    A = wy_factor(k, beta, g, BT, chunks)
    return Inputs(q, k, v, beta, A, g, log_decay, chunks)


def _log_decay(a: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """-exp(A_log) * softplus(a + dt_bias): a rate in [1, 16] and, at a = 0, a step in [0.001, 0.1]."""
    H = a.shape[-1]
    rate = a.new_empty(H).uniform_(1, 16, generator=random)
    step = a.new_empty(H).uniform_(-6.907755, -2.302585, generator=random).exp()
    dt_bias = step + torch.log(-torch.expm1(-step))  # the inverse of softplus
    return -rate * F.softplus(a + dt_bias)
