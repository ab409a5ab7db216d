"""Solutions of notebook 01's exercises; tests/test_solutions.py runs them through the notebook's checks."""

import torch


def solution_1(A1, A2, C):
    """Write the inverse as [[X, 0], [Y, Z]] and multiply by [[I + M1, 0], [C, I + M2]] from the left.

    The upper left gives X = A1, the lower right Z = A2, and the lower left C X + (I + M2) Y = 0.
    """
    n, m = len(A1), len(A2)
    A = A1.new_zeros(n + m, n + m)
    A[:n, :n] = A1
    A[n:, n:] = A2
    A[n:, :n] = -A2 @ C @ A1
    return A


def solution_2(q, k, w, u, g, S):
    """Token i reads the state that token i - 1 left: the decay up to i - 1, and only the writes before i."""
    before = torch.cat([g.new_zeros(1), g[:-1]])  # nothing has decayed before the first token
    written = u - w @ S
    earlier = torch.ones(len(q), len(q), dtype=torch.bool).tril(-1)
    decay = (before[:, None] - g[None, :]).masked_fill(~earlier, -torch.inf).exp()
    return before.exp()[:, None] * (q @ S) + ((q @ k.mT) * decay) @ written
