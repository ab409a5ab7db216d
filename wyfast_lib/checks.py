"""Every argument check of the operator, in one place, before anything is launched."""

from __future__ import annotations

import math
import numbers
import sys
import warnings

import torch

from wyfast_lib.tensors import PLAIN, is_wrapper
from wyfast_lib.varlen import CHUNK_SIZES, Chunks, ChunkTable, check_chunk_size, resolve_chunks

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_tensor(name: str, x: object, shape: str, rank: int) -> None:
    """Raise TypeError / ValueError unless x is a floating tensor of that rank; `shape` is for the message."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of shape {shape}, got {type(x).__name__}")
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} must be float64, float32, float16 or bfloat16, got {x.dtype}")
    if x.is_nested or x.layout != torch.strided:
        raise TypeError(f"{name} must be dense and strided, got {x.layout}, nested: {x.is_nested}")
    if type(x) not in PLAIN and is_wrapper(x):
        raise TypeError(
            f"{name} must be a plain torch.Tensor, got the wrapper {type(x).__name__}, whose values are not "
            "in its own memory: pass the tensor inside it (of a DTensor: to_local())"
        )
    if x.dim() != rank:
        raise ValueError(f"{name} must have shape {shape}, got {list(x.shape)}")


def check_shape(name: str, x: torch.Tensor, shape: str, expected: tuple[int, ...]) -> None:
    """Raise ValueError unless x has the expected sizes."""
    if x.shape != expected:
        raise ValueError(f"{name} must have shape {shape} = {list(expected)}, got {list(x.shape)}")


def check_same_device(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless all given tensors live where the first one does."""
    places = {name: x.device for name, x in tensors.items() if x is not None}
    first, reference = next(iter(places.items()))
    for name, place in places.items():
        if place != reference:
            raise ValueError(f"{name} is on {place}, {first} on {reference}: one device is needed")


def check_heads(H: int, Hg: int, K: int) -> None:
    """Raise ValueError unless H value heads share Hg key heads evenly."""
    if H < 1 or Hg < 1 or K < 1:
        raise ValueError(f"H, Hg and K must be at least 1, got H = {H}, Hg = {Hg}, K = {K}")
    if H % Hg != 0:
        raise ValueError(f"H must be a multiple of Hg, got H = {H} heads over Hg = {Hg} key heads")


def check_keys_and_gates(
    k: torch.Tensor, beta: torch.Tensor, g: torch.Tensor | None
) -> tuple[int, int, int, int, int]:
    """Check k [B, T, Hg, K], beta [B, T, H] and g [B, T, H] or None; return (B, T, H, Hg, K)."""
    check_tensor("k", k, "[B, T, Hg, K]", 4)
    check_tensor("beta", beta, "[B, T, H]", 3)
    if g is not None:
        check_tensor("g", g, "[B, T, H]", 3)
    B, T, Hg, K = k.shape
    H = beta.shape[2]
    check_heads(H, Hg, K)
    check_shape("beta", beta, "[B, T, H]", (B, T, H))
    if g is not None:
        check_shape("g", g, "[B, T, H]", (B, T, H))
    return B, T, H, Hg, K


