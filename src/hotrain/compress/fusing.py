"""Merges compiled kernels with the additions, casts and sums around them, which a compiler would not.

In a residual network a norm reads a sum, and its result is cast to the dtype of a product; in backward its gradient is
a cast product's, and is added to the shortcut's. Each of these is a pass over memory of its own beside an opaque
operator, so they become arguments of it:

    s = x + branch · f;  y = cast(norm(s))  ──►   s, y = norm_forward(x, branch, f)
    g_x = norm'(cast(g));  g = shortcut + g_x;  cast(g) · f   ──►   g, cast(g · f) = norm_backward(g, shortcut, f)

f is of a dropout, whose bits it is, or of stochastic depth, a number for each sample; forward, of a layer's scale, too.

The gradient of an activation function is summed over the rows while it is computed: the bias gradient of the layer
before. The bias of a convolution, which Inductor would add in a kernel of its own, is added by the norm or the
activation function that reads the convolution. Sums are in float32 and rounded once, to the dtype that they had.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from .factors import Product
from .formats import is_static
from .layer_codes import Gradients, Keep
from .merging import Merging, half_of, merge_all
from .nodes import (
    CASTS,
    FLOATS,
    arguments_of,
    bytes_of,
    is_alias,
    is_cast,
    is_dense,
    is_move,
    is_pointwise,
    path_to,
    readers_of,
    replace_results,
    result_of,
    same_order,
    source_of,
    value_of,
)
from .readings import is_kernel

_aten = torch.ops.aten
_COPIES = (_aten.clone.default, _aten.index.Tensor, _aten.constant_pad_nd.default, _aten.cat.default)
_FORWARD = torch.ops.hotrain.norm_forward.default
_NORMALIZE = torch.ops.hotrain.normalize.default
_SLOPE = torch.ops.hotrain.activation_gradient.default
_BIAS_OF_NORM = 10  # among the arguments of `norm_forward`


def fuse(graph: Graph) -> bool:
    """Merge in place; returns whether the graph has changed."""
    ours = torch.ops.hotrain
    sums = {ours.norm_forward: _Forward, ours.norm_backward: _Backward, ours.activation_gradient: _Activation}
    changed = merge_all(graph, sums | {ours.keep: Keep, ours.linear_gradients: Gradients})
    # Behind them: casts that are gone do not read a convolution any more.
    return merge_all(graph, {ours.norm_forward: _Bias, ours.activate: _Bias}) or changed


def merge_image_norms(graph: Graph) -> None:
    """Let norms of images cast their result and gradients, and add gradients before and behind them, in place.

    On the joint graph, before `choosing` asks for its time: exact training has no passes of its own for these either.
    """
    merge_all(graph, {torch.ops.hotrain.normalize: _Normalize, torch.ops.hotrain.norm_gradient: _NormGradient})


def unfused(norm: Node) -> int:
    """Bytes that formulas and copies beside an operator move more than in exact training, where a compiler fuses them.

    What is added in a norm, and is no product that its kernel takes, is written and read before, as is a result that
    formulas read next (a sum, windows); the gradient that the norm writes is read once more. Fewer, below 0, by
    the cast of a shortcut's gradient for a product, which the kernel writes and a compiler makes in a pass of its own
    (seen in ViT-B and DeiT-S). A compiler also sums for several batch norms whose results are added in one pass. On the
    joint graph, as `choosing` sees it, of an operator in `UNFUSED`.
    """
    target: Any = norm.target
    return UNFUSED[target](norm)


def _unfused_forward(norm: Node) -> int:
    source = _uncast(source_of(norm.args[0]))
    operands = _sum(source)
    moved = bytes_of(source) if operands is None and _is_formula(source) else 0  # exact training has it in registers
    alone = [t for t in operands or () if _is_alone(t)]
    merged = next((product for product in map(Product.of, alone) if product is not None), None)
    if merged is not None:
        alone.remove(merged.node)
        alone += filter(_is_alone, [_uncast(merged.branch)])
    return moved + sum(2 * bytes_of(t) for t in alone) + _read_by_formulas(norm, 1)


def _unfused_backward(norm: Node) -> int:
    g = _uncast(source_of(norm.args[0]))
    moved = 2 * bytes_of(g) if _is_alone(g) else 0
    g_x = result_of(norm, 0)
    readers = [] if g_x is None else readers_of(g_x, _is_same)
    total = readers[0] if len(readers) == 1 and _sum(readers[0]) is not None else g_x
    behind = [] if total is None else readers_of(total, _is_as_before)
    formulas = [t for t in behind if _is_formula(t) and _sum(t) is None]
    merges = len(formulas) == 1 and Product.of_gradient(formulas[0]) is not None
    # For a sum over the rows, as a layer's scale has one, exact training reads the gradient again, too.
    if total is not None and formulas and not merges and not any(map(_is_summed, formulas)):
        moved += bytes_of(total)
    if total is not None and total is not g_x and not merges and len(total.users) > 1:
        casts = [user for user in total.users if is_cast(user)]
        moved -= bytes_of(total) + bytes_of(casts[0]) if len(casts) == 1 else 0
    return moved


def _unfused_normalize(norm: Node) -> int:
    shortcut = norm.args[5]
    moved = 2 * bytes_of(shortcut) if isinstance(shortcut, Node) and _is_alone(shortcut) else 0
    return moved + _read_by_formulas(norm, 0)


def _unfused_norm_gradient(norm: Node) -> int:
    g = _uncast(source_of(norm.args[0], is_move))
    is_slope = g.target is operator.getitem and g.args[0].target is _SLOPE  # type: ignore[union-attr]
    # Of a formula's result exact training reads in both passes what that one reads, often two tensors.
    moved = bytes_of(g) if is_slope or (_is_formula(g) and len(g.users) == 1) else 0
    moved += _read_by_formulas(norm, 0)
    together = [t for t in readers_of(g, _is_as_before) if t.target is norm.target]
    return moved + 2 * bytes_of(g) * (len(together) - 1) // max(len(together), 1)


def _unfused_activate(node: Node) -> int:
    x, y = source_of(node.args[0], is_move), result_of(node, 0)
    moved = 2 * bytes_of(x) if _is_formula(x) and len(x.users) == 1 else 0
    # As in a gate. What packs y is counted where it packs.
    readers = [] if y is None else [t for t in readers_of(y, _is_as_before) if not is_kernel(t)]
    return moved + (2 * bytes_of(y) if readers and all(map(_is_formula, readers)) else 0)


def _unfused_slope(node: Node) -> int:
    g = _uncast(source_of(node.args[0]))
    return 2 * bytes_of(g) if _is_alone(g) else 0


def _read_by_formulas(norm: Node, place: int) -> int:
    """Bytes of a result that exact training has in registers for the formulas which read it, as the sum behind a norm.

    It is not even written where nothing else reads it. A batch norm that adds it as its shortcut is not counted, though
    it would be a formula: without it ResNet-50's planned step is 4 % faster than exact already (8bcfa28, H200).
    """
    result = result_of(norm, place)
    readers = [] if result is None else readers_of(result, _is_as_before)
    if readers and all(map(_is_formula, readers)):
        return 2 * bytes_of(result)
    path = {norm, result}
    for reader in filter(_is_formula, readers):
        # One that waits for nothing else.
        if all(n < norm or source_of(n, _is_as_before) in path for n in reader.all_input_nodes):
            return bytes_of(result)
    return 0


def _is_alone(node: Node) -> bool:
    """Whether a tensor is a formula's, read by one operator alone, so that a compiler would not write it."""
    source = source_of(node)
    return _is_formula(source) and len(source.users) == 1 and len(node.users) == 1


