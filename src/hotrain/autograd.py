"""Autograd functions of Linear and Conv2d: the forward product, the saved codes, and the two gradients of a method.

A `Step` describes what one forward of one layer does, and whether the reference or the kernels compute it;
`ctx.needs_input_grad` says which gradients are needed. Everything that backward needs goes through
`save_for_backward`, also the key of the draws: a forward recomputed by activation checkpointing then passes backward
its own key together with its own codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from . import backward, convolution, draws, forward
from .convolution import Geometry, channels_last
from .layer_record import Ran
from .method import Method
from .private import constant_in_graphs, is_transformed, is_view
from .saved import Format
from .transform.tokens import Grid, Layout, layout, project

Needs = tuple[bool, bool, bool]  # of x, w, b
Grads = tuple[Tensor | None, Tensor | None, Tensor | None]

# Evaluated once, here: Dynamo cannot trace the call.
_AUTOCASTS = frozenset(filter(torch.amp.is_autocast_available, ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")))


def kernels_for(device: torch.device) -> ModuleType | None:
    """`hotrain.kernels` for a CUDA device, imported at the first call; None for other devices."""
    global _kernels
    if device.type != "cuda":
        return None
    if _kernels is None:
        from . import kernels

        _kernels = kernels
    return _kernels


_kernels: ModuleType | None = None


class Origin(Protocol):
    """The producer of a layer's input: backward rematerializes the input, and the layer saves nothing of it.

    Attributes:
        recipe: how (`hotrain.compress.rematerialize`).
        tensors: of which; a preceding op saves them.
        remake: (saved tensors, shape, dtype) → the input (`hotrain.compress.sharing`).
    """

    @property
    def recipe(self) -> str: ...

    @property
    def tensors(self) -> tuple[Tensor | None, ...]: ...

    @property
    def remake(self) -> Callable[[Sequence[Tensor | None], Sequence[int], torch.dtype], Tensor]: ...


@dataclass(frozen=True)
class Step:
    """One training forward of one layer.

    Attributes:
        method: that the layer follows.
        key: of its draws: an integer, or an int64 () on x's device, whose value the host may know as `word`.
        grid: of its tokens, where known.
        transposed: whether w is (I, O), as in transformers' Conv1D.
        name: of the layer, for messages.
        handle: of the layer, for the kernels.
        served: whether the kernels run it (`on` decides).
        origin: of x, where backward can rematerialize it.
        ran: the layer's record.
    """

    method: Method
    key: int | Tensor
    grid: Grid | None = None
    transposed: bool = False
    name: str = "linear"
    handle: int = 0
    word: int | None = None
    served: bool = False
    origin: Origin | None = None
    ran: Ran | None = None

    def layout(self, lead: tuple[int, ...]) -> Layout:
        """The layout in tiles of an input of shape (*lead, C)."""
        rows, across = self.method.grad_weight, self.method.grad_input.transform != "lowpass"
        return layout(tuple(map(int, lead)), rows.tile, rows.rank, rows.sampled, rows.order, self.grid, across)

    def format(self, columns: int, dtype: torch.dtype) -> Format:
        """The format in which P x is saved."""
        return Format(self.method.saved, columns, dtype)

    def on(self, x: Tensor, lay: Layout | None) -> Step:
        """This step for a given input: with the kernels where they support it, else with the reference.

        The reference needs an integer key. Where only the device has it, reading it synchronizes, so the reference
        cannot draw inside a captured CUDA graph.

        Args:
            x: the input, cast.
            lay: its layout, None where only the reference can compute the step.
        """
        if self._is_served(x, lay):
            return replace(self, key=self._device_key(x.device), served=True)
        return self if isinstance(self.key, int) else replace(self, key=self._host_key())

    def _is_served(self, x: Tensor, lay: Layout | None) -> bool:
        kernels = kernels_for(x.device)
        if kernels is None:
            return False
        why = kernels.reason(self.method, lay, x.dtype, x.device) if lay is not None else "its patches overlap"
        if why is not None:
            kernels.note(why, x.device, x.dtype)
        return why is None

    def _device_key(self, device: torch.device) -> Tensor:
        if isinstance(self.key, Tensor):
            return self.key
        return torch.full((), draws.signed(self.key), dtype=torch.int64, device=device)

    def _host_key(self) -> int:
        if isinstance(self.key, int):
            return self.key
        if self.word is not None or not self.method.draws:
            return self.word or 0
        return int(self.key) & ((1 << 64) - 1)

    def keep(self, x: Tensor | None, lay: Layout) -> tuple[Tensor, ...]:
        """The tensors that forward saves for `gradients`: the key, where the method draws, and the codes of P x.

        Args:
            x: (*lead, C), or None where g_w does not need it.
            lay: its layout.
        """
        key: tuple[Tensor, ...] = ()
        if self.method.draws:
            key = (
                self.key
                if isinstance(self.key, Tensor)
                else torch.tensor(draws.signed(self.key), dtype=torch.int64, device="cpu"),
            )
        if x is None:
            return key
        if self.served:
            kernels = kernels_for(x.device)
            assert kernels is not None
            matrix = x.reshape(-1, x.shape[-1])
            return (*key, *kernels.keep(matrix, self.method, lay, self.key, self.handle))
        assert isinstance(self.key, int)
        wide = x if self.method.saved.bits is None else x.to(backward.wide(x.dtype))
        return (*key, *self.format(x.shape[-1], x.dtype).keep(project(wide, lay, self.key), self.key))

    def note(self, x: Tensor, kept: tuple[Tensor, ...], trained: bool) -> None:
        """Record what this forward does and saves of x, for the report; `trained`: whether w requires a gradient."""
        if self.ran is not None:
            self.ran.kept(x, kept[self.method.draws :], draws.in_backward())
            source = "" if self.origin is None or not trained else self.origin.recipe
            self.ran.step(self.method, self.served, source, not trained)

    def keep_again(self, kept: tuple[Tensor, ...], x: Tensor, lay: Layout) -> tuple[Tensor, ...]:
        """What `keep` would have saved of x, computed in backward with the key that it did save, `kept`."""
        return self._with_key_of(kept)[0].keep(x, lay)

    def forward(
        self, x: Tensor, w: Tensor, b: Tensor | None, lay: Layout, keeps: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The low-precision forward product, and what `keep` saves.

        Args:
            x: (*lead, I).
            w: (O, I), or (I, O) when transposed, any float dtype.
            b: (O,) or None.
            lay: of x.
            keeps: whether g_w needs x.

        Returns:
            y, (*lead, O), in x's dtype, and the saved tensors.
        """
        matrix = x.reshape(-1, x.shape[-1])
        if self.served:
            kernels = kernels_for(x.device)
            assert kernels is not None
            y, kept = kernels.forward(matrix, w, b, self.method, lay, self.key, self.handle, keeps, self.transposed)
            kept = (*self.keep(None, lay), *kept)
        else:
            y = forward.product(matrix, w.T if self.transposed else w, b, self.method.forward)
            kept = self.keep(x if keeps else None, lay)
        return y.view(*x.shape[:-1], y.shape[-1]), kept

    def _with_key_of(self, kept: tuple[Tensor, ...]) -> tuple[Step, tuple[Tensor, ...]]:
        """This step with the key that `keep` saved, and the other tensors that it saved."""
        if not self.method.draws:
            return self, kept
        key, *rest = kept
        return replace(self, key=key if self.served else int(key) & ((1 << 64) - 1)), tuple(rest)

    def gradients(
        self,
        g_y: Tensor,
        w: Tensor | None,
        kept: tuple[Tensor, ...],
        columns: int,
        lay: Layout,
        w_dtype: torch.dtype,
        needs: Needs,
    ) -> Grads:
        """The gradients of a Linear.

        Args:
            g_y: (*lead, O).
            w: (O, columns), or (columns, O) when transposed; needed for g_x only.
            kept: of `keep`.
            columns: number of input channels.
            lay: of x.
            w_dtype: dtype of g_w.
            needs: which of x, w and b require gradients.

        Returns:
            (g_x, g_w, g_b), None where not needed: (T, columns) in g_y's dtype, as w in `w_dtype`, and (O,).
        """
        step, kept = self._with_key_of(kept)
        matrix = g_y.reshape(-1, g_y.shape[-1])
        if step.served:
            kernels = kernels_for(g_y.device)
            assert kernels is not None
            return kernels.gradients(
                matrix, w, kept, step.method, lay, step.key, step.handle, needs,
                transposed=step.transposed, dtype=w_dtype, columns=columns,
            )  # fmt: skip
        assert isinstance(step.key, int)
        g_x = g_w = g_b = None
        if needs[0]:
            assert w is not None
            g_x = backward.grad_input(matrix, w.T if step.transposed else w, step.method, step.key, lay)
        if needs[1]:
            rows = step.format(columns, g_y.dtype).restore(kept)
            g_w = backward.grad_weight(g_y, rows, lay, step.method, step.key).to(w_dtype)
            g_w = g_w.T if step.transposed else g_w
        if needs[2]:
            g_b = matrix.sum(0)
        return g_x, g_w, g_b

    def conv_gradients(
        self,
        g_y: Tensor,
        w: Tensor | None,
        kept: tuple[Tensor, ...],
        shape: tuple[int, int, int, int],
        geometry: Geometry,
        w_dtype: torch.dtype,
        needs: Needs,
    ) -> Grads:
        """The gradients of a convolution whose patches overlap, always by the reference.

        Args:
            g_y: (B, O, H', W').
            w: (O, C/groups, kh, kw); needed for g_x only.
            kept: of `keep`.
            shape: of x.
            geometry: of the convolution.
            w_dtype: dtype of g_w.
            needs: which of x, w and b require gradients.

        Returns:
            (g_x, g_w, g_b), None where not needed: as x, as w, and (O,).
        """
        step, kept = self._with_key_of(kept)
        assert isinstance(step.key, int)
        g_x = g_w = g_b = None
        if needs[0]:
            assert w is not None
            positions = step.layout((shape[0], *g_y.shape[2:]))
            g_x = convolution.grad_input(g_y, w, shape, geometry, step.method, step.key, positions)
        if needs[1]:
            # grad_weight needs only the shape of w
            like_w = g_y.new_empty(1).expand(g_y.shape[1], shape[1] // geometry.groups, *geometry.kernel)
            rows = step.format(shape[1], g_y.dtype).restore(kept)
            lay = step.layout((shape[0], *shape[2:]))
            g_w = convolution.grad_weight(g_y, rows, like_w, shape, geometry, lay, step.method, step.key)
            g_w = g_w.to(w_dtype)
        if needs[2]:
            g_b = g_y.sum((0, 2, 3))
        return g_x, g_w, g_b


def differentiates() -> bool:
    """Whether this forward takes part in reverse-mode autograd with the gradients of a method.

    Exported and traced programs, `torch.func` and forward-mode derivatives use those of PyTorch: autograd functions
    with a context do not support them.
    """
    return torch.is_grad_enabled() and not _is_traced_or_transformed()


@constant_in_graphs
def _is_traced_or_transformed() -> bool:
    return is_transformed() or torch.compiler.is_exporting() or torch.jit.is_tracing()


# Dynamo evaluates it once, outside of the trace: inside, `is_exporting` of PyTorch 2.11 is always True.


def autocast_dtype(t: Tensor) -> torch.dtype:
    """The dtype to which autocast casts t for a product: its own where autocast is off, and for float64."""
    return t.dtype if t.dtype == torch.float64 else autocast_to(t.device.type) or t.dtype


def autocast_to(kind: str) -> torch.dtype | None:
    """The dtype of autocast on that kind of device, None where it is off."""
    return torch.get_autocast_dtype(kind) if kind in _AUTOCASTS and torch.is_autocast_enabled(kind) else None


def autocast(t: Tensor) -> Tensor:
    """The tensor as autocast casts it for a product."""
    return t.to(autocast_dtype(t))


def outside_autocast(x: Tensor) -> AbstractContextManager[object]:
    # Casts are made explicitly: autocast's cache must not get copies of weights that have no graph. And a context, not
    # a flag: a backward within autocast clears the cache, else casts of one stream would be used in a graph of another.
    kind = x.device.type
    return nullcontext() if autocast_to(kind) is None else torch.autocast(kind, enabled=False)


class _SecondDerivative(torch.autograd.Function):
    """Returns the first `count` tensors; raises if they are differentiated with respect to any tensor."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.layer = name  # `name` is the node's own
        return tuple(g.view_as(g) for g in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError(
            f"hotrain: {ctx.layer!r} has no second derivative (its gradients are quantized or low-rank). "
            "Leave the layer exact with filter_fn, or hotrain.revert(model), to differentiate twice."
        )


def once(name: str, grads: tuple[Tensor | None, ...], *sources: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients unchanged; under create_graph, a second derivative through them raises.

    Args:
        name: of the layer.
        grads: the gradients.
        *sources: what they were computed from; derivatives with respect to these raise too.
    """
    if not torch.is_grad_enabled():
        return grads
    present = [g.detach().requires_grad_() for g in grads if g is not None]
    through = [t for t in sources if t is not None]
    marked = iter(_SecondDerivative.apply(name, len(present), *present, *through) if present else ())
    return tuple(None if g is None else next(marked) for g in grads)


class Linear(torch.autograd.Function):
    """``y = x wᵀ + b`` with the two gradients of a method."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, step: Step) -> Tensor:
        keeps = ctx.needs_input_grad[1] and step.origin is None
        x_cast, b_cast = autocast(x), None if b is None else autocast(b)
        w_cast = autocast(w) if step.method.forward == "exact" else w
        lay = step.layout(x.shape[:-1])
        step = step.on(x_cast, lay)
        with outside_autocast(x):
            if step.method.forward == "exact":
                y = (_conv1d if step.transposed else F.linear)(x_cast, w_cast, b_cast)
                kept = step.keep(x_cast if keeps else None, lay)
            else:
                y, kept = step.forward(x_cast, w, b_cast, lay, keeps)
            step.note(x_cast, kept, ctx.needs_input_grad[1])
            # With three axes y is a view, which autograd would not let the next layer change in place.
            y = torch.ops.aten._unsafe_view(y, y.shape) if is_view(y) else y
        _save(ctx, step, w, kept)
        ctx.layout, ctx.shape, ctx.x_dtype, ctx.w_dtype = lay, x.shape, x.dtype, w.dtype
        ctx.dtype = x_cast.dtype
        return y

    @staticmethod
    def backward(ctx: Any, g_y: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad(), outside_autocast(g_y):
            w, kept, given = _saved(ctx)
            if ctx.remake is not None:
                kept = ctx.step.keep_again(kept, ctx.remake(given, ctx.shape, ctx.dtype), ctx.layout)
            g_x, g_w, g_b = ctx.step.gradients(
                g_y, w, kept, ctx.shape[-1], ctx.layout, ctx.w_dtype, ctx.needs_input_grad[:3]
            )
            if g_x is not None:
                g_x = g_x.view(ctx.shape).to(ctx.x_dtype)
        return (*once(ctx.step.name, (g_x, g_w, g_b), g_y, w), None)


def _save(ctx: Any, step: Step, w: Tensor, kept: tuple[Tensor, ...]) -> None:
    """Save w (the parameter, no copy) where g_x needs it, the step's tensors, and those of x's origin for g_w."""
    origin = step.origin if ctx.needs_input_grad[1] else None
    given = () if origin is None else origin.tensors
    ctx.step, ctx.count = replace(step, origin=None), len(given)  # tensors must be freed when autograd frees them
    ctx.remake = None if origin is None else origin.remake
    ctx.save_for_backward(*((w,) if ctx.needs_input_grad[0] else ()), *kept, *given)


def _saved(ctx: Any) -> tuple[Tensor | None, tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """What `_save` saved: w, the step's tensors, the origin's tensors."""
    saved = ctx.saved_tensors
    w, rest = (saved[0], saved[1:]) if ctx.needs_input_grad[0] else (None, saved)
    end = len(rest) - ctx.count
    return w, rest[:end], rest[end:]


def _conv1d(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """The product of transformers' Conv1D, to the bit: w is (I, O)."""
    matrix = x.view(-1, x.shape[-1])
    y = matrix @ w if b is None else torch.addmm(b, matrix, w)
    return y.view(*x.shape[:-1], w.shape[1])


class Conv2d(torch.autograd.Function):
    """``y = conv2d(x, w) + b`` with the two gradients of a method."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, geometry: Geometry, step: Step) -> Tensor:
        x_cast, w_cast, b_cast = autocast(x), autocast(w), None if b is None else autocast(b)
        with outside_autocast(x):
            y = geometry.forward(x_cast, w_cast, b_cast)
            tokens = _tokens(x_cast, geometry)
            lay = step.layout(tokens.shape[:-1])
            step = step.on(x_cast, lay if geometry.is_patches else None)
            kept = step.keep(tokens if ctx.needs_input_grad[1] and step.origin is None else None, lay)
            step.note(x_cast, kept, ctx.needs_input_grad[1])
        _save(ctx, step, w, kept)
        ctx.layout, ctx.geometry, ctx.x_dtype, ctx.w_dtype = lay, geometry, x.dtype, w.dtype
        ctx.shape, ctx.w_shape, ctx.w_strides, ctx.dtype = x.shape, w.shape, w.stride(), x_cast.dtype
        return y

    @staticmethod
    def backward(ctx: Any, g_y: Tensor) -> tuple[Tensor | None, ...]:
        shape, needs = tuple(ctx.shape), ctx.needs_input_grad[:3]
        with torch.no_grad(), outside_autocast(g_y):
            w, kept, given = _saved(ctx)
            if ctx.remake is not None:
                tokens = _tokens(ctx.remake(given, shape, ctx.dtype), ctx.geometry)
                kept = ctx.step.keep_again(kept, tokens, ctx.layout)
            if ctx.geometry.is_patches:
                tokens, matrix = channels_last(g_y), None if w is None else w.flatten(1)
                columns = ctx.w_shape[1:].numel()
                g_x, g_w, g_b = ctx.step.gradients(tokens, matrix, kept, columns, ctx.layout, ctx.w_dtype, needs)
                if g_x is not None:
                    g_x = convolution.patches_transposed(g_x.view(*tokens.shape[:3], columns), shape, ctx.geometry)
            else:
                g_x, g_w, g_b = ctx.step.conv_gradients(g_y, w, kept, shape, ctx.geometry, ctx.w_dtype, needs)
            if g_x is not None:
                g_x = g_x.to(ctx.x_dtype)
            if g_w is not None:
                g_w = convolution.laid_as(g_w.view(ctx.w_shape), ctx.w_strides)
        return (*once(ctx.step.name, (g_x, g_w, g_b), g_y, w), None, None)


def _tokens(x: Tensor, geometry: Geometry) -> Tensor:
    """The rows that a convolution's step saves of x: its patches, or its positions where patches overlap."""
    return convolution.patches(x, geometry) if geometry.is_patches else channels_last(x)
