"""What a layer keeps between steps beside its parameters: the record of the last one, and the kernels' amax history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from .method import Method

BINS = 64  # of the partial amax of one tensor


class AmaxHistory:
    """For delayed scaling: the last amax of each tensor that a layer quantizes. It changes speed only.

    Attributes:
        words: int32, (5, 2 + `BINS`): for each tensor the last amax, an arrival counter, and bins of partial amax.
        rows: its rows.
        bins: of each row.
    """

    def __init__(self, words: Tensor) -> None:
        self.words = words
        self.rows = list(words)
        self.bins = [row[2:] for row in self.rows]

    @classmethod
    def on(cls, device: torch.device) -> AmaxHistory:
        """An empty one."""
        return cls(torch.zeros(5, 2 + BINS, dtype=torch.int32, device=device))


class Sized(Protocol):
    """What a record reads of a tensor, or of the codes it is made of."""

    @property
    def nbytes(self) -> int: ...

    def numel(self) -> int: ...


@dataclass
class Ran:
    """The record of a layer's last training step, the same in eager and compiled code; eager steps alike share one.

    Attributes:
        method: with its number format chosen for the device; None before the first training step.
        kernels: whether Triton kernels ran, else the reference in plain PyTorch.
        product: of which g_w is: ``"tokens"``, P g_y and P x, or what `layer.Config.product` says.
        shapes: (dtype, bytes) of each tensor that the layer itself saves of its input, for one call; empty where the
            input is shared, and where the weight is frozen.
        source: the op whose saved activation backward rematerializes the input from
            (`hotrain.compress.rematerialize`), "" where the layer saves it.
        frozen: whether the weight requires no gradient, so that nothing of the input is saved.
        exact_bytes: of the input as exact training saves it, for one call.
        elements: of the input.
        fits: whether the layer's grid has as many tokens as its input; None where no grid is used.
        recomputed: whether backward made the codes: of a checkpointed block's input, or where a compiler keeps the
            input itself, for another reader.
    """

    method: Method | None = None
    kernels: bool = False
    product: str = "tokens"
    shapes: list[tuple[str, int]] = field(default_factory=list)
    source: str = ""
    frozen: bool = False
    exact_bytes: int = 0
    elements: int = 0
    fits: bool | None = None
    recomputed: bool = False

    def kept(self, x: Sized, tensors: Sequence[Tensor | None], in_backward: bool, fits: bool | None) -> None:
        """Record the tensors that are saved of x, in forward, or in backward where that makes them again."""
        self.exact_bytes, self.elements, self.recomputed, self.fits = x.nbytes, x.numel(), in_backward, fits
        self.shapes = [(_name(t.dtype), t.nbytes) for t in tensors if t is not None]

    def step(self, method: Method, kernels: bool, product: str, source: str, frozen: bool) -> None:
        """Record how the step is computed: called in forward in eager mode, in backward in compiled code."""
        self.method, self.kernels, self.product, self.frozen = method, kernels, product, frozen
        self.source = "" if frozen else source
        self.recomputed = self.recomputed and not (source or frozen)
        if source or frozen or self.recomputed:
            self.shapes = []


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
