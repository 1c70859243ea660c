"""Merges the operators of converted layers with those beside them whose codes they read.

What backward makes of an operator's codes for a layer, and packs again as the layer does, is not made. Nor is the
gradient of an activation function, where the gradients of a layer are all that reads it:

    keep(restore_codes(codes))  ──►   keep_from_codes(codes)
    linear_gradients(activation_gradient(g, codes))  ──►   products_of_codes(grad_codes_behind(g, codes))
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from ..kernels import reads_codes_alone
from ..layer import Config
from . import codes
from .formats import is_static
from .merging import Merging, readers_of, unviewed
from .nodes import CASTS, is_dense

_aten = torch.ops.aten


class Behind(Merging):
    """The gradients of a layer in front of an activation function, whose gradient nothing else reads.

    In two operators, so that the memory of what the first reads is free when the second runs.
    """

    def merge(self) -> None:
        gradient = before_activation(self.node)
        if gradient is None:
            return
        args: Any = self.node.args
        g_y, w, packed, side, key, history, config, source, w_dtype, columns, needs = args
        *lead, outputs = g_y.meta["val"].shape
        g, *of_x, _ = gradient.args
        g = self.call(self.node, _aten.view.default, g, [*lead, outputs])
        ours, dtypes = torch.ops.hotrain, (g_y.meta["val"].dtype, w_dtype)
        made = self.call(self.node, ours.grad_codes_behind.default, g, *of_x, side, key, history, config, needs)
        *parts, sums = (self.call(self.node, operator.getitem, made, place) for place in range(5))
        bias = self.result(2)
        if bias is not None:  # is there already: no operator may return what it is given
            if bias.meta["val"].dtype != sums.meta["val"].dtype:
                sums = self.call(self.node, CASTS[0], sums, bias.meta["val"].dtype)
            bias.replace_all_uses_with(sums)
            self.graph.erase_node(bias)
        rest = (w, packed, side, key, history, config, source, lead, *dtypes, outputs, columns, [*needs[:2], False])
        self.again(self.node, (parts, *rest), ours.products_of_codes.default)


def before_activation(gradients: Node) -> Node | None:
    """The gradient of an activation function that a layer's gradients alone read, and can read as codes; else None."""
    g_y: Any = gradients.args[0]
    g_x = unviewed(g_y)
    source: Any = g_x.args[0] if g_x.target is operator.getitem and g_x.args[1] == 0 else None
    if source is None or source.target is not torch.ops.hotrain.activation_gradient.default or len(source.users) > 1:
        return None
    (g, _, _, name, form, _), alone = source.args, readers_of(g_x, ()) == [gradients]
    args: Any = gradients.args
    config, needs = Config.of(args[6]), args[10]
    if not (config.kernels and reads_codes_alone(config.method, needs)):
        return None
    dense, columns = all(map(is_dense, (g, g_x, g_y))), {t.meta["val"].shape[-1] for t in (g, g_y)}
    return source if alone and dense and len(columns) == 1 and codes.has_sloped_rows(name, form, *columns) else None


class Keep(Merging):
    """A layer's codes, of a tensor that is made of codes for nothing but such layers: made of them at once."""

    def merge(self) -> None:
        x: Any = self.node.args[0]
        made = unviewed(x)
        if made.target is not torch.ops.hotrain.restore_codes.default or not is_static(x.meta["val"]):
            return
        origin: Any = made.args
        given, recipe, _, dtype = origin
        shape = list(x.meta["val"].shape)
        in_order = all(t.meta["val"].is_contiguous() for t in (x, made))
        alone = all(user.target is torch.ops.hotrain.keep.default for user in readers_of(made, ()))
        if in_order and alone and codes.has_coded_rows(recipe, shape[-1]):
            args = (given, recipe, shape, dtype, *self.node.args[1:])
            self.again(self.node, args, torch.ops.hotrain.keep_from_codes.default)
