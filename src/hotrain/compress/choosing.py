"""Which compressed tensors of a compiled training step are kept exact after all, so that it is not slower than before.

A joint graph of forward and backward holds every tensor that was packed, its codes, and what backward makes of them.
Where packing, unpacking and what they entail (attention runs forward again) take longer than reading the tensor
itself, a model that must not become slower needs the time back from elsewhere: converted layers that are faster, norms
and activation functions whose backward reads less. `choose` adds both up, by bytes and operations over the measured
roofs of the device, and keeps as many tensors exact as it takes, those first that cost most time for the memory they
save.

What a converted layer gains was measured (`hotrain.planning`). The constants here are fitted to profiles of ViT-B,
DeiT-S and GPT-2 on an H200.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..planning import Roofs
from .fusing import computed
from .rematerialize import Codes, Normed, parsed

_aten = torch.ops.aten
_MOVES = (
    _aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.transpose.int, _aten.permute.default,
    _aten.alias.default, _aten.t.default,
)  # fmt: skip
_CASTS = (torch.ops.prims.convert_element_type.default, _aten._to_copy.default)
# Of an element of a norm's input, less than exact's: the shortcut's gradient and its 16-bit copy are written at once.
_NORM_GAIN = 5.0
# Of an element of an activation function's input: backward reads 4 bits for 16, and sums the bias gradient.
_SLOPE_GAIN = 5.0
_ATTENTION_RATE = 0.25  # of the rate of products, for heads of 64 channels; twice as much for 128
_MARGIN = 1.15  # of costs, since the model of bytes is no measurement


@dataclass
class Candidate:
    """A tensor, or several that belong together, which could be kept exact.

    Attributes:
        what: the operator, as the report names it.
        ms: time of a step that this saves.
        nbytes: that it takes.
        apply: changes the graph.
    """

    what: str
    ms: float
    nbytes: float
    apply: Callable[[], None]


def choose(graph: Graph, roofs: Roofs, gains: float) -> dict[str, tuple[int, int]]:
    """Keep exact what the step has no time for, in place.

    Args:
        graph: the joint graph of forward and backward.
        roofs: of the device.
        gains: ms of a step that converted layers are faster than exact ones.

    Returns:
        Operator → how many of its calls are kept exact, of how many.
    """
    found = list(_candidates(graph, roofs))
    late = _MARGIN * sum(c.ms for c in found) - gains - _gains(graph, roofs)
    counts = {c.what: (0, sum(other.what == c.what for other in found)) for c in found}
    for candidate in sorted(found, key=lambda c: -c.ms / max(c.nbytes, 1.0)):
        if late <= 0:
            break
        candidate.apply()
        late -= _MARGIN * candidate.ms
        exact, of = counts[candidate.what]
        counts[candidate.what] = exact + 1, of
    graph.eliminate_dead_code()
    return {what: count for what, count in counts.items() if count[0]}


def _gains(graph: Graph, roofs: Roofs) -> float:
    """ms that norms and activation functions are faster than exact ones."""
    norms = graph.find_nodes(op="call_function", target=torch.ops.hotrain.norm_backward.default)
    slopes = graph.find_nodes(op="call_function", target=torch.ops.hotrain.slope_gradient.default)
    nbytes = sum(_NORM_GAIN * _numel(n.args[0]) for n in norms) + sum(_SLOPE_GAIN * _numel(n.args[0]) for n in slopes)
    return 1e3 * nbytes / roofs.copy


def _candidates(graph: Graph, roofs: Roofs) -> Iterator[Candidate]:
    for node in graph.find_nodes(op="call_function", target=torch.ops.hotrain.attention_gradients.default):
        found = _attention(graph, node, roofs)
        if found is not None:
            yield found
    for node in graph.find_nodes(op="call_function", target=torch.ops.hotrain.restore_codes.default):
        found = _input(graph, node, roofs)
        if found is not None:
            yield found


# ---- a layer's input, from the codes of the operator before ----


def _input(graph: Graph, node: Node, roofs: Roofs) -> Candidate | None:
    args: Any = node.args
    given, word, shape, dtype = args
    source = _original(given[0], word)
    if source is None or _numel(source) != math.prod(shape):
        return None
    count, keeper = _numel(node), _keeper(given[0])
    alone = keeper.target is torch.ops.hotrain.keep_codes.default and _is_read_once(keeper)
    ms = 1e3 * count * (2.5 + 2.5 * alone) / roofs.copy

    def apply() -> None:
        with graph.inserting_before(node):
            exact = source
            if exact.meta["val"].dtype != dtype:
                cast = [user for user in _readers(source) if user.target in _CASTS and user.meta["val"].dtype == dtype]
                exact = cast[0] if cast else _called(graph, node, _CASTS[0], source, dtype)
            if exact.meta["val"].shape != node.meta["val"].shape:
                exact = _called(graph, node, _aten.view.default, exact, list(shape))
        node.replace_all_uses_with(exact)
        graph.erase_node(node)

    return Candidate("inputs of linear layers", ms, count * (2.0 - 0.5 * alone), apply)


def _original(codes: Any, word: str) -> Node | None:
    """The tensor of which a recipe makes an approximation; None where it is not found."""
    recipe, keeper = parsed(word), _keeper(codes)
    if isinstance(recipe, Normed) and keeper.target is torch.ops.hotrain.norm_forward.default:
        return next((user for user in keeper.users if user.args[1] == 1), None)
    if not isinstance(recipe, Codes):
        return None
    args: Any = keeper.args
    if recipe.kind == "values" and keeper.target is torch.ops.hotrain.keep_codes.default:
        return args[0]  # type: ignore[no-any-return]
    if recipe.kind == "output" and keeper.target is torch.ops.hotrain.keep_heads.default:
        return args[0][3]  # type: ignore[no-any-return]
    return None


def _keeper(node: Node) -> Node:
    """The operator that made these codes."""
    while node.target is operator.getitem or node.target in _MOVES:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_read_once(keeper: Node) -> bool:
    return all(len(part.users) <= 1 for part in keeper.users)


def _readers(node: Node) -> Iterator[Node]:
    for user in node.users:
        yield user
        if user.target in _MOVES:
            yield from _readers(user)


# ---- attention ----


def _attention(graph: Graph, node: Node, roofs: Roofs) -> Candidate | None:
    args: Any = node.args
    g, q, k, _, _, _, dropout, causal, scale, _, wants_mask = args
    keeper = _packed(q)
    if keeper is None:
        return None
    tensors: Any = keeper.args[0]
    forward = _keeper(tensors[3])
    if forward.target not in _BACKWARD or wants_mask:
        return None
    readers = [
        other
        for other in graph.find_nodes(op="call_function", target=torch.ops.hotrain.restore_codes.default)
        if _keeper(other.args[0][0]) is keeper  # type: ignore[index]
    ]
    batch, heads, tokens, width = (int(n) for n in q.meta["val"].shape)
    keys = int(k.meta["val"].shape[2])
    elements = sum(_numel(t) for t in tensors)
    # Packing reads all four in 16 bits and writes 6 on average; then q, k and v are written, and the layer behind's x.
    nbytes = elements * 2.8 + _numel(q) * 3.0 + 2 * _numel(k) * 2.9 + sum(_numel(t) * 2.5 for t in readers)
    flops = 4.0 * batch * heads * tokens * keys * width * (0.5 if causal else 1.0)
    rate = roofs.product * _ATTENTION_RATE * min(width, 128) / 64

    def apply() -> None:
        results = _BACKWARD[forward.target](graph, node, forward, g, dropout, causal, scale)
        for user in list(node.users):
            place: Any = user.args[1]
            user.replace_all_uses_with(results[place] if place < 3 else node)
            graph.erase_node(user)
        for other in readers:
            place_of = _input(graph, other, roofs)
            if place_of is not None:
                place_of.apply()

    return Candidate("scaled_dot_product_attention", 1e3 * (nbytes / roofs.copy + flops / rate), elements * 1.3, apply)


def _packed(node: Any) -> Node | None:
    """The packing of q, k, v and the output from whose codes a tensor is unpacked."""
    waiting: list[Any] = [node]
    seen: set[Node] = set()
    while waiting and len(seen) < 64:
        one = waiting.pop()
        if one.target is torch.ops.hotrain.keep_heads.default:
            return one  # type: ignore[no-any-return]
        if one not in seen and one.op == "call_function":
            seen.add(one)
            waiting += one.all_input_nodes
    return None


def _part(graph: Graph, before: Node, of: Node, place: int) -> Node:
    known = next((user for user in of.users if user.target is operator.getitem and user.args[1] == place), None)
    if known is not None:
        return known
    with graph.inserting_after(of):
        made = graph.call_function(operator.getitem, (of, place))
    made.meta = {name: value for name, value in of.meta.items() if name not in ("val", "tensor_meta")}
    made.meta["val"] = of.meta["val"][place]
    return made


def _called(graph: Graph, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A node before `like`, with its fake value and, of `like`, the metadata."""
    with graph.inserting_before(like):
        made = graph.call_function(target, args, kwargs)
    made.meta = {name: value for name, value in like.meta.items() if name not in ("val", "tensor_meta")}
    made.meta["val"] = computed(made)
    return made


