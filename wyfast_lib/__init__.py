"""The WY representation of (Gated) DeltaNet, w = A (k beta e^g) and u = A (v beta), with its adjoint.

The public names are imported when first used, so that `python -m wyfast_lib doctor` can still explain what is
wrong on a machine where `import torch` fails.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from wyfast_lib.version import __version__

if TYPE_CHECKING:
    from wyfast_lib.dv_local import chunk_bwd_dv_local
    from wyfast_lib.factor import check_factor, chunk_local_cumsum, wy_factor
    from wyfast_lib.op import WyFastFunction, wy_fast
    from wyfast_lib.varlen import ChunkTable, prepare_chunks

_HOME = {
    "ChunkTable": "varlen",
    "WyFastFunction": "op",
    "check_factor": "factor",
    "chunk_bwd_dv_local": "dv_local",
    "chunk_local_cumsum": "factor",
    "prepare_chunks": "varlen",
    "wy_factor": "factor",
    "wy_fast": "op",
}

__all__ = [
    "ChunkTable",
    "WyFastFunction",
    "__version__",
    "check_factor",
    "chunk_bwd_dv_local",
    "chunk_local_cumsum",
    "prepare_chunks",
    "wy_factor",
    "wy_fast",
]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
