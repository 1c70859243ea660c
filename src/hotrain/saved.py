"""Step 3, what forward leaves for backward: a format says its bytes, how a tensor goes in, and how it comes back.

The formats are the reference of what is packed. The kernels pack the same codes, with a few bytes of their own beside
them (the rows of each tile): measured bytes come from storages (`hotrain.saved_bytes`), predicted ones from here.
`Format` is for the projected rows of a layer's input, whose codes enter an integer product. The others are for tensors
of any shape that come back as numbers: `Grouped` for values, `Levels` for slopes, whose range is known beforehand,
`Bits` for yes and no.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from . import draws
from .method import Saved
from .quantize import floating, published
from .quantize.integer import Quantized, quantize

# What backward gets: codes with a scale, or the rows themselves.
Kept = Quantized | Tensor


@dataclass(frozen=True)
class Format:
    """A matrix of rows (R, C) of one dtype, kept as `spec` says: itself, int8, e4m3 or packed int4 codes."""

    spec: Saved
    columns: int
    dtype: torch.dtype

    def keep(self, rows: Tensor, key: int) -> tuple[Tensor, ...]:
        """The tensors to save for `rows`, (R, C): one, or codes and scale. Nothing else stays alive."""
        spec = self.spec
        if spec.bits is None:
            return (rows.to(self.dtype),)
        if spec.number == "e4m3":
            kept = floating.quantize(rows, "e4m3")
            return kept.codes, kept.scale
        step = published.sawb_step(rows, spec.bits) if spec.number == "sawb" else None
        axis = "token" if spec.scale == "row" else "tensor"
        kept = quantize(rows, spec.bits, axis, spec.rounding, key, draws.SAVED, step=step).pack()
        return kept.codes, kept.scale

    def restore(self, kept: tuple[Tensor, ...]) -> Kept:
        """What `keep` was given, as precisely as it was kept; codes stay codes."""
        if self.spec.bits is None:
            return kept[0]
        codes, scale = kept
        return Quantized(codes, scale, self.spec.bits, self.columns, packed=self.spec.bits == 4)

    def nbytes(self, rows: int) -> int:
        """Bytes that `keep` keeps for that many rows."""
        if self.spec.bits is None:
            return rows * self.columns * self.dtype.itemsize
        codes = rows * (self.columns if self.spec.bits == 8 else -(-self.columns // 2))
        scale = 8 if self.dtype == torch.float64 else 4
        return codes + scale * (rows if self.spec.scale == "row" else 1)


def values(kept: Kept, dtype: torch.dtype) -> Tensor:
    """The kept rows as numbers, (R, C)."""
    return kept.dequantize(dtype) if isinstance(kept, Quantized) else kept.to(dtype)


# ---- tensors of any shape, which come back as numbers ----
#
# Plain operations without a key, so that a compiler fuses them into what makes the tensor and what uses it, and a
# recomputed forward keeps the same. Where few levels would leave a bias, codes are dithered: the fraction is rounded up
# where it exceeds a threshold that depends on the entry's place alone and is uniform along each row and each column, so
# that sums over either are right on average.

_CHUNK = 64  # entries a group, where no divisor of the channels serves
_SCALE = torch.bfloat16


@cache
def group_size(columns: int, whole: bool = False) -> int:
    """How many neighbours share a scale: the largest divisor of the channels from 16 to 128 that
    4 divides, else 64 with padding.

    Fewer than 16 channels are one group, with padding to a multiple of 4, and so are all of them where it is `whole`.
    """
    if columns < 16 or whole:
        return -(-columns // 4) * 4
    return next((size for size in range(min(columns, 128), 15, -1) if columns % size == 0 and size % 4 == 0), _CHUNK)


def thresholds(rows: int, columns: int, device: torch.device, first: int = 0) -> Tensor:
    """Numbers in [0, 1), float32 (rows, columns), equally distributed along both; `first`: the first column.

    A lattice of two irrational steps (those of the plastic number), modulo 1 by wrapping products of int32. Of 20 bits,
    so that their sum with a level, at most 15, is not rounded: a value on a level stays there.
    """
    # `| 0`: else a compiler takes the products for index arithmetic, in which nothing may wrap.
    down = (torch.arange(rows, dtype=torch.int32, device=device) | 0) * -0x3EC05657  # 0.7549 of 2³²
    across = (torch.arange(first, first + columns, dtype=torch.int32, device=device) | 0) * -0x6E1EF25B  # 0.5698
    return (((down[:, None] + across) >> 12) & 0xFFFFF).to(torch.float32) * 2.0**-20


def memory_order(t: Tensor) -> list[int]:
    """The axes of t as they lie in memory, the densest last; as they come where t is not dense."""
    if t.is_contiguous():
        return list(range(t.dim()))
    if t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last):
        return [0, 2, 3, 1]
    order = sorted(range(t.dim()), key=lambda axis: -t.stride()[axis])
    return order if t.permute(order).is_contiguous() else list(range(t.dim()))


def as_it_was(t: Tensor, order: Sequence[int]) -> Tensor:
    """What was permuted by `order`, with its axes where they were."""
    return t.permute([order.index(axis) for axis in range(t.dim())])


def pack(pieces: Sequence[Tensor], bits: int) -> Tensor:
    """8/bits pieces of codes in 0 … 2^bits − 1, each (..., n), in one: uint8, (..., n), lowest bits first."""
    packed = pieces[0].to(torch.uint8)
    for place, piece in enumerate(pieces[1:], 1):
        packed = packed | (piece.to(torch.uint8) << (bits * place))
    return packed


def in_pieces(packed: Tensor, bits: int) -> Tensor:
    """What `pack` took, one piece after the other: uint8, (..., 8/bits, n).

    The pieces are for the caller to flatten, once and at the end: of two steps a compiler makes a remainder of a
    remainder as the place to read from, and then reads byte by byte.
    """
    if bits == 8:
        return packed.unsqueeze(-2)
    # Not kept from call to call: a compiler that traces this needs one of its own.
    shifts = bits * torch.arange(8 // bits, dtype=torch.uint8, device=packed.device).unsqueeze(-1)
    return (packed.unsqueeze(-2) >> shifts) & (2**bits - 1)


def _pieces(t: Tensor, bits: int) -> list[tuple[int, Tensor]]:
    """The parts of the last axis that `pack` puts into one, with where each begins.

    They are cut first and turned into codes one by one: a compiler would write codes that several pieces are cut from
    to memory.
    """
    each = 8 // bits
    n = t.shape[-1] // each
    return [(place * n, t[..., place * n : (place + 1) * n]) for place in range(each)]


@dataclass(frozen=True)
class Grouped:
    """Values kept as symmetric codes with a bfloat16 scale for each group of neighbours along the last axis.

    bits: 8, 4 or 2.  dithered: rounded without bias along rows and columns; else to nearest.  whole: one scale a row.
    A group that holds an infinity or a NaN comes back without a finite number.
    """

    bits: int
    dithered: bool = False
    whole: bool = False

    @property
    def top(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def keep(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Codes, uint8 (rows, groups, bytes), and scales, bfloat16 (rows, groups, 1), of t, (..., C)."""
        columns = t.shape[-1]
        size = group_size(int(columns), self.whole)  # a graph serves one number of channels
        rows = t.reshape(-1, columns)
        rows = rows if rows.dtype == torch.float64 else rows.float()
        if columns % size:
            rows = F.pad(rows, (0, -columns % size))
        groups = rows.unflatten(-1, (-1, size))
        # Rounding the scale to bfloat16 must not make it smaller: a largest entry would be cut.
        scale = (groups.abs().amax(-1, keepdim=True) * ((1 + 2.0**-8) / self.top)).to(_SCALE)
        divisor = torch.where(scale == 0, 1.0, scale).to(groups.dtype)
        return pack(
            [self._codes(piece / divisor, first) for first, piece in _pieces(groups, self.bits)], self.bits
        ), scale

    def _codes(self, steps: Tensor, first: int) -> Tensor:
        """Codes from 0 of numbers of steps, (rows, groups, n), each group from its entry `first` on."""
        if self.dithered:
            rows, groups, n = steps.shape
            noise = thresholds(rows, groups * n, steps.device, first).view(steps.shape)
            steps = (steps + noise).floor()
        else:
            steps = steps.round()
        return steps.clamp(-self.top, self.top) + self.top

    def restore(self, kept: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What `keep` was given, of that shape, as precisely as it was kept."""
        packed, scale = kept
        codes = in_pieces(packed, self.bits)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        rows = ((codes.to(wide) - self.top) * scale.unsqueeze(-1).to(wide)).flatten(-3)
        return rows[:, : shape[-1]].to(dtype).reshape(tuple(shape))

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes that `keep` keeps."""
        rows, columns = torch.Size(shape[:-1]).numel(), shape[-1]
        size = group_size(columns, self.whole)
        groups = rows * -(-columns // size)
        return groups * (size * self.bits // 8 + _SCALE.itemsize)


@dataclass(frozen=True)
class Levels:
    """Slopes of a function, kept as one of 2^bits dithered levels, `per_one` to a unit, the lowest `first` from 0.

    Zero and one are levels, so that what is passed on whole, or not at all, is exact. A NaN comes back as one.
    """

    bits: int
    first: int
    per_one: int

    def keep(self, t: Tensor, slope: Callable[[Tensor], Tensor] = lambda t: t) -> tuple[Tensor]:
        """uint8 codes, several a byte, of the slope at t, entry by entry."""
        rows = t.reshape(-1, t.shape[-1])
        each = 8 // self.bits
        if rows.shape[1] % each:
            rows = F.pad(rows, (0, -rows.shape[1] % each))
        return (pack([self._codes(slope(piece), first) for first, piece in _pieces(rows, self.bits)], self.bits),)

    def _codes(self, slopes: Tensor, first: int) -> Tensor:
        steps = slopes * self.per_one - self.first
        codes = (steps + thresholds(slopes.shape[0], slopes.shape[1], slopes.device, first)).floor()
        return codes.nan_to_num(self.per_one - self.first).clamp(0, 2**self.bits - 1)

    def restore(self, kept: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        codes = in_pieces(kept[0], self.bits).flatten(-2)[:, : shape[-1]]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return ((codes.to(wide) + self.first) / self.per_one).to(dtype).reshape(tuple(shape))

    def nbytes(self, shape: Sequence[int]) -> int:
        return torch.Size(shape[:-1]).numel() * -(-shape[-1] * self.bits // 8)


@dataclass(frozen=True)
class Bits:
    """Yes or no, a bit an entry.

    neighbours: eight of a row make a byte, of tensors (..., C) with C a multiple of 8, as a kernel that holds rows
    packs them; else eight that are an eighth of the tensor apart, as a compiler does.
    """

    neighbours: bool = False

    def keep(self, flags: Tensor) -> tuple[Tensor]:
        """uint8, eight entries a byte: (⌈entries/8⌉,), or (..., C/8)."""
        if self.neighbours:
            return (pack(flags.unflatten(-1, (-1, 8)).unbind(-1), 1),)
        flat = flags.flatten()
        if flat.numel() % 8:
            flat = F.pad(flat, (0, -flat.numel() % 8))
        return (pack([piece for _, piece in _pieces(flat, 1)], 1),)

    def restore(self, kept: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype = torch.bool) -> Tensor:
        if self.neighbours:
            return in_pieces(kept[0], 1).movedim(-2, -1).ne(0).reshape(tuple(shape))
        return in_pieces(kept[0], 1).flatten()[: torch.Size(shape).numel()].ne(0).reshape(tuple(shape))

    def nbytes(self, shape: Sequence[int]) -> int:
        return -(-torch.Size(shape).numel() // 8)
