"""Nodes of a traced graph, as all passes over compiled graphs read and make them: values, readers, calls, formulas."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from ..private import STRIDES, fakes, inductor, schema_of
from .formats import hint, is_static

_aten = torch.ops.aten
CASTS = (torch.ops.prims.convert_element_type.default, _aten._to_copy.default)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
CLONE = _aten.clone.default
# Of a whole tensor, in its order, and in any; a traced graph has no `reshape`, which may copy.
VIEWS = (_aten.view.default, _aten._unsafe_view.default)
MOVES = (*VIEWS, _aten.transpose.int, _aten.permute.default, _aten.alias.default, _aten.t.default)


def value_of(node: Any) -> Tensor | None:
    """The fake tensor that a node computes; None where it is no tensor."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def numel(t: Any) -> int:
    """Number of elements of a tensor, or of what a node computes, or of its first result; 0 where that is no tensor.

    Of a size that changes from call to call, that of the call that was traced counts.
    """
    value = t.meta.get("val") if isinstance(t, Node) else t
    value = value[0] if isinstance(value, tuple | list) else value
    return math.prod(map(hint, value.shape)) if isinstance(value, Tensor) else 0


def bytes_of(t: Any) -> int:
    """Bytes of a tensor, or of what a node computes, by `numel`; 0 where it is no tensor."""
    value = value_of(t) if isinstance(t, Node) else t
    return numel(value) * value.dtype.itemsize if isinstance(value, Tensor) else 0


def is_ours(node: Node) -> bool:
    """Whether a node calls one of hotrain's operators."""
    return str(node.target).startswith("hotrain.")


def is_pointwise(node: Node) -> bool:
    """Whether a node computes each entry from one entry of each argument."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def is_dense(node: Any) -> bool:
    """Whether a node is a contiguous floating-point tensor of constant shape, which a kernel over rows reads."""
    value = value_of(node)
    return value is not None and value.dtype in FLOATS and is_static(value) and value.is_contiguous()


def arguments_of(node: Node) -> list[Any]:
    """The arguments of a call of an operator, with its defaults for those that are left out; all are positional."""
    arguments = schema_of(node.target).arguments  # type: ignore[union-attr]
    return [*node.args, *(argument.default_value for argument in arguments[len(node.args) :])]


# ---- what reads a value, and whose value a node has, through views ----
#
# What a view is depends on the question. What reads rows asks for all elements in the same order (`same_order`), what
# writes them side by side for all in any order (`is_move`). What writes in place asks for the memory (`is_alias`): a
# slice shares it and is no whole tensor, while `_unsafe_view` is one that PyTorch takes for new.


def same_order(node: Node) -> bool:
    """Whether a node has the elements of its argument in the same order."""
    in_order = node.target is _aten.permute.default and list(node.args[1]) == sorted(node.args[1])  # type: ignore[arg-type]
    return in_order or node.target in VIEWS


def is_move(node: Node) -> bool:
    """Whether a node has the elements of its argument, which are not copied, in any order."""
    return node.target in MOVES


def is_alias(node: Node) -> bool:
    """Whether a node shares the memory of its only tensor argument, by the operator's schema."""
    schema = schema_of(node.target)
    aliases = schema is not None and schema.arguments and schema.arguments[0].alias_info is not None
    return bool(aliases) and len(node.all_input_nodes) == 1


def is_cast(node: Node) -> bool:
    """Whether a node has the elements of its argument in another dtype."""
    return node.target in CASTS


def readers_of(node: Node, through: Callable[[Node], bool] = same_order) -> list[Node]:
    """What reads a node: its users, and in the place of those that `through` is true of, their readers in turn."""
    found: list[Node] = []
    for user in node.users:
        found += readers_of(user, through) if through(user) else [user]
    return found


def source_of(node: Any, through: Callable[[Node], bool] = same_order) -> Node:
    """The node that another one is computed from, through nodes that `through` is true of; itself, where it is not."""
    return path_to(node, through)[-1]


def path_to(node: Any, through: Callable[[Node], bool]) -> list[Node]:
    """The nodes from one back to its `source_of`, both included."""
    found: list[Node] = [node]
    while through(found[-1]):
        found.append(found[-1].all_input_nodes[0])
    return found


def base_of(node: Any) -> Node:
    """The node whose memory a node shares, through any number of views."""
    return source_of(node, is_alias)


def result_of(node: Node, place: int) -> Node | None:
    """A result of an operator with several; None where nothing reads it."""
    return next((user for user in node.users if user.args[1] == place), None)


# ---- nodes in the place of others ----


