"""How a compiled backward graph uses each saved tensor, and so which class of `rules` the tensor has.

In eager mode only the function is seen. A compiled backward is there in full, so its rules are for uses: the tensor
multiplies a gradient, is divided by, is compared. Functions with a bounded, continuous derivative are recognized by the
name that PyTorch leaves on what it decomposed (``original_aten``).

Words: *kept* is a tensor that forward passes to backward; a *gradient* is a node that depends on the gradient of the
result; the other nodes are made in backward from kept tensors alone.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from . import rules
from .nodes import is_ours, numel, readers_of
from .rematerialize import repeats
from .rules import EXACT, RATIO, SHAPE, SIGN, VALUE

_aten = torch.ops.aten

OURS = "ours"  # the class of a use by hotrain's own operators
CHECKPOINT = "checkpoint"  # the name of what a checkpoint recomputes

_MOVED, _SUMS, _RATIOS = rules.MOVE.aten, rules.SUM.aten, rules.ROOTS.aten
_PRODUCTS = rules.MUL.aten | rules.MATMUL.aten | rules.CONVOLUTION.aten
_SMOOTH = rules.SMOOTH.decomposed | rules.ACTIVATION.decomposed
_WIDE_RESULTS = frozenset().union(*(rule.aten for rule in rules.RULES if rule.wide)) - {_aten.div, _aten.pow}
_SIGNED = _MOVED | {_aten.mul, _aten.div}  # the signs of whose result follow from those of their inputs
# SIGN: the sign's own operators. SHAPE: whatever reads no element.
_SIGNS, _SHAPES = rules.ABSOLUTE.aten, rules.POOLING.aten
_POWERS = (1, 2, 3)  # in the derivatives of `rules.POLYNOMIAL`
KEY = "hotrain"  # of a node's metadata: the model that the node belongs to

_CODES = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
_FEW = 16  # a reduction of at least so many elements is a statistic, which stays exact


@dataclass
class Uses:
    """How backward uses one kept tensor.

    Attributes:
        classes: the classes of its uses.
        names: functions of PyTorch that these uses belong to.
        exact: those of them that need full precision.
        bits: what backward packs again for others: of the tensor as it was, or in forward.
    """

    classes: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    exact: set[str] = field(default_factory=set)
    bits: dict[Node, None] = field(default_factory=dict)

    def add(self, kind: str, user: Node) -> None:
        """Record one use: its class, and the node that uses the tensor."""
        name = name_of(user)
        self.classes.add(kind)
        self.names.add(name)
        if kind == EXACT:
            self.exact.add(name)

    def pack(self, user: Node) -> None:
        """Record a node that packs bits."""
        self.exact.add(name_of(user))
        if any(repeats(other) is not False for other in user.users):
            self.bits[user] = None

    @property
    def whole(self) -> str:
        """One class that is precise enough for all uses but the bits, if there are others."""
        if self.bits and not self.classes:
            return EXACT
        return OURS if OURS in self.classes else rules.strictest(self.classes)


class Backward:
    """A backward graph, its arguments divided into gradients and tensors that forward ``kept``."""

    def __init__(self, graph: torch.fx.Graph, kept: Iterable[Node]) -> None:
        kept = set(kept)
        self.gradients: set[Node] = set()
        self.roots: dict[Node, frozenset[Node]] = {}  # node made from kept tensors alone → these tensors
        for node in graph.nodes:
            inputs = node.all_input_nodes
            if node.op == "placeholder":
                if node in kept:
                    self.roots[node] = frozenset((node,))
                else:
                    self.gradients.add(node)
            elif any(n in self.gradients for n in inputs):
                self.gradients.add(node)
            else:
                self.roots[node] = frozenset().union(*(self.roots[n] for n in inputs))

    def uses(self, kept: Node) -> Uses:
        """All uses of a kept tensor, and of what is made from it."""
        # With each node, whether its entries have the signs of the kept tensor's, but for a factor: x + 1/2 has not.
        found, seen, waiting = Uses(), {(kept, True)}, [(kept, True)]
        while waiting:
            node, signed = waiting.pop()
            for user in node.users:
                if user.op == "output":  # it is a gradient itself
                    found.add(VALUE, user)
                    continue
                if repeats(user) is False:
                    found.pack(user)
                    if (user, False) not in seen:
                        seen.add((user, False))
                        waiting.append((user, False))
                    continue
                if repeats(node) is False:  # it reads the bits
                    continue
                kind = self._class(node, user)
                if kind is not None:
                    found.add(kind if kind != SIGN or signed else EXACT, user)
                    continue
                made = user, signed and _packet(user) in _SIGNED
                if made not in seen:
                    seen.add(made)
                    waiting.append(made)
        return found

    def factors(self, kept: Node) -> dict[Node, str] | None:
        """What to keep in place of a kept tensor: nodes made from it that are combined with a gradient → class of use.

        None if not all of them can be made in forward, or if one is combined with a gradient in another way than as a
        factor, a term or a condition.
        """
        found: dict[Node, str] = {}
        seen, waiting = {kept}, [kept]
        while waiting:
            node = waiting.pop()
            for user in node.users:
                op = _packet(user)
                if user.op != "call_function" or is_ours(user) or name_of(user) in rules.LOSS.decomposed | {CHECKPOINT}:
                    return None
                if user not in self.gradients:
                    if user not in seen:
                        seen.add(user)
                        waiting.append(user)
                    continue
                if op is _aten.where or op in _PRODUCTS | _SUMS | _MOVED:
                    kind = VALUE
                elif op is _aten.div and user.args[1] is node:
                    kind = RATIO
                else:
                    return None
                first = _before_moves(node, self.roots)
                if _packet(first) in _SIGNS:
                    found[first] = SIGN
                    continue
                found[first] = RATIO if RATIO in (kind, found.get(first)) else VALUE
        return found

    def _class(self, node: Node, user: Node) -> str | None:
        """The class of one use of a node made from kept tensors; None if it depends on the uses of the result."""
        op, gradient = _packet(user), user in self.gradients
        if is_ours(user):
            return OURS
        if op in _SHAPES:
            return SHAPE
        if _is_recomputed(user):
            return EXACT
        if repeats(user):
            return VALUE
        smooth = _smooth(user)
        if smooth == "backward":
            return VALUE
        if op in _SIGNS:
            return SIGN
        passed: str | None = VALUE if gradient else None
        if smooth or op in _MOVED or (not gradient and (op in rules.CONTINUOUS.aten or _is_bell(user))):
            return passed
        if op in _PRODUCTS:
            others = [n for n in user.all_input_nodes if n is not node]
            if not gradient and any(_is_codes(root) for n in others for root in self.roots.get(n, ())):
                return OURS  # a scale
            return passed
        if op in _SUMS:
            # If the terms come from different tensors, their errors may be as large as the sum.
            alone = all(self.roots[n] == self.roots[node] for n in user.all_input_nodes if n not in self.gradients)
            return passed if alone else EXACT
        if op is _aten.where and user.args[0] is not node:
            return passed
        if op is _aten.div:
            return RATIO if user.args[1] is node else passed
        if op is _aten.pow and user.args[0] is node:
            return (passed if user.args[1] in _POWERS else RATIO) if isinstance(user.args[1], int | float) else EXACT
        return RATIO if op in _RATIOS else EXACT


def spans_magnitudes(node: Node, kept: Mapping[str, Node] | None = None) -> bool:
    """Whether a tensor is the result of a function whose elements span orders of magnitude, or is made of such by
    products and conditions.

    Factors that are smaller than the product, as a statistic of rows, do not count. Of a node of backward the search
    goes on in forward, where `kept` is given, name → node of forward.
    """
    waiting, seen = [node], {node}
    while waiting:
        node = waiting.pop()
        if node.op == "placeholder" and kept and node.name in kept:
            node, kept = kept[node.name], None
        op, made = _packet(node), node.all_input_nodes
        if op is _aten.where or (op is _aten.mul and len(made) > 1):
            made = [n for n in made if numel(n) == numel(node)]
        elif op not in _MOVED | _SUMS | _PRODUCTS or len(made) != 1:
            if (
                op in _WIDE_RESULTS
                or (op is _aten.div and isinstance(node.args[1], Node))
                or (op is _aten.pow and not (isinstance(node.args[1], int | float) and 1 <= node.args[1] <= 4))
            ):
                return True
            continue
        waiting += [n for n in made if n not in seen]
        seen.update(made)
    return False


def is_normed(node: Node) -> bool:
    """Whether a tensor of the forward graph is divided by its own norm.

    Vectors of a small norm then have gradients as large as others, and elements of one group may be of several vectors.
    """
    for user in readers_of(node, lambda moved: _packet(moved) in _MOVED):
        op = _packet(user)
        squared = (op is _aten.pow and user.args[1] == 2) or (op is _aten.mul and len(user.all_input_nodes) == 1)
        summed = squared and any(_packet(reduced) in (_aten.sum, _aten.mean) for reduced in user.users)
        if summed or op in rules.NORM.aten:
            return True
    return False


def is_statistic(node: Node) -> bool:
    """Whether a tensor of the forward graph is a reduction such as a mean, alone or combined with parameters."""
    waiting, reduced = [node], False
    for _ in range(64):
        if not waiting:
            return reduced
        node = waiting.pop()
        made = node.all_input_nodes
        op = _packet(made[0]) if node.target is operator.getitem else _packet(node)
        if op in rules.STATISTIC.aten:
            if numel(node) * _FEW > max((numel(n) for n in made), default=0) and op is not _aten.var_mean:
                return False
            reduced = True
        elif node.op != "placeholder":
            if op not in _MOVED | _SUMS | _PRODUCTS | _RATIOS | {_aten.log, _aten.exp, _aten.div, _aten.pow}:
                return False
            waiting += made
        elif numel(node) > _FEW**4:
            return False
    return False


def name_of(node: Node) -> str:
    """The name that a user knows: the function's, not that of its derivative or of its decomposition."""
    if _is_recomputed(node):
        return CHECKPOINT
    if (again := repeats(node)) is not None:
        return "packing" if again else "signs"
    op = node.meta.get("original_aten")
    op = getattr(op, "overloadpacket", op) or _packet(node)
    name = getattr(op, "__name__", str(op)).strip("_")
    return name.removesuffix("_data").removesuffix("_backward").removesuffix("_forward").removesuffix("_for_cpu")


