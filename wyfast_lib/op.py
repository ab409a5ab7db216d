"""The operator: check the arguments, pick the backend, run it inside an autograd function."""

from __future__ import annotations

import torch

from wyfast_lib import backends, library, precision
from wyfast_lib.checks import check_wy_fast
from wyfast_lib.tensors import shapes_only
from wyfast_lib.varlen import ChunkTable


class _DifferentiableOnce(torch.autograd.Function):
    """Identity on the gradients of a backward that builds a graph; differentiating through it raises.

    `once_differentiable` of PyTorch does this only when the upstream gradient itself carries a graph: after
    `w.sum()` a gradient penalty would be constant without a word. Here the saved inputs count as well.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(count, *gradients_and_sources):
        return gradients_and_sources[:count]

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Nothing is kept."""

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("wy_fast is differentiable once: its backward has no derivative of its own")


class WyFastFunction(torch.autograd.Function):
    """(k, v, beta, A, g) -> (w, u) with the hand-written adjoint of the whole chain through A = (I + M)^-1.

    `wy_fast` checks its arguments and calls this; call it directly only with arguments it would accept.
    The backward keeps inputs only, never (w, u) or an intermediate; it runs on the backend and in the
    float32 precision of the forward. Works inside torch.func.grad and torch.func.vmap.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(k, v, beta, A, g, gk, cu_seqlens, chunk_indices, backend, precision=None):
        """(w, u); arguments as in `wy_fast`, the chunk table as its two tensors."""
        return library.forward(k, v, beta, A, g, gk, cu_seqlens, chunk_indices, backend, precision)

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Keep the inputs, and the backend and precision that the forward got."""
        k, v, beta, A, g, gk, cu_seqlens, chunk_indices, backend, mode = inputs
        ctx.save_for_backward(k, v, beta, A, g, cu_seqlens, chunk_indices)
        ctx.backend = backend or backends.choose(k.device.type)
        ctx.precision = mode or precision.current()
        ctx.has_gk = gk is not None

    @staticmethod
    def backward(ctx, dw, du):
        """Gradients of k, v, beta and g from dw [B, T, H, K] and du [B, T, H, V]; None for the others.

        An upstream gradient may be None (zeros) and of any floating dtype: TypeError otherwise, ValueError
        for one of another shape or on another device.
        """
        if ctx.has_gk:
            raise NotImplementedError(
                "wy_fast has no backward with gk: its gradient would be wrong, so it is not computed. "
                "Call it under torch.no_grad(), or without gk"
            )
        k, v, beta, A, g, *table = ctx.saved_tensors
        dw = k.new_zeros(*v.shape[:3], k.shape[3]) if dw is None else dw
        du = torch.zeros_like(v) if du is None else du
        with torch.no_grad():
            dk, dv, dbeta, dg = library.backward(
                k, v, beta, A, g, dw, du, *table, ctx.backend, ctx.precision
            )
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            dk, dv, dbeta, dg = _DifferentiableOnce.apply(4, dk, dv, dbeta, dg, k, v, beta, g, dw, du)
        return dk, dv, dbeta, None, None if g is None else dg, None, None, None, None, None


class _Transformed(WyFastFunction):
    """`WyFastFunction` inside a functorch transform; torch.compile takes no class with a `jvp`."""

    @staticmethod
    def jvp(ctx, *_):
        """There is none."""
        raise NotImplementedError(
            "wy_fast has no forward-mode derivative: use torch.func.grad, vjp or jacrev, not jvp, jacfwd or "
            "hessian"
        )


class _Eager(_Transformed):
    """`WyFastFunction` in the older form that functorch cannot take: a call costs 10 us less of host time."""

    @staticmethod
    def forward(ctx, *inputs):
        WyFastFunction.setup_context(ctx, inputs, None)
        return library.forward(*inputs)

    setup_context = staticmethod(torch.autograd.Function.setup_context)


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

    torch.func.grad and torch.func.vmap work (packed rows are run one by one under vmap); forward-mode
    derivatives do not. A graph of torch.compile keeps the backend and the float32 precision that it was
    traced with; what the backend refuses is refused when the graph runs; compile inside torch.func.grad, not
    around it. Meta and fake tensors give shapes and dtypes.

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
        backend: "torch", "cuda", "ascend" or "lowered"; default WYFAST_BACKEND, else the device's own. The
            backward runs on the backend of its forward.

    Returns:
        w: [B, T, H, K], dtype of k. u: [B, T, H, V], dtype of v. Accumulated in float32 (float64 for
        float64 inputs). Dtypes may be mixed: each gradient has its input's dtype, dk is summed over the heads
        of a group. torch.autocast does not reach inside.

    Raises:
        TypeError: an argument is no plain tensor (DTensor and other wrappers: pass the tensor inside) of a
            floating dtype (cu_seqlens: int32 / int64).
        ValueError: a rank, shape, device, chunk size or cu_seqlens that does not fit, an unknown backend or
            WYFAST_FLOAT32_PRECISION; nothing has run then.
        BackendUnavailable (a RuntimeError): the backend cannot run on this machine.
        NotImplementedError: in backward, with gk given; before anything runs, when the picked backend cannot
            take a call (a width, chunk size or dtype that it names).
        RuntimeError: a second backward through the first (once differentiable).

    Warns:
        UserWarning: 1 < T < H, and no cu_seqlens: the tensors look like [B, H, T, ...].

    Source: arXiv:2406.06484 (WY form), arXiv:2412.06464 (gate); the adjoint is derived in notebook 02.
    """
    chunks = check_wy_fast(k, v, beta, A, g, gk, cu_seqlens)
    inputs = (k, v, beta, A, g, gk)
    # Once: the backward runs on this backend in this precision too; a graph keeps what it was traced with.
    backend, mode = backends.choose(k.device.type, backend), precision.current()
    compiling = torch.compiler.is_compiling()
    if not (compiling or shapes_only(k)):  # else the registered operator does this, when it runs
        needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
        backends.pick(k.device.type, backend).check_call(*inputs, chunks, needs_grad)
    table = (None, None) if chunks is None else (chunks.cu_seqlens, chunks.indices)
    if compiling:
        return WyFastFunction.apply(*inputs, *table, backend, mode)
    function = _Transformed if torch._C._are_functorch_transforms_active() else _Eager
    return function.apply(*inputs, *table, backend, mode)
