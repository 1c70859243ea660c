"""The rule book: which saved tensor of which operation may be rounded, how far, and why.

A row is read by three: hotrain's own operators take their formats from it (`formats.FORMATS`), `eager` the class of
what other functions save, `graph` the class of what a compiled backward does with a saved tensor.

**The table lists what may be rounded, not what may not**: all else is `OTHER`, exact, and the report names it with its
bytes. The classes:

* `VALUE`: the derivative is a polynomial of the tensor, or bounded and continuous, so that the error stays in
  proportion to the largest element of a group;
* `RATIO`: the derivative divides by the tensor, or the tensor spans orders of magnitude, and a shared scale would flush
  small elements to zero. bfloat16 keeps their exponent and halves float32; 16-bit tensors stay as they are;
* `SIGN`, `SHAPE`: no more is needed;
* `EXACT`: as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

EXACT, RATIO, VALUE, SIGN, SHAPE = "exact", "ratio", "value", "sign", "shape"
# class → form of `formats.packer`; "" for as it is
FORM = {EXACT: "", RATIO: "bfloat16", VALUE: "int8", SIGN: "sign", SHAPE: "shape"}

SMALL = 1 << 14  # tensors with fewer elements are saved as they are


def strictest(classes: Iterable[str]) -> str:
    """One class that is precise enough for several uses; RATIO includes SIGN and VALUE."""
    rest = set(classes) - {SHAPE}
    if EXACT in rest:
        return EXACT
    return RATIO if len(rest) > 1 else next(iter(rest), SHAPE)


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    Attributes:
        name: the operation.
        because: why it has this class.
        functions: the functions of PyTorch it is about.
        aten: the operators by which a backward graph uses what these functions save.
        decomposed: names of functions that are recognized in a graph by the name that PyTorch leaves on what it
            decomposed (``original_aten``), forward and "_backward".
        saved: class of what the functions save: results, arguments, and what they make of these first (a cast, a
            transposed operand).
        arguments: position → class, of arguments that differ.
        when: (function, args, kwargs) → whether the row is about this call.
        wide: whether results span orders of magnitude, so that a graph which needs their value gets RATIO.
        compiled: how the rule of compiled graphs differs from ``saved``, in words; "" if it does not.
        formats: hotrain's own operator → the format of `formats.GROUPED` that it saves in.
        measured: operators of the records ``benchmarks/results/formats_*.jsonl`` with the error of the gradients.
    """

    name: str
    because: str
    functions: frozenset[Any] = frozenset()
    aten: frozenset[Any] = frozenset()
    decomposed: frozenset[str] = frozenset()
    saved: str = EXACT
    arguments: Mapping[int, str] = field(default_factory=dict)
    when: Callable[[Any, Sequence[Any], Mapping[str, Any]], bool] | None = None
    wide: bool = False
    compiled: str = ""
    formats: Mapping[str, str] = field(default_factory=dict)
    measured: tuple[str, ...] = ()

    @property
    def rounds(self) -> bool:
        """Whether it lets the eager fallback round anything."""
        return self.saved != EXACT or bool(self.arguments)


def _named(names: str) -> frozenset[Any]:
    """The functions of these names, of torch, Tensor and torch.nn.functional, in-place ones too."""
    homes = [(home, kind) for home in (torch, Tensor, F) for kind in ("{}", "{}_")]
    found = {getattr(home, kind.format(name), None) for name in names.split() for home, kind in homes}
    return frozenset(found - {None})


def _aten(names: str) -> frozenset[Any]:
    return frozenset(getattr(torch.ops.aten, name) for name in names.split())


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, default: Any, *names: str) -> Any:
    return args[place] if len(args) > place else next((kwargs[name] for name in names if name in kwargs), default)


def _power(args: Sequence[Any], kwargs: Mapping[str, Any], powers: Callable[[float], bool]) -> bool:
    exponent = _argument(args, kwargs, 1, None, "exponent")
    return isinstance(exponent, int | float) and not isinstance(exponent, bool) and powers(exponent)


# function → its orders that are the Euclidean norm, the default first
_EUCLIDEAN: dict[Any, tuple[Any, ...]] = {
    torch.norm: ("fro", 2, None),
    Tensor.norm: ("fro", 2, None),
    F.normalize: (2,),
    torch.linalg.vector_norm: (2,),
    torch.linalg.norm: (None,),
}

_FACTOR = "the error of a gradient is in proportion to that of the factor"
_DIVISOR = "the derivative divides by it"

