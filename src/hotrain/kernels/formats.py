"""Formats, sizes and layouts of the quantize kernel's launches, without Triton.

A step looks launches up by them: named tuples are hashed without a call of Python.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..transform.rows import Rows
from ..transform.tokens import Layout

# Number formats of an output.
NONE, INT, E4M3, E5M2, COPY = range(5)

# The rows of a layer's amax history: the previous amax (its bits), an arrival counter, and bins of partial amax.
X, ROTATED, PROJECTED, WEIGHT, FORWARD = range(5)


class Output(NamedTuple):
    """The format of one output.

    Attributes:
        number: `NONE`, `INT`, `E4M3`, `E5M2` or `COPY`.
        limit: largest code.
        stochastic: whether to round stochastically.
        stream: of the draws.
        each: whether integer scales are per token (of the rotated output) or per channel (of the projected one).
        across: whether those of the rotated output are per channel, which is for a matrix that is not rotated.
        dtype: of the rotated output, for a product that takes no codes: the codes, which are exact in bfloat16, or the
            codes times the scale of their token; of a copy. None is the codes' own, and for a copy the matrix's.
    """

    number: int
    limit: float = 0.0
    stochastic: bool = False
    stream: int = 0
    each: bool = False
    across: bool = False
    dtype: torch.dtype | None = None

    @property
    def is_fp8(self) -> bool:
        return self.number in (E4M3, E5M2)

    @property
    def by_token(self) -> bool:
        """Whether a rotated output has scales per token."""
        return self.each and not self.across


NOTHING = Output(NONE)
NUMBERS = {"int": INT, "e4m3": E4M3, "e5m2": E5M2}  # of a method
DTYPES = {INT: torch.int8, E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}


class Coded(NamedTuple):
    """A matrix (T, C) that is given by codes of `saved.Grouped`, of x̂ or x: f(γ x̂ + β), f(γ x̂), f(x), x, or g f'(x).

    Attributes:
        codes, scale: uint8 (T, groups, bytes) and bfloat16 (T, groups, 1), contiguous, in groups without padding.
        w, b: γ and β, (C,), contiguous, or None.
        normed: whether the codes are of a normalized x̂.
        name: of f, a key of `FUNCTIONS`.
        bits: 4 or 8.
        dtype: of the matrix.
        g: (T, C), unit stride along C, of `dtype`: the gradient of f(x), where the matrix is that of x; else None.
    """

    codes: Tensor
    scale: Tensor
    w: Tensor | None
    b: Tensor | None
    normed: bool
    name: str
    bits: int
    dtype: torch.dtype
    g: Tensor | None = None

    @property
    def group(self) -> int:
        """Elements per scale."""
        return self.codes.shape[2] * 8 // self.bits

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * self.group

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Of the matrix."""
        return self.numel() * self.dtype.itemsize

    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def kind(self) -> tuple[int, int, bool, str, torch.dtype, torch.dtype | None, torch.dtype | None, bool]:
        """What a compiled kernel depends on."""
        own = None if self.w is None else self.w.dtype, None if self.b is None else self.b.dtype
        return self.bits, self.group, self.normed, self.name, self.dtype, *own, self.g is not None


class Joined(NamedTuple):
    """A matrix (T, C) whose columns are those of three, side by side: the gradients of q, k and v of one layer.

    Attributes:
        parts: (T, C/3) each, contiguous, of one dtype.
    """

    parts: tuple[Tensor, Tensor, Tensor]

    @property
    def shape(self) -> tuple[int, int]:
        tokens, channels = self.parts[0].shape
        return tokens, 3 * channels

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype


def channels_at_once(bits: int, group: int) -> int:
    """The largest power of two of neighbours that the half of a group (of 4 bits), or a group (of 8), is made of."""
    run = group // 2 if bits == 4 else group
    return run & -run


class Tiling(NamedTuple):
    """Block sizes and launch options of a kernel.

    Attributes:
        tiles: of tokens, per block.
        channels: per block.
        warps: per program.
        loop: blocks along the channels per program, at most.
        stages: of loads in flight in that loop.
        group: blocks of tokens that run at the same time.
        registers: per thread, at most (None: the compiler's choice); fewer increase occupancy.
        programs: per multiprocessor, at least, if the matrix is large enough; loops are shortened for it.
    """

    tiles: int = 4
    channels: int = 128
    warps: int = 4
    loop: int = 4
    stages: int = 3
    group: int = 16
    registers: int | None = None
    programs: float = 1.0


def padded(n: int) -> int:
    """n rounded up to a multiple of 16, which the products require of their operands' strides."""
    return -(-n // 16) * 16


@functools.lru_cache(maxsize=256)
def whole(size: int, rotate: bool) -> Layout:
    """The layout that makes P the rotation H along an axis of that size, padded to whole blocks, or the identity."""
    rows = Rows(16, 16, 0, "sequency")
    tiles = -(-size // 16) if rotate else 0
    return Layout(1, size, 0, tiles, 0 if rotate else size, rows, rows)
