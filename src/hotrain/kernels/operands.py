"""What the calls of a layer share: keys on a device, block sizes, and the product of two matrices of codes."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .. import draws, published
from .formats import Tiling
from .reference import int8_product
from .support import module, run, unsupported_device


@functools.lru_cache(maxsize=8)
def no_key(device: torch.device) -> Tensor:
    """The key of methods that draw nothing."""
    return torch.zeros((), dtype=torch.int64, device=device)


def given_key(key: Tensor | None, device: torch.device) -> Tensor:
    """The key, or `no_key`."""
    return no_key(device) if key is None else key


class Tilings(NamedTuple):
    """Block sizes of launches over x, over g_y (or an operand of the forward product), over codes of it, and over w."""

    x: Tiling
    g_y: Tiling
    coded: Tiling
    w: Tiling


@functools.cache
def tilings(dtype: torch.dtype, few_rows: bool, fp8: bool = False) -> Tilings:
    """Block sizes, tuned on an H200.

    Programs over x have long loops, because each draws its rows first. Integers, and all rows, are bound by
    instructions, and by them more than others a g_y that is given by codes.

    Args:
        dtype: of the matrix.
        few_rows: whether fp8 is written and at most half the rows of a tile are kept.
        fp8: whether fp8 is written.
    """
    coded = Tiling(2, 64, 2, 12, 3)
    if dtype == torch.float32:
        return Tilings(Tiling(2, 128, 4, 4, 2), Tiling(2, 128, 4, 4, 2), coded, Tiling(1, 128, 4, 8, 3, programs=2.5))
    w = Tiling(2, 128, 4, 8, 3, programs=2.5)
    if few_rows:
        return Tilings(Tiling(4, 128, 4, 28, 3, programs=2.5), Tiling(8, 64, 4, 4, 3, 8), coded, w)
    if fp8:
        return Tilings(Tiling(4, 64, 4, 12, 3), Tiling(4, 128, 4, 12, 3), coded, w)
    return Tilings(Tiling(2, 128, 4, 12, 3), Tiling(4, 64, 4, 12, 3), coded, w)


def product(a: Tensor, b: Tensor, scale_b: Tensor, scale_a: Tensor | None, dtype: torch.dtype, columns: int) -> Tensor:
    """(a bᵀ) with its scales, (M, `columns`): without the padding of b."""
    assert scale_a is not None
    if a.dtype != torch.int8:
        found: Tensor = module("gemm").fp8_product(a, b, scale_a, scale_b, dtype)
        return found if columns == found.shape[1] else found[:, :columns].contiguous()

    def reference() -> Tensor:
        return int8_product(a, b[:columns], scale_a, scale_b, dtype)

    return run("gemm.int8_product", reference, a, b[:columns], scale_a, scale_b, dtype)  # type: ignore[no-any-return]


def device_key(word: Tensor) -> draws.DeviceKey:
    """The key for the reference on a device, int64 (): hashes are made by a kernel where one runs."""
    if unsupported_device(word.device) is not None:
        return draws.DeviceKey(word)
    return draws.DeviceKey(word, _hashes, _luq)


def _hashes(word: Tensor, count: int, stream: int, start: int) -> Tensor:
    def reference() -> Tensor:
        return draws.hash_bits(count, draws.DeviceKey(word), stream, word.device, start)

    return run("noise.hashes", reference, word, count, stream, start)  # type: ignore[no-any-return]


def _luq(t: Tensor, alpha: Tensor, word: Tensor, stream: int, dtype: torch.dtype) -> Tensor:
    def reference() -> Tensor:
        return published.luq_codes(t, alpha, draws.DeviceKey(word, _hashes), stream, dtype)

    return run("luq.luq", reference, t, alpha, word, stream, dtype)  # type: ignore[no-any-return]
