"""Triton kernel of gated activations: both gradients of y = f(x) b from the codes of x and b, in one pass.

::

    gradient   g_y, codes of x and of b  ──►  g_x = g_y b f'(x),  g_b = g_y f(x)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import with_slope
from .codes import high_codes, low_codes
from .launch import aligned, block_of, cdiv, is_wide, launch
from .support import FUNCTIONS

_TILE = 1024  # elements of a half of a tile: four are in registers at a time


@triton.jit
def _gradient_kernel(
    g, x_codes, x_scale, b_codes, b_scale, g_x, g_b, segments, HALF: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, F: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Groups of 2 HALF neighbours, ROWS of them to a program."""
    segment = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = segment < segments
    place = (segment.to(tl.int64) if WIDE else segment)[:, None]
    x_step = tl.load(x_scale + place, mask=live[:, None], other=0).to(tl.float32)
    b_step = tl.load(b_scale + place, mask=live[:, None], other=0).to(tl.float32)
    for start in tl.static_range(0, HALF, BLOCK):
        column = (start + tl.arange(0, BLOCK))[None, :]
        inside = live[:, None] & (column < HALF) if HALF % BLOCK != 0 else live[:, None]
        x_packed = tl.load(x_codes + place * HALF + column, mask=inside, other=0).to(tl.int32)
        b_packed = tl.load(b_codes + place * HALF + column, mask=inside, other=0).to(tl.int32)
        for half in tl.static_range(2):
            at = place * (2 * HALF) + half * HALF + column
            found = tl.load(g + at, mask=inside, other=0).to(tl.float32)
            v = (low_codes(x_packed) if half == 0 else high_codes(x_packed)) * x_step
            b = (low_codes(b_packed) if half == 0 else high_codes(b_packed)) * b_step
            y, slope = with_slope(v, F)
            tl.store(g_x + at, (found * b * slope).to(g_x.dtype.element_ty), mask=inside)
            tl.store(g_b + at, (found * y).to(g_b.dtype.element_ty), mask=inside)


def gradient(g: Tensor, given: Sequence[Tensor], name: str, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """The gradients of x and of b.

    Args:
        g: (rows, C), contiguous.
        given: codes of x, uint8 (rows, groups, bytes), and their scales, bfloat16 (rows, groups, 1), as
            `hotrain.kernels.codes.pack` returns them in 4 bits; then those of b.
        name: of f, a key of `FUNCTIONS` whose derivative `with_slope` has.
        in_place: whether g_x is written over g.

    Returns:
        g_x and g_b, as g.
    """
    rows, groups, half = given[0].shape
    segments, block = rows * groups, block_of(half)
    each = max(1, _TILE // block)
    g_x, g_b = g if in_place else torch.empty_like(g), torch.empty_like(g)
    constants = {"HALF": half, "BLOCK": block, "ROWS": each, "F": FUNCTIONS[name], "WIDE": is_wide(g.numel())}
    case = g.device, g.dtype, segments, aligned(g, *given, g_x, g_b), tuple(constants.values())
    launch(_gradient_kernel, cdiv(segments, each), case, (g, *given, g_x, g_b, segments), constants, num_warps=4)
    return g_x, g_b
