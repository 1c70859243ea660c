"""Merging an operator of a compiled graph with its neighbours: calls in its place."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from .factors import Product
from .nodes import called, computed, is_cast, is_move, path_to, readers_of, result_of

_aten = torch.ops.aten


def merge_all(graph: Graph, by: dict[Any, Any]) -> bool:
    """Merge every call of these operators by the class beside each, in place; returns whether the graph has changed."""
    changed = False
    for packet, merging in by.items():
        for node in graph.find_nodes(op="call_function", target=packet.default):
            one = merging(graph, node)
            one.merge()
            changed |= one.changed
    if changed:
        graph.eliminate_dead_code()
    return changed


class Merging:
    """An operator that is called again with other arguments in its place."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph, self.node, self.changed = graph, node, False

    def call(self, before: Node, target: Any, *args: Any) -> Node:
        return called(self.graph, before, self.node, target, *args)

    def again(self, before: Node, args: Sequence[Any], target: Any = None) -> Node:
        """The operator, or another one, with other arguments; its results take the place of the old ones."""
        made = self.call(before, target or self.node.target, *args)
        for result in list(self.node.users):
            part = self.call(before, operator.getitem, made, result.args[1])
            result.replace_all_uses_with(part)
            self.graph.erase_node(result)
        self.graph.erase_node(self.node)
        self.node, self.changed = made, True
        return made

    def cast_result(self, place: int, at: int = 6) -> None:
        """Give a result, whose dtype is argument ``at``, the one that all its readers cast it to, if there is one."""
        result, args = self.result(place), self.node.args
        casts = [] if result is None else readers_of(result, is_move)
        dtype = half_of(casts) if all(map(_is_cast_alone, casts)) else None
        if dtype is not None:
            self.again(self.node, (*args[:at], dtype, *args[at + 1 :]))
            _drop(self.graph, casts)

    def result(self, place: int) -> Node | None:
        return result_of(self.node, place)

    def rows(self, before: Node, t: Node) -> Node:
        """t as the matrix (R, C) that the operator takes."""
        shape = self.node.args[0].meta["val"].shape  # type: ignore[union-attr]
        return t if t.meta["val"].shape == shape else self.call(before, _aten.view.default, t, list(shape))

    def has_its_rows(self, product: Product) -> bool:
        """Whether the operator's rows are those of a product, which it may see through views."""
        rows: Any = self.node.args[0]
        return bool(product.node.meta["val"].shape[-1] == rows.meta["val"].shape[-1])

    def flat(self, before: Node, factor: Node) -> Node:
        """A factor as the operator takes it: of samples (n,), of channels (1, C); bits as they are."""
        value = factor.meta["val"]
        if value.dtype == torch.uint8:
            return factor
        return self.call(before, _aten.view.default, factor, [1, -1] if value.dim() == 1 else [-1])

    def replace(self, old: Node, matrix: Node, before: Node) -> None:
        """Put a result, (R, C), in the place of a tensor of any shape."""
        shape = list(old.meta["val"].shape)
        new = (
            matrix if list(matrix.meta["val"].shape) == shape else self.call(before, _aten.view.default, matrix, shape)
        )
        old.replace_all_uses_with(new)
        self.graph.erase_node(old)


def half_of(casts: Sequence[Node]) -> torch.dtype | None:
    """The 16-bit dtype that all these casts have; None where there is none."""
    dtypes = {cast.meta["val"].dtype for cast in casts}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= {torch.float16, torch.bfloat16} else None


def _is_cast_alone(node: Node) -> bool:
    """Whether a node changes the dtype, and neither the memory layout nor the device."""
    if not is_cast(node):
        return False
    before, behind = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    return bool(before.stride() == behind.stride() and before.device == behind.device)


def _drop(graph: Graph, casts: Sequence[Node]) -> None:
    """Remove casts, through views, of a tensor that has their dtype now; the views have it too."""
    for cast in casts:
        *views, _ = path_to(cast.args[0], is_move)
        for view in reversed(views):
            view.meta["val"] = computed(view)
        cast.replace_all_uses_with(cast.args[0])  # type: ignore[arg-type]
        graph.erase_node(cast)
