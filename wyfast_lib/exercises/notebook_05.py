"""Checks of the two exercises of notebook 05, the contiguous gate."""

from __future__ import annotations

from collections.abc import Callable

import torch

from wyfast_lib.varlen import prepare_chunks


def check_exercise_1(gate_addresses: Callable) -> None:
    """gate_addresses(offsets, H, BT) -> int64 [chunks, H, BT]: addresses in packed storage [H, T], or -1.

    Raises:
        AssertionError: an address is not where the chunk table says that the row stands.
    """
    for offsets, H, BT in (([0, 40], 1, 16), ([0, 3, 3, 67, 131, 200], 3, 64), ([0, 16, 17], 2, 16)):
        addresses = gate_addresses(list(offsets), H, BT)
        chunks = prepare_chunks(torch.tensor(offsets), BT)
        tokens, valid = chunks.rows()
        expected = tokens[:, None] + torch.arange(H)[:, None] * offsets[-1]
        expected = torch.where(valid[:, None], expected, -1)
        what = f"offsets {offsets}, H = {H}, BT = {BT}"
        assert isinstance(addresses, torch.Tensor), f"expected a tensor, got {type(addresses).__name__}"
        assert addresses.shape == expected.shape, (
            f"{what}: expected shape {list(expected.shape)}, got {list(addresses.shape)}"
        )
        assert torch.equal(addresses.double(), expected.double()), (
            f"{what}: {int((addresses != expected).sum())} of {expected.numel()} addresses are wrong"
        )


def check_exercise_2(split_decay: Callable) -> None:
    """split_decay(g, n) -> (rows [r - n], columns [n]) of g's dtype, none above 1, with
    rows[i] * columns[j] = exp(g[n + i] - g[j]).

    Raises:
        AssertionError: a factor is not finite or above 1, or a product is off.
    """
    random = torch.Generator().manual_seed(6)
    for r, n, strength in ((32, 16, 0.1), (64, 32, 4.0), (64, 16, 20.0)):
        g = -strength * torch.rand(r, generator=random).cumsum(0)
        factors = split_decay(g.clone(), n)
        assert isinstance(factors, (tuple, list)) and len(factors) == 2, "expected the pair (rows, columns)"
        for name, factor, size in zip(("rows", "columns"), factors, (r - n, n), strict=True):
            assert isinstance(factor, torch.Tensor), f"{name}: expected a tensor, got {type(factor).__name__}"
            assert factor.shape == (size,), f"{name}: expected shape [{size}], got {list(factor.shape)}"
            assert torch.isfinite(factor).all(), f"{name}: there is a NaN or an infinity (decay x{strength})"
            assert (factor <= 1).all(), f"{name}: a factor is above 1 (decay x{strength})"
        product = factors[0][:, None].double() * factors[1].double()
        expected = (g[n:, None].double() - g[:n].double()).exp()
        worst = ((product - expected).abs() - 1e-4 * expected).max().item()
        assert worst <= 1e-37, f"a product is off by {worst:.1e} (decay x{strength})"
