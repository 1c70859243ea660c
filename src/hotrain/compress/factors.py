"""Products of a branch in a compiled graph: of dropout, of stochastic depth, and of a layer's scale.

Beside a norm they are an argument of its kernel (`fusing`), where a compiler would have fused them with its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .nodes import CASTS, FLOATS, VIEWS, is_dense, value_of

_aten = torch.ops.aten
_OF_BITS = (
    *VIEWS, _aten.permute.default, _aten.alias.default, _aten.slice.Tensor, _aten.__lshift__.Scalar,
    _aten.bitwise_or.Tensor, CASTS[0],
)  # fmt: skip


@dataclass
class Product:
    """A tensor of which each row, or each entry, is multiplied.

    Attributes:
        node: the product.
        branch: what is multiplied, of its shape.
        factor: a number for each sample, (B, 1, …), or for each channel, (C,); or the bits of a dropout's mask.
        times: a number that both are multiplied with.
    """

    node: Node
    branch: Node
    factor: Node
    times: float = 1.0

    @classmethod
    def of(cls, node: Node) -> Product | None:
        """Of forward: stochastic depth, or a dropout as Inductor writes it, (mask · x) · number."""
        if node.target is not _aten.mul.Tensor or not is_dense(node):
            return None
        one, other = node.args
        if isinstance(other, float) and isinstance(one, Node) and one.target is _aten.mul.Tensor:
            mask, x = one.args
            bits = _packed(mask) if isinstance(mask, Node) and len(one.users) == 1 else None
            return cls(node, x, bits, other) if isinstance(x, Node) and bits is not None and _is_like(x, node) else None
        found = cls._of_samples(node) or cls._of_channels(node)
        scaled = None if found is None or len(found.branch.users) > 1 else _scaled(found.branch)
        return found if found is None or scaled is None else cls(node, scaled[0], found.factor, scaled[1])

    @classmethod
    def of_gradient(cls, reader: Node) -> Product | None:
        """Of backward, by what reads a gradient: stochastic depth, or a dropout's where(mask, g · number, 0)."""
        if reader.target is not _aten.mul.Tensor or not is_dense(reader):
            return None
        g, times = reader.args
        if not isinstance(times, float):
            found = cls._of_samples(reader)
            user = next(iter(reader.users)) if len(reader.users) == 1 else None
            scaled = None if found is None or user is None else _scaled(user)
            return found if found is None or scaled is None else cls(user, found.branch, found.factor, scaled[1])  # type: ignore[arg-type]
        node = next(iter(reader.users))
        if len(reader.users) > 1 or node.target is not _aten.where.self or node.args[1] is not reader:
            return None
        mask, _, zero = node.args
        bits = _unpacked(mask) if isinstance(mask, Node) else None
        is_zero = isinstance(zero, Node) and zero.target is _aten.full.default and zero.args[1] == 0
        return cls(node, g, bits, times) if bits is not None and is_zero and _is_like(g, node) else None  # type: ignore[arg-type]

    @classmethod
    def _of_channels(cls, node: Node) -> Product | None:
        args: Any = node.args
        for branch, factor in (args, args[::-1]):
            if _is_of_channels(factor, node) and _is_like(branch, node):
                return cls(node, branch, factor)
        return None

    @classmethod
    def _of_samples(cls, node: Node) -> Product | None:
        args: Any = node.args
        for branch, factor in (args, args[::-1]):
            shape = list(node.meta["val"].shape)
            value = value_of(factor)
            wanted = [shape[0], *[1] * (len(shape) - 1)]
            if value is not None and len(shape) > 2 and value.dtype in FLOATS and list(value.shape) == wanted:
                return cls(node, branch, factor) if _is_like(branch, node) else None
        return None


def _is_of_channels(node: Any, product: Node) -> bool:
    value = value_of(node)
    return value is not None and value.dtype in FLOATS and list(value.shape) == [product.meta["val"].shape[-1]]


def _scaled(node: Node) -> tuple[Node, float] | None:
    """What a node multiplies with a number, or divides by it, and that number."""
    of, number = (*node.args, None, None)[:2]
    if not (isinstance(of, Node) and isinstance(number, float) and is_dense(node) and _is_like(of, node)):
        return None
    if node.target is _aten.div.Tensor and number:
        return of, 1 / number
    return (of, number) if node.target is _aten.mul.Tensor else None


def _is_like(node: Any, other: Node) -> bool:
    return is_dense(node) and node.meta["val"].shape == other.meta["val"].shape


def _packed(mask: Node) -> Node | None:
    """The bits of a mask, as `saved.Bits` packs them: what eight slices of it are put together to."""
    closure, waiting = [mask], [mask]
    while waiting:
        for user in waiting.pop().users:
            if user.target in _OF_BITS and user not in closure:
                closure.append(user)
                waiting.append(user)
    ends = [node for node in closure if node.target is _aten.bitwise_or.Tensor and not set(node.users) & set(closure)]
    slices = [node for node in closure if node.target is _aten.slice.Tensor]
    return ends[0] if len(ends) == 1 and len(slices) == 8 and _are_bits(ends[0], mask) else None


def _unpacked(mask: Node) -> Node | None:
    """The bits that a mask is unpacked from."""
    waiting, seen = [mask], {mask}
    ends = []
    while waiting:
        node = waiting.pop()
        value = value_of(node)
        if value is not None and value.dtype == torch.uint8 and node.target is torch.ops.prims.bitwise_not.default:
            ends += node.all_input_nodes
            continue
        waiting += [n for n in node.all_input_nodes if n not in seen]
        seen.update(node.all_input_nodes)
    return ends[0] if len(ends) == 1 and _are_bits(ends[0], mask) else None


def _are_bits(node: Node, mask: Node) -> bool:
    """Whether the runs of a mask's bits are whole rows."""
    shape, bits = mask.meta["val"].shape, node.meta["val"]
    rows = math.prod(shape[:-1])
    return bits.dtype == torch.uint8 and bits.numel() * 8 == rows * shape[-1] and rows % 8 == 0