def _is_summed(node: Node) -> bool:
    """Whether sums are all that reads a node."""
    return all(user.target is _aten.sum.dim_IntList for user in readers_of(node, _is_same))


def _is_formula(node: Node) -> bool:
    return (is_pointwise(node) or node.target in _COPIES) and not is_cast(node)


def _is_same(node: Node) -> bool:
    """Whether a node has the elements of its argument in the same order, in any dtype."""
    return same_order(node) or is_cast(node)


def _is_as_before(node: Node) -> bool:
    """Whether a node has elements of its argument, in any order and dtype."""
    return is_alias(node) or is_cast(node) or node.target is torch.ops.hotrain.marked.default


UNFUSED: dict[Any, Callable[[Node], int]] = {
    _FORWARD: _unfused_forward,
    torch.ops.hotrain.norm_backward.default: _unfused_backward,
    _NORMALIZE: _unfused_normalize,
    torch.ops.hotrain.norm_gradient.default: _unfused_norm_gradient,
    torch.ops.hotrain.activate.default: _unfused_activate,
    _SLOPE: _unfused_slope,
}
"""Operator → bytes that formulas beside it move more than in exact training."""


class _Forward(Merging):
    def merge(self) -> None:
        self.add()
        if not self.node.args[8]:  # x̂ is not rounded to y's dtype
            self.cast_result(1)

    def add(self) -> None:
        args: Any = self.node.args
        x, branch, w, b, *rest = args
        source = _uncast(source_of(x))
        found = _sum(source)
        if branch is not None or found is None:
            if source is not source_of(x) and is_dense(source):
                self.again(self.node, (self.rows(self.node, source), branch, w, b, *rest))
            return
        eps, _, y, centered, cast, _, bias, factor, times = rest
        after = source.next  # all that reads the sum comes behind it
        if any(isinstance(t, Node) and not t < after for t in (w, b)):
            return
        chain = path_to(x, lambda node: node is not source)
        keeps = any(user not in (*chain, self.node) for node in chain for user in node.users)
        one, other = found
        for t, rest_of in ((other, one), (one, other)):
            product = Product.of(t) if len(t.users) == 1 else None
            if product is not None and self.has_its_rows(product) and product.factor < after:
                one, other, times = rest_of, _uncast(product.branch), product.times
                factor = self.flat(after, product.factor)
                break
        one, other = (self.rows(after, t) for t in (one, other))
        total = source.meta["val"].dtype
        made = self.again(after, (one, other, w, b, eps, total, y, centered, cast, keeps, bias, factor, times))
        if keeps:
            self.replace(source, self.call(after, operator.getitem, made, 0), after)


