"""NVIDIA GPUs through Triton: which kernel, which tiles, and a launch that costs little host time.

Nothing is tuned at the first call. Tiles come from `LAUNCH`, a fixed table by (pass, architecture, operand
size,
BT); the first entry whose shared memory fits the device is taken. `python -m wyfast_lib bench --tune`
measures
candidates on the device at hand and prints lines for the table. Hopper has a kernel of its own for the
common case
(`kernels/hopper.py`).

With TRITON_INTERPRET=1 the portable kernels run in Triton's interpreter on CPU tensors, in float32 and
float16.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import torch

from wyfast_lib.backends import never_raises
from wyfast_lib.precision import current as current_precision
from wyfast_lib.precision import float32_precision as float32_precision  # public here
from wyfast_lib.tensors import at_most_float32, resolved

MINIMUM_TRITON = (3, 4)
MAX_WIDTH = 512  # K and V
MAX_ROW = 1 << 24  # heads x width: offsets inside a tile are 32 bit
HALF = (torch.bfloat16, torch.float16)
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Tiles:
    """One launch configuration of a portable kernel: tile widths, warps, pipeline stages, register cap."""

    BK: int
    BV: int
    num_warps: int = 4
    num_stages: int = 1
    maxnreg: int | None = None
    KEEP_P: bool = False  # backward: hold A^T dw in registers; needs K <= BK

    def options(self) -> dict:
        """Launch options of Triton."""
        cap = {} if self.maxnreg is None else {"maxnreg": self.maxnreg}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **cap}


# (pass, architecture or 0 for any, bytes of an operand, BT): the best first, then smaller ones for devices
# with less
# shared memory. To extend it, run `bench --tune` on the device and put its winner in front.
LAUNCH: dict[tuple[str, int, int, int], tuple[Tiles, ...]] = {
    ("forward", 0, 2, 16): (Tiles(64, 64), Tiles(32, 32)),
    ("forward", 0, 2, 32): (Tiles(64, 64), Tiles(32, 32)),
    ("forward", 0, 2, 64): (Tiles(64, 64), Tiles(32, 32)),
    ("forward", 9, 2, 64): (Tiles(32, 32, num_warps=2, num_stages=3), Tiles(32, 32)),
    ("forward", 0, 2, 128): (Tiles(64, 64, num_warps=8), Tiles(32, 32, num_warps=8), Tiles(16, 16)),
    ("forward", 0, 4, 16): (Tiles(32, 32), Tiles(16, 16)),
    ("forward", 0, 4, 32): (Tiles(32, 32), Tiles(16, 16)),
    ("forward", 0, 4, 64): (Tiles(32, 32, num_warps=8), Tiles(16, 16)),
    ("forward", 0, 4, 128): (Tiles(32, 32, num_warps=8), Tiles(16, 16, num_warps=8)),
    ("backward", 0, 2, 16): (Tiles(64, 64), Tiles(32, 32), Tiles(16, 16)),
    ("backward", 0, 2, 32): (Tiles(64, 64), Tiles(32, 32), Tiles(16, 16)),
    ("backward", 0, 2, 64): (Tiles(64, 64), Tiles(32, 32), Tiles(16, 16)),
    ("backward", 9, 2, 64): (Tiles(128, 64, maxnreg=168), Tiles(64, 64), Tiles(32, 32), Tiles(16, 16)),
    ("backward", 0, 2, 128): (
        Tiles(64, 64, num_warps=8),
        Tiles(32, 32, num_warps=8),
        Tiles(16, 16, num_warps=8),
    ),
    ("backward", 0, 4, 16): (Tiles(32, 32), Tiles(16, 16)),
    ("backward", 0, 4, 32): (Tiles(32, 32), Tiles(16, 16)),
    ("backward", 0, 4, 64): (Tiles(16, 16),),
    ("backward", 0, 4, 128): (Tiles(16, 16, num_warps=16),),
    ("dv_local", 0, 2, 16): (Tiles(64, 64), Tiles(32, 32)),
    ("dv_local", 0, 2, 32): (Tiles(64, 64), Tiles(32, 32)),
    ("dv_local", 0, 2, 64): (Tiles(64, 64), Tiles(32, 32)),
    ("dv_local", 0, 2, 128): (Tiles(64, 64, num_warps=8), Tiles(32, 32, num_warps=8), Tiles(16, 16)),
    ("dv_local", 0, 4, 16): (Tiles(32, 32), Tiles(16, 16)),
    ("dv_local", 0, 4, 32): (Tiles(32, 32), Tiles(16, 16)),
    ("dv_local", 0, 4, 64): (Tiles(32, 32, num_warps=8), Tiles(16, 16)),
    ("dv_local", 0, 4, 128): (Tiles(16, 16, num_warps=16),),
}

_plans: dict[tuple, Plan] = {}


@never_raises
def available() -> tuple[bool, str]:
    """Is there a CUDA device (or Triton's interpreter) and a Triton that is new enough?

    Starts no device. Before CUDA runs in this process torch counts the devices by NVML where it can: asking
    the CUDA runtime would make CUDA unusable in a process that is forked later.
    """
    if importlib.util.find_spec("triton") is None:
        return False, "triton is not installed"
    import triton

    version = tuple(int(x) for x in triton.__version__.split(".")[:2])
    if version < MINIMUM_TRITON:
        return False, f"triton {triton.__version__} is older than 3.4"
    if INTERPRET:
        return True, f"triton {triton.__version__} interpreter on the CPU"
    count = 0 if torch.version.cuda is None else torch.cuda.device_count()
    if count < 1:
        return False, "no CUDA device"
    return True, f"triton {triton.__version__} on {count} CUDA device{'s' if count > 1 else ''}"


def check_call(k, v, beta, A, g, gk, chunks, needs_grad: bool) -> None:
    """Raise, naming the limit, for a call that these kernels cannot take. Arguments as in `wy_fast`.

    Raises:
        ValueError: tensors not on a CUDA device; K or V over 512; heads x width or tasks over 32 bit.
        NotImplementedError: float64; bfloat16 in the interpreter or below compute capability 8.0.
    """
    _check_limits(k, v.shape[2], v.shape[3], A.shape[3], chunks, (k, v, beta, A, g, gk))


def check_dv_local(q, k, do, g, chunks, chunk_size: int) -> None:
    """As `check_call`, for `wyfast_lib.chunk_bwd_dv_local`."""
    _check_limits(k, do.shape[2], do.shape[3], chunk_size, chunks, (q, k, do, g))


def _check_limits(k, H: int, V: int, BT: int, chunks, tensors) -> None:
    """Raise, naming the limit, for what no kernel here takes; k [B, T, Hg, K], H value heads of width V."""
    K = k.shape[3]
    if k.device.type != ("cpu" if INTERPRET else "cuda"):
        place = (
            "the interpreter (TRITON_INTERPRET=1) needs CPU tensors" if INTERPRET else "it needs CUDA tensors"
        )
        raise ValueError(f"backend 'cuda': {place}, got k on {k.device}")
    if K > MAX_WIDTH or V > MAX_WIDTH:
        raise ValueError(f"backend 'cuda': K and V must be at most {MAX_WIDTH}, got K = {K}, V = {V}")
    if H * max(K, V, BT) >= MAX_ROW:
        raise ValueError(f"backend 'cuda': heads x width must be below 2^24, got {H} heads, K = {K}, V = {V}")
    if _tasks(k, BT, chunks) * H >= 1 << 31:
        raise ValueError("backend 'cuda': chunks x heads must be below 2^31, the largest grid")
    dtypes = {x.dtype for x in tensors if x is not None}
    if torch.float64 in dtypes:
        raise NotImplementedError("backend 'cuda' has no float64: use float32, or backend='torch'")
    if torch.bfloat16 in dtypes:
        if INTERPRET:
            raise NotImplementedError(
                "Triton's interpreter multiplies bfloat16 bit patterns as integers: "
                "use float32 or float16 in it"
            )
        if _device(k.device.index).capability < (8, 0):
            raise NotImplementedError("bfloat16 needs compute capability 8.0: use float16 on this GPU")


def forward(k, v, beta, A, g, gk, chunks, precision=None):
    """w [B, T, H, K] and u [B, T, H, V]; arguments as in `wy_fast`, checked."""
    B, T, Hg, K = k.shape
    H, V = v.shape[2:]
    k, v, beta, A = _dense(k), _dense(v), _dense(beta), _dense(A)
    g, gk = None if g is None else _dense(g), None if gk is None else _dense(gk)
    w = torch.empty((B, T, H, K), dtype=k.dtype, device=k.device)
    u = torch.empty_like(v)
    BT = A.shape[3]
    cu_seqlens, indices = (None, None) if chunks is None else (chunks.cu_seqlens, chunks.indices)
    hopper = gk is None and _fits_hopper_kernel(k, v, A, K, V, BT)
    pointers = (k, v, beta, w, u, A, g) + (() if hopper else (gk,)) + (cu_seqlens, indices)
    _launch(
        "forward",
        hopper,
        pointers,
        (k, v),
        (T, _per_row(T, BT, chunks)),
        _tasks(k, BT, chunks) * H,
        (H, Hg, K, V, BT),
        precision or current_precision(),
    )
    return w, u


def backward(k, v, beta, A, g, dw, du, chunks, precision=None):
    """(dk, dv, dbeta, dg) of the shapes and dtypes of (k, v, beta, g); dg is None when g is."""
    B, T, Hg, K = k.shape
    H, V = v.shape[2:]
    k, v, beta, A = _dense(k), _dense(v), _dense(beta), _dense(A)
    dw, du = _dense(at_most_float32(dw)), _dense(at_most_float32(du))
    dk, dv, db = torch.empty_like(k), torch.empty_like(v), torch.empty_like(beta)
    dg = None
    if g is not None:
        g = _dense(g)
        dg = torch.empty_like(g)
    BT = A.shape[3]
    cu_seqlens, indices = (None, None) if chunks is None else (chunks.cu_seqlens, chunks.indices)
    hopper = dw.dtype == k.dtype == du.dtype and _fits_hopper_kernel(k, v, A, K, V, BT)
    pointers = (k, v, beta, g, A, dw, du, dk, dv, db, dg, cu_seqlens, indices)
    _launch(
        "backward",
        hopper,
        pointers,
        (k, v),
        (T, _per_row(T, BT, chunks)),
        _tasks(k, BT, chunks) * Hg,
        (H, Hg, K, V, BT),
        precision or current_precision(),
    )
    return dk, dv, db, dg


def dv_local(q, k, do, g, scale, chunks, chunk_size: int, precision=None):
    """dv [B, T, H, V] of do's dtype; arguments as in `wyfast_lib.chunk_bwd_dv_local`, checked."""
    T, Hg, K = k.shape[1:]
    H, V = do.shape[2:]
    q, k, do, g = _dense(q), _dense(k), _dense(do), None if g is None else _dense(g)
    dv = torch.empty_like(do)
    table = (None, None) if chunks is None else (chunks.cu_seqlens, chunks.indices)
    _launch(
        "dv_local",
        False,
        (q, k, do, dv, g, *table),
        (q, k, do),
        (T, _per_row(T, chunk_size, chunks), scale),
        _tasks(k, chunk_size, chunks) * Hg,
        (H, Hg, K, V, chunk_size),
        precision or current_precision(),
    )
    return dv


def candidates(phase: str, arch: int, itemsize: int, K: int, V: int, BT: int) -> tuple[Tiles, ...]:
    """The table's entries for a call, best first, tiles no wider than K and V need."""
    entries = LAUNCH.get((phase, arch, itemsize, BT)) or LAUNCH[phase, 0, itemsize, BT]
    return tuple(t for t in entries if not t.KEEP_P or t.BK >= K)


class Plan:
    """One compiled kernel with its constants: all that a later call of the same kind needs."""

    __slots__ = ("run", "constants", "tiles")

    def __init__(self, kernel, arguments, programs, constants, choices, limit):
        self.constants = tuple(constants.values())
        needs = []
        for tiles in choices:
            extra = tiles_constants(constants, tiles)
            if INTERPRET:
                self.run = kernel
            else:
                self.run = kernel.warmup(
                    *arguments, *extra.values(), grid=(programs,), **tiles.options()
                )
                needs.append(self.run.metadata.shared)
            self.constants, self.tiles = tuple(extra.values()), tiles
            if not needs or needs[-1] <= limit:
                return
        raise RuntimeError(
            f"backend 'cuda': this call needs at least {min(needs)} bytes of shared memory a block, "
            f"the device has {limit}: use smaller K, V or BT, or backend='torch'"
        )


def tiles_constants(constants: dict, tiles: Tiles) -> dict:
    """The kernel's compile-time arguments in its order, tile widths filled in and no wider than needed."""
    filled = dict(constants)
    for name, width in (("BK", "K"), ("BV", "V")):
        if name in filled:
            filled[name] = max(16, min(getattr(tiles, name), 1 << (constants[width] - 1).bit_length()))
    if "KEEP_P" in filled:
        filled["KEEP_P"] = tiles.KEEP_P
    return filled


def _launch(phase, hopper, pointers, operands, scalars, programs, sizes, precision) -> None:
    """Launch on the device of the operands and on its current stream, compiling at the first call of a
    kind."""
    index = operands[0].device.index
    key = (phase, hopper, index, sizes, precision) + tuple(
        [None if x is None else x.dtype for x in pointers]
    )
    plan = _plans.get(key)
    if not INTERPRET and torch._C._cuda_getDevice() != index:
        with torch.cuda.device(index):
            return _launch(phase, hopper, pointers, operands, scalars, programs, sizes, precision)
    if plan is None:
        plan = _plans[key] = _plan(phase, hopper, pointers, operands, scalars, programs, sizes, precision)
    if INTERPRET:
        plan.run[(programs,)](*pointers, *scalars, *plan.constants)
    else:
        stream = torch._C._cuda_getCurrentRawStream(index)
        plan.run[(programs, 1, 1)](*pointers, *scalars, *plan.constants, stream=stream)


# Where each kernel takes its gate among its pointers, by phase; the last pointer is the chunk table or None.
_GATE = {"forward": 6, "backward": 3, "dv_local": 4}


def _plan(phase, hopper, pointers, operands, scalars, programs, sizes, precision) -> Plan:
    """Choose the kernel and its constants for one kind of call, and compile it."""
    H, Hg, K, V, BT = sizes
    is_varlen, device = pointers[-1] is not None, _device(operands[0].device.index)
    has_g = pointers[_GATE[phase]] is not None
    constants = {"H": Hg, "HV": H, "K": K, "V": V}  # the field's names: H key heads, HV value heads
    if hopper:
        from wyfast_lib.kernels import hopper as kernels

        name = (
            "recompute_w_u_fwd_hopper_kernel" if phase == "forward" else "prepare_wy_repr_bwd_hopper_kernel"
        )
        constants |= {"USE_G": has_g, "IS_VARLEN": is_varlen, "G_T_CONTIG": False}
        choices: tuple[Tiles, ...] = (Tiles(64, 64),)
    else:
        import triton.language as tl

        from wyfast_lib.kernels import cuda as kernels
        from wyfast_lib.kernels import cuda_dv_local

        dot = functools.reduce(torch.promote_types, [x.dtype for x in operands])
        types = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
        constants |= {"BT": BT, "BK": 0, "BV": 0, "USE_G": has_g}
        constants |= {"USE_GK": pointers[7] is not None} if phase == "forward" else {}
        constants |= {"IS_VARLEN": is_varlen} | ({"KEEP_P": False} if phase == "backward" else {})
        constants |= {"DOT": types[dot], "PRECISION": precision}
        name = {"forward": "recompute_w_u_fwd_kernel", "backward": "prepare_wy_repr_bwd_kernel",
                "dv_local": "chunk_bwd_dv_local_kernel"}[phase]  # fmt: skip
        kernels = cuda_dv_local if phase == "dv_local" else kernels
        choices = candidates(phase, device.capability[0], dot.itemsize, K, V, BT)
    arguments = (*pointers, *scalars)
    return Plan(getattr(kernels, name), arguments, programs, constants, choices, device.shared_memory)


def _fits_hopper_kernel(k, v, A, K, V, BT) -> bool:
    """The common case: one half-precision dtype, BT = 64, K and V of 64 or 128, on compute capability 9.0."""
    return (
        BT == 64
        and (K == 64 or K == 128)
        and (V == 64 or V == 128)
        and k.dtype in HALF
        and k.dtype == v.dtype == A.dtype
        and not INTERPRET
        and _device(k.device.index).hopper
    )


@cache
def _device(index: int | None) -> SimpleNamespace:
    """What the choice of a kernel depends on, read once a device."""
    if INTERPRET:
        return SimpleNamespace(capability=(0, 0), shared_memory=1 << 30, hopper=False)
    import triton
    from triton.runtime import driver

    capability = torch.cuda.get_device_capability(index)
    gluon = tuple(int(x) for x in triton.__version__.split(".")[:2]) >= (3, 6)
    shared = driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return SimpleNamespace(capability=capability, shared_memory=shared, hopper=capability == (9, 0) and gluon)


def _dense(x: torch.Tensor) -> torch.Tensor:
    """x itself when it is in memory, contiguous and starts at a multiple of 16 bytes, else a copy that is."""
    x = resolved(x).contiguous()
    return x.clone() if x.data_ptr() & 15 else x


def _per_row(T: int, BT: int, chunks) -> int:
    """Chunks of one batch row (of all of them when packed)."""
    return (T + BT - 1) // BT if chunks is None else chunks.num_chunks


def _tasks(k, BT: int, chunks) -> int:
    """Chunks of all batch rows."""
    return _per_row(k.shape[1], BT, chunks) * (k.shape[0] if chunks is None else 1)
