"""`torch.nn.Conv2d` with the gradients of a method."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .. import functional
from ..geometry import Geometry, padding_of
from ..method import Method
from ..presets import DEFAULT
from ..private import CONV_FORWARD
from .state import ATTRIBUTE, LayerState, forward


class HadamardConv2d(nn.Conv2d):
    """A Conv2d whose training backward follows `method`; eval mode and no_grad run `torch.nn.Conv2d`'s forward.

    Every stride, padding (also 'same' and the non-zero modes), dilation and number of groups.

    Args:
        *args: as of `torch.nn.Conv2d`.
        method: a preset's name or a `hotrain.Method`.
        **kwargs: as of `torch.nn.Conv2d`.
    """

    _hotrain: LayerState

    def __init__(self, *args: Any, method: str | Method = DEFAULT, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__[ATTRIBUTE] = LayerState("conv2d", functional.as_method(method), chosen=True)

    @property
    def geometry(self) -> Geometry:
        """Kernel size, stride, padding, dilation, groups and padding mode."""
        return Geometry.of(self)

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        # Looked up as an attribute first: Dynamo compiles again where that has changed, and not where __dict__ has.
        if getattr(self, CONV_FORWARD, None) is not None and CONV_FORWARD in self.__dict__:
            self._hotrain.stay_exact(f"its {CONV_FORWARD} was replaced on the instance")
            return super().forward(input)
        place = self.stride, padding_of(self), self.dilation, self.groups, self.padding_mode
        return forward(self._hotrain, self, nn.Conv2d.forward, input, place)

    def token_matrix(self, t: Tensor) -> Tensor:
        """An output-shaped tensor, (B, O, H, W), as a matrix of tokens, (B·H·W, O)."""
        return t.movedim(-3, -1).reshape(-1, t.shape[-3])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, method={self._hotrain.method}"


class ConvertedConv2d(HadamardConv2d):
    """The class of a Conv2d converted by `hotrain.convert`. Calling it builds a plain `torch.nn.Conv2d`.

    Libraries build similar layers with ``type(layer)(...)``, as PEFT its convolution adapters; those are exact.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Copying and unpickling ask for an empty instance, without arguments.
        return nn.Conv2d(*args, **kwargs) if args or kwargs else super().__new__(cls)

    def _get_name(self) -> str:
        return "HadamardConv2d"
