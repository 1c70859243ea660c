"""Batched products of 16-bit matrices whose rows are no multiple of 16 bytes, padded with zeros.

Attention that is written as products has them where the tokens are no multiple of 8: windows of 49, or 197 with the
class token. GPUs read and write such rows element by element: the products take about twice as long as padded ones
(H200, measured for each product). The key tokens are padded in q kᵀ, p v and their gradients,

    c = a b  ──►  c = (pad(a) pad(b))[:M, :N]

Results are sliced, which costs nothing where formulas read them. A compiler writes the padded operand in the place of
the copy that it makes anyway, or in one more pass. A softmax and its gradient sum over padded rows, so that one kernel
has the sums and writes what they are needed for with its padding.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..planning import Roofs, agreed
from ..private import WRITTEN
from . import costs
from .formats import is_static
from .nodes import (
    VIEWS,
    arguments_of,
    bytes_of,
    called,
    inlined,
    is_alias,
    is_cast,
    is_pointwise,
    readers_of,
    value_of,
)

_aten = torch.ops.aten
_ROW = 8  # elements of 16 bytes
_MOST = 1.25  # a padded size, over the size
_LONGEST = 64  # operators of a formula that is computed again with its padding
_HALVES = torch.float16, torch.bfloat16
_TURNS = _aten.permute.default, _aten.transpose.int
_NEUTRAL = {_aten.sum.dim_IntList: 0.0, _aten.amax.default: -math.inf}
_SUMS = tuple(_NEUTRAL)
_COPIES = _aten.clone.default, _aten.cat.default, _aten.constant_pad_nd.default, _aten.select_scatter.default
_measured: dict[str, tuple[float, ...] | None] = {}

Sizes = dict[int, int]  # axis, -1 or -2 → its size when it is padded


def pad(graph: Graph, roofs_of: Callable[[], Roofs | None]) -> bool:
    """Pad the products that are faster so, in place; returns whether the graph has changed.

    Args:
        graph: of forward or of backward.
        roofs_of: returns what was measured of the device; None where that is nothing, and nothing is padded.
    """
    found = [n for n in graph.find_nodes(op="call_function", target=_aten.bmm.default) if _Product(n).sizes]
    roofs = roofs_of() if found else None
    if roofs is None:
        return False
    padded, changed = _Padded(graph), False
    for one in map(_Product, found):  # one after another: a product may read the one before
        if one.sizes and one.gain(roofs, padded) > 0:
            padded.replace(one)
            changed = True
    if changed:
        padded.share()
        graph.eliminate_dead_code()
    return changed


def gain(graph: Graph, roofs: Roofs) -> float:
    """ms that a step is faster by what `pad` does to its halves, of which ``graph`` is the joint one."""
    known, products = _Padded(graph), map(_Product, graph.find_nodes(op="call_function", target=_aten.bmm.default))
    return sum(max(one.gain(roofs, known), 0.0) for one in products if one.sizes)


class _Product:
    """A call of bmm, and what is padded of it: of (M, K) by (K, N) each size along which rows are contiguous."""

    def __init__(self, node: Node) -> None:
        operands: Any = node.args
        a, b = self.a, self.b = operands
        self.node = node
        self.sizes: dict[str, int] = {}
        values = value_of(a), value_of(b)
        if any(t is None or t.dtype not in _HALVES or not is_static(t) for t in values):
            return
        rows = [_axis_of_rows(t) for t in values]
        if None in rows:
            return
        (_, m, k), n = values[0].shape, values[1].shape[-1]  # type: ignore[union-attr]
        sizes = {"M": m, "K": k, "N": n}
        along = {"N", "K" if rows[0] == -1 else "M", "N" if rows[1] == -1 else "K"}
        padded = {name: _whole(size) for name, size in sizes.items() if name in along and size % _ROW}
        if all(size <= _MOST * sizes[name] for name, size in padded.items()):
            self.sizes = padded

    def operands(self) -> list[tuple[Node, Sizes]]:
        """Both, with the sizes of their axes that are padded."""
        return [(self.a, self._of("M", "K")), (self.b, self._of("K", "N"))]

    def _of(self, *names: str) -> Sizes:
        return {axis: self.sizes[name] for axis, name in zip((-2, -1), names, strict=True) if name in self.sizes}

    def gain(self, roofs: Roofs, known: _Padded) -> float:
        """ms that a step is faster."""
        pairs = [(operand, sizes) for operand, sizes in self.operands() if sizes]
        key = f"padded {[(t.dtype, tuple(t.shape), t.stride()) for t in map(value_of, (self.a, self.b))]}"  # type: ignore[union-attr]
        if key not in _measured:
            _measured[key] = agreed(key, _times(self.operands()))
        times = _measured[key]
        if times is None:
            return 0.0
        moved = sum(known.passes(operand, sizes) * bytes_of(operand) for operand, sizes in pairs)
        readers = readers_of(self.node, _is_view)
        formulas = sum(map(_is_formula, readers))
        if formulas < len(readers) and self.sizes.keys() & {"M", "N"}:  # a copy, made where a formula reads the slice
            moved += (1 if formulas else 2) * bytes_of(self.node)
        return times[0] - times[1] - 1e3 * moved / roofs.copy


class _Padded:
    """Tensors with padded axes; each is made once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.made: dict[Any, Node] = {}
        self.sums: set[Node] = set()  # over padded rows

    def replace(self, one: _Product) -> None:
        """The padded product in the place of one."""
        node = one.node
        a, b = (self.of(operand, sizes, node) if sizes else operand for operand, sizes in one.operands())
        result = called(self.graph, node, node, _aten.bmm.default, a, b)
        for axis, name in ((1, "M"), (2, "N")):
            if name in one.sizes:
                size = node.meta["val"].shape[axis]
                result = called(self.graph, node, node, _aten.slice.Tensor, result, axis, 0, size)
        copy = None
        for user in list(node.users):
            if result.target is not _aten.slice.Tensor:
                user.replace_input_with(node, result)
            elif not _lets_read(user, node, result):
                # In the memory layout that it had: others, and whoever saves it, rely on that.
                copy = copy or called(
                    self.graph, node, node, _aten.clone.default, result, memory_format=torch.contiguous_format
                )
                user.replace_input_with(node, copy)
        self.graph.erase_node(node)

    def of(self, node: Node, sizes: Sizes, before: Node) -> Node:
        """A node with its last axes padded, before another one; padded where its elements are, views behind it."""
        key = node, *sorted(sizes.items())
        if key not in self.made:
            self.made[key] = self._of(node, sizes, before)
        return self.made[key]

    def _of(self, node: Node, sizes: Sizes, before: Node) -> Node:
        inner = _inside(node, sizes)
        if inner is not None:
            source = self.of(*inner, before)
            if node.target in _TURNS:
                return called(self.graph, before, node, node.target, source, *node.args[1:])
            shape = list(node.meta["val"].shape)
            for axis, size in sizes.items():
                shape[axis] = size
            with contextlib.suppress(RuntimeError, ValueError):  # padded, it may have strides without that view
                return called(self.graph, before, node, node.target, source, shape)
        value = node.meta["val"]
        amounts = [0, 0, 0, 0]
        for axis, size in sizes.items():
            amounts[-2 * axis - 1] = size - value.shape[axis]
        sums = self._padded_with(node, sizes)
        if sums:
            for each in sums:
                self._sum_padded_rows(each, sizes[-1])
            return self._with_readers(node, self._masked(self._in_rows(node, sizes[-1]), node, 0.0))
        if (is_pointwise(node) or is_cast(node)) and not _is_written_anyway(node):
            # Else the padding would be computed of a softmax's exponentials, and these written in float32 for it.
            node.meta[WRITTEN] = True
        return called(self.graph, before, node, _aten.constant_pad_nd.default, node, amounts)

    def _in_rows(self, node: Node, size: int, reader: Node | None = None) -> Node:
        """A formula of rows with as many elements, anything in those that are added.

        What a reader repeats, as a bias or a mask, is padded as it is.
        """
        key = node, size
        if key in self.made:
            return self.made[key]
        last = node.meta["val"].shape[-1]
        after = self._after(node)
        source: Any = node.args[0] if node.args else None
        made: Any = None
        if reader is not None and _repeats(reader, node):
            node.meta[WRITTEN] = True
        elif node.target is _aten.slice.Tensor and _is_first_part(node, size):
            made = source
        elif _is_by_element(node) or node.target is _aten.clone.default:
            args = map_arg(node.args, lambda t: self._in_rows(t, size, node) if _row_of(t) == last else t)
            made = called(self.graph, after, node, node.target, *args, **node.kwargs)
        elif _keeps_rows(node) or (node.target is _aten.expand.default and _row_of(source) == 1):
            source = self._in_rows(source, size, node) if _keeps_rows(node) else source
            with contextlib.suppress(RuntimeError, ValueError):
                made = called(self.graph, after, node, node.target, source, [*node.meta["val"].shape[:-1], size])
        if made is None:
            made = called(self.graph, after, node, _aten.constant_pad_nd.default, node, [0, size - last])
        self.made[key] = made
        return made

    def share(self) -> None:
        """Let what pads rows with zeros, as codes of a softmax do, read those that are computed with their padding."""
        mine = set(self.made.values())
        for node in self.graph.find_nodes(op="call_function", target=_aten.constant_pad_nd.default):
            source, amounts, *value = arguments_of(node)
            size = int(node.meta["val"].shape[-1])
            if node not in mine and amounts[0] == 0 and len(amounts) == 2 and value == [0] and self._has(source, size):
                node.replace_all_uses_with(self._masked(self._in_rows(source, size), source, 0.0))

    def _has(self, node: Node, size: int) -> bool:
        """Whether a node, or what it has the rows of, is computed with its padding."""
        while (node, size) not in self.made and (_keeps_rows(node) or is_cast(node)):
            (node,) = node.all_input_nodes
        return (node, size) in self.made

    def _padded_with(self, node: Node, sizes: Sizes) -> list[Node]:
        """The sums of a formula that is computed with its padding, as nothing else needs it without; else nothing."""
        sums = self._sums_of_rows(node) if sizes.keys() == {-1} and node.meta["val"].is_contiguous() else []
        alone = all(reader.target is _aten.bmm.default or _is_formula(reader) for reader in readers_of(node, _is_view))
        return sums if alone else []

    def _sum_padded_rows(self, node: Node, size: int) -> None:
        if node not in self.sums:
            arguments: Any = node.args
            of, *rest = arguments
            rows = self._masked(self._in_rows(of, size), of, _NEUTRAL[node.target])  # type: ignore[index]
            made = called(self.graph, node, node, node.target, rows, *rest, **node.kwargs)
            node.replace_all_uses_with(made)
            self.sums.add(made)

    def _sums_of_rows(self, node: Node) -> list[Node]:
        """The sums within a formula, in order, if all of them are over its rows: of a softmax, or its gradient."""
        if not _is_by_element(node):
            return []
        size, seen, waiting, found = node.meta["val"].shape[-1], set(), [node], []
        while waiting:
            one = waiting.pop()
            spreads = one.target is _aten.expand.default or (
                one.target is _aten.unsqueeze.default and _row_of(one) == 1
            )
            if one in seen or not (spreads or _is_formula(one) or _keeps_rows(one)):
                continue
            seen.add(one)
            if one.target in _SUMS:
                if one in self.sums:
                    found.append(one)
                    continue
                of, axes, *_ = arguments_of(one)
                value = of.meta["val"]
                is_last = [axis % value.dim() for axis in axes or ()] == [value.dim() - 1]
                if not is_last or value.shape[-1] != size or not value.is_floating_point():
                    return []
                found.append(one)
            waiting += [t for t in one.all_input_nodes if not _repeats(one, t)]
        return sorted(found) if len(seen) <= _LONGEST else []

    def _masked(self, rows: Node, like: Node, value: float) -> Node:
        """Padded rows with a value in the elements that are added."""
        size = like.meta["val"].shape[-1]

        def mask(t: Tensor) -> Tensor:
            return torch.where(torch.arange(t.shape[-1], dtype=torch.int32, device=t.device) < size, t, value)

        return inlined(self.graph, self._after(rows), mask, [rows])[0]

    def _after(self, node: Node) -> Node:
        """What comes behind a node; arguments are before all others."""
        places = self.graph.find_nodes(op="placeholder")
        return places[-1].next if node.op == "placeholder" else node.next

    def _with_readers(self, node: Node, made: Node) -> Node:
        """A node padded; the formulas that read it read a part of that."""
        part = called(self.graph, self._after(made), node, _aten.slice.Tensor, made, -1, 0, node.meta["val"].shape[-1])
        for user in list(node.users):
            if part < user:
                _lets_read(user, node, part)
        return made

    def passes(self, node: Node, sizes: Sizes) -> int:
        """How often padding reads or writes the tensor in memory; what is copied anyway is padded as it is copied."""
        if (node, *sorted(sizes.items())) in self.made:
            return 0
        inner = _inside(node, sizes)
        if inner is not None:
            return self.passes(*inner)
        return 0 if _is_written_anyway(node) or self._padded_with(node, sizes) else 2


