"""Products of a branch in a compiled graph: of dropout, of stochastic depth, and of a layer's scale.

Beside a norm they are an argument of its kernel (`fusing`), where a compiler would have fused them with its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .nodes import CASTS, is_dense, same_order, value_of

_aten = torch.ops.aten
_INVERTED = torch.ops.prims.bitwise_not.default  # how `rematerialize.restore` begins
_PACKING = (_aten.slice.Tensor, CASTS[0], _aten.__lshift__.Scalar, _aten.bitwise_or.Tensor)
_UNPACKING = (
    _aten.ne.Scalar, _aten.bitwise_and.Scalar, _aten.__rshift__.Tensor, _aten.unsqueeze.default,
    _aten.bitwise_not.default,
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
        one, other = _two(node)
        if isinstance(other, float) and isinstance(one, Node) and one.target is _aten.mul.Tensor:
            mask, x = _two(one)
            bits = _packed(mask) if _is_mask(mask, node) and len(one.users) == 1 else None
            return cls(node, x, bits, other) if bits is not None and _is_like(x, node) else None
        found = cls._of_samples(node) or cls._of_channels(node)
        scaled = None if found is None or len(found.branch.users) > 1 else _scaled(found.branch)
        return found if found is None or scaled is None else cls(node, scaled[0], found.factor, scaled[1])

    @classmethod
    def of_gradient(cls, reader: Node) -> Product | None:
        """Of backward, by what reads a gradient: stochastic depth, or a dropout's where(mask, g · number, 0)."""
        if reader.target is not _aten.mul.Tensor or not is_dense(reader):
            return None
        g, times = _two(reader)
        if not isinstance(times, float):
            found = cls._of_samples(reader)
            user = next(iter(reader.users)) if len(reader.users) == 1 else None
            scaled = None if found is None or user is None else _scaled(user)
            return found if found is None or scaled is None else cls(user, found.branch, found.factor, scaled[1])  # type: ignore[arg-type]
        node = next(iter(reader.users), reader)
        if len(reader.users) != 1 or node.target is not _aten.where.self or node.args[1] is not reader:
            return None
        condition: Any = node.args
        mask, _, zero = condition
        bits = _unpacked(mask) if _is_mask(mask, node) else None
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
            wanted = [shape[0], *[1] * (len(shape) - 1)]
            if is_dense(factor) and len(shape) > 2 and list(factor.meta["val"].shape) == wanted:
                return cls(node, branch, factor) if _is_like(branch, node) else None
        return None


def _two(node: Node) -> tuple[Any, Any]:
    one, other = node.args
    return one, other


def _is_of_channels(node: Any, product: Node) -> bool:
    return is_dense(node) and list(node.meta["val"].shape) == [product.meta["val"].shape[-1]]


def _is_mask(node: Any, product: Node) -> bool:
    value = value_of(node)
    return value is not None and value.dtype == torch.bool and value.shape == product.meta["val"].shape


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
            if (user.target in _PACKING or same_order(user)) and user not in closure:
                closure.append(user)
                waiting.append(user)
    ends = [node for node in closure if node.target is _aten.bitwise_or.Tensor and not set(node.users) & set(closure)]
    if len(ends) != 1 or not _are_bits(ends[0], mask):
        return None
    run = ends[0].meta["val"].numel()
    slices = [node for node in closure if node.target is _aten.slice.Tensor]
    in_order = [node.args[1:4] for node in slices] == [(0, n * run, (n + 1) * run) for n in range(8)]
    return ends[0] if in_order and [_shift(node) for node in slices] == list(range(8)) else None


def _shift(node: Node) -> Any:
    """By how much the cast of a slice is shifted."""
    while len(node.users) == 1:
        (node,) = node.users
        if node.target is _aten.__lshift__.Scalar:
            return node.args[1]
        if node.target is not CASTS[0]:
            break
    return 0


def _unpacked(mask: Node) -> Node | None:
    """The bits that a mask is unpacked from, as `saved.Bits` does it; None where anything else is between."""
    node: Any = mask
    passed = []
    while node.target is not _INVERTED:
        if node.target in _UNPACKING:
            passed.append(node.target)
        elif not same_order(node):
            return None
        node = node.args[0]
        if not isinstance(node, Node):
            return None
    bits = node.args[0]
    return bits if tuple(passed) == _UNPACKING and _are_bits(bits, mask) else None


def _are_bits(node: Node, mask: Node) -> bool:
    """Whether the runs of a mask's bits are whole rows, in the order of its memory."""
    value, bits = mask.meta["val"], node.meta["val"]
    rows = math.prod(value.shape[:-1])
    whole = value.is_contiguous() and bits.numel() * 8 == rows * value.shape[-1] and rows % 8 == 0
    return bool(bits.dtype == torch.uint8 and bits.dim() == 1 and whole)
