"""Triton device functions that draw the kept Walsh rows of each tile (`transform.tokens.row_indices`), and the key."""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import draws
from ..transform.rows import order
from ..transform.tokens import Layout
from .launch import launch
from .noise import hash_bits, mix, stream_words


@triton.jit
def _named(place, is_square, SQUARE: tl.constexpr, LINE: tl.constexpr):
    """The natural row at a place of a tile's order; `packed` orders. int32."""
    both = tl.where(is_square, tl.full((), SQUARE, tl.uint64), tl.full((), LINE, tl.uint64))
    return ((both >> (4 * place).to(tl.uint64)) & 15).to(tl.int32)


@triton.jit
def kept_rows(
    tile, k, key, tiles, square, line,
    FIXED: tl.constexpr, SAMPLED: tl.constexpr, CYCLE: tl.constexpr, STREAM: tl.constexpr,
    SQUARE: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """The natural indices of the rows that each tile keeps, int32, (TILES, PLACES); beyond its rank any of the 16.

    Args:
        tile: (TILES,), over all samples.
        k: (PLACES,), place among the kept rows.
        tiles, square, line: of a sample.
        CYCLE: how many tiles of a kind share one permutation.
    """
    sample, own = tile // tiles, tile % tiles
    is_square = own < square
    if SAMPLED == 0:
        return _named(k[None, :], is_square[:, None], SQUARE, LINE)
    DRAWN_FROM: tl.constexpr = 16 - FIXED
    # Number of the tile among its kind, which determines its group and its offset in the group's permutation.
    number = tl.where(is_square, sample * square + own, sample * line + own - square)
    group, start = number // CYCLE, number % CYCLE * SAMPLED % DRAWN_FROM
    word = tl.load(key).to(tl.uint64, bitcast=True)
    s0, s1 = stream_words(mix(mix(word * 0, word), word * 0 + 1).to(tl.int64, bitcast=True), STREAM)
    l0, l1 = stream_words(word.to(tl.int64, bitcast=True), STREAM)
    k0, k1 = tl.where(is_square, s0, l0), tl.where(is_square, s1, l1)
    entry = tl.arange(0, 16)
    index = group * DRAWN_FROM
    mine = hash_bits((index[:, None] + entry[None, :]).to(tl.uint32), k0[:, None], k1[:, None])
    mine = mine.to(tl.int32, bitcast=True)
    # A stable argsort: the position of an element is how many others come before it.
    position = mine * 0
    for other in tl.static_range(DRAWN_FROM):
        theirs = hash_bits((index + other).to(tl.uint32), k0, k1).to(tl.int32, bitcast=True)
        before = (theirs[:, None] < mine) | ((theirs[:, None] == mine) & (entry > other)[None, :])
        position += before.to(tl.int32)
    position = tl.where((entry < DRAWN_FROM)[None, :], position, -1)
    wanted = (start[:, None] + k[None, :] + (DRAWN_FROM - FIXED)) % DRAWN_FROM
    found = tl.sum(tl.where(position[:, None, :] == wanted[:, :, None], entry[None, None, :], 0), axis=2)
    place = tl.where((k < FIXED)[None, :], k[None, :], found + FIXED)
    return _named(place, is_square[:, None], SQUARE, LINE)


@functools.lru_cache(maxsize=64)
def packed(kind: str) -> int:
    """`transform.rows.order` of 16 rows, 4 bits per row, the first lowest."""
    return sum(row << 4 * place for place, row in enumerate(order(16, kind)))


def of_layout(lay: Layout) -> dict[str, int]:
    """The constants of `kept_rows`."""
    rows = lay.lines
    return {
        "FIXED": rows.fixed, "SAMPLED": rows.sampled, "STREAM": draws.ROWS,
        "CYCLE": (rows.tile - rows.fixed) // math.gcd(rows.tile - rows.fixed, rows.sampled) if rows.sampled else 1,
        "SQUARE": packed(lay.squares.kind), "LINE": packed(rows.kind),
    }  # fmt: skip


@triton.jit
def _next_key_kernel(counter, out, ADVANCE: tl.constexpr):
    salt, step = tl.load(counter), tl.load(counter + 1)
    if ADVANCE:
        step += 1
        tl.store(counter + 1, step)
    key = mix(salt.to(tl.uint64, bitcast=True), step.to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)
    tl.store(counter + 2, key)
    tl.store(out, key)


def next_key(counter: Tensor, moves: bool) -> Tensor:
    """`draws.next_key` in one launch."""
    out = torch.empty((), dtype=torch.int64, device=counter.device)
    launch(_next_key_kernel, 1, (moves, counter.device), (counter, out), {"ADVANCE": moves}, num_warps=1)
    return out
