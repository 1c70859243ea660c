"""RMS norms that a model writes out by hand (transformers' Llama, Qwen, OLMo, T5 and others): which modules are one.

Their forward in training is the operator of `norm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...casting import outside_autocast
from ...private import differentiates
from ..eager import sees_functions
from ..rematerialize import normed
from ..report import ATTRIBUTE, Buffers
from .base import Handlers, Scope, is_large, wants_gradient
from .norm import KINDS, forward, norm, saved_format

COMPOSED = "_hotrain_kinds"  # of such a module: its `Composed`
_EPSILONS = "variance_epsilon", "eps"
_DTYPES = [  # of x and of the weight
    (torch.float32, torch.float32),
    *((low, other) for low in (torch.bfloat16, torch.float16) for other in (torch.float32, low)),
]
_NUMBERS = bool, int, float, str, torch.dtype, type(None)


@dataclass(frozen=True)
class Composed:
    """What such a module computes.

    Attributes:
        kinds: the kind of norm by the dtypes of x and of the weight.
        epsilon: the number that it adds to the mean of squares.
        attributes: of the module, with which it was tried: name and value.
    """

    kinds: tuple[tuple[torch.dtype, torch.dtype, str], ...]
    epsilon: float
    attributes: tuple[tuple[str, Any], ...]


class ComposedRMSNorm:
    """Mixin for such a module: forward in training is the operator."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(self, ComposedRMSNorm):
            return type(self).forward(self, hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
        x, w = hidden_states, self.weight  # type: ignore[attr-defined]
        buffers: Buffers | None = self.__dict__.get(ATTRIBUTE)
        wanted = buffers is not None and differentiates() and wants_gradient(x, w)
        plain = args or kwargs or not (self.training and wanted) or not is_large(x)  # type: ignore[attr-defined]
        plain = plain or (not torch.compiler.is_compiling() and sees_functions(type(x)))
        kind = "" if plain else _kind_of(self.__dict__, x, w)
        if not kind:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc,no-any-return]
        assert buffers is not None
        buffers.record("composed RMS norms", saved_format())
        epsilon = self.__dict__[COMPOSED].epsilon  # as it is now: `_kind_of` has compared it
        return torch.ops.hotrain.norm(x, w, None, kind, 1, epsilon, saved_format())[0]  # type: ignore[no-any-return]


def _kind_of(own: dict[str, Any], x: Tensor, w: Tensor) -> str:
    """The kind for a call; empty where the module was not tried on such tensors, or has changed since."""
    composed: Composed = own[COMPOSED]
    if not 2 <= x.dim() <= 4 or x.shape[-1] != w.shape[0]:
        return ""
    for name, value in composed.attributes:
        if own.get(name) != value:
            return ""
    for x_dtype, w_dtype, kind in composed.kinds:
        if x.dtype == x_dtype and w.dtype == w_dtype:
            return kind
    return ""


def _composed_norm(
    scope: Scope, x: Tensor, w: Tensor | None, b: Tensor | None, kind: str, *rest: Any
) -> tuple[Tensor, ...] | None:
    """A handler of the operator itself, as a composed norm calls it; others are called in place of PyTorch's."""
    if kind not in ("rms_cast", "rms_float"):
        return None
    y, codes, scale, channels = norm(x, w, b, kind, *rest)
    recipe = normed(saved_format(), y.shape, cast=KINDS[kind].rounds)
    scope.origins.note(y, recipe, codes, scale, channels[1], b)
    return y, codes, scale, channels


