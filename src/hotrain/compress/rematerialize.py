"""Rematerialization: recipes by which backward computes a layer's input from the producer's quantized tensors.

A recipe is passed as its word, a string, since it is an operator's argument: its kind and fields, each followed by a
comma, in prefix order (``norm,values,int4 nearest,96,``). The functions `values`, `normed`, `of`, `product` and `heads`
write words, `parsed` reads one.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..quantize.integer import wide
from ..saved import Bits, Grouped, Levels
from .formats import GROUPED, is_static, restored
from .launcher import opaque
from .slopes import ACTIVATIONS

_TAG = "partitioner_tag"  # of torch._functorch.partitioners
CUSTOM = "custom"  # metadata of nodes that tracers copy
OPERATOR = "hotrain_operator"  # there: the function whose derivative reads a place of `in_place_of`
ATTENTION = "hotrain_attention"  # there: a number that an attention's forward and backward have in common
PACKING = "hotrain_packing"  # there, of what packs: whether backward may do so again, of a tensor that was rounded
PACKED = 0  # the number of a tensor that a formula packs

_sources = itertools.count(PACKED + 1)


@opaque("marked(Tensor t, int number) -> Tensor", lambda t, _: t.new_empty_strided(t.shape, t.stride()), inlined=False)
def _marked(t: Tensor, number: int) -> Tensor:
    """t, by a node that `choosing` finds and removes; an alias would be removed by Inductor before. A custom operator
    must not return its argument: where another partitioner runs, this is a copy."""
    return t.new_empty_strided(t.shape, t.stride()).copy_(t)


def _marking(key: str, change: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """Context whose traced nodes have `change` of what else stands there in their metadata."""
    traces = torch.fx.traceback.has_preserved_node_meta()
    return _changed(torch.fx.traceback.current_meta, key, change) if traces else contextlib.nullcontext()


@contextlib.contextmanager
def _changed(meta: dict[str, Any], key: str, change: Callable[[Any], Any]) -> Iterator[None]:
    before = meta.get(key)
    meta[key] = change(before)
    try:
        yield
    finally:
        if before is None:
            meta.pop(key, None)
        else:
            meta[key] = before


def stays_in_backward() -> AbstractContextManager[None]:
    """Context whose traced nodes stay in backward; else a partitioner may compute them in forward and save them."""
    return _marking(_TAG, lambda _: "must_be_in_backward")


def restore(
    form: Grouped | Levels | Bits, kept: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype = torch.bool
) -> Tensor:
    """Unpack in backward what forward packed.

    A compiler chooses what to save between forward and backward, and at times would save a full tensor: this result, or
    one from which several codes can be recomputed. So the nodes are marked as backward's. The codes pass through an
    operator of `prims`: the partitioner then takes them as stored in memory, while others count twice.

    ``kept`` is what ``form.keep`` returned; the result has the shape and dtype, booleans for `Bits`.
    """
    if not torch.fx.traceback.has_preserved_node_meta():
        return form.restore(kept, shape, dtype)
    with stays_in_backward():
        codes = torch.bitwise_not(torch.ops.prims.bitwise_not.default(kept[0]))
        return restored(form, (codes, *kept[1:]), shape, dtype)


def keep(form: Grouped, t: Tensor, least: float | None = None) -> tuple[Tensor, Tensor]:
    """Pack in forward, by the formula, what `restore` unpacks in backward."""
    if not torch.fx.traceback.has_preserved_node_meta():
        return form.keep(t, least)
    source = torch.ops.hotrain.marked(t, PACKED) if _is_marked(t) else t
    with packing():
        return form.keep(source, least)


def packing(again: bool = True) -> AbstractContextManager[None]:
    """Context whose traced nodes pack; `again`: whether backward may do so of a tensor that was rounded.

    The partitioner repeats in backward what can be made of a tensor that is saved anyway. A rounded one has nearly the
    same codes, but not the same signs.
    """
    return noted(PACKING, again)


def repeats(node: Node) -> bool | None:
    """Whether a node of `packing` may do so again, of a tensor that was rounded; None for others."""
    found: bool | None = (node.meta.get(CUSTOM) or {}).get(PACKING)
    return found


def source(t: Tensor) -> tuple[Tensor, int | None]:
    """A tensor that is saved approximately, and its number for `in_place_of`; None in eager mode."""
    if not torch.fx.traceback.has_preserved_node_meta() or not _is_marked(t):
        return t, None
    number = next(_sources)
    return in_place_of(number, t), number


def _is_marked(t: Tensor) -> bool:
    """Whether a copy, as tracers take the marked tensor, can have t's strides: each element has its place in memory."""
    if not is_static(t):
        return False
    span = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1 and stride < span:
            return False
        span += (size - 1) * stride
    return True


