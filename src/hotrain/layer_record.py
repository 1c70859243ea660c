"""What a layer did in its last training step, written while it runs: eager and compiled code write the same record."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from .method import Method


@dataclass
class Ran:
    """One layer's record.

    method: with its numbers chosen for the device; None before the first training step.
    kernels: whether Triton kernels ran it, else the reference in plain PyTorch.
    shapes: (dtype, bytes) of each tensor that the layer itself keeps of its input, for one call; empty where the input
        is shared, and where the weight is frozen.
    source: from whose codes backward makes the input (`hotrain.activations.rematerialize`), "" for its own.
    frozen: whether the weight wants no gradient, so that nothing of the input is kept.
    exact_bytes: of the input as exact training keeps it, for one call.
    """

    method: Method | None = None
    kernels: bool = False
    shapes: list[tuple[str, int]] = field(default_factory=list)
    source: str = ""
    frozen: bool = False
    exact_bytes: int = 0

    @property
    def own_bytes(self) -> int:
        """Bytes that the layer itself keeps of its input, for one call."""
        return sum(size for _, size in self.shapes)

    def kept(self, x: Tensor, *tensors: Tensor) -> None:
        """Forward: these are kept of x."""
        self.exact_bytes = x.nbytes
        self.shapes = [(str(t.dtype).removeprefix("torch."), t.nbytes) for t in tensors]

    def step(self, method: Method, kernels: bool, source: str, frozen: bool) -> None:
        """Forward in eager mode, backward in compiled code: how the step is computed."""
        self.method, self.kernels, self.source, self.frozen = method, kernels, source, frozen
        if source or frozen:
            self.shapes = []
