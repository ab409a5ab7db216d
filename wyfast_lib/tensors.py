"""Tensors that are not what they seem: without memory, inside a transform, lazily negated, wrapped.

A kernel takes an address, so each of these has to be seen before a launch: some of them answer `data_ptr()`
with an address that is not theirs.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_fake(x: torch.Tensor) -> bool:
    """Is x a stand-in of FakeTensorMode?"""
    return type(x) not in PLAIN and isinstance(x, FakeTensor)


def fake_mode_of(x: torch.Tensor):
    """A context in which new tensors are as fake as x is."""
    return nullcontext() if torch.compiler.is_compiling() or not is_fake(x) else x.fake_mode


def shapes_only(x: torch.Tensor) -> bool:
    """Has x a shape and a dtype but no values?"""
    return x.is_meta or is_fake(x)


def is_batched(x: torch.Tensor) -> bool:
    """Is x inside torch.func.vmap, one of many?"""
    return torch._C._functorch.is_batchedtensor(x)


def is_wrapper(x: torch.Tensor) -> bool:
    """Is x a subclass that answers PyTorch's operators itself (DTensor, quantised, masked, ...)?

    Its own memory is not where its values are. Subclasses without a `__torch_dispatch__` of their own, as
    nn.Parameter, are plain memory; fake and functional tensors are understood.
    """
    kind = type(x)
    if kind in PLAIN or kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return False
    return not isinstance(x, (FakeTensor, FunctionalTensor))


def is_dispatched(*tensors: torch.Tensor | None) -> bool:
    """Must a call on these go through PyTorch's dispatcher, because someone else has to see it first?

    A compiler that traces, a functorch transform, a mode that makes or traces tensors (FakeTensorMode and its
    kin), or tensors that have shapes only. A mode that looks on, such as FlopCounterMode, sees the torch
    backend's own operations on the direct path, and would see one opaque node on the other.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or (torch._C._len_torch_dispatch_stack() > 0 and _traces())
        or any(x is not None and shapes_only(x) for x in tensors)
    )


def _traces() -> bool:
    """Is a mode active that makes fake tensors, or records operations to run them later?"""
    kinds = torch._C._TorchDispatchModeKey
    return any(
        torch._C._get_dispatch_mode(kind) is not None for kind in (kinds.FAKE, kinds.PROXY, kinds.FUNCTIONAL)
    )


def at_most_float32(x: torch.Tensor) -> torch.Tensor:
    """x, rounded to float32 when it is float64: an upstream gradient may be wider than what kernels read."""
    return x.float() if x.dtype == torch.float64 else x


def resolved(x: torch.Tensor | None) -> torch.Tensor | None:
    """x with its values in its memory: a lazily negated view or a lazy zero is copied, another x returned.

    What a finished functorch transform left around x (torch.func.vjp hands out such tensors) is taken off.
    """
    if x is None:
        return None
    x = torch._C._functorch.unwrap_if_dead(x)
    if x.is_neg():  # the imaginary part of a conjugate is one; conjugation itself stays with complex dtypes
        return x.resolve_neg()
    return x.clone() if x._is_zerotensor() else x
