"""The natural Walsh rows that every tile keeps, `transform.tokens.row_indices`, as one small kernel."""

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
from .launch import aligned, cdiv, launch
from .noise import hash_bits, mix, stream_words

_BLOCK = 16  # tiles a program


@triton.jit
def _rows_kernel(
    out, key, orders, tiles, total, square, line,
    RANK: tl.constexpr, FIXED: tl.constexpr, SAMPLED: tl.constexpr, DRAWN_FROM: tl.constexpr, WALK: tl.constexpr,
    STREAM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = t < total
    sample, tile = t // tiles, t % tiles
    is_square = tile < square
    place = tl.arange(0, 16)
    # Fixed rows: the table has the square tiles' order first, then the line tiles'.
    natural = tl.load(orders + tl.where(is_square, 0, 16)[:, None] + place[None, :])
    fixed = inside[:, None] & (place < FIXED)[None, :]
    tl.store(out + t[:, None] * RANK + place[None, :], natural.to(tl.uint8), mask=fixed)
    if SAMPLED:
        # Number of the tile among its kind, which says its group and its steps in the group's permutation.
        number = tl.where(is_square, sample * square + tile, sample * line + tile - square)
        group, first = number // WALK, (number % WALK) * SAMPLED
        k = tl.load(key).to(tl.uint64, bitcast=True)
        own = mix(mix(k * 0, k), k * 0 + 1).to(tl.int64, bitcast=True)
        s0, s1 = stream_words(own, STREAM)
        l0, l1 = stream_words(k.to(tl.int64, bitcast=True), STREAM)
        k0, k1 = tl.where(is_square, s0, l0), tl.where(is_square, s1, l1)
        index = (group[:, None] * DRAWN_FROM + place[None, :]).to(tl.uint32)
        mine = hash_bits(index, k0[:, None], k1[:, None]).to(tl.int32, bitcast=True)
        # A stable argsort: the rank of entry e is how many entries come before it.
        position = tl.zeros((BLOCK, 16), tl.int32)
        for other in tl.static_range(DRAWN_FROM):
            theirs = hash_bits((group * DRAWN_FROM + other).to(tl.uint32), k0, k1).to(tl.int32, bitcast=True)
            before = (theirs[:, None] < mine) | ((theirs[:, None] == mine) & (place > other)[None, :])
            position += before.to(tl.int32)
        # The natural row of entry e; entry e is drawn at step (position − first) mod DRAWN_FROM when that is < SAMPLED.
        entry = tl.load(
            orders + tl.where(is_square, 0, 16)[:, None] + (place + FIXED)[None, :],
            mask=(place < DRAWN_FROM)[None, :] & inside[:, None],
            other=0,
        )
        start = first % DRAWN_FROM
        step = (position - start[:, None] + DRAWN_FROM) % DRAWN_FROM
        drawn = inside[:, None] & (place < DRAWN_FROM)[None, :] & (step < SAMPLED)
        tl.store(out + t[:, None] * RANK + FIXED + step, entry.to(tl.uint8), mask=drawn)


@functools.lru_cache(maxsize=64)
def _orders(square: str, line: str, device: torch.device) -> Tensor:
    """The two row orders one after the other, int32, (32,)."""
    return torch.tensor(order(16, square) + order(16, line), dtype=torch.int32, device=device)


def kept_rows(lay: Layout, key: Tensor, out: Tensor | None = None) -> Tensor:
    """`transform.tokens.row_indices(lay, key)` as uint8, (samples·tiles, rank), written to `out` where it is given.

    key: int64 on the device, () or (1,).
    """
    total = lay.samples * lay.tiles
    rows = lay.lines
    if out is None:
        out = torch.empty(total, rows.rank, dtype=torch.uint8, device=key.device)
    drawn_from = rows.tile - rows.fixed
    walk = drawn_from // math.gcd(drawn_from, rows.sampled) if rows.sampled else 1
    if total:
        args = (out, key, _orders(lay.squares.kind, rows.kind, key.device), lay.tiles, total, lay.square, lay.line)
        case = (rows, lay.squares.kind, args[3:], aligned(out), key.dim(), key.device)
        constants = {
            "RANK": rows.rank, "FIXED": rows.fixed, "SAMPLED": rows.sampled, "DRAWN_FROM": drawn_from, "WALK": walk,
            "STREAM": draws.ROWS, "BLOCK": _BLOCK,
        }  # fmt: skip
        launch(_rows_kernel, cdiv(total, _BLOCK), case, args, constants)
    return out


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
