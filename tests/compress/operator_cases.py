"""Every operator that ``memory="block"`` supports, called as models call it, and what it is to keep.

A case runs under `interpose.Compressed` with `SMALL` lowered (`small_tensors_too`), or plainly as the exact one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hotrain.compress.formats import BITS, FORMATS, GROUPED
from hotrain.compress.interpose import Compressed
from hotrain.compress.report import Buffers
from hotrain.compress.slopes import ACTIVATIONS

# Of the error of the gradients together, against their size. Levels 1/11 apart leave an error of 1/11/√6 of |g_y| where
# slopes are near 1 and more where they are smaller; four bits with 7 steps to a group's largest entry, 0.06 to 0.1 of
# the values' size; eight bits, 1/18 of that. A factor of two covers these small tensors.
_LOSS = {"slopes": 0.2, 4: 0.2, 8: 0.02}


@dataclass(frozen=True)
class Case:
    """call: of tensors of `shapes`, which all require gradients.

    kept: (operator of `formats.FORMATS` or a format, the shape in which it is kept), a row a compressed tensor.
    beside: entries of what is kept in full precision, in the dtype of statistics (float32, or float64 there).
    indices: entries that are kept at a byte each.
    """

    call: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    kept: tuple[tuple[Any, tuple[int, ...]], ...] = ()
    beside: int = 0
    indices: int = 0

    def inputs(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [torch.randn(shape).to(dtype).requires_grad_() for shape in self.shapes]

    @property
    def loss(self) -> float:
        """A bound of the gradients' error together, against their size, but for the rounding of their dtype."""
        form = self.kept[0][0] if self.kept else None
        if form is None or form == BITS:
            return 0.0
        bits = [GROUPED[FORMATS[form]].bits for form, _ in self.kept] if isinstance(form, str) else []
        return _LOSS[min(bits) if bits else "slopes"]

    def nbytes(self, statistic: torch.dtype = torch.float32) -> int:
        """What it is to keep, without parameters."""
        formats = [(GROUPED[FORMATS[form]] if isinstance(form, str) else form, shape) for form, shape in self.kept]
        return sum(form.nbytes(shape) for form, shape in formats) + self.beside * statistic.itemsize + self.indices


def _slope(f: Callable[..., Tensor], name: str, shape: tuple[int, ...] = (2, 7, 48)) -> Case:
    kind = ACTIVATIONS[name]
    return Case(f, (shape,), ((kind.by_input or kind.levels or BITS, shape),))


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _attention(shapes: Sequence[tuple[int, ...]], **options: Any) -> Case:
    q, k, v = shapes
    kept = (("query_key", q), ("query_key", k), ("value_output", v))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **options)

    return Case(call, tuple(shapes), kept)


