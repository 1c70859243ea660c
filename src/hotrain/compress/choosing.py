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

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..planning import Roofs
from .formats import is_static
from .fusing import CASTS, called
from .rematerialize import ATTENTION, CUSTOM, PACKED, RESTORED, Codes, Normed, parsed

_aten = torch.ops.aten
_MOVES = (
    _aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.transpose.int, _aten.permute.default,
    _aten.alias.default, _aten.t.default,
)  # fmt: skip
_COPIES = (_aten.clone.default, _aten.expand.default)
_PRODUCTS = (
    _aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default, _aten.convolution_backward.default,
    torch.ops.hotrain.attention_gradients.default,
)  # fmt: skip
# Of an element of a norm's input, less than exact's: the shortcut's gradient and its 16-bit copy are written at once.
_NORM_GAIN = 5.0
# Of an element of an activation function's input: backward reads 4 bits for 16, and sums the bias gradient.
_SLOPE_GAIN = 5.0
_ATTENTION_RATE = 0.25  # of the rate of products, for heads of 64 channels; twice as much for 128
_MARGIN = 1.15  # of costs, since the model of bytes is no measurement
_TRUST = 0.5  # in what layers gain: alone on the device they gain more than in a step


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
        Operator → how many of its calls are kept exact, of how many; nothing for a graph whose sizes change from call
        to call.
    """
    places = [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
    if not all(is_static(t) if isinstance(t, Tensor) else not isinstance(t, torch.SymInt) for t in places):
        return {}
    found, fixed = _candidates(graph, roofs)
    late = _MARGIN * (sum(c.ms for c in found) + fixed) - _TRUST * gains - _gains(graph, roofs)
    counts = {c.what: (0, sum(other.what == c.what for other in found)) for c in found}
    for candidate in sorted(found, key=lambda c: -c.ms / max(c.nbytes, 1.0)):
        if late <= 0 or candidate.ms <= 0:
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


def _candidates(graph: Graph, roofs: Roofs) -> tuple[list[Candidate], float]:
    """Candidates, and the ms that the packing and unpacking of all else costs."""
    made: dict[Node, list[Node]] = {}  # what packed a tensor → what is unpacked from its codes
    for node in graph.nodes:
        args: Any = node.args
        if node.target is torch.ops.hotrain.restore_codes.default:
            made.setdefault(_keeper(args[0][0]), []).append(node)
        elif node.target is _aten.alias.default and _note(node, RESTORED):
            keeper = _packed(node)
            if keeper is not None:
                made.setdefault(keeper, []).append(node)
    found, nbytes = [], 0.0
    for node in graph.find_nodes(op="call_function", target=torch.ops.hotrain.attention_gradients.default):
        candidate = _attention(graph, node, roofs, made)
        if candidate is not None:
            found.append(candidate)
    for keeper, nodes in made.items():
        candidate = _of_one(graph, keeper, nodes, roofs)
        if candidate is not None:
            found.append(candidate)
        else:
            unpacked = [node for node in nodes if node.target is not _aten.alias.default]
            nbytes += 2.5 * sum(map(_numel, unpacked))
            if keeper.target is torch.ops.hotrain.keep_codes.default:
                nbytes += 2.5 * _numel(keeper.args[0])
    return found, 1e3 * nbytes / roofs.copy


# ---- what is unpacked ----


def _of_one(graph: Graph, keeper: Node, nodes: list[Node], roofs: Roofs) -> Candidate | None:
    """All tensors that are made of one tensor's codes."""
    sources = [_original(node, keeper) for node in nodes]
    if any(map(_is_of_a_layer, nodes)):
        return None
    if any(source is None or _numel(source) != _numel(n) for source, n in zip(sources, nodes, strict=True)):
        return None
    by_kernel, by_formula = keeper.target is torch.ops.hotrain.keep_codes.default, _note(keeper, PACKED)
    packed = by_kernel or by_formula
    codes: Any = keeper.meta["val"]
    bits = 8 * codes[0].numel() / _numel(nodes[0]) if by_kernel else 8 if by_formula else 4
    nbytes = _numel(nodes[0]) * (4 if by_formula else 2 + bits / 8) if packed else 0.0
    for node in nodes:
        # Read from memory by what is no formula that a compiler fuses, it is written there first.
        written = node.target is not _aten.alias.default or any(user.target in _PRODUCTS for user in _readers(node))
        nbytes += _numel(node) * (bits / 8 + (2 if written else -2))

    def apply() -> None:
        for node, source in zip(nodes, sources, strict=True):
            _replace(graph, node, source)  # type: ignore[arg-type]

    what = "linear (exact product)" if any(n.target is not _aten.alias.default for n in nodes) else "factors"
    more = _numel(nodes[0]) * (2 - (bits / 8 if packed else 0))
    return Candidate(what, 1e3 * nbytes / roofs.copy, more, apply)


