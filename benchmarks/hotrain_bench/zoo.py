"""`hotrain bench zoo`: training steps of thirty models, exact, checkpointed and as the default of `hotrain.convert`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hotrain_bench import side_by_side
from hotrain_bench.step import variant_of
from hotrain_bench.tasks import BERT, LLAMA, check

EXACT, CHECKPOINT, HOTRAIN = "exact+graphs", "exact+compile+checkpoint", "hotrain-default"
VARIANTS = (EXACT, CHECKPOINT, HOTRAIN)
WITHOUT_GRAPHS = ("exact+compile", "hotrain-default-nographs")  # exact, and the default, by `torch.compile` alone
# With these batches parameters, gradients, moments and what autograd saves (`hotrain.predicted_bytes`) are 4 to 12 GiB.
# ViT-L, BERT, Qwen2 and OPT have more, and are far from one another so that they are not prepared at once. CoAtNet is
# not among them: PyTorch 2.11 does not compile its exact step.
MODELS = (
    "vit_base_patch16_224/b128",
    "resnet50/b256",
    "swin_tiny_patch4_window7_224/b128",
    "convnext_tiny/b128",
    BERT,
    "deit_small_patch16_224/b256",
    "efficientnet_b0/b256",
    "segformer_b0/b16x512",
    "pvt_v2_b2/b128",
    "gpt2/b8x1024",
    "mixer_b16_224/b128",
    "regnety_032/b128",
    "vit_large_patch16_224/b128",
    "poolformer_s24/b128",
    "qwen2/b4x2048",
    "vit_small_patch14_dinov2/b128",
    "densenet121/b128",
    "mobilenetv3_large_100/b256",
    "twins_svt_small/b128",
    LLAMA,
    "eva02_small_patch14_224/b128",
    "resnext50_32x4d/b128",
    "mobilevit_s/b128",
    "edgenext_small/b128",
    "opt_350m/b8x1024",
    "beit_base_patch16_224/b64",
    "convnextv2_tiny/b128",
    "xcit_small_12_p16_224/b128",
    "deit3_small_patch16_224/b256",
    "t5_small/b16x512",
)

Measured = Mapping[str, Any]
"""Fields of one variant: median_ms, peak_bytes and reserved_bytes, each None where it was not measured."""


def run(
    models: Sequence[str],
    variants: Sequence[str],
    device: str,
    steps: int,
    tiny: bool = False,
    seconds: float | None = None,
    jobs: int | None = None,
    gpus: int = 1,
) -> Iterator[dict[str, Any]]:
    """Prepare variants of models in parallel, some models at a time, and time them one after the other.

    Args:
        models: names as for `tasks.build`.
        variants: names as for `step.variant_of`; those of one model are prepared at the same time.
        device: the device to measure on.
        steps: timed steps of each variant.
        tiny: the size for tests.
        seconds: after this time variants that are not ready are stopped, and no further ones started; None: no limit.
        jobs: largest number of processes at a time, which the GPU's memory and the host's cores limit; None: as many
            as there are cores, and at least one model's.
        gpus: number of GPUs that the models are distributed over.

    Returns:
        The records of `step.run`, one per variant of a model; a failed one has its ``error`` and no times.

    Raises:
        ValueError: an unknown model or variant, or fewer `jobs` than `variants`.
    """
    for model in models:
        check(model)
    for variant in variants:
        variant_of(variant)
    if jobs is not None and jobs < len(variants):
        raise ValueError(f"--jobs: got {jobs}, the {len(variants)} variants of a model are prepared at the same time")
    size = max(1, (jobs or os.cpu_count() or 1) // len(variants))
    waves = [
        [(model, variant) for model in models[first : first + size] for variant in variants]
        for first in range(0, len(models), size)
    ]
    return _waves(waves, device, steps, tiny, seconds, gpus)


def _waves(
    waves: Sequence[Sequence[tuple[str, str]]], device: str, steps: int, tiny: bool, seconds: float | None, gpus: int
) -> Iterator[dict[str, Any]]:
    began = time.monotonic()
    for parts in waves:
        left = None if seconds is None else seconds - (time.monotonic() - began)
        if left is None or left > 0:
            yield from side_by_side.together(parts, device, steps, tiny, left, gpus)
            continue
        error = f"TimeoutError: left out: {seconds:g} seconds were over"
        for part in parts:
            yield side_by_side.blank(*part, steps, tiny) | {"error": error}


HEADERS = (
    "exact ms",
    "hotrain ms",
    "× time",
    "exact GiB (reserved)",
    "hotrain GiB (reserved)",
    "× peak",
    "checkpointed ms",
    "checkpointed GiB (reserved)",
    "dominated by",
)


def cells(found: Mapping[str, Measured]) -> list[str]:
    """Return what `HEADERS` names of one model: "–" where something was not measured.

    Args:
        found: variant → what was measured of it.
    """
    nothing = dict.fromkeys(side_by_side.MEASURED)
    exact, checkpoint, hotrain = (found.get(variant, nothing) for variant in VARIANTS)
    return [
        _number(exact["median_ms"]),
        _number(hotrain["median_ms"]),
        _ratio(hotrain, exact, "median_ms"),
        _memory(exact),
        _memory(hotrain),
        _ratio(hotrain, exact, "peak_bytes"),
        _number(checkpoint["median_ms"]),
        _memory(checkpoint),
        ", ".join(f"`{variant}`" for variant in dominating(found)) or "–",
    ]


def dominating(found: Mapping[str, Measured]) -> list[str]:
    """Return the variants that take both less time and a lower peak than `HOTRAIN`, without hotrain's own.

    Args:
        found: variant → what was measured of it.
    """
    fields = ("median_ms", "peak_bytes")
    mine = found.get(HOTRAIN, {})
    if None in (mine.get(field) for field in fields):
        return []
    return [
        variant
        for variant, other in found.items()
        if not variant.startswith("hotrain")
        and all(other[field] is not None and other[field] < mine[field] for field in fields)
    ]


def _number(value: float | None, unit: float = 1.0) -> str:
    return "–" if value is None else f"{value / unit:.2f}"


def _ratio(row: Measured, base: Measured, field: str) -> str:
    return "–" if row[field] is None or not base[field] else f"{row[field] / base[field]:.2f}"


def _memory(row: Measured) -> str:
    peak, reserved = (_number(row[field], 1 << 30) for field in ("peak_bytes", "reserved_bytes"))
    return "–" if row["peak_bytes"] is None else f"{peak} ({reserved})"
