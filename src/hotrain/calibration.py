"""LQS, layer-wise quantizer selection: one scale a token, or one for the tensor, for the g_y of each layer; and the
bits that pre-training starts with.

The rule is that of HOT's code (docs/maths.md): per token where that at least halves the error, e_t < ½ e_T, the L2
errors of quantizing g_y with a scale a token and with one scale. It is taken here on training batches, on the tensor
that is really quantized (g_y after its rotation, in the method's bits and rounding), over several batches, and
without an optimizer step.
"""

from __future__ import annotations

import json
import math
import os
import sys
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from . import draws
from .analysis.layer_gradients import exact_calls
from .analysis.loss import LossFn
from .audit.unchanged import as_found
from .backward import rotated_grad, wide
from .method import GradInput
from .nn.state import LayerState, layer_states
from .tables import table
from .transform.hadamard import rotate

VERSION = 1
STATISTICS = ("l2", "mse")
CHOICES = ("tensor", "token")


@dataclass(frozen=True)
class LayerChoice:
    """The scale of one layer's g_y and why.

    choice: ``"token"`` or ``"tensor"``.  error_tensor, error_token: mean error over the batches with either scale, in
    the calibration's statistic, relative to g_y (l2: ‖g−Q(g)‖/‖g‖; mse: its square).  ratio: token over tensor.
    batches: how many batches' gradients reached the layer; where none did (a frozen layer with nothing trainable before
    it) there is nothing to choose, and it keeps what ``"auto"`` means, a scale a token.
    """

    choice: str
    error_tensor: float
    error_token: float
    ratio: float
    batches: int


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found: one `LayerChoice` a layer, and the rule that made it."""

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
            f"{tokens} of {len(self.layers)} layers take a scale a token "
            f"({self.statistic} error ratio below {self.threshold:g})"
        )
        return title + "\n" + table(["layer", "tensor", "token", "ratio", "choice"], rows)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write readable JSON, in one step: a reader never sees half of it."""
        value = {
            "version": VERSION,
            "statistic": self.statistic,
            "threshold": self.threshold,
            "layers": {name: asdict(choice) for name, choice in self.layers.items()},
        }
        path = Path(path)
        draft = path.with_name(path.name + ".draft")
        draft.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        os.replace(draft, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read what `save` wrote. Raises ValueError, naming the file and the field, for anything else."""
        try:
            value = json.loads(Path(path).read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{path} is not a calibration: it is not JSON ({error})") from error
        if not isinstance(value, dict) or value.get("version") != VERSION:
            found = value.get("version") if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"{path} is not a calibration of version {VERSION} (found {found!r}); calibrate again")
        try:
            layers = {name: LayerChoice(**fields) for name, fields in value["layers"].items()}
            calibration = cls(layers, value["statistic"], value["threshold"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: a field of the calibration is missing or unknown ({error})") from error
        if calibration.statistic not in STATISTICS:
            raise ValueError(f"{path}: statistic={calibration.statistic!r} is not one of {', '.join(STATISTICS)}")
        if not _is_size(calibration.threshold):
            raise ValueError(f"{path}: threshold={calibration.threshold!r} is not a finite number, 0 or more")
        for name, choice in layers.items():
            if choice.choice not in CHOICES:
                raise ValueError(f"{path}: {name}: choice={choice.choice!r} is not one of {', '.join(CHOICES)}")
            for field in ("error_tensor", "error_token", "ratio", "batches"):
                if not _is_size(getattr(choice, field)):
                    got = getattr(choice, field)
                    raise ValueError(f"{path}: {name}: {field}={got!r} is not a finite number, 0 or more")
        return calibration

    def apply(self, model: nn.Module) -> None:
        """Give every layer its scale.

        Raises ValueError, before anything is changed, when the calibration names layers that the model does not
        have or does not quantize, or lacks one that it does.
        """
        states = _quantized(model)
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

    model: converted; its layers run exactly while it is measured.
    batches: *training* batches, of which the first `max_batches` are taken.
    loss_fn: ``loss_fn(model, batch)``, a scalar. A criterion such as ``F.cross_entropy`` serves batches of
        (input, target); None is cross-entropy, or ``model(**batch).loss`` for mappings.
    threshold, statistic: a scale a token where error_token < threshold · error_tensor, mean over the batches;
        ``"l2"`` is the rule of the published code, ``"mse"`` compares the squares.

    The result is applied with ``.apply(model)``. The model (weights, ``.grad``, buffers, modes), all generators and the
    draws are left as found. Raises ValueError for no batch, no layer to calibrate, and a loss that is not finite.
    """
    if statistic not in STATISTICS:
        raise ValueError(f"calibrate: statistic={statistic!r} is not one of {', '.join(map(repr, STATISTICS))}")
    if type(max_batches) is not int or max_batches < 1:
        raise ValueError(f"calibrate: max_batches={max_batches!r} is not a positive integer")
    if not 0 < threshold <= 1:
        raise ValueError(f"calibrate: threshold={threshold!r} is not in (0, 1]")
    names = _quantized(model)
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
    """(error with one scale, error with a scale a token) of quantizing g_y, (T, O), as `path` does, relative to g_y.

    Zeros have no error.
    """
    g = g_y.to(wide(g_y.dtype))
    want = rotate(g) if path.transform == "hadamard" else g
    size = float(want.norm())
    errors = []
    for scale in CHOICES:
        got = rotated_grad(g_y, replace(path, scale=scale), key).dequantize()
        error = float((got - want).norm()) / size if size else 0.0
        errors.append(error if statistic == "l2" else error**2)
    return errors[0], errors[1]


def _choose(pairs: list[tuple[float, float]], threshold: float) -> LayerChoice:
    count = len(pairs)
    if not count:
        return LayerChoice("token", 0.0, 0.0, 1.0, 0)
    error_tensor, error_token = (sum(column) / count for column in zip(*pairs, strict=True))
    ratio = error_token / error_tensor if error_tensor else 1.0
    choice = "token" if ratio < threshold else "tensor"
    return LayerChoice(choice, error_tensor, error_token, ratio, count)


def _quantized(model: nn.Module) -> dict[str, LayerState]:
    """The layers with a scale of g_y to choose."""
    return {
        name: state
        for name, state in layer_states(model)
        if state.running.grad_input.bits is not None and "scale" in state.running.knobs
    }


@dataclass(frozen=True)
class BitSchedule:
    """Bits of both operands of g_x over a pre-training: `warmup_bits` for the first `warmup` epochs, then `bits`.

    HOT pre-trains with 8 bits for 25 epochs (supplement D; its code says 50). An epoch may as well be a step: it is
    whatever the caller counts. What is kept, and g_w, stay as they are.
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
        """The bits in force in that epoch, counted from 0."""
        return self.warmup_bits if epoch < self.warmup else self.bits

    def apply(self, model: nn.Module, epoch: int) -> list[str]:
        """Set the bits of every layer that quantizes its g_x path to integers; returns the names of these layers.

        A function of the epoch alone, so a resumed run only has to call it again. Layers whose g_x is not quantized,
        or to a format of its own (LUQ's), are left as they are.
        """
        changed = []
        for name, state in layer_states(model):
            if state.running.grad_input.bits is not None and "grad_input_bits" in state.running.knobs:
                state.method = state.method.override(grad_input_bits=self.at(epoch))
                changed.append(name)
        return changed


def _is_size(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