def _replace(graph: Graph, node: Node, source: Node) -> None:
    """Put a tensor in the place of its approximation."""
    value = node.meta["val"]
    exact = source
    if exact.meta["val"].dtype != value.dtype:
        casts = [user for user in _readers(source) if user.target in CASTS and user.meta["val"].dtype == value.dtype]
        known = next((cast for cast in casts if cast < node), None)
        exact = _called(graph, node, CASTS[0], source, value.dtype) if known is None else known
    if exact.meta["val"].shape != value.shape:
        exact = _called(graph, node, _aten.reshape.default, exact, list(value.shape))
    node.replace_all_uses_with(exact)
    graph.erase_node(node)


def _original(node: Node, keeper: Node) -> Node | None:
    """The tensor that a node approximates; None where it is not found."""
    args: Any = keeper.args
    if node.target is _aten.alias.default:
        return args[0] if args[0].meta["val"].shape[-1] == node.meta["val"].shape[-1] else None
    word: Any = node.args[1]
    recipe = parsed(word)
    if isinstance(recipe, Normed) and keeper.target is torch.ops.hotrain.norm_forward.default:
        return next((user for user in keeper.users if user.args[1] == 1), None)
    if not isinstance(recipe, Codes):
        return None
    if recipe.kind == "values" and keeper.target is torch.ops.hotrain.keep_codes.default:
        return args[0]  # type: ignore[no-any-return]
    if recipe.kind == "output" and keeper.target is torch.ops.hotrain.keep_heads.default:
        return args[0][3]  # type: ignore[no-any-return]
    return None


def _keeper(node: Any) -> Node:
    """The operator that made these codes."""
    while node.target is operator.getitem or node.target in _MOVES:
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def _readers(node: Node) -> Iterator[Node]:
    """Users of a tensor, and of its views and copies."""
    for user in node.users:
        yield user
        if user.target in (*_MOVES, *_COPIES):
            yield from _readers(user)


# ---- attention ----


def _attention(graph: Graph, node: Node, roofs: Roofs, made: dict[Node, list[Node]]) -> Candidate | None:
    args: Any = node.args
    g, q, k, _, _, _, dropout, causal, scale, _, wants_mask = args
    number = _note(node, ATTENTION)
    both = [n for target in _BACKWARD for n in graph.find_nodes(op="call_function", target=target)]
    forward = next((n for n in both if _note(n, ATTENTION) == number), None)
    if forward is None or number is None or wants_mask:
        return None
    given: Any = forward.args
    tensors = [*given[:3], _part(graph, forward, 0)]
    readers: list[tuple[Node, Node]] = []
    alone: list[Node] = []
    for keeper, nodes in list(made.items()):
        packed: Any = keeper.args[0]
        if keeper.target is torch.ops.hotrain.keep_heads.default:
            packed = packed[3]
        elif keeper.target is not torch.ops.hotrain.keep_codes.default:
            continue
        if _keeper(packed) is forward:
            if any(_original(other, keeper) is None for other in nodes):
                return None
            readers += [(other, packed) for other in made.pop(keeper) if not _is_of_a_layer(other)]
            if any(_is_of_a_layer(other) for other in nodes) and keeper.target is torch.ops.hotrain.keep_heads.default:
                alone.append(keeper)
    batch, heads, tokens, width = (int(n) for n in q.meta["val"].shape)
    keys = int(k.meta["val"].shape[2])
    elements = sum(_numel(t) for t in tensors)
    # Packing reads all four in 16 bits and writes 6 on average; then q, k and v are written, and the layer behind's x.
    nbytes = elements * 2.8 + _numel(q) * 3.0 + 2 * _numel(k) * 2.9 + sum(_numel(t) * 2.5 for t, _ in readers)
    flops = 4.0 * batch * heads * tokens * keys * width * (0.5 if causal else 1.0)
    rate = roofs.product * _ATTENTION_RATE * min(width, 128) / 64

    def apply() -> None:
        results = _BACKWARD[forward.target](graph, node, forward, g, dropout, causal, scale)
        for user in list(node.users):
            place: Any = user.args[1]
            user.replace_all_uses_with(results[place] if place < 3 else node)
            graph.erase_node(user)
        for other, exact in readers:
            _replace(graph, other, exact)
        for keeper in alone:
            _pack_the_output(graph, keeper)

    return Candidate("scaled_dot_product_attention", 1e3 * (nbytes / roofs.copy + flops / rate), elements * 1.3, apply)


