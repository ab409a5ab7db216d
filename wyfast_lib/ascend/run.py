"""`run`: a kernel that the Ascend front end lowered, executed natively on this CPU, bfloat16 included.

This checks the front half of the Ascend lowering (pointers, masks, block shapes, dots), not the hardware.
The kernel runs in the worker process, on copies of the tensors in one arena that both processes share. All
of the arena that no tensor of the call owns is poison (NaN in every float type), the gaps between the
elements of a strided view included: a load there shows, and a store there is an error.
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
from wyfast_lib.ascend.errors import CompileError

# Poison before and behind each range that a call's tensors lie in; wide enough for an index that is off by a
# hundred thousand float32 elements. Further out the worker's memory is closed to every access.
GUARD = 512 << 10
ALIGNMENT = 256
POISON = 0xFF  # NaN in every float type, -1 in every signed integer

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
    RuntimeError naming the nearest argument when it stores outside its tensors; tensors are untouched then.
    Nothing is written to a tensor that the kernel does not change. What a kernel loads outside its tensors is
    NaN, or -1 in an integer type.
    """
    import torch

    values = _ordered(compiled, args)
    counts = _grid(grid)
    if 0 in counts:
        return
    lazy = [i for i, x in enumerate(values) if isinstance(x, torch.Tensor) and (x.is_neg() or x.is_conj())]
    given = [values[i] for i in lazy]
    for i in lazy:  # memory holds the opposite sign: the kernel gets a copy that holds the values
        values[i] = values[i].resolve_neg().resolve_conj().detach()
    before = [values[i]._version for i in lazy]
    with worker.lock, torch.no_grad():
        ranges = _ranges(compiled, values)
        used = sum(entry.room for entry in ranges.values())
        memory = _Arena.of(worker.current(), used)
        memory.put(ranges)
        request = {
            "name": compiled.kernel,
            "key": _key(compiled),
            "size": memory.size,
            "used": used,
            "grid": counts,
            "arguments": _arguments(compiled, values, ranges),
        }
        try:
            try:
                _launch(compiled, request, timeout)
            except CompileError as problem:
                problem.ttir, problem.linalg = compiled.ttir, compiled.linalg
                raise
            memory.check(compiled, ranges)
            memory.get(ranges)
        except BaseException:
            memory.poison(0, memory.size)
            raise
        for entry in ranges.values():
            memory.poison(entry.place, entry.length)
        for i, target, version in zip(lazy, given, before, strict=True):
            if values[i]._version != version:
                target.copy_(values[i])


def _launch(compiled: Compiled, request: dict, timeout: float) -> None:
    live = worker.current()
    reply = worker.call("run", timeout=timeout, **request)
    if reply.get("missing"):
        loaded = worker.call(
            "load",
            key=request["key"],
            name=compiled.kernel,
            linalg=compiled.linalg,
            cache=str(toolchain.cache_root() / "native"),
        )
        if loaded["keep"] is not None:
            path, data = loaded["keep"]
            toolchain.keep(Path(path), data)
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


def _grid(grid) -> tuple[int, int, int]:
    counts = tuple(grid)
    if not 1 <= len(counts) <= 3 or not all(isinstance(n, int) and 0 <= n < 1 << 31 for n in counts):
        raise ValueError(f"grid: expected one to three program counts, got {grid!r}")
    return counts + (1,) * (3 - len(counts))


# ---- tensors <-> shared memory ----


