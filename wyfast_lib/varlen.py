"""Packed sequences: from cu_seqlens to the table of chunks that every backend reads.

Nothing is cached on tensor identity: a tensor changed in place would answer with a stale table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

CHUNK_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True, eq=False)  # comparing tensors has no truth value; a table equals itself only
class ChunkTable:
    """The chunks of sequences packed into one row of T tokens; made by `prepare_chunks`.

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


def check_chunk_size(chunk_size: int, argument: str = "chunk_size") -> None:
    """Raise unless chunk_size is one of the sizes that every kernel supports."""
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, (int, torch.SymInt)):
        raise TypeError(f"{argument} must be an int, got {type(chunk_size).__name__}")
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(f"{argument} must be one of {CHUNK_SIZES}, got {chunk_size}")


def check_cu_seqlens(cu_seqlens: torch.Tensor) -> None:
    """Raise unless cu_seqlens is a one-dimensional int32 or int64 tensor with at least one sequence."""
    if not isinstance(cu_seqlens, torch.Tensor):
        raise TypeError(
            f"cu_seqlens must be a torch.Tensor of int32 or int64, got {type(cu_seqlens).__name__}"
        )
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(
            f"cu_seqlens must have shape [N + 1] with N >= 1 sequences, got {list(cu_seqlens.shape)}"
        )


def prepare_chunks(cu_seqlens: torch.Tensor, chunk_size: int) -> ChunkTable:
    """Validate cu_seqlens once and return the table of its chunks.

    Pass the table to `wy_fast` and its companions in place of cu_seqlens: calls then read nothing back
    from the device, compile with fullgraph=True and can be captured in a CUDA graph. This function
    synchronises with the device once.

    Args:
        cu_seqlens: int32 or int64 [N + 1], offsets of N sequences packed in one row: starts at 0, never
            decreases, ends at the number of tokens T. Empty sequences are allowed.
        chunk_size: BT, one of 16, 32, 64, 128; must equal A.shape[-1] where A is given.

    Raises:
        TypeError: cu_seqlens is no int32 / int64 tensor, chunk_size no int.
        ValueError: wrong shape, not starting at 0, decreasing, chunk size not allowed.
    """
    check_cu_seqlens(cu_seqlens)
    check_chunk_size(chunk_size)
    if torch.compiler.is_compiling():
        raise ValueError(
            "cu_seqlens has to be read back from the device, which torch.compile cannot do inside a graph: "
            "call prepare_chunks(cu_seqlens, chunk_size) outside and pass its table as cu_seqlens"
        )
    # A copy: the table must not follow when the caller writes into the same buffer later. The device is named
    # everywhere because torch.set_default_device may say another.
    offsets = cu_seqlens.detach().to("cpu", torch.int64, copy=True)
    lengths = offsets.diff()
    if offsets[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {int(offsets[0])}")
    if (lengths < 0).any():
        first = int((lengths < 0).nonzero()[0])
        raise ValueError(
            f"cu_seqlens must not decrease, got {int(offsets[first])} followed by {int(offsets[first + 1])}"
        )
    counts = (lengths + chunk_size - 1) // chunk_size
    sequence = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), counts)
    first_chunk = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    chunk = torch.arange(len(sequence), device="cpu") - first_chunk
    indices = torch.stack([sequence, chunk], dim=1).to(torch.int32)
    return ChunkTable(
        cu_seqlens=offsets.to(cu_seqlens.device),
        indices=indices.to(cu_seqlens.device),
        chunk_size=chunk_size,
        total=int(offsets[-1]),
    )


def resolve_chunks(
    cu_seqlens: torch.Tensor | ChunkTable | None, chunk_size: int, like: torch.Tensor, name: str
) -> ChunkTable | None:
    """Turn what a caller passed as cu_seqlens into a table that fits `like` ([B, T, ...]), or raise.

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
    table = isinstance(cu_seqlens, ChunkTable)
    for offsets in (cu_seqlens.cu_seqlens, cu_seqlens.indices) if table else (cu_seqlens,):
        if offsets.device != like.device:
            raise ValueError(
                f"cu_seqlens is on {offsets.device}, {name} on {like.device}: one device is needed"
            )
    table = cu_seqlens if table else prepare_chunks(cu_seqlens, chunk_size)
    if table.chunk_size != chunk_size:
        raise ValueError(
            f"the chunk table was prepared for chunks of {table.chunk_size}, this call needs {chunk_size}"
        )
    if table.total != T:
        raise ValueError(f"cu_seqlens must end at T = {T} (from {name}), got {table.total}")
    return table