def _before_moves(node: Node, known: dict[Node, Any]) -> Node:
    """The node before casts, views, copies and expansions."""
    while _packet(node) in _MOVED and len(node.all_input_nodes) == 1 and node.target is not operator.getitem:
        (source,) = node.all_input_nodes
        if source not in known or not isinstance(source.meta.get("val"), Tensor) or numel(source) > numel(node):
            break
        node = source
    return node


def _packet(node: Node) -> object:
    return getattr(node.target, "overloadpacket", node.target)


def _is_recomputed(node: Node) -> bool:
    """Whether a node is recomputed as part of a checkpointed block."""
    return node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def _is_bell(node: Node) -> bool:
    """Whether a node is exp(−x²), the factor of erf's derivative."""
    if _packet(node) is not _aten.exp or not isinstance(node.args[0], Node):
        return False
    minus = node.args[0]
    square = minus.args[0] if _packet(minus) is _aten.neg else None
    return isinstance(square, Node) and _packet(square) is _aten.pow and bool(square.args[1] == 2)


def _smooth(node: Node) -> str:
    """ "forward" or "backward" for a part of one of `_SMOOTH`, else ""."""
    op = node.meta.get("original_aten")
    name = getattr(getattr(op, "overloadpacket", op), "__name__", "").strip("_")
    if name.removesuffix("_backward") not in _SMOOTH:
        return ""
    return "backward" if name.endswith("_backward") else "forward"


def _is_codes(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype in _CODES
