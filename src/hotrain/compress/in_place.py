"""Results of a compiled step written over what they are computed from, where nothing reads that afterwards.

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
from torch.fx.node import map_arg

from ..kernels import written_over
from ..private import schema_of
from .nodes import arguments_of, base_of, called, is_alias, is_cast, readers_of, replace_results

_ops = torch.ops.hotrain
_FIRST = ("activate", "normalize", "activation_gradient", "gated_gradient")
"""Operators of which the first result is written over the first argument."""
_STATISTICS = (_ops.channel_statistics.default, torch.ops.aten.var_mean.correction)
_MUTATION = torch.ops.higher_order.auto_functionalized  # without side effects: Inductor copies what is read afterwards


def write(half: Graph) -> bool:
    """Let operators of a graph of forward or backward write over their arguments, in place; whether it has changed."""
    changed = False
    for name in _FIRST:
        for node in half.find_nodes(op="call_function", target=getattr(_ops, name).default):
            if _is_free(node.args[0], node):
                *others, first = _called(half, node, getattr(_ops, f"{name}_").default)
                replace_results(half, node, (first, *others))
                changed = True
    for node in half.find_nodes(op="call_function", target=_ops.norm_gradient.default):
        g, other, *_, passes_on, _, _ = arguments_of(node)
        if _is_free(g, node) and (other is None or _is_free(other, node)):
            own, sums, first, second = _called(half, node, _ops.norm_gradient_.default)
            g_x = written_over(first, second, passes_on)
            replace_results(half, node, (own if g_x is None else g_x, sums, first if passes_on else None))
            changed = True
    return changed


def _is_free(t: Any, reader: Node) -> bool:
    """Whether a node is a whole tensor with the dtype and strides of the operator's result, computed in this graph,
    that only this operator reads, behind its statistics and as no other argument, through any views."""
    base, value, result = base_of(t), t.meta["val"], reader.meta["val"][0]
    if base.op != "call_function" or (value.dtype, value.stride()) != (result.dtype, result.stride()):
        return False
    given: list[Node] = []
    map_arg(reader.args, given.append)
    others = (user for user in readers_of(base, lambda n: is_alias(n) or is_cast(n)) if user is not reader)
    once = sum(base_of(node) is base for node in given) == 1
    if not once or not all(user.target in _STATISTICS and user < reader for user in others):
        return False
    source: Any = base.args[0] if base.target is operator.getitem else base
    schema = schema_of(source.target)
    fresh = schema is not None and all(one.alias_info is None for one in schema.returns)
    if not fresh and source.target is not _MUTATION:
        return False
    image = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
    return bool(value.numel() == base.meta["val"].numel() and (value.is_contiguous() or image))


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
