"""The rule book: which saved tensor of which operation may be rounded, how far, and why.

A row is read by three: hotrain's own operators take their formats from it (`formats.FORMATS`), `eager` the class of
what other functions save, `graph` the class of what a compiled backward does with a saved tensor.

**The table lists what may be rounded, not what may not**: all else is `OTHER`, exact, and the report names it with its
bytes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# The class of a saved tensor, by what backward does with it.
EXACT, RATIO, VALUE, SIGN, SHAPE = "exact", "ratio", "value", "sign", "shape"
# class → form of `formats.packer`, "" for as it is. bfloat16 halves float32; 16-bit tensors of that class stay.
FORM = {EXACT: "", RATIO: "bfloat16", VALUE: "int8", SIGN: "sign", SHAPE: "shape"}
BECAUSE = {
    EXACT: "of a rounded tensor it would be another derivative",
    RATIO: "backward divides by it, or it spans orders of magnitude: a shared scale would flush small elements to zero",
    VALUE: "a factor, or a smooth function's argument: the error is in proportion to the largest element of a group",
    SIGN: "backward reads nothing but its signs",
    SHAPE: "backward reads none of its elements",
}

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
        functions: of PyTorch, which save the tensors that the row is about.
        aten: the operators by which a backward graph uses these tensors: read for the rows that `graph` names, which
            decides by the kind of use, and for wide ones.
        saved: class of what the functions save: results, arguments, and what they make of these first (a cast, a
            transposed operand).
        arguments: position → class, of arguments that differ.
        formats: hotrain's own operator → the format of `formats.GROUPED` that it saves in.
        when: (function, args, kwargs) → whether the row is about this call.
        decomposed: names of functions that a graph has decomposed, as PyTorch leaves them on the parts.
        wide: whether results span orders of magnitude: a graph that needs their value gets RATIO.
        compiled: how compiled graphs differ from ``saved``, in words; "" if they do not.
        because: why, if not for `BECAUSE`.
    """

    name: str
    functions: frozenset[Any] = frozenset()
    aten: frozenset[Any] = frozenset()
    saved: str = EXACT
    arguments: Mapping[int, str] = field(default_factory=dict)
    formats: Mapping[str, str] = field(default_factory=dict)
    when: Callable[[Any, Sequence[Any], Mapping[str, Any]], bool] | None = None
    decomposed: frozenset[str] = frozenset()
    wide: bool = False
    compiled: str = ""
    because: str = ""

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


def _row(name: str, functions: str, aten: str = "", saved: str = EXACT, also: Iterable[Any] = (), **more: Any) -> Rule:
    """A row: `functions` and `aten` by name, with `also` for functions that `_named` does not find."""
    return Rule(name, _named(functions) | frozenset(also), _aten(aten), saved, **more)