def _inside(node: Node, sizes: Sizes) -> tuple[Node, Sizes] | None:
    """What a node is a view of, and the axes that are padded there; None where it is no view, or these axes change."""
    source: Any = node.args[0] if node.args else None
    value, mine = value_of(source), value_of(node)
    if value is None or mine is None or value.dim() < 2:
        return None
    if node.target in (*VIEWS, _aten.expand.default):
        kept = value.shape[-2:] == mine.shape[-2:] and (node.target in VIEWS or value.shape == mine.shape)
        return (source, sizes) if kept else None
    if node.target not in _TURNS:
        return None
    order = list(range(value.dim()))
    axes: Any = node.args[1:]
    if node.target is _aten.permute.default:
        order = [axis % value.dim() for axis in axes[0]]
    else:
        one, other = axes
        order[one], order[other] = order[other], order[one]
    found = {order[axis] - value.dim(): size for axis, size in sizes.items()}
    return (source, found) if found.keys() <= {-1, -2} else None


def _is_by_element(node: Node) -> bool:
    """Whether a node may be computed again of more elements: no random numbers, which would be others."""
    return (is_pointwise(node) or is_cast(node)) and torch.Tag.nondeterministic_seeded not in node.target.tags  # type: ignore[union-attr]


def _row_of(node: Any) -> int | None:
    """Elements of a row of a tensor; None for what has no rows."""
    value = value_of(node)
    return None if value is None or not value.dim() else int(value.shape[-1])


