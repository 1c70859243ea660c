"""Layers: `torch.nn` modules whose training backward follows a method."""

from .conv import HadamardConv2d
from .linear import HadamardLinear
from .state import LayerState, layer_state, layer_states

__all__ = ["HadamardConv2d", "HadamardLinear", "LayerState", "layer_state", "layer_states"]