def _backward_of_flash_or_cudnn(
    graph: Graph, node: Node, forward: Node, g: Node, dropout: float, causal: bool, scale: float
) -> list[Node]:
    parts = [_part(graph, node, forward, place) for place in range(8)]
    out, lse, ends_q, ends_k, longest_q, longest_k, seed, offset = parts
    given: Any = forward.args
    q, k, v = given[:3]
    if forward.target is _aten._scaled_dot_product_flash_attention.default:
        target = _aten._scaled_dot_product_flash_attention_backward.default
        args: tuple[Any, ...] = (g, q, k, v, out, lse, ends_q, ends_k, longest_q, longest_k, dropout, causal)
        args = (*args, seed, offset)
    else:
        target = _aten._scaled_dot_product_cudnn_attention_backward.default
        args = (g, q, k, v, out, lse, seed, offset, given[3], ends_q, ends_k, longest_q, longest_k, dropout, causal)
    made = _called(graph, node, target, *args, scale=scale)
    return [_called(graph, node, operator.getitem, made, place) for place in range(3)]


def _backward_of_efficient(
    graph: Graph, node: Node, forward: Node, g: Node, dropout: float, causal: bool, scale: float
) -> list[Node]:
    out, lse, seed, offset = (_part(graph, node, forward, place) for place in range(4))
    given: Any = forward.args
    args = (g, *given[:4], out, lse, seed, offset, dropout, [True, True, True, False], causal)
    made = _called(graph, node, _aten._scaled_dot_product_efficient_attention_backward.default, *args, scale=scale)
    return [_called(graph, node, operator.getitem, made, place) for place in range(3)]


def _backward_on_cpu(
    graph: Graph, node: Node, forward: Node, g: Node, dropout: float, causal: bool, scale: float
) -> list[Node]:
    out, lse = (_part(graph, node, forward, place) for place in range(2))
    given: Any = forward.args
    target = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    made = _called(
        graph, node, target, g, *given[:3], out, lse, dropout, causal,
        attn_mask=forward.kwargs.get("attn_mask"), scale=scale,
    )  # fmt: skip
    return [_called(graph, node, operator.getitem, made, place) for place in range(3)]


_BACKWARD: dict[Any, Callable[..., list[Node]]] = {
    _aten._scaled_dot_product_flash_attention.default: _backward_of_flash_or_cudnn,
    _aten._scaled_dot_product_cudnn_attention.default: _backward_of_flash_or_cudnn,
    _aten._scaled_dot_product_efficient_attention.default: _backward_of_efficient,
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _backward_on_cpu,
}


def _numel(node: Any) -> int:
    value = node.meta["val"]
    return int(value.numel()) if isinstance(value, Tensor) else 0
