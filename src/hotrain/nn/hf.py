"""transformers' `Conv1D` (a Linear with the weight stored (I, O)) with the gradients of a method.

Imported only when a model holds one: transformers is then there.
"""

from __future__ import annotations

from torch import Tensor
from transformers.pytorch_utils import Conv1D

from .. import functional
from .state import LayerState, outside_trace


class HadamardConv1D(Conv1D):
    """A Conv1D whose training backward follows its method; made by `hotrain.convert`."""

    _hotrain: LayerState

    def forward(self, x: Tensor) -> Tensor:
        return self._training_forward(x) if self.training else super().forward(x)

    @outside_trace
    def _training_forward(self, x: Tensor) -> Tensor:
        state = self._hotrain
        functional.check_input(state.name, x, self.nx, -1)
        step = state.step(self, x, samples_only=x.shape[1:-1].numel() == 1, transposed=True)
        if step is None:
            return super().forward(x)
        return functional.linear_step(x, self.weight, self.bias, step)

    def token_matrix(self, t: Tensor) -> Tensor:
        """An output-shaped tensor, (*, O), as tokens × channels."""
        return t.reshape(-1, t.shape[-1])

    def __repr__(self) -> str:
        return f"HadamardConv1D(nf={self.nf}, nx={self.nx}, method={self._hotrain.method})"
