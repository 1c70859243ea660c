"""Triton kernels of cross entropy over many classes: the rows' normalizers, and the gradient of a piece of the logits.

::

    normalizer  Y (T, V)                             ──►  log Σ exp Y per row
    gradient    Y, normalizers, labels, (g_Y of others)  ──►  w (softmax(Y) − 1_t) + g_Y, of some classes

A compiler writes the gradient of all classes, after a pass for its sum of each row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import aligned, cdiv, is_wide, launch

_BLOCK = 4096  # classes at a time of `normalizer`
_TILE = 2048  # of `gradient`


@triton.jit
def _normalizer_kernel(y, out, V, stride, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """One row to a program; each place of a block keeps a largest element and a sum of its own."""
    row = tl.program_id(0)
    first = (row.to(tl.int64) if WIDE else row) * stride
    column = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, V, BLOCK):
        at = start + column
        v = tl.load(y + first + at, mask=at < V, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(top, v, propagate_nan=tl.PropagateNan.ALL)
        base = tl.where(larger == float("-inf"), 0.0, larger)
        total = total * tl.exp(top - base) + tl.exp(v - base)
        top = larger
    most = tl.max(tl.where(top == top, top, float("inf")), axis=0)
    base = tl.where(most == float("-inf"), 0.0, most)
    found = tl.sum(total * tl.exp(top - base), axis=0)  # at least 1, but for a row of −∞ alone
    tl.store(out + row, tl.where(found == 0.0, most, base + tl.log(tl.where(found == 0.0, 1.0, found))))


def normalizer(y: Tensor, classes: int) -> Tensor:
    """log Σ exp y per row.

    Args:
        y: (T, V or more) with contiguous rows, in at most 32 bits.
        classes: V.

    Returns:
        float32, (T,).
    """
    rows, stride = len(y), y.stride(0)
    out = y.new_empty(rows, dtype=torch.float32)
    constants = {"BLOCK": _BLOCK, "WIDE": is_wide(rows * stride)}
    case = y.device, y.dtype, _kinds(classes, stride), aligned(y, out), tuple(constants.values())
    launch(_normalizer_kernel, rows, case, (y, out, classes, stride), constants, num_warps=8)
    return out


def _kinds(*sizes: int) -> tuple[tuple[bool, bool], ...]:
    """What Triton compiles a kernel anew for."""
    return tuple((n == 1, n % 16 == 0) for n in sizes)


@triton.jit
def _gradient_kernel(
    y, normalizers, labels, factors, other, out, stride, other_stride, first, columns,
    HAS_OTHER: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A block of classes of one row to a program."""
    blocks = tl.cdiv(columns, BLOCK)
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    long = row.to(tl.int64) if WIDE else row
    at = first + column
    factor, label = tl.load(factors + row), tl.load(labels + row)
    v = tl.where(factor == 0.0, 0.0, tl.load(y + long * stride + at, mask=inside, other=0).to(tl.float32))
    g = tl.exp(v - tl.load(normalizers + row))
    g = tl.where(factor == 0.0, 0.0, (g - (first + column == label).to(tl.float32)) * factor)
    if HAS_OTHER:
        g += tl.load(other + long * other_stride + at, mask=inside, other=0).to(tl.float32)
    tl.store(out + long * columns + column, g.to(out.dtype.element_ty), mask=inside)


def gradient(
    y: Tensor, normalizers: Tensor, labels: Tensor, factors: Tensor, other: Tensor | None, first: int, columns: int
) -> Tensor:
    """The gradient of some classes' logits.

    Args:
        y: (T, V or more) with contiguous rows, in at most 32 bits.
        normalizers: float32, (T,), of `normalizer`.
        labels: int64, (T,); of ignored rows any.
        factors: float32, (T,): what the row's loss is multiplied with; where it is 0 the row has no gradient.
        other: a gradient of y that is added, (T, V), like y.
        first: the first class.
        columns: how many.

    Returns:
        (T, columns), of y's dtype.
    """
    rows, strides = len(y), (y.stride(0), 0 if other is None else other.stride(0))
    out = y.new_empty(rows, columns)
    constants = {"HAS_OTHER": other is not None, "BLOCK": _TILE, "WIDE": is_wide(rows * max(columns, *strides))}
    sizes, tensors = (*strides, first, columns), (y, normalizers, labels, factors, other, out)
    case = y.device, y.dtype, _kinds(*sizes), aligned(*tensors), tuple(constants.values())
    launch(_gradient_kernel, rows * cdiv(columns, _TILE), case, (*tensors, *sizes), constants, num_warps=4)
    return out
