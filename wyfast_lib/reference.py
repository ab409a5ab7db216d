"""The mathematics, readable: the specification that every kernel is tested against.

Conventions: the state S is [K, V] (a row a key channel), M[i, j] = beta[i] <k[i], k[j]> exp(g[i] - g[j]) for
i > j, A = (I + M)^-1, g is the natural-log decay summed inside its chunk. Everything is computed in float64
whatever the inputs' dtype, so "equal to the reference" means equal to the truth on the same rounded inputs.

Sources: S. Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length",
arXiv:2406.06484 (WY form, UT transform); S. Yang et al., "Gated Delta Networks", arXiv:2412.06464 (the gate);
the adjoint follows from A (I + M) = I, derived in notebook 02.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

DTYPE = torch.float64


def chunk_ranges(
    T: int, chunk_size: int, cu_seqlens: torch.Tensor | None = None
) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) token of every chunk; chunks restart at each packed sequence."""
    offsets = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    for begin, end in zip(offsets[:-1], offsets[1:], strict=True):
        for first in range(begin, end, chunk_size):
            yield first, min(first + chunk_size, end)


def expand_heads(x: torch.Tensor, H: int) -> torch.Tensor:
    """[B, T, Hg, ...] -> [B, T, H, ...]: head h reads key head h // (H // Hg)."""
    return x.repeat_interleave(H // x.shape[2], dim=2)


def decay_differences(g: torch.Tensor) -> torch.Tensor:
    """exp(g[i] - g[j]) for i > j, else 0; g [..., r] -> [..., r, r].

    The exponent is masked, not the product: above the diagonal exp may overflow, and inf * 0 is NaN.
    """
    lower = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).tril(-1)
    return (g[..., :, None] - g[..., None, :]).masked_fill(~lower, -torch.inf).exp()


