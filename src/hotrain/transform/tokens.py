"""Tiling of tokens for any sequence length and token grid, and the projection onto the kept Walsh rows.

The input of a layer has shape (..., C); its leading axes are tokens. `Layout` orders them into slots: first square
tiles of the token grid where one is known, then tiles of consecutive tokens, then the tokens that are not transformed
(`dense`: class and register tokens, and a remainder shorter than the rank). A dense token is its own row of P, an
identity, so that g_w is one product of all rows. Every length is supported: what does not fill a tile is dense or
padded with zeros, and where padding single samples wastes more than an eighth, the batch is flattened into the tokens.
At full rank every case is exact.
"""

from __future__ import annotations

import collections
import functools
import math
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import draws
from ..private import dispatch_modes, no_dispatch_modes
from . import hadamard
from .rows import Rows

_CACHED = 5 << 18  # elements of a block that the passes of a projection work on
_WASTE = 1.125  # rows kept over rows wanted, beyond which samples are flattened into one line of tokens


@dataclass(frozen=True)
class Grid:
    """The token grid of an image: `prefix` class or register tokens, height × width patches, row by row, `suffix` more.

    Attributes:
        height: in patches.
        width: in patches.
        prefix: number of class or register tokens before the patches.
        dense_prefix: whether the tokens before and after the patches are kept out of the tiles (exact in g_w).
        suffix: number of tokens after the patches (YOLOS's boxes).
    """

    height: int
    width: int
    prefix: int = 0
    dense_prefix: bool = True
    suffix: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of a sample."""
        return self.prefix + self.height * self.width + self.suffix


@dataclass(frozen=True)
class Layout:
    """`samples` sequences of `tokens` tokens, each cut into `square` + `line` tiles and `dense` single tokens.

    Attributes:
        samples: number of sequences.
        tokens: of one sequence.
        square: square tiles of the token grid, per sample.
        line: tiles of consecutive tokens, per sample.
        dense: tokens that are not transformed, per sample.
        squares: the kept rows of square tiles.
        lines: the kept rows of tiles of consecutive tokens.
        grid: from which the square tiles are cut; None where there are none.
        down: rows of square tiles.
    """

    samples: int
    tokens: int
    square: int
    line: int
    dense: int
    squares: Rows
    lines: Rows
    grid: Grid | None = None
    down: int = 0

    @functools.cached_property
    def tiles(self) -> int:
        """Tiles of one sample."""
        return self.square + self.line

    @functools.cached_property
    def rows(self) -> int:
        """Rows of P over the whole batch: the length of the contraction of g_w, and of the saved matrix."""
        return self.samples * (self.tiles * self.lines.rank + self.dense)

    @property
    def kept_fraction(self) -> float:
        """`rows` per token."""
        return self.rows / max(1, self.samples * self.tokens)

    @property
    def slots(self) -> Tensor:
        """The token of each slot of a sample, −1 for a slot of zeros: int64, made anew at each call.

        The square tiles, row by row; the tiles of consecutive tokens; the dense tokens.
        """
        with no_dispatch_modes():  # those of a tracer, whose tensors have no data
            rest, none = torch.arange(self.tokens, device="cpu"), torch.arange(0, device="cpu")
            squares = ends = none
            if self.grid is not None:
                ends = torch.cat((rest[: self.grid.prefix], rest[self.tokens - self.grid.suffix :]))
                squares, border = _square_tiles(self.grid, math.isqrt(self.lines.tile), self.down, self.square)
                rest = border if self.grid.dense_prefix else torch.cat((ends, border))
                ends = ends if self.grid.dense_prefix else none
            line = self.line * self.lines.tile
            padded = F.pad(rest[:line], (0, max(0, line - len(rest))), value=-1)
            return torch.cat((squares, padded, rest[line:], ends))

    def places(self, device: torch.device) -> Places:
        """The slots as index tensors on that device, made once while they are in use."""
        # Not cached under a tracer: its tensors belong to the trace.
        return Places.of(self, device) if dispatch_modes() else _places(self, device)


@dataclass(frozen=True)
class Places:
    """A layout's slots as int64 index tensors.

    Attributes:
        tokens: the token of every filled slot of the tiles.
        filled: those slots, None when all are.
        singles: the dense tokens.
        fixed: the natural indices of the rows of H that each tile of a sample keeps, (tiles, fixed).
        alike: whether all tiles keep the same fixed rows.
    """

    tokens: Tensor
    filled: Tensor | None
    singles: Tensor
    fixed: Tensor
    alike: bool
    _matrices: dict[torch.dtype, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def matrices(self, tile: int, dtype: torch.dtype) -> Tensor:
        """The fixed rows of H of each tile of a sample, of one tile where all are alike: (tiles, fixed, tile)."""
        if dtype not in self._matrices:
            fixed = self.fixed[:1] if self.alike else self.fixed
            self._matrices[dtype] = hadamard.matrix(tile, dtype, fixed.device)[fixed]
        return self._matrices[dtype]

    @classmethod
    def of(cls, lay: Layout, device: torch.device) -> Places:
        """The index tensors of a layout on a device."""
        with no_dispatch_modes():
            slots, end, filled = lay.slots, lay.tiles * lay.lines.tile, None
            tokens, singles = slots[:end], slots[end:]
            if lay.tokens - lay.dense < end:
                filled = (tokens >= 0).nonzero().flatten()
                tokens = tokens[filled]
        square, line = lay.squares.fixed_rows(device), lay.lines.fixed_rows(device)
        fixed = torch.cat((square.expand(lay.square, -1), line.expand(lay.line, -1)))
        filled = None if filled is None else _moved(filled, device)
        alike = not (lay.square and lay.line) or lay.squares == lay.lines
        return cls(_moved(tokens, device), filled, _moved(singles, device), fixed, alike)


# ---- index tensors, held while they are in use: one number per token of a layout ----

INDEX_BYTES = 1 << 25
_LEAST = 64  # more than one model has: none is made again in the next step, or while a CUDA graph is captured
_Value = TypeVar("_Value")


class Recent(Generic[_Value]):
    """A function that makes tensors of hashable arguments, and returns what it has made of them before.

    What was used last is held, so many bytes or, if that is more, the last `least`. What a CUDA graph reads is held for
    ever: the graph reads it again at its address.

    Attributes:
        misses: how often it was made.
    """

    def __init__(self, make: Callable[..., _Value], limit: int, least: int) -> None:
        self.make, self.limit, self.least, self.misses = make, limit, least, 0
        self._held: collections.OrderedDict[tuple[Hashable, ...], tuple[_Value, int]] = collections.OrderedDict()
        self._captured: dict[tuple[Hashable, ...], _Value] = {}
        self._lock = threading.Lock()

    def __call__(self, *args: Hashable) -> _Value:
        with self._lock:
            found = self._held.pop(args, None)
            if found is not None:
                self._held[args] = found
        if found is None:
            value = self._captured[args] if args in self._captured else self.make(*args)
            found = value, _nbytes(value)
            with self._lock:
                self.misses += 1
                self._held[args] = found
                total = sum(nbytes for _, nbytes in self._held.values())
                while total > self.limit and len(self._held) > self.least:
                    _, (_, nbytes) = self._held.popitem(last=False)
                    total -= nbytes
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._captured[args] = found[0]
        return found[0]

    def cache_clear(self) -> None:
        """Hold nothing any more but what CUDA graphs read."""
        self._held.clear()


def recent(limit: int, least: int = _LEAST) -> Callable[[Callable[..., _Value]], Recent[_Value]]:
    """Decorator: `Recent`."""
    return lambda make: Recent(make, limit, least)


def _nbytes(value: Any) -> int:
    """Of a tensor, and of those in a tuple or in an object's attributes."""
    if isinstance(value, Tensor):
        return value.nbytes
    parts = value if isinstance(value, tuple) else getattr(value, "__dict__", {}).values()
    return sum(map(_nbytes, parts))


