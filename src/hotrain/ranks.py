"""Ranks by layer: the variance that drawn rows add to each layer's g_w, and a rank for every layer within a budget.

g_w is the sum over tiles τ and rows i of M_τi = Γ_τiᵀ X_τi. Drawn rows weight these terms at random, independently in
every tile, so that the variance of g_w is Σ_ij C_ij K_ij, with K_ij = Σ_τ ⟨M_τi, M_τj⟩ of the layer and C the
covariance of the weights (docs/maths.md). It is divided by the variance that the samples of the batch bring: v.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from .audit.unchanged import as_found
from .geometry import Geometry, patches
from .layer import Config
from .layer_gradients import Call, LossFn, exact_calls
from .nn.state import LayerState, layer_states
from .tables import table
from .transform.tokens import project

RANKS = (2, 4, 6, 8, 10, 12, 14, 16)


def covariance(rows: int, fixed: int, sampled: int) -> Tensor:
    """Covariance of the weights of the rows of a tile, (rows, rows), float64.

    Args:
        rows: of a tile, lowest first.
        fixed: how many are always kept.
        sampled: how many of the others are drawn, evenly and without replacement.

    Raises:
        ValueError: rows are left and none, or more than these, are drawn.
    """
    c = torch.zeros(rows, rows, dtype=torch.float64, device="cpu")
    left = rows - fixed
    if left and not 0 < sampled <= left:
        raise ValueError(f"covariance: sampled={sampled} of {left} rows; accepted is 1 to {left}")
    if 1 < left != sampled:
        c[fixed:, fixed:] = left * (sampled - 1) / (sampled * (left - 1)) - 1
        c.diagonal()[fixed:] = left / sampled - 1
    return c


def row_products(g: Tensor, x: Tensor) -> Tensor:
    """K: Σ over tiles of (Γ_i·Γ_j)(X_i·X_j).

    Args:
        g: P g_y at full rank, (tiles, rows, O).
        x: P x, (tiles, rows, I).

    Returns:
        (rows, rows), float64.
    """
    return ((g @ g.mT) * (x @ x.mT)).sum(0, dtype=torch.float64)


def image_variance(g_y: Tensor, x: Tensor) -> float:
    """The variance of g_w over the drawing of the samples, from the gradients of each: B/(B−1) (Σ‖g_n‖² − ‖Σ g_n‖²/B).

    Args:
        g_y: (B, tokens, O), B at least 2.
        x: (B, tokens, I).
    """
    own, whole = 0.0, torch.zeros(g_y.shape[-1], x.shape[-1], dtype=torch.float64, device=x.device)
    for g, own_x in zip(g_y, x, strict=True):
        part = g.mT @ own_x
        own += float(part.square().sum(dtype=torch.float64))
        whole += part
    return len(x) / (len(x) - 1) * (own - float(whole.square().sum()) / len(x))


@dataclass(frozen=True)
class LayerRank:
    """The rank of one layer.

    Attributes:
        rank: rows kept of 16.
        sampled: how many of these are drawn.
        ratio: v, the variance that the draws add to g_w over that of the samples.
        ratios: v at every one of `RANKS`.
        drawn: the number of drawn rows that has it.
        arithmetic: multiplications of g_w at full rank for one batch.
        parameters: of the weight.
    """

    rank: int
    sampled: int
    ratio: float
    ratios: tuple[float, ...]
    drawn: tuple[int, ...]
    arithmetic: int
    parameters: int


@dataclass(frozen=True)
class Ranks:
    """The result of `calibrate_ranks`.

    Attributes:
        layers: layer name → its rank.
        budget: mean rank that was allowed, weighted by the arithmetic of the layers.
    """

    layers: dict[str, LayerRank]
    budget: float

    @property
    def mean_rank(self) -> float:
        """Mean over the layers, weighted by their arithmetic."""
        whole = sum(layer.arithmetic for layer in self.layers.values())
        return sum(layer.rank * layer.arithmetic for layer in self.layers.values()) / whole

    @property
    def ratio(self) -> float:
        """Mean of v over the layers, weighted by their parameters: a batch is worth 1/(1 + v) of itself."""
        whole = sum(layer.parameters for layer in self.layers.values())
        return sum(layer.ratio * layer.parameters for layer in self.layers.values()) / whole

    def __str__(self) -> str:
        at = RANKS.index(8)
        rows = [
            [name, f"{c.rank - c.sampled}+{c.sampled}", f"{c.ratio:.4f}", f"{c.ratios[at]:.4f}"]
            for name, c in self.layers.items()
        ]
        title = f"mean rank {self.mean_rank:.2f} of 16 (budget {self.budget:g}), mean v {self.ratio:.4f}"
        return title + "\n" + table(["layer", "fixed+drawn", "v", "v at rank 8"], rows)

    def apply(self, model: nn.Module) -> None:
        """Set the rank of every layer.

        Args:
            model: converted with the method that was calibrated.

        Raises:
            ValueError: a layer is missing from the model, or draws no rows. Nothing is changed then.
        """
        states = _with_rows(model)
        unknown = sorted(set(self.layers) - set(states))
        if unknown:
            raise ValueError(
                f"these ranks are of another model or method: {', '.join(unknown[:3])} draws no rows here; "
                "convert the model with the same method and filter, or calibrate it again"
            )
        for name, layer in self.layers.items():
            states[name].method = states[name].method.override(rank=layer.rank, sampled=layer.sampled)


def calibrate_ranks(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFn | None = None,
    *,
    budget: float = 8.0,
    max_batches: int = 2,
) -> Ranks:
    """Choose a rank for every converted layer that draws rows.

    Ranks are raised one step of `RANKS` at a time, each time where a multiplication more takes most off Σ
    parameters · v, until the mean rank is at the budget. Apply the result with ``.apply(model)``. The model,
    generators and draws are unchanged. Gradients change while a network learns: calibrate again from time to time,
    for example after every epoch.

    Convolutions whose patches overlap are left as they are: a rank does not shorten their product.

    Args:
        model: converted, for example with `hot-unbiased`; its layers run exactly while it is measured.
        batches: training batches of at least two samples.
        loss_fn: as in `hotrain.calibrate`.
        budget: largest mean rank, of 16, weighted by the layers' arithmetic.
        max_batches: how many batches are used.

    Returns:
        The rank of every layer, with its v.

    Raises:
        ValueError: no batch, a batch of one sample, no layer that draws rows, or a budget that is not from 2 to 16.
    """
    if not RANKS[0] <= budget <= RANKS[-1]:
        raise ValueError(f"calibrate_ranks: budget={budget!r} is not from {RANKS[0]} to {RANKS[-1]}")
    names = _with_rows(model)
    if not names:
        raise ValueError(
            "calibrate_ranks: no layer draws rows of 16, so there is no rank to choose; convert the model with "
            "hot-unbiased, or another method with sampled=…"
        )
    found: dict[str, list[tuple[Tensor, float, Call]]] = {}
    with as_found(model):
        for batch in islice(batches, max_batches):
            for call in exact_calls(model, batch, loss_fn, names):
                found.setdefault(call.name, []).append((*_measured(call), call))
    if not found:
        raise ValueError("calibrate_ranks: no batch was given; pass at least one training batch")
    curves = {name: _curve(found[name]) for name in names if name in found}
    return Ranks(_chosen(curves, budget), budget)


def _with_rows(model: nn.Module) -> dict[str, LayerState]:
    """The layers that draw rows of 16 and whose product gets shorter with their rank."""
    found = {}
    for name, state in layer_states(model):
        rows, module = state.running.grad_weight, model.get_submodule(name)
        geometry = getattr(module, "geometry", None)
        plain = geometry is None or (geometry.is_patches and geometry.groups == 1)
        if rows.tile == RANKS[-1] and rows.sampled and {"rank", "sampled"} <= state.running.knobs and plain:
            found[name] = state
    return found


def _measured(call: Call) -> tuple[Tensor, float]:
    """K and the variance of the samples of one call."""
    x, g_y = call.x.float(), call.grad_output.float()
    geometry: Geometry | None = getattr(call.module, "geometry", None)
    if geometry is not None:
        x, g_y = patches(geometry.pad(x), geometry), g_y.movedim(1, -1)
    if len(x) < 2 or x.dim() < 3:
        raise ValueError(f"calibrate_ranks: {call.name}: x of shape {tuple(x.shape)} is no batch of several samples")
    full = call.state.running.override(rank=RANKS[-1], sampled=0)
    lay = Config(full, call.state.grid).layout(tuple(x.shape[:-1]))
    size, tiles = lay.lines.tile, lay.samples * lay.tiles
    coefficients = [project(t, lay, 0)[: tiles * size].view(tiles, size, -1) for t in (g_y, x)]
    return row_products(*coefficients).cpu(), image_variance(g_y.flatten(1, -2), x.flatten(1, -2))


def _curve(calls: list[tuple[Tensor, float, Call]]) -> LayerRank:
    """v of a layer at every rank, as a `LayerRank` at the lowest."""
    k: Tensor = sum(k for k, _, _ in calls)  # type: ignore[assignment]
    images = sum(variance for _, variance, _ in calls)
    weight, grad = calls[0][2].module.weight, calls[0][2].grad_output
    assert isinstance(weight, Tensor)
    best = [_best(k, rank) for rank in RANKS]
    ratios = tuple(variance / images if images > 0 else 0.0 for variance, _ in best)
    arithmetic = weight.numel() * grad.numel() // weight.shape[0]
    drawn = tuple(sampled for _, sampled in best)
    return LayerRank(RANKS[0], drawn[0], ratios[0], ratios, drawn, arithmetic, weight.numel())


def _best(k: Tensor, rank: int) -> tuple[float, int]:
    """The least variance at a rank, and the number of drawn rows that has it: at full rank one, of one that is left."""
    rows = len(k)
    return min((float((covariance(rows, rank - s, s) * k).sum()), s) for s in range(1, rank + 1))


def _chosen(layers: dict[str, LayerRank], budget: float) -> dict[str, LayerRank]:
    place = dict.fromkeys(layers, 0)
    whole = sum(layer.arithmetic for layer in layers.values())
    left = (budget - RANKS[0]) * whole
    while True:
        steps = {
            name: (layer.ratios[at] - layer.ratios[at + 1]) * layer.parameters / layer.arithmetic
            for name, layer in layers.items()
            if (at := place[name]) + 1 < len(RANKS) and (RANKS[at + 1] - RANKS[at]) * layer.arithmetic <= left
        }
        if not steps or max(steps.values()) <= 0:
            break
        name = max(steps, key=lambda n: steps[n])
        left -= (RANKS[place[name] + 1] - RANKS[place[name]]) * layers[name].arithmetic
        place[name] += 1
    chosen = {}
    for name, layer in layers.items():
        at = place[name]
        chosen[name] = replace(layer, rank=RANKS[at], sampled=layer.drawn[at], ratio=layer.ratios[at])
    return chosen
