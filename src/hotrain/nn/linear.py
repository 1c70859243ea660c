"""`torch.nn.Linear` with the gradients of a method."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional, ops
from ..compress.mode_stack import aside
from ..method import Method
from ..presets import DEFAULT
from ..transform.tokens import Grid
from .state import ATTRIBUTE, LayerState


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
        return self._training_forward(input) if self.training else super().forward(input)

    def _training_forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            return self._traced_forward(input)
        with aside():
            functional.check_input(self._hotrain, input, self.in_features, -1)
            step = self._hotrain.step(self, input, math.prod(input.shape[1:-1]) == 1)
            if step is not None:
                return functional.linear_step(input, self.weight, self.bias, step)
        return super().forward(input)

    def _traced_forward(self, input: Tensor) -> Tensor:
        state = self._hotrain
        functional.check_input(state, input, self.in_features, -1)
        kernels = state.traced(self, input, math.prod(input.shape[1:-1]) == 1)
        if kernels is None:
            return super().forward(input)
        return ops.linear(input, self.weight, self.bias, state.draws, state.spec, state.random, kernels)

    def token_matrix(self, t: Tensor) -> Tensor:
        """An output-shaped tensor, (*, O), as a matrix of tokens, (T, O)."""
        return t.reshape(-1, t.shape[-1])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, method={self._hotrain.method}"
