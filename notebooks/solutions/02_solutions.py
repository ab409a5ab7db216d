"""Solutions of notebook 02's exercises; tests/test_solutions.py runs them through the notebook's checks."""

import torch
from torch.linalg import solve_triangular


def solution_1(dg, chunk_size):
    """a[s] is in every g[t] with t >= s of its chunk, so da[s] is the sum of dg from s to the chunk's end."""
    return torch.cat([piece.flip(0).cumsum(0).flip(0) for piece in dg.split(chunk_size)])


def solution_2(M, dA):
    """A^T dA solves (I + M)^T S = dA; then (A^T dA) A^T solves S (I + M)^T = A^T dA, from the right."""
    transposed = (torch.eye(len(M), dtype=M.dtype) + M).mT
    left = solve_triangular(transposed, dA, upper=True)
    return -solve_triangular(transposed, left, upper=True, left=False).tril(-1)
