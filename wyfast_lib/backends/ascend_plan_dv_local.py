"""The plan of `chunk_bwd_dv_local` on Ascend: kernel, tiles, gate layout and grid, or why it is refused."""

from __future__ import annotations

import torch

from wyfast_lib.backends import ascend_plan as plan
from wyfast_lib.varlen import ChunkTable

MODULE, KERNEL = "wyfast_lib.kernels.ascend_dv_local", "chunk_bwd_dv_local_kernel"


def check(q, k, do, g, chunks: ChunkTable | None, chunk_size: int) -> None:
    """Raise NotImplementedError naming the limit that a call exceeds; arguments have passed `checks`."""
    for name, x in (("q", q), ("k", k), ("do", do), ("g", g)):
        if x is not None and x.dtype == torch.float64:
            raise NotImplementedError(f"{name}: the Ascend kernels compute in float32, got float64")
    for name, width in (("K", k.shape[3]), ("V", do.shape[3])):
        if width > plan.MAX_WIDTH:
            raise NotImplementedError(
                f"{name} = {width}: the Ascend kernels hold whole rows in L1 (512 KiB a core), "
                f"up to {plan.MAX_WIDTH}"
            )
    B, T, H, _ = do.shape
    if T >= 2**31 or B * T * H >= 2**31:
        raise NotImplementedError("T and the number of tasks must be below 2**31")


def sub_block(chunk_size: int) -> int:
    """BC, the default rows of a sub-block: a whole chunk up to 64, the size with the least synchronisation.

    Smaller ones skip the products above the diagonal and pay for it in gate loads, flags and reloads of q.
    """
    return min(chunk_size, 64)


def plan_dv_local(
    q, k, do, g, scale, chunks, chunk_size, device: plan.Device, t_contig: bool = True, BC: int | None = None
):
    """-> (Launch, dv [B, T, H, V]); dv is allocated here, uninitialised.

    t_contig: g is stored [B, H, T] (contiguous in time; no copy when H is 1), else [B, T, H]. BC: rows of a
    sub-block, a power of two from 16 to chunk_size; default `sub_block`.
    """
    (B, T, H, V), Hg, K = do.shape, k.shape[2], k.shape[3]
    BC = BC or sub_block(chunk_size)
    dv = torch.empty_like(do, memory_format=torch.contiguous_format)
    q, k, do = plan.operands(q, k, do, rows=BC, device=device)
    cu_seqlens, indices, count = _chunk_arguments(k, B, T, chunk_size, chunks)
    args = {
        "q": q, "k": k, "do": do, "g": k if g is None else plan.stored(g, t_contig), "dv": dv,
        "cu_seqlens": cu_seqlens, "chunk_indices": indices, "scale": scale, "T": T, "n_tasks": count * H,
    }  # fmt: skip
    constexprs = {"H": H, "Hg": Hg, "K": K, "V": V, "BT": chunk_size, "BC": BC, "BK": plan.tile(K),
                  "BV": plan.tile(V), "USE_G": g is not None, "IS_VARLEN": chunks is not None,
                  "G_T_CONTIG": t_contig}  # fmt: skip
    grid = (min(device.cores, count * H),)
    return plan.Launch(KERNEL, args, constexprs, grid, MODULE), dv


def _chunk_arguments(k, B: int, T: int, chunk_size: int, chunks: ChunkTable | None):
    """(cu_seqlens, chunk_indices, number of chunks) as the kernel takes them."""
    if chunks is not None:
        return chunks.cu_seqlens, chunks.indices.contiguous(), chunks.num_chunks
    # Not read when IS_VARLEN is false; a pointer of the right type is all that the signature asks for.
    unused = k.new_empty(1, dtype=torch.int64), k.new_empty(1, dtype=torch.int32)
    return *unused, B * -(-T // chunk_size)