class _Range:
    """Bytes [low, high) of one storage, which one or more tensors of a call lie in, and their place in the
    arena.
    """

    def __init__(self, storage) -> None:
        self.storage, self.low, self.high = storage, None, None
        self.tensors, self.names, self.place = [], [], 0

    def include(self, name: str, tensor) -> None:
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
        self.names.append(name)

    @property
    def room(self) -> int:
        """Bytes of the arena: the range and a guard on each side, aligned."""
        return 2 * GUARD + -(-self.length // ALIGNMENT) * ALIGNMENT

    @property
    def length(self) -> int:
        return self.high - self.low

    @property
    def address(self) -> int:
        return self.storage.data_ptr() + self.low

    @functools.cached_property
    def owned(self):
        """bool [length], which bytes are elements of a tensor of the call; None when all are."""
        import torch

        if any(x.numel() * x.element_size() == self.length and _dense(x) for x in self.tensors):
            return None
        owned = torch.zeros(self.length, dtype=torch.bool)
        for x in self.tensors:
            size = x.element_size()
            at = x.storage_offset() * size - self.low
            owned.as_strided((*x.shape, size), (*(s * size for s in x.stride()), 1), at).fill_(True)
        return owned


def _dense(tensor) -> bool:
    """Do the elements lie in memory without a gap and without sharing a place, in whatever order?"""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _ranges(compiled: Compiled, values: list) -> dict[int, _Range]:
    """One range a storage (so that views of one tensor stay views of one tensor), placed one behind the
    other.
    """
    import torch

    ranges: dict[int, _Range] = {}
    for name, value in zip(compiled.arguments, values, strict=True):
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            ranges.setdefault(storage.data_ptr(), _Range(storage)).include(name, value)
    place = GUARD
    for entry in ranges.values():
        entry.place = place
        place += entry.room
    return ranges


def _arguments(compiled: Compiled, values: list, ranges: dict[int, _Range]) -> list[tuple]:
    """(struct code or "ptr", value or place in the arena, element count) for each argument."""
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


class _Arena:
    """This process's view of a worker's shared memory; grows to the largest call. All poison between calls.

    Plain memmove and memcmp: torch would start its threads for a copy, which costs more than most launches.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        os.ftruncate(descriptor, size)
        self.map = mmap.mmap(descriptor, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.poison(0, size)

    @staticmethod
    def of(live: worker.Worker, size: int) -> _Arena:
        view = getattr(live, "shared_view", None)
        if view is None or view.size < size:
            live.shared_view = view = _Arena(live.memory, 1 << max(20, (size - 1).bit_length()))
        return view

    def poison(self, at: int, length: int) -> None:
        ctypes.memset(self.address + at, POISON, length)

    def bytes(self, entry: _Range):
        """The range's bytes in the arena, as a tensor: uint8 [length]."""
        import torch

        return torch.frombuffer(self.map, dtype=torch.uint8, count=entry.length, offset=entry.place)

    def put(self, ranges: dict[int, _Range]) -> None:
        """Copy every range in; what lies between the elements of strided tensors stays poison."""
        for entry in ranges.values():
            ctypes.memmove(self.address + entry.place, entry.address, entry.length)
            if entry.owned is not None:
                self.bytes(entry).masked_fill_(~entry.owned, POISON)

    def check(self, compiled: Compiled, ranges: dict[int, _Range]) -> None:
        """RuntimeError when a byte that no tensor owns has changed; names the nearest argument."""
        for entry in ranges.values():
            begin, end = entry.place - GUARD, entry.place - GUARD + entry.room
            behind = entry.place + entry.length
            if entry.owned is not None:
                strange = (self.bytes(entry) != POISON) & ~entry.owned
                if strange.any():
                    self._outside(compiled, entry, int(strange.nonzero()[0]))
            for at, size in ((begin, GUARD), (behind, end - behind)):
                if _memcmp(self.address + at, _INTACT, size):
                    found = self.map[at : at + size]
                    hit = [i for i in range(0, size, 64) if found[i : i + 64] != _LINE[: size - i]]
                    first = hit[-1] if at == begin else hit[0]  # the one nearest to the tensor
                    first += next(i for i, x in enumerate(found[first : first + 64]) if x != POISON)
                    self._outside(compiled, entry, at + first - entry.place)

    def _outside(self, compiled: Compiled, entry: _Range, offset: int) -> None:
        """Raise for a byte written at this offset into a range; the argument that begins nearest is named."""
        distances = []
        for name, tensor in zip(entry.names, entry.tensors, strict=True):
            size = tensor.element_size()
            index = (offset + entry.low) // size - tensor.storage_offset()
            distances.append((abs(index) * size, index, name, tensor))
        _, index, name, tensor = min(distances, key=lambda x: x[0])
        raise RuntimeError(
            f"{compiled.kernel} stored outside its tensors: "
            f"at {name} {'-' if index < 0 else '+'} {abs(index)} elements; "
            f"{name} has shape {list(tensor.shape)} and strides {list(tensor.stride())}"
        )

    def get(self, ranges: dict[int, _Range]) -> None:
        """Copy back the ranges that the kernel changed."""
        import torch

        for entry in ranges.values():
            at = self.address + entry.place
            if entry.owned is not None:  # what is not owned is the caller's still
                before = torch.frombuffer(
                    (ctypes.c_char * entry.length).from_address(entry.address), dtype=torch.uint8
                )
                self.bytes(entry).copy_(torch.where(entry.owned, self.bytes(entry), before))
            if _memcmp(at, entry.address, entry.length):
                ctypes.memmove(entry.address, at, entry.length)
                for tensor in entry.tensors:
                    torch.autograd.graph.increment_version(tensor)


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_intact_buffer = ctypes.create_string_buffer(bytes([POISON]) * (GUARD + ALIGNMENT), GUARD + ALIGNMENT)
_INTACT = ctypes.addressof(_intact_buffer)
_LINE = bytes([POISON]) * 64
