"""For users of flash-linear-attention: two of its functions with its signatures and units, on our backends.

    from wyfast_lib.integrations.fla import prepare_wy_repr_bwd, recompute_w_u_fwd

Units: fla (0.6) hands its kernels g in log2 units, g2 = g / ln 2, and gets dg back as the gradient of the
natural-log gate g. These functions do the same. Nothing of fla is imported, called or patched.
"""

from __future__ import annotations

import math

import torch

from wyfast_lib import backends
from wyfast_lib.checks import check_wy_fast
from wyfast_lib.varlen import ChunkTable

LN2 = math.log(2)


def recompute_w_u_fwd(
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor,
    g: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """w [B, T, HV, K] and u [B, T, HV, V].

    Args:
        k: [B, T, H, K]; v: [B, T, HV, V]; beta: [B, T, HV]; A: [B, T, HV, BT].
        g: [B, T, HV], chunk-local cumulated log decay in log2 units, or None.
        cu_seqlens: int [N + 1], offsets of packed sequences.
        chunk_indices: int [NT, 2], (sequence, chunk): saves the device read that finding them costs.

    Raises:
        TypeError, ValueError, NotImplementedError: as `wyfast_lib.wy_fast`.
    """
    g = None if g is None else g * LN2
    module, chunks = _prepare(k, v, beta, A, g, cu_seqlens, chunk_indices)
    if k.shape[0] * k.shape[1] == 0:
        return k.new_empty(*v.shape[:3], k.shape[3]), torch.empty_like(v)
    return module.forward(k, v, beta, A, g, None, chunks)


def prepare_wy_repr_bwd(
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor,
    dw: torch.Tensor,
    du: torch.Tensor,
    g: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(dk, dv, dbeta, dg); g comes in log2 units, dg goes out in natural-log units, as fla's own does.

    dw: [B, T, HV, K]; du: [B, T, HV, V]; dk is [B, T, H, K], summed over the value heads of a key head. The
    rest as in `recompute_w_u_fwd`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `wyfast_lib.wy_fast`.
    """
    g = None if g is None else g * LN2
    module, chunks = _prepare(k, v, beta, A, g, cu_seqlens, chunk_indices)
    if k.shape[0] * k.shape[1] == 0:
        return tuple(None if x is None else torch.zeros_like(x) for x in (k, v, beta, g))
    return module.backward(k, v, beta, A, g, dw, du, chunks)


def _prepare(k, v, beta, A, g, cu_seqlens, chunk_indices):
    """(backend, chunk table or None), arguments checked."""
    given = cu_seqlens
    if cu_seqlens is not None and chunk_indices is not None:
        given = ChunkTable(cu_seqlens.long(), chunk_indices.int(), A.shape[-1], k.shape[1])
    chunks = check_wy_fast(k, v, beta, A, g, None, given)
    module = backends.pick(k.device.type)
    module.check_call(k, v, beta, A, g, None, chunks, True)
    return module, chunks
