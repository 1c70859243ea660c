"""Images of compiled models in PyTorch's default memory layout: what is computed of them in channels_last on a GPU.

cuDNN convolves in channels_last, the kernels of batch norm and pooling read it, and PyTorch's compiler computes exact
models in it. While Dynamo traces, an operator of images has two results: its twin, in channels_last, made of the twins
of its inputs, and the one that the model sees, a copy in the default layout. Operators behind it read the twin, the
model's own code (views, writes, strides, results) the copy, which the compiler leaves out where nothing reads it. A
twin is forgotten where anything was written since; the image is then copied again, and `compiled` removes both copies.

Tokens behind nn.MultiheadAttention have samples behind tokens in memory. A norm over rows reads a copy, their twin
(`sharing.Origins.in_rows`), and so do the residual sums behind it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..geometry import LAID_OUT, laid_out
from ..saved import memory_order
from .operators.base import Scope, custom_op, is_channels_last, is_large, pair, written
from .sharing import Origins, turned

_ACTIVATIONS = (
    *(F.relu, F.silu, F.gelu, F.hardswish, F.hardsigmoid, F.leaky_relu, F.relu6, F.hardtanh, F.mish, F.elu),
    *(F.sigmoid, F.tanh, torch.relu, torch.sigmoid, torch.tanh, Tensor.relu, Tensor.sigmoid, Tensor.tanh, F.dropout),
    torch.ops.hotrain.function,
)
_SUMS = torch.add, Tensor.add, operator.add
_OTHERS = (
    *(*_SUMS, torch.sub, Tensor.sub, operator.sub, torch.mul, Tensor.mul, operator.mul),
    *(F.max_pool2d, torch.max_pool2d, F.avg_pool2d, F.interpolate, torch.cat),
)
# Whether the first argument is laid out, which has a twin or not: such functions are slower, or have no kernel, in
# another layout. The other ones have a twin where one of their inputs has.
_LAID_OUT: dict[Any, bool] = {
    **dict.fromkeys((F.conv2d, F.batch_norm, F.group_norm, F.instance_norm, torch.ops.hotrain.conv2d), True),
    **dict.fromkeys((*_ACTIVATIONS, *_OTHERS), False),
}
_IN_DEFAULT_LAYOUT = (F.group_norm, F.instance_norm)  # on a GPU PyTorch's result is, in whatever layout x may be
_IN_PLACE: dict[Any, Callable[..., Any]] = {
    Tensor.add_: torch.add,
    operator.iadd: torch.add,
    Tensor.relu_: F.relu,
    torch.relu_: F.relu,
    torch.ops.hotrain.function_: torch.ops.hotrain.function,
}
_OF_GRADIENTS = {Tensor.register_hook: True, Tensor.retain_grad: True}  # a twin has a part of its tensor's gradient


def _place_of_flag(function: Any) -> int | None:
    code = getattr(function, "__code__", None)
    names = () if code is None else code.co_varnames[: code.co_argcount]
    return names.index("inplace") if "inplace" in names else None


_FLAGS = {function: place for function in _ACTIVATIONS if (place := _place_of_flag(function)) is not None}


class _Copy(torch.autograd.Function):
    """An image that the model made in channels_last, with a gradient in the default layout, which it may view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return laid_out(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.contiguous()


_copy = custom_op("laid_out(Tensor x) -> Tensor", _Copy.apply)


def in_twins(scope: Scope, run: Callable[..., Any], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a call in the default layout, of which the twin is noted; None for a call that has none.

    Args:
        scope: of what Dynamo traces.
        run: calls a function of PyTorch in a scope, with hotrain's operators.
        func: the function that the model calls, with args and kwargs.
    """
    origins = scope.origins
    if _OF_GRADIENTS.get(func):
        origins.has_hook(args[0])
        return None
    plain = _IN_PLACE.get(func, func)
    of_images = _LAID_OUT.get(plain)
    if of_images is None or not args or (plain is F.dropout and not _drops(*args[1:], **kwargs)):
        return None
    given, in_place = list(args), plain is not func
    place = _FLAGS.get(func)
    if place is not None and len(given) > place:
        in_place, given[place] = bool(given[place]), False
    elif place is not None and kwargs.get("inplace", False):
        in_place, kwargs = True, {name: value for name, value in kwargs.items() if name != "inplace"}
    if func in _SUMS:
        y = _sum_in_rows(scope, run, func, args, kwargs)
        if y is not None:
            return y
    several = plain is torch.cat
    images = list(given[0]) if several else given[:1] if of_images else given[:2]
    if of_images:
        if not (_is_laid_out(images[0]) or (plain in _IN_DEFAULT_LAYOUT and _is_image(images[0]))):
            return None
        if _stays(plain, given, kwargs):
            return _by_its_weight(scope, run, func, args, kwargs)
    elif not _have_twins(origins, images):
        return None
    twins = [_twin_of(origins, t) for t in images]
    given = [twins, *given[1:]] if several else [*twins, *given[len(images) :]]
    twin = run(scope, plain, given, kwargs)
    if not (is_large(twin) and is_channels_last(twin) and not twin.is_contiguous()):  # small writes are not counted
        if plain in _IN_DEFAULT_LAYOUT:
            return twin  # PyTorch's own result; called again, it would move running statistics twice
        again = in_place or not isinstance(twin, Tensor) or twin.dim() != 4
        return func(*args, **kwargs) if again else twin.clone(memory_format=torch.contiguous_format)
    if in_place:
        twin = twin.to(args[0].dtype)
    y = written(args[0], twin.contiguous()) if in_place else twin.contiguous()
    origins.note_twin(y, twin)
    return y


def _drops(p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:
    """Whether a dropout's result is another tensor than its input."""
    return training and p > 0


def _have_twins(origins: Origins, images: Sequence[Any]) -> bool:
    """Whether one of them has a twin, and the others are in the default layout, as their result is then."""
    found = False
    for t in images:
        known = origins.twin(t) if isinstance(t, Tensor) else None
        if known is not None and not known.is_contiguous():
            found = True
        elif isinstance(t, Tensor) and t.dim() > 1 and not t.is_contiguous():
            return False
    return found


def _sum_in_rows(
    scope: Scope, run: Callable[..., Any], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """The sum of tokens in PyTorch's memory layout, of which the twin is noted; None where no operand has one."""
    given = args[:2]
    if len(given) < 2 or not (isinstance(given[0], Tensor) and isinstance(given[1], Tensor)):
        return None
    first, other = given
    is_turned = turned(first)
    # PyTorch's result has the layout of the first one.
    if first.shape != other.shape or not (is_turned or (first.is_contiguous() and turned(other))):
        return None
    twins = [scope.origins.twin(t) for t in given]
    if twins[0] is None and twins[1] is None:
        return None
    inputs = [t if twin is None else twin for t, twin in zip(given, twins, strict=True)]
    sum_of: Tensor = run(scope, func, [*inputs, *args[2:]], kwargs).contiguous()
    if not is_turned:
        return sum_of
    order = memory_order(first)
    y = sum_of.permute(order).contiguous().permute([order.index(axis) for axis in range(len(order))])
    scope.origins.note_twin(y, sum_of)
    return y


def _is_image(t: Any) -> bool:
    return is_large(t) and t.dim() == 4 and t.device.type in LAID_OUT


def _is_laid_out(t: Any) -> bool:
    """Whether a convolution or a norm of t reads a copy in channels_last."""
    return _is_image(t) and not is_channels_last(t)


def _by_its_weight(
    scope: Scope, run: Callable[..., Any], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """A convolution whose weight is in channels_last, and with it the result, of the twin of its input; else None."""
    w = args[1] if len(args) > 1 else kwargs.get("weight")
    by_weight = isinstance(w, Tensor) and w.dim() == 4 and w.is_contiguous(memory_format=torch.channels_last)
    if not (by_weight and scope.origins.had_twin(args[0])):
        return None
    return run(scope, func, [_twin_of(scope.origins, args[0]), *args[1:]], kwargs)


def _stays(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a convolution has its own layout: by its weight, or because it makes tokens of an image's patches."""
    if func is not F.conv2d and func is not torch.ops.hotrain.conv2d:
        return False
    w = args[1] if len(args) > 1 else kwargs.get("weight")
    if not isinstance(w, Tensor) or w.dim() != 4:
        return True
    _, channels, height, width = w.shape
    if w.stride() != (channels * height * width, height * width, width, 1):  # is_contiguous leaves out axes of size 1
        return True
    few = bool(args[0].shape[1] < 16)
    if func is not F.conv2d:
        return few
    return few and [height, width] == pair(args[3] if len(args) > 3 else kwargs.get("stride", 1))


def _twin_of(origins: Origins, t: Any) -> Any:
    """The same image in channels_last; what is no image, as it is."""
    if not isinstance(t, Tensor) or t.dim() != 4:
        return t
    known = origins.twin(t)
    if known is not None:
        return known
    plain = t.is_contiguous() and not t.is_contiguous(memory_format=torch.channels_last)
    return _copy(t) if plain and not origins.had_twin(t) else laid_out(t)
