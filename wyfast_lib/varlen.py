"""Packed sequences: from cu_seqlens to the table of chunks that every backend reads.

Nothing is cached on tensor identity: a tensor changed in place would answer with a stale table.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields

import torch
from torch.utils._python_dispatch import _disable_current_modes

from wyfast_lib.tensors import is_batched, is_fake, is_wrapper, shapes_only

CHUNK_SIZES = (16, 32, 64, 128)
MAX_TOKENS = 1 << 31  # the kernels count the tokens of a row in 32 bits


@dataclass(frozen=True, eq=False)  # comparing tensors has no truth value; a table equals itself only
class Chunks:
    """The chunks of sequences packed into one row of T tokens, as the backends read them; known to be right.

    Every sequence starts a new chunk, so a sequence whose length is no multiple of BT ends in a short one.

    Attributes:
        cu_seqlens: int64 [N + 1], token offsets of the N sequences, on the device of the inputs.
        indices: int32 [NT, 2], (sequence, chunk inside that sequence), same device.
        chunk_size: BT, tokens a chunk.
        total: T, tokens in the packed row.
    """

    cu_seqlens: torch.Tensor
    indices: torch.Tensor
    chunk_size: int
    total: int

    @property
    def num_chunks(self) -> int:
        """NT, chunks of all sequences; empty sequences have none."""
        return self.indices.shape[0]

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Token of each chunk row, without a device read.

        Returns:
            tokens: int64 [NT, BT], index into T (0 where there is no token).
            valid: bool [NT, BT], false past a chunk's tail.
        """
        sequence, chunk = self.indices[:, 0].long(), self.indices[:, 1].long()
        inside = torch.arange(self.chunk_size, device=self.indices.device)
        tokens = (self.cu_seqlens[sequence] + chunk * self.chunk_size)[:, None] + inside
        valid = tokens < self.cu_seqlens[sequence + 1][:, None]
        return torch.where(valid, tokens, 0), valid

    def positions(self) -> torch.Tensor:
        """The way back: int64 [T], where each token stands in the flattened [NT * BT] chunk rows."""
        tokens = torch.arange(self.total, device=self.indices.device)
        sequence, chunk = self.indices[:, 0].long(), self.indices[:, 1].long()
        starts = self.cu_seqlens[sequence] + chunk * self.chunk_size
        number = torch.searchsorted(starts, tokens, right=True) - 1
        return number * self.chunk_size + tokens - starts[number]


@dataclass(frozen=True, eq=False)
class ChunkTable(Chunks):
    """`Chunks` in a caller's hands; made by `prepare_chunks`, and checked when it is made by hand.

    ChunkTable(cu_seqlens, indices, chunk_size, total) reads both tensors back once and raises ValueError
    unless the indices are those of `prepare_chunks`. The attributes are copies: calls read tensors of the
    table's own, so nothing that is written into an attribute reaches a kernel, and a call that can see such
    a write (by the tensor's version) raises. Of meta and fake tensors shapes and dtypes alone are checked.
    """

    def __post_init__(self) -> None:
        check_cu_seqlens(self.cu_seqlens)
        check_indices(self.indices, self.cu_seqlens.device)
        check_chunk_size(self.chunk_size)
        if isinstance(self.total, bool) or not isinstance(self.total, int) or self.total < 0:
            raise ValueError(f"total must be the number of tokens, an int of at least 0, got {self.total!r}")
        if shapes_only(self.cu_seqlens) or shapes_only(self.indices):
            given = self.cu_seqlens.long(), self.indices.int()
            return self._keep(Chunks(*given, self.chunk_size, self.total))
        chunks = _chunks_of(self.cu_seqlens, self.chunk_size, self.total, f"the table's total = {self.total}")
        with _real_tensors():
            same = self.indices.shape == chunks.indices.shape and bool((self.indices == chunks.indices).all())
        if not same:
            raise ValueError(
                f"indices must list every chunk of {self.chunk_size} of cu_seqlens once and in order, "
                f"{chunks.num_chunks} (sequence, chunk) pairs as prepare_chunks makes them: they do not"
            )
        self._keep(chunks)

    @classmethod
    def _of(cls, chunks: Chunks) -> ChunkTable:
        """A table of chunks that are right."""
        table = object.__new__(cls)
        table._keep(chunks)
        return table

    def _keep(self, chunks: Chunks) -> None:
        with _real_tensors():
            copies = [chunks.cu_seqlens.clone(), chunks.indices.clone()]
        values = (*copies, chunks.chunk_size, chunks.total)
        for field, value in zip(fields(Chunks), values, strict=True):
            object.__setattr__(self, field.name, value)
        object.__setattr__(self, "_chunks", chunks)
        object.__setattr__(self, "_versions", [x._version for x in copies])

    def unchanged(self) -> Chunks:
        """The chunks of this table; ValueError when a caller wrote into its tensors."""
        if not torch.compiler.is_compiling() and self._versions != [
            self.cu_seqlens._version,
            self.indices._version,
        ]:
            raise ValueError(
                "the chunk table was written to after it was made, and a table must not change: "
                "make another one with prepare_chunks"
            )
        return self._chunks

    def __reduce__(self):
        """Copies and pickles are made, and checked, by the constructor."""
        chunks = self._chunks
        return ChunkTable, (chunks.cu_seqlens, chunks.indices, chunks.chunk_size, chunks.total)


