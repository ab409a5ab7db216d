"""The three launches as registered operators, and the one place that decides whether a call needs them.

Eager calls go to the backend directly; dispatching an operator costs more host time than the checks. The
registered operator is taken where somebody has to see the call first: torch.compile and torch.export see one
opaque node with known shapes, fake and meta tensors get shapes and no launch, torch.func.vmap its rule. What
a backend refuses is then refused when the operator runs.
"""

from __future__ import annotations

import torch

from wyfast_lib import backends
from wyfast_lib.checks import check_scale, check_upstream
from wyfast_lib.tensors import is_dispatched
from wyfast_lib.varlen import Chunks


def chunks_of(
    cu_seqlens: torch.Tensor | None, indices: torch.Tensor | None, BT: int, T: int
) -> Chunks | None:
    """Put a checked table back together from the tensors that crossed an operator's boundary."""
    if cu_seqlens is None or indices is None:
        return None
    return Chunks(cu_seqlens, indices, chunk_size=BT, total=T)


# ---- w and u ----


def forward(k, v, beta, A, g, gk, cu_seqlens, chunk_indices, backend, precision):
    """w [B, T, H, K] and u [B, T, H, V]; arguments as in `recompute_w_u`, checked."""
    if is_dispatched(k, v, beta, A, g, gk):
        return recompute_w_u(k, v, beta, A, g, gk, cu_seqlens, chunk_indices, backend, precision)
    if k.shape[0] * k.shape[1] == 0:
        return _empty_w_u(k, v)
    chunks = chunks_of(cu_seqlens, chunk_indices, A.shape[3], A.shape[1])
    return backends.pick(k.device.type, backend).forward(k, v, beta, A, g, gk, chunks, precision)


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
    precision: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """w [B, T, H, K] and u [B, T, H, V]; arguments as in `wy_fast`, checked; backend None picks."""
    chunks = chunks_of(cu_seqlens, chunk_indices, A.shape[3], A.shape[1])
    module = backends.pick(k.device.type, backend)
    module.check_call(k, v, beta, A, g, gk, chunks, False)
    if k.shape[0] * k.shape[1] == 0:
        return _empty_w_u(k, v)
    return module.forward(k, v, beta, A, g, gk, chunks, precision)


@recompute_w_u.register_fake
def _(k, v, beta, A, g, gk, cu_seqlens, chunk_indices, backend, precision=None):
    return _empty_w_u(k, v)


@recompute_w_u.register_vmap
def _(info, in_dims, *arguments):
    return _vmap(recompute_w_u, info, in_dims, arguments, table=6)


def _empty_w_u(k, v):
    B, T, H, V = v.shape
    return k.new_empty(B, T, H, k.shape[3]), v.new_empty(B, T, H, V)


# ---- its adjoint ----


