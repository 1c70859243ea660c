"""Formats of saved activations: each packs a tensor into codes and scales, unpacks it, and states its bytes.

The formats are the reference of what is packed. The kernels pack the same codes, with a few additional bytes (the rows
of each tile): measured bytes come from storages (`hotrain.saved_bytes`), predicted ones from here. `Format` is for the
projected rows of a layer's input, whose codes enter an integer product. The others are for tensors of any shape that
are dequantized: `Grouped` for values, `Levels` for derivatives, whose range is known, `Bits` for booleans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from . import draws, published
from .method import Saved
from .quantize import QUANTIZERS
from .quantize.integer import Quantized, pack, unpack

# What backward gets: codes with a scale, or the unquantized rows.
Kept = Quantized | Tensor


@dataclass(frozen=True)
class Packing:
    """How codes (R, C), a byte each, are stored: `pack` makes (R, width(C)) of them, `unpack` takes that and C."""

    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor, int], Tensor]
    width: Callable[[int], int]


PACKINGS = {
    8: Packing(lambda codes: codes, lambda codes, columns: codes, lambda columns: columns),
    4: Packing(pack, unpack, lambda columns: -(-columns // 2)),
}


@dataclass(frozen=True)
class Format:
    """The format of a matrix (R, C): unquantized, int8, e4m3 or packed int4 codes.

    Attributes:
        spec: bits, number, scale and rounding.
        columns: C.
        dtype: of the unquantized matrix.
    """

    spec: Saved
    columns: int
    dtype: torch.dtype

    def keep(self, rows: Tensor, key: draws.Key) -> tuple[Tensor, ...]:
        """Pack a matrix.

        Args:
            rows: (R, C).
            key: of the draws, for stochastic rounding.

        Returns:
            The tensors to save: the matrix, or codes and scale.
        """
        spec = self.spec
        if spec.bits is None:
            return (rows.to(self.dtype),)
        if spec.number == "sawb":
            kept = published.sawb(rows, spec.rounding, key)
        else:
            axis = "token" if spec.scale == "row" else "tensor"
            kept = QUANTIZERS[spec.number](rows, spec.bits, axis, spec.rounding, key, draws.SAVED)
        return PACKINGS[spec.bits].pack(kept.codes), kept.scale

    def restore(self, kept: tuple[Tensor, ...]) -> Kept:
        """The inverse of `keep` up to rounding; codes are not dequantized."""
        if self.spec.bits is None:
            return kept[0]
        codes, scale = kept
        return Quantized(PACKINGS[self.spec.bits].unpack(codes, self.columns), scale, self.spec.bits)

    def nbytes(self, rows: int) -> int:
        """Bytes of what `keep` returns for that many rows."""
        if self.spec.bits is None:
            return rows * self.columns * self.dtype.itemsize
        codes = rows * PACKINGS[self.spec.bits].width(self.columns)
        scale = 8 if self.dtype == torch.float64 else 4
        return codes + scale * (rows if self.spec.scale == "row" else 1)


def values(kept: Kept, dtype: torch.dtype) -> Tensor:
    """The saved rows dequantized, (R, C), in `dtype`."""
    return kept.dequantize(dtype) if isinstance(kept, Quantized) else kept.to(dtype)


# ---- tensors of any shape, which are dequantized ----
#
# Plain operations without a key, so that a compiler fuses them into the producer and the consumer, and a recomputed
# forward saves the same. Where few levels would leave a bias, codes are dithered: the fraction is rounded up where it
# exceeds a threshold that depends only on the element's index and is uniform along each row and each column, so that
# sums over either are unbiased.

_CHUNK = 64  # elements per group, where the number of channels has no suitable divisor


# Codes are packed by parts of the last axis, so that a compiler fuses packing and unpacking into the operations before
# and after them.


def pack_parts(codes: Sequence[Tensor], bits: int) -> Tensor:
    """Pack 8/bits tensors of codes in 0 … 2^bits − 1, each (..., n), into one: uint8, (..., n), lowest bits first."""
    packed = codes[0].to(torch.uint8)
    for place, part in enumerate(codes[1:], 1):
        packed = packed | (part.to(torch.uint8) << (bits * place))
    return packed


def unpack_parts(packed: Tensor, bits: int) -> Tensor:
    """The parts that `pack_parts` took: uint8, (..., 8/bits, n).

    The caller flattens them, once and at the end: after two steps a compiler makes the index to read from a remainder
    of a remainder, and then reads byte by byte.
    """
    if bits == 8:
        return packed.unsqueeze(-2)
    # Not cached: a compiler that traces this needs its own tensor.
    shifts = bits * torch.arange(8 // bits, dtype=torch.uint8, device=packed.device).unsqueeze(-1)
    return (packed.unsqueeze(-2) >> shifts) & (2**bits - 1)


def parts(t: Tensor, bits: int) -> list[tuple[int, Tensor]]:
    """The parts of the last axis that `pack_parts` packs into one, each with its first index.

    They are cut before they are quantized: a compiler would write codes that several parts are cut from to memory.
    """
    each = 8 // bits
    n = t.shape[-1] // each
    return [(place * n, t[..., place * n : (place + 1) * n]) for place in range(each)]


@cache
def group_size(columns: int, whole: bool = False) -> int:
    """How many neighbours share a scale.

    The largest multiple of 4 from 16 to 128 that divides the channels, else 64 with padding. Fewer than 16 channels,
    or all of them if ``whole``, are one group; one that is no multiple of 4 is padded, a longer one to a multiple of 8,
    as rows of products of 16-bit numbers are.
    """
    if columns < 16 or whole:
        unit = 4 if columns % 4 == 0 or columns < 16 else 8
        return -(-columns // unit) * unit
    return next((size for size in range(min(columns, 128), 15, -1) if columns % size == 0 and size % 4 == 0), _CHUNK)


def memory_order(t: Tensor) -> list[int]:
    """The axes of t in the order of its memory layout, the densest last; 0, 1, … where t is not dense.

    Some channels of an image in channels-last, as `split` returns them, are in that order, too.
    """
    if t.is_contiguous():
        return list(range(t.dim()))
    if t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last):
        return [0, 2, 3, 1]
    order = sorted(range(t.dim()), key=lambda axis: -t.stride()[axis])
    some_channels = order == [0, 2, 3, 1] and t.stride()[1] == 1
    return order if some_channels or t.permute(order).is_contiguous() else list(range(t.dim()))


def as_it_was(t: Tensor, order: Sequence[int]) -> Tensor:
    """The inverse of ``t.permute(order)``."""
    return t.permute([order.index(axis) for axis in range(t.dim())])


def dither(rows: int, columns: int, device: torch.device, first: int = 0) -> Tensor:
    """Thresholds in [0, 1) for ⌊v + threshold⌋, equally distributed along rows and columns.

    A lattice of two irrational steps (those of the plastic number), modulo 1 by wrapping products of int32. They have
    20 bits, so that their sum with a level, at most 15, is not rounded: a value on a level stays there.

    Args:
        rows: of the result.
        columns: of the result.
        device: of the result.
        first: index of its first column.

    Returns:
        float32, (rows, columns).
    """
    # `| 0`: else a compiler takes the products for index arithmetic, which must not wrap.
    down = (torch.arange(rows, dtype=torch.int32, device=device) | 0) * -0x3EC05657  # 0.7549 of 2³²
    across = (torch.arange(first, first + columns, dtype=torch.int32, device=device) | 0) * -0x6E1EF25B  # 0.5698
    return (((down[:, None] + across) >> 12) & 0xFFFFF).to(torch.float32) * 2.0**-20


def largest_scale(top: int, dtype: torch.dtype) -> float:
    """The largest bfloat16 scale whose code `top` is a finite number of float16, or else of bfloat16."""
    largest = torch.finfo(dtype if dtype == torch.float16 else torch.bfloat16).max / top
    step = 2.0 ** (math.frexp(largest)[1] - 8)  # of bfloat16 at that size
    return math.floor(largest / step) * step


_AN_OCTAVE = 8  # codes of `Logarithmic`
_NOTHING = 255  # its code of 0


@dataclass(frozen=True)
class Grouped:
    """Group-wise quantization: symmetric codes with a bfloat16 scale for each group of neighbours on the last axis.

    A group with an infinity or a NaN is dequantized to non-finite numbers.

    Attributes:
        bits: 8, 4 or 2; others, whose codes are packed with gaps, for measurements of their error alone.
        dithered: whether to round without bias along rows and columns; else to nearest.
        whole: whether scales are per row.
    """

    bits: int
    dithered: bool = False
    whole: bool = False
    scale_dtype: ClassVar[torch.dtype] = torch.bfloat16

    @cached_property
    def top(self) -> int:
        """The largest code."""
        return 2 ** (self.bits - 1) - 1

    def keep(self, t: Tensor, least: float | None = None) -> tuple[Tensor, Tensor]:
        """Pack a tensor.

        Args:
            t: (..., C), floating point.
            least: what smaller elements are packed as, or as one code below 0 where that is less: never as 0, where
                the largest element's scale is coarse. None for themselves.

        Returns:
            Codes, uint8 (rows, groups, bytes), and scales, bfloat16 (rows, groups, 1), contiguous: kernels read them.
        """
        columns = t.shape[-1]
        size = group_size(int(columns), self.whole)  # a graph is specialized to one number of channels
        rows = t.reshape(-1, columns).to(torch.promote_types(t.dtype, torch.float32))
        if columns % size:
            rows = F.pad(rows, (0, -columns % size))
        groups = rows.unflatten(-1, (-1, size))
        if least is not None:
            groups = torch.maximum(groups, (groups.amax(-1, keepdim=True) * (-1 / self.top)).clamp(max=least))
        scale = self._scale(groups.abs().amax(-1, keepdim=True), t.dtype)
        divisor = torch.where(scale == 0, 1.0, scale).to(groups.dtype)
        codes = [self._codes(part / divisor, first) for first, part in parts(groups, self.bits)]
        return pack_parts(codes, self.bits).contiguous(), scale.contiguous()  # not as a transposed t

    def _scale(self, amax: Tensor, dtype: torch.dtype) -> Tensor:
        # Rounding the scale to bfloat16 must not make it smaller: the largest element would be clipped.
        scale = (amax * ((1 + 2.0**-8) / self.top)).to(self.scale_dtype)
        # But for masks: the largest code of `finfo(dtype).min` must not be dequantized to an infinity.
        return scale.where(amax.isinf(), scale.clamp(max=largest_scale(self.top, dtype)))

    def _codes(self, steps: Tensor, first: int) -> Tensor:
        """Codes, from 0, of values divided by their scale, (rows, groups, n), each group from its element `first`."""
        if self.dithered:
            rows, groups, n = steps.shape
            noise = dither(rows, groups * n, steps.device, first).view(steps.shape)
            steps = (steps + noise).floor()
        else:
            steps = steps.round()
        return steps.clamp(-self.top, self.top) + self.top

    def restore(self, kept: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Dequantize what `keep` returned to a shape and a dtype."""
        packed, scale = kept
        codes = unpack_parts(packed, self.bits)
        accurate = torch.promote_types(dtype, torch.float32)
        rows = (self._steps(codes.to(accurate)) * scale.unsqueeze(-1).to(accurate)).flatten(-3)
        return rows[:, : shape[-1]].to(dtype).reshape(tuple(shape))

    def _steps(self, codes: Tensor) -> Tensor:
        """The values over their scale, of codes as floating-point numbers."""
        return codes - self.top

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of what `keep` returns for that shape."""
        codes, scales = self.sizes(torch.Size(shape[:-1]).numel(), shape[-1])
        return math.prod(codes) + math.prod(scales) * self.scale_dtype.itemsize

    def sizes(self, rows: int, columns: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """The shapes of codes and scales of a matrix."""
        size = group_size(columns, self.whole)
        groups = -(-columns // size)
        return (rows, groups, size * self.bits // 8), (rows, groups, 1)


@dataclass(frozen=True)
class Logarithmic(Grouped):
    """Group-wise quantization of numbers that are not negative, with an error relative to each: 8 codes an octave.

    A code is -8 log₂ of the share in the scale, rounded to nearest: an error of at most 2^(1/16) − 1, 4.4 %. Shares
    below 2^-31.8 become 0, and only these. The scale is the group's largest element, which is exact: float32.
    """

    bits: int = 8
    scale_dtype: ClassVar[torch.dtype] = torch.float32

    def _scale(self, amax: Tensor, dtype: torch.dtype) -> Tensor:
        return amax.to(self.scale_dtype)

    def _codes(self, steps: Tensor, first: int) -> Tensor:
        return (steps.log2() * -_AN_OCTAVE).round().clamp(0, _NOTHING)

    def _steps(self, codes: Tensor) -> Tensor:
        return (codes * (-1 / _AN_OCTAVE)).exp2() * (codes < _NOTHING)


@dataclass(frozen=True)
class Levels:
    """Derivatives of an activation function, quantized to 2^bits dithered levels.

    Zero and one are levels, so that derivatives of 0 and 1 are exact. A NaN is dequantized to one.

    Attributes:
        bits: per element.
        first: the lowest level, in steps.
        per_one: number of steps from 0 to 1.
    """

    bits: int
    first: int
    per_one: int

    def keep(self, t: Tensor, slope: Callable[[Tensor], Tensor] = lambda t: t) -> tuple[Tensor]:
        """Pack the derivative at t, element by element.

        Args:
            t: (..., C), floating point.
            slope: t in float32 (float64 for float64) → the derivative there.

        Returns:
            Codes, uint8, several per byte.
        """
        rows = t.reshape(-1, t.shape[-1])
        each = 8 // self.bits
        if rows.shape[1] % each:
            rows = F.pad(rows, (0, -rows.shape[1] % each))
        accurate = torch.promote_types(t.dtype, torch.float32)
        slopes = [(first, slope(part.to(accurate))) for first, part in parts(rows, self.bits)]
        return (pack_parts([self._codes(part, first) for first, part in slopes], self.bits),)

    def _codes(self, slopes: Tensor, first: int) -> Tensor:
        steps = slopes * self.per_one - self.first
        codes = (steps + dither(slopes.shape[0], slopes.shape[1], slopes.device, first)).floor()
        return codes.nan_to_num(self.per_one - self.first).clamp(0, 2**self.bits - 1).to(torch.uint8)

    def restore(self, kept: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Dequantize what `keep` returned to a shape and a dtype."""
        codes = unpack_parts(kept[0], self.bits).flatten(-2)[:, : shape[-1]]
        accurate = torch.promote_types(dtype, torch.float32)
        return ((codes.to(accurate) + self.first) / self.per_one).to(dtype).reshape(tuple(shape))

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of what `keep` returns for that shape."""
        return torch.Size(shape[:-1]).numel() * -(-shape[-1] * self.bits // 8)


def _halves(columns: int) -> int:
    """Into how many parts a row is cut whose neighbours share a byte of bits."""
    return 2 if columns % 16 else 1


@dataclass(frozen=True)
class Bits:
    """Booleans, 1 bit per element.

    Attributes:
        neighbours: whether eight neighbours of a row make a byte, for tensors (..., C) with C a multiple of 16, or four
            neighbours in each half of the row, those of the first half in the low bits, for other multiples of 8, as
            kernels pack them; else eight elements that are an eighth of the tensor apart, as Inductor does.
    """

    neighbours: bool = False

    def keep(self, flags: Tensor) -> tuple[Tensor]:
        """Pack booleans: uint8, eight elements per byte, (⌈elements/8⌉,), or (..., C/8) of neighbours."""
        if self.neighbours:
            halves = _halves(flags.shape[-1])
            runs = flags.unflatten(-1, (halves, -1, 8 // halves)).movedim(-2, -1).flatten(-3, -2)
            return (pack_parts(runs.unbind(-2), 1),)
        flat = flags.flatten()
        if flat.numel() % 8:
            flat = F.pad(flat, (0, -flat.numel() % 8))
        return (pack_parts([part for _, part in parts(flat, 1)], 1),)

    def restore(self, kept: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype = torch.bool) -> Tensor:
        """Unpack what `keep` returned to a shape."""
        if self.neighbours:
            runs = unpack_parts(kept[0], 1).unflatten(-2, (_halves(shape[-1]), -1))
            return runs.movedim(-2, -1).ne(0).reshape(tuple(shape))
        return unpack_parts(kept[0], 1).flatten()[: math.prod(shape)].ne(0).reshape(tuple(shape))

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of what `keep` returns for that shape."""
        return -(-torch.Size(shape).numel() // 8)