def replace_results(graph: Graph, node: Node, results: Sequence[Node | None]) -> None:
    """Put nodes in the places of an operator's first results, but for None; the operator goes with its last result."""
    for part in list(node.users):
        place: Any = part.args[1]
        found = results[place] if place < len(results) else None
        if found is not None:
            part.replace_all_uses_with(found)
            graph.erase_node(part)
    if not node.users:
        graph.erase_node(node)


def called(graph: Graph, before: Node, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A new node before another, with its fake value and the metadata of `like`; none where the call raises."""
    with graph.inserting_before(before):
        made = graph.call_function(target, args, kwargs)
    made.meta = {name: value for name, value in like.meta.items() if name not in ("val", "tensor_meta")}
    try:
        made.meta["val"] = computed(made)
    except Exception:
        graph.erase_node(made)
        raise
    if made.meta.get(STRIDES) is not None:  # those of `like` are others
        keep_strides(made)
    return made


def renew(nodes: Iterable[Node]) -> None:
    """Give views the strides that their arguments have now, and views of them; a copy's where there is no such view."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        before = value_of(node)
        if before is None or not is_alias(node):
            continue
        try:
            after = computed(node)
        except (RuntimeError, ValueError):  # by version of PyTorch
            source: Any = node.args[0]
            copy = called(node.graph, node, node, _aten.clone.default, source, memory_format=torch.contiguous_format)
            node.update_arg(0, copy)
            after = computed(node)
        if after.stride() != before.stride():
            node.meta["val"] = after
            waiting += node.users


def keep_strides(node: Node) -> None:
    """Have Inductor pass a node's tensors in the strides of their values, also what it has padded."""
    node.meta[STRIDES] = tuple(map_arg(part, lambda n: n.meta["val"]) for part in (node.args, node.kwargs))


def part_of(graph: Graph, of: Node, place: int) -> Any:
    """A result of an operator; as it is where it is no tensor, which a partitioner would neither save nor compute."""
    if not isinstance(of.meta["val"][place], Tensor):
        return of.meta["val"][place]
    known = result_of(of, place)
    return called(graph, of.next, of, operator.getitem, of, place) if known is None else known


def computed(node: Node) -> Any:
    """The fake value of a call."""
    found: Any = [map_arg(part, lambda n: n.meta["val"]) for part in (node.args, node.kwargs)]
    args, kwargs = found
    modes = [t.fake_mode for n in node.all_input_nodes if isinstance(t := n.meta["val"], fakes.tensor)]
    with modes[0] if modes else contextlib.nullcontext(), torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def inlined(graph: Graph, before: Node, fn: Callable[..., Any], inputs: Sequence[Node]) -> list[Node]:
    """Trace fn into a graph as operators that Inductor supports; returns the nodes of its results."""
    found = traced(fn, inputs)
    for step in found.find_nodes(op="get_attr"):
        raise RuntimeError(f"hotrain: a formula for a graph traced the constant {step.target}; please report this")
    return copied(found, graph, before, inputs)


def traced(fn: Callable[..., Any], inputs: Sequence[Node]) -> Graph:
    """A graph of what fn does with tensors like those of the nodes, as operators that Inductor supports."""
    values = [node.meta["val"] for node in inputs]
    mode = next(value.fake_mode for value in values if isinstance(value, fakes.tensor))
    with mode, torch.no_grad():
        return make_fx(fn, decomposition_table=inductor().decompositions())(*values).graph


def copied(found: Graph, graph: Graph, before: Node, inputs: Sequence[Node]) -> list[Node]:
    """Copy a traced graph into another one; returns the nodes of its results."""
    env: dict[Node, Any] = dict(zip(found.find_nodes(op="placeholder"), inputs, strict=True))
    with graph.inserting_before(before):
        for step in found.nodes:
            if step.op == "output":
                results = step.args[0] if isinstance(step.args[0], tuple | list) else [step.args[0]]
                return [env[result] for result in results]
            if step.op != "placeholder":
                env[step] = graph.node_copy(step, env.__getitem__)
    raise AssertionError("a graph without an output")


def cancel_copies(graph: Graph) -> None:
    """Read an image in channels_last itself where its copy in the default layout is copied back (`layouts`)."""
    for node in graph.find_nodes(op="call_function", target=CLONE):
        copied = node.args[0]
        if copied.op != "call_function" or copied.target is not CLONE:
            continue
        first = copied.args[0]
        value, source = node.meta.get("val"), first.meta.get("val")
        alike = isinstance(value, Tensor) and isinstance(source, Tensor) and value.stride() == source.stride()
        if alike and value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last):
            node.replace_all_uses_with(first)
            graph.erase_node(node)
