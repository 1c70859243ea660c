"""LQS, layer-wise quantizer selection: per-token or per-tensor scales for each layer's g_y; and a schedule of bits.

The rule is that of HOT's code (docs/maths.md): per token where that at least halves the error, e_t < ½ e_T, the L2
errors of quantizing g_y with per-token scales and with one per-tensor scale. It is measured here on training batches,
on the tensor that is really quantized (g_y after its rotation, in the method's bits and rounding), over several
batches, and without an optimizer step.
"""

from __future__ import annotations

import json
import math
import os
import warnings
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

from torch import Tensor, nn

from . import draws
from .audit.unchanged import as_found
from .backward import rotated_grad
from .files import digest, is_a, parse_json, read_text, write_text
from .functional import plain_model
from .layer_gradients import LossFn, exact_calls
from .method import GradInput
from .nn.state import LayerState, layer_states
from .quantize.integer import wide
from .tables import table
from .transform.hadamard import rotate

VERSION = 1
STATISTICS = ("l2", "mse")
CHOICES = ("tensor", "token")


@dataclass(frozen=True)
class LayerChoice:
    """The scale of one layer's g_y and why.

    Attributes:
        choice: ``"token"`` or ``"tensor"``.
        error_tensor: mean error over the batches with per-tensor scales, in the calibration's statistic, relative to
            g_y (l2: ‖g−Q(g)‖/‖g‖; mse: its square).
        error_token: the same with per-token scales.
        ratio: error_token / error_tensor.
        batches: how many batches' gradients reached the layer. Where none did (a frozen layer with nothing trainable
            before it) the choice is what ``"auto"`` means, per token.
    """

    choice: str
    error_tensor: float
    error_token: float
    ratio: float
    batches: int