def _conv(x: tuple[int, ...], w: tuple[int, ...], bias: bool = True, **options: Any) -> Case:
    def call(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return F.conv2d(x, w, b, **options)

    shapes = (x, w, (w[0],)) if bias else (x, w)
    return Case(call, shapes, (("conv", (x[0], *x[2:], x[1])),))


def _matmul(call: Callable[..., Tensor], a: tuple[int, ...], b: tuple[int, ...]) -> Case:
    return Case(call, (a, b), (("matmul", a), ("matmul", b)))


def _pool(shape: tuple[int, ...], kernel: Any, out: int, **options: Any) -> Case:
    return Case(lambda x: F.max_pool2d(x, kernel, **options), (shape,), indices=out)


CASES = {
    "gelu": _slope(F.gelu, "gelu"),
    "gelu_tanh": _slope(_gelu_tanh, "gelu_tanh", (2, 197, 3)),
    "silu": _slope(F.silu, "silu", (1, 1, 100)),
    "mish": _slope(F.mish, "mish"),
    "hardswish": _slope(F.hardswish, "hardswish"),
    "sigmoid": _slope(torch.sigmoid, "sigmoid"),
    "tanh": _slope(torch.tanh, "tanh", (49, 3)),
    "relu": _slope(F.relu, "relu"),
    "relu6": _slope(F.relu6, "relu6"),
    "hardsigmoid": _slope(F.hardsigmoid, "hardsigmoid"),
    "leaky_relu": _slope(F.leaky_relu, "leaky_relu", (3, 5, 7)),
    "leaky_relu 0.1": _slope(lambda x: F.leaky_relu(x, 0.1), "leaky_relu 0.1", (3, 5, 7)),
    "leaky_relu 0.2": _slope(lambda x: F.leaky_relu(x, 0.2), "leaky_relu 0.2"),
    "layer_norm": Case(
        lambda x, w, b: F.layer_norm(x, (48,), w, b),
        ((2, 7, 48), (48,), (48,)),
        (("norm", (2, 7, 48)),),
        beside=14 + 2 * 48,
    ),
    "layer_norm, plain": Case(
        lambda x: F.layer_norm(x, (100,), eps=1e-3), ((1, 49, 100),), (("norm", (1, 49, 100)),), beside=49 + 2 * 100
    ),
    "layer_norm, two axes": Case(
        lambda x, w, b: F.layer_norm(x, (6, 20), w, b),
        ((3, 6, 20), (6, 20), (6, 20)),
        (("norm", (3, 6, 20)),),
        beside=3,
    ),
    "layer_norm, every axis": Case(
        lambda x, w, b: F.layer_norm(x, (6, 20), w, b),
        ((6, 20), (6, 20), (6, 20)),
        (("norm", (6, 20)),),
        beside=1,
    ),
    "rms_norm": Case(
        lambda x, w: F.rms_norm(x, (48,), w, 1e-6), ((2, 7, 48), (48,)), (("norm", (2, 7, 48)),), beside=14 + 2 * 48
    ),
    "rms_norm, two axes": Case(
        lambda x, w: F.rms_norm(x, (6, 20), w, 1e-2), ((3, 6, 20), (6, 20)), (("norm", (3, 6, 20)),), beside=3
    ),
    "rms_norm, plain, epsilon of the dtype": Case(
        lambda x: F.rms_norm(x * 1e-3, (12,)), ((4, 5, 12),), (("norm", (4, 5, 12)),), beside=20 + 2 * 12
    ),
    "group_norm": Case(
        lambda x, w, b: F.group_norm(x, 4, w, b),
        ((2, 24, 5, 3), (24,), (24,)),
        (("norm", (2, 5, 3, 24)),),
        beside=8 + 2 * 24,
    ),
    "group_norm, plain, 3 axes": Case(
        lambda x: F.group_norm(x, 3), ((2, 12, 7),), (("norm", (2, 7, 12)),), beside=6 + 2 * 12
    ),
    "batch_norm": Case(
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        ((3, 20, 4, 5), (20,), (20,)),
        (("norm", (3, 4, 5, 20)),),
        beside=20,
    ),
    "batch_norm, plain, 3 axes": Case(
        lambda x: F.batch_norm(x, None, None, training=True), ((3, 7, 9),), (("norm", (3, 9, 7)),), beside=7
    ),
    "batch_norm, samples": Case(
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        ((30, 48), (48,), (48,)),
        (("norm", (30, 48)),),
        beside=48,
    ),
    "softmax": Case(lambda x: F.softmax(x, -1), ((2, 3, 7, 49),), (("softmax", (2, 3, 7, 49)),)),
    "softmax, another axis": Case(lambda x: x.softmax(1), ((2, 48, 7),), (("softmax", (2, 7, 48)),)),
    "dropout": Case(lambda x: F.dropout(x, 0.3), ((2, 7, 48),), ((BITS, (2, 7, 48)),)),
    "product": Case(lambda a, b: a * b, ((2, 7, 48), (2, 7, 48)), (("product", (2, 7, 48)), ("product", (2, 7, 48)))),
    "product, broadcast": Case(
        lambda a, b: torch.mul(a, b), ((2, 7, 48), (7, 1)), (("product", (2, 7, 48)), ("product", (7, 1)))
    ),
    "linear": Case(F.linear, ((2, 7, 48), (20, 48), (20,)), (("linear", (2, 7, 48)),)),
    "linear, no bias": Case(F.linear, ((1, 1, 1, 100), (3, 100)), (("linear", (1, 1, 1, 100)),)),
    "conv2d": _conv((2, 16, 7, 7), (20, 16, 3, 3), padding=1),
    "conv2d, strided, dilated": _conv(
        (2, 18, 9, 7), (6, 18, 3, 2), bias=False, stride=(2, 1), dilation=2, padding=(1, 0)
    ),
    "conv2d, groups": _conv((2, 32, 5, 5), (16, 8, 3, 3), groups=4),
    "conv2d, depthwise": _conv((2, 16, 6, 6), (16, 1, 3, 3), groups=16, padding=1, stride=2),
    "max_pool2d": _pool((2, 3, 8, 8), 2, 2 * 3 * 16),
    "max_pool2d, overlapping": _pool((2, 3, 9, 7), 3, 2 * 3 * 5 * 4, stride=2, padding=1),
    "max_pool2d, ceil": _pool((1, 4, 7, 6), (3, 2), 4 * 3 * 2, stride=(2, 3), ceil_mode=True),
    # The channels of one head each, as queries meet keys and weights meet values.
    "matmul": _matmul(torch.matmul, (2, 3, 7, 49), (2, 3, 49, 16)),
    "linear by matmul": Case(torch.matmul, ((2, 7, 48), (48, 20)), (("linear", (2, 7, 48)),)),
    "linear by the operator @": Case(lambda a, w: a @ w, ((1, 1, 1, 100), (100, 3)), (("linear", (1, 1, 1, 100)),)),
    "matmul of a transposed operand": _matmul(lambda a, b: a @ b.mT, (2, 3, 7, 16), (2, 3, 49, 16)),
    "matmul, both transposed": _matmul(lambda a, b: a.mT.matmul(b.mT), (2, 16, 7), (2, 5, 16)),
    "matmul, broadcast": _matmul(lambda a, b: a @ b, (2, 1, 7, 20), (3, 20, 5)),
    "matmul, one of many": _matmul(torch.matmul, (1, 7, 20), (4, 20, 5)),
    "bmm": _matmul(torch.bmm, (3, 7, 20), (3, 20, 5)),
    "bmm of a method": _matmul(lambda a, b: a.bmm(b), (1, 1, 100), (1, 100, 3)),
    "avg_pool2d": Case(lambda x: F.avg_pool2d(x, 2), ((2, 3, 8, 8),)),
    "avg_pool2d, overlapping": Case(lambda x: F.avg_pool2d(x, 3, 2, 1), ((2, 3, 9, 7),)),
    "avg_pool2d, ceil, padding uncounted": Case(
        lambda x: F.avg_pool2d(x, (3, 2), (2, 3), (1, 0), ceil_mode=True, count_include_pad=False), ((1, 4, 7, 6),)
    ),
    "avg_pool2d, another divisor": Case(lambda x: F.avg_pool2d(x, 2, divisor_override=3), ((2, 3, 6, 7),)),
    "attention": _attention([(2, 3, 7, 16)] * 3),
    "attention, causal, scaled": _attention([(1, 2, 9, 8)] * 3, is_causal=True, scale=0.2),
    "attention, longer keys": _attention([(2, 2, 5, 12), (2, 2, 11, 12), (2, 2, 11, 12)]),
    "attention, grouped queries": _attention([(2, 4, 7, 16), (2, 2, 7, 16), (2, 2, 7, 16)], enable_gqa=True),
}


def transposed(t: Tensor) -> Tensor:
    """The same entries, those of the last two axes in memory the other way round."""
    return t.detach().mT.contiguous().mT.requires_grad_() if t.dim() > 1 else t


def with_operators(call: Callable[..., Any], *inputs: Any) -> Any:
    """The call with every operator compressed."""
    with Compressed(Buffers()):
        return call(*inputs)


def differentiate(call: Callable[..., Tensor], inputs: list[Tensor], seed: int = 7) -> tuple[Tensor, ...]:
    """The result of the call and the gradients of all inputs for one random g_y; any dropout draws the same."""
    torch.manual_seed(seed)
    y = call(*inputs)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y)
    return y.detach(), *torch.autograd.grad(y, inputs, g)


