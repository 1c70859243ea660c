"""Plans of `hotrain.convert`: by name, or a `Point`, one way to train a model with its measured time and memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

import torch
from torch import nn

from .method import Method
from .tables import bytes_text

PLANS = ("speed", "graphs", "memory")
RAN, PREDICTED = "ran", "predicted"

Key = TypeVar("Key")


@dataclass(frozen=True)
class Point:
    """One way to train a model: what is converted, checkpointed or offloaded, and the time and memory of its step.

    `hotrain.frontier` measures points; ``hotrain.convert(model, plan=point)`` makes a model follow one.

    Attributes:
        name: what tables and figures call it.
        method: of the converted layers; None is exact training.
        plan: of `hotrain.convert`, by name.
        recomputed: names of the blocks that backward runs forward again (`hotrain.checkpoint_blocks`).
        offload: whether the activations of exact training wait in the host's memory for backward.
        spare_ms: of a compiled step on a GPU: the time that its measured step has left against exact training, which
            the plan, that predicts times, spends on memory.
        ms: median time of a training step; None where no step ran.
        peak_bytes: of a step, with parameters, gradients and the optimizer's state; None where that is not known.
        how: ``"ran"``, peak_bytes is the allocator's peak; ``"predicted"``, it is predicted, as in `hotrain.fit`.
        device: name of the device that it was measured on; None: not measured.
        torch_version: that it was measured with; None: not measured.
        layers: of the model that it was measured with, those with parameters; None: not measured.
        parameters: of that model; None: not measured.

    Raises:
        ValueError: the plan has no such name, the spare time is negative, or offloading is combined with a method or
            recomputed blocks.
    """

    name: str
    method: Method | None = None
    plan: str = "speed"
    recomputed: tuple[str, ...] = ()
    offload: bool = False
    spare_ms: float = 0.0
    ms: float | None = None
    peak_bytes: int | None = None
    how: str = RAN
    device: str | None = None
    torch_version: str | None = None
    layers: int | None = None
    parameters: int | None = None

    def __post_init__(self) -> None:
        if self.plan not in PLANS:
            raise ValueError(f"Point: plan={self.plan!r} is not one of {', '.join(map(repr, PLANS))}")
        if self.how not in (RAN, PREDICTED):
            raise ValueError(f"Point: how={self.how!r} is not one of {RAN!r}, {PREDICTED!r}")
        if not 0 <= self.spare_ms < math.inf:
            raise ValueError(f"Point: spare_ms={self.spare_ms!r} is no time, in ms from 0 on")
        if self.offload and (self.method is not None or self.recomputed):
            raise ValueError("Point: offload=True is of exact training alone, without a method and recomputed blocks")

    @property
    def fits(self) -> bool:
        """Whether its step ran (elsewhere than on a GPU: was predicted) without running out of memory."""
        return self.ms is not None and self.peak_bytes is not None

    def __str__(self) -> str:
        if self.ms is None or self.peak_bytes is None:
            return f"{self.name}: {'not measured' if self.device is None else 'out of memory'}"
        peak = f"{bytes_text(self.peak_bytes)}{' predicted' if self.how == PREDICTED else ''}"
        return f"{self.name}: {self.ms:.1f} ms/step, peak {peak}, on {self.device}"

    def check(self, device: torch.device) -> None:
        """Refuse a model on another device, or another PyTorch, than it was measured with.

        Raises:
            ValueError: they differ; the message names both.
        """
        there = {"device": self.device, "PyTorch": self.torch_version}
        here = {"device": device_name(device), "PyTorch": torch.__version__}
        for what, measured in there.items():
            if measured not in (None, here[what]):
                raise ValueError(
                    f"hotrain.convert: plan {self.name!r} was measured with {what} {measured}, here is {here[what]}, "
                    "where its time and memory are others; measure here with hotrain.frontier"
                )

    def check_model(self, model: nn.Module) -> None:
        """Refuse another model than it was measured with: one of other numbers of layers or parameters.

        Raises:
            ValueError: they differ; the message has both.
        """
        if self.layers is None or self.parameters is None:
            return
        layers, parameters = size_of(model)
        if (layers, parameters) != (self.layers, self.parameters):
            raise ValueError(
                f"hotrain.convert: plan {self.name!r} was measured with a model of {self.layers} layers and "
                f"{self.parameters} parameters, this {type(model).__name__} has {layers} and {parameters}; "
                "measure this one with hotrain.frontier"
            )

    def to_json(self) -> dict[str, Any]:
        """The point as JSON values; `from_json` reads them."""
        value = {**asdict(self), "recomputed": list(self.recomputed)}
        if self.method is not None:
            value["method"]["knobs"] = sorted(self.method.knobs)
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Point:
        """Read what `to_json` wrote.

        Raises:
            ValueError: a field is missing, unknown or has a value that is not accepted.
        """
        value = {"spare_ms": 0.0, "layers": None, "parameters": None, **value}  # not in records of before them
        names = {field.name for field in fields(cls)}
        if names != set(value):
            raise ValueError(f"Point: the fields {', '.join(sorted(names ^ set(value)))} are missing or unknown")
        try:
            method = value["method"] and Method.from_dict(value["method"])
            return cls(**{**value, "recomputed": tuple(value["recomputed"]), "method": method})
        except (TypeError, KeyError) as error:
            raise ValueError(f"Point: the record of {value['name']!r} cannot be read ({error!r})") from error


def undominated(places: Mapping[Key, tuple[float, float]]) -> list[Key]:
    """What no other one beats in time or memory without being beaten in the other, by the first number of its pair."""

    def beaten(mine: tuple[float, float]) -> bool:
        return any(other != mine and other[0] <= mine[0] and other[1] <= mine[1] for other in places.values())

    return sorted((key for key, place in places.items() if not beaten(place)), key=places.__getitem__)


def size_of(model: nn.Module) -> tuple[int, int]:
    """How many layers of a model have parameters of their own, and how many numbers its parameters are."""
    layers = sum(any(True for _ in module.parameters(recurse=False)) for module in model.modules())
    return layers, sum(p.numel() for p in model.parameters())


def device_name(device: torch.device) -> str:
    """The name of a GPU; of another device, its type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
