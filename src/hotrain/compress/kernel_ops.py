"""Opaque custom ops backed by one Triton kernel each: group-wise quantize, dequantize, fused BatchNorm + activation.

Inductor does not trace into them. Fusing the formulas of `saved`, `rematerialize` and `functions` itself, it would read
a tensor twice to quantize it, and load a scale for every element. These operators are used where the kernels run
(`hotrain.kernels`), with the same results. On other devices an operator runs its reference in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import autograd
from ..kernels import FUNCTIONS
from ..private import constant_in_graphs, under_dispatch_mode
from ..saved import Bits, Grouped, Levels, group_size
from .formats import FORMATS, GROUPED
from .rematerialize import in_backward, is_image, make, parsed, restore, wide
from .slopes import ACTIVATIONS

_lib = torch.library.Library("hotrain", "FRAGMENT")
_BITS = Bits(neighbours=True)
_CHANNELS = 4096  # the most channels of one program's tile


@constant_in_graphs
def runs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels run on this device, for tensors of this dtype."""
    kernels = autograd.kernels_for(device)
    return kernels is not None and kernels.buffers_reason(device, dtype) is None


@cache
def _has_kernel(form: str, columns: int) -> bool:
    """Whether a kernel packs the format: 4 or 8 bits, rounded to nearest, in groups that divide the row."""
    spec = GROUPED[form]
    return spec.bits in (4, 8) and not spec.dithered and columns % group_size(columns, spec.whole) == 0


_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}  # operator of this file → its Python function


def is_eager(t: Tensor) -> bool:
    """Whether t is a plain tensor in eager mode, not traced or fake."""
    return type(t) is Tensor and not torch.compiler.is_compiling()


def _on(t: Tensor, name: str) -> Callable[..., Any]:
    """The operator of that name for t; its Python function where dispatch would change nothing."""
    if is_eager(t) and not under_dispatch_mode():
        return _IMPLEMENTATIONS[name]
    return getattr(torch.ops.hotrain, name)  # type: ignore[no-any-return]


# ---- codes ----


