"""Ranks by layer: the variance that drawn rows add to each layer's g_w, and a rank for every layer within a budget.

g_w is the sum over tiles τ and rows i of M_τi = Γ_τiᵀ X_τi. Drawn rows weight these terms at random, independently in
every tile, so that the variance of g_w is Σ_ij C_ij K_ij, with K_ij = Σ_τ ⟨M_τi, M_τj⟩ of the layer and C the
covariance of the weights (docs/maths.md). Rows, or lines of a convolution's output, that are drawn by importance have
the variance Σ (1/p − 1) ‖M‖² as if they were drawn one by one. It is divided by the variance that the samples of the
batch bring: v.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .audit.unchanged import as_found
from .convolution import share_of_lines, sizes_of_lines
from .functional import plain_model
from .geometry import Geometry, patches
from .layer import Config
from .layer_gradients import Call, LossFn, exact_calls
from .nn.state import LayerState, layer_states
from .tables import table
from .transform.importance import probabilities
from .transform.tokens import project

RANKS = (2, 4, 6, 8, 10, 12, 14, 16)
_AT_ONCE = 4096  # lines or rows


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
        rank: rows kept of 16; or, of rows or lines that are drawn by importance, sixteenths of all, where 16 means
            15: what draws goes on drawing.
        sampled: how many of these are drawn; 0 for drawing by importance.
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
        rows = []
        for name, c in self.layers.items():
            kept = f"{c.rank - c.sampled}+{c.sampled}" if c.sampled else f"{_share(c.rank):.0%} by importance"
            rows.append([name, kept, f"{c.ratio:.4f}", f"{c.ratios[at]:.4f}"])
        title = f"mean rank {self.mean_rank:.2f} of 16 (budget {self.budget:g}), mean v {self.ratio:.4f}"
        return title + "\n" + table(["layer", "rows", "v", "v at rank 8"], rows)

    def apply(self, model: nn.Module) -> None:
        """Set the rank of every layer.

        Args:
            model: converted with the method that was calibrated.

        Raises:
            ValueError: a layer is missing from the model, or draws no rows. Nothing is changed then.
        """
        states = _with_rows(plain_model("Ranks.apply", model))
        unknown = sorted(set(self.layers) - set(states))
        if unknown:
            raise ValueError(
                f"these ranks are of another model or method: {', '.join(unknown[:3])} draws no rows here; "
                "convert the model with the same method and filter, or calibrate it again"
            )
        for name, layer in self.layers.items():
            rows = {"rank": layer.rank, "sampled": layer.sampled} if layer.sampled else {"share": _share(layer.rank)}
            states[name].method = states[name].method.override(**rows)


def calibrate_ranks(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFn | None = None,
    *,
    budget: float = 8.0,
    max_batches: int = 2,
) -> Ranks:
    """Choose a rank, or a share of what is drawn by importance, for every converted layer that draws rows.

    Ranks are raised one step of `RANKS` at a time, each time where a multiplication more takes most off Σ
    parameters · v, until the mean rank is at the budget. Apply the result with ``.apply(model)``. The model,
    generators and draws are unchanged. Gradients change while a network learns: calibrate again from time to time,
    for example after every epoch.

    Convolutions whose patches overlap are left as they are, unless lines of their output are drawn (`hot-importance`):
    a rank does not shorten their product. So are those with groups, and outputs of fewer than 8 lines.

    Args:
        model: converted, for example with `hot-importance`; its layers run exactly while it is measured.
        batches: training batches of at least two samples.
        loss_fn: as in `hotrain.calibrate`.
        budget: largest mean rank, of 16, weighted by the layers' arithmetic.
        max_batches: how many batches are used.

    Raises:
        ValueError: no batch, a batch of one sample, no layer that draws rows, or a budget that is not from 2 to 16.
    """
    if not RANKS[0] <= budget <= RANKS[-1]:
        raise ValueError(f"calibrate_ranks: budget={budget!r} is not from {RANKS[0]} to {RANKS[-1]}")
    model = plain_model("calibrate_ranks", model)
    names = _with_rows(model)
    if not names:
        raise ValueError(
            "calibrate_ranks: no layer draws rows of 16, so there is no rank to choose; convert the model with "
            "hot-importance or hot-unbiased, or another method with share=… or sampled=…"
        )
    found: dict[str, list[tuple[Tensor, float, Call]]] = {}
    empty = True
    with as_found(model):
        for batch in islice(batches, max_batches):
            empty = False
            for call in exact_calls(model, batch, loss_fn, names):
                measured = _measured(call)
                if measured is not None:
                    found.setdefault(call.name, []).append((*measured, call))
    if empty:
        raise ValueError("calibrate_ranks: no batch was given; pass at least one training batch")
    if not found:
        raise ValueError(
            "calibrate_ranks: the forward called no layer that draws, but such whose output has fewer than 8 lines, "
            "which are all multiplied"
        )
    curves = {name: _curve(found[name]) for name in names if name in found}
    return Ranks(_chosen(curves, budget), budget)


def _with_rows(model: nn.Module) -> dict[str, LayerState]:
    """The layers that draw rows of 16 and whose product gets shorter with their rank."""
    found = {}
    for name, state in layer_states(model):
        rows, module, knobs = state.running.grad_weight, model.get_submodule(name), state.running.knobs
        geometry = getattr(module, "geometry", None)
        grouped = geometry is not None and geometry.groups > 1
        plain = geometry is None or geometry.is_patches
        drawn = rows.share == 1 and rows.sampled and {"rank", "sampled"} <= knobs and plain
        shared = rows.share < 1 and rows.rank == RANKS[-1] and "share" in knobs
        if rows.tile == RANKS[-1] and not grouped and (drawn or shared):
            found[name] = state
    return found


def _share(rank: int) -> float:
    """The share that is drawn by importance: what draws goes on drawing, so that it can be calibrated again."""
    return min(rank, RANKS[-1] - 1) / RANKS[-1]


def _measured(call: Call) -> tuple[Tensor, float] | None:
    """Of one call K, or the variance at each of `RANKS` where importance draws; and the variance of the samples.

    None where all lines are multiplied.
    """
    x, g_y, method = call.x.float(), call.grad_output.float(), call.state.running
    geometry: Geometry | None = getattr(call.module, "geometry", None)
    if len(x) < 2 or x.dim() < 3 or (geometry is not None and x.dim() != 4):
        raise ValueError(f"calibrate_ranks: {call.name}: x of shape {tuple(x.shape)} is no batch of several samples")
    lines = 0
    if geometry is not None and not geometry.is_patches:
        lines = g_y.shape[2]
        if share_of_lines(method, g_y.shape[1], geometry, lines) == 1.0:
            return None
        x = F.unfold(geometry.pad(x), geometry.kernel, geometry.dilation, 0, geometry.stride).mT
        x, g_y = x.unflatten(1, g_y.shape[2:]), g_y.movedim(1, -1)
    elif geometry is not None:
        x, g_y = patches(geometry.pad(x), geometry), g_y.movedim(1, -1)
    images = image_variance(g_y.flatten(1, -2), x.flatten(1, -2))
    if lines:
        return _by_importance(g_y.flatten(0, 1), x.flatten(0, 1), lines=True), images
    full = method if method.grad_weight.share < 1 else method.override(rank=RANKS[-1], sampled=0)
    lay = Config(full, call.state.grid).layout(tuple(x.shape[:-1]))
    size, tiles = lay.lines.tile, lay.samples * lay.tiles
    if method.grad_weight.share < 1:
        return _by_importance(project(g_y, lay, 0)[:, None], project(x, lay, 0)[:, None]), images
    coefficients = [project(t, lay, 0)[: tiles * size].view(tiles, size, -1) for t in (g_y, x)]
    return row_products(*coefficients).cpu(), images


def _by_importance(g: Tensor, x: Tensor, lines: bool = False) -> Tensor:
    """Σ (1/p − 1) ‖g_lᵀ x_l‖² at each of `RANKS`: lines or rows l, (L, W, O) and (L, W, I). float64."""
    of_g, of_x = (torch.linalg.vector_norm(t, dim=(1, 2), dtype=torch.float64) for t in (g, x))
    size = sizes_of_lines(of_g, of_x) if lines else of_g * of_x
    pairs = zip(g.split(_AT_ONCE), x.split(_AT_ONCE), strict=True)
    terms = torch.cat([((a @ a.mT) * (b @ b.mT)).sum((1, 2), dtype=torch.float64) for a, b in pairs])
    found = []
    for rank in RANKS:
        p = probabilities(size, ceil(_share(rank) * len(g))).clamp(max=1.0)
        found.append(float(((1 / p - 1) * terms).sum()))
    return torch.tensor(found, dtype=torch.float64, device="cpu")


def _curve(calls: list[tuple[Tensor, float, Call]]) -> LayerRank:
    """v of a layer at every rank, as a `LayerRank` at the lowest."""
    k: Tensor = sum(k for k, _, _ in calls)  # type: ignore[assignment]
    images = sum(variance for _, variance, _ in calls)
    weight, grad = calls[0][2].module.weight, calls[0][2].grad_output
    assert isinstance(weight, Tensor)
    best = [(float(variance), 0) for variance in k] if k.dim() == 1 else [_best(k, rank) for rank in RANKS]
    # A layer that no gradient reaches yet, as where a norm's weight is zero, counts as if its rows were drawn evenly.
    ratios = tuple(v / images if images > 0 else RANKS[-1] / r - 1 for r, (v, _) in zip(RANKS, best, strict=True))
    outputs = grad.shape[-1 if getattr(calls[0][2].module, "geometry", None) is None else 1]
    arithmetic = weight.numel() * grad.numel() // outputs
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
        if not steps:
            break
        name = max(steps, key=lambda n: steps[n])
        left -= (RANKS[place[name] + 1] - RANKS[place[name]]) * layers[name].arithmetic
        place[name] += 1
    chosen = {}
    for name, layer in layers.items():
        at = place[name]
        chosen[name] = replace(layer, rank=RANKS[at], sampled=layer.drawn[at], ratio=layer.ratios[at])
    return chosen