def distance(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """|got − want| / |want| of all tensors together, in float64."""
    pairs = [(g.double().flatten(), w.double().flatten()) for g, w in zip(got, want, strict=True)]
    error, size = torch.cat([g - w for g, w in pairs]).norm(), torch.cat([w for _, w in pairs]).norm()
    return float(error / size) if error else 0.0


@contextlib.contextmanager
def saving() -> Iterator[list[Tensor]]:
    """Everything that is given to save_for_backward inside."""
    held: list[Tensor] = []

    def hold(t: Tensor) -> Tensor:
        held.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda t: t):
        yield held


def nbytes(held: Sequence[Tensor], besides: Sequence[Tensor] = ()) -> int:
    """Bytes of the distinct storages, those of `besides` not counted."""
    theirs = {t.untyped_storage().data_ptr() for t in besides}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    return sum(size for place, size in storages.items() if place not in theirs)


@dataclass(frozen=True)
class Whole:
    """A format that loses nothing, in the place of one that does: what is left is the formula."""

    bits = 32

    def keep(self, t: Tensor, given: Any = None) -> tuple[Tensor, Tensor]:
        """`given` is the derivative's formula, or what a format of groups cuts off."""
        return given(t) if callable(given) else t.clone(), t.new_empty(0)

    def restore(self, kept: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return kept[0].reshape(tuple(shape)).to(dtype)