def keep(t: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """Pack a tensor.

    Args:
        t: (..., C), quantized in groups along its last axis.
        form: a format of `formats.GROUPED`.

    Returns:
        Codes and scales.
    """
    if runs(t.device, t.dtype) and _has_kernel(form, int(t.shape[-1])):
        kernels = autograd.kernels_for(t.device)
        if kernels is not None and kernels.lies_in_rows(t):
            found: tuple[Tensor, Tensor] = _on(t, "keep_codes")(t, form)
            return found
    return GROUPED[form].keep(t)


def _keep_codes(t: Tensor, form: str) -> tuple[Tensor, Tensor]:
    spec = GROUPED[form]
    kernels = autograd.kernels_for(t.device)
    if kernels is None:
        return spec.keep(t.contiguous())
    codes, scale = kernels.keep_codes(
        t, group_size(t.shape[-1], spec.whole), spec.bits, lambda: spec.keep(t.contiguous())
    )
    return codes, scale


def _keep_codes_fake(t: Tensor, form: str) -> tuple[Tensor, Tensor]:
    columns = t.shape[-1]
    spec = GROUPED[form]
    size = group_size(int(columns), spec.whole)
    rows, groups, width = t.numel() // columns, columns // size, size * spec.bits // 8
    return t.new_empty(rows, groups, width, dtype=torch.uint8), t.new_empty(rows, groups, 1, dtype=torch.bfloat16)


# ---- in eager mode alone: a compiler fuses the reference with its neighbours ----

_ROW = 8192  # the most elements of a row that one program loads


def _unfused(t: Tensor, dtype: torch.dtype | None = None) -> Any:
    """The kernels if they support t in eager mode, else None; ``dtype`` is that of the values if t holds codes."""
    return autograd.kernels_for(t.device) if is_eager(t) and runs(t.device, dtype or t.dtype) else None


def _nothing() -> None:
    """Fallback of a kernel that does not compile: the caller then uses the reference."""


def restored(form: str, kept: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Unpack what `keep` returned.

    Args:
        form: a format of `formats.GROUPED`.
        kept: codes and scales.
        shape: of the result.
        dtype: of the result.

    Returns:
        The dequantized tensor.
    """
    kernels, spec, columns = _unfused(kept[0], dtype), GROUPED[form], shape[-1]
    if kernels is None or columns > _ROW or not _has_kernel(form, columns):
        return restore(spec, kept, shape, dtype)
    rows: Tensor = kernels.restore_rows(
        *kept, spec.bits, dtype, lambda: spec.restore(kept, shape, dtype).reshape(-1, columns)
    )
    return rows.view(tuple(shape))


def keep_four(tensors: Sequence[Tensor], forms: tuple[str, str]) -> list[Tensor]:
    """Pack q, k, v and the output of attention.

    Args:
        tensors: four tensors (B, T, H, D).
        forms: the format of the first two, and that of the others.

    Returns:
        Codes and scales of each, in order.
    """

    def one_by_one() -> list[Tensor]:
        return [part for place, t in enumerate(tensors) for part in keep(t, forms[place // 2])]

    kernels = _unfused(tensors[0])
    bits = None if kernels is None else _in_fours(forms, tensors[0].shape[-1])
    if bits is None or not all(map(kernels.lies_in_rows, tensors)):
        return one_by_one()
    found: list[Tensor] = kernels.keep_four(tensors, group_size(tensors[0].shape[-1]), bits, one_by_one)
    return found


def restored_four(
    forms: tuple[str, str], kept: Sequence[Tensor], shapes: Sequence[Sequence[int]], dtype: torch.dtype
) -> list[Tensor]:
    """Unpack what `keep_four` returned.

    Args:
        forms: as for `keep_four`.
        kept: codes and scales of all four tensors, or of the first three.
        shapes: of the results.
        dtype: of the results.

    Returns:
        The dequantized tensors.
    """

    def one_by_one() -> list[Tensor]:
        return [restored(forms[n // 2], kept[2 * n : 2 * n + 2], shape, dtype) for n, shape in enumerate(shapes)]

    kernels = _unfused(kept[0], dtype)
    bits = None if kernels is None else _in_fours(forms, shapes[0][-1])
    if bits is None:
        return one_by_one()
    found: list[Tensor] = kernels.restore_four(kept, bits, dtype, one_by_one)
    return [t.view(tuple(shape)) for t, shape in zip(found, shapes, strict=True)]


@cache
def _in_fours(forms: tuple[str, str], columns: int) -> tuple[int, int] | None:
    """Bits of both formats; None if one kernel cannot pack both, with groups of one size."""
    specs = [GROUPED[form] for form in forms]
    if any(spec.whole or not _has_kernel(form, columns) for form, spec in zip(forms, specs, strict=True)):
        return None
    return specs[0].bits, specs[1].bits


def keep_normal(
    x: Tensor, mean: Tensor | None, r: Tensor, kind: str, dims: int, form: str, definition: Callable[[], Tensor]
) -> tuple[Tensor, Tensor]:
    """Pack the normalized input of a norm, x̂ = (x − μ) r, in groups along its channels.

    Args:
        x: the input of the norm.
        mean: μ, or None for RMS norms.
        r: 1/σ.
        kind: of `functions.Norm`.
        dims: of `functions.Norm`.
        form: a format of `formats.GROUPED`.
        definition: computes x̂ with channels last: the reference.

    Returns:
        Codes and scales.
    """

    def defined() -> tuple[Tensor, Tensor]:
        return GROUPED[form].keep(definition())

    kernels, by_row = _unfused(x), kind != "batch"
    if kernels is None or form != FORMATS["norm"] or kind == "group":
        return defined()
    ordered = x if by_row else x.movedim(1, -1)
    columns = ordered.shape[-1]
    if (by_row and dims != 1) or columns % 4 or columns > _ROW or not ordered.is_contiguous():
        return defined()
    found: tuple[Tensor, Tensor] = kernels.keep_normal(
        ordered.view(-1, columns), None if mean is None else mean.reshape(-1), r.reshape(-1), by_row, defined
    )
    return found


def row_norm_gradient(
    g: Tensor,
    kept: Sequence[Tensor],
    r: Tensor,
    w: Tensor | None,
    dtype: torch.dtype,
    kind: str,
    dims: int,
    form: str,
) -> tuple[Tensor, Tensor] | None:
    """Gradients of layer and RMS norm by one kernel.

    Args:
        g: gradient of the result, (..., C).
        kept: codes and scales of x̂.
        r: 1/σ per row.
        w: γ, or None.
        dtype: of g_x.
        kind: of `functions.Norm`.
        dims: of `functions.Norm`.
        form: the format of x̂.

    Returns:
        g_x, and [Σ g, Σ g x̂] over rows, (2, C); None if the kernel does not support the call.
    """
    kernels, columns = _unfused(g), g.shape[-1]
    if kernels is None or kind not in ("layer", "rms", "rms_cast") or dims != 1 or columns % 4 or columns > _CHANNELS:
        return None
    if form != FORMATS["norm"] or dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return None
    lines = g.contiguous().view(-1, columns)
    found = kernels.row_norm_gradient(lines, *kept, r.reshape(-1), w, dtype, kind == "layer", _nothing)
    return None if found is None else (found[0].view(g.shape), found[1])


def channel_norm_gradient(
    g: Tensor, kept: Sequence[Tensor], r: Tensor, w: Tensor | None, form: str
) -> tuple[Tensor, Tensor] | None:
    """`row_norm_gradient` for batch norm of a channels-last image; None if the kernel does not support the call."""
    if _unfused(g) is None or form != FORMATS["norm"] or g.dim() != 4 or not serves_norm(g):
        return None
    g_x, sums, _ = _on(g, "norm_gradient")(g, *kept, g.new_empty(0, dtype=torch.uint8), r.reshape(-1), w, "", False)
    return g_x, sums


def slope_gradient(g: Tensor, kept: Sequence[Tensor], levels: Levels | Grouped, factor: float) -> Tensor | None:
    """g f'(x) from the 4-bit derivative by one kernel; None if it does not support the call."""
    kernels, columns = _unfused(g), g.shape[-1] if g.dim() else 1
    if kernels is None or not isinstance(levels, Levels) or levels.bits != 4 or columns % 2 or not g.is_contiguous():
        return None
    found = kernels.slope_gradient(g.view(-1, columns), *kept, (levels.first, levels.per_one), factor, _nothing)
    return None if found is None else found.view(g.shape)


_GATES = ("relu", "relu6")  # functions with a 1-bit derivative that the kernels support


def open_bits(t: Tensor, name: str) -> tuple[Tensor, Tensor] | None:
    """f(t) and its derivative in 1 bit per element by one kernel; None if it does not support the call."""
    kernels = _unfused(t)
    if kernels is None or name not in _GATES or t.numel() % 8 or not t.is_contiguous():
        return None
    found: tuple[Tensor, Tensor] | None = kernels.open_bits(t, name, _nothing)
    return found


def bits_gradient(g: Tensor, bits: Tensor, name: str) -> Tensor | None:
    """g where the bits are set, else 0, by one kernel; None if unsupported, or under double backward."""
    kernels = None if torch.is_grad_enabled() else _unfused(g)
    if kernels is None or name not in _GATES or g.numel() % 8 or not g.is_contiguous():
        return None
    found: Tensor | None = kernels.bits_gradient(g, bits, _nothing)
    return found


# ---- an activation function and its derivative ----


def activate(t: Tensor, name: str) -> tuple[Tensor, Tensor] | None:
    """f(t) and its 4-bit derivative by one kernel; None if it does not support the call."""
    if not runs(t.device, t.dtype) or name not in FUNCTIONS or t.shape[-1] % 2 or not t.is_contiguous():
        return None
    return None if _levels(name) is None else _on(t, "activate")(t, name)  # type: ignore[no-any-return]


def _activate(t: Tensor, name: str) -> tuple[Tensor, Tensor]:
    kind, levels, kernels = ACTIVATIONS[name], _levels(name), autograd.kernels_for(t.device)
    assert kind.levels is not None
    assert levels is not None
    spec = kind.levels

    def definition() -> tuple[Tensor, Tensor]:
        return kind.f(t), spec.keep(t, lambda piece: kind.slope(wide(piece)))[0]

    if kernels is None:
        return definition()
    y, marks = kernels.activate(t.view(-1, t.shape[-1]), name, levels, definition)
    return y.view(t.shape), marks


def _activate_fake(t: Tensor, name: str) -> tuple[Tensor, Tensor]:
    columns = t.shape[-1]
    return torch.empty_like(t), t.new_empty(t.numel() // columns, columns // 2, dtype=torch.uint8)


# ---- a layer's input from shared codes ----


def whole(recipe: str, tensors: Sequence[Tensor | None], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`rematerialize.make` for a consumer that reads the tensor from memory: a product, a convolution, a kernel.

    Args:
        recipe: of `rematerialize`.
        tensors: what the recipe uses.
        shape: of the result.
        dtype: of the result.

    Returns:
        The dequantized tensor.
    """
    first = tensors[0]
    # γ and β of a norm over several axes are a matrix.
    in_a_row = all(t is None or t.dim() != 2 for t in tensors)
    if first is None or not in_a_row or not runs(first.device, dtype) or _factors(recipe) is None:
        return make(recipe, tensors, shape, dtype)
    run = _on(first, "restore_codes")
    if run is _restore_codes:
        return _restore_codes(tensors, recipe, shape, dtype)
    with in_backward():
        found: Tensor = run(list(tensors), recipe, list(shape), dtype)
        return found


@cache
def _factors(recipe: str) -> tuple[tuple[bool, str], ...] | None:
    """(whether there are γ and β, f) of one factor or of two with one layout; None if no kernel supports the recipe."""
    parts = parsed(recipe)
    found = [_factor(part) for part in (parts[1:] if parts[0] == "product" else [parts])]
    factors = [factor for factor in found if factor is not None]
    if len(factors) < len(found) or len({tuple(packing) for packing, _, _ in factors}) > 1:
        return None
    return tuple((normed, name) for _, normed, name in factors)


def _factor(parts: Sequence[Any]) -> tuple[Sequence[Any], bool, str] | None:
    """(form and columns, whether there are γ and β, f) of a recipe's factor; None if no kernel supports it."""
    name = ""
    if parts[0] == "of":
        _, name, parts = parts
    normed = parts[0] == "norm"
    if normed:
        parts = parts[1]
    # The kernel has a table for f; it takes 4-bit codes, whatever their rounding.
    if parts[0] not in ("values", "output") or name not in FUNCTIONS:
        return None
    spec, columns = GROUPED[parts[1]], parts[2]
    if spec.bits != 4 or columns % group_size(columns, spec.whole):
        return None
    return parts[1:], normed, name


def _restore_codes(given: Sequence[Tensor | None], recipe: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    first = given[0]
    assert first is not None
    kernels = autograd.kernels_for(first.device)
    if kernels is None:
        return _empty(first, recipe, shape, dtype).copy_(make(recipe, given, shape, dtype))

    def definition() -> Tensor:
        t = make(recipe, given, shape, dtype)
        return (t.movedim(1, -1) if is_image(recipe) else t).contiguous()

    factors: list[tuple[Any, ...]] = []
    at = 0
    for normed, name in _factors(recipe) or ():
        mine = given[at : at + 4] if normed else (*given[at : at + 2], None, None)
        factors.append((*mine, normed, name))
        at += 4 if normed else 2
    rows = kernels.restore_codes(factors, dtype, definition)
    return rows.view(_last_shape(shape)).movedim(-1, 1) if is_image(recipe) else rows.view(shape)


def _last_shape(shape: Sequence[int]) -> list[int]:
    return [shape[0], *shape[2:], shape[1]]


def _empty(like: Tensor, recipe: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    if is_image(recipe):
        return like.new_empty(_last_shape(shape), dtype=dtype).movedim(-1, 1)
    return like.new_empty(tuple(shape), dtype=dtype)


def _restore_codes_fake(given: list[Tensor | None], recipe: str, shape: list[int], dtype: torch.dtype) -> Tensor:
    first = given[0]
    assert first is not None
    return _empty(first, recipe, shape, dtype)


# ---- batch norm, with a shortcut added to its result and an activation function ----


def serves_norm(x: Tensor, name: str = "") -> bool:
    """Whether the kernels support batch norm of x with the activation function of that name ("" for none)."""
    in_rows = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    channels = x.shape[1]
    return in_rows and name in FUNCTIONS and channels % 16 == 0 and channels <= _CHANNELS and runs(x.device, x.dtype)


def _levels(name: str) -> tuple[int, int] | None:
    """(lowest level, levels per unit) of f's 4-bit derivative; None for a derivative of 1 bit."""
    levels = ACTIVATIONS[name].levels if name else None
    return None if levels is None else (levels.first, levels.per_one)


def _rows(t: Tensor) -> Tensor:
    """(N, C, H, W) as (N H W, C), contiguous: what is made of it is then in channels-last."""
    return t.permute(0, 2, 3, 1).reshape(-1, t.shape[1]).contiguous()


def _image(rows: Tensor, like: Tensor) -> Tensor:
    return rows.view(_last_shape(like.shape)).permute(0, 3, 1, 2)


Four = tuple[Tensor, Tensor, Tensor, Tensor]


def _normalize(
    x: Tensor, mean: Tensor, r: Tensor, w: Tensor | None, b: Tensor | None, shortcut: Tensor | None, name: str
) -> Four:
    lines = None if shortcut is None else _rows(shortcut)

    def definition() -> Four:
        normal = (wide(_rows(x)) - mean) * r
        y = normal if w is None else normal * wide(w)
        y = (y if b is None else y + wide(b)).to(x.dtype)
        y = y if lines is None else y + lines
        codes, scale = GROUPED[FORMATS["norm"]].keep(normal)
        kind = ACTIVATIONS[name] if name else None
        if kind is None:
            return y, codes, scale, x.new_empty(len(y), 0, dtype=torch.uint8)
        if kind.levels is None:
            (marks,) = _BITS.keep(kind.slope(y))
        else:
            (marks,) = kind.levels.keep(y, lambda piece: kind.slope(wide(piece)))
        return kind.f(y), codes, scale, marks

    kernels = autograd.kernels_for(x.device)
    if kernels is None:
        y, *kept = definition()
    else:
        y, *kept = kernels.normalize(_rows(x), mean, r, w, b, lines, name, _levels(name), definition)
    return _image(y, x), kept[0], kept[1], kept[2]


def _normalize_fake(
    x: Tensor, mean: Tensor, r: Tensor, w: Tensor | None, b: Tensor | None, shortcut: Tensor | None, name: str
) -> Four:
    channels = x.shape[1]
    rows = x.numel() // channels
    marks = 0 if not name else channels // 8 if _levels(name) is None else channels // 2
    return (
        torch.empty_like(x, memory_format=torch.channels_last),
        x.new_empty(rows, 1, channels // 2, dtype=torch.uint8),
        x.new_empty(rows, 1, 1, dtype=torch.bfloat16),
        x.new_empty(rows, marks, dtype=torch.uint8),
    )


def _norm_gradient(
    g: Tensor, codes: Tensor, scale: Tensor, marks: Tensor, r: Tensor, w: Tensor | None, name: str, passes_on: bool
) -> tuple[Tensor, Tensor, Tensor]:
    lines = _rows(g)

    def definition() -> tuple[Tensor, Tensor, Tensor]:
        kind, behind = ACTIVATIONS[name] if name else None, lines
        if kind is not None and kind.levels is None:
            behind = torch.where(_BITS.restore((marks,), lines.shape), lines, 0.0)
        elif kind is not None and kind.levels is not None:
            behind = lines * kind.levels.restore((marks,), lines.shape, lines.dtype)
        lifted = wide(behind)
        normal = GROUPED[FORMATS["norm"]].restore((codes, scale), lines.shape, lifted.dtype)
        sums = torch.stack([lifted.sum(0), (lifted * normal).sum(0)])
        factor = r if w is None else r * wide(w)
        g_x = ((lifted - sums[0] / len(lines) - normal * (sums[1] / len(lines))) * factor).to(g.dtype)
        return g_x, sums, behind if passes_on else g.new_empty(0)

    kernels = autograd.kernels_for(g.device)
    if kernels is None:
        g_x, sums, behind = definition()
    else:
        g_x, sums, behind = kernels.norm_gradient(
            lines, codes, scale, marks, r, w, name, _levels(name), passes_on, definition
        )
    if passes_on:
        behind = _image(behind if behind.data_ptr() != lines.data_ptr() else behind.clone(), g)
    return _image(g_x, g), sums, behind


def _norm_gradient_fake(
    g: Tensor, codes: Tensor, scale: Tensor, marks: Tensor, r: Tensor, w: Tensor | None, name: str, passes_on: bool
) -> tuple[Tensor, Tensor, Tensor]:
    g_x = torch.empty_like(g, memory_format=torch.channels_last)
    return g_x, r.new_empty(2, g.shape[1]), torch.empty_like(g_x) if passes_on else g.new_empty(0)


for _schema, _run, _fake in (
    ("keep_codes(Tensor t, str form) -> (Tensor, Tensor)", _keep_codes, _keep_codes_fake),
    ("activate(Tensor t, str name) -> (Tensor, Tensor)", _activate, _activate_fake),
    (
        "restore_codes(Tensor?[] given, str recipe, int[] shape, ScalarType dtype) -> Tensor",
        _restore_codes,
        _restore_codes_fake,
    ),
    (
        "normalize(Tensor x, Tensor mean, Tensor r, Tensor? w, Tensor? b, Tensor? shortcut, str name) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
        _normalize,
        _normalize_fake,
    ),
    (
        "norm_gradient(Tensor g, Tensor codes, Tensor scale, Tensor marks, Tensor r, Tensor? w, str name, "
        "bool passes_on) -> (Tensor, Tensor, Tensor)",
        _norm_gradient,
        _norm_gradient_fake,
    ),
):
    _name = _schema.partition("(")[0]
    _IMPLEMENTATIONS[_name] = _run
    _lib.define(_schema)
    _lib.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hotrain::{_name}", _fake, lib=_lib)
