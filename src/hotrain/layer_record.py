"""The record of a layer's last training step (method, kernels, saved bytes), the same in eager and compiled code."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from .method import Method


@dataclass
class Ran:
    """One layer's record.

    Attributes:
        method: with its number format chosen for the device; None before the first training step.
        kernels: whether Triton kernels ran, else the reference in plain PyTorch.
        shapes: (dtype, bytes) of each tensor that the layer itself saves of its input, for one call; empty where the
            input is shared, and where the weight is frozen.
        source: the op whose saved activation backward rematerializes the input from
            (`hotrain.activations.rematerialize`), "" where the layer saves it.
        frozen: whether the weight requires no gradient, so that nothing of the input is saved.
        exact_bytes: of the input as exact training saves it, for one call.
        elements: of the input.
    """

    method: Method | None = None
    kernels: bool = False
    shapes: list[tuple[str, int]] = field(default_factory=list)
    source: str = ""
    frozen: bool = False
    exact_bytes: int = 0
    elements: int = 0

    def kept(self, x: Tensor, *tensors: Tensor) -> None:
        """Record in forward the tensors that are saved of x."""
        self.exact_bytes, self.elements = x.nbytes, x.numel()
        self.shapes = [(str(t.dtype).removeprefix("torch."), t.nbytes) for t in tensors]

    def step(self, method: Method, kernels: bool, source: str, frozen: bool) -> None:
        """Record how the step is computed: called in forward in eager mode, in backward in compiled code."""
        self.method, self.kernels, self.frozen = method, kernels, frozen
        self.source = "" if frozen else source
        if source or frozen:
            self.shapes = []
