"""Norms of images as in exact training, put back into a joint graph in the place of the operators that pack x̂.

Forward is y = f(γ x̂ + β + shortcut) in PyTorch's formulas, which Inductor fuses; backward is that of
`operators.image_norm` with x̂ = (x − μ) r computed from x, and f's exact derivative.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..quantize.integer import wide
from .nodes import arguments_of, inlined, replace_results
from .slopes import ACTIVATIONS

_NORMALIZE = torch.ops.hotrain.normalize.default
_GRADIENT = torch.ops.hotrain.norm_gradient.default


def pairs(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Each norm and its gradient, where nothing else reads the codes of x̂."""
    for norm in graph.find_nodes(op="call_function", target=_NORMALIZE):
        readers = {reader for part in norm.users if part.args[1] != 0 for reader in part.users}
        if len(readers) == 1 and next(iter(readers)).target is _GRADIENT:
            yield norm, readers.pop()


def put_back(graph: Graph, norm: Node, gradient: Node) -> None:
    """Compute both exactly, in place; the operators are dead code then."""
    x, mean, r, w, b, shortcut, name, _ = arguments_of(norm)
    g, other, *_, passes_on, _, after = arguments_of(gradient)
    y_dtype, g_x_dtype = (node.meta["val"][0].dtype for node in (norm, gradient))
    given = [t for t in (w, b, shortcut) if t is not None]

    def forward(x: Tensor, mean: Tensor, r: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        terms = iter(rest)
        y = _normal(x, mean, r)
        y = y if w is None else y * _along(next(terms))
        y = (y if b is None else y + _along(next(terms))).to(torch.promote_types(x.dtype, y_dtype))
        y = y if shortcut is None else y + next(terms)
        return y, (ACTIVATIONS[name].f(y) if name else y).to(y_dtype)  # type: ignore[index]

    before, y = inlined(graph, norm, forward, [x, mean, r, *given])  # type: ignore[list-item]
    replace_results(graph, norm, [y])

    def backward(g: Tensor, before: Tensor, x: Tensor, mean: Tensor, r: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        terms = iter(rest)
        behind = g if other is None else g + next(terms)
        if name:
            with torch.enable_grad():
                leaf = before.detach().requires_grad_()
                (behind,) = torch.autograd.grad(ACTIVATIONS[name].f(leaf), leaf, behind.to(before.dtype))  # type: ignore[index]
        normal, lifted = _normal(x, mean, r), wide(behind)
        gamma = None if w is None else wide(next(terms))
        each = torch.stack([_sum(lifted, r), _sum(lifted * normal, r)])  # (2, samples, C)
        shape = 2, -1, r.shape[-1], x.shape[1] // r.shape[-1]
        of_groups = (each if gamma is None else each * gamma).view(shape).sum(3) * (r.numel() / x.numel())
        mean_g, slope = (_spread(t if r.dim() == 2 else t[0], x) for t in of_groups)
        g_x = ((lifted if gamma is None else lifted * _along(gamma)) - mean_g - normal * slope) * _spread(r, x)
        g_x = (g_x if after is None else g_x + wide(next(terms))).to(g_x_dtype)
        return g_x, each.sum(1), behind

    inputs = [g, before, x, mean, r, *(t for t in (other, w, after) if t is not None)]
    found = inlined(graph, gradient, backward, inputs)  # type: ignore[arg-type]
    replace_results(graph, gradient, found[: 3 if passes_on else 2])


def put_statistics_back(graph: Graph, statistics: Node) -> None:
    """Let the compiler compute mean and variance of each channel, or of groups of them in a sample, in place."""
    _, groups = arguments_of(statistics)

    def formula(x: Tensor) -> tuple[Tensor, Tensor]:
        each = wide(x).reshape(x.shape[0], groups, -1, x.shape[2] * x.shape[3]) if groups else wide(x)
        var, mean = torch.var_mean(each, (2, 3) if groups else (0, 2, 3), correction=0)
        return mean, var

    replace_results(graph, statistics, inlined(graph, statistics, formula, [statistics.args[0]]))  # type: ignore[list-item]


def _along(t: Tensor) -> Tensor:
    """(C,) along the channels of (N, C, H, W)."""
    return wide(t).view(-1, 1, 1)


def _spread(t: Tensor, x: Tensor) -> Tensor:
    """A statistic of batch norm, (C,), or of group norm, (N, groups), along the channels of x (N, C, H, W)."""
    return t.repeat_interleave(x.shape[1] // t.shape[-1], -1)[..., None, None]


def _sum(t: Tensor, r: Tensor) -> Tensor:
    """Sums over the elements of each channel, (1, C) of a batch norm, (N, C) of a group norm."""
    return t.sum((2, 3)) if r.dim() == 2 else t.sum((0, 2, 3))[None]


def _normal(x: Tensor, mean: Tensor, r: Tensor) -> Tensor:
    return (wide(x) - _spread(mean, x)) * _spread(r, x)
