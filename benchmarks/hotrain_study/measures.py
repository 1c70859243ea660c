"""Measurements of studies: what is computed, kept and timed, and how far gradients are from exact over a training.

Each function takes a run and its options, and returns JSON values.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

import hotrain
from hotrain.analysis.fidelity import first_calls
from hotrain.audit.unchanged import as_found
from hotrain.layer_gradients import LossFn, exact_calls
from hotrain.planning import clock
from hotrain.train.distributed import Processes
from hotrain.train.evaluation import evaluate
from hotrain.train.models import resolve_device
from hotrain.train.optimization import create_optimizer
from hotrain.train.run import TrainRun, replace
from hotrain.train.setup import Setup, autocast, build, create, training_batches
from hotrain.train.training import Training
from hotrain_study import published
from hotrain_study.cells import with_method

TABLE_5 = {"stages.3.fc2 of EfficientFormer-L7": (49, 448, 1792), "qkv of ViT-B": (197, 2304, 768)}
"""Layers (tokens, outputs, inputs): the one that HOT's Table 5 prints, and one of the model of its other figures."""


def costs(run: TrainRun, classes: int = 100, kept: bool = False) -> dict[str, Any]:
    """Bit operations and bytes of one step, by the papers' formulas and as counted; no data, nothing is run.

    Args:
        run: model, image size, batch; its method is what is counted.
        classes: outputs of the model.
        kept: whether to predict what autograd keeps; it takes minutes for a large convolutional model.

    Returns:
        Bit operations of forward and backward: ``paper`` of one image (None where nothing is published) and
        ``corrected`` of one image; ``overhead`` of these, transforms and quantization; bytes: ``paper_bytes`` of the
        published formula, parameters and optimizer included (None likewise), and what autograd keeps as predicted
        with the run's autocast (``kept``; None where not asked for); and Table 5's formulas for `TABLE_5`.
    """
    model = _model(run, classes, torch.device("meta"))
    image = _images(model, 1, run)
    chosen = run.resolve_method()
    corrected = hotrain.cost(model, image, method=chosen)
    found: dict[str, Any] = {
        "corrected": {"forward": corrected.forward.bit_ops, "backward": corrected.backward.bit_ops},
        "overhead": corrected.overhead.bit_ops,
        "paper": None,
        "paper_bytes": None,
        "kept": None,
        "batch": run.batch_size,
        "table_5": {name: _table_5(*shape) for name, shape in TABLE_5.items()},
    }
    if chosen.name in published.PUBLISHED:
        forward, backward = published.bit_operations(model, image, chosen)
        found["paper"] = {"forward": forward, "backward": backward}
        if chosen.name in ("exact", "hot"):
            found["paper_bytes"] = published.memory(model, run.batch_size, image, chosen)
    if kept:
        if not chosen.is_plain:
            hotrain.convert(model, chosen, plan="memory")
        with torch.autocast("cpu", torch.bfloat16, enabled=run.amp == "bf16"):
            found["kept"] = hotrain.predicted_bytes(model.train(), _images(model, run.batch_size, run)).total
    return found


def _model(run: TrainRun, classes: int, device: torch.device) -> nn.Module:
    assert run.image_size is not None
    return create(run, classes=classes, channels=3, image_size=run.image_size, device=device)


def _images(model: nn.Module, count: int, run: TrainRun) -> torch.Tensor:
    size = run.image_size or 224
    return torch.empty(count, 3, size, size, device=next(model.parameters()).device)


def _table_5(tokens: int, outputs: int, inputs: int) -> dict[str, float]:
    """MFLOPs of the formulas, as written and with O and I exchanged."""
    vanilla, overhead = published.flop_overhead(tokens, outputs, inputs)
    _, exchanged = published.flop_overhead(tokens, inputs, outputs)
    return {"vanilla": vanilla / 1e6, "overhead": overhead / 1e6, "overhead_exchanged": exchanged / 1e6}


