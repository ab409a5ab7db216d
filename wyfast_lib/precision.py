"""How products of float32 operands are rounded on CUDA: asked for by a thread, kept with a call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from wyfast_lib.backends import setting

MODES = ("ieee", "tf32")
VARIABLE = "WYFAST_FLOAT32_PRECISION"

_asked = threading.local()  # not a ContextVar: torch.compile cannot read one, and guards on this


@contextmanager
def float32_precision(mode: str) -> Iterator[None]:
    """Products of float32 operands inside: "ieee" (the default) or "tf32", about 3e-4 relative error.

    Holds for the calls that this thread makes inside, and for their backwards wherever and whenever those
    run: the mode is saved with the call. Other threads, also ones that are started inside, are not affected.
    The environment variable WYFAST_FLOAT32_PRECISION sets it for a process; the context manager wins.

    A graph of torch.compile keeps the mode that it was traced under; called under another mode of this
    context manager it is traced again, the environment variable is read once a trace. Only the cuda
    backend has such products: torch obeys torch's own setting (`torch.set_float32_matmul_precision`), the
    Ascend kernels are always IEEE.

    Raises:
        ValueError: mode is neither of the two.
    """
    check_mode(mode, "float32 precision")
    before = getattr(_asked, "mode", None)
    _asked.mode = mode
    try:
        yield
    finally:
        _asked.mode = before


def current() -> str:
    """The mode that a call of this thread gets now; ValueError when WYFAST_FLOAT32_PRECISION is no mode."""
    mode = getattr(_asked, "mode", None)
    if mode is None:
        mode = setting(VARIABLE) or "ieee"
        check_mode(mode, VARIABLE)
    return mode


def check_mode(mode: object, source: str) -> None:
    """Raise ValueError unless mode is one of `MODES`; `source` is for the message."""
    if mode not in MODES:
        raise ValueError(f"{source} must be 'ieee' or 'tf32', got {mode!r}")