MUL = _row(
    "element-wise products", "mul multiply addcmul square", "mul square", VALUE, formats={"product": "int4 nearest"}
)
MATMUL = _row(
    "matrix products",
    "mm bmm mv matmul addmm addbmm baddbmm outer ger inner einsum tensordot bilinear",
    "mm bmm addmm baddbmm dot mv",
    VALUE,
    formats={"matmul": "int8"},
)
LINEAR = _row("linear layers that stay exact", "linear", "", VALUE, formats={"linear": "int4 nearest"})
CONVOLUTION = _row(
    "convolutions that stay exact",
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d",
    "convolution convolution_backward",
    VALUE,
    formats={"conv": "int4 nearest"},
)
DIVISION = _row("quotients", "div divide true_divide", "div", arguments={0: VALUE, 1: RATIO}, wide=True)
ADDCDIV = _row("addcdiv", "addcdiv", arguments={1: VALUE, 2: RATIO})
ROOTS = _row(
    "roots, reciprocals, a number by a tensor",
    "sqrt rsqrt reciprocal",
    "sqrt rsqrt reciprocal",
    RATIO,
    also=(Tensor.__rtruediv__,),
    wide=True,
)
LOG = _row("logarithms", "log log2 log10", "", RATIO)
POLYNOMIAL = _row(
    "powers 2, 3, 4",
    "pow",
    "pow",
    VALUE,
    also=(Tensor.__pow__,),
    when=lambda _, args, kwargs: _power(args, kwargs, (2, 3, 4).__contains__),
)
POWER = _row(
    "other powers from -4 to 4",
    "pow",
    "pow",
    RATIO,
    also=(Tensor.__pow__,),
    when=lambda _, args, kwargs: _power(args, kwargs, lambda power: abs(power) <= 4),
    wide=True,
    compiled="any number as exponent",
)
EXPONENTIAL = _row(
    "exponentials",
    "exp exp2 expm1",
    "exp exp2 expm1",
    RATIO,
    wide=True,
    compiled="bfloat16; the argument, where backward computes the result again, is exact",
)
PRODUCTS_ALONG = _row(
    "products along an axis",
    "cumprod prod",
    "cumprod prod",
    wide=True,
    compiled="bfloat16 where backward multiplies by the result",
    because="it spans orders of magnitude",
)
NORM = _row(
    "Euclidean norms",
    "",
    "linalg_vector_norm",
    also=_EUCLIDEAN,
    arguments={0: RATIO},
    when=lambda f, args, kwargs: _argument(args, kwargs, 1, _EUCLIDEAN[f][0], "p", "ord") in _EUCLIDEAN[f],
    because="backward divides by the norm, and a group may include vectors of far larger norm",
)
SMOOTH = _row(
    "erf, softplus, logsigmoid, glu",
    "erf softplus logsigmoid glu",
    saved=VALUE,
    decomposed=frozenset(("erf", "softplus", "log_sigmoid", "log_sigmoid_forward", "glu")),
)
ELU = _row(
    "elu with alpha 1, celu",
    "celu",
    saved=VALUE,
    also=(F.elu,),
    when=lambda f, args, kwargs: f is not F.elu or _argument(args, kwargs, 1, 1.0, "alpha") == 1,
    compiled="by its parts: comparisons and exponentials",
)
ACTIVATION = _row(
    "gelu, silu, mish, hardswish, sigmoid, tanh, hardsigmoid",
    "gelu silu mish hardswish sigmoid tanh hardsigmoid",
    decomposed=frozenset(("gelu", "silu", "mish", "hardswish", "sigmoid", "tanh", "hardsigmoid")),
    formats={"curve": "int4 nearest", "gelu": "int8", "saturating": "int8"},
    compiled="int8",
    because="smooth, but for steps of the hard ones at ±3, where few elements are; hotrain's operators save the input "
    "of gelu, silu and hardswish, and of sigmoid and tanh, cut off where f is flat: of it the derivative has an error "
    "relative to itself, by which a logarithm behind divides; of the others the derivative in 4 bits",
)
NORMALIZATION = _row(
    "layer, RMS, group and batch norm",
    "layer_norm rms_norm group_norm batch_norm",
    formats={"norm": "int4 nearest/row"},
    because="a factor; a norm reduces over the row, which may have one scale",
)
SOFTMAX = _row(
    "softmax",
    "softmax",
    "_softmax",
    formats={"softmax": "log8/row"},
    wide=True,
    compiled="bfloat16 where backward multiplies by the result",
    because="it spans orders of magnitude, and a loss with its logarithm divides by it: the error is relative to each "
    "element",
)
ATTENTION = _row(
    "attention",
    "scaled_dot_product_attention",
    formats={"query_key": "int8", "value_output": "int4 nearest"},
    because="weights depend on q and k exponentially; v is a factor",
)
ABSOLUTE = _row("abs", "abs absolute", "sign sgn", SIGN)
POOLING = _row(
    "average pooling, interpolation by area",
    "adaptive_avg_pool2d adaptive_avg_pool3d avg_pool3d interpolate",
    "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward avg_pool2d_backward avg_pool3d_backward "
    "full_like zeros_like ones_like empty_like new_zeros new_empty new_full sym_size",
    arguments={0: SHAPE},
    when=lambda f, args, kwargs: f is not F.interpolate or _argument(args, kwargs, 3, "nearest", "mode") == "area",
)
GATHER = _row("gather", "gather take_along_dim", "", SHAPE, compiled="not saved")
INDEX_ADD = _row("index_add, index_copy", "index_add index_copy", arguments={3: SHAPE}, compiled="not saved")
# These are about uses in compiled graphs alone: the functions save nothing, or it is exact in eager mode.
MOVE = Rule(
    "views, casts, copies, negation",
    aten=_aten(
        "view reshape _unsafe_view permute transpose t expand squeeze unsqueeze clone alias slice select cat split "
        "unbind split_with_sizes neg _to_copy constant_pad_nd flip roll"
    )
    | {torch.ops.prims.convert_element_type, operator.getitem},
    compiled="as its result",
    because="the elements are the same",
)
SUM = _row(
    "sums and differences of one tensor's parts",
    "",
    "add sub rsub",
    compiled="as its result",
    because="of different tensors' the error may be as large as the result",
)
CONTINUOUS = _row(
    "bounded and clamped functions that backward computes again",
    "",
    "relu abs sigmoid tanh erf clamp clamp_min clamp_max",
    compiled="as its result",
    because="continuous, with a bounded derivative",
)
STATISTIC = _row(
    "means, sums, maxima, variances",
    "",
    "sum mean amax amin var var_mean std logsumexp",
    because="small beside their input",
)
LOSS = _row(
    "losses",
    "log_softmax logsumexp nll_loss cross_entropy",
    decomposed=frozenset(("log_softmax", "logsumexp", "nll_loss", "nll_loss2d", "cross_entropy_loss")),
    because="the logits are needed in full precision",
)
OTHER = _row(
    "everything else: sin and cos, comparisons, clamps, maxima, sorting; prelu, selu; var, std, lerp; mse_loss and "
    "l1_loss, instance_norm, grid_sample; linalg, cdist; recurrent layers",
    "",
    compiled="what meets the gradient in the end, by its own row; conditions in a bit",
    because="of a rounded tensor it would be another derivative: a phase, a step, or a difference of large numbers",
)

