"""Activation functions: f, its derivative f', and how the derivative is quantized."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ..saved import Levels
from .formats import SLOPES


@dataclass(frozen=True)
class Activation:
    """An activation function and what is saved for its gradient.

    Attributes:
        f: the function.
        slope: its derivative at x in float32.
        levels: the format of the derivative; None for a derivative of two values, in 1 bit per element.
        by_input: the name in `formats.FORMATS` of the format in which x is saved instead, "" for none; backward makes
            from it the derivative, and f(x) for the next layer.
        flat: the |x| above which f is constant to 8 digits; None for no such |x|. x is cut off there before it is
            saved: a mask of -inf, or of -1e9, would else be the scale of its group.
        least: the x below which f and f' are zero but for less than the format's error; None for no such x. A smaller
            one is saved as this one, or as one code below 0 (`saved.Grouped.keep`).
        of_result: whether the derivative at f(x) is that at x.
    """

    f: Callable[..., Tensor]
    slope: Callable[..., Tensor]
    levels: Levels | None = SLOPES
    by_input: str = ""
    flat: float | None = None
    least: float | None = None
    of_result: bool = False


# GELU's derivative is that of its tanh form, for both forms: the two differ by 0.0009 at most, and levels are 0.09
# apart. As 1 + tanh(t) = 2 σ(2t), it takes one exponential per element, and no erf.

_A, _B = 2 * math.sqrt(2 / math.pi), 0.044715


def _gelu_slope(x: Tensor) -> Tensor:
    s = torch.sigmoid(_A * (x + _B * x * x * x))
    return s + x * s * (1 - s) * _A * (1 + 3 * _B * x * x)


def _silu_slope(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


def _mish_slope(x: Tensor) -> Tensor:
    t, s = torch.tanh(F.softplus(x)), torch.sigmoid(x)
    return t + x * s * (1 - t * t)


def _hardswish_slope(x: Tensor) -> Tensor:
    return torch.where(x <= -3, 0.0, torch.where(x >= 3, 1.0, x / 3 + 0.5))


def _sigmoid_slope(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * torch.sigmoid(-x)


def _tanh_slope(x: Tensor) -> Tensor:
    return 4 * _sigmoid_slope(2 * x)  # 1 − tanh², without the difference


# LeakyReLU by its slope below 0: PyTorch's, that of Darknet's detectors, that of GANs.
LEAKS = {0.01: "leaky_relu", 0.1: "leaky_relu 0.1", 0.2: "leaky_relu 0.2"}

_WIDER = Levels(4, first=-4, per_one=7)  # −½ to 1½

# The nearer `least` is to 0, the finer are the codes beside a mask. At GELU's, |f| and |f'| are below 1e-5; at SiLU's,
# below 2⁻⁷, a unit of bfloat16 beside 1. Hardswish's f' steps from 0 to −½ at −3: −5 is rounded to −3.3 at most, by
# codes of any scale; −3 would be rounded to more than itself.
ACTIVATIONS = {
    "gelu": Activation(F.gelu, _gelu_slope, by_input="gelu", least=-5.0),
    "gelu_tanh": Activation(lambda x: F.gelu(x, approximate="tanh"), _gelu_slope, by_input="gelu", least=-5.0),
    "silu": Activation(F.silu, _silu_slope, by_input="curve", least=-7.0),
    "mish": Activation(F.mish, _mish_slope),
    "hardswish": Activation(F.hardswish, _hardswish_slope, _WIDER, by_input="curve", least=-5.0),
    "sigmoid": Activation(torch.sigmoid, _sigmoid_slope, by_input="saturating", flat=17.0),
    "tanh": Activation(torch.tanh, _tanh_slope, by_input="saturating", flat=8.5),
    "relu": Activation(torch.relu, lambda x: (x <= 0).logical_not(), None, of_result=True),  # a NaN passes
    "relu6": Activation(F.relu6, lambda x: ((x <= 0) | (x >= 6)).logical_not(), None),
    "hardsigmoid": Activation(F.hardsigmoid, lambda x: (x > -3) & (x < 3), None),
    **{
        name: Activation(partial(F.leaky_relu, negative_slope=slope), lambda x: x > 0, None, of_result=True)
        for slope, name in LEAKS.items()
    },
}
FACTOR = {"hardsigmoid": 1 / 6}  # of the derivative: what is saved times this
ELSE = {name: slope for slope, name in LEAKS.items()}  # the derivative where the bit is not set