MUL = Rule(
    "element-wise products",
    _FACTOR,
    functions=_named("mul multiply addcmul square"),
    aten=_aten("mul square"),
    saved=VALUE,
    formats={"product": "int4 nearest"},
    measured=("product",),
)
MATMUL = Rule(
    "matrix products",
    _FACTOR,
    functions=_named("mm bmm mv matmul addmm addbmm baddbmm outer ger inner einsum tensordot bilinear"),
    aten=_aten("mm bmm addmm baddbmm dot mv"),
    saved=VALUE,
    formats={"matmul": "int8"},
    measured=("matmul",),
)
LINEAR = Rule(
    "linear layers that stay exact",
    _FACTOR,
    functions=_named("linear"),
    saved=VALUE,
    formats={"linear": "int4 nearest"},
    measured=("linear",),
)
CONVOLUTION = Rule(
    "convolutions that stay exact",
    _FACTOR,
    functions=_named("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"),
    aten=_aten("convolution convolution_backward"),
    saved=VALUE,
    formats={"conv": "int4 nearest"},
    measured=("conv2d",),
)
DIVISION = Rule(
    "quotients",
    _DIVISOR,
    functions=_named("div divide true_divide"),
    aten=_aten("div"),
    arguments={0: VALUE, 1: RATIO},
    wide=True,
)
ADDCDIV = Rule("addcdiv", _DIVISOR, functions=_named("addcdiv"), arguments={1: VALUE, 2: RATIO})
ROOTS = Rule(
    "roots, reciprocals, a number by a tensor",
    _DIVISOR,
    functions=_named("sqrt rsqrt reciprocal") | {Tensor.__rtruediv__},
    aten=_aten("sqrt rsqrt reciprocal"),
    saved=RATIO,
    wide=True,
)
LOG = Rule("logarithms", _DIVISOR, functions=_named("log log2 log10"), saved=RATIO)
POLYNOMIAL = Rule(
    "powers 2, 3, 4",
    "the derivative is a polynomial",
    functions=_named("pow") | {Tensor.__pow__},
    aten=_aten("pow"),
    saved=VALUE,
    when=lambda _, args, kwargs: _power(args, kwargs, (2, 3, 4).__contains__),
)
POWER = Rule(
    "other powers from -4 to 4",
    "the derivative has a pole, or spans orders of magnitude",
    functions=POLYNOMIAL.functions,
    aten=POLYNOMIAL.aten,
    saved=RATIO,
    when=lambda _, args, kwargs: _power(args, kwargs, lambda power: abs(power) <= 4),
    wide=True,
    compiled="any number as exponent",
)
EXPONENTIAL = Rule(
    "exponentials",
    "the result spans orders of magnitude",
    functions=_named("exp exp2 expm1"),
    aten=_aten("exp exp2 expm1"),
    saved=RATIO,
    wide=True,
    compiled="the argument, where backward computes the result again, is exact",
)
PRODUCTS_OF_ALL = Rule(
    "products along an axis",
    EXPONENTIAL.because,
    functions=_named("cumprod prod"),
    aten=_aten("cumprod prod"),
    wide=True,
    compiled="bfloat16 where backward multiplies by the result",
)
NORM = Rule(
    "Euclidean norms",
    "the derivative divides by the norm, and a group may include vectors of far larger norm",
    functions=frozenset(_EUCLIDEAN),
    aten=_aten("linalg_vector_norm"),
    arguments={0: RATIO},
    when=lambda f, args, kwargs: _argument(args, kwargs, 1, _EUCLIDEAN[f][0], "p", "ord") in _EUCLIDEAN[f],
)
SMOOTH = Rule(
    "erf, softplus, logsigmoid, glu",
    "the derivative is bounded and continuous",
    functions=_named("erf softplus logsigmoid glu"),
    decomposed=frozenset(("erf", "softplus", "log_sigmoid", "log_sigmoid_forward", "glu")),
    saved=VALUE,
)
ELU = Rule(
    "elu with alpha 1, celu",
    SMOOTH.because,
    functions=_named("celu") | {F.elu},
    saved=VALUE,
    when=lambda f, args, kwargs: f is not F.elu or _argument(args, kwargs, 1, 1.0, "alpha") == 1,
    compiled="by its parts: comparisons and exponentials",
)
ACTIVATION = Rule(
    "gelu, silu, mish, hardswish, sigmoid, tanh, hardsigmoid",
    SMOOTH.because
    + ", but for steps of the hard ones at ±3, where few elements are; hotrain's operators save the input "
    "of silu and hardswish, of the others the derivative in 4 bits",
    functions=_named("gelu silu mish hardswish sigmoid tanh hardsigmoid"),
    decomposed=frozenset(("gelu", "silu", "mish", "hardswish", "sigmoid", "tanh", "hardsigmoid")),
    compiled="int8",
    formats={"curve": "int4 nearest"},  # of the input, for the derivative and the next layer's input
    measured=("gelu", "silu"),
)
NORMALIZATION = Rule(
    "layer, RMS, group and batch norm",
    "the codes of the normalized input are factors; a norm reduces over the row, which may have one scale",
    functions=_named("layer_norm rms_norm group_norm batch_norm"),
    formats={"norm": "int4 nearest/row"},
    measured=("layer_norm", "rms_norm", "group_norm", "batch_norm"),
)
SOFTMAX = Rule(
    "softmax",
    "the result spans orders of magnitude; in its own operator int8 is precise enough",
    functions=_named("softmax"),
    aten=_aten("_softmax"),
    wide=True,
    compiled="bfloat16 where backward multiplies by the result",
    formats={"softmax": "int8"},
    measured=("softmax",),
)
ATTENTION = Rule(
    "attention",
    "weights depend on q and k exponentially; v is a factor",
    functions=frozenset((F.scaled_dot_product_attention,)),
    formats={"query_key": "int8", "value_output": "int4 nearest"},
    measured=("attention q, k", "attention v, output"),
)
ABSOLUTE = Rule(
    "abs",
    "the derivative is the sign",
    functions=_named("abs absolute"),
    aten=_aten("sign sgn"),
    saved=SIGN,
)
POOLING = Rule(
    "average pooling, interpolation by area",
    "the derivative does not depend on the values",
    functions=_named("adaptive_avg_pool2d adaptive_avg_pool3d avg_pool3d interpolate"),
    aten=_aten(
        "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward avg_pool2d_backward avg_pool3d_backward "
        "full_like zeros_like ones_like empty_like new_zeros new_empty new_full sym_size"
    ),
    arguments={0: SHAPE},
    when=lambda f, args, kwargs: f is not F.interpolate or _argument(args, kwargs, 3, "nearest", "mode") == "area",
)
# The next four say what a use in a compiled graph passes on; the functions save nothing that an eager rule is about.
MOVE = Rule(
    "views, casts, copies, negation",
    "the elements are the same",
    aten=_aten(
        "view reshape _unsafe_view permute transpose t expand squeeze unsqueeze clone alias slice select cat split "
        "unbind split_with_sizes neg _to_copy constant_pad_nd flip roll"
    )
    | {torch.ops.prims.convert_element_type, operator.getitem},
    compiled="as its result",
)
SUM = Rule(
    "sums and differences of one tensor's parts",
    "of different tensors' the error may be as large as the result",
    aten=_aten("add sub rsub"),
    compiled="as its result",
)
CONTINUOUS = Rule(
    "bounded and clamped functions that backward computes again",
    "continuous, with a bounded derivative",
    aten=_aten("relu abs sigmoid tanh erf clamp clamp_min clamp_max"),
    compiled="as its result",
)
STATISTIC = Rule(
    "means, sums, maxima, variances",
    "small beside their input",
    aten=_aten("sum mean amax amin var var_mean std logsumexp"),
)
LOSS = Rule(
    "losses",
    "the logits are needed in full precision",
    functions=_named("log_softmax logsumexp nll_loss cross_entropy"),
    decomposed=frozenset(("log_softmax", "logsumexp", "nll_loss", "nll_loss2d", "cross_entropy_loss")),
)
OTHER = Rule(
    "everything else: sin and cos, comparisons, clamps, maxima, sorting, indexing; prelu, selu; var, std, lerp, "
    "mse_loss, grid_sample; linalg, cdist; recurrent layers",
    "of the rounded tensor it would be another derivative: a phase, a step, or a difference of large numbers",
    compiled="what meets the gradient in the end, by its own row; conditions in a bit",
)

RULES = (
    *(MUL, MATMUL, LINEAR, CONVOLUTION, DIVISION, ADDCDIV, ROOTS, LOG, POLYNOMIAL, POWER, EXPONENTIAL, PRODUCTS_OF_ALL),
    *(NORM, SMOOTH, ELU, ACTIVATION, NORMALIZATION, SOFTMAX, ATTENTION, ABSOLUTE, POOLING),
    *(MOVE, SUM, CONTINUOUS, STATISTIC, LOSS, OTHER),
)

# function → its rows, of which the first that is about a call counts
BY_FUNCTION: dict[Any, list[Rule]] = {}
for _rule in RULES:
    for _function in _rule.functions if _rule.rounds else ():
        BY_FUNCTION.setdefault(_function, []).append(_rule)


def of_call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rule:
    """The row for a call of a function of `BY_FUNCTION`."""
    rows = BY_FUNCTION[func]
    return next((rule for rule in rows if rule.when is None or rule.when(func, args, kwargs)), OTHER)
