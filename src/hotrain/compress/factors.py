"""Products of a branch in a compiled graph: of dropout, of stochastic depth, and of a layer's scale.

Beside a norm they are an argument of its kernel (`fusing`), where a compiler would have fused them with its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .nodes import is_dense, same_order, value_of

_aten = torch.ops.aten
_INVERTED = torch.ops.prims.bitwise_not.default  # how `rematerialize.restore` begins
_UNPACKING = (_aten.ne.Scalar, _aten.bitwise_and.Scalar, _aten.__rshift__.Tensor, _aten.unsqueeze.default)


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
        """Of forward: stochastic depth, or a dropout's where(mask, x · number, 0)."""
        if node.target is _aten.where.self:
            return cls._of_mask(node)
        if node.target is not _aten.mul.Tensor or not is_dense(node):
            return None
        found = cls._of_samples(node) or cls._of_channels(node)
        scaled = None if found is None or len(found.branch.users) > 1 else _scaled(found.branch)
        return found if found is None or scaled is None else cls(node, scaled[0], found.factor, scaled[1])

    @classmethod
    def of_gradient(cls, reader: Node) -> Product | None:
        """Of backward, by what reads a gradient: stochastic depth, or a dropout's where(mask, g · number, 0)."""
        if reader.target is not _aten.mul.Tensor or not is_dense(reader):
            return None
        if not isinstance(reader.args[1], float):
            found = cls._of_samples(reader)
            user = next(iter(reader.users)) if len(reader.users) == 1 else None
            scaled = None if found is None or user is None else _scaled(user)
            return found if found is None or scaled is None else cls(user, found.branch, found.factor, scaled[1])  # type: ignore[arg-type]
        node = next(iter(reader.users), reader)
        return cls._of_mask(node) if node.target is _aten.where.self and node.args[1] is reader else None

    @classmethod
    def _of_mask(cls, node: Node) -> Product | None:
        """A dropout's where(mask, x · number, 0), which alone reads the product."""
        args: Any = node.args
        mask, product, zero = args
        scaled = _scaled(product) if len(product.users) == 1 and _is_like(product, node) else None
        bits = _bits_of(mask) if _is_mask(mask, node) else None
        is_zero = isinstance(zero, Node) and zero.target is _aten.full.default and zero.args[1] == 0
        return cls(node, scaled[0], bits, scaled[1]) if scaled and bits is not None and is_zero else None

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


def _bits_of(mask: Node) -> Node | None:
    """The bits that a mask is unpacked from, as `saved.Bits` does it; None where anything else is between."""
    node: Any = mask
    passed = []
    while node.target in _UNPACKING or same_order(node):
        if node.target in _UNPACKING:
            passed.append(node.target)
        node = node.args[0]
    if node.target is _aten.bitwise_not.default and node.args[0].target is _INVERTED:  # of backward: twice inverted
        node = node.args[0].args[0]
    return node if tuple(passed) == _UNPACKING and _are_bits(node, mask) else None


def _are_bits(node: Node, mask: Node) -> bool:
    """Whether the runs of a mask's bits are whole rows, in the order of its memory."""
    value, bits = mask.meta["val"], node.meta["val"]
    rows = math.prod(value.shape[:-1])
    whole = value.is_contiguous() and bits.numel() * 8 == rows * value.shape[-1] and rows % 8 == 0
    return bool(bits.dtype == torch.uint8 and bits.dim() == 1 and whole)
