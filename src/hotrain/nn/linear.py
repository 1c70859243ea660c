"""`torch.nn.Linear` with the gradients of a method."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .. import functional
from ..method import Method
from ..presets import DEFAULT
from ..transform.tokens import Grid
from .state import ATTRIBUTE, LayerState, forward


class HadamardLinear(nn.Linear):
    """A Linear whose training backward follows `method`; eval mode and no_grad run `torch.nn.Linear`'s forward.

    `hotrain.convert` turns existing layers into this class in place; parameters and state_dict keys are the same.

    Args:
        *args: as of `torch.nn.Linear`.
        method: a preset's name or a `hotrain.Method`.
        grid: of the tokens, where they are the patches of an image.
        **kwargs: as of `torch.nn.Linear`.
    """

    _hotrain: LayerState

    def __init__(self, *args: Any, method: str | Method = DEFAULT, grid: Grid | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__[ATTRIBUTE] = LayerState("linear", functional.as_method(method), grid, chosen=True)

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        return forward(self._hotrain, self, nn.Linear.forward, input)

    def token_matrix(self, t: Tensor) -> Tensor:
        """An output-shaped tensor, (*, O), as a matrix of tokens, (T, O)."""
        return t.reshape(-1, t.shape[-1])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, method={self._hotrain.method}"
