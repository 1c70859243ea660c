"""`revert` gives every converted layer its own class back; `converted_layers` finds them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ..compress.checkpointing import keep_all
from ..compress.interpose import unwrap
from ..compress.offload import keep_on_device
from ..functional import check_model
from ..nn.activation import PLANNED, BitReLU
from ..nn.state import ATTRIBUTE, REVERTED, LayerState, layer_state, layer_states

_ROOM = f"{__package__.rpartition('.')[0]}.nn."  # the package with the classes of converted layers


def revert(model: nn.Module) -> None:
    """Undo `convert` and `checkpoint_blocks`, in place: every layer gets its own class back.

    What another library has put in the place of a converted layer stays there (`ConversionReport.gone`).

    Raises:
        TypeError: it is no model.
        RuntimeError: a layer's class was changed again after conversion (a parametrization, FSDP2's `fully_shard` on
            the layer itself). Nothing is changed then.
    """
    check_model("revert", model)
    layers = [(name, module) for name, module in model.named_modules() if layer_state(module) is not None]
    for name, module in layers:
        if not type(module).__module__.startswith(_ROOM):
            raise RuntimeError(
                f"hotrain.revert: {name!r} has become a {type(module).__name__} since its conversion; "
                "undo that first (a parametrization: torch.nn.utils.parametrize.remove_parametrizations)"
            )
    unwrap(model)
    keep_all(model)
    keep_on_device(model)
    revert_activations(model)
    for _, module in layers:
        module.__dict__.pop(ATTRIBUTE).fallback = REVERTED
        module.__class__ = next(c for c in type(module).__mro__ if not c.__module__.startswith(_ROOM))


def revert_activations(model: nn.Module) -> None:
    """Give every `BitReLU` its own class back."""
    for module in model.modules():
        if type(module) is BitReLU:
            module.__class__ = nn.ReLU  # type: ignore[assignment]
            module.__dict__.pop(PLANNED, None)


def converted_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, LayerState]]:
    """The converted layers of a model: (fully qualified name, module, state) of each, once."""
    check_model("converted_layers", model)
    for name, state in layer_states(model):
        yield name, model.get_submodule(name), state