class _Backward(Merging):
    def merge(self) -> None:
        self.uncast()
        self.cast_result(0)
        self.add()
        self.copy()
        self.multiply()

    def uncast(self) -> None:
        args: Any = self.node.args
        g, *rest = args
        source = _uncast(source_of(g))
        if source is not source_of(g) and is_dense(source):
            self.again(self.node, (self.rows(self.node, source), *rest))

    def add(self) -> None:
        g_x = self.result(0)
        readers = [] if g_x is None else readers_of(g_x)
        if len(readers) != 1 or _sum(readers[0]) is None:
            return
        (total,) = readers
        (operand,) = (t for t in total.all_input_nodes if source_of(t) is not g_x)
        source = _uncast(operand)
        other = source if is_dense(source) else operand
        if not other < self.node:
            return
        before, args = self.node, self.node.args
        g, codes, scale, r, w, _, _, centered, _, *factor = args
        casts = [user for user in total.users if is_cast(user)]
        dtypes = {cast.meta["val"].dtype for cast in casts}
        copy = next(iter(dtypes)) if len(dtypes) == 1 and dtypes <= set(FLOATS) else None
        dtype = total.meta["val"].dtype
        given = g, codes, scale, r, w, self.rows(before, other), dtype, centered, copy, *factor
        made = self.call(before, before.target, *given)
        parts = [self.call(before, operator.getitem, made, place) for place in range(3)]
        for cast in casts if copy is not None else ():
            self.replace(cast, parts[2], before)
        self.replace(total, parts[0], before)
        replace_results(self.graph, before, parts)
        self.node, self.changed = made, True

    def copy(self) -> None:
        """Also without a sum, g_x in the dtype of a product beside its own: behind a norm after the sum."""
        args: Any = self.node.args
        g_x = self.result(0)
        casts = [] if g_x is None or args[8] is not None else list(filter(is_cast, readers_of(g_x)))
        dtype = half_of(casts)
        if dtype is not None:
            self.again(self.node, (*args[:8], dtype, *args[9:]))
            after = self.node.next
            found = self.call(after, operator.getitem, self.node, 2)
            for cast in casts:
                self.replace(cast, found, after)

    def multiply(self) -> None:
        """The copy times what the branch was multiplied with in forward."""
        args: Any = self.node.args
        copied = args[8] is not None
        source = self.result(2 if copied else 0)
        readers = [] if source is None else readers_of(source)
        products = [product for product in map(Product.of_gradient, readers) if product is not None]
        if len(products) != 1 or (copied and len(readers) > 1):
            return
        (product,) = products
        if source_of(product.branch) is not source or not self.has_its_rows(product):
            return
        if not self.brings_forward(product.factor):
            return
        dtype = product.node.meta["val"].dtype
        factor = self.flat(self.node, product.factor)
        self.again(self.node, (*args[:8], dtype, factor, product.times))
        after = self.node.next
        found = self.result(2) or self.call(after, operator.getitem, self.node, 2)
        self.replace(product.node, found, product.node)

    def brings_forward(self, factor: Node) -> bool:
        """Put what a factor is computed from before the operator; False where that depends on it."""
        late, waiting = [], [factor]
        while waiting:
            node = waiting.pop()
            if node is self.node:
                return False
            if self.node < node and node not in late:
                late.append(node)
                waiting += node.all_input_nodes
        for node in sorted(late):
            self.node.prepend(node)
        return True


