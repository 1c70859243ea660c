"""The Walsh–Hadamard matrix: its rows' sequency, and the block-diagonal rotation along one axis.

Everything is orthonormal: a tile of n numbers is multiplied by H_n/√n, so that rotating twice gives the tensor
back and products of rotated operands need no further factor. Rows are in Sylvester's natural order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.nn import functional as F

from ..private import dispatch_modes

TILE = 16


@functools.cache
def signs(n: int) -> tuple[tuple[int, ...], ...]:
    """H_n as rows of ±1, in natural order.

    Element (i, j) is the parity of the bits that i and j share.

    Args:
        n: order of the matrix.

    Raises:
        ValueError: n is not a power of two.
    """
    if n < 1 or n & (n - 1):
        raise ValueError(f"Hadamard order {n} is not a power of two")
    return tuple(tuple(1 - 2 * (bin(i & j).count("1") & 1) for j in range(n)) for i in range(n))


@functools.cache
def sequency(n: int) -> tuple[int, ...]:
    """How often each natural row of H_n changes its sign: its frequency. A permutation of 0..n−1."""
    return tuple(sum(a != b for a, b in itertools.pairwise(row)) for row in signs(n))


def cached(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A cache for a function that makes a constant tensor: do not write to it.

    Under a tracer nothing is cached: its tensors belong to the trace.
    """
    keep = functools.lru_cache(maxsize=64)(make)

    @functools.wraps(make)
    def get(*args: Hashable) -> Tensor:
        return keep(*args) if not dispatch_modes() else make(*args)

    return get


@cached
def matrix(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The orthonormal H_n/√n, shape (n, n); symmetric."""
    return torch.tensor(signs(n), dtype=torch.float64, device="cpu").div_(n**0.5).to(device, dtype)


def rotate(t: Tensor, dim: int = -1, n: int = TILE, widened: bool = False) -> Tensor:
    """Multiply every block of `n` elements along `dim` by the orthonormal H_n.

    The axis is padded with zeros to a multiple of n, and stays padded. A second rotation gives the padded tensor back.
    Equivalent to ``t.unflatten(dim, (-1, n)) @ H`` along that axis.

    Args:
        t: (..., C, ...), floating point.
        dim: axis of C.
        n: block size, a power of two.
        widened: whether to compute in float32 (float64 for float64) rather than in t's dtype.

    Returns:
        (..., C', ...) with C' = ⌈C/n⌉·n, in the dtype of the computation.
    """
    t = t.to(torch.promote_types(t.dtype, torch.float32)) if widened else t
    dim = dim % t.dim()
    size = t.shape[dim]
    pad = -size % n
    h = matrix(n, t.dtype, t.device)
    if dim == t.dim() - 1:
        if pad:
            t = F.pad(t, (0, pad))
        return (t.reshape(-1, n) @ h).view(t.shape)
    lead, tail = t.shape[:dim], t.shape[dim + 1 :]
    t = t.reshape(*lead, size, tail.numel())
    if pad:
        t = F.pad(t, (0, 0, 0, pad))
    return (h @ t.view(*lead, (size + pad) // n, n, tail.numel())).view(*lead, size + pad, *tail)
