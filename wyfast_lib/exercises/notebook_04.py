"""Checks of the two exercises of notebook 04, the gather.

The numbers were counted by the audit; tests/ascend/test_notebook_counts.py compares them with it again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

#: (elements, bytes an element, stride) -> bursts, bytes moved in whole blocks, bytes of UB spanned.
LOADS = {
    (64, 2, 1): (1, 128, 128),
    (64, 2, 8): (64, 2048, 2048),
    (64, 2, 64): (64, 2048, 2048),
    (64, 4, 8): (64, 2048, 2048),
    (64, 4, 1): (1, 256, 256),
    (16, 2, 2): (16, 512, 512),
}
#: (BT, BC, contiguous) -> gate bursts of dv_local a chunk and head, over both vector units.
CHUNKS = {(64, 16, True): 40, (64, 16, False): 480, (64, 32, True): 12, (64, 32, False): 288}


def check_exercise_1(dma_cost: Callable) -> None:
    """dma_cost(n, itemsize, stride) -> float64 [3]: bursts, bytes moved, bytes of UB spanned.

    Raises:
        AssertionError: a number differs from what the audit of the compiled load counts.
    """
    for load, expected in LOADS.items():
        cost = dma_cost(*load)
        assert isinstance(cost, torch.Tensor), f"expected a tensor, got {type(cost).__name__}"
        assert cost.shape == (3,), f"expected three numbers, got shape {list(cost.shape)}"
        assert cost.tolist() == list(expected), (
            f"n, itemsize, stride = {load}: the compiler makes {list(expected)}, you say {cost.tolist()}"
        )


def check_exercise_2(gate_bursts: Callable) -> None:
    """gate_bursts(BT, BC, contiguous) -> float: bursts of dv_local's gate loads a chunk and head, BC < BT.

    Raises:
        AssertionError: the number differs from what the audit of the compiled kernel counts.
    """
    for (BT, BC, contiguous), expected in CHUNKS.items():
        bursts = gate_bursts(BT, BC, contiguous)
        assert isinstance(bursts, float), f"expected a float, got {type(bursts).__name__}"
        layout = "contiguous" if contiguous else "strided"
        assert bursts == expected, f"BT {BT}, BC {BC}, {layout}: {expected} bursts counted, you say {bursts}"
