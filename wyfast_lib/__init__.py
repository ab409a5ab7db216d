"""The WY representation of (Gated) DeltaNet, w = A (k beta e^g) and u = A (v beta), with its adjoint."""

from wyfast_lib.factor import check_factor, chunk_local_cumsum, wy_factor
from wyfast_lib.op import WyFastFunction, wy_fast
from wyfast_lib.varlen import ChunkTable, prepare_chunks
from wyfast_lib.version import __version__

__all__ = [
    "ChunkTable",
    "WyFastFunction",
    "__version__",
    "check_factor",
    "chunk_local_cumsum",
    "prepare_chunks",
    "wy_factor",
    "wy_fast",
]
