"""Rematerialization: recipes by which backward computes a layer's input from the producer's quantized tensors.

A recipe is JSON, a string so that it can be an operator's argument. It takes its tensors from a list, in order.

    ["values", form, C]           codes and scales of rows of C elements
    ["values", form, C, "image"]  the same of (N, C, H, W), rows along its channels
    ["output", form, C]           attention's result, whose codes are saved for the reader alone
    ["heads", form, C]            codes of (B, T, H, C), for attention's (B, H, T, C): its transpose alone can be made
    ["norm", values, cast]        values as above, then γ and β or None: γ x̂ + β; cast: x̂ is rounded first
    ["of", name, inner]           an activation's result
    ["product", inner, inner]     a product by element
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import backward
from ..saved import Bits, Grouped, Levels, group_size
from .formats import GROUPED
from .slopes import ACTIVATIONS

_TAG = "partitioner_tag"  # of torch._functorch.partitioners


@contextlib.contextmanager
def in_backward() -> Iterator[None]:
    """Context whose traced nodes stay in backward; else a partitioner may compute them in forward and save them."""
    meta = torch.fx.traceback.current_meta if torch.fx.traceback.has_preserved_node_meta() else {}
    before = meta.get(_TAG)
    meta[_TAG] = "must_be_in_backward"
    try:
        yield
    finally:
        if before is None:
            meta.pop(_TAG, None)
        else:
            meta[_TAG] = before


def restore(
    form: Grouped | Levels | Bits, kept: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype = torch.bool
) -> Tensor:
    """Unpack in backward what forward packed.

    A compiler chooses what to save between forward and backward, and at times would save a full tensor: this result, or
    one from which several codes can be recomputed. So the nodes are marked as backward's. The codes pass through an
    operator of `prims`: the partitioner then takes them as stored in memory, while others count twice.

    Args:
        form: the format.
        kept: what ``form.keep`` returned.
        shape: of the result.
        dtype: of the result; booleans for `Bits`.

    Returns:
        The dequantized tensor.
    """
    if not torch.fx.traceback.has_preserved_node_meta():
        return form.restore(kept, shape, dtype)
    with in_backward():
        codes = torch.bitwise_not(torch.ops.prims.bitwise_not.default(kept[0]))
        return form.restore((codes, *kept[1:]), shape, dtype)


def wide(t: Tensor) -> Tensor:
    """t in float32, or in float64 if it is."""
    return t.to(backward.wide(t.dtype))


# ---- recipes ----

_IMAGE, _SAVED = ', "image"', ', "saved"'


def values(form: str, columns: int, image: bool = False) -> str:
    """The recipe of codes and scales of `GROUPED[form]`, of rows of that many elements."""
    return f'["values", "{form}", {operator.index(columns)}{_IMAGE if image else ""}]'


def normed(inner: str, cast: bool) -> str:
    """The recipe of a norm's result; ``inner`` is that of x̂, ``cast`` whether x̂ is rounded before γ."""
    return f'["norm", {inner}, {"true" if cast else "false"}]'


def of(name: str, inner: str) -> str:
    """The recipe of an activation's result."""
    return f'["of", "{name}", {inner}]'


def product(a: str, b: str) -> str:
    """The recipe of a product by element."""
    return f'["product", {a}, {b}]'


def heads(form: str, columns: int, saved: bool) -> str:
    """The recipe of attention's result (B, H, T, D), with codes of (B, T, H, D): its transpose alone can be made.

    Args:
        form: a name in `GROUPED`.
        columns: D.
        saved: whether attention's backward reads these codes too; else they are there for the layer behind alone.
    """
    return f'["heads", "{form}", {operator.index(columns)}{_SAVED if saved else ""}]'


def is_by_heads(recipe: str) -> bool:
    """Whether a recipe is of `heads`."""
    return recipe.startswith('["heads"')


def by_tokens(recipe: str) -> str:
    """The recipe of the transpose (B, T, H, D), from that of `heads`."""
    kind = "values" if _SAVED in recipe else "output"
    return recipe.replace("heads", kind, 1).replace(_SAVED, "", 1)