def in_place_of(number: int | None, t: Tensor) -> Tensor:
    """What backward reads in the place of a `source`, of its shape and dtype: `choosing` may put the source there."""
    if number is None or not _is_marked(t):
        return t
    return torch.ops.hotrain.marked(t, number)  # type: ignore[no-any-return]


def noted(name: str, value: Any) -> AbstractContextManager[None]:
    """Context whose traced nodes have this in their metadata, under "custom"."""
    return _marking(CUSTOM, lambda before: {**(before or {}), name: value})


# ---- recipes; `made` computes the tensor, and takes what it reads from `supply`, in order ----

Supply = Iterator[Tensor | None]


@dataclass(frozen=True)
class Codes:
    """Codes and scales of rows.

    Attributes:
        kind: ``"values"``; ``"image"``, of (N, C, H, W), with rows along its channels; ``"heads"``, of (B, T, H, C),
            for attention's result (B, H, T, C), whose transpose alone can be made. ``"output"`` and ``"output heads"``
            are attention's result (B, T, H, C) and (B, H, T, C) where the codes are saved for the reader alone.
        form: a name in `GROUPED`.
        columns: C.
    """

    kind: str
    form: str
    columns: int

    def made(self, supply: Supply, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        codes, scales = next(supply), next(supply)
        assert codes is not None
        assert scales is not None
        rows = (shape[0], *shape[2:], shape[1]) if self.kind == "image" else (-1, self.columns)
        t = restore(GROUPED[self.form], (codes, scales), rows, dtype)
        return t.movedim(-1, 1) if self.kind == "image" else t.reshape(tuple(shape))

    def __str__(self) -> str:
        return f"attention's output ({self.form})" if self.kind == "output" else f"operator before ({self.form})"


@dataclass(frozen=True)
class Normed:
    """A norm's result, γ x̂ + β, of the codes of x̂, γ or None, and β or None.

    Attributes:
        inner: x̂.
        cast: whether x̂ is rounded to the dtype of the result before γ.
    """

    inner: Codes
    cast: bool

    def made(self, supply: Supply, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        image, accurate = self.inner.kind == "image", torch.promote_types(dtype, torch.float32)
        normal = self.inner.made(supply, shape if image else (-1, self.inner.columns), accurate)
        w, b = next(supply), next(supply)
        if self.cast:
            normal = wide(normal.to(dtype))
        if image:
            w, b = (None if t is None else t.view(1, -1, *[1] * (len(shape) - 2)) for t in (w, b))
        elif (of_axes := next((t for t in (w, b) if t is not None and t.dim() > 1), None)) is not None:
            normal = normal.view(-1, *of_axes.shape)
        normal = normal if w is None else normal * w
        normal = normal if b is None else normal + b
        return normal.to(dtype).reshape(tuple(shape))

    def __str__(self) -> str:
        return f"norm ({self.inner.form})"


@dataclass(frozen=True)
class Activated:
    """An activation's result.

    Attributes:
        name: in `ACTIVATIONS`.
        inner: its input.
    """

    name: str
    inner: Recipe

    def made(self, supply: Supply, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return ACTIVATIONS[self.name].f(self.inner.made(supply, shape, dtype))

    def __str__(self) -> str:
        own = isinstance(self.inner, Codes) and self.inner.kind in ("values", "image")
        return f"{self.name} of its input ({self.inner.form})" if own else f"{self.name} of {self.inner}"  # type: ignore[union-attr]


@dataclass(frozen=True)
class Product:
    """A product by element."""

    a: Recipe
    b: Recipe

    def made(self, supply: Supply, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.a.made(supply, shape, dtype) * self.b.made(supply, shape, dtype)

    def __str__(self) -> str:
        return f"{self.a} × {self.b}"


Recipe = Codes | Normed | Activated | Product


# ---- words ----


def values(form: str, shape: Sequence[int], image: bool = False) -> str:
    """The word of `Codes` of a tensor of that shape along its last axis, or of an image along its channels."""
    return f"image,{form},{operator.index(shape[1])}," if image else f"values,{form},{operator.index(shape[-1])},"


def heads(form: str, columns: int, saved: bool) -> str:
    """The word of `Codes` of attention's result; `saved`: whether attention's backward reads these codes too."""
    return f"{'heads' if saved else 'output heads'},{form},{operator.index(columns)},"


def by_tokens(recipe: str) -> str:
    """The word of the transpose (B, T, H, D), from that of `heads`."""
    kind, _, rest = recipe.partition(",")
    return f"{'values' if kind == 'heads' else 'output'},{rest}"


def normed(form: str, shape: Sequence[int], image: bool = False, cast: bool = False) -> str:
    """The word of `Normed`, with the arguments of `values` for x̂."""
    return f"{'norm cast' if cast else 'norm'},{values(form, shape, image)}"


def of(name: str, inner: str) -> str:
    """The word of `Activated`."""
    return f"of,{name},{inner}"


def product(a: str, b: str) -> str:
    """The word of `Product`."""
    return f"product,{a}{b}"


@cache
def parsed(recipe: str) -> Recipe:
    """The recipe of a word."""
    return _read(iter(recipe.split(",")))


def _read(parts: Iterator[str]) -> Recipe:
    kind = next(parts)
    if kind == "product":
        return Product(_read(parts), _read(parts))
    if kind == "of":
        return Activated(next(parts), _read(parts))
    if kind in ("norm", "norm cast"):
        inner = _read(parts)
        assert isinstance(inner, Codes)
        return Normed(inner, kind == "norm cast")
    return Codes(kind, next(parts), int(next(parts)))


def is_recipe(form: str) -> bool:
    """Whether a form is a recipe, not the name of a format."""
    return form.endswith(",")


def is_image(recipe: str) -> bool:
    """Whether a recipe is of an image, with rows along its channels."""
    return "image," in recipe


def is_in_order(recipe: str) -> bool:
    """Whether elements are in the order of the tensor, so that its views of any shape can be made."""
    return not recipe.startswith(("heads,", "output heads,")) and not is_image(recipe)


def saved_by_reader(recipe: str, elements: int) -> list[tuple[str, int]]:
    """(dtype, bytes) of the tensors of a recipe that nobody saves but the layer that reads it.

    The recipe is "" where the layer saves its own input; `elements` are those of the tensor that is made.
    """
    codes = parsed(recipe) if recipe else None
    if not isinstance(codes, Codes) or codes.kind != "output":
        return []
    packed, scales = GROUPED[codes.form].sizes(elements // codes.columns, codes.columns)
    return [("uint8", math.prod(packed)), ("bfloat16", math.prod(scales) * torch.bfloat16.itemsize)]


def make(recipe: str, tensors: Sequence[Tensor | None], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The tensor of a recipe's word, dequantized from what the recipe takes, in order.

    The shape may be that of any view of the tensor if `is_in_order`.
    """
    return parsed(recipe).made(iter(tensors), shape, dtype)
