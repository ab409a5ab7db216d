"""Solutions of notebook 04's exercises; tests/test_solutions.py runs them through the notebook's checks."""

import torch

BLOCK = 32  # bytes


def solution_1(n, itemsize, stride):
    """A contiguous load is one burst into dense blocks, any other a burst and a block for each element."""
    if stride == 1:
        blocks = -(-n * itemsize // BLOCK)
        cost = (1, blocks * BLOCK, blocks * BLOCK)
    else:
        cost = (n, n * BLOCK, n * BLOCK)
    return torch.tensor(cost, dtype=torch.float64)


def solution_2(BT, BC, contiguous):
    """A pair of sub-blocks loads twice on each of two vector units: half of its rows, all of its columns."""
    n = BT // BC
    pairs = n * (n + 1) / 2
    return pairs * 2 * (2 if contiguous else BC // 2 + BC)