class _Activation(Merging):
    def merge(self) -> None:
        g_x = self.result(0)
        sums = [] if g_x is None else _sums_of_columns(g_x, g_x.meta["val"].shape[-1])
        if sums:
            args: Any = self.node.args
            self.again(self.node, (*args[:-1], True))
            found = self.call(self.node.next, operator.getitem, self.node, 1)
            for old in sums:
                value = old.meta["val"]
                cast = self.call(old, CASTS[0], found, value.dtype) if value.dtype != torch.float32 else found
                self.replace(old, cast, old)


class _Normalize(Merging):
    def merge(self) -> None:
        self.cast_result(0, at=7)


class _NormGradient(Merging):
    def merge(self) -> None:
        self.add_before()
        self.uncast()
        self.cast_result(0, at=9)
        self.add_behind()

    def add_before(self) -> None:
        """Where two branches begin at batch norm's result."""
        args: Any = self.node.args
        g, other, *rest = args
        operands = g.args if g.target is _aten.add.Tensor and not g.kwargs and len(g.users) == 1 else ()
        if other is None and len(operands) == 2 and all(_is_alike(t, g) for t in operands):
            self.again(self.node, (*operands, *rest))

    def uncast(self) -> None:
        """Read g before its cast to y's dtype, unless it is multiplied with f' and rounded again.

        A group norm's y is in float32 under autocast where x is not: g is rounded once, to the dtype of x.
        """
        args: Any = arguments_of(self.node)
        g, other, *rest, name, passes_on, dtype, after = args
        source = _uncast(g)
        value = source.meta["val"]
        rounds = name and dtype != value.dtype
        if source is g or other is not None or rounds or passes_on or value.stride() != g.meta["val"].stride():
            return
        self.again(self.node, (source, None, *rest, name, passes_on, dtype or g.meta["val"].dtype, after))

    def add_behind(self) -> None:
        """Where batch norm is the first of a branch beside a shortcut."""
        g_x = self.result(0)
        if g_x is None or len(g_x.users) != 1:
            return
        (total,) = g_x.users
        operands: Any = total.args if total.target is _aten.add.Tensor and not total.kwargs else ()
        others = [t for t in operands if t is not g_x]
        if len(others) != 1 or not all(_is_alike(t, g_x) for t in (*others, total)) or not others[0] < self.node:
            return
        *given, _ = arguments_of(self.node)
        self.again(self.node, (*given, *others))
        total.replace_all_uses_with(self.result(0))  # type: ignore[arg-type]
        self.graph.erase_node(total)


