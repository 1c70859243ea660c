"""What the demo records besides training: bytes by operator, spectra, LQS, gradients of layers, texts of the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotrain.train import Comparison, TrainRun

BATCHES = 4
"""Training batches for LQS."""
WARM_UP = 8
"""Exact updates before LQS."""
_LABELS = {"demo_vit": "small ViT", "demo_resnet": "small ResNet"}


def look_at(run: TrainRun, methods: Sequence[str], outcome: Comparison) -> dict[str, list[dict[str, Any]]]:
    """Measure one model.

    The spectrum is of the weights after the exact run, or else the first finished one. Calibration and surfaces are of
    the weights after `WARM_UP` exact updates: LQS chooses at the start of training, but not at the first update, where
    timm's zero-initialised norms let no gradient reach most convolutions of a ResNet.

    Args:
        run: the model's run.
        methods: methods as on the command line.
        outcome: its finished runs, with their checkpoints.

    Returns:
        Records by kind: ``memory``, ``spectrum``, ``calibration`` and candidate ``surfaces``.
    """
    found: dict[str, list[dict[str, Any]]] = {"memory": _memory(run, methods)}
    method = pictured(run, methods) if outcome.results else None
    return found | (_layers(method, outcome) if method else {"spectrum": [], "calibration": [], "surfaces": []})


def pictured(run: TrainRun, methods: Sequence[str]) -> TrainRun | None:
    """Choose the method for the figures of x and g_y.

    It has a low-pass along the tokens and rounds g_y to 4 bits with a scale that LQS chooses.

    Returns:
        ``run`` with the first such method; None if there is none.
    """
    from hotrain.train import with_preset

    for each in (with_preset(run, method) for method in methods):
        method = each.resolve_method()
        path, low = method.grad_input, method.grad_weight
        if low.tile > low.rank and (path.bits, path.scale) == (4, "auto"):
            return each
    return None


def pick_surfaces(candidates: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Choose the layers with the lowest and the highest error ratio of all models: per-token and per-tensor scales.

    Returns:
        The chosen surfaces, and a note that also says where LQS chose the same for every layer.
    """
    if not candidates:
        return [], ""
    by_ratio = sorted(candidates, key=lambda surface: surface["ratio"])
    token, tensor = by_ratio[0], by_ratio[-1]
    note = "Shown are the layers with the lowest and the highest error ratio of both models."
    if token["choice"] == tensor["choice"]:
        note += f" Here LQS chose a per-{token['choice']} scale for every layer."
    return ([token] if token is tensor else [token, tensor]), note


def _memory(run: TrainRun, methods: Sequence[str]) -> list[dict[str, Any]]:
    import hotrain
    from hotrain.train import build, with_preset

    records = []
    for method in methods:
        setup = build(with_preset(run, method))
        images = setup.example()[0]
        with setup.autocast():
            kept = hotrain.saved_bytes(setup.model.train(), images)
        record = {"model": run.model, "method": setup.run.method_label}
        records.append(record | {"total": kept.total, "by_operator": dict(kept.by_operator)})
    return records


def _layers(run: TrainRun, outcome: Comparison) -> dict[str, list[dict[str, Any]]]:
    import hotrain
    from hotrain.analysis.fidelity import gradient_surface
    from hotrain.cli.prepare import converted
    from hotrain.train import replace, silent, train, training_batches, with_preset

    model = run.model
    exact = [result for result in outcome.results if result.run.method_label == "exact"]
    trained = converted(run, (exact or outcome.results)[0].checkpoint_path)
    with trained.autocast():
        rows = hotrain.fidelity(trained.model, trained.example(), trained.loss, draws=2).rows
    start = train(replace(with_preset(run, "exact"), audit=False), stop_after=WARM_UP, on_progress=silent)
    young = converted(run, start.checkpoint_path)
    start.checkpoint_path.unlink()
    batches = list(training_batches(young, BATCHES))
    with young.autocast():
        layers = hotrain.calibrate(young.model, batches, young.loss, max_batches=BATCHES).layers
        alive = [name for name, layer in layers.items() if layer.error_tensor > 0]
        extremes = {pick(alive, key=lambda name: layers[name].ratio) for pick in (min, max)} if alive else set()
        surfaces = gradient_surface(young.model, batches[0], young.loss, layers=extremes) if alive else []
    spectrum = [
        {"model": model, "layer": row["layer"], "tensor": tensor, "energy": row[f"{tensor}_energy"]}
        for row in rows
        for tensor in ("g_y", "x")
    ]
    fields = ("choice", "ratio", "error_token", "error_tensor")
    calibration = [
        {"model": model, "layer": name, **{field: getattr(layer, field) for field in fields}}
        for name, layer in layers.items()
    ]
    chosen = [
        {**surface, "model": model, "choice": layers[surface["layer"]].choice, "ratio": layers[surface["layer"]].ratio}
        for surface in surfaces
    ]
    return {"spectrum": spectrum, "calibration": calibration, "surfaces": chosen}


def models(runs: Sequence[TrainRun]) -> dict[str, dict[str, Any]]:
    """Return label, description and number of parameters of every model."""
    from hotrain.train import build, with_preset

    described = {}
    for run in runs:
        setup = build(with_preset(run, "exact"))
        count = sum(parameter.numel() for parameter in setup.model.parameters())
        images = setup.example()[0]
        length = f"{run.steps} updates" if run.steps is not None else f"{run.epochs} epochs"
        described[run.model] = {
            "label": _LABELS.get(run.model, run.model),
            "description": f"{count:,} parameters, {images.shape[-2]}×{images.shape[-1]} pixels, "
            f"batches of {run.batch_size}, {length}",
            "parameters": count,
        }
    return described


def notes(runs: Sequence[TrainRun], methods: Sequence[str], jobs: int) -> list[str]:
    """Return the notes on what the demo's numbers show and do not show, one or two sentences each."""
    from hotrain.train import build

    feed = build(runs[0]).feed
    train, test = feed.data.train_size, sum(len(labels) for _, labels in feed.test_batches())
    together = f"{jobs} runs at a time, with one thread each" if jobs > 1 else "one run at a time, with one thread"
    said = [
        f"Real images, but few: {train:,} for training and {test} for the test. One test image is {100 / test:.2f} "
        "points. `hotrain demo --seeds 0,1,2` measures the noise.",
        "Accuracy is that of the last epoch. All methods start from the same weights and see the same batches.",
        f"The step times are no claim of speed: plain PyTorch without fused kernels, {together}.",
    ]
    if pictured(runs[0], methods):
        said.append(
            "Energy by sequency is of one training batch with the weights after exact training. LQS and |g_y| are of "
            f"training batches after {WARM_UP} exact updates: LQS chooses at the start."
        )
    if any(method.startswith("lbp-wht") for method in methods):
        said.append(
            "The ViT's 4×4 grid of tokens is smaller than the 8×8 tiles of lbp-wht, which therefore does not project "
            "its tokens: there lbp-wht's gradients are exact and it saves nothing."
        )
    return said
