"""`Config`: all that is fixed of a converted layer, in one frozen object, and as a string for operators."""

from __future__ import annotations

import ast
from dataclasses import astuple, dataclass, field
from functools import cached_property, lru_cache

from ._version import __version__
from .convolution import stays_float
from .geometry import Geometry
from .method import GradInput, GradWeight, Method, Saved
from .transform.tokens import Grid, Layout, layout


@dataclass(frozen=True)
class Config:
    """The configuration of a layer.

    Attributes:
        method: that it follows, with its number format chosen.
        grid: of its tokens, where known.
        transposed: whether w is (I, O), as in transformers' Conv1D.
        geometry: of a convolution, None for a Linear.
        kernels: whether the Triton kernels compute it, else the reference.
        name: for messages. It is no part of `word`, so that compiled layers of different names share a graph.
    """

    method: Method
    grid: Grid | None = None
    transposed: bool = False
    geometry: Geometry | None = None
    kernels: bool = False
    name: str = field(default="linear", compare=False)

    @cached_property
    def word(self) -> str:
        """All but the name, as a string, which is all that compiled code knows: a new field of a method, or of this
        class, is read here and in `of`. With the version, so that compiled code of another one is not reused."""
        m, place, geometry = self.method, self.grid, self.geometry
        parts = (m.name, m.forward, astuple(m.grad_input), astuple(m.grad_weight), astuple(m.saved))
        rest = (None if place is None else astuple(place), None if geometry is None else astuple(geometry))
        return repr((__version__, *parts, *rest, self.transposed, self.kernels))

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(word: str) -> Config:
        """The configuration of a word; its method has no knobs."""
        _, name, product, g_x, g_w, saved, grid, geometry, transposed, kernels = ast.literal_eval(word)
        method = Method(name, GradInput(*g_x), GradWeight(*g_w), Saved(*saved), forward=product)
        place = None if geometry is None else Geometry(*geometry)
        kind = "linear" if geometry is None else "conv2d"
        return Config(method, None if grid is None else Grid(*grid), transposed, place, kernels, kind)

    @cached_property
    def draws(self) -> bool:
        """Whether a step draws random numbers."""
        return self.method.draws

    @cached_property
    def overlaps(self) -> bool:
        """Whether it is a convolution whose patches overlap, so that no matrix of tokens is its input."""
        return self.geometry is not None and not self.geometry.is_patches

    def layout(self, lead: tuple[int, ...]) -> Layout:
        """The layout in tiles of tokens of shape (*lead, C)."""
        rows, across = self.method.grad_weight, self.method.grad_input.transform != "lowpass"
        return layout(tuple(map(int, lead)), rows.tile, rows.rank, rows.sampled, rows.order, self.grid, across)

    def fits(self, lead: tuple[int, ...]) -> bool | None:
        """Whether the grid has as many tokens as an input of shape (*lead, C); None where no grid is used."""
        if self.grid is None or self.geometry is not None or len(lead) != 2 or self.method.grad_weight.tile == 1:
            return None
        return self.grid.tokens == lead[1]

    def layout_of(self, shape: tuple[int, ...]) -> Layout:
        """The layout of an input of that shape: of its tokens, or of a convolution's patches or positions."""
        if self.geometry is None:
            return self.layout(shape[:-1])
        *batch, _, height, width = map(int, shape)
        size = (height, width) if self.overlaps else self.geometry.output_size(height, width)
        return self.layout((*(batch or (1,)), *size))

    def product(self, outputs: int) -> str:
        """What backward multiplies where patches overlap: g_y, of so many channels, and x at its own positions,
        ``"restored"`` and quantized, or ``"float"``, neither g_y nor w in codes (`convolution.stays_float`); elsewhere
        it is ``"tokens"``.
        """
        assert self.geometry is not None
        return "float" if stays_float(self.method, outputs, self.geometry) else "restored"
