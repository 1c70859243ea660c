"""Gated activations, compiled: y = f(x) b, as in SwiGLU.

    g_x = g_y b f'(x),   g_b = g_y f(x)

Backward needs x and b, which `activation` and `product` save in codes. Compiled, a product that reads an activation's
result becomes one operator here, so that a kernel makes both gradients from the codes in one pass; Inductor, given
the two formulas, unpacks both codes in the time of four more bytes an element than exact training moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...autograd import differentiated_once
from ...private import constant_in_graphs
from ...saved import memory_order
from .. import rematerialize
from ..codes import factors_of
from ..formats import GROUPED
from ..launcher import launch, opaque, operator_for, supported
from ..sharing import Gate
from ..slopes import ACTIVATIONS
from .base import Scope, custom_op
from .factor import Given, Made, listed, own, pack


def _fake(g: Tensor, given: Sequence[Tensor], name: str, form: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(g), torch.empty_like(g)


@opaque("gated_gradient(Tensor g, Tensor[] given, str name, str form) -> (Tensor, Tensor)", _fake)
def _gated_gradient(
    g: Tensor, given: Sequence[Tensor], name: str, form: str, in_place: bool = False
) -> tuple[Tensor, Tensor]:
    """g_x and g_b from the codes and scales of x, and then of b; ``in_place``: g_x is g, written to."""

    def reference() -> tuple[Tensor, Tensor]:
        dtype, kind = torch.promote_types(g.dtype, torch.float32), ACTIVATIONS[name]
        x, b = (GROUPED[form].restore(kept, g.shape, dtype) for kept in (given[:2], given[2:]))
        g_x, g_b = (g * b * kind.slope(x)).to(g.dtype), (g * kind.f(x)).to(g.dtype)
        return g.copy_(g_x) if in_place else g_x, g_b

    found = launch(g.device, "gated.gradient", reference, g.view(-1, g.shape[-1]), list(given), name, in_place)
    g_x, g_b = (t.view(g.shape) for t in found)
    return g_x, g_b


@opaque(
    "gated_gradient_(Tensor(a!) g, Tensor[] given, str name, str form) -> Tensor",
    lambda g, *_: torch.empty_like(g),
    inlined=False,
)
def _gated_gradient_in_place(g: Tensor, given: Sequence[Tensor], name: str, form: str) -> Tensor:
    """The second result of `_gated_gradient`, which writes its first over g."""
    return _gated_gradient(g, given, name, form, in_place=True)[1]


@differentiated_once(lambda ctx: f"{ctx.activation} × b")
class Gated(torch.autograd.Function):
    """Returns y, and codes and scales of b if they are packed here. x's are given."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, b: Tensor, name: str, b_form: str, x_given: Given, b_given: Given
    ) -> tuple[Tensor, ...]:
        kept = pack(b, b_form, b_given)
        ctx.save_for_backward(*x_given, *kept)
        recipe = rematerialize.parsed(
            b_form if rematerialize.is_recipe(b_form) else rematerialize.values(b_form, b.shape)
        )
        assert isinstance(recipe, rematerialize.Codes)
        ctx.activation, ctx.form = name, recipe.form
        return ACTIVATIONS[name].f(x) * b, *own(ctx, (kept, b_form))

    @staticmethod
    def backward(ctx: Any, g_y: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        g, given = g_y.contiguous(), ctx.saved_tensors
        with rematerialize.stays_in_backward():
            found = operator_for(g, "gated_gradient")(g, list(given), ctx.activation, ctx.form)
        return *found, *[None] * 4


_gated = custom_op(
    "gated(Tensor x, Tensor b, str name, str b_form, Tensor?[] x_given, Tensor?[] b_given) -> (Tensor, Tensor[])",
    listed(Gated.apply),
)


@constant_in_graphs
def _has_kernel(name: str, recipe: str, other: str) -> bool:
    """Whether f(x) and b are made of codes that the kernel reads: 4 bits, in groups of one size."""
    return factors_of(rematerialize.product(recipe, other)) == ((False, name, 4), (False, "", 4))


def of_pair(scope: Scope, pair: tuple[Tensor, Tensor], saved: Sequence[tuple[str, Any]]) -> Made | None:
    """The product of a pair, one of which is an activation's result and unchanged since; None for another.

    `saved` has the form or recipe of each, and the tensors given for it.
    """
    for at in (0, 1):
        gate, b = pair[at], pair[1 - at]
        before = scope.origins.unfinished_of(gate, Gate)
        if before is None or not before.x.requires_grad or not b.requires_grad or gate.shape != b.shape:
            continue
        (recipe, x_given), (form, b_given) = saved[at], saved[1 - at]
        other = (
            form if rematerialize.is_recipe(form) else rematerialize.values(form, b.shape) if form in GROUPED else ""
        )
        natural = all(memory_order(t) == list(range(t.dim())) for t in (before.x, b))
        if not (recipe and other and natural and gate.dtype == b.dtype and supported(b.device, b.dtype)):
            continue
        if _has_kernel(before.name, recipe, other):
            return _gated(before.x, b, before.name, form, x_given, b_given)  # type: ignore[no-any-return]
    return None
