"""What the callbacks share: conversion with refusals, a check after the first step, metrics."""

from __future__ import annotations

import inspect
import warnings
from typing import Any, TypeVar

import torch
from torch import nn

from .. import draws
from ..conversion import ConversionReport, convert, converted_layers
from ..functional import as_method
from ..method import Method
from ..presets import DEFAULT

DRAWS = "hotrain_draws"  # of a checkpoint: the state of the random draws
Model = TypeVar("Model", bound=nn.Module)
_MIB = 1 << 20


class Conversion:
    """Converts a model for a trainer, checks that its first step ran converted, and states what is saved.

    Args:
        method: as for `hotrain.convert`.
        **options: further arguments of `hotrain.convert`.

    Raises:
        TypeError: an option is none of them.
        ValueError: the method is unknown.

    Attributes:
        report: of the last conversion; None before.
    """

    def __init__(self, method: str | Method = DEFAULT, **options: Any) -> None:
        accepted = [p.name for p in inspect.signature(convert).parameters.values() if p.kind is p.KEYWORD_ONLY]
        kind = type(self).__name__
        for name in options:
            if name not in accepted:
                raise TypeError(
                    f"hotrain: {kind}({name}=…): accepted are those of hotrain.convert: {', '.join(accepted)}. A field "
                    f'of a method is set in the method: {kind}(hotrain.preset("hot", rank=4))'
                )
        as_method(method)  # unknown ones are said here, not when training begins
        self.method = method
        self.options = options
        self.report: ConversionReport | None = None
        self.checked = False  # the first step of this training

    def __getattr__(self, name: str) -> Any:
        kind = type(self)
        raise AttributeError(
            f"{kind.__name__!r} of {kind.__module__} has no attribute {name!r}. Lightning's trainer takes the one of "
            "hotrain.integrations.lightning, that of transformers the one of hotrain.integrations.transformers."
        )

    def convert(self, model: Model) -> Model:
        """Convert a model in place and return it, for code that makes the model itself (``model_init``, before PEFT).

        Args:
            model: not converted yet, or converted by this callback, which leaves it as it is.

        Raises:
            ValueError: as `hotrain.convert`; or another call converted it; or its parameters are sharded.
        """
        if self.converted(model):
            return model
        kind = type(self).__name__
        if any(True for _ in converted_layers(model)):
            raise ValueError(
                f"hotrain: {kind} was given a model that hotrain.convert has converted already, and would change its "
                f"method. Convert by the callback, callback.convert(model), or train without {kind}."
            )
        if any(type(p).__name__ == "DTensor" for p in model.parameters()):
            raise ValueError(
                f"hotrain: {kind} was given a model whose parameters are sharded (DTensor). Convert before "
                "fully_shard: callback.convert(model); tensor parallelism is not supported."
            )
        self.report = convert(model, self.method, **self.options)
        return model

    def converted(self, model: nn.Module) -> bool:
        """Whether this callback converted the model, or the model that is inside of it (PEFT's)."""
        if self.report is None:
            return False
        root = None if self.report.buffers is None else self.report.buffers.root
        inside = root is not None and any(module is root() for module in model.modules())
        states = {id(state) for _, state in self.report.layers}
        return inside or any(id(state) in states for _, _, state in converted_layers(model))

    def go_on(self, model: nn.Module, state: dict[str, int]) -> None:
        """Continue the draws of a checkpoint, a `hotrain.draws.state_dict`; where it is of other layers, warn."""
        try:
            draws.load_state_dict(model, state)
        except ValueError as error:
            warnings.warn(f"hotrain: the resumed run does not go on with the checkpoint's draws: {error}", stacklevel=2)

    def check(self) -> None:
        """Warn when a training step has passed by the converted model, after the first step of an uncompiled one."""
        report, again, self.checked = self.report, self.checked, True
        if report is None or again:
            return
        if report.layers and not any(state.reached for _, state in report.layers):
            warnings.warn("hotrain: the first step has called no converted layer: it ran exact", stacklevel=2)
        elif report.buffers is not None and report.buffers.example is None:
            warnings.warn(
                "hotrain: the first step has not called the forward of the converted model (it was replaced, or the "
                "step calls parts of the model): what is not in a block keeps its activations exact",
                stacklevel=2,
            )

    def metrics(self) -> dict[str, float]:
        """What the conversion does, for a logger.

        Returns:
            Numbers of layers as ``hotrain/converted`` and ``hotrain/exact``. After a step in eager mode, what the
            model keeps between forward and backward, as ``hotrain/kept_mib`` and ``hotrain/kept_exact_mib``, computed
            from shapes (`ConversionReport.totals`). On a GPU the measured peak of allocated memory, as
            ``hotrain/peak_mib``. Empty before the conversion.
        """
        if self.report is None:
            return {}
        found: dict[str, float] = {
            "hotrain/converted": len(self.report.converted),
            "hotrain/exact": len(self.report.kept),
        }
        now, exact = self.report.totals() or (None, None)
        if now is not None and exact is not None:
            found |= {"hotrain/kept_mib": now / _MIB, "hotrain/kept_exact_mib": exact / _MIB}
        if torch.cuda.is_initialized():
            found["hotrain/peak_mib"] = torch.cuda.max_memory_allocated() / _MIB
        return found
