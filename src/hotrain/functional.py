"""``linear`` and ``conv2d`` as in `torch.nn.functional`, with a method for their gradients; arguments are checked."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from . import autograd
from .draws import signed
from .geometry import Geometry, Pair
from .layer import Config
from .method import Method
from .presets import DEFAULT, preset, presets
from .private import compiled_part
from .transform.tokens import Grid

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def as_method(method: str | Method) -> Method:
    """A method, given by value or by preset name.

    Args:
        method: a `hotrain.Method` or a preset's name.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(method, Method):
        return method
    if isinstance(method, str):
        return preset(method)
    raise ValueError(
        f"hotrain: method {method!r} is neither a preset's name ({', '.join(presets())}) nor a hotrain.Method"
    )


def check_model(function: str, model: object) -> None:
    """Check the model that a function of this name was given.

    Raises:
        TypeError: it is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"hotrain.{function}: the model is a {type(model).__name__}; accepted is a torch.nn.Module")


def plain_model(function: str, model: nn.Module) -> nn.Module:
    """The model that a function of this name was given; of a compiled one the module that was compiled.

    Raises:
        TypeError: it is no module.
    """
    check_model(function, model)
    return compiled_part(model) or model


class Named(Protocol):
    name: str


def check_input(owner: str | Named, x: Tensor, channels: int, axis: int) -> None:
    """Check the input of a converted layer.

    Args:
        owner: the name that a message starts with, or an object with it. It is read only for a message, so that
            compiled layers of different names share a graph.
        x: the input.
        channels: the size that is expected on `axis`.
        axis: negative.

    Raises:
        TypeError: x is complex, integer or sparse, or no tensor.
        ValueError: its shape does not fit.
    """
    supported = isinstance(x, Tensor) and x.layout == torch.strided and x.dtype in FLOATING
    if supported and x.dim() > 0 and x.dim() >= -axis and x.shape[axis] == channels:
        return
    name = owner if isinstance(owner, str) else owner.name
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: the input is a {type(x).__name__}; accepted is a dense floating-point tensor")
    if x.layout != torch.strided or x.dtype not in FLOATING:
        kind = str(x.dtype if x.layout == torch.strided else x.layout).removeprefix("torch.")
        raise TypeError(
            f"{name}: the input is {kind}; accepted are dense tensors of float16, bfloat16, float32 or float64. "
            "Convert the input, or leave the layer exact with filter_fn."
        )
    raise ValueError(f"{name}: the input has shape {tuple(x.shape)}; accepted are {channels} channels on axis {axis}")


def _check_weight(name: str, weight: Tensor, axes: int) -> None:
    if not isinstance(weight, Tensor):
        raise TypeError(f"{name}: the weight is a {type(weight).__name__}; accepted is a tensor")
    if weight.dim() != axes:
        raise ValueError(f"{name}: the weight has shape {tuple(weight.shape)}; accepted are {axes} axes")


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

    Args:
        x: (*, I), floating point, any number of leading axes; (B, H, W, I) is its own token grid.
        weight: (O, I), or (I, O) when `transposed`.
        bias: (O,) or None.
        method: a preset's name or a `hotrain.Method`.
        grid: of the tokens of (B, L, I), where they are the patches of an image.
        key: of the draws; the same key draws the same numbers.
        transposed: whether the weight is stored as in transformers' Conv1D.
        name: for messages.

    Returns:
        (*, O), in x's dtype, or autocast's.

    Raises:
        TypeError: x is complex, integer or sparse; the weight is no tensor, or the grid no `Grid`.
        ValueError: x does not have I channels, or the weight not two axes.
    """
    method = as_method(method)
    _check_weight(name, weight, 2)
    if not (grid is None or isinstance(grid, Grid)):
        raise TypeError(f"{name}: the grid is {grid!r}; accepted are None and hotrain.Grid(height, width)")
    check_input(name, x, weight.shape[0 if transposed else 1], -1)
    return _apply(x, weight, bias, Config(method, grid, transposed, name=name), key)


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

    Args:
        x: (B, C, H, W) or (C, H, W), floating point.
        weight: (O, C/groups, kh, kw).
        bias: (O,) or None.
        stride: as in `torch.nn.Conv2d`.
        padding: as in `torch.nn.Conv2d`, also ``"same"`` and ``"valid"``.
        dilation: as in `torch.nn.Conv2d`.
        groups: as in `torch.nn.Conv2d`.
        method: a preset's name or a `hotrain.Method`.
        padding_mode: as in `torch.nn.Conv2d`.
        key: of the draws; the same key draws the same numbers.
        name: for messages.

    Returns:
        (B, O, H', W'), or (O, H', W'), in x's dtype, or autocast's.

    Raises:
        TypeError: x is complex, integer or sparse; the weight is no tensor.
        ValueError: x does not have C channels, or the weight not four axes, or `groups` does not divide its outputs.
    """
    _check_weight(name, weight, 4)
    if groups < 1 or weight.shape[0] % groups:
        raise ValueError(f"{name}: got groups={groups}, accepted are divisors of the {weight.shape[0]} output channels")
    geometry = Geometry(
        (weight.shape[2], weight.shape[3]),
        _pair(stride),
        padding if isinstance(padding, str) else _pair(padding),
        _pair(dilation),
        groups,
        padding_mode,
    )
    check_input(name, x, weight.shape[1] * groups, -3)
    return _apply(x, weight, bias, Config(as_method(method), geometry=geometry, name=name), key)


def _apply(x: Tensor, weight: Tensor, bias: Tensor | None, config: Config, key: int) -> Tensor:
    return autograd.apply(x, weight, bias, autograd.call_of(config, x), signed(key))


def _pair(value: int | Pair) -> Pair:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