@recent(INDEX_BYTES)
def _places(lay: Layout, device: torch.device) -> Places:
    return Places.of(lay, device)


def _moved(t: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on a device; under a tracer, as a tensor of the trace."""
    return t.to(device) if not dispatch_modes() else torch.tensor(t.tolist(), device=device)


@functools.lru_cache(maxsize=1024)
def layout(
    lead: tuple[int, ...], tile: int, rank: int, sampled: int, order: str, grid: Grid | None, across: bool
) -> Layout:
    """The layout of x of shape (*lead, C) for `rank` of `tile` rows.

    Args:
        lead: leading axes of x. With at least three, (B, H, W), x is its own grid.
        tile: tokens per tile.
        rank: kept rows per tile.
        sampled: how many of these are drawn.
        order: ``"lp_l1"``, ``"sequency"``, or ``"auto"``: lp_l1 on square tiles where a grid is known, else sequency.
        grid: of the model, used when its number of tokens is this input's.
        across: whether a tile may have tokens of two samples. False pads each sample's grid instead (LBP-WHT, whose
            g_x must not mix samples).
    """
    *outer, length = lead or (1,)
    if len(lead) >= 3:
        *outer, height, width = lead
        length, grid = height * width, Grid(height, width)
    samples = math.prod(outer)
    if grid is not None and (grid.tokens != length or order == "sequency" or math.isqrt(tile) ** 2 != tile):
        grid = None
    squares = Rows(tile, rank, sampled, "sequency" if tile == 1 else "lp_l1" if order == "auto" else order)
    lines = Rows(tile, rank, sampled, "sequency" if order == "auto" or tile == 1 else order)
    if tile == 1:
        return Layout(samples, length, 0, length, 0, squares, lines)
    built = _cut(samples, length, grid, squares, lines, pad_grid=not across)
    if across and samples > 1 and built.kept_fraction > _WASTE * rank / tile:
        flat = _cut(1, samples * length, None, squares, lines, pad_grid=False)
        if flat.rows < built.rows:
            return flat
    return built


def _cut(samples: int, length: int, grid: Grid | None, squares: Rows, lines: Rows, pad_grid: bool) -> Layout:
    tile, rank = lines.tile, lines.rank
    down = across = dense = 0
    rest = length
    if grid is not None:
        side, (height, width) = math.isqrt(tile), (grid.height, grid.width)
        down, across = height // side, width // side
        # A grid so small that its padded tiles would keep more rows than it has tokens is not padded.
        if pad_grid and -(-height // side) * -(-width // side) * rank < height * width:
            down, across = -(-height // side), -(-width // side)
        rest -= min(down * side, height) * min(across * side, width)
        if grid.dense_prefix:
            dense = grid.prefix + grid.suffix
            rest -= dense
    line, remainder = divmod(rest, tile)
    if remainder > rank:
        line += 1
    else:
        dense += remainder
    return Layout(samples, length, down * across, line, dense, squares, lines, grid, down)


def _square_tiles(grid: Grid, side: int, down: int, square: int) -> tuple[Tensor, Tensor]:
    """The slots of the grid's side×side tiles, −1 beyond its edge, and the tokens outside of them in strips `side` wide
    at most: the one on the right row by row, then the one below column by column, so that neighbours stay neighbours.
    """
    across = square // down if down else grid.width // side
    height, width = down * side, across * side
    patches = torch.arange(grid.height * grid.width, device="cpu") + grid.prefix
    image = patches.view(grid.height, grid.width)
    padding = (0, max(0, width - grid.width), 0, max(0, height - grid.height))
    inside = F.pad(image[:height, :width], padding, value=-1).reshape(down, side, across, side)
    return inside.transpose(1, 2).flatten(), torch.cat((image[:height, width:].flatten(), image[height:].T.flatten()))


def row_indices(lay: Layout, key: draws.Key, device: torch.device) -> Tensor:
    """The natural indices of the kept rows of H: (samples·tiles, rank), int64. Drawn rows come last."""
    fixed = lay.places(device).fixed.repeat(lay.samples, 1)
    if not lay.lines.sampled:
        return fixed
    drawn = torch.empty(lay.samples, lay.tiles, lay.lines.sampled, dtype=torch.int64, device=device)
    square, line = slice(None, lay.square), slice(lay.square, None)
    # Different keys: square tiles and tiles of consecutive tokens must not use the same permutation.
    for rows, place, own in ((lay.squares, square, draws.derived(key, 1)), (lay.lines, line, key)):
        part = drawn[:, place]
        if part.shape[1]:
            part.copy_(rows.drawn(part.shape[0] * part.shape[1], own, device).view(part.shape))
    return torch.cat((fixed, drawn.flatten(0, 1)), dim=1)


def _matrices(lay: Layout, places: Places, key: draws.Key, t: Tensor) -> Tensor:
    """P of every tile, drawn rows scaled, in t's dtype: (samples·tiles, rank, tile); do not write to it."""
    rows = lay.lines
    if not rows.sampled:
        p = places.matrices(rows.tile, t.dtype)
        return p.expand(lay.samples * lay.tiles, -1, -1) if places.alike else p.repeat(lay.samples, 1, 1)
    p = hadamard.matrix(rows.tile, t.dtype, t.device)[row_indices(lay, key, t.device)]
    p[:, rows.fixed :] *= rows.gain
    return p