def is_in_order(recipe: str) -> bool:
    """Whether elements are in the order of the tensor, so that its views of any shape can be made."""
    return not is_by_heads(recipe) and not is_image(recipe)


def is_image(recipe: str) -> bool:
    """Whether a recipe is of an image, with rows along its channels."""
    return _IMAGE in recipe


def describe(recipe: str) -> str:
    """A recipe in words, for the report: which saved tensor is shared, and its format."""
    return _described(parsed(recipe))


def _described(recipe: Any) -> str:
    kind, *rest = recipe
    if kind == "output":
        return f"attention's output ({rest[0]})"
    if kind in ("values", "heads"):
        return f"operator before ({rest[0]})"
    if kind == "norm":
        return f"norm ({rest[0][1]})"
    if kind == "of":
        return (
            f"{rest[0]} of its input ({rest[1][1]})"
            if rest[1][0] == "values"
            else f"{rest[0]} of {_described(rest[1])}"
        )
    return " × ".join(map(_described, rest))


def saved_by_reader(recipe: str, elements: int) -> list[tuple[str, int]]:
    """(dtype, bytes) of the tensors of a recipe that nobody saves but the layer that reads it.

    Args:
        recipe: of a layer's input, "" where it is its own.
        elements: of the tensor that is made.
    """
    if not recipe.startswith('["output"'):
        return []
    _, form, columns = parsed(recipe)
    spec = GROUPED[form]
    size = group_size(columns, spec.whole)
    groups = elements // columns * -(-columns // size)
    return [("uint8", groups * size * spec.bits // 8), ("bfloat16", groups * torch.bfloat16.itemsize)]


def is_recipe(form: str) -> bool:
    """Whether a form is a recipe, not the name of a format."""
    return form.startswith("[")


@functools.lru_cache(maxsize=4096)
def parsed(recipe: str) -> Any:
    """A recipe as nested lists."""
    return json.loads(recipe)


def make(recipe: str, tensors: Sequence[Tensor | None], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Compute the tensor of a recipe.

    Args:
        recipe: the recipe.
        tensors: what it takes, in order.
        shape: of the result; any view of the tensor if `is_in_order`.
        dtype: of the result.

    Returns:
        The dequantized tensor.
    """
    return _made(parsed(recipe), iter(tensors), shape, dtype)


def _made(recipe: Any, supply: Iterator[Tensor | None], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    kind, *rest = recipe
    if kind in ("values", "output"):
        return _values(rest, supply, shape, dtype)
    if kind == "of":
        return ACTIVATIONS[rest[0]].f(_made(rest[1], supply, shape, dtype))
    if kind == "product":
        return _made(rest[0], supply, shape, dtype) * _made(rest[1], supply, shape, dtype)
    (_, form, columns, *image), cast = rest
    normal = _values((form, columns, *image), supply, shape if image else (-1, columns), backward.wide(dtype))
    w, b = next(supply), next(supply)
    if cast:
        normal = wide(normal.to(dtype))
    along = (1, -1, *[1] * (len(shape) - 2)) if image else (-1,)
    shaped = b if w is None else w
    if shaped is not None and shaped.dim() > 1:
        normal, along = normal.view(-1, *shaped.shape), tuple(shaped.shape)
    if w is not None:
        normal = normal * wide(w).view(along)
    if b is not None:
        normal = normal + wide(b).view(along)
    return normal.to(dtype).reshape(tuple(shape))


def _values(parts: Sequence[Any], supply: Iterator[Tensor | None], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    form, columns, *image = parts
    kept = next(supply), next(supply)
    if image:
        n, c, *rest = shape
        return restore(GROUPED[form], kept, (n, *rest, c), dtype).movedim(-1, 1)  # type: ignore[arg-type]
    return restore(GROUPED[form], kept, (-1, columns), dtype).reshape(tuple(shape))  # type: ignore[arg-type]
