"""The one planner of the Ascend kernels: the kernel, tiles, layouts and grid of a call, or why it is refused.

The NPU backend and the `lowered` backend both launch what stands here; the compile gate compiles it. Tiles
are as wide as K and V (rounded up to a power of two), so every tile of k, v, dw, du is read once; the limits
below are where the compiler's own memory plan stops fitting (tests compile both sides of each limit).
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass

import torch

from wyfast_lib.varlen import ChunkTable

MODULE = "wyfast_lib.kernels.ascend"
FORWARD, BACKWARD = "recompute_w_u_fwd_kernel", "prepare_wy_repr_bwd_kernel"
MAX_WIDTH = 256
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32",
         torch.int32: "*i32", torch.int64: "*i64"}  # fmt: skip
NUMBERS = {int: "i32", float: "fp32"}


@dataclass(frozen=True)
class Device:
    """What the plan depends on: the compiler's target name and the number of AI cores."""

    target: str
    cores: int

    @property
    def arch35(self) -> bool:
        """Ascend 950 (the compiler knows it as Ascend950*, Ascend910_95* too)."""
        return self.target.startswith(("Ascend950", "Ascend910_95"))


@dataclass(frozen=True)
class Layout:
    """Storage of beta, g, dbeta, dg: True is [B, H, T] (contiguous in time), False [B, T, H] (stride H)."""

    g: bool = True
    beta: bool = True
    dg: bool = True
    db: bool = True


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel's name in `module`, its run-time arguments, constants and 1-d grid."""

    kernel: str
    args: dict
    constexprs: dict
    grid: tuple[int]
    module: str = MODULE

    @property
    def signature(self) -> dict[str, str]:
        """Type of every run-time argument as Triton spells it."""
        return {name: NUMBERS.get(type(x)) or TYPES[x.dtype] for name, x in self.args.items()}


def check(k, v, beta, A, g, gk, chunks: ChunkTable | None, needs_grad: bool, arch35: bool) -> None:
    """Raise NotImplementedError naming the limit that a call exceeds; ValueError never (see `checks`).

    Arguments as in `wyfast_lib.wy_fast`. arch35: the target is an Ascend 950.
    """
    K, V, BT = k.shape[3], v.shape[3], A.shape[3]
    for name, x in (("k", k), ("v", v), ("beta", beta), ("A", A), ("g", g), ("gk", gk)):
        if x is not None and x.dtype == torch.float64:
            raise NotImplementedError(f"{name}: the Ascend kernels compute in float32, got float64")
    for name, width in (("K", K), ("V", V)):
        if width > MAX_WIDTH:
            raise NotImplementedError(
                f"{name} = {width}: the Ascend kernels hold whole rows in L1: at most {MAX_WIDTH} wide"
            )
    half = torch.promote_types(k.dtype, v.dtype) != torch.float32
    if gk is not None and BT == 128 and tile(K) == 256 and half:
        raise NotImplementedError(
            "chunks of 128 with gk and K > 128 in half precision need 240 KiB of UB, the vector unit has "
            "192 KiB: use BT <= 64"
        )
    if needs_grad and BT > 64:
        raise NotImplementedError(
            f"BT = {BT}: the backward holds its [BT, BT] tiles in UB; 128 needs 323 KiB, the vector unit has "
            "192 KiB: use BT <= 64"
        )
    if needs_grad and arch35 and torch.float16 in (k.dtype, v.dtype):
        raise NotImplementedError("backward in float16 is not supported on arch35 (Ascend 950): use bfloat16")
    if k.shape[1] >= 2**31 or A.shape[0] * A.shape[1] * A.shape[2] >= 2**31:
        raise NotImplementedError("T and the number of tasks must be below 2**31")


def plan_forward(k, v, beta, A, g, gk, chunks, device: Device, layout: Layout = Layout()):
    """-> (Launch, w [B, T, H, K], u [B, T, H, V]); the outputs are allocated here, uninitialised."""
    B, T, H, BT = A.shape
    w, u = k.new_empty(B, T, H, k.shape[3]), v.new_empty(B, T, H, v.shape[3])
    k, v = operands(k, v, rows=BT, device=device)
    args = {
        "k": k, "v": v, "beta": stored(beta, layout.beta), "A": A.contiguous(),
        "g": stored(beta if g is None else g, layout.g), "gk": k if gk is None else gk.contiguous(),
        "w": w, "u": u,
    }  # fmt: skip
    flags = {"USE_G": g is not None, "USE_GK": gk is not None,
             "G_T_CONTIG": layout.g, "BETA_T_CONTIG": layout.beta}  # fmt: skip
    return _launch(FORWARD, args, flags, H, BT, chunks, H, device), w, u


