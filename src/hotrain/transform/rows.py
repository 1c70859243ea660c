"""Which Walsh rows of a tile are kept: the low ones, and rows drawn from the others so that P is unbiased.

`order` ranks the rows of a tile by frequency. `tokens.row_indices` joins `rank` of them for every tile: the first
`rank − sampled` are the same in each tile, the others are drawn. With m rows left to draw from and s drawn, every
one of the m is drawn with probability s/m and multiplied by √(m/s), on x and on g_y alike, so that
E[PᵀP] = fixed + (m/s)·(s/m)·rest = I.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import draws
from . import hadamard


@functools.cache
def order(n: int, kind: str) -> tuple[int, ...]:
    """The natural row indices of H_n from low to high frequency.

    Args:
        n: tokens of a tile, a power of two.
        kind: ``"sequency"``, by sign changes along the n elements, or ``"lp_l1"``: the tile is a √n×√n square, row by
            row, and a row's key is v+h, then max(v, h), then its 1-D sequency (docs/maths.md; the papers do not say
            how ties are broken).

    Raises:
        ValueError: another kind, or lp_l1 on a tile that is not square.
    """
    line = hadamard.sequency(n)
    if kind == "sequency":
        return tuple(sorted(range(n), key=lambda i: line[i]))
    if kind != "lp_l1":
        raise ValueError(f"row order {kind!r} is not one of lp_l1, sequency")
    side = math.isqrt(n)
    if side * side != n:
        raise ValueError(f"lp_l1 needs a square tile, got {n} tokens; use order='sequency'")
    axis = hadamard.sequency(side)

    def key(i: int) -> tuple[int, int, int]:
        v, h = axis[i // side], axis[i % side]
        return v + h, max(v, h), line[i]

    return tuple(sorted(range(n), key=key))


@hadamard.cached
def _order_on(n: int, kind: str, device: torch.device) -> Tensor:
    """`order` as int64 (n,) on a device; making it synchronizes with a GPU."""
    return torch.tensor(order(n, kind), dtype=torch.int64, device=device)


@dataclass(frozen=True)
class Rows:
    """`rank` of `tile` Walsh rows, `sampled` of them drawn anew for every tile.

    Attributes:
        tile: number of tokens.
        rank: number of kept rows.
        sampled: how many of these are drawn.
        kind: as in `order`.
    """

    tile: int
    rank: int
    sampled: int
    kind: str

    @property
    def gain(self) -> float:
        """What a drawn row is multiplied by: √(rows to draw from / rows drawn)."""
        return math.sqrt((self.tile - self.rank + self.sampled) / self.sampled) if self.sampled else 1.0

    @property
    def fixed(self) -> int:
        """How many of the rows are the same in every tile."""
        return self.rank - self.sampled

    def fixed_rows(self, device: torch.device) -> Tensor:
        """The natural indices of the rows that every tile keeps, shape (fixed,), int64."""
        return _order_on(self.tile, self.kind, device)[: self.fixed]

    def drawn(self, tiles: int, key: draws.Key, device: torch.device) -> Tensor:
        """The natural indices of the rows drawn for each tile.

        Stratified: m/gcd(m, s) neighbouring tiles take their rows from one random permutation of the m rows in turn,
        so together they have each of them equally often, while a single tile has a uniformly random s of m.

        Args:
            tiles: how many.
            key: of the draws.
            device: of the result.

        Returns:
            int64, (tiles, sampled).
        """
        rest = _order_on(self.tile, self.kind, device)[self.fixed :]
        m, s = rest.numel(), self.sampled
        cycle = m // math.gcd(m, s)  # tiles until the permutation has been used a whole number of times
        groups = -(-tiles // cycle)
        hashes = draws.hash_bits(groups * m, key, draws.ROWS, device).view(groups, m)
        permutation = rest[hashes.argsort(dim=1, stable=True)]
        steps = torch.arange(cycle * s, device=device) % m
        return permutation[:, steps].view(groups * cycle, s)[:tiles]
