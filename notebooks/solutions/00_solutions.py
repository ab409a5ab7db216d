"""Solutions of notebook 00's exercises; tests/test_solutions.py runs them through the notebook's checks."""

import torch

from wyfast_lib import chunk_local_cumsum, prepare_chunks, wy_factor, wy_fast


def solution_1(copies, Hg):
    """One key moves all its copies together, so their gradients add up: group the heads, sum each group."""
    return copies.unflatten(2, (Hg, -1)).sum(3)


def solution_2(lengths, k, v, beta, log_decay, BT):
    """Chunks restart at each sequence; the gate's sum, the factor and the operator all have to know."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    chunks = prepare_chunks(offsets, BT)
    g = chunk_local_cumsum(log_decay, BT, chunks)
    A = wy_factor(k, beta, g, BT, chunks)
    return wy_fast(k, v, beta, A, g, cu_seqlens=chunks)
