"""A pass on Dynamo's graphs: cross entropy becomes one operator with what computes its logits, so that these and their
gradient are not whole in float32: an interpolation (`operators.cross_entropy`), or a linear layer (`operators.head`).

Dynamo passes a loss that a model constructs in its forward (`nn.CrossEntropyLoss`) to no mode, so that no handler of
PyTorch's functions sees it.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional as F

from .nodes import is_ours
from .sharing import writes

_SMALLEST = 1 << 24  # logits from which on it is worth it
_CALL = inspect.signature(F.cross_entropy)
_STATES = ("_enter_autocast", "_exit_autocast", "_set_grad_enabled")  # what a node changes for those behind it
_SAME_ROWS = ("float", "to", "view", "reshape", "contiguous", "flatten")  # methods that may leave rows as they are


def in_pieces(graph: Graph) -> None:
    """Let losses be computed a few images or classes at a time, in place, in a Dynamo graph of a converted model."""
    if not any(map(is_ours, graph.nodes)):
        return
    for node in graph.find_nodes(op="call_function", target=F.cross_entropy):
        given = _CALL.bind(*node.args, **node.kwargs)
        given.apply_defaults()
        call = given.arguments
        plain = call["size_average"] is None and call["reduce"] is None and call["label_smoothing"] == 0.0
        if plain and call["reduction"] != "none" and _is_worth_it(call["input"], call["target"]):
            _by_images(node, call)
            _by_classes(node, call)


def _is_worth_it(y: Node, target: Node) -> bool:
    """Whether the logits are large and need a gradient, of labels that are numbers, all of fixed sizes."""
    logits, labels = y.meta["example_value"], target.meta["example_value"]
    static = all(isinstance(n, int) for n in (*logits.shape, *labels.shape))
    return static and logits.numel() >= _SMALLEST and logits.requires_grad and not labels.is_floating_point()


def _by_images(loss: Node, call: Mapping[str, Any]) -> None:
    y, target, weight = call["input"], call["target"], call["weight"]
    if (
        y.target is not torch.ops.hotrain.interpolate
        or set(y.users) != {loss}
        or any(map(writes, nodes_between(y, loss)))
    ):
        return
    logits, labels = y.meta["example_value"], target.meta["example_value"]
    if logits.dim() != 4 or labels.shape != (len(logits), *logits.shape[2:]):
        return  # PyTorch's message
    if weight is not None and weight.meta["example_value"].requires_grad:
        return
    x, *how = y.args
    loss.target = torch.ops.hotrain.interpolated_cross_entropy
    loss.args = (x, target, weight, *how, call["ignore_index"], call["reduction"] == "mean")  # type: ignore[arg-type]
    loss.kwargs = {}


def _by_classes(loss: Node, call: Mapping[str, Any]) -> None:
    target, chain = call["target"], [call["input"]]
    labels = target.meta["example_value"]
    while chain[-1].op == "call_method" and chain[-1].target in _SAME_ROWS:
        node, before = chain[-1], chain[-1].args[0]
        if node.target == "contiguous" and node.args[1:] == () and before.meta["example_value"].is_contiguous():
            node.replace_all_uses_with(before)  # as OPT has it, which returns the same tensor
        chain.append(before)
    *between, y = chain
    found = _linear(y)
    if found is None or call["weight"] is not None or not loss.meta["example_value"].requires_grad:
        return
    if any(len(node.users) > 1 for node in between) or not _are_rows(chain, labels):
        return
    linear, arguments = found
    behind, late = {linear}, []
    for node in nodes_between(linear, loss):
        if writes(node) or getattr(node.target, "__name__", "") in _STATES:
            return
        if behind & set(node.all_input_nodes):
            behind.add(node)
            late.append(node)
    if target in behind or _is_written(linear, loss):
        return
    graph = loss.graph
    same = [y] if linear is y else [part for part in linear.users if part.args[1] == 0]
    returned = any(user is not (between[-1] if between else loss) for part in same for user in part.users)
    rest = target, call["ignore_index"], call["reduction"] == "mean", loss.meta["example_value"].dtype, returned
    with graph.inserting_before(loss):
        made = graph.call_function(torch.ops.hotrain.linear_cross_entropy, (*arguments, *rest))
        results = [graph.call_function(operator.getitem, (made, place)) for place in range(3)]
    for result, before in zip(results, (loss, y), strict=False):
        result.meta["example_value"] = before.meta["example_value"]
    parts = {y: results[1]}
    if linear is not y:
        parts |= {part: results[1 if part.args[1] == 0 else 2] for part in linear.users}
    gone = {loss: None, **dict.fromkeys(between), **dict.fromkeys(parts), linear: None}
    for node, result in {loss: results[0], **parts}.items():
        node.replace_all_uses_with(result)
    last = results[-1]
    for node in late:  # what reads the result and the codes comes behind them
        if node not in gone:
            last.append(node)
            last = node
    for node in gone:
        graph.erase_node(node)


def _linear(y: Node) -> tuple[Node, tuple[Any, ...]] | None:
    """The linear layer with an exact product that a node is the result of, and its x, w, b, form and tensors given."""
    if y.target is F.linear:
        x, w, *b = y.args
        b = b or [y.kwargs.get("bias")]
        # Its weight is frozen; a trained one's x is 2-D, or its dtype is not PyTorch's own.
        trained = not isinstance(w, Node) or w.meta["example_value"].requires_grad
        return None if trained or len(y.kwargs) > 1 else (y, (x, w, *b, "", []))
    if y.target is operator.getitem and y.args[1] == 0:
        source: Any = y.args[0]
        if source.target is torch.ops.hotrain.kept_linear and not source.kwargs:
            return source, source.args
    return None


def _are_rows(chain: Sequence[Node], labels: Tensor) -> bool:
    """Whether nodes are the same rows, one for each label, in the dtype of the last or in float32."""
    values = [node.meta["example_value"] for node in chain]
    dtype, rows = values[-1].dtype, values[0]
    alike = all(v.shape[-1] == rows.shape[-1] and v.numel() == rows.numel() for v in values)
    return (
        rows.dim() == 2
        and labels.shape == rows.shape[:1]
        and alike
        and all(v.dtype in (dtype, torch.float32) for v in values)
    )


def _is_written(linear: Node, loss: Node) -> bool:
    """Whether a layer's result, or what is computed of it but for the loss, is written in place."""
    of_it = {linear}
    for node in itertools.dropwhile(lambda node: node is not linear, linear.graph.nodes):
        if node is not loss and of_it & set(node.all_input_nodes):
            if writes(node):
                return True
            of_it.add(node)
    return False


def nodes_between(first: Node, last: Node) -> list[Node]:
    """The nodes between two of a graph."""
    nodes = itertools.dropwhile(lambda node: node is not first, first.graph.nodes)
    return list(itertools.takewhile(lambda node: node is not last, nodes))[1:]
