"""Merges the operators of converted layers with those beside them whose codes they read.

What backward makes of an operator's codes for a layer, and packs again as the layer does, is not made. Nor is the
gradient of an activation function, or one that puts those of q, k and v side by side, where the gradients of a layer
are all that reads it:

    keep(restore_codes(codes))  ──►   keep_from_codes(codes)
    linear_gradients(activation_gradient(g, codes))  ──►   products_of_codes(grad_codes_behind(g, codes))
    linear_gradients(stack(q, k, v))  ──►   products_of_codes(grad_codes_of_parts(q, k, v))
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from ..kernels import reads_codes_alone
from ..layer import Config
from . import codes
from .formats import is_static
from .merging import Merging
from .nodes import CASTS, is_dense, is_move, readers_of, same_order, source_of

_aten = torch.ops.aten
_OF_A_STACK = (_aten.permute.default, _aten.clone.default)  # by which it becomes g_y
_LEAST_OF_PART = 64  # channels that each is a multiple of: a block of the quantize kernel is within one


class Gradients(Merging):
    """The gradients of a layer whose g_y is made for them alone: of an activation function, or of q, k and v.

    In two operators, so that the memory of what the first reads is free when the second runs.
    """

    def merge(self) -> None:
        g_y: Any = self.node.args[0]
        *lead, outputs = g_y.meta["val"].shape
        gradient = before_activation(self.node)
        if gradient is not None:
            g, *of_x, _ = gradient.args
            rows = self.call(self.node, _aten.view.default, g, [*lead, outputs])
            self._of_codes(torch.ops.hotrain.grad_codes_behind.default, (rows, *of_x))
            return
        joined = parts_of(self.node)
        if joined is not None:
            sources, order = joined
            shape: list[int] = [*lead, outputs // len(sources)]
            parts: list[Node] = []
            for source in sources:
                part = source if order is None else self.call(self.node, _aten.permute.default, source, order)
                parts.append(self.call(self.node, _aten.view.default, part, shape))
            self._of_codes(torch.ops.hotrain.grad_codes_of_parts.default, (parts,))

    def _of_codes(self, operator_of_codes: Any, sources: Sequence[Any]) -> None:
        """Read g_y by an operator that makes its codes of what it is made of, and multiply these."""
        args: Any = self.node.args
        g_y, w, packed, side, key, history, config, source, w_dtype, columns, needs = args
        *lead, outputs = g_y.meta["val"].shape
        dtypes = (g_y.meta["val"].dtype, w_dtype)
        made = self.call(self.node, operator_of_codes, *sources, side, key, history, config, needs)
        *parts, sums = (self.call(self.node, operator.getitem, made, place) for place in range(5))
        bias = self.result(2)
        if bias is not None:  # is there already: no operator may return what it is given
            if bias.meta["val"].dtype != sums.meta["val"].dtype:
                sums = self.call(self.node, CASTS[0], sums, bias.meta["val"].dtype)
            bias.replace_all_uses_with(sums)
            self.graph.erase_node(bias)
        rest = (w, packed, side, key, history, config, source, lead, *dtypes, outputs, columns, [*needs[:2], False])
        self.again(self.node, (parts, *rest), torch.ops.hotrain.products_of_codes.default)


def before_activation(gradients: Node) -> Node | None:
    """The gradient of an activation function that a layer's gradients alone read, and can read as codes; else None."""
    g_y: Any = gradients.args[0]
    g_x = source_of(g_y)
    source: Any = g_x.args[0] if g_x.target is operator.getitem and g_x.args[1] == 0 else None
    if source is None or source.target is not torch.ops.hotrain.activation_gradient.default or len(source.users) > 1:
        return None
    (g, _, _, name, form, _), alone = source.args, readers_of(g_x) == [gradients]
    args: Any = gradients.args
    config, needs = Config.of(args[6]), args[10]
    if not (config.kernels and reads_codes_alone(config.method, needs)):
        return None
    dense, columns = all(map(is_dense, (g, g_x, g_y))), {t.meta["val"].shape[-1] for t in (g, g_y)}
    return source if alone and dense and len(columns) == 1 and codes.has_sloped_rows(name, form, *columns) else None


