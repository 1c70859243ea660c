"""The cut of a joint graph: forward returns codes in the place of a tensor, backward dequantizes them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from . import graph
from .formats import packer
from .nodes import base_of, bytes_of, inlined, is_alias
from .rematerialize import repeats


class Halves:
    """The graphs of forward and backward, and what crosses from one to the other.

    Attributes:
        outputs: outputs of forward; the first ``results`` are for its caller.
        kept: the others that backward takes, as nodes of forward.
        arguments: name → node of backward.
    """

    def __init__(self, forward: Graph, backward: Graph, results: int) -> None:
        self.forward, self.backward, self.results = forward, backward, results
        self.output = forward.output_node()
        self.outputs: list[Any] = list(self.output.args[0])  # type: ignore[arg-type]
        self.arguments = {node.name: node for node in backward.find_nodes(op="placeholder")}
        crossing = [node for node in self.outputs[results:] if isinstance(node, Node)]
        self.kept = [node for node in dict.fromkeys(crossing) if node.name in self.arguments]
        self.replaced: dict[Node, list[Node]] = {}  # node → what crosses in its place
        self.beside: dict[Node, list[Node]] = {}  # node → what crosses before it
        self.taken: list[Node] = []  # new arguments of backward

    def uses(self) -> graph.Backward:
        old = (self.arguments[node.name] for node in self.kept if self.is_needed(node))
        return graph.Backward(self.backward, [*old, *self.taken])

    def is_needed(self, node: Node) -> bool:
        return node not in self.replaced and bool(self.arguments[node.name].users)

    def replace_by_codes(self, node: Node, form: str) -> None:
        """Replace a saved tensor by its codes."""
        argument = self.arguments[node.name]
        self.replaced[node] = self._replace(node, argument, form, argument)

    def replace_by_factors(self, node: Node, forms: Mapping[Node, str]) -> None:
        """Replace a saved tensor by what backward makes from it, computed in forward."""
        copies = self._in_forward(forms)
        argument = self.arguments[node.name]
        self.replaced[node] = [
            part for factor, form in forms.items() for part in self._replace(copies[factor], factor, form, argument)
        ]
        self._without_dead()

    def compute_in_forward(self, node: Node, made: Collection[Node]) -> None:
        """Save what backward makes of a saved tensor, beside it."""
        copies, argument = self._in_forward(made), self.arguments[node.name]
        self.beside[node] = [part for each in made for part in self._replace(copies[each], each, "", argument)]
        self._without_dead()

    def _read_flags(self) -> bool:
        """Let backward read booleans where it packs and unpacks their bits, of a tensor that is saved whole after all.

        False: no change.
        """
        changed = False
        for taken in self.backward.find_nodes(op="call_function", target=torch.ops.prims.bitwise_not.default):
            packed, waiting = set(), [taken.args[0]]
            while waiting:
                node = waiting.pop()
                if node.op != "placeholder" and node not in packed and repeats(node) is False:
                    packed.add(node)
                    waiting += node.all_input_nodes
            if not packed:  # the bits are saved
                continue
            flags = [node for node in self.backward.nodes if node in packed and _is_flag(node)]
            made = [taken]
            while len(made[-1].users) == 1 and not _is_flag(made[-1]):
                made += made[-1].users
            while len(made[-1].users) == 1 and _is_flag(view := next(iter(made[-1].users))) and is_alias(view):
                made.append(view)
            whole = [node for node in flags if _is_alike(node, flags[0])]
            if whole and _is_flag(made[-1]) and _is_alike(made[-1], whole[-1]):
                made[-1].replace_all_uses_with(whole[-1])
                changed = True
        if changed:
            self._without_dead()
        return changed

    def _without_dead(self) -> None:
        for dead in reversed(list(self.backward.nodes)):
            if dead.op == "call_function" and not dead.users and not dead.is_impure():
                self.backward.erase_node(dead)

    def finish(self) -> bool:
        """Update forward's outputs; False if nothing has changed."""
        changed = self._read_flags()
        for node in self.kept:
            if not self.arguments[node.name].users and isinstance(node.meta.get("val"), Tensor):
                self.replaced.setdefault(node, [])
                self.backward.erase_node(self.arguments[node.name])
        if not self.replaced and not self.beside:
            return changed
        kept = [[*self.beside.get(n, ()), *self.replaced.get(n, [n])] for n in self.outputs[self.results :]]
        new = [*([node] for node in self.outputs[: self.results]), *kept]
        self.output.args = (tuple(part for parts in new for part in parts),)
        described = self.output.meta.get("desc")
        if described is not None and len(described) == len(new):
            self.output.meta["desc"] = [d for d, parts in zip(described, new, strict=True) for _ in parts]
        return True

    def kept_bytes(self, parameters: set[Node]) -> int:
        """Bytes of the storages that cross the cut, each once, without parameters."""
        crossing: Any = self.output.args[0]
        bases = {base_of(node) for node in crossing[self.results :] if isinstance(node, Node)} - parameters
        return sum(map(bytes_of, bases))

    def _in_forward(self, wanted: Iterable[Node]) -> dict[Node, Node]:
        """Copy nodes of backward that depend on saved tensors alone to forward."""
        needed, waiting = set(), list(wanted)
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                waiting += node.all_input_nodes
        there = {node.name: node for node in self.forward.nodes}
        copies = {node: there[node.name] for node in needed if node.op == "placeholder"}
        given = set(copies.values())
        last = next(node for node in reversed(self.forward.nodes) if node in given)
        with self.forward.inserting_before(last.next):
            for node in self.backward.nodes:
                if node in needed and node not in copies:
                    copies[node] = self.forward.node_copy(node, copies.__getitem__)
        return copies

    def _replace(self, source: Node, target: Node, form: str, place: Node) -> list[Node]:
        """Pack `source` in forward and unpack it in backward in place of `target`, after arguments before `place`."""
        keep, restore = packer(source.meta["val"], form)
        # Right after it: codes made at the end of forward would keep the tensor alive until then.
        codes = inlined(self.forward, source.next, keep, [source]) if form else [source]
        taken = []
        for number, part in enumerate(codes):
            if form or part.name not in self.arguments:
                part.name = _free(f"{source.name}_codes_{number}", self.forward, self.backward)
            part.meta["saved_tensor_with_no_vc_check"] = place.meta.get("saved_tensor_with_no_vc_check", False)
            with self.backward.inserting_before(place):
                taken.append(self.backward.placeholder(part.name))
            taken[-1].meta = {**part.meta}
        self.taken += taken
        order = {n: number for number, n in enumerate(self.backward.nodes)}
        first = min(target.users, key=order.__getitem__)
        (made,) = inlined(self.backward, first, restore, taken) if form else taken
        target.replace_all_uses_with(made)
        return codes


def _is_flag(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype == torch.bool


def _is_alike(a: Node, b: Node) -> bool:
    return bool(a.meta["val"].shape == b.meta["val"].shape)


def _free(name: str, *halves: Graph) -> str:
    taken = {node.name for half in halves for node in half.nodes}
    return next(n for n in (name, *(f"{name}_{i}" for i in range(len(taken) + 1))) if n not in taken)