def _pack_the_output(graph: Graph, keeper: Node) -> None:
    """Pack the output of an attention alone, whose codes a converted layer reads."""
    args: Any = keeper.args
    made = _called(graph, keeper, torch.ops.hotrain.keep_codes.default, args[0][3], args[2])
    for part in list(keeper.users):
        place: Any = part.args[1]
        if place >= 6:
            part.replace_all_uses_with(_called(graph, keeper, operator.getitem, made, place - 6))


def _is_of_a_layer(node: Node) -> bool:
    """Whether a converted layer reads an unpacked tensor: it keeps what its record says."""
    return any(str(user.target).startswith("hotrain.") for user in _readers(node))


def _note(node: Node, name: str) -> Any:
    """What `rematerialize.noted` wrote to a node."""
    return (node.meta.get(CUSTOM) or {}).get(name)


def _packed(node: Any) -> Node | None:
    """The packing of one tensor from whose codes a node is unpacked: by `keep_codes`, or what a formula packs."""
    waiting: list[Any] = [node]
    seen: set[Node] = set()
    while waiting and len(seen) < 64:
        one = waiting.pop()
        if one.target is torch.ops.hotrain.keep_codes.default or _note(one, PACKED):
            return one  # type: ignore[no-any-return]
        if one not in seen and one.op == "call_function" and not str(one.target).startswith("hotrain."):
            seen.add(one)
            waiting += one.all_input_nodes
    return None


def _part(graph: Graph, of: Node, place: int) -> Any:
    """A result of an operator; as it is where it is no tensor, which a partitioner would neither save nor compute."""
    if not isinstance(of.meta["val"][place], Tensor):
        return of.meta["val"][place]
    known = next((user for user in of.users if user.target is operator.getitem and user.args[1] == place), None)
    if known is not None:
        return known
    return called(graph, of.next, of, operator.getitem, of, place)


def _called(graph: Graph, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A node before `like`, with its metadata."""
    return called(graph, like, like, target, *args, **kwargs)


def _backward_of_flash_or_cudnn(
    graph: Graph, node: Node, forward: Node, g: Node, dropout: float, causal: bool, scale: float
) -> list[Node]:
    parts = [_part(graph, forward, place) for place in range(8)]
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
    out, lse, seed, offset = (_part(graph, forward, place) for place in range(4))
    given: Any = forward.args
    args = (g, *given[:4], out, lse, seed, offset, dropout, [True, True, True, False], causal)
    made = _called(graph, node, _aten._scaled_dot_product_efficient_attention_backward.default, *args, scale=scale)
    return [_called(graph, node, operator.getitem, made, place) for place in range(3)]


def _backward_on_cpu(
    graph: Graph, node: Node, forward: Node, g: Node, dropout: float, causal: bool, scale: float
) -> list[Node]:
    out, lse = (_part(graph, forward, place) for place in range(2))
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
