"""Solutions of notebook 03's exercises; tests/test_solutions.py runs them through the notebook's checks."""

import torch


def solution_1(program, programs, n_tasks):
    """The first n_tasks % programs programs take one task more than the others."""
    size, rest = divmod(n_tasks, programs)
    start = program * size + min(program, rest)
    return torch.arange(start, start + size + (program < rest))


def solution_2(x, cube):
    """Two bfloat16 tiles hold x to 16 bits: its rounded value, and what the rounding left."""
    high = x.bfloat16()
    low = (x - high.float()).bfloat16()
    ones = torch.ones(len(x), 16, dtype=torch.bfloat16)
    return (cube(high.mT, ones) + cube(low.mT, ones))[:, 0]
