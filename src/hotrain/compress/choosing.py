"""Which compressed tensors of a compiled training step are kept exact after all, so that it is not slower than before.

A joint graph of forward and backward holds every tensor that was packed, its codes, and what backward makes of them.
Where packing, unpacking and what they entail (attention runs forward again) take longer than reading the tensor
itself, a model that must not become slower needs the time back from elsewhere: converted layers that are faster, norms
and activation functions whose backward reads less. `choose` adds both up and keeps as many tensors exact as it takes,
those first that cost most time for the memory they save.

What a converted layer gains was measured (`hotrain.planning`), and so is what an operator costs (`costs`). Formulas
that a compiler fuses, and attention, are bytes and operations over the measured roofs of the device; these constants
are fitted to profiles of ViT-B, DeiT-S and GPT-2 on an H200.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..planning import PATCHES, Roofs
from . import costs, exact_attention, exact_norms, fusing, layer_codes, padding
from .formats import is_static
from .nodes import bytes_of, called, is_cast, is_move, is_ours, numel, part_of, readers_of, source_of
from .readings import (
    Reading,
    casts_of,
    groups_of,
    is_kernel,
    is_softmax,
    own_keepers,
    put_back,
    readings_of,
)
from .rematerialize import ATTENTION, CUSTOM, OPERATOR

_aten = torch.ops.aten
_COPIES = (_aten.clone.default, _aten.expand.default)
_PRODUCTS = (
    _aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default, _aten.convolution_backward.default,
    torch.ops.hotrain.attention_gradients.default,
)  # fmt: skip
_GRADIENTS = (torch.ops.hotrain.linear_gradients.default, torch.ops.hotrain.conv2d_gradients.default)
_MARKED = torch.ops.hotrain.marked.default
_NAMES = {
    _aten.convolution_backward.default: "conv2d (exact product)",
    _aten.mm.default: "linear (exact product)",
    _aten.addmm.default: "linear (exact product)",
    _aten.bmm.default: "matmul",
}
_OF_PATCHES = [0, 2, 4, 1, 3, 5]  # the order of an image's axes that cuts it, of `geometry.product_of_patches`
_NORMALIZE, _FORMULA, _SOFTMAX = torch.ops.hotrain.normalize.default, "mul", "softmax"
_ATTENTION_RATE = 0.25  # of the rate of products, for heads of 64 channels; twice as much for 128
_INTERPOLATION_GAIN = 100.0  # bytes of copies in an element's time; atomic additions took 400 in SegFormer's head
_OF_GROUPS = 8.0  # times that of reading x: with all codes ResNet-50 takes 0.87 so, a diffusion UNet 0.84
_OF_ONE_GROUP = 4.0  # without it PoolFormer-S24 takes 0.91 of exact's time, with all codes 1.02
_UNREAD = 0.5  # of the time of the bytes that are not moved: one kernel has the work of two
_OF_PADDING = 0.8  # of what padded products gain: with all of it Swin-T takes 1.01 of exact's time, on an H200
_BY_LOGARITHM = 10.0  # bytes of copies, in the time to pack or unpack an element of a softmax: Swin-T, on an H200
_OF_SCORES = 16.0  # in the time of an element of a softmax that exact training computes again: 22 in Swin-T, on an H200
_BY_HALVES = 0.0  # in the time by which 4 bits that a fused formula unpacks are slower than 16: StarNet, on an H200
_IN_A_STEP = 1.1  # of the time that packing and unpacking take alone: Swin-T and DeiT-S, on an H200


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


def choose(graph: Graph, roofs: Roofs, gains: float, spare_ms: float = 0.0) -> tuple[dict[str, tuple[int, int]], float]:
    """Keep exact what the step has no time for, in place.

    Args:
        graph: the joint graph of forward and backward.
        roofs: of the device.
        gains: ms of a step that the graph's converted layers are faster than exact ones.
        spare_ms: that the step may take longer than exact training is predicted to.

    Returns:
        Operator → how many of its calls are kept exact, of how many, and the ms that are left for more packing;
        nothing, and infinity, for a graph whose sizes change from call to call.
    """
    places = [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
    if not all(is_static(t) if isinstance(t, Tensor) else not isinstance(t, torch.SymInt) for t in places):
        return {}, math.inf
    graph.eliminate_dead_code()
    found, fixed = _candidates(graph, roofs)
    found = [dataclasses.replace(one, ms=_IN_A_STEP * one.ms) for one in found]
    unfused = [node for target in fusing.UNFUSED for node in graph.find_nodes(op="call_function", target=target)]
    spent = sum(c.ms for c in found) + sum(fixed) + sum(_statistics(graph, roofs)) - _behind(graph, roofs)
    spent += sum(_beside(node, roofs) for node in unfused)
    faster = gains + _OF_PADDING * padding.gain(graph, roofs) + _interpolation(graph, roofs)
    late = spent - faster - _sums_of_groups(graph, roofs) - spare_ms
    all_of = collections.Counter(c.what for c in found)
    all_of.update(map(_norm_name, graph.find_nodes(op="call_function", target=_NORMALIZE)))
    kept: collections.Counter[str] = collections.Counter()
    late = _keep_exact(found, late, kept)
    graph.eliminate_dead_code()
    if late > 0:
        # Behind the others: codes that no layer reads any more are the norm's alone.
        late = _keep_exact(_norms(graph, roofs), late, kept)
        graph.eliminate_dead_code()
    return {what: (kept[what], count) for what, count in all_of.items()}, -late


def layers(graph: Graph) -> list[tuple[Any, ...]]:
    """The converted layers of a joint graph, and images cut into patches, each as `nn.state.LayerState.gain` names it.

    A model may be several graphs (DistributedDataParallel cuts it into its buckets, a graph break where it is), and
    each has the time alone that its own layers gain.
    """
    found: list[tuple[Any, ...]] = []
    for target in _GRADIENTS:
        for node in graph.find_nodes(op="call_function", target=target):
            args: Any = node.args
            of_g_y, *_, config, _, _, place, needs = args
            g_y = of_g_y.meta["val"]
            if is_static(g_y):
                sizes = (g_y.shape[:-1].numel(), place) if isinstance(place, int) else place
                found.append((config, *sizes, g_y.shape[-1], needs[1]))
    for node in graph.find_nodes(op="call_function", target=_aten.permute.default):
        if list(node.args[1]) == _OF_PATCHES and is_static(node.meta["val"]):  # type: ignore[arg-type]
            *tokens, channels, height, width = node.meta["val"].shape
            found.append((PATCHES, math.prod(tokens), channels * height * width))
    return found


def _keep_exact(candidates: list[Candidate], late: float, kept: collections.Counter[str]) -> float:
    """Keep exact those that save most time for their bytes until a step is not late any more; returns the ms left.

    One that saves enough alone is taken before, if it takes fewer bytes than those would.
    """
    left = sorted((c for c in candidates if c.ms > 0), key=lambda c: -c.ms / max(c.nbytes, 1.0))
    while late > 0 and left:
        first = left[0]
        enough = min((c for c in left if c.ms >= late), key=lambda c: c.nbytes, default=first)
        candidate = enough if first.ms >= late or enough.nbytes <= first.nbytes * late / first.ms else first
        left.remove(candidate)
        candidate.apply()
        late -= candidate.ms
        kept[candidate.what] += 1
    return late


def _norm_name(norm: Node) -> str:
    """Which norm of images a `normalize` is, as the report names it."""
    return "batch_norm" if norm.args[1].meta["val"].dim() == 1 else "group_norm"  # type: ignore[union-attr]


def _norms(graph: Graph, roofs: Roofs) -> list[Candidate]:
    """Norms of images whose codes nothing but their own backward reads."""
    found = []
    for norm, gradient in exact_norms.pairs(graph):
        x: Any = norm.args[0]
        parts = sum(numel(part) for part in norm.users if part.args[1] != 0)  # codes, scales and marks, of a byte
        ms = sum(costs.excess(node, roofs) + _beside(node, roofs) for node in (norm, gradient))
        nbytes = bytes_of(x) - parts
        apply = functools.partial(exact_norms.put_back, graph, norm, gradient)
        found.append(Candidate(_norm_name(norm), ms, nbytes, apply))
    return found


def _beside(node: Node, roofs: Roofs) -> float:
    """ms of what exact training fuses with a norm or an activation function, less that of casts which it does not."""
    return 1e3 * fusing.unfused(node) / roofs.copy


def _behind(graph: Graph, roofs: Roofs) -> float:
    """ms by which layers' gradients are faster where g_y is not written and not read: they read the gradient of an
    activation function as codes, or what g_y puts side by side from where it is."""
    layers = graph.find_nodes(op="call_function", target=torch.ops.hotrain.linear_gradients.default)
    behind = [node for node in map(layer_codes.before_activation, layers) if node is not None]
    joined = [node for node in layers if layer_codes.parts_of(node) is not None]
    nbytes = sum(2 * bytes_of(node.args[0]) for node in joined)
    return 1e3 * (_UNREAD * sum(2 * bytes_of(node.args[0]) for node in behind) + nbytes) / roofs.copy


def _statistics(graph: Graph, roofs: Roofs) -> list[float]:
    """ms that batch norms' statistics take longer than the compiler's; where the kernel gains none, it is replaced."""
    found = [
        (node, costs.excess(node, roofs)) for node in graph.find_nodes(op="call_function", target=costs.STATISTICS)
    ]
    for node, ms in found:
        if ms > 0:
            exact_norms.put_statistics_back(graph, node)
    return [min(ms, 0.0) for _, ms in found]


def _interpolation(graph: Graph, roofs: Roofs) -> float:
    """ms that backward of bilinear interpolations is faster as matrix products."""
    found = graph.find_nodes(op="call_function", target=torch.ops.hotrain.bilinear.default)
    return 1e3 * _INTERPOLATION_GAIN * sum(map(numel, found)) / roofs.copy


def _sums_of_groups(graph: Graph, roofs: Roofs) -> float:
    """ms by which the compiler's group norms are slower: in channels_last a group's channels are in several pieces."""
    read = 0.0
    for norm in graph.find_nodes(op="call_function", target=_NORMALIZE):
        if _norm_name(norm) == "group_norm":
            _, count = norm.args[1].meta["val"].shape  # type: ignore[union-attr]
            read += (_OF_GROUPS if count > 1 else _OF_ONE_GROUP) * bytes_of(norm.args[0])
    return 1e3 * read / roofs.copy


def forget(graph: Graph) -> bool:
    """Remove the marks by which tensors and what backward reads in their place are found; whether there were any."""
    marked = graph.find_nodes(op="call_function", target=_MARKED)
    for node in marked:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        graph.erase_node(node)
    return bool(marked)


def _candidates(graph: Graph, roofs: Roofs) -> tuple[list[Candidate], list[float]]:
    """Candidates, and the ms against exact training of what is no candidate: operators, and softmaxes in either way."""
    readings = readings_of(graph)
    restored = graph.find_nodes(op="call_function", target=torch.ops.hotrain.restore_codes.default)
    of_candidates = {node for reading in readings for node in reading.path}
    others = [node for node in restored if node not in of_candidates]
    found = []
    for node in graph.find_nodes(op="call_function", target=torch.ops.hotrain.attention_gradients.default):
        candidate = _attention(graph, node, roofs, readings, others)
        if candidate is not None:
            found.append(candidate)
    groups = [(group, own_keepers(group)) for group in groups_of(readings)]
    found += [_of_group(group, keepers, roofs) for group, keepers in groups]
    packed = {keeper for _, keepers in groups for keeper in keepers}
    kept = graph.find_nodes(op="call_function", target=torch.ops.hotrain.keep_codes.default)
    fixed = [node for target in costs.REPLACING for node in graph.find_nodes(op="call_function", target=target)]
    # What converted layers read was measured with them.
    fixed += [node for node in kept if node not in packed and not _is_of_a_layer(node)]
    fixed += [node for node in others if not _is_of_a_layer(node)]
    spared = [-_from_scores(group, roofs) for group, _ in groups]
    return found, spared + [costs.excess(node, roofs) for node in fixed]


# ---- what backward reads in the place of a tensor ----


def _of_group(group: list[Reading], keepers: list[Node], roofs: Roofs) -> Candidate:
    """Tensors that belong together, all that is read in their place, and what packs for them alone."""
    ms = nbytes = 0.0
    logarithms = is_softmax(group)
    packed, unpacked = (_BY_LOGARITHM, _BY_LOGARITHM) if logarithms else (4, 1 + 2)  # bytes of copies an element
    tensors: dict[Node, float] = {}
    for reading in group:
        kernels = [node for node in reading.path if node.target is torch.ops.hotrain.restore_codes.default]
        ms += sum(costs.excess(node, roofs) for node in kernels)
        halves = any(node.target is _aten.__rshift__.Tensor for node in reading.path)
        fused = _BY_HALVES if halves else 1 - 2
        for place in () if kernels else reading.places:
            # Read from memory by what is no formula that a compiler fuses, it is written there first.
            written = any(user.target in _PRODUCTS for user in _readers(place))
            ms += 1e3 * numel(place) * (unpacked if written else fused) / roofs.copy
        source = source_of(reading.tensor, is_cast)  # of a tensor and its cast, backward is left one
        tensors[source] = min(bytes_of(reading.tensor), tensors.get(source, math.inf))
    nbytes += sum(tensors.values())
    for keeper in keepers:
        if is_kernel(keeper):
            ms += costs.excess(keeper, roofs)
            nbytes -= sum(map(numel, list(keeper.users)[:1]))
        else:
            ms += 1e3 * packed * numel(keeper) / roofs.copy
            nbytes -= numel(keeper)
    what = _SOFTMAX if logarithms else min(map(_what, group), key=lambda name: name == _FORMULA)
    return Candidate(what, ms, nbytes, functools.partial(put_back, group))


def _from_scores(group: list[Reading], roofs: Roofs) -> float:
    """ms in which exact training computes a softmax again: of a result in float32 it saves the scores, of half the
    bytes, besides the cast for the product."""
    return 1e3 * _OF_SCORES * sum(map(numel, casts_of(group))) / roofs.copy


def _what(reading: Reading) -> str:
    """The operator that reads it, as the report names it."""
    told = next(filter(None, (_note(place, OPERATOR) for place in reading.places)), None)
    if told is not None:
        return str(told)
    readers = {user.target for place in reading.places for user in _readers(place)}
    return next((name for target, name in _NAMES.items() if target in readers), _FORMULA)


def _keeper(node: Any) -> Node:
    """The operator that made these codes."""
    return source_of(node, lambda part: part.target is operator.getitem or is_move(part))


def _readers(node: Node) -> list[Node]:
    """What reads a tensor, its views or its copies."""
    return readers_of(node, lambda user: is_move(user) or user.target in _COPIES)


# ---- attention ----


def _attention(graph: Graph, node: Node, roofs: Roofs, readings: list[Reading], others: list[Node]) -> Candidate | None:
    args: Any = node.args
    _, q, k, _, bias, _, _, causal, _, _, wants_mask, number = args
    both = [n for target in exact_attention.KINDS for n in graph.find_nodes(op="call_function", target=target)]
    forward = next((n for n in both if _note(n, ATTENTION) == number), None)
    if forward is None or (wants_mask and exact_attention.KINDS[forward.target][0] != "efficient"):
        return None
    given: Any = forward.args
    output = part_of(graph, forward, 0)
    # Codes of the output are read by the layer behind as well.
    mine = [reading for reading in readings if any(_packed(keeper) is forward for keeper in reading.keepers)]
    for reading in mine:
        readings.remove(reading)
    heads = {_keeper(other.args[0][0]) for other in others}  # type: ignore[index]
    alone = [n for n in heads if n.target is torch.ops.hotrain.keep_heads.default and _packed(n) is forward]
    batch, heads_of_q, tokens, width = (int(n) for n in q.meta["val"].shape)
    keys = int(k.meta["val"].shape[2])
    packs = graph.find_nodes(op="call_function", target=torch.ops.hotrain.keep_heads.default)
    output_packed = any(_packed(n) is forward for n in packs) or bool(mine)
    elements = sum(numel(t) for t in (*given[:3], *[output] * output_packed))
    # Packing reads them in 16 bits and writes 6 on average; then q, k and v are written, and the layer behind's x.
    read = sum(numel(place) * 2.5 for reading in mine for place in reading.places)
    nbytes = elements * 2.8 + numel(q) * 3.0 + 2 * numel(k) * 2.9 + read
    nbytes += 0 if bias is None else _stored(bias.meta["val"]) * bias.meta["val"].dtype.itemsize
    flops = 4.0 * batch * heads_of_q * tokens * keys * width * (0.5 if causal else 1.0)
    rate = roofs.product * _ATTENTION_RATE * min(width, 128) / 64

    def apply() -> None:
        results = exact_attention.put_back(graph, node, forward)
        for user in list(node.users):
            place: Any = user.args[1]
            user.replace_all_uses_with(results[place] if place < 3 + wants_mask else node)
            graph.erase_node(user)
        put_back(mine)
        for keeper in alone:
            _pack_the_output(graph, keeper)

    ms, more = 1e3 * (nbytes / roofs.copy + flops / rate), elements * 1.3 + (0 if output_packed else 2 * numel(output))
    return Candidate("scaled_dot_product_attention", ms, more, apply)


def _stored(t: Tensor) -> int:
    """Elements in memory: those of a mask that is broadcast are read again from the cache."""
    return math.prod(size for size, stride in zip(t.shape, t.stride(), strict=True) if stride)


def _packed(keeper: Any) -> Node | None:
    """The operator whose result an operator has packed; of attention's four, the output's."""
    if keeper.target is torch.ops.hotrain.keep_heads.default:
        return _keeper(keeper.args[0][3]) if len(keeper.args[0]) == 4 else None
    return _keeper(keeper.args[0]) if keeper.target is torch.ops.hotrain.keep_codes.default else None


def _pack_the_output(graph: Graph, keeper: Node) -> None:
    """Pack the output of an attention alone, whose codes a converted layer reads."""
    args: Any = keeper.args
    made = called(graph, keeper, keeper, torch.ops.hotrain.keep_codes.default, args[0][3], args[2])
    for part in list(keeper.users):
        place: Any = part.args[1]
        if place >= 6:
            part.replace_all_uses_with(called(graph, keeper, keeper, operator.getitem, made, place - 6))


def _is_of_a_layer(node: Node) -> bool:
    """Whether a converted layer reads an unpacked tensor: it keeps what its record says."""
    return any(is_ours(user) and user.target is not _MARKED for user in _readers(node))


def _note(node: Node, name: str) -> Any:
    """What `rematerialize.noted` wrote to a node."""
    return (node.meta.get(CUSTOM) or {}).get(name)
