"""``linear`` and ``conv2d`` as in `torch.nn.functional`, with a method for their gradients; arguments are checked."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from . import autograd
from .autograd import Step
from .convolution import Geometry, Pair
from .method import Method
from .presets import DEFAULT, preset
from .transform.tokens import Grid

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def as_method(method: str | Method) -> Method:
    """A method by value or by preset name."""
    if isinstance(method, Method):
        return method
    if isinstance(method, str):
        return preset(method)
    raise ValueError(f"method {method!r} is neither a preset's name nor a hotrain.Method")


class Named(Protocol):
    name: str


def check_input(owner: str | Named, x: Tensor, channels: int, axis: int) -> None:
    """Raise TypeError or ValueError for an x that no method can serve.

    owner: the name that the message starts with, or who has it; it is not read unless there is a message, so that
    compiled layers of different names are alike.
    """
    served = isinstance(x, Tensor) and x.layout == torch.strided and x.dtype in FLOATS
    if served and x.dim() > 0 and x.dim() >= -axis and x.shape[axis] == channels:
        return
    name = owner if isinstance(owner, str) else owner.name
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: the input is a {type(x).__name__}; accepted is a dense floating-point tensor")
    if x.layout != torch.strided or x.dtype not in FLOATS:
        kind = str(x.dtype if x.layout == torch.strided else x.layout).removeprefix("torch.")
        raise TypeError(
            f"{name}: the input is {kind}; accepted are dense tensors of float16, bfloat16, float32 or float64. "
            "Convert the input, or leave the layer exact with filter_fn."
        )
    raise ValueError(f"{name}: the input has shape {tuple(x.shape)}; accepted are {channels} channels on axis {axis}")


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    method: str | Method = DEFAULT,
    *,
    grid: Grid | None = None,
    key: int = 0,
    transposed: bool = False,
    name: str = "linear",
) -> Tensor:
    """`torch.nn.functional.linear` whose gradients follow `method`; exact to the bit unless it has a `forward`.

    x: (*, I), floating, any number of leading axes, (B, H, W, I) is its own token grid.  weight: (O, I), or (I, O)
    when `transposed` (transformers' Conv1D).  bias: (O,).  grid: where the tokens of (B, L, I) lie.  key: of the draws;
    the same key draws the same numbers.  Returns (*, O).
    Raises TypeError for complex, integer or sparse input, ValueError for a wrong width.
    """
    method = as_method(method)
    check_input(name, x, weight.shape[0 if transposed else 1], -1)
    return linear_step(x, weight, bias, Step(method, key, grid, transposed, name))


def linear_step(x: Tensor, weight: Tensor, bias: Tensor | None, step: Step) -> Tensor:
    """`linear` with its step made up and its input checked already."""
    return autograd.Linear.apply(x, weight, bias, step)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Pair = 1,
    padding: int | Pair | str = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    method: str | Method = DEFAULT,
    *,
    padding_mode: str = "zeros",
    key: int = 0,
    name: str = "conv2d",
) -> Tensor:
    """`torch.nn.functional.conv2d` whose gradients follow `method`; exact to the bit, also where it has a `forward`.

    x: (B, C, H, W) or (C, H, W).  weight: (O, C/groups, kh, kw).  padding_mode: as in `torch.nn.Conv2d`.
    Returns (B, O, H', W'). Raises as `linear`.
    """
    geometry = Geometry(
        (weight.shape[2], weight.shape[3]),
        _pair(stride),
        padding if isinstance(padding, str) else _pair(padding),
        _pair(dilation),
        groups,
        padding_mode,
    )
    check_input(name, x, weight.shape[1] * groups, -3)
    return convolve(x, weight, bias, geometry, Step(as_method(method), key, name=name))


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, step: Step) -> Tensor:
    """`conv2d` with its geometry and step made up and its input checked already."""
    if x.dim() == 3:
        return autograd.Conv2d.apply(x[None], weight, bias, geometry, step)[0]
    return autograd.Conv2d.apply(x, weight, bias, geometry, step)


def _pair(value: int | Pair) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
