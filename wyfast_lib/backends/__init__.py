"""The backends and the one place that picks one.

A backend is a module with
    available() -> (ok, reason)          cheap, never raises, starts no device: the process may fork later
    check_call(k, v, beta, A, g, gk, chunks, needs_grad)    raises, naming the limit that a call exceeds
    forward(k, v, beta, A, g, gk, chunks, precision=None) -> (w, u)
    backward(k, v, beta, A, g, dw, du, chunks, precision=None) -> (dk, dv, dbeta, dg)
    check_dv_local(q, k, do, g, chunks, chunk_size)         as check_call, for chunk_bwd_dv_local
    dv_local(q, k, do, g, scale, chunks, chunk_size, precision=None) -> dv
precision is "ieee", "tf32" or None for `wyfast_lib.precision.current()`; only cuda has the choice.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from types import ModuleType

# Which backend a device gets unless the caller names one. Devices not listed get `torch`.
DEFAULT = {"cpu": "torch", "cuda": "cuda", "npu": "ascend"}
NAMES = ("torch", "cuda", "ascend", "lowered")

_ready: dict[str, ModuleType] = {}  # backends that said they are available; asking again costs host time


class BackendUnavailable(RuntimeError):
    """The backend that a call asked for, or that its device needs, cannot run here; the message says why."""


def never_raises(available: Callable[[], tuple[bool, str]]) -> Callable[[], tuple[bool, str]]:
    """An `available` that makes a reason of whatever goes wrong: a broken installation is no traceback."""

    @functools.wraps(available)
    def asked() -> tuple[bool, str]:
        try:
            return available()
        except (Exception, SystemExit) as problem:
            first = (str(problem).strip() or "no message").splitlines()[0]
            return False, f"{type(problem).__name__}: {first}"

    return asked


def load(name: str) -> ModuleType:
    """The module of a backend; imports it, runs nothing."""
    if name not in NAMES:
        raise ValueError(f"backend must be one of {NAMES}, got {name!r}")
    return importlib.import_module(f"wyfast_lib.backends.{name}")


def availability() -> dict[str, tuple[bool, str]]:
    """(ok, reason) of every backend on this machine."""
    return {name: load(name).available() for name in NAMES}


def setting(name: str) -> str | None:
    """An environment variable; a graph of torch.compile keeps the value that it was traced with."""
    return os.environ.get(name)


# What torch.compiler.assume_constant_result does, which imports torch's compiler, and with it triton, for it.
# Without it a graph is traced again after some changes of the environment and not after others.
setting._dynamo_marked_constant = True


def choose(device_type: str, requested: str | None = None) -> str:
    """The name of the backend for such a device: `requested`, else WYFAST_BACKEND, else the device's own.

    Raises:
        ValueError: no backend of that name.
    """
    name, source = requested, "backend"
    if requested is None:
        name, source = setting("WYFAST_BACKEND") or DEFAULT.get(device_type, "torch"), "WYFAST_BACKEND"
    if name not in NAMES:
        raise ValueError(f"{source} must be one of {NAMES}, got {name!r}")
    return name


def pick(device_type: str, requested: str | None = None) -> ModuleType:
    """The backend that `choose` names, never another one.

    Raises:
        ValueError: no backend of that name.
        BackendUnavailable: it cannot run on this machine.
    """
    name = choose(device_type, requested)
    if name not in _ready:
        module = load(name)
        ok, reason = module.available()
        if not ok:
            raise BackendUnavailable(
                f"backend {name!r} is not available: {reason} (backend='torch' runs on any device)"
            )
        _ready[name] = module
    return _ready[name]
