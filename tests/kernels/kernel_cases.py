"""Shapes and comparisons shared by the kernel tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrain.transform.tokens import Grid, Layout, layout

ON_GPU = torch.cuda.is_available()


def gpu_only(*cases: Any) -> list[Any]:
    """Cases with too many programs for the interpreter: none without a GPU."""
    return list(cases) if ON_GPU else []


# lead, grid, rank, sampled: a class token with a grid and its border, a remainder that is padded, one that is dense,
# a length under a tile, one tile exactly, full rank, a rank whose rows do not fill a power of two.
SMALL = [
    ((2, 50), Grid(7, 7, 1), 8, 4),
    ((3, 27), None, 8, 0),
    ((2, 19), None, 8, 4),
    ((1, 7), None, 8, 4),
    ((1, 16), None, 4, 4),
    ((2, 32), None, 16, 0),
    ((1, 48), None, 6, 2),
    ((1, 1), None, 8, 4),
]
LARGE = [
    ((4, 197), Grid(14, 14, 1), 8, 4),
    ((2, 577), Grid(24, 24, 1), 8, 4),
    ((1, 1000), None, 8, 0),
    ((128, 197), Grid(14, 14, 1), 8, 4),
    ((4, 49), Grid(7, 7), 8, 4),
]
KEY = 0x9E3779B97F4A7C15


def cases() -> list[Any]:
    """Layout arguments; the large ones only where a GPU runs them."""
    return SMALL + gpu_only(*LARGE)


def layout_of(lead: tuple[int, ...], grid: Grid | None, rank: int, sampled: int) -> Layout:
    return layout(lead, 16, rank, sampled, "auto", grid, True)


def key_on(device: torch.device, key: int = KEY) -> Tensor:
    return torch.tensor(key - (1 << 64) if key >> 63 else key, dtype=torch.int64, device=device)


def few(differ: Tensor, share: float, entries: int = 1) -> bool:
    """Whether at most that share of the entries is set, or one sum that is in so many of them: float32 sums in
    another order move a code over a boundary."""
    return bool(differ.sum() <= max(share * differ.numel(), entries))