def step(run: TrainRun, classes: int = 100, steps: int = 30) -> dict[str, Any]:
    """Time and kept bytes of a training step on random images; nothing else may run on the device.

    Args:
        run: model, image size, batch, optimizer, method, plan.
        classes: outputs of the model.
        steps: that are timed, after ten that are not.

    Returns:
        ``step_ms`` (median), ``spread_ms`` (deviation), ``kept`` bytes between forward and backward, ``layers``: what
        ran.
    """
    device = resolve_device(run.device)
    torch.manual_seed(run.seed)
    model = _model(run, classes, device).train()
    images = torch.randn_like(_images(model, run.batch_size, run))
    labels = torch.randint(classes, (run.batch_size,), device=device)
    chosen = run.resolve_method()
    report = None if chosen.is_plain else hotrain.convert(model, chosen, plan=run.plan)
    if run.calibrate_batches and report is not None and not chosen.is_exact:
        with autocast(run, device):
            hotrain.calibrate(model, [(images, labels)]).apply(model)
    with autocast(run, device):
        kept = hotrain.saved_bytes(model, images).total
    net: Any = model
    if run.compile:
        net = torch.compile(model, mode="reduce-overhead" if run.plan != "speed" and device.type == "cuda" else None)
    optimizer = create_optimizer(run, model)
    times: list[float] = []
    for _ in range(10 + steps):
        begun = clock(device)
        with autocast(run, device):
            loss = nn.functional.cross_entropy(net(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append((clock(device) - begun) * 1e3)
    return {
        "step_ms": statistics.median(times[10:]),
        "spread_ms": statistics.stdev(times[10:]),
        "kept": kept,
        "batch": run.batch_size,
        "layers": None if report is None else report.ran(),
    }


def gradients(
    run: TrainRun,
    methods: Sequence[str] = ("hot",),
    at: Sequence[float] = (0.0, 0.1, 0.3, 1.0),
    images: int = 32,
    draws: int = 4,
    surface: int = 24,
) -> dict[str, Any]:
    """Train exactly, and at some moments compare every method's gradients with exact ones, layer by layer.

    Args:
        run: the training; its method is exact.
        methods: presets with overrides that are compared, on copies of the model.
        at: moments, as shares of the run; 0 is after eight updates, when timm's zero-initialized norms let gradients
            reach every layer.
        images: of the batch on which gradients are compared.
        draws: of each gradient (`hotrain.fidelity`).
        surface: rows and columns of the surfaces of |g_y|, reduced by the largest magnitude.

    Returns:
        ``moments``: per moment the update, and per method the rows of `hotrain.fidelity` (errors, cosines, bias and the
        noise of so many draws); the ``energy`` by sequency of g_y and x; the choices of LQS (``lqs``) with their error
        ratios. ``surfaces``: |g_y| at the last moment of the layers with the lowest and the highest ratio.
    """
    training = Training(build(replace(run, audit=False)), Processes())
    setup, per_epoch = training.setup, training.updates_per_epoch
    moments = {max(min(8, training.updates), round(share * training.updates)) for share in at}
    x, y = setup.example()
    batch = (x[:images], y[:images])
    found: list[dict[str, Any]] = []
    surfaces: list[dict[str, Any]] = []
    while training.update < training.updates:
        epoch, first = divmod(training.update, per_epoch)
        training.start_epoch(epoch)
        for batches in setup.feed.updates(epoch, first):
            training.step(batches)
            training.watch()
            if training.update in moments:
                last = training.update == max(moments)
                entry, drawn = _moment(setup, training.model, batch, methods, draws, surface if last else 0)
                found.append({"update": training.update, **entry})
                surfaces = drawn
            if training.update == training.updates:
                break
    _, accuracy = evaluate(training.model, training.setup, training.ranks)
    return {"updates": training.updates, "accuracy": accuracy, "moments": found, "surfaces": surfaces}


def _moment(
    setup: Setup, model: nn.Module, batch: Any, methods: Sequence[str], draws: int, surface: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    entry: dict[str, Any] = {"methods": {}, "energy": {}, "lqs": {}}
    surfaces: list[dict[str, Any]] = []
    for label in methods:
        other = copy.deepcopy(model).train()
        chosen = with_method(setup.run, label).resolve_method()
        hotrain.convert(other, chosen, plan="memory")
        with setup.autocast():
            rows = hotrain.fidelity(other, batch, setup.loss, draws=draws).rows
            entry["methods"][label] = {row["layer"]: _figures(row) for row in rows}
            if not entry["energy"]:
                entry["energy"] = {
                    row["layer"]: {tensor: _rounded(row[f"{tensor}_energy"]) for tensor in ("g_y", "x")} for row in rows
                }
            if not entry["lqs"] and chosen.grad_input.bits == 4 and chosen.grad_input.scale == "auto":
                batches = list(training_batches(setup, 4))
                layers = hotrain.calibrate(other, batches, setup.loss).layers
                entry["lqs"] = {name: [layer.choice, _rounded([layer.ratio])[0]] for name, layer in layers.items()}
                if surface:
                    surfaces = _surfaces(setup, other, batch, entry["lqs"], surface)
    return entry, surfaces


def _surfaces(setup: Setup, model: nn.Module, batch: Any, lqs: dict[str, list[Any]], size: int) -> list[dict[str, Any]]:
    extremes = {pick(lqs, key=lambda name: lqs[name][1]) for pick in (min, max)}
    drawn = gradient_surface(model, batch, setup.loss, layers=extremes, size=size)
    return [{**each, "values": [_rounded(row, 3) for row in each["values"]]} for each in drawn]


def gradient_surface(
    model: nn.Module, batch: Any, loss_fn: LossFn | None = None, *, layers: Collection[str] | None = None, size: int
) -> list[dict[str, Any]]:
    """|g_y| of the batch's first sample over tokens × channels, for figures of its outliers. The model is unchanged.

    Args:
        model: converted.
        batch: as in `hotrain.fidelity`.
        loss_fn: as in `hotrain.fidelity`.
        layers: names of converted layers (default: all).
        size: larger surfaces are reduced to so many rows and columns, by the largest magnitude: no outlier is lost.

    Returns:
        One dict per layer, in the order of the forward: layer, tokens and channels (of the whole surface), largest
        (its largest magnitude), values (rows of tokens).
    """
    surfaces = []
    with as_found(model):
        for call in first_calls(exact_calls(model, batch, loss_fn, layers)):
            g_y = call.grad_output[:1] if call.grad_output.dim() > 2 else call.grad_output
            surface = call.module.token_matrix(g_y).abs().float()  # type: ignore[operator]
            reduced = nn.functional.adaptive_max_pool2d(surface[None, None], [min(size, n) for n in surface.shape])
            tokens, channels = surface.shape
            told = {"layer": call.name, "tokens": tokens, "channels": channels, "largest": float(surface.max())}
            surfaces.append({**told, "values": reduced[0, 0].tolist()})
    return surfaces


_KEPT = ("error", "cosine", "bias", "noise")


def _figures(row: dict[str, Any]) -> dict[str, list[float | None]]:
    """Of g_x and g_w, the figures named in `_KEPT`; an empty list where the gradient is not needed."""
    return {
        short: [] if row[f"{path}_error"] is None else _rounded([row[f"{path}_{what}"] for what in _KEPT])
        for short, path in (("g_x", "grad_input"), ("g_w", "grad_weight"))
    }


def _rounded(values: Sequence[float], digits: int = 4) -> list[float | None]:
    """Significant digits; None for what is not finite, which JSON cannot hold."""
    return [float(f"{v:.{digits}g}") if v == v and abs(v) != float("inf") else None for v in values]
