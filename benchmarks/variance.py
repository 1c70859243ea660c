"""Variance and bias of g_w under many ways to keep half of the Walsh rows, exactly, on gradients of trained networks.

    python benchmarks/snapshots.py small_vit_cifar10 --data cifar10.npz --folder runs/snapshots
    python benchmarks/variance.py small_vit_cifar10 --data cifar10.npz --snapshots runs/snapshots --out FILE

g_w is the sum over the tiles τ and the rows i of M_τi = Γ_τiᵀ X_τi. A design keeps row i of tile τ with a weight c_τi,
E[c] = 1 where it is unbiased, so that with draws that are independent between the tiles

    variance = Σ_ij C_ij K_ij     K_ij = Σ_τ ⟨M_τi, M_τj⟩ = Σ_τ (Γ_τi·Γ_τj)(X_τi·X_τj)     C the covariance of c
    bias²    = Σ_ij b_i b_j S_ij  S_ij = ⟨Σ_τ M_τi, Σ_τ M_τj⟩                               b = E[c] − 1

for any design that all tiles share. Everything is divided by the variance that the images of the batch bring, measured
from the gradients of each image: v of docs/maths.md. A k×k convolution has one Γ for each of its taps.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hotrain_bench.conditions import conditions, parser_of, write
from torch import Tensor, nn
from torch.nn import functional as F

import hotrain
from hotrain.audit.unchanged import as_found
from hotrain.cli.prepare import configure
from hotrain.convolution import sizes_of_lines
from hotrain.layer_gradients import exact_calls
from hotrain.quantize import floating
from hotrain.quantize.integer import largest_code
from hotrain.ranks import covariance
from hotrain.train.distributed import processes
from hotrain.train.setup import autocast, build, training_batches
from hotrain.transform.hadamard import matrix, rotate
from hotrain.transform.tokens import Grid, layout, project

TILE = 16
SHOWN = ("4+4", "by energy, 8 of 16", "by both, half of all", "rounding: x int4 by row, half of all by both")
RANKS = (2, 4, 5, 6, 7, 8, 9, 10, 12, 14)
LINES = ("both, half of the images where k×k", "both, half of the output's lines where k×k")
TOP = "half of all with the largest terms, without weights"


# ── what a layer's gradient is made of ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Terms:
    """The coefficients of one layer's x and g_y for one batch.

    Attributes:
        x: (tiles, 16, I), rows from low to high.
        g: (taps, tiles, 16, O), the same rows of g_y for every tap of the kernel.
        samples: images of the batch.
        arithmetic: multiplications of g_w at full rank.
        tokens: ‖g_y‖² and ‖x‖² of every token, (tokens,) each, for a kernel of one tap.
        lines: variances of `by_lines`, for a kernel of more taps.
    """

    x: Tensor
    g: Tensor
    samples: int
    arithmetic: int
    tokens: tuple[Tensor, Tensor] | None = None
    lines: dict[str, float] = field(default_factory=dict)

    def grouped(self, factor: int) -> Terms:
        """Tiles of `factor` times as many tokens: neighbouring tiles transformed into one, lowest rows first."""
        h = matrix(factor, torch.float32, self.x.device)

        def merge(t: Tensor) -> Tensor:
            *lead, tiles, rows, channels = t.shape
            t = t.view(*lead, tiles // factor, factor, rows, channels)
            return torch.einsum("ab,...bic->...iac", h, t).reshape(*lead, tiles // factor, rows * factor, channels)

        return Terms(merge(self.x), merge(self.g), self.samples, self.arithmetic)


def terms(module: nn.Module, x: Tensor, g_y: Tensor, grid: Grid | None) -> Terms | None:
    """Tiles of one call: x and g_y as the layer has them; None where tiles of 16 do not fill the samples."""
    x, g_y = x.float(), g_y.float()
    lines: dict[str, float] = {}
    if isinstance(module, nn.Conv2d):
        kernel, stride, pad = module.kernel_size[0], module.stride[0], int(module.padding[0])  # type: ignore[arg-type]
        x = x.permute(0, 2, 3, 1)
        g_y = g_y.permute(0, 2, 3, 1)
        if pad == 0 and kernel <= stride:  # a Linear layer on its patches
            x = x.unfold(1, kernel, stride).unfold(2, kernel, stride).flatten(3)
            taps = [g_y]
        else:
            lines = by_lines(module, x.permute(0, 3, 1, 2), g_y)
            size = x.shape[1:3]
            canvas = g_y.new_zeros(len(g_y), *(s + 2 * pad for s in size), g_y.shape[-1])
            taps = []
            for a in range(kernel):
                for b in range(kernel):
                    shifted = torch.zeros_like(canvas)
                    h, w = g_y.shape[1:3]
                    shifted[:, a : a + h * stride : stride, b : b + w * stride : stride][:, :h, :w] = g_y
                    taps.append(shifted[:, pad : pad + size[0], pad : pad + size[1]])
    else:
        taps = [g_y]
    lay = layout(tuple(x.shape[:-1]), TILE, TILE, 0, "auto", grid, True)
    tiles = lay.samples * lay.tiles
    if lay.dense or lay.samples != len(x):
        return None

    def cut(t: Tensor) -> Tensor:
        return project(t.contiguous(), lay, 0)[: tiles * TILE].view(tiles, TILE, t.shape[-1])

    g = torch.stack([cut(t) for t in taps])
    energies = (_energy(g_y), _energy(x)) if len(taps) == 1 else None
    return Terms(cut(x), g, len(x), tiles * TILE * x.shape[-1] * g_y.shape[-1] * len(taps), energies, lines)


def _energy(t: Tensor) -> Tensor:
    return t.square().sum(-1, dtype=torch.float64).flatten()


@dataclass
class Layer:
    """The sums that variances are made of, averaged over batches.

    Attributes:
        k, s: as in the head of this file, (rows, rows), lowest first.
        groups: Σ ⟨M_τi, M_τ'j⟩ over the ordered pairs of different tiles within groups of 2 and of 3 neighbours.
        k32, k64: k of tiles of 32 and 64 tokens.
        between: ⟨Σ M_i, Σ M_j⟩ of consecutive batches.
        images: the variance of g_w over the drawing of the images.
        signal: ‖E[g_w]‖², without bias.
        parameters, arithmetic, tiles: of the layer.
        known: variance, by name, of designs whose probabilities differ between the tiles.
        rounding: variance of rounding, by format.
        biased: squared error, by name, of designs without draws: of rounding to nearest, and of keeping the half of the
            rows with the largest terms, without weights.
    """

    k: Tensor
    s: Tensor
    groups: dict[int, Tensor]
    large: dict[int, Tensor]
    between: Tensor | None
    images: float
    signal: float
    parameters: int
    arithmetic: int
    tiles: int
    known: dict[str, float]
    rounding: dict[str, float]
    biased: dict[str, float]


def pair_sums(t: Terms, size: int = 1) -> Tensor:
    """K for size 1; else the sums over ordered pairs of different tiles within groups of `size`."""
    tiles, rows, _ = t.x.shape
    if size == 1:
        xx = t.x @ t.x.mT
        return sum(((g @ g.mT) * xx).sum(0, dtype=torch.float64) for g in t.g)  # type: ignore[return-value]
    whole = tiles // size * size
    x = t.x[:whole].reshape(whole // size, size, rows, -1)
    total = torch.zeros(rows, rows, dtype=torch.float64)
    for a in range(size):
        for b in range(size):
            if a != b:
                xx = x[:, a] @ x[:, b].mT
                for tap in t.g:
                    g = tap[:whole].reshape(whole // size, size, rows, -1)
                    total += ((g[:, a] @ g[:, b].mT) * xx).sum(0, dtype=torch.float64)
    return total


def parts(t: Terms) -> Tensor:
    """Σ_τ M_τi, (taps, rows, O, I)."""
    return torch.stack([torch.stack([g[:, i].T @ t.x[:, i] for i in range(t.x.shape[1])]) for g in t.g])


def measured(t: Terms, before: Tensor | None) -> tuple[Layer, Tensor]:
    """The sums of one layer and batch, and its parts for the next batch."""
    part = parts(t).flatten(2)  # (taps, rows, O·I)
    s = torch.einsum("tic,tjc->ij", part, part).double()
    between = None if before is None else torch.einsum("tic,tjc->ij", part, before).double()
    b = t.samples
    x = t.x.view(b, -1, t.x.shape[-1])
    own = sum((g.view(b, -1, g.shape[-1]).mT @ x).square().sum(dtype=torch.float64).item() for g in t.g)
    whole = part.sum(1).double().square().sum().item()
    images = b / (b - 1) * (own - whole / b)
    signal = b / (b - 1) * (whole - own)
    gg, xx = t.g.square().sum((0, 3)).double(), t.x.square().sum(2).double()  # (tiles, rows)
    known = by_tile(gg, xx, t.tokens)
    known |= t.lines or dict.fromkeys(LINES, known["both, half of all"])
    layer = Layer(
        k=pair_sums(t), s=s, groups={n: pair_sums(t, n) for n in (2, 3)},
        large={n * TILE: pair_sums(t.grouped(n)) for n in (2, 4)} if t.x.shape[0] % (4 * b) == 0 else {},
        between=between, images=images, signal=signal, parameters=part.shape[0] * part.shape[2],
        arithmetic=t.arithmetic, tiles=t.x.shape[0], known=known, rounding=rounding(t, gg, xx),
        biased={TOP: top_half(t, gg * xx), **to_nearest(t)},
    )  # fmt: skip
    return layer, part


# ── designs whose probabilities differ between the tiles ────────────────────────────────────────────────────────────


def capped(size: Tensor, count: float) -> Tensor:
    """min(1, λ·size) along the last axis, with λ such that the probabilities sum to `count`."""
    size = size.clamp_min(1e-30 * float(size.max()) if float(size.max()) else 1.0)
    p = torch.zeros_like(size)
    full = torch.zeros_like(size, dtype=torch.bool)
    for _ in range(64):
        left = count - full.sum(-1, keepdim=True)
        scale = left / size.masked_fill(full, 0).sum(-1, keepdim=True).clamp_min(1e-300)
        p = torch.where(full, torch.ones_like(size), size * scale)
        more = p > 1
        if not bool(more.any()):
            break
        full |= more
    return p.clamp(max=1.0)


def by_tile(gg: Tensor, xx: Tensor, tokens: tuple[Tensor, Tensor] | None) -> dict[str, float]:
    """Variances with probabilities by the norms of rows, (tiles, rows) each, as if rows were drawn one by one."""
    share = 0.5
    a, rows, size = gg * xx, gg.shape[1], gg.numel()
    gamma = gg.mean(0).expand_as(gg)

    def spread(p: Tensor) -> float:
        return float(((1 / p - 1) * a).sum())

    found = {
        "x's rows, 8 of a tile": spread(capped((xx * gamma).sqrt(), share * rows)),
        "x's rows, half of all": spread(capped((xx * gamma).sqrt().flatten(), share * size).view_as(a)),
        "g_y's rows, half of all": spread(capped((gg * xx.mean(0)).sqrt().flatten(), share * size).view_as(a)),
        "both, 8 of a tile": spread(capped(a.sqrt(), share * rows)),
        "both, half of all": spread(capped(a.sqrt().flatten(), share * size).view_as(a)),
        "both, a quarter of all": spread(capped(a.sqrt().flatten(), share * size / 2).view_as(a)),
        "both, an eighth of all": spread(capped(a.sqrt().flatten(), size / 8).view_as(a)),
    }
    if tokens is not None:
        own = tokens[0] * tokens[1]
        found["both, half of the tokens, no transform"] = float(
            ((1 / capped(own.sqrt(), len(own) / 2) - 1) * own).sum()
        )
    return found


def by_lines(conv: nn.Conv2d, x: Tensor, g_y: Tensor) -> dict[str, float]:
    """Variance of drawing half of the images, or of the output's lines, by ‖g_y‖·‖U(x)‖; x: (B, C, H, W)."""
    batch, down, across, outputs = g_y.shape
    u = F.unfold(x, conv.kernel_size, conv.dilation, conv.padding, conv.stride)  # type: ignore[arg-type]
    found = {}
    for name, parts in zip(LINES, (1, down), strict=True):
        g = g_y.reshape(batch * parts, -1, outputs)
        rows = u.view(batch, -1, parts, down // parts * across).transpose(1, 2).flatten(0, 1)
        terms = torch.stack([(r @ own).square().sum(dtype=torch.float64) for r, own in zip(rows, g, strict=True)])
        size = sizes_of_lines(*(t.square().sum((1, 2)).double().sqrt() for t in (g, rows)))
        found[name] = float(((1 / capped(size, len(size) / 2) - 1) * terms).sum())
    return found


def top_half(t: Terms, a: Tensor) -> float:
    """‖what is lost‖² where the rows with the smaller terms are left out."""
    lost = (a <= a.flatten().median()).float()[..., None]
    x = (t.x * lost).flatten(0, 1)
    return float(sum((g.flatten(0, 1).T @ x).square().sum(dtype=torch.float64) for g in t.g))


def rounding(t: Terms, gg: Tensor, xx: Tensor) -> dict[str, float]:
    """Variance of stochastic rounding in g_w: Σ over rows of ‖the other operand's row‖² · Σ step² f(1 − f).

    e4m3 is rounded to nearest: the square of its error.
    """

    def variance(v: Tensor, bits: int, axis: tuple[int, ...] | None) -> Tensor:
        amax = v.abs().amax(axis, keepdim=True) if axis else v.abs().max()
        step = (amax / largest_code(bits)).clamp_min(1e-30)
        f = (v / step).frac().abs()
        return (f * (1 - f) * step.square()).sum(-1).double()

    a, of_x = gg * xx, variance(t.x, 4, (2,))
    int4, turned = gg * of_x, gg * variance(rotate(t.x), 4, (2,))
    p = capped(a.sqrt().flatten(), a.numel() / 2).view_as(a)
    # As a pick enters the product: g_y's rows with their weights and with the scales of x's rows.
    of_row = t.x.abs().amax(2).clamp_min(1e-30) / largest_code(4)
    picked, codes = (t.g * (of_row / p)[..., None]).float(), xx / of_row.double().square()
    coarsest = picked.abs().max() / floating.largest_code("e4m3")
    of_fp8 = ((picked / coarsest).to(torch.float8_e4m3fn).float() * coarsest - picked).square().sum((0, 3)).double()
    lowest = gg[:, 0] * (variance(t.x[:, :1], 8, (2,)) - of_x[:, :1])[:, 0]
    return {
        "x int4 by row, half of all by both": float((int4 / p).sum() + ((1 / p - 1) * a).sum()),
        "x int8": float((gg * variance(t.x, 8, None)).sum()),
        "x int4 by row": float(int4.sum()),
        "x int4 by row, the lowest row of a tile int8": float(int4.sum() + lowest.sum()),
        "x int4 by row, channels rotated": float(turned.sum()),
        "picked half of g_y int8": float((p * codes * variance(picked, 8, None).sum(0)).sum()),
        "picked half of g_y e4m3": float((p * codes * of_fp8).sum()),
        "g_y int8": float((xx * variance(t.g, 8, None).sum(0)).sum()),
    }


def to_nearest(t: Terms) -> dict[str, float]:
    """‖error of g_w‖² where x is rounded to nearest, in int4 by row; *clipped*: with the scale of least error a row."""

    def rounded(v: Tensor, scales: Iterable[float]) -> Tensor:
        top = largest_code(4)
        best, least = v, torch.full_like(v[..., :1], math.inf)
        for scale in scales:
            step = (v.abs().amax(-1, keepdim=True) * scale / top).clamp_min(1e-30)
            error = (v / step).round().clamp(-top, top) * step - v
            size = error.square().sum(-1, keepdim=True)
            best, least = torch.where(size < least, error, best), torch.minimum(size, least)
        return best

    def lost(error: Tensor) -> float:
        flat = error.flatten(0, 1)
        return float(sum((g.flatten(0, 1).T @ flat).square().sum(dtype=torch.float64) for g in t.g))

    turned, shrunk = rotate(t.x), [0.5 + 0.05 * i for i in range(11)]
    return {
        "rounding: x int4 by row to nearest": lost(rounded(t.x, [1.0])),
        "rounding: x int4 by row to nearest, clipped": lost(rounded(t.x, shrunk)),
        "rounding: x int4 by row to nearest, channels rotated": lost(rounded(turned, [1.0])),
        "rounding: x int4 by row to nearest, channels rotated, clipped": lost(rounded(turned, shrunk)),
    }


# ── designs that all tiles share ────────────────────────────────────────────────────────────────────────────────────


def stratified(rows: int, fixed: int, drawn: int) -> tuple[int, Tensor]:
    """The group's size, and the covariance between the weights of two of its tiles."""
    m = rows - fixed
    c = torch.zeros(rows, rows, dtype=torch.float64)
    c[fixed:, fixed:] = 1 / (m - 1)
    c.diagonal()[fixed:] = -1
    return m // math.gcd(m, drawn), c


def systematic(p: Tensor, order: Tensor) -> list[tuple[float, Tensor]]:
    """The sets that systematic sampling keeps, each with its probability; at most as many as there are rows.

    Row i, in the given order, covers the interval from p_1 + … + p_(i−1) to p_1 + … + p_i; a row is kept whose interval
    holds one of u, u + 1, u + 2, …, with u uniform on (0, 1).
    """
    ends = p[order].double().cumsum(0)
    ends = ends * (round(float(ends[-1])) / ends[-1])
    cuts = torch.cat(
        (torch.zeros(1, dtype=torch.float64), (ends % 1).sort().values, torch.ones(1, dtype=torch.float64))
    )
    sets = []
    for low, high in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        if high - low > 1e-9:
            u = (low + high) / 2
            starts = torch.cat((torch.zeros(1, dtype=torch.float64), ends[:-1]))
            kept = (ends - u).floor() > (starts - u).floor()
            sets.append((high - low, order[kept]))
    return sets


def covariance_of(sets: list[tuple[float, Tensor]], p: Tensor) -> Tensor:
    """Covariance of the weights 1/p of a design given as sets with probabilities."""
    rows = len(p)
    joint = torch.zeros(rows, rows, dtype=torch.float64)
    for probability, kept in sets:
        joint[kept[:, None], kept[None, :]] += probability
    return joint / (p[:, None] * p[None, :]) - 1


def by_energy(k: Tensor, rank: float, tries: int = 12) -> Tensor:
    """Mean covariance, over random orders, of systematic sampling with probabilities by the energy of a row's terms."""
    p = capped(k.diagonal().clamp_min(0).sqrt(), rank)
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros_like(k)
    for _ in range(tries):
        total += covariance_of(systematic(p, torch.randperm(len(p), generator=generator)), p)
    return total / tries


def quadratic(c: Tensor, k: Tensor) -> float:
    return float((c * k).sum())


def figures(layer: Layer) -> dict[str, dict[str, float]]:
    """v and bias² of every design, both as shares of the variance that the images bring."""
    rows = TILE
    found: dict[str, dict[str, float]] = {}

    def add(name: str, variance: float, bias: float = 0.0) -> None:
        found[name] = {"v": variance / layer.images, "bias2": bias / layer.images}

    low = torch.zeros(rows, dtype=torch.float64)
    low[8:] = 1
    add("8 fixed", 0.0, float(low @ layer.s @ low))
    own = torch.ones(rows, dtype=torch.float64)
    own[layer.k.diagonal().argsort(descending=True)[:8]] = 0
    add("8 fixed, the layer's own", 0.0, float(own @ layer.s @ own))
    for fixed in (0, 2, 4, 6):
        drawn = 8 - fixed
        single = quadratic(covariance(rows, fixed, drawn), layer.k)
        add(f"{fixed}+{drawn}, tiles by themselves", single)
        size, across = stratified(rows, fixed, drawn)
        if size in layer.groups:
            add(f"{fixed}+{drawn}", single + quadratic(across, layer.groups[size]))
    add("4+4, one draw for all tiles", quadratic(covariance(rows, 4, 4), layer.s))
    for fixed, drawn in ((4, 8), (6, 6)):
        add(f"{fixed}+{drawn}", quadratic(covariance(rows, fixed, drawn), layer.k))
    for rank in RANKS:
        splits = [quadratic(covariance(rows, rank - s, s), layer.k) for s in range(1, rank + 1)]
        add(f"best split, {rank} of 16", min(splits))
        add(f"by energy, {rank} of 16", quadratic(by_energy(layer.k, rank), layer.k))
    for tokens, k in layer.large.items():
        add(f"by energy, {tokens // 2} of {tokens}", quadratic(by_energy(k, tokens // 2, 4), k))
    for name, variance in layer.known.items():
        add(f"by {name}", variance)
    # What the mean term of each row, known exactly, would take off: no control variate of its size can do more.
    design = by_energy(layer.k, 8)
    add("by energy, 8 of 16, the mean known", quadratic(design, layer.k - layer.s / layer.tiles))
    if layer.between is not None:
        cross = (layer.between + layer.between.T) / 2 / layer.tiles
        tail = covariance(rows, 4, 4)
        own_noise = quadratic(tail, layer.k)
        add("4+4, complemented in the next step", own_noise - float(cross[4:, 4:].diagonal().sum()))
    for name, error in layer.biased.items():
        add(name, 0.0, error)
    for name, variance in layer.rounding.items():
        add(f"rounding: {name}", variance)
    return found


# ── the networks ────────────────────────────────────────────────────────────────────────────────────────────────────


def layers_of(model: nn.Module, batches: list[Any], context: Callable[[], Any]) -> Iterator[tuple[str, list[Terms]]]:
    """Every converted layer whose samples are whole tiles, with its terms for each batch."""
    gathered: dict[str, list[Terms]] = {}
    for images, labels in batches:

        def loss(net: nn.Module, batch: Any) -> Tensor:
            with context():
                y = net(batch[0])
            return F.cross_entropy(y.float(), batch[1], reduction="sum")

        with as_found(model):
            for call in exact_calls(model, (images, labels), loss):
                if call.grad_output.dim() > 2:
                    grid = call.state.grid
                    found = terms(call.module, call.x, call.grad_output, grid)
                    if found is not None:
                        gathered.setdefault(call.name, []).append(found)
    yield from reversed(gathered.items())


def mean_of(found: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """The mean over batches; a design that needs the batch before is missing from the first."""
    mean = {}
    for key in found[-1]:
        rows = [batch[key] for batch in found if key in batch]
        mean[key] = {what: float(f"{sum(row[what] for row in rows) / len(rows):.4g}") for what in rows[0]}
    return mean


def progress(record: dict[str, Any]) -> float:
    """A layer's share of what a step of Adam wins, up to a constant: Σ ḡ²/σ over its parameters, one σ for all."""
    signal = max(record["signal"], 0.0)
    return float(signal * math.sqrt(record["parameters"] / record["image_variance"]))


def over_layers(records: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The means of v + bias² over layers: weighted by parameters, and by `progress`; a lacking design is left out."""
    found = {}
    for key in records[-1]["designs"]:
        rows = [r for r in records if key in r["designs"]]
        if len(rows) == len(records):
            costs = [r["designs"][key]["v"] + r["designs"][key]["bias2"] for r in rows]
            found[key] = {
                name: float(f"{sum(w * c for w, c in zip(weights, costs, strict=True)) / max(sum(weights), 1e-30):.4g}")
                for name, weights in (
                    ("parameters", [r["parameters"] for r in rows]),
                    ("progress", [progress(r) for r in rows]),
                )
            }
    return found


def knapsack(
    records: list[dict[str, Any]], design: str, budget: float = 8.0
) -> tuple[dict[str, int], dict[str, float]]:
    """Ranks by layer with the least Σ parameters · v at a mean rank, weighted by arithmetic, of at most `budget`.

    Rows are given one step of `RANKS` at a time to the layer where they save most for their arithmetic.
    """
    cost = {r["variant"]: [r["designs"][f"{design}, {rank} of 16"]["v"] for rank in RANKS] for r in records}
    place = {r["variant"]: 0 for r in records}
    whole = sum(r["arithmetic"] for r in records)
    used = RANKS[0] * whole
    while True:
        best, chosen = 0.0, None
        for r in records:
            name, at = r["variant"], place[r["variant"]]
            if at + 1 < len(RANKS):
                price = (RANKS[at + 1] - RANKS[at]) * r["arithmetic"]
                gain = (cost[name][at] - cost[name][at + 1]) * r["parameters"] / price
                if gain > best and used + price <= budget * whole:
                    best, chosen = gain, (name, price)
        if chosen is None:
            break
        place[chosen[0]] += 1
        used += chosen[1]
    ranks = {name: RANKS[at] for name, at in place.items()}
    means = {}
    for name, weight in (("parameters", lambda r: r["parameters"]), ("progress", progress)):
        total = sum(weight(r) * cost[r["variant"]][place[r["variant"]]] for r in records)
        means[name] = float(f"{total / max(sum(weight(r) for r in records), 1e-30):.4g}")
    return ranks, means


def main() -> int:
    """Measure every snapshot and write one record for each layer."""
    parser = parser_of(__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--data", required=True)
    parser.add_argument("--snapshots", type=Path, required=True, help="folder of benchmarks/snapshots.py")
    parser.add_argument("--updates", help="comma-separated; default: all that are there")
    parser.add_argument("--images", type=int, default=64, help="of a batch")
    parser.add_argument("--batches", type=int, default=2)
    args = parser.parse_args()
    device = torch.device("cpu")
    common = conditions(device, sys.argv, args.commit)
    files = sorted(args.snapshots.glob(f"{args.recipe}_*.pt"), key=lambda f: int(f.stem.rsplit("_", 1)[1]))
    wanted = {int(u) for u in args.updates.split(",")} if args.updates else None
    for file in files:
        saved = torch.load(file, map_location="cpu", weights_only=True)
        if wanted and saved["update"] not in wanted:
            continue
        with processes("cpu") as ranks:
            settings = ["audit=false", "device=cpu", f"batch_size={args.images}"]
            run = configure(args.recipe, method="exact", data=args.data, settings=settings, seed=1)
            setup = build(run, ranks)
        setup.model.load_state_dict(saved["model"])
        hotrain.convert(setup.model, hotrain.preset("hot-unbiased"), number="int", plan="memory")
        batches = list(training_batches(setup, args.batches))
        records: list[dict[str, Any]] = []
        for name, calls in layers_of(setup.model, batches, partial(autocast, run, device)):
            before, rows = None, []
            for call in calls:
                layer, before = measured(call, before)
                rows.append(layer)
            designs = mean_of([figures(row) for row in rows])
            last = rows[-1]
            empty = dict.fromkeys(("median_ms", "spread_ms", "peak_bytes", "activation_bytes"))
            record = empty | {
                "bench": "variance", "subject": f"{args.recipe}/{saved['update']} updates", "variant": name,
                "loss": round(saved["loss"], 3), "images": args.images, "batches": len(rows),
                "parameters": last.parameters, "arithmetic": last.arithmetic // args.images,
                "image_variance": sum(r.images for r in rows) / len(rows),
                "signal": sum(r.signal for r in rows) / len(rows),
                "row_energy": [round(float(e), 5) for e in (last.k.diagonal() / last.k.diagonal().sum())],
                "designs": designs,
            }  # fmt: skip
            records.append(record)
            write(args.out, record | common)
            print(record["subject"], name, {k: designs[k]["v"] for k in SHOWN}, flush=True)
        total = {**record, "variant": "all layers", "designs": over_layers(records), "ranks": None, "row_energy": None}
        total["ranks"] = {}
        for design in ("best split", "by energy"):
            total["ranks"][design], total["designs"][f"{design}, ranks by layer"] = knapsack(records, design)
        write(args.out, total | common)
        print(total["designs"], total["ranks"], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
