"""Gradients of a compiled step written over those that they are computed from, where nothing else reads these.

At its peak a step holds such a pair beside all that forward has saved: in a ResNet two or three images, in a
transformer two hidden layers of an MLP. Inductor reuses memory so for what it compiles, not for an operator.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..kernels import written_over
from ..private import schema_of
from .nodes import arguments_of, base_of, called, is_alias, readers_of, replace_results

_ops = torch.ops.hotrain
_FIRST = ("activation_gradient", "gated_gradient")
"""Operators of two results, of which the first is written over the first argument."""
_MUTATION = torch.ops.higher_order.auto_functionalized  # without side effects: Inductor copies what is read afterwards


def write(backward: Graph) -> bool:
    """Let operators of a graph of backward write over their gradients, in place; returns whether it has changed."""
    changed = False
    for name in _FIRST:
        for node in backward.find_nodes(op="call_function", target=getattr(_ops, name).default):
            if _is_free(node.args[0], node):
                other, g_x = _called(backward, node, getattr(_ops, f"{name}_").default)
                replace_results(backward, node, (g_x, other))
                changed = True
    for node in backward.find_nodes(op="call_function", target=_ops.norm_gradient.default):
        g, other, *_, passes_on, _, after = arguments_of(node)
        # The gradient of a sum is both: what is written over g would be added.
        is_read = after is not None and base_of(after) is base_of(g)
        if is_read or node.meta["val"][0].dtype != g.meta["val"].dtype:
            continue
        if _is_free(g, node) and (other is None or (base_of(other) is not base_of(g) and _is_free(other, node))):
            own, sums, first, second = _called(backward, node, _ops.norm_gradient_.default)
            g_x = written_over(first, second, passes_on)
            replace_results(backward, node, (own if g_x is None else g_x, sums, first if passes_on else None))
            changed = True
    return changed


def _is_free(t: Any, reader: Node) -> bool:
    """Whether a node is a whole tensor, computed in this graph, that only this operator reads, through any views."""
    base = base_of(t)
    if base.op != "call_function" or set(readers_of(base, is_alias)) != {reader}:
        return False
    source: Any = base.args[0] if base.target is operator.getitem else base
    schema = schema_of(source.target)
    fresh = schema is not None and all(result.alias_info is None for result in schema.returns)
    if not fresh and source.target is not _MUTATION:
        return False
    value, whole = t.meta["val"], base.meta["val"]
    image = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
    return bool(value.numel() == whole.numel() and (value.is_contiguous() or image))


def _called(graph: Graph, node: Node, target: Any) -> list[Any]:
    """The results of an operator that writes to arguments, called before `node` with its arguments: its own results,
    then the arguments written to."""
    names = [argument.name for argument in schema_of(target).arguments]  # type: ignore[union-attr]
    made = called(graph, node, node, _MUTATION, target, **dict(zip(names, arguments_of(node), strict=True)))
    values: Sequence[Any] = made.meta["val"]
    return [
        called(graph, node, node, operator.getitem, made, place) if isinstance(value, Tensor) else None
        for place, value in enumerate(values)
    ]