def _keeps_rows(node: Node) -> bool:
    """Whether a node is a view with the same rows."""
    return node.target in (*VIEWS, _aten.expand.default) and _row_of(node.args[0]) == _row_of(node)


def _repeats(node: Node, rows: Node) -> bool:
    """Whether a formula or a view reads rows of its own length more than once."""
    value = value_of(rows)
    return value is not None and _row_of(rows) == _row_of(node) != 1 and value.numel() < node.meta["val"].numel()


def _is_first_part(node: Node, size: int) -> bool:
    """Whether a slice has the first elements of rows that are padded already."""
    source, axis, first, *_ = arguments_of(node)
    value = source.meta["val"]
    return axis % value.dim() == value.dim() - 1 and not first and value.shape[-1] == size


def _is_written_anyway(node: Node) -> bool:
    """Whether a tensor is a formula's without sums, which a compiler computes where it is padded, and writes once."""
    seen, waiting = set(), [node]
    while waiting:
        one = waiting.pop()
        if one.target in _SUMS:
            return False
        if one not in seen and (_is_formula(one) or is_alias(one)):
            seen.add(one)
            waiting += one.all_input_nodes
    return node in seen


def _axis_of_rows(t: Any) -> int | None:
    """The axis of a batch of matrices along which they are contiguous, -1 or -2."""
    return next((axis for axis in (-1, -2) if t.stride(axis) == 1), None)