def parts_of(gradients: Node) -> tuple[list[Node], list[int] | None] | None:
    """What a layer's g_y puts side by side for its gradients alone, and the permutation of each before; else None.

    Three gradients of an operator of its own, as attention's: what a formula makes, the compiler writes side by side.
    """
    args: Any = gradients.args
    g_y, config, needs = args[0], Config.of(args[6]), args[10]
    if not (config.kernels and reads_codes_alone(config.method, needs) and is_dense(g_y)):
        return None
    columns = g_y.meta["val"].shape[-1] // 3
    joined, order = source_of(g_y), None
    if joined.target is _aten.cat.default:
        sources, beside = _arguments(joined), joined.meta["val"].shape[-1] == 3 * columns
        fits = beside and _place(joined) == joined.meta["val"].dim() - 1
    else:
        moved: Any = joined.args[0] if joined.target is _aten.clone.default else None
        stack = _stacked(moved.args[0]) if moved is not None and moved.target is _aten.permute.default else None
        if stack is None:
            return None
        sizes, order, (joined, sources, place) = moved.meta["val"].shape, list(moved.args[1]), stack
        at = order.index(place)
        fits = math.prod(sizes[at + 1 :]) == columns
        order = [axis - (axis > place) for axis in order if axis != place]
    alone = readers_of(joined, lambda node: same_order(node) or node.target in _OF_A_STACK) == [gradients]
    same = all(source.meta["val"].dtype == g_y.meta["val"].dtype for source in sources)  # `cat` would promote them
    if not (fits and alone and same and len(sources) == 3 and columns % _LEAST_OF_PART == 0):
        return None
    return (sources, order) if all(_is_part(source, order, columns) for source in sources) else None


def _stacked(node: Node) -> tuple[Node, list[Node], int] | None:
    """What puts tensors behind one another along an axis of their own, the tensors, and that axis."""
    if node.target is _aten.stack.default:
        return node, _arguments(node), _place(node)
    whole = source_of(node)  # as PyTorch decomposes it
    if whole.target is _aten.cat.default and _place(whole) == 0:
        sources = _arguments(whole)
        if list(node.meta["val"].shape) == [len(sources), *sources[0].meta["val"].shape]:
            return whole, sources, 0
    return None


def _arguments(node: Node) -> list[Node]:
    return list(node.args[0])  # type: ignore[arg-type]


def _place(node: Node) -> int:
    """The axis of a `cat` or `stack`."""
    place: Any = node.args[1] if len(node.args) > 1 else 0
    return int(place) % node.meta["val"].dim()


def _is_part(source: Node, order: list[int] | None, columns: int) -> bool:
    """Whether the memory of an operator's result, in that order of its axes, has rows of so many columns."""
    value = source.meta["val"]
    part = value if order is None else value.permute(order)
    rows = part.is_contiguous() and (order is not None or part.shape[-1] == columns)
    return rows and source_of(source, is_move).target is operator.getitem


class Keep(Merging):
    """A layer's codes, of a tensor that is made of codes for nothing but such layers: made of them at once."""

    def merge(self) -> None:
        x: Any = self.node.args[0]
        made = source_of(x)
        if made.target is not torch.ops.hotrain.restore_codes.default or not is_static(x.meta["val"]):
            return
        origin: Any = made.args
        given, recipe, _, dtype = origin
        shape = list(x.meta["val"].shape)
        in_order = all(t.meta["val"].is_contiguous() for t in (x, made))
        alone = all(user.target is torch.ops.hotrain.keep.default for user in readers_of(made))
        if in_order and alone and codes.has_coded_rows(recipe, shape[-1]):
            args = (given, recipe, shape, dtype, *self.node.args[1:])
            self.again(self.node, args, torch.ops.hotrain.keep_from_codes.default)
