"""transformers' `Conv1D` (a Linear with the weight stored (I, O)) with the gradients of a method.

Imported only when a model holds one: transformers is then there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from .. import functional, ops
from .state import LayerState


class HadamardConv1D(Conv1D):
    """A Conv1D whose training backward follows its method; made by `hotrain.convert`."""

    _hotrain: LayerState

    def forward(self, x: Tensor) -> Tensor:
        return self._training_forward(x) if self.training else super().forward(x)

    def _training_forward(self, x: Tensor) -> Tensor:
        state = self._hotrain
        functional.check_input(state, x, self.nx, -1)
        samples_only = math.prod(x.shape[1:-1]) == 1
        if torch.compiler.is_dynamo_compiling():
            kernels = state.traced(self, x, samples_only, transposed=True)
            if kernels is None:
                return super().forward(x)
            return ops.linear(
                x, self.weight, self.bias, state.draws, state.spec, state.random, kernels, transposed=True
            )
        step = state.step(self, x, samples_only, transposed=True)
        if step is None:
            return super().forward(x)
        return functional.linear_step(x, self.weight, self.bias, step)

    def token_matrix(self, t: Tensor) -> Tensor:
        """An output-shaped tensor, (*, O), as tokens × channels."""
        return t.reshape(-1, t.shape[-1])

    def __repr__(self) -> str:
        return f"HadamardConv1D(nf={self.nf}, nx={self.nx}, method={self._hotrain.method})"