def _whole(size: int) -> int:
    return -(-size // _ROW) * _ROW


def _lets_read(user: Node, old: Node, new: Node) -> bool:
    """Let a user read a tensor of other strides, if that does."""
    views = _views_behind(user, old, new)
    if views is None:
        return False
    user.replace_input_with(old, new)
    for view, value in views.items():
        view.meta["val"] = value
    return True


def _views_behind(user: Node, old: Node, new: Node) -> dict[Node, Any] | None:
    """A user and its views, with their values where it reads a tensor of other strides; None where that does not do.

    Formulas take any strides. Others rely on those that they had, and not every view is one of such a tensor.
    """
    values = {old: new.meta["val"]}
    waiting = [user]
    while waiting:
        node = waiting.pop()
        if not _is_view(node):
            if not _is_formula(node):
                return None
            continue
        args = map_arg(node.args, lambda n: values.get(n, n.meta["val"]))
        try:
            values[node] = node.target(*args, **node.kwargs)  # type: ignore[operator]
        except (RuntimeError, ValueError):
            return None
        waiting += node.users
    del values[old]
    return values


def _is_view(node: Node) -> bool:
    """Whether a node is a view by its sizes, not by places in memory."""
    return is_alias(node) and node.target is not _aten.as_strided.default


def _is_formula(node: Node) -> bool:
    return is_pointwise(node) or is_cast(node) or node.target in (*_SUMS, *_COPIES)


def _times(operands: Sequence[tuple[Node, Sizes]]) -> tuple[float, ...] | None:
    """ms of the product of such tensors, and of the padded ones; None where that cannot be measured."""
    device = operands[0][0].meta["val"].device

    def works() -> list[Callable[[], object]]:
        pairs = [
            [_random(operand.meta["val"], sizes if padded else {}) for operand, sizes in operands]
            for padded in (False, True)
        ]
        return [lambda a=a, b=b: a @ b for a, b in pairs]  # type: ignore[misc]

    return costs.alone(device, works) if device.type == "cuda" else None


def _random(like: Tensor, sizes: Sizes) -> Tensor:
    """A batch of matrices of random numbers with rows along the same axis, and padded axes."""
    count, *shape = like.shape
    shape = [sizes.get(axis, size) for axis, size in zip((-2, -1), shape, strict=True)]
    if _axis_of_rows(like) == -1:
        return torch.randn(count, *shape, dtype=like.dtype, device=like.device)
    return torch.randn(count, shape[1], shape[0], dtype=like.dtype, device=like.device).mT