def _is_alike(node: Any, other: Node) -> bool:
    """Whether a node is a tensor of the same shape, dtype and memory layout."""
    value, wanted = value_of(node), value_of(other)
    if value is None or wanted is None or not (is_static(value) and is_static(wanted)):
        return False
    return value.shape == wanted.shape and value.dtype == wanted.dtype and value.stride() == wanted.stride()


class _Bias(Merging):
    """An operator that adds a bias to its first argument, or a norm that adds it to its branch."""

    def merge(self) -> None:
        args: Any = self.node.args
        is_norm = self.node.target is torch.ops.hotrain.norm_forward.default
        place = _BIAS_OF_NORM if is_norm else len(args) - 1
        multiplied = is_norm and args[place + 1] is not None
        terms = [t for t in args[: 1 if multiplied else 2] if isinstance(t, Node)]
        for t in terms if args[place] is None and terms[:1] != terms[1:] else ():
            bias = _taken_bias(t)
            if bias is not None:
                self.again(self.node, (*args[:place], bias, *args[place + 1 :]))
                break


def _taken_bias(t: Node) -> Node | None:
    """Take the bias from the convolution that t is, if the sum with it is read nowhere else; returns the bias."""
    node = source_of(t, lambda view: is_move(view) and len(view.users) == 1)
    bias: Any = node.args[2] if node.target is _aten.convolution.default else None
    if bias is None or len(node.users) != 1 or not is_dense(t):
        return None
    value = node.meta["val"]
    # The channels are the last axis of the same memory before and behind, so the views between may be any.
    if t.meta["val"].shape[-1] != value.shape[1] or not value.movedim(1, -1).is_contiguous():
        return None
    node.update_arg(2, None)
    # Before its cast for the product, which would be a launch for a few numbers.
    return bias.args[0] if is_cast(bias) and is_dense(bias.args[0]) else bias  # type: ignore[no-any-return]


def _sums_of_columns(node: Node, columns: int) -> list[Node]:
    """The sums of a tensor (..., C) over all axes but the last, also of its views."""
    readers = readers_of(node, lambda view: same_order(view) and view.meta["val"].shape[-1:] == (columns,))
    return [reader for reader in readers if reader.target is _aten.sum.dim_IntList and _is_over_rows(reader)]


def _is_over_rows(total: Node) -> bool:
    """Whether a sum is over all axes but the last."""
    summed, axes, *_ = total.args
    last = summed.meta["val"].dim() - 1  # type: ignore[union-attr]
    return sorted(axis % (last + 1) for axis in axes) == list(range(last))  # type: ignore[union-attr,operator]


def _uncast(node: Node) -> Node:
    """The tensor that a node is the wider copy of."""
    source = node.args[0] if is_cast(node) else None
    value, mine = value_of(source), value_of(node)
    if value is None or mine is None or value.dtype not in FLOATS or mine.dtype != torch.float32:
        return node
    return source  # type: ignore[return-value]


def _sum(node: Node) -> tuple[Node, Node] | None:
    """The operands of a sum of two dense tensors of one shape, the wider one first."""
    if node.target is not _aten.add.Tensor or node.kwargs or len(node.args) != 2 or not is_dense(node):
        return None
    operands: Any = node.args
    one, other = operands
    if not (is_dense(one) and is_dense(other)) or one is other:
        return None
    one, other = ((source if is_dense(source := _uncast(t)) else t) for t in (one, other))
    values = value_of(one), value_of(other)
    assert values[0] is not None
    assert values[1] is not None
    if values[0].shape != values[1].shape or values[0].shape != node.meta["val"].shape:
        return None
    return (one, other) if values[0].dtype.itemsize >= values[1].dtype.itemsize else (other, one)
