"""Norms as in exact training, put back into a joint graph in the place of the operators that pack x̂.

Of a layer or RMS norm both are PyTorch's formulas, from x, μ and r. Of a batch norm forward is y = f(γ x̂ + β + shortcut) in PyTorch's formulas, which Inductor fuses; backward is that of
`operators.batch_norm` with x̂ = (x − μ) r computed from x, and f's exact derivative.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..quantize.integer import wide
from .nodes import inlined
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
    x, mean, r, w, b, shortcut, name = norm.args
    g, other, *_, passes_on = gradient.args
    given = [t for t in (w, b, shortcut) if t is not None]

    def forward(x: Tensor, mean: Tensor, r: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        terms = iter(rest)
        y = _normal(x, mean, r)
        y = y if w is None else y * _along(wide(next(terms)))
        y = (y if b is None else y + _along(wide(next(terms)))).to(x.dtype)
        y = y if shortcut is None else y + next(terms)
        return y, ACTIVATIONS[name].f(y) if name else y  # type: ignore[index]

    before, y = inlined(graph, norm, forward, [x, mean, r, *given])  # type: ignore[list-item]
    _replace(graph, norm, [y])

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
        g_x = ((lifted - mean_g - normal * slope) * _along(factor)).to(g.dtype)
        return g_x, torch.stack([g_b, g_w]), behind

    inputs = [g, before, x, mean, r, *(t for t in (other, w) if t is not None)]
    _replace(graph, gradient, inlined(graph, gradient, backward, inputs)[: 3 if passes_on else 2])  # type: ignore[arg-type]


def row_pairs(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Each layer or RMS norm over rows and its gradient, where nothing else reads the codes of x̂."""
    for norm in graph.find_nodes(op="call_function", target=torch.ops.hotrain.norm_forward.default):
        parts = {part.args[1]: part for part in norm.users}
        readers = {reader for place in (3, 4) if place in parts for reader in parts[place].users}
        gradient = readers.pop() if len(readers) == 1 else None
        if gradient is not None and gradient.target is torch.ops.hotrain.norm_backward.default:
            alone = all(norm.args[place] is None for place in (1, 10, 11))
            if alone and all(gradient.args[place] is None for place in (5, 8, 9)):
                yield norm, gradient


def put_rows_back(graph: Graph, norm: Node, gradient: Node) -> None:
    """Compute both exactly, in place; the operators are dead code then."""
    given: Any = norm.args
    x, _, w, b, eps, _, dtype, centered, cast, *_ = given

    def forward(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        terms, lifted = iter(rest), wide(x)
        mean = lifted.mean(1, keepdim=True) if centered else lifted.new_zeros(())
        lifted = lifted - mean if centered else lifted
        r = torch.rsqrt(lifted.square().mean(1, keepdim=True) + eps)
        y = lifted * r
        y = y.to(dtype).to(y.dtype) if cast else y
        y = y if w is None else y * next(terms)
        return (y if b is None else y + next(terms)).to(dtype), r, *([mean] if centered else [])

    y, *statistics = inlined(graph, norm, forward, [x, *(t for t in (w, b) if t is not None)])
    for part in list(norm.users):
        if part.args[1] == 1:
            part.replace_all_uses_with(y)
            graph.erase_node(part)
    of_gradient: Any = gradient.args

    def backward(g: Tensor, x: Tensor, r: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        terms, lifted, normal = iter(rest), wide(g), wide(x)
        normal = (normal - next(terms) if centered else normal) * r
        scaled = lifted if w is None else lifted * next(terms)
        inner = scaled - normal * (scaled * normal).mean(1, keepdim=True)
        inner = inner - scaled.mean(1, keepdim=True) if centered else inner
        sums = torch.stack([lifted.sum(0), (lifted * normal).sum(0)])
        return (inner * r).to(of_gradient[6]), sums

    inputs = [of_gradient[0], x, *statistics, *([] if w is None else [w])]
    _replace(graph, gradient, inlined(graph, gradient, backward, inputs))


def put_statistics_back(graph: Graph, statistics: Node) -> None:
    """Let the compiler compute mean and variance of each channel, in place."""

    def formula(x: Tensor) -> tuple[Tensor, Tensor]:
        var, mean = torch.var_mean(wide(x), (0, 2, 3), correction=0)
        return mean, var

    _replace(graph, statistics, inlined(graph, statistics, formula, [statistics.args[0]]))  # type: ignore[list-item]


def _along(t: Tensor) -> Tensor:
    """(C,) along the channels of (N, C, H, W)."""
    return t.view(-1, 1, 1)


def _normal(x: Tensor, mean: Tensor, r: Tensor) -> Tensor:
    return (wide(x) - _along(mean)) * _along(r)


def _replace(graph: Graph, node: Node, results: list[Node]) -> None:
    """Put these in the places of an operator's first results."""
    for part in list(node.users):
        place = part.args[1]
        if isinstance(place, int) and place < len(results):
            part.replace_all_uses_with(results[place])
            graph.erase_node(part)
