"""The operator: check the arguments, pick the backend, run it inside an autograd function."""

from __future__ import annotations

import torch

from wyfast_lib import backends, library
from wyfast_lib.checks import check_wy_fast
from wyfast_lib.varlen import ChunkTable


class _DifferentiableOnce(torch.autograd.Function):
    """Identity on the gradients of a backward that builds a graph; differentiating through it raises.

    `once_differentiable` of PyTorch does this only when the upstream gradient itself carries a graph: after
    `w.sum()` a gradient penalty would be constant without a word. Here the saved inputs count as well.
    """

    @staticmethod
    def forward(ctx, count, *gradients_and_sources):
        return gradients_and_sources[:count]

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("wy_fast is differentiable once: its backward has no derivative of its own")


class WyFastFunction(torch.autograd.Function):
    """(k, v, beta, A, g) -> (w, u) with the hand-written adjoint of the whole chain through A = (I + M)^-1.

    `wy_fast` checks its arguments and calls this; call it directly only with arguments it would accept.
    The backward keeps inputs only, never (w, u) or an intermediate.
    """

    @staticmethod
    def forward(ctx, k, v, beta, A, g, gk, cu_seqlens, chunk_indices, backend):
        """(w, u); arguments as in `wy_fast`, the chunk table as its two tensors."""
        ctx.save_for_backward(k, v, beta, A, g, cu_seqlens, chunk_indices)
        ctx.backend = backend
        ctx.has_gk = gk is not None
        if k.shape[0] * k.shape[1] == 0:
            B, T, H, V = v.shape
            return k.new_empty(B, T, H, k.shape[3]), v.new_empty(B, T, H, V)
        if torch.compiler.is_compiling() or k.is_meta:  # meta tensors: shapes only
            return library.recompute_w_u(k, v, beta, A, g, gk, cu_seqlens, chunk_indices, backend)
        chunks = library.chunk_table(cu_seqlens, chunk_indices, A)
        return backends.pick(k.device.type, backend).forward(k, v, beta, A, g, gk, chunks)

    @staticmethod
    def backward(ctx, dw, du):
        """Gradients of k, v, beta and g from dw [B, T, H, K] and du [B, T, H, V]; None for the others."""
        if ctx.has_gk:
            raise NotImplementedError(
                "wy_fast has no backward with gk: its gradient would be wrong, so it is not computed. "
                "Call it under torch.no_grad(), or without gk"
            )
        k, v, beta, A, g, cu_seqlens, chunk_indices = ctx.saved_tensors
        with torch.no_grad():
            dk, dv, dbeta, dg = WyFastFunction._gradients(
                k, v, beta, A, g, dw, du, cu_seqlens, chunk_indices, ctx.backend
            )
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            dk, dv, dbeta, dg = _DifferentiableOnce.apply(4, dk, dv, dbeta, dg, k, v, beta, g, dw, du)
        return dk, dv, dbeta, None, None if g is None else dg, None, None, None, None

    @staticmethod
    def _gradients(k, v, beta, A, g, dw, du, cu_seqlens, chunk_indices, backend):
        if k.shape[0] * k.shape[1] == 0:
            return tuple(None if x is None else torch.zeros_like(x) for x in (k, v, beta, g))
        if torch.compiler.is_compiling() or k.is_meta:
            return library.prepare_wy_repr_bwd(
                k, v, beta, A, g, dw, du, cu_seqlens, chunk_indices, backend
            )
        chunks = library.chunk_table(cu_seqlens, chunk_indices, A)
        return backends.pick(k.device.type, backend).backward(k, v, beta, A, g, dw, du, chunks)


def wy_fast(
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    *,
    cu_seqlens: torch.Tensor | ChunkTable | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The WY representation of the (gated) delta rule, a chunk at a time, differentiable.

    Per chunk of BT tokens and head, rows i, j of the chunk:

        w[i] = sum_j A[i, j] k[j] beta[j] exp(g[j]) [exp(gk[j])]
        u[i] = sum_j A[i, j] v[j] beta[j]

    The backward is the adjoint of the WHOLE chain (k, beta, g) -> M -> A -> (w, u), although A comes in as a
    tensor: A must be the factor (I + M)^-1 of the same (k, beta, g), as `wy_factor` returns it
    (`check_factor` tells). Gradients flow to k, v, beta and g; A and gk get none.

    Args:
        k: [B, T, Hg, K] keys; L2-normalise them, else A grows without bound (see `wy_factor`).
        v: [B, T, H, V] values; H % Hg == 0, head h reads key head h // (H // Hg).
        beta: [B, T, H] write strength.
        A: [B, T, H, BT], unit lower triangular a chunk; BT in {16, 32, 64, 128} is the chunk size.
        g: [B, T, H], optional log decay, natural log, cumulated inside each chunk (`chunk_local_cumsum`).
            Keep it in float32: stored in bfloat16 it is off by up to 28 % in exp(g[i] - g[j]) where |g| is
            between 32 and 64. None equals zeros.
        gk: [B, T, Hg, K], optional log decay a key channel; forward only.
        cu_seqlens: int32 / int64 [N + 1], sequences packed in one row (B must be 1), or the table that
            `prepare_chunks` makes of it, which saves the device read a call.
        backend: "torch", "cuda", "ascend" or "lowered"; default WYFAST_BACKEND, else the device's own.

    Returns:
        w: [B, T, H, K], dtype of k. u: [B, T, H, V], dtype of v. Accumulated in float32 (float64 for
        float64 inputs). Dtypes may be mixed: each gradient has its input's dtype, dk is summed over the heads
        of a group. torch.autocast does not reach inside.

    Raises:
        TypeError: an argument is no tensor of a floating dtype (cu_seqlens: int32 / int64).
        ValueError: a rank, shape, device, chunk size or cu_seqlens that does not fit; nothing has run then.
        BackendUnavailable (a RuntimeError): the backend cannot run on this machine.
        NotImplementedError: in backward, with gk given; before anything runs, when the picked backend cannot
            take a call (a width, chunk size or dtype that it names).
        RuntimeError: a second backward through the first (once differentiable).

    Source: arXiv:2406.06484 (WY form), arXiv:2412.06464 (gate); the adjoint is derived in notebook 02.
    """
    chunks = check_wy_fast(k, v, beta, A, g, gk, cu_seqlens)
    inputs = (k, v, beta, A, g, gk)
    if not torch.compiler.is_compiling():  # inside a compiled graph the registered operator does this
        needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
        backend = backends.choose(k.device.type, backend)  # once: the backward runs on the same one
        backends.pick(k.device.type, backend).check_call(*inputs, chunks, needs_grad)
    table = (None, None) if chunks is None else (chunks.cu_seqlens, chunks.indices)
    return WyFastFunction.apply(*inputs, *table, backend)