def _parts(t: Tensor, elements: int) -> list[slice]:
    """Slices of samples: on a CPU as many as fit the cache with `elements` per sample, else all at once."""
    size = len(t) if t.device.type != "cpu" else max(1, _CACHED // max(1, elements))
    return [slice(i, i + size) for i in range(0, len(t), max(1, size))]


def project(t: Tensor, lay: Layout, key: draws.Key, widened: bool = False) -> Tensor:
    """P t: the kept coefficients along the tokens.

    Args:
        t: (*lead, C), with the lead that was given to `layout`.
        lay: of t.
        key: of the drawn rows; x and g_y must be projected with the same.
        widened: whether to compute in float32 (float64 for float64), part by part, rather than in t's dtype.

    Returns:
        (`lay.rows`, C), in the dtype of the computation: the tiles' rows, sample after sample, then the dense tokens.
        Without tiles t itself, as a matrix.
    """
    channels = t.shape[-1]
    t = t.reshape(lay.samples, lay.tokens, channels)
    tile, rank, count = lay.lines.tile, lay.lines.rank, lay.samples * lay.tiles
    if tile == 1:
        return t.reshape(lay.samples * lay.tokens, channels)
    dtype = torch.promote_types(t.dtype, torch.float32) if widened else t.dtype
    places = lay.places(t.device)
    z = t.new_empty(lay.rows, channels, dtype=dtype)
    tiles = z[: count * rank].view(lay.samples, lay.tiles, rank, channels)
    p = _matrices(lay, places, key, z).view(lay.samples, lay.tiles, rank, tile)
    buffer = t.new_empty(0)
    for part in _parts(t, lay.tiles * tile * channels):
        out = buffer.resize_(0) if type(t) is Tensor else None  # a fake tensor cannot be written to at another size
        body = torch.index_select(t[part], 1, places.tokens, out=out).to(dtype)
        if places.filled is not None:
            body = z.new_zeros(len(body), lay.tiles * tile, channels).index_copy_(1, places.filled, body)
        torch.bmm(p[part].flatten(0, 1), body.view(-1, tile, channels), out=tiles[part].flatten(0, 1))
    if lay.dense:
        z[count * rank :].view(lay.samples, lay.dense, channels).copy_(t.index_select(1, places.singles))
    return z


def lift(z: Tensor, lay: Layout, key: draws.Key) -> Tensor:
    """Pᵀ z, the transpose of `project`: (`lay.rows`, C) to (samples·tokens, C)."""
    tile, rank, count = lay.lines.tile, lay.lines.rank, lay.samples * lay.tiles
    if tile == 1:
        return z
    channels = z.shape[-1]
    places = lay.places(z.device)
    p = _matrices(lay, places, key, z)
    body = torch.bmm(p.transpose(1, 2), z[: count * rank].view(count, rank, channels))
    body = body.view(lay.samples, lay.tiles * tile, channels)
    if places.filled is not None:
        body = body.index_select(1, places.filled)
    t = z.new_empty(lay.samples, lay.tokens, channels).index_copy_(1, places.tokens, body)
    if lay.dense:
        t.index_copy_(1, places.singles, z[count * rank :].view(lay.samples, lay.dense, channels))
    return t.view(lay.samples * lay.tokens, channels)
