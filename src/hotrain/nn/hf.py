"""transformers' `Conv1D` (a Linear with the weight stored (I, O)) with the gradients of a method.

Imported only when a model has one, so that transformers is installed then.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from .. import functional, ops
from ..compress.mode_stack import aside
from .state import LayerState


class HadamardConv1D(Conv1D):
    """A Conv1D whose training backward follows its method; made by `hotrain.convert`."""

    _hotrain: LayerState

    def forward(self, x: Tensor) -> Tensor:
        return self._training_forward(x) if self.training else super().forward(x)

    def _training_forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            return self._traced_forward(x)
        with aside():
            functional.check_input(self._hotrain, x, self.nx, -1)
            step = self._hotrain.step(self, x, math.prod(x.shape[1:-1]) == 1, transposed=True)
            if step is not None:
                return functional.linear_step(x, self.weight, self.bias, step)
        return super().forward(x)

    def _traced_forward(self, x: Tensor) -> Tensor:
        state = self._hotrain
        functional.check_input(state, x, self.nx, -1)
        kernels = state.traced(self, x, math.prod(x.shape[1:-1]) == 1, transposed=True)
        if kernels is None:
            return super().forward(x)
        return ops.linear(x, self.weight, self.bias, state.draws, state.spec, state.random, kernels, transposed=True)

    def token_matrix(self, t: Tensor) -> Tensor:
        """An output-shaped tensor, (*, O), as a matrix of tokens, (T, O)."""
        return t.reshape(-1, t.shape[-1])

    def __repr__(self) -> str:
        return f"HadamardConv1D(nf={self.nf}, nx={self.nx}, method={self._hotrain.method})"
