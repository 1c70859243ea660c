"""Logits that a compiled model returns beside its loss leave the graph without a gradient, which is attached outside.

Autograd makes zeros for the gradient of a result that nothing is computed from. Models of transformers return their
logits with the loss: zeros as large as the logits are then written in each step, copied into the CUDA graph, and added
there. So the graph returns the logits as a constant, and the x of the linear layer that they are the result of as one
more result. `operators.head.Logits` attaches the layer's gradient to them in eager mode, for a caller who computes
something of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from ..private import inductor
from .losses import in_pieces, nodes_between
from .operators.head import Logits
from .sharing import writes

_LARGER = 4  # times x: zeros are made for x in place of the logits


class Backend:
    """Inductor, as `torch.compile` has it in a mode, for graphs whose logits are taken out."""

    def __init__(self, mode: str | None) -> None:
        self.inductor = inductor().backend(mode, None, None)

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        in_pieces(gm.graph)
        taken = take_out(gm)
        compiled: Callable[..., Any] = self.inductor(gm, inputs)
        if taken is None:
            return compiled

        def run(*args: Any) -> list[Any]:
            return taken.attached(list(compiled(*args)), args)

        return run

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Backend) and bool(self.inductor == other.inductor)

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        # What Dynamo asks a backend for: to forget its CUDA graphs, and for its configuration.
        if name == "inductor":
            raise AttributeError(name)
        return getattr(self.inductor, name)


class Taken(NamedTuple):
    """Where a graph has its logits, among its results, and their layer, among its arguments; x is the last result."""

    logits: int
    weight: int
    bias: int | None

    def attached(self, results: list[Any], args: Sequence[Any]) -> list[Any]:
        """The results of the graph as it was, from those that it has now."""
        x = results.pop()
        bias = None if self.bias is None else args[self.bias]
        results[self.logits] = Logits.apply(x, args[self.weight], bias, results[self.logits])
        return results


def take_out(gm: GraphModule) -> Taken | None:
    """Let a graph of Dynamo's, after `losses.in_pieces`, return its logits as a constant, and x; None: it stays."""
    output = gm.graph.output_node()
    results = output.args[0]
    if not isinstance(results, (tuple, list)):
        return None
    places = {node: place for place, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    for place, y in enumerate(results):
        made = _maker(y)
        if made is None or set(y.users) != {output} or results.count(y) > 1:  # type: ignore[union-attr]
            continue
        x, w, b, *_ = made.args
        fixed = w in places and (b is None or b in places)
        # What is written could be y, or what it was computed from.
        if not fixed or any(map(writes, nodes_between(made, output))) or not _is_larger(y, x):
            continue
        with gm.graph.inserting_before(output):
            constant = gm.graph.call_method("detach", (y,))
        constant.meta["example_value"] = y.meta["example_value"].detach()  # type: ignore[union-attr]
        output.args = ((*results[:place], constant, *results[place + 1 :], x),)
        gm.recompile()
        return Taken(place, places[w], None if b is None else places[b])  # type: ignore[index]
    return None


def _maker(y: Any) -> Node | None:
    """The layer with its loss that a result is the logits of."""
    if not isinstance(y, Node) or y.target is not operator.getitem or y.args[1] != 1:
        return None
    made: Any = y.args[0]
    return made if made.target is torch.ops.hotrain.linear_cross_entropy else None


def _is_larger(y: Any, x: Any) -> bool:
    sizes = [node.meta["example_value"].numel() for node in (y, x)]
    return all(isinstance(n, int) for n in sizes) and sizes[0] >= _LARGER * sizes[1]
