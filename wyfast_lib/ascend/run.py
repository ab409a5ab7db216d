"""`run`: a kernel that the Ascend front end lowered, executed natively on this CPU, bfloat16 included.

This checks the front half of the Ascend lowering (pointers, masks, block shapes, dots), not the hardware.
The kernel runs in the worker process, on copies of the tensors in memory that both processes share; between
the copies stand guard bytes (NaN in every float type), so that a store past a tensor is an error and a load
past it shows.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import os
from pathlib import Path

from wyfast_lib.ascend import toolchain, worker
from wyfast_lib.ascend.compile import Compiled

GUARD = 256  # bytes before and behind each copied range; also the alignment of the ranges
GUARD_BYTE = 0xFF

#: Scalar types of a signature -> (struct code, lowest, highest); None: a float.
SCALARS = {
    "i1": ("B", 0, 1),
    "i8": ("b", -(1 << 7), (1 << 7) - 1),
    "i16": ("h", -(1 << 15), (1 << 15) - 1),
    "i32": ("i", -(1 << 31), (1 << 31) - 1),
    "i64": ("q", -(1 << 63), (1 << 63) - 1),
    "u8": ("B", 0, (1 << 8) - 1),
    "u16": ("H", 0, (1 << 16) - 1),
    "u32": ("I", 0, (1 << 32) - 1),
    "u64": ("Q", 0, (1 << 64) - 1),
    "fp32": ("f", None, None),
    "fp64": ("d", None, None),
}


@functools.lru_cache(maxsize=1)
def _dtypes() -> dict:
    import torch

    return {
        "*bf16": torch.bfloat16,
        "*fp16": torch.float16,
        "*fp32": torch.float32,
        "*fp64": torch.float64,
        "*i1": torch.bool,
        "*i8": torch.int8,
        "*u8": torch.uint8,
        "*i16": torch.int16,
        "*i32": torch.int32,
        "*i64": torch.int64,
    }


def run(compiled: Compiled, args, grid: tuple[int, ...], timeout: float = worker.TIMEOUT_S) -> None:
    """Launch a compiled kernel over `grid` on this CPU; it writes into the tensors of `args`.

    args: a dict by parameter name, or a sequence in the order of `compiled.arguments`; CPU tensors (any
    strides: a kernel gets the address of element 0, as on a device) and numbers. grid: one to three program
    counts. Raises TypeError or ValueError naming the argument, WorkerCrashed when the kernel dies,
    RuntimeError when it stores outside its tensors; tensors are untouched then. Nothing is written to a
    tensor that the kernel does not change.
    """
    import torch

    values = _ordered(compiled, args)
    counts = _grid(grid)
    if 0 in counts:
        return
    lazy = {i: x for i, x in enumerate(values) if isinstance(x, torch.Tensor) and _is_lazy(x)}
    values = [x.resolve_neg().clone() if i in lazy else x for i, x in enumerate(values)]
    with worker.lock, torch.no_grad():
        ranges = _ranges(compiled, values)
        memory = _Shared.of(worker.current(), sum(r.room for r in ranges.values()) + GUARD)
        memory.put(ranges)
        request = {
            "name": compiled.kernel,
            "key": _key(compiled),
            "size": memory.size,
            "grid": counts,
            "arguments": _arguments(compiled, values, ranges),
        }
        _launch(compiled, request, timeout)
        before = {i: values[i]._version for i in lazy}
        memory.get(compiled, ranges)
        for i, x in lazy.items():
            if values[i]._version != before[i]:
                x.copy_(values[i])


def _launch(compiled: Compiled, request: dict, timeout: float) -> None:
    live = worker.current()
    reply = worker.call("run", timeout=timeout, **request)
    if reply.get("missing"):
        worker.call(
            "load",
            key=request["key"],
            name=compiled.kernel,
            linalg=compiled.linalg,
            cache=str(toolchain.cache_root() / "native"),
        )
        if worker.current() is not live:
            raise RuntimeError("the worker was replaced between loading and launching a kernel")
        worker.call("run", timeout=timeout, **request)


def _key(compiled: Compiled) -> str:
    return hashlib.sha256(f"{_native_digest()}{toolchain.versions()}{compiled.linalg}".encode()).hexdigest()


@functools.lru_cache(maxsize=1)
def _native_digest() -> str:
    return hashlib.sha256(Path(__file__).with_name("native.py").read_bytes()).hexdigest()


# ---- checks ----


def _ordered(compiled: Compiled, args) -> list:
    names = compiled.arguments
    if isinstance(args, dict):
        missing = [name for name in names if name not in args]
        extra = [name for name in args if name not in names]
        if missing or extra:
            problem = f"{', '.join(missing)} missing" if missing else f"{', '.join(extra)} not among them"
            raise ValueError(f"args: {compiled.kernel} takes {', '.join(names)} at run time; {problem}")
        values = [args[name] for name in names]
    else:
        values = list(args)
        if len(values) != len(names):
            raise ValueError(
                f"args: {compiled.kernel} takes {len(names)} ({', '.join(names)}), got {len(values)}"
            )
    for name, value in zip(names, values, strict=True):
        _check(name, compiled.signature[name], value)
    return values


def _check(name: str, kind: str, value) -> None:
    import torch

    if kind.startswith("*"):
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor for {kind}, got {type(value).__name__}")
        if kind not in _dtypes():
            raise TypeError(f"{name}: pointers of type {kind} cannot be run here")
        if value.dtype != _dtypes()[kind]:
            raise TypeError(f"{name}: the kernel was compiled for {kind}, got a tensor of {value.dtype}")
        if value.device.type != "cpu" or value.layout != torch.strided:
            raise ValueError(f"{name}: expected a strided CPU tensor, got {value.layout} on {value.device}")
        wrapper = type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        if wrapper or torch._C._functorch.is_functorch_wrapped_tensor(value):
            raise ValueError(f"{name}: expected a tensor with memory, got a {type(value).__name__} wrapper")
        return
    if kind not in SCALARS:
        raise TypeError(f"{name}: a scalar of type {kind} cannot be passed at run time")
    _, low, high = SCALARS[kind]
    if low is None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name}: expected a number for {kind}, got {type(value).__name__}")
    elif not isinstance(value, int):
        raise TypeError(f"{name}: expected an int for {kind}, got {type(value).__name__}")
    elif not low <= value <= high:
        raise ValueError(f"{name}: {value} does not fit {kind}")


def _is_lazy(x) -> bool:
    """Are the values of x other than what its memory holds: a negated view, or a zero without memory?"""
    return x.is_neg() or x._is_zerotensor()


def _grid(grid) -> tuple[int, int, int]:
    counts = tuple(grid)
    if not 1 <= len(counts) <= 3 or not all(isinstance(n, int) and 0 <= n < 1 << 31 for n in counts):
        raise ValueError(f"grid: expected one to three program counts, got {grid!r}")
    return counts + (1,) * (3 - len(counts))


# ---- tensors <-> shared memory ----


class _Range:
    """Bytes [low, high) of one storage, which one or more tensors of a call lie in, and their place in
    the memory.
    """

    def __init__(self, storage) -> None:
        self.storage, self.low, self.high = storage, None, None
        self.tensors, self.place = [], 0

    def include(self, tensor) -> None:
        size = tensor.element_size()
        low = tensor.storage_offset() * size
        span = (
            0
            if tensor.numel() == 0
            else 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        )
        self.low = low if self.low is None else min(self.low, low)
        self.high = low + span * size if self.high is None else max(self.high, low + span * size)
        self.tensors.append(tensor)

    @property
    def room(self) -> int:
        return -(-self.length // GUARD) * GUARD + GUARD

    @property
    def length(self) -> int:
        return self.high - self.low

    @property
    def address(self) -> int:
        return self.storage.data_ptr() + self.low


def _ranges(compiled: Compiled, values: list) -> dict[int, _Range]:
    """One range a storage (so that views of one tensor stay views of one tensor), placed one behind the
    other.
    """
    import torch

    ranges: dict[int, _Range] = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            ranges.setdefault(storage.data_ptr(), _Range(storage)).include(value)
    place = GUARD
    for entry in ranges.values():
        entry.place = place
        place += entry.room
    return ranges


def _arguments(compiled: Compiled, values: list, ranges: dict[int, _Range]) -> list[tuple]:
    """(struct code or "ptr", value or place in the memory, element count) for each argument."""
    out = []
    for name, value in zip(compiled.arguments, values, strict=True):
        kind = compiled.signature[name]
        if kind.startswith("*"):
            entry = ranges[value.untyped_storage().data_ptr()]
            at = value.storage_offset() * value.element_size()
            out.append(
                ("ptr", entry.place + at - entry.low, max(1, (entry.high - at) // value.element_size()))
            )
        else:
            out.append((SCALARS[kind][0], value, 1))
    return out


class _Shared:
    """This process's view of a worker's shared memory; grows to the largest call.

    Plain memmove and memcmp: torch would start its threads for a copy, which costs more than most launches.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        os.ftruncate(descriptor, size)
        self.map = mmap.mmap(descriptor, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    @staticmethod
    def of(live: worker.Worker, size: int) -> _Shared:
        view = getattr(live, "shared_view", None)
        if view is None or view.size < size:
            live.shared_view = view = _Shared(live.memory, 1 << max(20, (size - 1).bit_length()))
        return view

    def put(self, ranges: dict[int, _Range]) -> None:
        """Copy every range in, guards around each."""
        ctypes.memset(self.address, GUARD_BYTE, GUARD)
        for entry in ranges.values():
            at = self.address + entry.place
            ctypes.memmove(at, entry.address, entry.length)
            ctypes.memset(at + entry.length, GUARD_BYTE, entry.room - entry.length)

    def get(self, compiled: Compiled, ranges: dict[int, _Range]) -> None:
        """Check the guards, then copy back the ranges that the kernel changed."""
        import torch

        guards = [(0, GUARD), *((r.place + r.length, r.room - r.length) for r in ranges.values())]
        if any(_memcmp(self.address + at, _INTACT, size) for at, size in guards):
            raise RuntimeError(f"{compiled.kernel} stored outside its tensors (next to one of them)")
        for entry in ranges.values():
            at = self.address + entry.place
            if _memcmp(at, entry.address, entry.length):
                ctypes.memmove(entry.address, at, entry.length)
                for tensor in entry.tensors:
                    torch.autograd.graph.increment_version(tensor)


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_intact_buffer = ctypes.create_string_buffer(bytes([GUARD_BYTE]) * (2 * GUARD), 2 * GUARD)
_INTACT = ctypes.addressof(_intact_buffer)