def wy_matrix(k: torch.Tensor, beta: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """M of one chunk: k [..., r, K], beta and g [..., r] -> [..., r, r], strictly lower triangular."""
    return beta[..., :, None] * (k @ k.mT) * decay_differences(g)


def wy_factor_reference(
    k: torch.Tensor,
    beta: torch.Tensor,
    g: torch.Tensor | None,
    chunk_size: int,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """A = (I + M)^-1 of every chunk by a triangular solve, float64, differentiable.

    Args:
        k: [B, T, Hg, K]; beta: [B, T, H]; g: [B, T, H] or None; chunk_size: BT.

    Returns:
        A: [B, T, H, BT], zero right of the diagonal and past a chunk's tail.
    """
    B, T, H = beta.shape
    k, beta = expand_heads(k.to(DTYPE), H), beta.to(DTYPE)
    g = torch.zeros_like(beta) if g is None else g.to(DTYPE)
    tiles = []
    for s, e in chunk_ranges(T, chunk_size, cu_seqlens):
        M = wy_matrix(*(x[:, s:e].transpose(1, 2) for x in (k, beta, g)))
        identity = torch.eye(e - s, dtype=DTYPE, device=k.device)
        tile = torch.linalg.solve_triangular(identity + M, identity.expand_as(M), upper=False)
        tiles.append(torch.nn.functional.pad(tile, (0, chunk_size - (e - s))).transpose(1, 2))
    return torch.cat(tiles, dim=1) if tiles else beta.new_zeros(B, T, H, chunk_size)


def wy_fast_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """w = A (beta e^g [e^gk] k) and u = A (beta v), chunk by chunk, in float64.

    Shapes as in `wyfast_lib.wy_fast`. Returns w [B, T, H, K] and u [B, T, H, V], float64.
    """
    B, T, H, BT = A.shape
    k, v, beta, A = expand_heads(k.to(DTYPE), H), v.to(DTYPE), beta.to(DTYPE), A.to(DTYPE)
    scaled = k * beta[..., None]
    if g is not None:
        scaled = scaled * g.to(DTYPE).exp()[..., None]
    if gk is not None:
        scaled = scaled * expand_heads(gk.to(DTYPE), H).exp()
    w, u = torch.zeros_like(k), torch.zeros_like(v)
    for s, e in chunk_ranges(T, BT, cu_seqlens):
        tile = A[:, s:e, :, : e - s]
        w[:, s:e] = torch.einsum("bihj,bjhd->bihd", tile, scaled[:, s:e])
        u[:, s:e] = torch.einsum("bihj,bjhd->bihd", tile, (v * beta[..., None])[:, s:e])
    return w, u


def wy_adjoint_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor,
    g: torch.Tensor | None,
    dw: torch.Tensor,
    du: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The closed-form gradient of (k, v, beta, g) -> A -> (w, u), in float64, A taken as given.

    dL/dM = -A^T dA A^T below the diagonal; from it every gradient is a row sum of a product that dk needs.

    Args:
        dw: [B, T, H, K], du: [B, T, H, V]: gradients of w and u; the other shapes as in `wyfast_lib.wy_fast`.

    Returns:
        dk [B, T, Hg, K] (summed over the heads of a group), dv [B, T, H, V], dbeta and dg [B, T, H]
        (dg is None when g is), float64.
    """
    B, T, H, BT = A.shape
    group = H // k.shape[2]
    keys = expand_heads(k.to(DTYPE), H)
    gate = torch.zeros(B, T, H, dtype=DTYPE, device=k.device) if g is None else g.to(DTYPE)
    dk, dv = torch.zeros_like(keys), torch.zeros_like(v, dtype=DTYPE)
    dbeta, dg = torch.zeros_like(gate), torch.zeros_like(gate)
    for s, e in chunk_ranges(T, BT, cu_seqlens):
        heads_first = (x[:, s:e].to(DTYPE).transpose(1, 2) for x in (keys, v, beta, A, gate, dw, du))
        tiles = chunk_adjoint(*heads_first)
        for gradient, tile in zip((dk, dv, dbeta, dg), tiles, strict=True):
            gradient[:, s:e] = tile.transpose(1, 2)
    return dk.unflatten(2, (-1, group)).sum(3), dv, dbeta, None if g is None else dg


def chunk_adjoint(k, v, beta, A, g, dw, du):
    """The adjoint of one chunk: k, dw [..., r, K]; v, du [..., r, V]; beta, g [..., r]; A [..., r, BT].

    Returns (dk, dv, dbeta, dg) of the shapes of (k, v, beta, g).
    """
    A = A[..., : k.shape[-2]]
    b, eg = beta[..., None], g.exp()[..., None]
    dA = dw @ (k * b * eg).mT + du @ (v * b).mT
    N = -(A.mT @ dA @ A.mT) * decay_differences(g)  # dL/dM with the gate factor of M, without its beta
    P, Q = A.mT @ dw, A.mT @ du
    X, Y = N @ k, N.mT @ (b * k)

    def dot(a, c):
        return (a * c).sum(-1)

    e = eg[..., 0]
    dk = b * eg * P + b * X + Y
    dbeta = e * dot(P, k) + dot(Q, v) + dot(X, k)
    dg = beta * (e * dot(P, k) + dot(X, k)) - dot(Y, k)
    return dk, b * Q, dbeta, dg


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    log_decay: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule itself, token by token: forget, then measure the error, then write, then read.

        S <- exp(log_decay[t]) S
        S <- S + k[t] (beta[t] (v[t] - S^T k[t]))^T
        o[t] = scale * S^T q[t]

    Args:
        q, k: [B, T, Hg, K]; v: [B, T, H, V]; beta: [B, T, H].
        log_decay: [B, T, H], natural log of each token's own decay (not cumulated), None for DeltaNet.
        scale: default K ** -0.5.
        initial_state: [B, H, K, V], default zero.

    Returns:
        o [B, T, H, V] and the final state [B, H, K, V], float64.
    """
    B, T, H, V = v.shape
    K = k.shape[-1]
    q, k = (expand_heads(x.to(DTYPE), H) for x in (q, k))
    v, beta = v.to(DTYPE), beta.to(DTYPE)
    decay = torch.ones_like(beta) if log_decay is None else log_decay.to(DTYPE).exp()
    scale = K**-0.5 if scale is None else scale
    S = k.new_zeros(B, H, K, V) if initial_state is None else initial_state.to(DTYPE)
    outputs = []
    for t in range(T):
        S = decay[:, t, :, None, None] * S
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * error)
        outputs.append(scale * torch.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return torch.stack(outputs, dim=1) if outputs else v, S


def outputs_from_wy(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    g: torch.Tensor | None,
    chunk_size: int,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What w and u are for: the outputs of the gated delta rule, a chunk at a time.

    With S the state before the chunk, g the chunk-local cumulated log decay and n = u - w S the values that
    the chunk really writes:

        o = scale * ((e^g q) S + tril(q k^T e^(g_i - g_j)) n)
        S <- e^(g_last) S + (e^(g_last - g) k)^T n

    Args:
        q, k: [B, T, Hg, K]; w: [B, T, H, K]; u: [B, T, H, V]; g: [B, T, H] or None; chunk_size: BT.
        initial_state: [B, H, K, V]; with cu_seqlens it stands before every sequence.

    Returns:
        o [B, T, H, V] and the last state [B, H, K, V] (of the last sequence), float64.
    """
    B, T, H, V = u.shape
    K = k.shape[-1]
    scale = K**-0.5 if scale is None else scale
    gate = torch.zeros(B, T, H, dtype=DTYPE, device=k.device) if g is None else g.to(DTYPE)
    q, k = (expand_heads(x.to(DTYPE), H) for x in (q, k))
    q, k, w, u, gate = (x.to(DTYPE).transpose(1, 2) for x in (q, k, w, u, gate))
    start = k.new_zeros(B, H, K, V) if initial_state is None else initial_state.to(DTYPE)
    begins = {0} if cu_seqlens is None else set(cu_seqlens.tolist())
    S, outputs = start, torch.zeros_like(u)
    for s, e in chunk_ranges(T, chunk_size, cu_seqlens):
        S = start if s in begins else S
        gc, kc, qc = gate[:, :, s:e], k[:, :, s:e], q[:, :, s:e]
        n = u[:, :, s:e] - w[:, :, s:e] @ S
        decay = decay_differences(gc) + torch.eye(e - s, dtype=DTYPE, device=k.device)
        outputs[:, :, s:e] = scale * (
            gc.exp()[..., None] * (qc @ S) + ((qc @ kc.mT) * decay) @ n
        )
        last = gc[..., -1:]
        S = last.exp()[..., None] * S + ((last - gc).exp()[..., None] * kc).mT @ n
    return outputs.transpose(1, 2), S


def chunk_bwd_dv_local_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    do: torch.Tensor,
    g: torch.Tensor | None = None,
    scale: float | None = None,
    chunk_size: int = 64,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient of o_local = scale * tril(q k^T e^(g_i - g_j)) n (see `outputs_from_wy`) for n.

        dv[j] = scale * sum_{i >= j} <q[i], k[j]> exp(g[i] - g[j]) do[i]

    Shapes as in `wyfast_lib.chunk_bwd_dv_local`. Returns dv [B, T, H, V], float64.
    """
    H, K = do.shape[2], k.shape[-1]
    scale = K**-0.5 if scale is None else scale
    gate = do.new_zeros(do.shape[:3], dtype=DTYPE) if g is None else g.to(DTYPE)
    q, k = (expand_heads(x.to(DTYPE), H) for x in (q, k))
    q, k, do, gate = (x.to(DTYPE).transpose(1, 2) for x in (q, k, do, gate))
    dv = torch.zeros_like(do)
    for s, e in chunk_ranges(do.shape[2], chunk_size, cu_seqlens):
        decay = decay_differences(gate[:, :, s:e]) + torch.eye(e - s, dtype=DTYPE, device=k.device)
        scores = (q[:, :, s:e] @ k[:, :, s:e].mT).tril() * decay
        dv[:, :, s:e] = scale * scores.mT @ do[:, :, s:e]
    return dv.transpose(1, 2)