def composed(module: nn.Module) -> Composed | None:
    """What an RMS norm that is written out by hand computes; None for another module.

    Its class name says so, and a weight along the last axis, one epsilon and a few constants are all that it has. A
    copy without hooks is run on random numbers and weights: its results must be the formula's to the bit and its
    gradients the formula's, on two to four axes, in training and not, whatever its other numbers are; and it must stay
    as it is.
    """
    if "rmsnorm" not in type(module).__name__.lower() or isinstance(module, nn.RMSNorm):
        return None
    every = nn.Module().__dict__
    own = {name: value for name, value in module.__dict__.items() if name not in every}
    tensors = [*module.named_parameters(), *module.named_buffers()]
    epsilons = [own[name] for name in _EPSILONS if name in own]
    if not all(map(_is_constant, own.values())) or len(epsilons) != 1 or len(tensors) != 1:
        return None
    ((name, weight),), (epsilon,) = tensors, epsilons
    if name != "weight" or weight.dim() != 1 or weight.is_meta or type(weight.detach()) is not Tensor:
        return None
    few = [size for size in (2, 3, 5, 7) if size != len(weight)]
    devices = [weight.device] if weight.is_cuda else []
    try:
        with torch.enable_grad(), outside_autocast(weight), torch.random.fork_rng(devices):
            same = all(_kind(module, epsilon, few[:axes], *_DTYPES[0], moved=axes > 1) for axes in (1, 2, 3))
            if not (same and _kind(module, epsilon, few[:1], *_DTYPES[0], extreme=True)):
                return None
            found = [(*dtypes, _kind(module, epsilon, few[:1], *dtypes)) for dtypes in _DTYPES]
    except Exception:  # it takes other arguments
        return None
    return Composed(tuple(each for each in found if each[2]), float(epsilon), tuple(own.items()))


def _is_constant(value: Any) -> bool:
    numbers = value if isinstance(value, tuple) else (value,)
    return all(isinstance(number, _NUMBERS) for number in numbers)


def _kind(
    module: nn.Module, epsilon: float, lead: Sequence[int], x_dtype: torch.dtype, w_dtype: torch.dtype, *,
    moved: bool = False, extreme: bool = False,
) -> str:  # fmt: skip
    """The kind that the module is for x of (*lead, C), empty for none.

    Args:
        module: to be tried.
        epsilon: of the module.
        lead: other axes of x.
        x_dtype, w_dtype: of x and of the weight.
        moved: in the other mode, and with other numbers of its own than epsilon.
        extreme: for an x with infinities, NaN and numbers whose squares overflow.
    """
    weight, generator = module.weight, torch.Generator().manual_seed(0)
    assert isinstance(weight, Tensor)
    x = torch.randn(*lead, len(weight), generator=generator, device="cpu")
    x = x * 10.0 ** torch.linspace(-3, 3, lead[-1], device="cpu")[:, None]  # in small rows epsilon counts
    if extreme:
        x[0, 0], x = float("inf"), torch.cat([x, 1e30 * x, x * float("nan")])
    w, g = (torch.rand(s, generator=generator, device="cpu") + 0.5 for s in (len(weight), x.shape))
    x, w, g = x.to(weight.device, x_dtype), w.to(weight.device, w_dtype), g.to(weight.device)
    given = {**module.__dict__, "_parameters": {"weight": nn.Parameter(w)}}
    if moved:
        numbers = {k: v + 1 for k, v in given.items() if type(v) is float and k not in _EPSILONS}
        given |= {"training": not module.training, **numbers}
    copy = object.__new__(type(module))
    copy.__dict__.update(given)
    x_own, w_own = x.clone().requires_grad_(), given["_parameters"]["weight"]
    got = type(module).forward(copy, x_own)
    changed = any(copy.__dict__.get(k) is not v for k, v in given.items()) or len(copy.__dict__) != len(given)
    if changed or not isinstance(got, Tensor) or not torch.equal(x_own.nan_to_num(), x.nan_to_num()):
        return ""
    x, w = x.requires_grad_(), w.clone().requires_grad_()
    for kind in ("rms_cast", "rms_float"):
        want = forward(x, w, None, kind, 1, epsilon)[0]
        if got.dtype == want.dtype and bool(((got == want) | got.isnan() & want.isnan()).all()):
            break
    else:
        return ""
    if not extreme and x_dtype == w_dtype == torch.float32:
        theirs, ours = (torch.autograd.grad((y * g).sum(), ts) for y, ts in ((got, (x_own, w_own)), (want, (x, w))))
        if not all(
            torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max())) for a, b in zip(theirs, ours, strict=True)
        ):
            return ""
    return kind


HANDLERS: Handlers = {torch.ops.hotrain.norm: _composed_norm}
