"""Packing and unpacking of tensors quantized in groups, by a kernel where one supports the call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..kernels import FUNCTIONS, Coded, channels_at_once, rows_in_memory
from ..saved import Grouped, Logarithmic, group_size
from . import rematerialize
from .formats import GROUPED
from .launcher import is_eager, launch, opaque, operator_for, supported, supported_in_eager
from .rematerialize import Activated, Codes, Normed, Product, Recipe

_LEAST_AT_ONCE = 16  # channels of a row of codes that a layer's kernel reads
LONGEST_ROW = 8192  # the most elements of a row that one program loads


@cache
def has_kernel(form: str, columns: int) -> bool:
    """Whether a kernel packs the format: 4 or 8 bits, uniform, rounded to nearest, in groups that divide the row."""
    spec = GROUPED[form]
    return _is_read(spec, columns) and not spec.dithered


def _is_read(spec: Grouped, columns: int) -> bool:
    """Whether kernels read the format: uniform codes of 4 or 8 bits, in groups that divide the row."""
    uniform = spec.bits in (4, 8) and not isinstance(spec, Logarithmic)
    return uniform and columns % group_size(columns, spec.whole) == 0


def pack(t: Tensor, form: str, least: float | None = None) -> tuple[Tensor, Tensor]:
    """Codes and scales of t (..., C), quantized in groups along its last axis in a format of `formats.GROUPED`.

    Elements below `least` are packed as `Grouped.keep` says.
    """
    if supported(t.device, t.dtype) and has_kernel(form, int(t.shape[-1])):
        if rows_in_memory(t) is not None:
            return operator_for(t, "keep_codes")(t, form, least)  # type: ignore[no-any-return]
        if is_eager(t):  # a copy and a kernel in place of the formula's twenty passes
            return _keep_codes(t.contiguous(), form, least)
    return rematerialize.keep(GROUPED[form], t, least)


def empty_codes(t: Tensor, form: str, least: float | None = None) -> tuple[Tensor, Tensor]:
    """Codes and scales as the kernels return them, not written."""
    codes, scales = GROUPED[form].sizes(t.numel() // t.shape[-1], int(t.shape[-1]))
    return t.new_empty(codes, dtype=torch.uint8), t.new_empty(scales, dtype=torch.bfloat16)


@opaque("keep_codes(Tensor t, str form, float? least=None) -> (Tensor, Tensor)", empty_codes)
def _keep_codes(t: Tensor, form: str, least: float | None = None) -> tuple[Tensor, Tensor]:
    spec = GROUPED[form]

    def reference() -> tuple[Tensor, Tensor]:
        return spec.keep(t.contiguous(), least)

    size = group_size(t.shape[-1], spec.whole)
    codes, scale = launch(t.device, "codes.pack", reference, t, size, spec.bits, least)
    return codes, scale


def unpack(form: str, kept: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The tensor of this shape and dtype, dequantized from what `pack` returned."""
    spec, columns = GROUPED[form], shape[-1]
    if not supported_in_eager(kept[0], dtype) or columns > LONGEST_ROW or not has_kernel(form, columns):
        return rematerialize.restore(spec, kept, shape, dtype)

    def reference() -> Tensor:
        return spec.restore(kept, shape, dtype).reshape(-1, columns)

    rows: Tensor = launch(kept[0].device, "codes.unpack", reference, *kept, spec.bits, dtype)
    return rows.view(*shape)


# ---- by a recipe: from the codes of the operator before ----


def coded(recipe: str, tensors: Sequence[Tensor | None], shape: Sequence[int], dtype: torch.dtype) -> Coded | None:
    """What `whole` would make, of shape (..., C), as codes of its rows; None where no kernel reads them so."""
    if not has_coded_rows(recipe, int(shape[-1])):
        return None
    codes, scale, *parameters = tensors
    if codes is None or scale is None or not supported(codes.device, dtype):
        return None
    if any(t is not None and (t.dim() != 1 or not t.is_contiguous()) for t in parameters):
        return None
    ((normed, name, bits),) = factors_of(recipe) or ()
    w, b = parameters if normed else (None, None)
    rows = math.prod(shape[:-1])
    return Coded(codes.view(rows, -1, codes.shape[-1]), scale.view(rows, -1, 1), w, b, normed, name, bits, dtype)


def sloped(g: Tensor, codes: Tensor, scale: Tensor, name: str, form: str) -> Coded | None:
    """g f'(x) as codes of the rows of x; None where no kernel reads them so.

    Args:
        g: (..., C), contiguous.
        codes, scale: of x, in groups without padding.
        name: of f.
        form: of the codes.
    """
    if not (has_sloped_rows(name, form, g.shape[-1]) and supported(g.device, g.dtype) and g.is_contiguous()):
        return None
    return Coded(codes, scale, None, None, False, name, GROUPED[form].bits, g.dtype, g.view(-1, g.shape[-1]))