def plan_backward(k, v, beta, A, g, dw, du, chunks, device: Device, layout: Layout = Layout()):
    """-> (Launch, dk, dv, dbeta, dg), dbeta and dg as the kernel stores them: `gradients` turns them back.

    dk like k, dv like v; dbeta and dg [B, H, T] or [B, T, H] by `layout`; dg None without g.
    """
    B, T, H, BT = A.shape
    dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    dbeta = beta.new_empty((B, H, T) if layout.db else (B, T, H))
    dg = None if g is None else g.new_empty((B, H, T) if layout.dg else (B, T, H))
    Hg = k.shape[2]
    k, v = operands(k, v, rows=BT, device=device)
    gate, stored_dg = g, dg
    if g is None:
        # Without a gate the kernel failed in the compiler (ascendnpu-ir 1.2.0) in float32, and at some sizes
        # in half precision, "expected 4 offset values, got 3": a gate of zeros is the same operator.
        gate, stored_dg = torch.zeros_like(beta), torch.empty_like(dbeta)
    args = {
        "k": k, "v": v, "beta": stored(beta, layout.beta), "A": A.contiguous(),
        "g": stored(gate, layout.g), "dw": dw.contiguous(), "du": du.contiguous(),
        "dk": dk, "dv": dv, "dbeta": dbeta, "dg": stored_dg,
    }  # fmt: skip
    # The compiler for arch35 fails an assertion of its own on a constant tile in half precision, and never
    # splits vector work, which is what the product with ones is for.
    flags = {"G_T_CONTIG": layout.g, "BETA_T_CONTIG": layout.beta, "DG_T_CONTIG": layout.dg,
             "DB_T_CONTIG": layout.db, "SUM_ON_CUBE": not device.arch35}  # fmt: skip
    # On arch35 loads with a tail and sums of products pass through UB: rows of 256 in two tiles.
    widest = 128 if device.arch35 else MAX_WIDTH
    tasks = Hg * -(-k.shape[3] // min(tile(k.shape[3]), widest))
    launch = _launch(BACKWARD, args, flags, H, BT, chunks, tasks, device, widest)
    return launch, dk, dv, dbeta, dg


def gradients(dk, dv, dbeta, dg, layout: Layout = Layout()):
    """What `plan_backward` allocated, after the launch -> (dk, dv, dbeta [B, T, H], dg [B, T, H] or None)."""
    if layout.db:
        dbeta = dbeta.transpose(1, 2).contiguous()
    if dg is not None and layout.dg:
        dg = dg.transpose(1, 2).contiguous()
    return dk, dv, dbeta, dg


def interpret(launch: Launch) -> None:
    """Run a launch in Triton's interpreter, on CPU tensors; TRITON_INTERPRET=1 must be set before the kernels
    are imported.

    Raises:
        TypeError: a bfloat16 tensor: the interpreter multiplies the bit patterns, silently wrong by 1e10.
        RuntimeError: the kernels were imported without TRITON_INTERPRET=1.
    """
    for name, x in launch.args.items():
        if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16:
            raise TypeError(
                f"{name}: Triton's interpreter computes bfloat16 wrongly (it multiplies bit patterns); "
                "backend='lowered' runs these kernels in bfloat16"
            )
    kernel = getattr(importlib.import_module(launch.module), launch.kernel)
    if type(kernel).__name__ != "InterpretedFunction":
        raise RuntimeError("set TRITON_INTERPRET=1 before the kernels are imported")
    kernel[launch.grid](**launch.args, **launch.constexprs)


def _launch(kernel, args, flags, H, BT, chunks, tasks_a_chunk, device, widest=MAX_WIDTH) -> Launch:
    k, v = args["k"], args["v"]
    B, T, Hg, K = k.shape
    V = v.shape[3]
    if chunks is None:
        # Not read when IS_VARLEN is false; a pointer of the right type is all that the signature asks for.
        cu_seqlens, indices = k.new_empty(1, dtype=torch.int64), k.new_empty(1, dtype=torch.int32)
        count = B * -(-T // BT)
    else:
        cu_seqlens, indices, count = chunks.cu_seqlens, chunks.indices.contiguous(), chunks.num_chunks
    tasks = count * tasks_a_chunk
    args = {**args, "cu_seqlens": cu_seqlens, "chunk_indices": indices, "T": T, "n_tasks": tasks}
    tiles = {"BT": BT, "BK": min(tile(K), widest), "BV": min(tile(V), widest)}
    sizes = {"H": H, "Hg": Hg, "K": K, "V": V}
    constexprs = {**sizes, **tiles, "IS_VARLEN": chunks is not None, **flags}
    return Launch(kernel, args, constexprs, (min(device.cores, tasks),))


def tile(width: int) -> int:
    """The tile that holds a row: a power of two, at least the 16 that a cube fractal is wide."""
    return max(16, 1 << (width - 1).bit_length())


def operands(*tensors, rows: int, device: Device) -> list:
    """Tensors that meet in the same products: contiguous and of one dtype, the widest of theirs.

    rows: of the left operand, which is rows x rows.
    """
    wide = functools.reduce(torch.promote_types, (x.dtype for x in tensors))
    if device.arch35 and rows == 16:
        # The compiler for arch35 (ascendnpu-ir 1.2.0) fails an assertion of its own on a product whose left
        # operand is 16 x 16 in half precision; in float32 it does not.
        wide = torch.float32
    return [x.to(wide).contiguous() for x in tensors]


def stored(x, t_contig: bool):
    """[B, T, H] -> the storage of a layout flag; no copy when it is that storage already."""
    return x.transpose(1, 2).contiguous() if t_contig else x.contiguous()
