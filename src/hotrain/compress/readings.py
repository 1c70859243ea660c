"""What backward reads in the place of a tensor of forward, in a joint graph, and how the tensor is put back.

Marks name both (`rematerialize`): the exact tensor, and what is computed from codes for each operator that reads it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from .nodes import CASTS, called, is_cast, readers_of, renew
from .rematerialize import PACKED

_aten = torch.ops.aten
_MARKED = torch.ops.hotrain.marked.default
_KEEPERS = tuple(
    getattr(torch.ops.hotrain, name).default
    for name in ("keep_codes", "keep_heads", "norm_forward", "normalize", "activate")
)


@dataclass
class Reading:
    """A tensor of forward, and what backward reads in its place (`rematerialize.in_place_of`).

    Attributes:
        tensor: the exact one.
        places: in backward, one for each operator that reads it.
        path: what is computed from codes for them.
        keepers: the operators that have packed these.
    """

    tensor: Node
    places: list[Node]
    path: set[Node]
    keepers: set[Node]


def readings_of(graph: Graph) -> list[Reading]:
    """Of each tensor that was marked, and packed by an operator."""
    numbered: dict[int, list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=_MARKED):
        number: Any = node.args[1]
        if number != PACKED:
            numbered.setdefault(number, []).append(node)
    found: dict[Node, Reading] = {}
    for first, *places in numbered.values():
        tensor: Any = first.args[0]
        reading = found.setdefault(tensor, Reading(tensor, [], set(), set()))
        for place in places:
            _follow(place, reading)
    return [reading for reading in found.values() if reading.keepers]


def _follow(place: Node, reading: Reading) -> None:
    """Find what a place is computed from, up to the operators that have packed it."""
    reading.places.append(place)
    waiting = list(place.all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node.target in _KEEPERS or is_packed(node):
            reading.keepers.add(node)
        elif node.op == "call_function" and node not in reading.path and node.target is not _MARKED:
            reading.path.add(node)
            waiting += node.all_input_nodes


def is_packed(node: Node) -> bool:
    """Whether a node is a tensor that a formula packs next."""
    number: Any = node.args[1] if node.target is _MARKED else None
    return bool(number == PACKED)


def groups_of(readings: list[Reading]) -> list[list[Reading]]:
    """Tensors that backward makes from the same codes, as of a softmax and the product behind it.

    Only where all of them are kept exact, nothing is packed.
    """
    inside = {node for reading in readings for node in (*reading.path, *reading.places)}
    groups: list[list[Reading]] = []
    for reading in readings:
        packed = {
            keeper
            for keeper in reading.keepers
            if is_packed(keeper) or (is_kernel(keeper) and _is_read_in(keeper, inside))
        }
        mine: list[list[Reading]] = []
        others: list[list[Reading]] = []
        for group in groups:
            (mine if any(packed & other.keepers for other in group) else others).append(group)
        groups = [*others, [*itertools.chain.from_iterable(mine), reading]]
    return groups


def _is_read_in(keeper: Node, inside: set[Node]) -> bool:
    """Whether these are all that read what was packed, up to the places in backward."""
    seen, waiting = {keeper}, list(keeper.users)
    while waiting:
        node = waiting.pop()
        if node not in inside:
            return False
        if node not in seen and node.target is not _MARKED:
            seen.add(node)
            waiting += node.users
    return True


def own_keepers(group: list[Reading]) -> list[Node]:
    """Kernels and tensors packed by a formula that pack for nothing else."""
    inside = {node for reading in group for node in (*reading.path, *reading.places)}
    keepers = {keeper: None for reading in group for keeper in reading.keepers}
    return [keeper for keeper in keepers if (is_kernel(keeper) or is_packed(keeper)) and _is_read_in(keeper, inside)]


def is_kernel(keeper: Node) -> bool:
    """Whether a kernel packs, which is not that of a norm or an activation."""
    return keeper.target is torch.ops.hotrain.keep_codes.default


def is_softmax(group: list[Reading]) -> bool:
    """Whether it has codes of logarithms, as a softmax alone has."""
    return any(node.target is _aten.exp2.default for reading in group for node in reading.path)


def casts_of(group: list[Reading]) -> dict[Any, Reading]:
    """Of a softmax in float32 whose cast a product reads: the float32 tensor → the cast. Empty for other groups."""
    casts = {reading.tensor.args[0]: reading for reading in group if is_cast(reading.tensor)}
    pairs = {reading.tensor: casts[reading.tensor] for reading in group if reading.tensor in casts}
    return pairs if is_softmax(group) else {}


def put_back(group: list[Reading]) -> None:
    """Let backward read the tensors of forward; for both of a pair of `casts_of` the cast."""
    casts = casts_of(group)
    for reading in group:
        cast, first = casts.get(reading.tensor), min(reading.places)
        read = _as_read(reading if cast is None else cast)
        if cast is not None:
            read = called(first.graph, first, first, CASTS[0], read, first.meta["val"].dtype)
        for place in reading.places:
            users = list(place.users)
            place.replace_all_uses_with(read)
            renew(users)


def _as_read(reading: Reading) -> Node:
    """The tensor, or the copy in the order of its axes that forward's product reads: exact training saves that."""
    first, shape = min(reading.places), reading.tensor.meta["val"].shape
    moves = _MARKED, _aten.expand.default
    read = readers_of(reading.tensor, lambda user: user.target in moves and not is_packed(user))
    copies = (user for user in read if user.target is _aten.clone.default and user < first)
    whole = (copy for copy in copies if copy.meta["val"].shape == shape and copy.meta["val"].is_contiguous())
    return next(whole, reading.tensor)
