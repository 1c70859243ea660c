"""RMS norms that a model writes out by hand (transformers' Llama, Qwen, OLMo, T5 and others): which modules are one.

Their forward in training is the operator of `norm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...casting import outside_autocast
from ...private import differentiates
from ..report import ATTRIBUTE, Buffers
from .base import Handlers, Scope, is_large, note_norm, wants_gradient
from .norm import KINDS, forward, norm, saved_format

COMPOSED = "_hotrain_kinds"  # of such a module: its `composed_kinds`
_EPSILONS = "variance_epsilon", "eps"
_DTYPES = [  # of x and of the weight
    (torch.float32, torch.float32),
    *((low, other) for low in (torch.bfloat16, torch.float16) for other in (torch.float32, low)),
]
Kinds = tuple[tuple[torch.dtype, torch.dtype, str], ...]


class ComposedRMSNorm:
    """Mixin for such a module: forward in training is the operator."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(self, ComposedRMSNorm):
            return type(self).forward(self, hidden_states, *args, **kwargs)  # type: ignore[no-any-return]
        x, w = hidden_states, self.weight  # type: ignore[attr-defined]
        buffers: Buffers | None = self.__dict__.get(ATTRIBUTE)
        wanted = buffers is not None and differentiates() and wants_gradient(x, w)
        plain = args or kwargs or not (self.training and wanted) or not is_large(x)  # type: ignore[attr-defined]
        kind = "" if plain else _kind_of(self.__dict__[COMPOSED], x, w)
        if not kind:
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc,no-any-return]
        assert buffers is not None
        buffers.record("composed RMS norms", saved_format())
        return torch.ops.hotrain.norm(x, w, None, kind, 1, _epsilon(self), saved_format())[0]  # type: ignore[no-any-return]


def _kind_of(kinds: Kinds, x: Tensor, w: Tensor) -> str:
    """The kind for a call; empty where the module has not been tried on such tensors."""
    if not 2 <= x.dim() <= 4 or x.shape[-1] != w.shape[0]:
        return ""
    for x_dtype, w_dtype, kind in kinds:
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
    note_norm(scope, (y, codes, scale), channels[1], b, saved_format(), cast=KINDS[kind].rounds)
    return y, codes, scale, channels


def _epsilon(module: Any) -> float:
    """The number that the module adds to the mean of squares; NaN if it has no attribute for it."""
    return float(next((getattr(module, name) for name in _EPSILONS if hasattr(module, name)), float("nan")))


def composed_kinds(module: nn.Module) -> Kinds:
    """What an RMS norm that is written out by hand computes, by the dtypes of x and of its weight; () for no such norm.

    Its class name says so, it has an epsilon, and a weight along the last axis is all that it holds. A copy without
    hooks is run on random numbers and weights: its results must be the formula's to the bit, on two to four axes, in
    training and not, and whatever its other numbers are; and it must stay as it is.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if "rmsnorm" not in type(module).__name__.lower() or isinstance(module, nn.RMSNorm) or len(tensors) != 1:
        return ()
    (name, weight), known = tensors[0], "forward" in module.__dict__ or any(True for _ in module.children())
    if known or name != "weight" or weight.dim() != 1 or weight.is_meta or type(weight.detach()) is not Tensor:
        return ()
    few = [size for size in (2, 3, 5, 7) if size != len(weight)]
    try:
        with torch.no_grad(), outside_autocast(weight):
            if not all(_computes(module, few[:axes], *_DTYPES[0], moved=axes > 1) for axes in (1, 2, 3)):
                return ()
            found = ((*dtypes, _computes(module, few[:1], *dtypes)) for dtypes in _DTYPES)
            return tuple(each for each in found if each[2])
    except Exception:  # it takes other arguments
        return ()


def _computes(
    module: nn.Module, lead: Sequence[int], x_dtype: torch.dtype, w_dtype: torch.dtype, moved: bool = False
) -> str:
    """The kind that the module is for x of (*lead, C); ``moved`` is with another mode and other numbers of its own."""
    weight, generator = module.weight, torch.Generator().manual_seed(0)
    assert isinstance(weight, Tensor)
    x = torch.randn(*lead, len(weight), generator=generator, device="cpu")
    x = x * 10.0 ** torch.linspace(-3, 3, lead[-1], device="cpu")[:, None]  # in small rows epsilon counts
    w = 0.5 + torch.rand(len(weight), generator=generator, device="cpu")
    x, w = x.to(weight.device, x_dtype), w.to(weight.device, w_dtype)
    given = {**module.__dict__, "_parameters": {"weight": nn.Parameter(w, requires_grad=False)}}
    if moved:
        numbers = {k: v + 1 for k, v in given.items() if type(v) is float and k not in _EPSILONS}
        given |= {"training": not module.training, **numbers}
    copy = object.__new__(type(module))
    copy.__dict__.update(given)
    got = type(module).forward(copy, x)
    if not isinstance(got, Tensor) or len(copy.__dict__) != len(given) or copy._parameters["weight"] is None:
        return ""
    if any(copy.__dict__.get(k) is not v for k, v in given.items()):
        return ""
    for kind in ("rms_cast", "rms_float"):
        want = forward(x, w, None, kind, 1, _epsilon(module))[0]
        if got.dtype == want.dtype and torch.equal(got, want):
            return kind
    return ""


HANDLERS: Handlers = {torch.ops.hotrain.norm: _composed_norm}
