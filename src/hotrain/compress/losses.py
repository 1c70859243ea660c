"""A pass on Dynamo's graphs: cross entropy of interpolated logits becomes one operator (`operators.cross_entropy`).

Dynamo passes a loss that a model constructs in its forward (`nn.CrossEntropyLoss`) to no mode, so that no handler of
PyTorch's functions sees it.
"""

from __future__ import annotations

import inspect
import itertools

import torch
from torch.fx import Graph, Node
from torch.nn import functional as F

from .sharing import writes

_SMALLEST = 1 << 24  # interpolated logits from which on it is worth it
_CALL = inspect.signature(F.cross_entropy)


def compute_by_images(graph: Graph) -> None:
    """Let losses of interpolated logits be computed a few images at a time, in place, in a graph of Dynamo's."""
    for node in graph.find_nodes(op="call_function", target=F.cross_entropy):
        _compute_by_images(node)


def _compute_by_images(loss: Node) -> None:
    nodes = loss.graph.nodes
    given = _CALL.bind(*loss.args, **loss.kwargs)
    given.apply_defaults()
    call = given.arguments
    y, target, weight = call["input"], call["target"], call["weight"]
    plain = call["size_average"] is None and call["reduce"] is None and call["label_smoothing"] == 0.0
    if (
        y.target is not torch.ops.hotrain.interpolate
        or set(y.users) != {loss}
        or not plain
        or call["reduction"] == "none"
    ):
        return
    between = itertools.takewhile(lambda node: node is not loss, itertools.dropwhile(lambda node: node is not y, nodes))
    if any(map(writes, between)):
        return
    logits, labels = y.meta["example_value"], target.meta["example_value"]
    sizes = (*logits.shape, *labels.shape)
    if not all(isinstance(n, int) for n in sizes) or logits.numel() < _SMALLEST or labels.is_floating_point():
        return
    if logits.dim() != 4 or labels.shape != (len(logits), *logits.shape[2:]):
        return  # PyTorch's message
    if not logits.requires_grad or (weight is not None and weight.meta["example_value"].requires_grad):
        return
    x, *how = y.args
    loss.target = torch.ops.hotrain.interpolated_cross_entropy
    loss.args = (x, target, weight, *how, call["ignore_index"], call["reduction"] == "mean")  # type: ignore[arg-type]
    loss.kwargs = {}
