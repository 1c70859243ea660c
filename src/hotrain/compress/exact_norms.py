"""Batch norm as in exact training, put back into a joint graph in the place of the operators that pack x̂.

Forward is y = f(γ x̂ + β + shortcut) in PyTorch's formulas, which Inductor fuses; backward is that of
`operators.batch_norm` with x̂ = (x − μ) r computed from x, and f's exact derivative.
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
    """Each batch norm and its gradient, where nothing else reads the codes of x̂."""
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
        y = y if w is None else y * _along(wide(next(terms)))
        y = (y if b is None else y + _along(wide(next(terms)))).to(x.dtype)
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
                (behind,) = torch.autograd.grad(ACTIVATIONS[name].f(leaf), leaf, behind)  # type: ignore[index]
        normal, lifted, axes = _normal(x, mean, r), wide(behind), (0, 2, 3)
        g_b, g_w = lifted.sum(axes), (lifted * normal).sum(axes)
        mean_g, slope = (_along(t * (x.shape[1] / x.numel())) for t in (g_b, g_w))
        factor = r if w is None else r * wide(next(terms))
        g_x = (lifted - mean_g - normal * slope) * _along(factor)
        g_x = (g_x if after is None else g_x + wide(next(terms))).to(g_x_dtype)
        return g_x, torch.stack([g_b, g_w]), behind

    inputs = [g, before, x, mean, r, *(t for t in (other, w, after) if t is not None)]
    found = inlined(graph, gradient, backward, inputs)  # type: ignore[arg-type]
    replace_results(graph, gradient, found[: 3 if passes_on else 2])


def put_statistics_back(graph: Graph, statistics: Node) -> None:
    """Let the compiler compute mean and variance of each channel, in place."""

    def formula(x: Tensor) -> tuple[Tensor, Tensor]:
        var, mean = torch.var_mean(wide(x), (0, 2, 3), correction=0)
        return mean, var

    replace_results(graph, statistics, inlined(graph, statistics, formula, [statistics.args[0]]))  # type: ignore[list-item]


def _along(t: Tensor) -> Tensor:
    """(C,) along the channels of (N, C, H, W)."""
    return t.view(-1, 1, 1)


def _normal(x: Tensor, mean: Tensor, r: Tensor) -> Tensor:
    return (wide(x) - _along(mean)) * _along(r)