@cache
def has_sloped_rows(name: str, form: str, columns: int) -> bool:
    """Whether a layer's kernel reads g f'(x) of so many columns."""
    spec = GROUPED[form]
    group = group_size(columns, spec.whole)
    fits = name in FUNCTIONS and has_kernel(form, columns)
    return fits and channels_at_once(spec.bits, group) >= _LEAST_AT_ONCE


@cache
def has_coded_rows(recipe: str, columns: int) -> bool:
    """Whether a matrix of so many columns has rows of whole groups of a recipe's codes."""
    factor = _factor(rematerialize.parsed(recipe))  # None for a product
    if factor is None or not rematerialize.is_in_order(recipe):
        return False
    own, normed, _ = factor
    spec = GROUPED[own.form]
    group = group_size(own.columns, spec.whole)
    fits = columns % group == 0 and (own.columns == columns or not normed)
    return fits and channels_at_once(spec.bits, group) >= _LEAST_AT_ONCE


def whole(recipe: str, tensors: Sequence[Tensor | None], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`rematerialize.make` for a consumer that reads the tensor from memory: a product, a convolution, a kernel."""
    first = tensors[0]
    # γ and β of a norm over several axes are a matrix.
    in_a_row = len(tensors) == 2 or all(t is None or t.dim() != 2 for t in tensors)
    if first is None or not in_a_row or not supported(first.device, dtype) or factors_of(recipe) is None:
        return rematerialize.make(recipe, tensors, shape, dtype)
    run = operator_for(first, "restore_codes")
    if run is _restore_codes:
        return _restore_codes(tensors, recipe, shape, dtype)  # type: ignore[no-any-return]
    with rematerialize.stays_in_backward():
        return run(list(tensors), recipe, list(shape), dtype)  # type: ignore[no-any-return]


@cache
def factors_of(recipe: str) -> tuple[tuple[bool, str, int], ...] | None:
    """(whether there are γ and β, f, bits) of one factor or of two with groups alike; None if no kernel supports it."""
    recipes = rematerialize.parsed(recipe)
    found = [_factor(part) for part in ((recipes.a, recipes.b) if isinstance(recipes, Product) else (recipes,))]
    factors = [factor for factor in found if factor is not None]
    layouts = {(GROUPED[c.form].whole, c.columns, c.kind == "image") for c, _, _ in factors}
    if len(factors) < len(found) or len(layouts) > 1:
        return None
    return tuple((normed, name, GROUPED[codes.form].bits) for codes, normed, name in factors)


def _factor(part: Recipe) -> tuple[Codes, bool, str] | None:
    """(codes, whether there are γ and β, f) of a recipe's factor; None if no kernel supports it."""
    name = ""
    if isinstance(part, Activated):
        name, part = part.name, part.inner
    normed = isinstance(part, Normed)
    codes = part.inner if isinstance(part, Normed) else part
    # The kernels have a table for f; they take codes of 4 or 8 bits, whatever their rounding.
    if not isinstance(codes, Codes) or codes.kind not in ("values", "image", "output") or name not in FUNCTIONS:
        return None
    return (codes, normed, name) if _is_read(GROUPED[codes.form], codes.columns) else None


def _restore_codes_fake(given: list[Tensor | None], recipe: str, shape: list[int], dtype: torch.dtype) -> Tensor:
    first = given[0]
    assert first is not None
    if rematerialize.is_image(recipe):
        return first.new_empty(channels_last_shape(shape), dtype=dtype).movedim(-1, 1)
    return first.new_empty(tuple(shape), dtype=dtype)


@opaque("restore_codes(Tensor?[] given, str recipe, int[] shape, ScalarType dtype) -> Tensor", _restore_codes_fake)
def _restore_codes(given: Sequence[Tensor | None], recipe: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    first = given[0]
    assert first is not None

    def reference() -> Tensor:
        t = rematerialize.make(recipe, given, shape, dtype)
        return (t.movedim(1, -1) if rematerialize.is_image(recipe) else t).contiguous()

    factors: list[tuple[Any, ...]] = []
    at = 0
    for normed, name, bits in factors_of(recipe) or ():
        mine = given[at : at + 4] if normed else (*given[at : at + 2], None, None)
        factors.append((*mine, normed, name, bits))
        at += 4 if normed else 2
    rows: Tensor = launch(first.device, "codes.make", reference, factors, dtype)
    if rematerialize.is_image(recipe):
        return rows.view(*channels_last_shape(shape)).movedim(-1, 1)
    if len(shape) == 2 and rows.shape[1] == shape[1]:
        return rows
    return rows.view(*shape)  # sizes one by one: of a `torch.Size` it takes PyTorch longer


def channels_last_shape(shape: Sequence[int]) -> list[int]:
    """(N, C, ...) → (N, ..., C)."""
    return [shape[0], *shape[2:], shape[1]]