RULES = (
    *(MUL, MATMUL, LINEAR, CONVOLUTION, DIVISION, ADDCDIV, ROOTS, LOG, POLYNOMIAL, POWER, EXPONENTIAL, PRODUCTS_ALONG),
    *(NORM, SMOOTH, ELU, ACTIVATION, NORMALIZATION, SOFTMAX, ATTENTION, ABSOLUTE, POOLING),
    *(GATHER, INDEX_ADD),
    *(MOVE, SUM, CONTINUOUS, STATISTIC, LOSS, OTHER),
)

# function → its rows, of which the first that is about a call counts
BY_FUNCTION: dict[Any, list[Rule]] = {}
for _rule in RULES:
    for _function in _rule.functions if _rule.rounds else ():
        BY_FUNCTION.setdefault(_function, []).append(_rule)


def flat_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[float, int | None] | None:
    """From where on a function of `SMOOTH` or `ELU` is flat; None for another one, and one that is not.

    Args:
        name: of the function; with the other two, of a call.

    Returns:
        The |x| above which f' is 0 or 1 to 7 digits, and of glu the axis whose second half is the gate, of which alone
        that is true; else None.
    """
    if name in ("softplus", "elu", "celu"):
        unit = float(_argument(args, kwargs, 1, 1.0, "beta", "alpha"))
        return None if unit <= 0 else (17.0 / unit if name == "softplus" else 17.0 * unit, None)
    axis = _argument(args, kwargs, 1, -1, "dim")
    return {"erf": (4.0, None), "log_sigmoid": (17.0, None), "glu": (17.0, axis)}.get(name)


def of_call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rule:
    """The row for a call of a function of `BY_FUNCTION`."""
    rows = BY_FUNCTION[func]
    return next((rule for rule in rows if rule.when is None or rule.when(func, args, kwargs)), OTHER)
