"""transformers' `Conv1D` (a Linear with the weight stored (I, O)) with the gradients of a method.

Imported only when a model has one, so that transformers is installed then.
"""

from __future__ import annotations

from torch import Tensor
from transformers.pytorch_utils import Conv1D

from .state import LayerState, forward


class HadamardConv1D(Conv1D):
    """A Conv1D whose training backward follows its method; made by `hotrain.convert`."""

    _hotrain: LayerState
    transposed = True  # the weight is (I, O)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        return forward(self._hotrain, self, Conv1D.forward, x)

    def token_matrix(self, t: Tensor) -> Tensor:
        """An output-shaped tensor, (*, O), as a matrix of tokens, (T, O)."""
        return t.reshape(-1, t.shape[-1])

    def __repr__(self) -> str:
        return f"HadamardConv1D(nf={self.nf}, nx={self.nx}, method={self._hotrain.method})"
