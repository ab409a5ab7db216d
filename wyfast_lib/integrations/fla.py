"""For users of flash-linear-attention: two of its functions with its signatures and units, on our backends.

    from wyfast_lib.integrations.fla import prepare_wy_repr_bwd, recompute_w_u_fwd

Units: fla (0.6) hands its kernels g in log2 units, g2 = g / ln 2, and gets dg back as the gradient of the
natural-log gate g. These functions do the same. Nothing of fla is imported, called or patched.

Both are plain functions as fla's are: their results carry no graph. Every argument is checked before anything
is launched, dw and du as the operator checks its inputs. chunk_indices are checked against cu_seqlens, which
are read back for it: at every call on a CPU, on a device once for as long as the same two tensors are passed
and PyTorch has seen no write into them (what a kernel of another library writes there is not seen). A table
of `wyfast_lib.prepare_chunks` in place of cu_seqlens is never read back, also inside torch.compile.
"""

from __future__ import annotations

import math
import weakref

import torch

from wyfast_lib import backends, library, precision
from wyfast_lib.checks import check_tensor, check_wy_fast
from wyfast_lib.tensors import shapes_only
from wyfast_lib.varlen import CHUNK_SIZES, ChunkTable, check_cu_seqlens, check_indices

LN2 = math.log(2)


@torch.no_grad()
def recompute_w_u_fwd(
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor,
    g: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | ChunkTable | None = None,
    chunk_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """w [B, T, HV, K] and u [B, T, HV, V].

    Args:
        k: [B, T, H, K]; v: [B, T, HV, V]; beta: [B, T, HV]; A: [B, T, HV, BT].
        g: [B, T, HV], chunk-local cumulated log decay in log2 units, or None.
        cu_seqlens: int [N + 1], offsets of packed sequences, or a table of `prepare_chunks`.
        chunk_indices: int [NT, 2], (sequence, chunk) of every chunk in order; saves device reads, see above.

    Raises:
        TypeError, ValueError, NotImplementedError: as `wyfast_lib.wy_fast`.
    """
    g, table, settings = _prepare(k, v, beta, A, g, cu_seqlens, chunk_indices, False)
    return library.forward(k, v, beta, A, g, None, *table, *settings)


@torch.no_grad()
def prepare_wy_repr_bwd(
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor,
    dw: torch.Tensor,
    du: torch.Tensor,
    g: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | ChunkTable | None = None,
    chunk_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(dk, dv, dbeta, dg); g comes in log2 units, dg goes out in natural-log units, as fla's own does.

    dw: [B, T, HV, K]; du: [B, T, HV, V]; dk is [B, T, H, K], summed over the value heads of a key head. The
    rest as in `recompute_w_u_fwd`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `wyfast_lib.wy_fast`.
    """
    g, table, settings = _prepare(k, v, beta, A, g, cu_seqlens, chunk_indices, True)
    dk, dv, dbeta, dg = library.backward(k, v, beta, A, g, dw, du, *table, *settings)
    return dk, dv, dbeta, None if g is None else dg


def _prepare(k, v, beta, A, g, cu_seqlens, chunk_indices, backward: bool):
    """(natural-log gate, the chunk table's two tensors, (backend, precision)), arguments checked."""
    if g is not None:
        check_tensor("g", g, "[B, T, HV]", 3)  # before it is scaled: an integer gate would become a float one
        g = g * LN2
    if chunk_indices is not None:
        cu_seqlens = _table(cu_seqlens, chunk_indices, A, k)
    chunks = check_wy_fast(k, v, beta, A, g, None, cu_seqlens)
    settings = backends.choose(k.device.type), precision.current()
    if not (torch.compiler.is_compiling() or shapes_only(k)):
        backends.pick(k.device.type, settings[0]).check_call(k, v, beta, A, g, None, chunks, backward)
    return g, (None, None) if chunks is None else (chunks.cu_seqlens, chunks.indices), settings


# ---- chunk tables that come as two tensors ----

_checked: dict[tuple, tuple] = {}  # of devices: (weak references, versions, table); a handful, oldest first
_CHECKED_MOST = 8


def _table(cu_seqlens, chunk_indices, A, k) -> ChunkTable:
    """The checked table of what a caller of fla hands over; TypeError or ValueError when it is none."""
    if isinstance(cu_seqlens, ChunkTable):
        raise ValueError("chunk_indices must be None beside a table of prepare_chunks, which has its own")
    if cu_seqlens is None:
        raise ValueError("chunk_indices need the cu_seqlens that they belong to, got None")
    check_cu_seqlens(cu_seqlens)
    check_indices(chunk_indices, cu_seqlens.device)
    check_tensor("A", A, "[B, T, HV, BT]", 4)
    check_tensor("k", k, "[B, T, H, K]", 4)
    BT, T = A.shape[3], k.shape[1]
    if BT not in CHUNK_SIZES:
        raise ValueError(f"A.shape[-1] is the chunk size BT and must be one of {CHUNK_SIZES}, got {BT}")
    if torch.compiler.is_compiling():
        raise ValueError(
            "chunk_indices must be read back to be checked, which torch.compile cannot do inside a graph: "
            "pass the table of wyfast_lib.prepare_chunks as cu_seqlens"
        )
    if not _reading_waits(cu_seqlens.device):
        return ChunkTable(cu_seqlens, chunk_indices, BT, T)
    return _known_table(cu_seqlens, chunk_indices, BT, T)


def _reading_waits(device: torch.device) -> bool:
    """Does reading a value back make the host wait for a device?"""
    return device.type not in ("cpu", "meta")


def _known_table(cu_seqlens, chunk_indices, BT: int, T: int) -> ChunkTable:
    """The table of these very tensors in their present versions, checked at the first call."""
    tensors, key = (cu_seqlens, chunk_indices), (id(cu_seqlens), id(chunk_indices), BT, T)
    if any(x.is_inference() for x in tensors):  # these count no versions
        return ChunkTable(*tensors, BT, T)
    versions = [x._version for x in tensors]
    found = _checked.get(key)
    if found and found[1] == versions and all(r() is x for r, x in zip(found[0], tensors, strict=True)):
        return found[2]
    table = ChunkTable(*tensors, BT, T)
    _checked.pop(key, None)
    while len(_checked) >= _CHECKED_MOST:
        _checked.pop(next(iter(_checked)), None)
    _checked[key] = [weakref.ref(x) for x in tensors], versions, table
    return table