def check_chunk_size(chunk_size: int, argument: str = "chunk_size") -> None:
    """Raise unless chunk_size is one of the sizes that every kernel supports."""
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, (int, torch.SymInt)):
        raise TypeError(f"{argument} must be an int, got {type(chunk_size).__name__}")
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(f"{argument} must be one of {CHUNK_SIZES}, got {chunk_size}")


def check_integers(name: str, x: object) -> None:
    """Raise TypeError unless x is a plain, dense tensor of int32 or int64."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of int32 or int64, got {type(x).__name__}")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {x.dtype}")
    if x.is_nested or x.layout != torch.strided:
        raise TypeError(f"{name} must be dense and strided, got {x.layout}, nested: {x.is_nested}")
    if is_wrapper(x):
        raise TypeError(f"{name} must be a plain torch.Tensor, got {type(x).__name__}")


def check_cu_seqlens(cu_seqlens: torch.Tensor) -> None:
    """Raise unless cu_seqlens is a one-dimensional int32 or int64 tensor with at least one sequence."""
    check_integers("cu_seqlens", cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(
            f"cu_seqlens must have shape [N + 1] with N >= 1 sequences, got {list(cu_seqlens.shape)}"
        )


def check_indices(indices: torch.Tensor, device: torch.device) -> None:
    """Raise unless indices is an int32 or int64 tensor [NT, 2] on that device."""
    check_integers("indices", indices)
    if indices.dim() != 2 or indices.shape[1] != 2:
        raise ValueError(f"indices must have shape [NT, 2], (sequence, chunk), got {list(indices.shape)}")
    if indices.device != device:
        raise ValueError(f"indices is on {indices.device}, cu_seqlens on {device}: one device is needed")


def prepare_chunks(cu_seqlens: torch.Tensor, chunk_size: int) -> ChunkTable:
    """Validate cu_seqlens once and return the table of its chunks.

    Pass the table to `wy_fast` and its companions in place of cu_seqlens: calls then read nothing back
    from the device, compile with fullgraph=True and can be captured in a CUDA graph. This function
    synchronises with the device once.

    Args:
        cu_seqlens: int32 or int64 [N + 1], offsets of N sequences packed in one row: starts at 0, never
            decreases, ends at the number of tokens T < 2^31. Empty sequences are allowed. It needs values:
            a fake or meta tensor has none.
        chunk_size: BT, one of 16, 32, 64, 128; must equal A.shape[-1] where A is given.

    Raises:
        TypeError: cu_seqlens is no int32 / int64 tensor, chunk_size no int.
        ValueError: wrong shape, not starting at 0, decreasing, too long, without values, chunk size not
            allowed.
    """
    check_cu_seqlens(cu_seqlens)
    check_chunk_size(chunk_size)
    return ChunkTable._of(_chunks_of(cu_seqlens, chunk_size))


def _chunks_of(
    cu_seqlens: torch.Tensor, chunk_size: int, total: int | None = None, source: str = ""
) -> Chunks:
    """The chunks of checked offsets; what they hold is checked here, before anything is allocated.

    total: where they must end, when that is known; `source` says from where.
    """
    _check_readable(cu_seqlens)
    with _real_tensors():
        # A copy: the table must not follow when the caller writes into the same buffer later. The device is
        # named everywhere because torch.set_default_device may say another.
        offsets = cu_seqlens.detach().to("cpu", torch.int64, copy=True)
        end = _check_offsets(offsets, total, source)
        counts = (offsets.diff() + chunk_size - 1) // chunk_size
        sequence = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), counts)
        first_chunk = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        chunk = torch.arange(len(sequence), device="cpu") - first_chunk
        indices = torch.stack([sequence, chunk], dim=1).to(torch.int32)
        place = cu_seqlens.device
        return Chunks(offsets.to(place), indices.to(place), chunk_size, end)


def _check_readable(cu_seqlens: torch.Tensor) -> None:
    """Raise ValueError where the values of cu_seqlens cannot be asked for."""
    if torch.compiler.is_compiling():
        raise ValueError(
            "cu_seqlens has to be read back from the device, which torch.compile cannot do inside a graph: "
            "call prepare_chunks(cu_seqlens, chunk_size) outside and pass its table as cu_seqlens"
        )
    if shapes_only(cu_seqlens):
        raise ValueError(
            "cu_seqlens must have values, and a fake or meta tensor has none: call prepare_chunks on a real "
            "tensor and pass its table as cu_seqlens"
        )
    if is_batched(cu_seqlens):
        raise ValueError(
            "cu_seqlens must be the same for all calls of a torch.func.vmap: loop over differently packed "
            "rows, or pack them all into one row"
        )


def _check_offsets(offsets: torch.Tensor, total: int | None, source: str) -> int:
    """The last of the offsets (int64, CPU); ValueError unless they are cuts of a row that ends there."""
    if offsets[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {int(offsets[0])}")
    less = offsets[1:] < offsets[:-1]  # not the sign of a difference, which may overflow
    if less.any():
        first = int(less.nonzero()[0])
        raise ValueError(
            f"cu_seqlens must not decrease, got {int(offsets[first])} followed by {int(offsets[first + 1])}"
        )
    end = int(offsets[-1])
    if total is not None and end != total:
        raise ValueError(f"cu_seqlens must end at {source}, got {end}")
    if end >= MAX_TOKENS:
        raise ValueError(f"cu_seqlens must end at the number of tokens, below 2^31, got {end}")
    return end


@contextmanager
def _real_tensors() -> Iterator[None]:
    """Inside, tables are made of ordinary tensors, also under inference_mode or a FakeTensorMode."""
    with ExitStack() as stack:
        if torch._C._len_torch_dispatch_stack() > 0:
            stack.enter_context(_disable_current_modes())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        yield


def resolve_chunks(
    cu_seqlens: torch.Tensor | ChunkTable | None, chunk_size: int, like: torch.Tensor, name: str
) -> Chunks | None:
    """Turn what a caller passed as cu_seqlens into chunks that fit `like` ([B, T, ...]), or raise.

    `name` is the argument whose B and T are compared, for the message.
    """
    if cu_seqlens is None:
        return None
    B, T = like.shape[:2]
    if not isinstance(cu_seqlens, ChunkTable):
        check_cu_seqlens(cu_seqlens)
    if B != 1:
        raise ValueError(
            f"cu_seqlens packs all sequences into one row: B must be 1, got {name} with B = {B}"
        )
    if isinstance(cu_seqlens, ChunkTable):
        chunks = cu_seqlens.unchanged()
        _check_place(chunks.cu_seqlens, like, name)
    else:
        _check_place(cu_seqlens, like, name)
        chunks = _chunks_of(cu_seqlens, chunk_size, T, f"T = {T} (from {name})")
    if chunks.chunk_size != chunk_size:
        raise ValueError(
            f"the chunk table was prepared for chunks of {chunks.chunk_size}, this call needs {chunk_size}"
        )
    if chunks.total != T:
        raise ValueError(f"cu_seqlens must end at T = {T} (from {name}), got {chunks.total}")
    if not torch.compiler.is_compiling() and is_fake(like) and not is_fake(chunks.indices):
        fakes = (like.fake_mode.from_tensor(x) for x in (chunks.cu_seqlens, chunks.indices))
        return Chunks(*fakes, chunk_size, T)  # a real table beside fake inputs
    return chunks


def _check_place(offsets: torch.Tensor, like: torch.Tensor, name: str) -> None:
    if offsets.device != like.device:
        raise ValueError(f"cu_seqlens is on {offsets.device}, {name} on {like.device}: one device is needed")
