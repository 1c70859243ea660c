"""The record of a layer's last training step (method, kernels, saved bytes), the same in eager and compiled code."""

from __future__ import annotations

from collections.abc import Sequence
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
            (`hotrain.compress.rematerialize`), "" where the layer saves it.
        frozen: whether the weight requires no gradient, so that nothing of the input is saved.
        exact_bytes: of the input as exact training saves it, for one call.
        elements: of the input.
        recomputed: whether backward made the codes: of a checkpointed block's input, or where a compiler keeps the
            input itself, for another reader.
    """

    method: Method | None = None
    kernels: bool = False
    shapes: list[tuple[str, int]] = field(default_factory=list)
    source: str = ""
    frozen: bool = False
    exact_bytes: int = 0
    elements: int = 0
    recomputed: bool = False

    def kept(self, x: Tensor, tensors: Sequence[Tensor], in_backward: bool) -> None:
        """Record the tensors that are saved of x, in forward, or in backward where that makes them again."""
        self.exact_bytes, self.elements, self.recomputed = x.nbytes, x.numel(), in_backward
        self.shapes = [(str(t.dtype).removeprefix("torch."), t.nbytes) for t in tensors]

    def step(self, method: Method, kernels: bool, source: str, frozen: bool) -> None:
        """Record how the step is computed: called in forward in eager mode, in backward in compiled code."""
        self.method, self.kernels, self.frozen = method, kernels, frozen
        self.source = "" if frozen else source
        self.recomputed = self.recomputed and not (source or frozen)
        if source or frozen or self.recomputed:
            self.shapes = []
