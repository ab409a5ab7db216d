"""The two launches as registered operators, so that torch.compile sees one opaque node with known shapes.

Eager calls go to the backend directly; dispatching an operator costs more host time than the checks. Inside
a compiled graph the backend is picked when the operator runs, so nothing of the registry is traced.
"""

from __future__ import annotations

import torch

from wyfast_lib import backends
from wyfast_lib.varlen import ChunkTable


def chunk_table(
    cu_seqlens: torch.Tensor | None, indices: torch.Tensor | None, A: torch.Tensor
) -> ChunkTable | None:
    """Put a table back together from the tensors that crossed an operator's boundary."""
    if cu_seqlens is None or indices is None:
        return None
    return ChunkTable(cu_seqlens, indices, chunk_size=A.shape[3], total=A.shape[1])


@torch.library.custom_op("wyfast::recompute_w_u", mutates_args=())
def recompute_w_u(
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor,
    g: torch.Tensor | None,
    gk: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    chunk_indices: torch.Tensor | None,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """w [B, T, H, K] and u [B, T, H, V]; arguments as in `wy_fast`, checked; backend None picks."""
    chunks = chunk_table(cu_seqlens, chunk_indices, A)
    module = backends.pick(k.device.type, backend)
    module.check_call(k, v, beta, A, g, gk, chunks, False)
    return module.forward(k, v, beta, A, g, gk, chunks)


@recompute_w_u.register_fake
def _(k, v, beta, A, g, gk, cu_seqlens, chunk_indices, backend):
    B, T, H, V = v.shape
    return k.new_empty(B, T, H, k.shape[3]), v.new_empty(B, T, H, V)


@torch.library.custom_op("wyfast::prepare_wy_repr_bwd", mutates_args=())
def prepare_wy_repr_bwd(
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor,
    g: torch.Tensor | None,
    dw: torch.Tensor,
    du: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    chunk_indices: torch.Tensor | None,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dk, dv, dbeta, dg of the shapes of k, v, beta, g; dg has no elements when g is None."""
    chunks = chunk_table(cu_seqlens, chunk_indices, A)
    module = backends.pick(k.device.type, backend)
    module.check_call(k, v, beta, A, g, None, chunks, True)
    dk, dv, dbeta, dg = module.backward(k, v, beta, A, g, dw, du, chunks)
    return dk, dv, dbeta, beta.new_empty(0) if dg is None else dg


@prepare_wy_repr_bwd.register_fake
def _(k, v, beta, A, g, dw, du, cu_seqlens, chunk_indices, backend):
    dg = beta.new_empty(0) if g is None else g.new_empty(g.shape)
    return k.new_empty(k.shape), v.new_empty(v.shape), beta.new_empty(beta.shape), dg