@dataclass(frozen=True)
class Calibration:
    """The result of `calibrate`: one `LayerChoice` per layer, and the rule that made it.

    Attributes:
        layers: layer name → its choice.
        statistic: ``"l2"`` or ``"mse"``.
        threshold: error ratio below which per-token scales are chosen.
    """

    layers: dict[str, LayerChoice]
    statistic: str = "l2"
    threshold: float = 0.5

    def __str__(self) -> str:
        rows = [
            [name, f"{c.error_tensor:.4f}", f"{c.error_token:.4f}", f"{c.ratio:.3f}", c.choice]
            if c.batches
            else [name, "–", "–", "–", f"{c.choice}: no gradient"]
            for name, c in self.layers.items()
        ]
        tokens = sum(c.choice == "token" for c in self.layers.values())
        title = (
            f"{tokens} of {len(self.layers)} layers take per-token scales "
            f"({self.statistic} error ratio below {self.threshold:g})"
        )
        return title + "\n" + table(["layer", "tensor", "token", "ratio", "choice"], rows)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the calibration as JSON with a checksum, atomically; a file that is there is replaced.

        To edit the file by hand, remove its line ``sha256``.

        Raises:
            OSError: it cannot be written; a file that was there stays.
        """
        value = asdict(self)
        signed = {"version": VERSION, "sha256": digest(value), **value}
        write_text(path, json.dumps(signed, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read what `save` wrote.

        Raises:
            ValueError: the file is not a calibration of this version, or is damaged; the message names the file and
                the field.
            FileNotFoundError: there is no such file.
        """
        text = read_text(path)
        try:
            value = parse_json(text)
        except ValueError as error:
            raise ValueError(f"{path} is not a calibration: it is not JSON ({error})") from error
        if not isinstance(value, dict) or value.get("version") != VERSION:
            found = value.get("version") if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"{path} is not a calibration of version {VERSION} (found {found!r}); calibrate again")
        signed = {name: value[name] for name in value if name not in ("version", "sha256")}
        if "sha256" in value and value["sha256"] != digest(signed):
            raise ValueError(
                f"{path} is damaged: its contents do not have the checksum that was written with them. "
                "Calibrate again; if you have edited it, remove the line sha256"
            )
        unknown = [name for name in signed if name not in ("statistic", "threshold", "layers")]
        if unknown:
            raise ValueError(f"{path}: the calibration has an unknown field {unknown[0]!r}; it may be damaged")
        try:
            layers = {name: LayerChoice(**fields) for name, fields in value["layers"].items()}
            calibration = cls(layers, value["statistic"], value["threshold"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: a field of the calibration is missing or unknown ({error})") from error
        if calibration.statistic not in STATISTICS:
            raise ValueError(f"{path}: statistic={calibration.statistic!r} is not one of {', '.join(STATISTICS)}")
        if not is_a(calibration.threshold, float) or calibration.threshold < 0:
            raise ValueError(f"{path}: threshold={calibration.threshold!r} is not a finite number, 0 or more")
        for name, choice in layers.items():
            if choice.choice not in CHOICES:
                raise ValueError(f"{path}: {name}: choice={choice.choice!r} is not one of {', '.join(CHOICES)}")
            for field in ("error_tensor", "error_token", "ratio", "batches"):
                got = getattr(choice, field)
                if not is_a(got, float) or got < 0:
                    raise ValueError(f"{path}: {name}: {field}={got!r} is not a finite number, 0 or more")
        return calibration

    def apply(self, model: nn.Module) -> None:
        """Set the chosen scale of every layer.

        Args:
            model: converted with the method that was calibrated.

        Raises:
            ValueError: the calibration names layers that the model does not quantize, or lacks one that it does.
                Nothing is changed then.
        """
        states = quantizing(plain_model("Calibration.apply", model), "scale")
        unknown = [name for name in self.layers if name not in states]
        missing = [name for name in states if name not in self.layers]
        if unknown or missing:
            parts = [f"it has {_some(unknown)}, which the model does not quantize"] if unknown else []
            parts += [f"it lacks {_some(missing)}"] if missing else []
            raise ValueError(
                f"this calibration is of another model or method: {'; '.join(parts)}. "
                "Convert the model with the same method and filter, or calibrate it again"
            )
        for name, state in states.items():
            state.method = state.method.override(scale=self.layers[name].choice)


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    loss_fn: LossFn | None = None,
    *,
    max_batches: int = 4,
    threshold: float = 0.5,
    statistic: str = "l2",
) -> Calibration:
    """Choose the scale of g_y for every converted layer that quantizes it to integers.

    Apply the result with ``.apply(model)``. The model (weights, ``.grad``, buffers, modes), all generators and the
    draws are unchanged.

    Args:
        model: converted; its layers run exactly while it is measured.
        batches: *training* batches.
        loss_fn: ``loss_fn(model, batch)``, a scalar. A criterion such as ``F.cross_entropy`` works for batches of
            (input, target); None is cross-entropy, or ``model(**batch).loss`` for mappings.
        max_batches: how many batches are used.
        threshold: per-token scales are chosen where error_token < threshold · error_tensor, mean over the batches.
        statistic: ``"l2"``, the rule of the published code, or ``"mse"``, which compares the squares.

    Raises:
        TypeError: it is no model, or the batches cannot be iterated over.
        ValueError: no batch, no layer to calibrate, a loss or gradient that is not finite, or a bad argument.
    """
    if statistic not in STATISTICS:
        raise ValueError(f"calibrate: statistic={statistic!r} is not one of {', '.join(map(repr, STATISTICS))}")
    if type(max_batches) is not int or max_batches < 1:
        raise ValueError(f"calibrate: max_batches={max_batches!r} is not a positive integer")
    if not 0 < threshold <= 1:
        raise ValueError(f"calibrate: threshold={threshold!r} is not in (0, 1]")
    if not isinstance(batches, Iterable):
        raise TypeError(f"calibrate: the batches are a {type(batches).__name__}; accepted is an iterable of batches")
    model = plain_model("calibrate", model)
    names = quantizing(model, "scale")
    if not names:
        raise ValueError(
            "calibrate: no layer quantizes g_y to integers in its g_x path, so there is no scale to choose; "
            "convert the model with hot, hot-unbiased, hq, hq4 or int4 first"
        )
    errors: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    seen = 0
    with as_found(model):
        for batch in islice(batches, max_batches):
            for call in exact_calls(model, batch, loss_fn, names):
                key = draws.mix(draws.current_seed(), zlib.crc32(call.name.encode()), seen)
                pair = scale_errors(call.token_gradient(), call.state.running.grad_input, key, statistic)
                if not all(map(math.isfinite, pair)):
                    raise ValueError(f"calibrate: {call.name}: batch {seen} has a gradient that is not finite")
                errors[call.name].append(pair)
            seen += 1
    if not seen:
        raise ValueError("calibrate: no batch was given; pass at least one training batch")
    return Calibration({name: _choose(errors[name], threshold) for name in names}, statistic, threshold)


def scale_errors(g_y: Tensor, path: GradInput, key: int, statistic: str = "l2") -> tuple[float, float]:
    """Relative errors of quantizing g_y with per-tensor and with per-token scales.

    Args:
        g_y: (T, O).
        path: bits, rounding and transform of the quantization.
        key: of the draws.
        statistic: ``"l2"`` or ``"mse"``.

    Returns:
        (per-tensor error, per-token error); 0 for a g_y of zeros.
    """
    g = wide(g_y)
    want = rotate(g) if path.transform == "hadamard" else g
    size = float(want.norm())
    errors = []
    for scale in CHOICES:
        got = rotated_grad(g, replace(path, scale=scale), key).dequantize()
        error = float((got - want).norm()) / size if size else 0.0
        errors.append(error if statistic == "l2" else error**2)
    return errors[0], errors[1]


def _choose(pairs: list[tuple[float, float]], threshold: float) -> LayerChoice:
    count = len(pairs)
    if not count:
        return LayerChoice("token", 0.0, 0.0, 1.0, 0)
    error_tensor, error_token = (sum(column) / count for column in zip(*pairs, strict=True))
    ratio = error_token / error_tensor if error_tensor else 1.0
    return LayerChoice("token" if ratio < threshold else "tensor", error_tensor, error_token, ratio, count)


def quantizing(model: nn.Module, knob: str) -> dict[str, LayerState]:
    """The layers that quantize g_y and whose method has a knob: ``scale`` or ``grad_input_bits``."""
    return {
        name: state
        for name, state in layer_states(model)
        if state.running.grad_input.bits is not None and knob in state.running.knobs
    }


@dataclass(frozen=True)
class BitSchedule:
    """Bits of both operands of g_x over a pre-training: `warmup_bits` for the first `warmup` epochs, then `bits`.

    HOT pre-trains with 8 bits for 25 epochs (supplement D; its code says 50). An epoch is whatever the caller counts,
    for example a step. The format of the saved x, and g_w, do not change.

    Attributes:
        bits: 4 or 8.
        warmup_bits: 4 or 8.
        warmup: number of epochs, 0 or more.

    Raises:
        ValueError: a field has a value that is not accepted.
    """

    bits: int = 4
    warmup_bits: int = 8
    warmup: int = 25

    def __post_init__(self) -> None:
        for field in ("bits", "warmup_bits"):
            if getattr(self, field) not in (4, 8):
                raise ValueError(f"BitSchedule: {field}={getattr(self, field)!r} is not one of 4, 8")
        if type(self.warmup) is not int or self.warmup < 0:
            raise ValueError(f"BitSchedule: warmup={self.warmup!r} is not a number of epochs, 0 or more")

    def at(self, epoch: int) -> int:
        """The bits in force in an epoch, counted from 0."""
        return self.warmup_bits if epoch < self.warmup else self.bits

    def apply(self, model: nn.Module, epoch: int) -> list[str]:
        """Set the bits of every layer that quantizes its g_x path to integers.

        It depends on the epoch only, so a resumed run only has to call it again. Layers whose g_x is not quantized,
        or is quantized to a format of its own (LUQ's) or to fp8, are unchanged; where all are, a warning says so.

        Args:
            model: converted.
            epoch: counted from 0.

        Returns:
            The names of the layers whose bits were set.
        """
        model = plain_model("BitSchedule.apply", model)
        states = quantizing(model, "grad_input_bits")
        for state in states.values():
            state.method = state.method.override(grad_input_bits=self.at(epoch))
        if not states:
            kept = [f"{name or type(model).__name__} ({state.running.name})" for name, state in layer_states(model)]
            warnings.warn(
                f"hotrain.BitSchedule.apply: no layer quantizes its g_x path to integers of 4 or 8 bits, so nothing is "
                f"set: {_some(kept) if kept else f'no layer of this {type(model).__name__} is converted'}. Convert the "
                'model with hot, hot-unbiased, hot-importance, hq, hq8, hq4 or int4, and number="int" where it takes '
                "one, or leave the schedule out",
                stacklevel=2,
            )
        return list(states)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
