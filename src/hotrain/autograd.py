"""The autograd functions: run the product forward, keep what the method keeps, call the two gradients.

They decide nothing. A `Step` says what one forward of one layer does, and whether the definition or the kernels do
it; `ctx.needs_input_grad` says what is asked. All that lives until backward goes through `save_for_backward`, the key
of the draws too: a forward recomputed by activation checkpointing then hands backward its own key together with its
own codes.
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
from .saved import Format
from .transform.tokens import Grid, Layout, layout, project

Needs = tuple[bool, bool, bool]  # of x, w, b
Grads = tuple[Tensor | None, Tensor | None, Tensor | None]

# Asked once, here: a tracer cannot follow the question.
_AUTOCASTS = frozenset(filter(torch.amp.is_autocast_available, ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")))


def kernels_for(device: torch.device) -> ModuleType | None:
    """`hotrain.kernels` where that device may run them; imported when first asked for."""
    global _kernels
    if device.type != "cuda":
        return None
    if _kernels is None:
        from . import kernels

        _kernels = kernels
    return _kernels


_kernels: ModuleType | None = None


class Origin(Protocol):
    """Where a layer's input comes from: backward makes it again, and the layer keeps nothing of it.

    recipe: how (`hotrain.activations.rematerialize`).  tensors: of which; an operator before the layer keeps them.
    remake: makes it of them, as autograd gives them back, in a shape and a dtype (`hotrain.activations.sharing`).
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

    key: of its draws: an integer, or an int64 () on x's device, whose value the host may know as `word`.
    grid: of its tokens, where known.  transposed: w is (I, O), as in transformers' Conv1D.  name: of the layer, for
    messages.  handle: of the layer, for the kernels.  served: by the kernels (`on` decides).  origin: of x, where
    backward can make it again.  ran: the layer's record of what it did.
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
        """Where the tiles of an input of shape (*lead, C) lie."""
        rows, across = self.method.grad_weight, self.method.grad_input.transform != "lowpass"
        return layout(tuple(map(int, lead)), rows.tile, rows.rank, rows.sampled, rows.order, self.grid, across)

    def format(self, columns: int, dtype: torch.dtype) -> Format:
        return Format(self.method.saved, columns, dtype)

    def on(self, x: Tensor, lay: Layout | None) -> Step:
        """This step with its ways chosen for an x of that layout: the kernels where they serve it, else the
        definition. lay: None where only the definition will do.

        The definition wants an integer key: where only the device knows it, reading it waits for the device, so
        the definition cannot draw inside a captured CUDA graph.
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
        """What forward leaves for `gradients`: the key, where the method draws, and what x, (*lead, C), leaves for
        g_w (nothing for None)."""
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
        """Write down what this forward does and keeps of x, for the report.  trained: whether w wants a gradient."""
        if self.ran is not None:
            self.ran.kept(x, *kept[self.method.draws :])
            source = "" if self.origin is None or not trained else self.origin.recipe
            self.ran.step(self.method, self.served, source, not trained)

    def keep_again(self, kept: tuple[Tensor, ...], x: Tensor, lay: Layout) -> tuple[Tensor, ...]:
        """What `keep` would have left of x, in backward: with the key that it left alone, `kept`."""
        return self._with_key_of(kept)[0].keep(x, lay)

    def forward(
        self, x: Tensor, w: Tensor, b: Tensor | None, lay: Layout, keeps: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The forward product that the method asks for, and what `keep` leaves beside it (of no x unless `keeps`).

        x: (*lead, I).  w: (O, I), or (I, O) when transposed, any float dtype.  y: (*lead, O) in x's dtype.
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
        """This step with the key that `keep` left, and the rest of what it left."""
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
        """(g_x, g_w, g_b), None where not needed: (T, columns) as g_y, one shaped as w in `w_dtype`, and (O,).

        g_y: (*lead, O).  w: (O, columns), or (columns, O) when transposed; needed for g_x only.  kept: of `keep`.
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
        """`gradients` of a convolution whose patches overlap, always by the definition.

        g_y: (B, O, H', W').  w: (O, C/groups, kh, kw).  shape: of x.  Returns g_x shaped as x, g_w as w, g_b.
        """
        step, kept = self._with_key_of(kept)
        assert isinstance(step.key, int)
        g_x = g_w = g_b = None
        if needs[0]:
            assert w is not None
            positions = step.layout((shape[0], *g_y.shape[2:]))
            g_x = convolution.grad_input(g_y, w, shape, geometry, step.method, step.key, positions)
        if needs[1]:
            # grad_weight asks w for its shape alone
            like_w = g_y.new_empty(1).expand(g_y.shape[1], shape[1] // geometry.groups, *geometry.kernel)
            rows = step.format(shape[1], g_y.dtype).restore(kept)
            lay = step.layout((shape[0], *shape[2:]))
            g_w = convolution.grad_weight(g_y, rows, like_w, shape, geometry, lay, step.method, step.key)
            g_w = g_w.to(w_dtype)
        if needs[2]:
            g_b = g_y.sum((0, 2, 3))
        return g_x, g_w, g_b


def differentiates() -> bool:
    """Whether backward will ask for the gradients of this forward.

    Exported and traced programs, `torch.func` and forward-mode derivatives have those of PyTorch: autograd functions
    with a context cannot take part in them.
    """
    return torch.is_grad_enabled() and not _is_traced_or_transformed()


def _is_traced_or_transformed() -> bool:
    transformed = torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
    return transformed or torch.compiler.is_exporting() or torch.jit.is_tracing()


# Dynamo asks once. Of `is_exporting` itself that of PyTorch 2.11 makes True, whether it exports or not.
_is_traced_or_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def autocast_dtype(t: Tensor) -> torch.dtype:
    """The dtype in which autocast hands t to a product: its own where it is on, float64 excepted."""
    return t.dtype if t.dtype == torch.float64 else autocast_to(t.device.type) or t.dtype


def autocast_to(kind: str) -> torch.dtype | None:
    """The dtype of autocast on that kind of device, None where it is off."""
    return torch.get_autocast_dtype(kind) if kind in _AUTOCASTS and torch.is_autocast_enabled(kind) else None


def autocast(t: Tensor) -> Tensor:
    """The tensor as autocast hands it to a product."""
    return t.to(autocast_dtype(t))


def outside_autocast(x: Tensor) -> AbstractContextManager[object]:
    # Casts are made by hand: autocast's cache must not get copies of weights that have no graph. And not by its switch
    # alone: a backward within autocast clears the cache, else casts of one stream would be met in a graph of another.
    kind = x.device.type
    return nullcontext() if autocast_to(kind) is None else torch.autocast(kind, enabled=False)


class _SecondDerivative(torch.autograd.Function):
    """Passes the first `count` tensors on; raises if they are differentiated, by whichever tensor."""

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
    """The gradients as they are; under create_graph, tied to an error that a second derivative meets.

    sources: what they were computed from. One that is asked for by way of these alone meets the error too.
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
            # Of three axes it is a view, which autograd would not let the next layer change in place.
            y = torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y
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
    """Save w, the parameter itself and no copy, where g_x will ask for it, what the step keeps, and x's origin where
    g_w will ask for that."""
    origin = step.origin if ctx.needs_input_grad[1] else None
    given = () if origin is None else origin.tensors
    ctx.step, ctx.count = replace(step, origin=None), len(given)  # tensors must go when autograd lets them go
    ctx.remake = None if origin is None else origin.remake
    ctx.save_for_backward(*((w,) if ctx.needs_input_grad[0] else ()), *kept, *given)


def _saved(ctx: Any) -> tuple[Tensor | None, tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """What `_save` saved: w, what the step keeps, the origin's tensors."""
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
    """The rows that a convolution's step keeps of x: its patches, or its positions where patches overlap."""
    return convolution.patches(x, geometry) if geometry.is_patches else channels_last(x)