def backward(k, v, beta, A, g, dw, du, cu_seqlens, chunk_indices, backend, precision):
    """dk, dv, dbeta, dg; arguments as in `prepare_wy_repr_bwd`; dw and du are checked here."""
    if not torch.compiler.is_compiling():  # a graph's backward cannot ask; the operator does when it runs
        check_upstream(dw, du, k, v)
    if is_dispatched(k, v, beta, A, g, dw, du):
        return prepare_wy_repr_bwd(
            k, v, beta, A, g, dw, du, cu_seqlens, chunk_indices, backend, precision
        )
    if k.shape[0] * k.shape[1] == 0:
        return _empty_gradients(k, v, beta, g)
    chunks = chunks_of(cu_seqlens, chunk_indices, A.shape[3], A.shape[1])
    return backends.pick(k.device.type, backend).backward(k, v, beta, A, g, dw, du, chunks, precision)


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
    precision: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dk, dv, dbeta, dg of the shapes of k, v, beta, g; dg has no elements when g is None."""
    check_upstream(dw, du, k, v)
    chunks = chunks_of(cu_seqlens, chunk_indices, A.shape[3], A.shape[1])
    module = backends.pick(k.device.type, backend)
    module.check_call(k, v, beta, A, g, None, chunks, True)
    if k.shape[0] * k.shape[1] == 0:
        dk, dv, dbeta, dg = _empty_gradients(k, v, beta, g)
    else:
        dk, dv, dbeta, dg = module.backward(k, v, beta, A, g, dw, du, chunks, precision)
    return dk, dv, dbeta, beta.new_empty(0) if dg is None else dg


@prepare_wy_repr_bwd.register_fake
def _(k, v, beta, A, g, dw, du, cu_seqlens, chunk_indices, backend, precision=None):
    dk, dv, dbeta, dg = _empty_gradients(k, v, beta, g)
    return dk, dv, dbeta, beta.new_empty(0) if dg is None else dg


@prepare_wy_repr_bwd.register_vmap
def _(info, in_dims, *arguments):
    return _vmap(prepare_wy_repr_bwd, info, in_dims, arguments, table=7)


def _empty_gradients(k, v, beta, g):
    return tuple(None if x is None else x.new_empty(x.shape) for x in (k, v, beta, g))


# ---- the local part of dv ----


def dv_local(q, k, do, g, scale, cu_seqlens, chunk_indices, chunk_size, backend, precision):
    """dv [B, T, H, V]; arguments as in `chunk_bwd_dv_local_op`, checked."""
    call = (q, k, do, g, scale, cu_seqlens, chunk_indices, chunk_size, backend, precision)
    return chunk_bwd_dv_local_op(*call) if is_dispatched(q, k, do, g) else _dv_local(*call)


@torch.library.custom_op("wyfast::chunk_bwd_dv_local", mutates_args=())
def chunk_bwd_dv_local_op(
    q: torch.Tensor,
    k: torch.Tensor,
    do: torch.Tensor,
    g: torch.Tensor | None,
    scale: float,
    cu_seqlens: torch.Tensor | None,
    chunk_indices: torch.Tensor | None,
    chunk_size: int,
    backend: str | None,
    precision: str | None = None,
) -> torch.Tensor:
    """dv [B, T, H, V] of do's dtype; arguments as in `chunk_bwd_dv_local`, checked; backend None picks."""
    scale = check_scale(scale, k.shape[3])  # a graph may not have known its value
    return _dv_local(q, k, do, g, scale, cu_seqlens, chunk_indices, chunk_size, backend, precision)


def _dv_local(q, k, do, g, scale, cu_seqlens, chunk_indices, chunk_size, backend, precision):
    chunks = chunks_of(cu_seqlens, chunk_indices, chunk_size, k.shape[1])
    module = backends.pick(k.device.type, backend)
    module.check_dv_local(q, k, do, g, chunks, chunk_size)
    if do.shape[0] * do.shape[1] == 0:
        return do.new_empty(do.shape)
    return module.dv_local(q, k, do, g, scale, chunks, chunk_size, precision)


@chunk_bwd_dv_local_op.register_fake
def _(q, k, do, g, scale, cu_seqlens, chunk_indices, chunk_size, backend, precision=None):
    return do.new_empty(do.shape)


@chunk_bwd_dv_local_op.register_vmap
def _(info, in_dims, *arguments):
    return _vmap(chunk_bwd_dv_local_op, info, in_dims, arguments, table=5)


# ---- vmap ----


def _vmap(operator, info, in_dims, arguments, table: int):
    """The rule of all three: dense calls become one call with more batch rows, packed ones a loop.

    table: where cu_seqlens and chunk_indices stand among the arguments.
    """
    N, packed = info.batch_size, arguments[table] is not None
    if in_dims[table] is not None or in_dims[table + 1] is not None:
        raise ValueError("cu_seqlens must be the same for all calls of a torch.func.vmap: loop over them")
    tensor = [isinstance(x, torch.Tensor) and i not in (table, table + 1) for i, x in enumerate(arguments)]
    moved = [
        x if not is_tensor else x.expand(N, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim, is_tensor in zip(arguments, in_dims, tensor, strict=True)
    ]
    if packed:
        calls = [
            operator(*(x[i] if is_tensor else x for x, is_tensor in zip(moved, tensor, strict=True)))
            for i in range(N)
        ]
        single = isinstance(calls[0], torch.Tensor)
        outputs = torch.stack(calls) if single else tuple(map(torch.stack, zip(*calls, strict=True)))
    else:
        rows = (x.flatten(0, 1) if is_tensor else x for x, is_tensor in zip(moved, tensor, strict=True))
        outputs = operator(*rows)
        single = isinstance(outputs, torch.Tensor)
        B = moved[0].shape[1]

        def unfold(x):
            return x.unflatten(0, (N, B)) if x.dim() > 1 else x.expand(N, *x.shape)  # dg without g: empty

        outputs = unfold(outputs) if single else tuple(map(unfold, outputs))
    return outputs, 0 if single else (0,) * len(outputs)
