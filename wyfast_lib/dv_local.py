"""The local part of dv of a chunk's outputs, whose gate loads the workbook follows down to the device."""

from __future__ import annotations

import torch

from wyfast_lib import backends, library, precision
from wyfast_lib.checks import check_dv_local
from wyfast_lib.varlen import ChunkTable


def chunk_bwd_dv_local(
    q: torch.Tensor,
    k: torch.Tensor,
    do: torch.Tensor,
    g: torch.Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | ChunkTable | None = None,
    *,
    chunk_size: int = 64,
    backend: str | None = None,
) -> torch.Tensor:
    """The gradient of a chunk's outputs for the values it writes, without what comes through the state.

    The outputs of the gated delta rule are o = scale * ((e^g q) S + tril(q k^T e^(g_i - g_j)) n) with n the
    values that the chunk writes and S the state before it. Per chunk and head, rows i, j of the chunk:

        dv[j] = scale * sum_{i >= j} <q[i], k[j]> exp(g[i] - g[j]) do[i]

    is the second term's gradient for n. A plain function, itself not differentiable: the result carries no
    graph. torch.autocast does not reach inside. Under torch.compile, torch.func.vmap and with meta or fake
    tensors it behaves as `wy_fast`.

    Args:
        q, k: [B, T, Hg, K] queries and keys; head h reads key head h // (H // Hg), H % Hg == 0.
        do: [B, T, H, V], gradient of the outputs.
        g: [B, T, H], optional log decay, natural log, cumulated inside each chunk (`chunk_local_cumsum`).
            Keep it in float32, see `wy_fast`. None equals zeros.
        scale: a finite real number; default K ** -0.5.
        cu_seqlens: int32 / int64 [N + 1], sequences packed in one row (B must be 1), or the table that
            `prepare_chunks` makes of it for the same chunk_size.
        chunk_size: BT, one of 16, 32, 64, 128; the size of the chunks that g was cumulated in.
        backend: "torch", "cuda", "ascend" or "lowered"; default WYFAST_BACKEND, else the device's own.

    Returns:
        dv: [B, T, H, V], dtype of do, contiguous. Accumulated in float32 (float64 when an input is);
        dtypes may be mixed, the operands of a product are in the widest of q, k and do or wider.

    Raises:
        TypeError: an argument is no plain tensor of a floating dtype (cu_seqlens: int32 / int64), scale no
            number.
        ValueError: a rank, shape, device, scale, chunk size or cu_seqlens that does not fit; nothing has
            run then.
        BackendUnavailable: the backend cannot run on this machine.
        NotImplementedError: the call exceeds a limit of the backend, which is named.

    Warns:
        UserWarning: 1 < T < H, and no cu_seqlens: the tensors look like [B, H, T, ...].

    Source: arXiv:2412.06464, the chunkwise form of Gated DeltaNet; derivative by hand.
    """
    scale, chunks = check_dv_local(q, k, do, g, scale, cu_seqlens, chunk_size)
    table = (None, None) if chunks is None else (chunks.cu_seqlens, chunks.indices)
    settings = backends.choose(k.device.type, backend), precision.current()
    with torch.no_grad():
        return library.dv_local(q, k, do, g, scale, *table, chunk_size, *settings)