def check_upstream(dw: torch.Tensor, du: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Check upstream gradients dw [B, T, H, K] and du [B, T, H, V] against checked k and v.

    Any floating dtype: a gradient may be of another one than its output. Autograd checks them for a call of
    its own, but not for an adapter, a wrapper or a registered operator.
    """
    (B, T, H, V), K = v.shape, k.shape[3]
    check_tensor("dw", dw, "[B, T, H, K]", 4)
    check_tensor("du", du, "[B, T, H, V]", 4)
    check_shape("dw", dw, "[B, T, H, K]", (B, T, H, K))
    check_shape("du", du, "[B, T, H, V]", (B, T, H, V))
    check_same_device(k=k, dw=dw, du=du)


def warn_if_heads_first(name: str, T: int, H: int, cu_seqlens: object = None) -> None:
    """Warn, once a line of the caller's, about a tensor that looks like [B, H, T, ...]: 1 < T < H.

    A single token is a decoding step, and offsets of packed sequences have said already where T is.
    """
    if torch.compiler.is_compiling() or cu_seqlens is not None or not 1 < T < H:
        return
    frame, level = sys._getframe(1), 2
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in ("wyfast_lib", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"{name} has T = {T} tokens and H = {H} heads: the expected order is [B, T, H, ...], time before "
        f"heads. If it is [B, H, T, ...], pass {name}.transpose(1, 2)",
        stacklevel=level,
    )


def check_wy_fast(
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    A: torch.Tensor,
    g: torch.Tensor | None,
    gk: torch.Tensor | None,
    cu_seqlens: torch.Tensor | ChunkTable | None,
) -> Chunks | None:
    """Check all arguments of `wy_fast`; return the chunks, or None when the sequences are dense."""
    check_tensor("v", v, "[B, T, H, V]", 4)
    check_tensor("A", A, "[B, T, H, BT]", 4)
    B, T, H, Hg, K = check_keys_and_gates(k, beta, g)
    check_shape("v", v, "[B, T, H, V]", (B, T, H, v.shape[3]))
    if v.shape[3] < 1:
        raise ValueError(f"V must be at least 1, got v of shape {list(v.shape)}")
    BT = A.shape[3]
    if BT not in CHUNK_SIZES:
        raise ValueError(f"A.shape[-1] is the chunk size BT and must be one of {CHUNK_SIZES}, got {BT}")
    check_shape("A", A, "[B, T, H, BT]", (B, T, H, BT))
    if gk is not None:
        check_tensor("gk", gk, "[B, T, Hg, K]", 4)
        check_shape("gk", gk, "[B, T, Hg, K]", (B, T, Hg, K))
    check_same_device(k=k, v=v, beta=beta, A=A, g=g, gk=gk)
    warn_if_heads_first("v", T, H, cu_seqlens)
    return resolve_chunks(cu_seqlens, BT, k, "k")


def check_dv_local(
    q: torch.Tensor,
    k: torch.Tensor,
    do: torch.Tensor,
    g: torch.Tensor | None,
    scale: float | None,
    cu_seqlens: torch.Tensor | ChunkTable | None,
    chunk_size: int,
) -> tuple[float, Chunks | None]:
    """Check all arguments of `chunk_bwd_dv_local`; return the scale and the chunks (None when dense)."""
    check_tensor("q", q, "[B, T, Hg, K]", 4)
    check_tensor("k", k, "[B, T, Hg, K]", 4)
    check_tensor("do", do, "[B, T, H, V]", 4)
    B, T, Hg, K = k.shape
    H, V = do.shape[2:]
    check_heads(H, Hg, K)
    check_shape("q", q, "[B, T, Hg, K]", (B, T, Hg, K))
    check_shape("do", do, "[B, T, H, V]", (B, T, H, V))
    if V < 1:
        raise ValueError(f"V must be at least 1, got do of shape {list(do.shape)}")
    if g is not None:
        check_tensor("g", g, "[B, T, H]", 3)
        check_shape("g", g, "[B, T, H]", (B, T, H))
    check_same_device(q=q, k=k, do=do, g=g)
    check_chunk_size(chunk_size)
    warn_if_heads_first("do", T, H, cu_seqlens)
    return check_scale(scale, K), resolve_chunks(cu_seqlens, chunk_size, k, "k")


def check_scale(scale: float | None, K: int) -> float:
    """The scale as a float, K ** -0.5 for None; TypeError for what is no real number, ValueError for inf."""
    if scale is None:
        return K**-0.5
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"scale must be a real number or None, got {type(scale).__name__}")
    if not torch.compiler.is_compiling() and not math.isfinite(scale):  # a graph asks when it runs
        raise ValueError(f"scale must be finite, got {scale}")
    return scale if torch.compiler.is_compiling() else float(scale)
