"""Autograd functions of Linear and Conv2d: the forward product, the saved codes, and the two gradients of a method.

A `Call` is all that forward and backward need to know of a layer and of the shape of its input;
`ctx.needs_input_grad` says which gradients are needed. Everything that backward reads goes through
`save_for_backward`, also the key of the draws: a forward recomputed by activation checkpointing then passes backward
its own key together with its own codes.

`pack`, `product`, `linear_gradients` and `conv2d_gradients` do the work, by the kernels or by the reference. Eager code
calls them directly, since the dispatcher costs host time; compiled code calls them as operators (`hotrain.ops`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from . import backward, convolution, draws, forward, kernels
from .casting import autocast, autocast_dtype, autocast_to, outside_autocast
from .draws import Draws
from .geometry import (
    channels_last,
    is_multiplied,
    keeps_channels_last,
    laid_as,
    patches,
    patches_transposed,
    product_of_patches,
)
from .layer import Config
from .layer_record import AmaxHistory, Ran
from .private import any_autocast, dispatch_modes, is_view
from .saved import Format
from .transform.tokens import Layout, project

Needs = Sequence[bool]  # of x, w, b
Grads = tuple[Tensor | None, Tensor | None, Tensor | None]
Key = int | Tensor | None  # of the draws; None for a method that draws nothing
Packed = tuple[Tensor | None, Tensor | None]  # codes, and their scale or what the kernels keep beside them


KERNELS: dict[str, Any] = {"cuda": kernels}  # type of device → `hotrain.kernels`; nothing where the reference runs


class Origin(NamedTuple):
    """How backward rematerializes a layer's input, so that the layer saves nothing of it.

    Attributes:
        recipe: of `hotrain.compress.rematerialize`.
        tensors: what the recipe takes; a preceding op saves them anyway.
        remake: (recipe, saved tensors, shape, dtype) → the input (`hotrain.compress.codes`).
        coded: the same, to the codes of the input as a matrix, from which kernels make a layer's own; None where none
            reads them.
        by_heads: whether it is attention's result, of which the transpose alone can be made.
    """

    recipe: str
    tensors: tuple[Tensor | None, ...]
    remake: Callable[[str, Sequence[Tensor | None], Sequence[int], torch.dtype], Tensor]
    coded: Callable[[str, Sequence[Tensor | None], Sequence[int], torch.dtype], kernels.Coded | None]
    by_heads: bool = False


# ---- the work of a layer, in eager and compiled code ----
#
# Arguments of the four functions: x, (*lead, I), and g_y, (*lead, O), cast; w, (O, I), or (I, O) when transposed, of
# any float dtype, and b, (O,) or None; the key of the draws, for the kernels on x's device; the layer's configuration;
# the layout of x; the layer's amax history, which only the kernels use; what `pack` returned, needed for g_w only.


def reference_key(key: Key) -> draws.Key:
    """The key as the reference takes it; that of a GPU stays there, since reading it would wait for the GPU."""
    if not isinstance(key, Tensor):
        return key or 0
    if key.device.type == "cpu":
        return int(key)
    found: draws.Key = KERNELS[key.device.type].device_key(key) if key.device.type in KERNELS else draws.DeviceKey(key)
    return found


def pack(x: Tensor | kernels.Coded, key: Key, config: Config, lay: Layout, history: AmaxHistory | None) -> Packed:
    """The codes of P x with their scale, as forward saves them for g_w; None in place of a scale that there is not.

    Backward packs an x that it would rematerialize; kernels take the codes that it would be made of.
    """
    if config.kernels:
        matrix = x if isinstance(x, kernels.Coded) else x.reshape(-1, x.shape[-1])
        kept: Packed = KERNELS[x.device.type].keep(matrix, config.method, lay, key, history)
        return kept
    assert isinstance(x, Tensor)
    word = reference_key(key)
    spec = config.method.saved
    rows = project(x, lay, word, widened=spec.bits is not None)
    codes, *scale = Format(spec, x.shape[-1], x.dtype).keep(rows, word)
    return codes, scale[0] if scale else None


def product(
    x: Tensor, w: Tensor, b: Tensor | None, key: Key, config: Config, lay: Layout, history: AmaxHistory | None,
    keeps: bool,
) -> tuple[Tensor, Packed]:  # fmt: skip
    """The low-precision forward product y, (*lead, O), in x's dtype, and what `pack` returns if g_w needs x."""
    matrix = x.reshape(-1, x.shape[-1])
    kept: Packed = (None, None)
    if config.kernels:
        y, found = KERNELS[x.device.type].forward(
            matrix, w, b, config.method, lay, key, history, keeps, config.transposed
        )
        kept = found or kept
    else:
        y = forward.product(matrix, w.T if config.transposed else w, b, config.method.forward)
        kept = pack(x, key, config, lay, history) if keeps else kept
    return y.view(*x.shape[:-1], y.shape[-1]), kept


def linear_gradients(
    g_y: Tensor, w: Tensor | None, packed: Packed, key: Key, config: Config, lay: Layout, history: AmaxHistory | None,
    columns: int, w_dtype: torch.dtype, needs: Needs,
) -> Grads:  # fmt: skip
    """The gradients of a Linear.

    Args:
        columns: number of input channels; w is needed for g_x only.
        w_dtype: dtype of g_w.
        needs: which of x, w and b require gradients.

    Returns:
        (g_x, g_w, g_b), None where not needed: (T, columns) in g_y's dtype, as w in `w_dtype`, and (O,).
    """
    matrix, method = g_y.reshape(-1, g_y.shape[-1]), config.method
    if config.kernels:
        found: Grads = KERNELS[g_y.device.type].gradients(
            matrix, w, packed, method, lay, key, history, needs,
            transposed=config.transposed, dtype=w_dtype, columns=columns,
        )  # fmt: skip
        return found
    g_x = g_w = g_b = None
    word = reference_key(key)
    if needs[0]:
        assert w is not None
        g_x = backward.grad_input(matrix, w.T if config.transposed else w, method, word, lay)
    if needs[1]:
        rows = Format(method.saved, columns, g_y.dtype).restore(packed)  # type: ignore[arg-type]
        g_w = backward.grad_weight(g_y, rows, lay, method, word).to(w_dtype)
        g_w = g_w.T if config.transposed else g_w
    if needs[2]:
        g_b = matrix.sum(0)
    return g_x, g_w, g_b


def conv2d_gradients(
    g_y: Tensor, w: Tensor | None, packed: Packed, key: Key, config: Config, lay: Layout, history: AmaxHistory | None,
    shape: tuple[int, ...], w_dtype: torch.dtype, needs: Needs,
) -> Grads:  # fmt: skip
    """The gradients of a convolution whose patches overlap.

    Args:
        g_y: (B, O, H', W').
        w: (O, C/groups, kh, kw); needed for g_x only.
        lay: of the positions of x.
        shape: of x, (B, C, H, W).

    Returns:
        (g_x, g_w, g_b), None where not needed: as x, as w in `w_dtype`, and (O,).
    """
    method, geometry = config.method, config.geometry
    assert geometry is not None
    batch, channels, height, width = shape
    image = (batch, channels, height, width)
    if config.kernels:
        found: Grads = KERNELS[g_y.device.type].conv2d_gradients(
            g_y, w, packed, method, lay, key, history, needs, image, geometry
        )
        return found[0], None if found[1] is None else found[1].to(w_dtype), found[2]
    word, g_x, g_w, g_b = reference_key(key), None, None, None
    if needs[0]:
        assert w is not None
        positions = config.layout((batch, *g_y.shape[2:]))
        g_x = convolution.grad_input(g_y, w, image, geometry, method, word, positions)
    if needs[1]:
        # grad_weight needs only the shape of w
        like_w = g_y.new_empty(1).expand(g_y.shape[1], channels // geometry.groups, *geometry.kernel)
        rows = Format(method.saved, channels, g_y.dtype).restore(packed)  # type: ignore[arg-type]
        g_w = convolution.grad_weight(g_y, rows, like_w, image, geometry, lay, method, word).to(w_dtype)
    if needs[2]:
        g_b = g_y.sum((0, 2, 3))
    return g_x, g_w, g_b


@dataclass(frozen=True, eq=False)
class Call:
    """All that forward and backward need to know of a layer and of the shape, dtype and device of its input.

    Attributes:
        config: of the layer.
        layout: of the input.
        cast: autocast's dtype, None where it is off.
        layer: whose record is written, and whose amax history the kernels use; None for a function without a layer.
        traced: the words of the history in compiled code, where the work is done by operators.
        compiled: whether forward is that of compiled code.
        records: of its eager steps, by what differs between them.
    """

    config: Config
    layout: Layout
    cast: torch.dtype | None = None
    layer: Draws | None = None
    traced: Tensor | None = None
    compiled: bool = False
    records: dict[tuple[str, bool, bool], Ran] = field(default_factory=dict, repr=False)

    @property
    def history(self) -> AmaxHistory | None:
        return None if self.layer is None else self.layer.history

    def inputs(self, x: Tensor, w: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The operands as autocast casts them for a product; a product of codes rounds the whole w."""
        if self.cast is None:
            return x, w, b
        exact = self.config.geometry is not None or self.config.method.forward == "exact"
        return autocast(x), autocast(w) if exact else w, None if b is None else autocast(b)

    def pack(self, x: Tensor | kernels.Coded, key: Key) -> Packed:
        if self.traced is None or isinstance(x, kernels.Coded):
            return pack(x, key, self.config, self.layout, self.history)
        if self.config.method.saved.bits is None and self.config.method.grad_weight.tile == 1:
            return x.reshape(-1, x.shape[-1]), x.new_empty(0)  # x itself: no operator may return its input
        kept: Packed = torch.ops.hotrain.keep(x, key, self.traced, self.config.word)
        return kept

    def product(self, x: Tensor, w: Tensor, b: Tensor | None, key: Key, keeps: bool) -> tuple[Tensor, Packed]:
        if self.traced is None:
            return product(x, w, b, key, self.config, self.layout, self.history, keeps)
        y, codes, scale = torch.ops.hotrain.forward(x, w, b, key, self.traced, self.config.word, keeps)
        return y, (codes, scale) if keeps else (None, None)

    def gradients(
        self, g_y: Tensor, w: Tensor | None, packed: Packed, key: Key, source: str, shape: tuple[int, ...],
        w_dtype: torch.dtype, needs: Needs,
    ) -> Grads:  # fmt: skip
        """The gradients; `shape`: of x, or of its patches as tokens; `source`: the recipe of x, for the record."""
        if self.traced is not None:
            op = torch.ops.hotrain.conv2d_gradients if self.config.overlaps else torch.ops.hotrain.linear_gradients
            tokens, place = (channels_last(g_y), list(shape)) if self.config.overlaps else (g_y, shape[-1])
            given = (tokens, w, *packed, key, self.traced, self.config.word, source, w_dtype, place, list(needs))
            g_x, g_w, g_b = (g if need else None for g, need in zip(op(*given), needs, strict=True))
            return g_x.permute(0, 3, 1, 2) if self.config.overlaps and g_x is not None else g_x, g_w, g_b
        args = (g_y, w, packed, key, self.config, self.layout, self.history)
        if self.config.overlaps:
            return conv2d_gradients(*args, shape, w_dtype, needs)
        return linear_gradients(*args, shape[-1], w_dtype, needs)

    def note(self, x: Tensor, packed: Packed, source: str, trained: bool, outputs: int) -> None:
        """Record what an eager forward saves of x; operators write the record of compiled code when they run."""
        if self.layer is None or self.traced is not None:
            return
        found = source, trained, self.layer.repeats
        if found not in self.records:
            config, ran = self.config, Ran()
            ran.kept(x, packed, self.layer.repeats, config.fits(x.shape[:-1]))
            of = config.product(outputs) if config.overlaps else "tokens"
            ran.step(config.method, config.kernels, of, source, not trained)
            self.records[found] = ran
        self.layer.ran = self.records[found]


def call_of(config: Config, x: Tensor, layer: Draws | None = None) -> Call:
    """The call of a layer with that input, by the kernels where they support it, else by the reference."""
    cast = autocast_to(x.device.type)
    lay, dtype = config.layout_of(tuple(x.shape)), autocast_dtype(x)
    why = unsupported(config, lay, dtype, x.device)
    if why is not None and x.device.type in KERNELS:
        KERNELS[x.device.type].note(why, x.device, dtype)
    return Call(replace(config, kernels=why is None), lay, cast, layer)


def unsupported(config: Config, lay: Layout, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why no kernel supports the layer on a device, as a clause; None where one does."""
    if device.type not in KERNELS:
        return "not a GPU"
    why: str | None = KERNELS[device.type].reason(config.method, lay, dtype, device)
    return why


# ---- autograd ----


def skips_undefined(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """An autograd function whose backward runs only where a gradient came: as of PyTorch's own, none gives none.

    A backward of several gradients gets None for each that did not come.
    """
    return _changed(function, None)


def differentiated_once(
    name: str | Callable[[Any], str | None],
) -> Callable[[type[torch.autograd.Function]], type[torch.autograd.Function]]:
    """`skips_undefined` for a function that saves codes: they are no function of its inputs to autograd.

    Its backward raises a RuntimeError under ``create_graph=True``, whose derivatives would lack what goes through the
    codes; `name`, or what it returns for `ctx`, is what the message names. None: this call can be differentiated twice.
    """
    return lambda function: _changed(function, name)


def _changed(
    function: type[torch.autograd.Function], name: str | Callable[[Any], str | None] | None
) -> type[torch.autograd.Function]:
    run, run_back = function.forward, function.backward

    def forward(ctx: Any, *args: Any) -> Any:
        ctx.set_materialize_grads(False)
        return run(ctx, *args)

    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if all(g is None for g in grads):
            return (None,) * len(ctx.needs_input_grad)
        if torch.is_grad_enabled() and (what := name(ctx) if callable(name) else name) is not None:
            raise RuntimeError(
                f"hotrain: create_graph=True: {what!r} has no second derivative (its gradients are of rounded or "
                "low-rank tensors). Where no second derivative is taken, leave create_graph=True out; else "
                "hotrain.revert(model), or convert it with memory='linear', which leaves all between the layers exact, "
                "and with a filter_fn that leaves out the layers differentiated twice."
            )
        return run_back(ctx, *grads)

    function.forward, function.backward = staticmethod(forward), staticmethod(backward)  # type: ignore[method-assign]
    return function


def not_a_view(y: Tensor) -> Tensor:
    """The tensor, not marked as a view: autograd forbids in-place writes to a view that a custom function returns."""
    if not is_view(y):
        return y
    if type(y) is Tensor and not dispatch_modes():
        return y.data  # as fast as a detached view, and none
    found = torch.ops.aten._unsafe_view.default(y, y.shape)
    if type(found) is Tensor and found.stride() != y.stride():  # of one image, which is in channels-last by its strides
        found.as_strided_(y.shape, y.stride())
    return found


def _plain(t: Tensor) -> AbstractContextManager[object]:
    """No gradients and no autocast; in most backward passes both are off."""
    return _disabled(t) if torch.is_grad_enabled() or any_autocast() else nullcontext()


@contextmanager
def _disabled(t: Tensor) -> Iterator[None]:
    with torch.no_grad(), outside_autocast(t):
        yield


def apply(x: Tensor, w: Tensor, b: Tensor | None, call: Call, key: Key, origin: Origin | None = None) -> Tensor:
    """The result of a layer with the gradients of its method.

    Args:
        x: (*, I), or (B, C, H, W) or (C, H, W).
        w: (O, I), (I, O) when transposed, or (O, C/groups, kh, kw).
        b: (O,) or None.
        call: for this shape of x.
        key: of the draws of this step; an integer is the value of an int64.
        origin: of x, where backward can rematerialize it.
    """
    if call.config.kernels and isinstance(key, int):
        key = torch.full((), key, dtype=torch.int64, device=x.device)
    if call.config.geometry is None:
        return Linear.apply(x, w, b, call, key, origin)
    if x.dim() == 3:
        return Conv2d.apply(x[None], w, b, call, key, origin)[0]
    return Conv2d.apply(x, w, b, call, key, origin)


@differentiated_once(lambda ctx: ctx.call.config.name)
class Linear(torch.autograd.Function):
    """``y = x wᵀ + b`` with the two gradients of a method."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, call: Call, key: Key, origin: Origin | None
    ) -> Tensor:
        config, keeps = call.config, ctx.needs_input_grad[1] and origin is None
        exact = config.method.forward == "exact"
        x_cast, w_cast, b_cast = call.inputs(x, w, b)
        with nullcontext() if call.cast is None else outside_autocast(x):
            if exact:
                y = (_conv1d if config.transposed else F.linear)(x_cast, w_cast, b_cast)
                packed = call.pack(x_cast, key) if keeps else (None, None)
            else:
                y, packed = call.product(x_cast, w_cast, b_cast, key, keeps)
            y = not_a_view(y)  # with three axes it is one
        _save(ctx, call, key, origin, x, x_cast, w, packed)
        return y

    @staticmethod
    def backward(ctx: Any, g_y: Tensor) -> tuple[Tensor | None, ...]:
        call, shape = ctx.call, ctx.shape
        with _plain(g_y):
            w, key, packed, x = _saved(ctx, by_rows=True)
            if x is not None:
                packed = call.pack(x, key)
            needs = ctx.needs_input_grad[:3]
            g_x, g_w, g_b = call.gradients(g_y, w, packed, key, ctx.source, shape, ctx.w_dtype, needs)
            if g_x is not None:
                g_x = g_x.view(shape).to(ctx.x_dtype)
        return g_x, g_w, g_b, None, None, None


def _conv1d(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """The product of transformers' Conv1D, to the bit: w is (I, O)."""
    matrix = x.view(-1, x.shape[-1])
    y = matrix @ w if b is None else torch.addmm(b, matrix, w)
    return y.view(*x.shape[:-1], w.shape[1])


@differentiated_once(lambda ctx: ctx.call.config.name)
class Conv2d(torch.autograd.Function):
    """``y = conv2d(x, w) + b`` with the two gradients of a method."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, call: Call, key: Key, origin: Origin | None
    ) -> Tensor:
        geometry, keeps = call.config.geometry, ctx.needs_input_grad[1] and origin is None
        assert geometry is not None
        x_cast, w_cast, b_cast = call.inputs(x, w, b)
        with nullcontext() if call.cast is None else outside_autocast(x):
            multiplied = call.compiled and geometry.cuts and is_multiplied(x_cast, w_cast, b_cast)
            tokens = _tokens(x_cast, call.config) if multiplied or keeps else x_cast
            if multiplied:
                y = not_a_view(product_of_patches(tokens, w_cast, b_cast, keeps_channels_last(x_cast, w_cast)))
            else:
                y = geometry.forward(x_cast, w_cast, b_cast)
            packed = call.pack(tokens, key) if keeps else (None, None)
        _save(ctx, call, key, origin, x, x_cast, w, packed)
        ctx.w_shape, ctx.w_strides = w.shape, w.stride()
        return y

    @staticmethod
    def backward(ctx: Any, g_y: Tensor) -> tuple[Tensor | None, ...]:
        call, shape, needs = ctx.call, tuple(ctx.shape), ctx.needs_input_grad[:3]
        config = call.config
        with _plain(g_y):
            w, key, packed, x = _saved(ctx)
            if isinstance(x, Tensor):
                packed = call.pack(_tokens(x, config), key)
            if config.overlaps:
                g_x, g_w, g_b = call.gradients(g_y, w, packed, key, ctx.source, shape, ctx.w_dtype, needs)
            else:
                tokens, matrix = channels_last(g_y), None if w is None else w.flatten(1)
                lines = (*tokens.shape[:3], ctx.w_shape[1:].numel())
                g_x, g_w, g_b = call.gradients(tokens, matrix, packed, key, ctx.source, lines, ctx.w_dtype, needs)
                if g_x is not None:
                    g_x = patches_transposed(g_x.view(lines), shape, config.geometry)
            if g_x is not None:
                g_x = g_x.to(ctx.x_dtype)
            if g_w is not None:
                g_w = laid_as(g_w.view(ctx.w_shape), ctx.w_strides)
        return g_x, g_w, g_b, None, None, None


def _tokens(x: Tensor, config: Config) -> Tensor:
    """The rows that a convolution saves of x: its patches, or its positions where patches overlap."""
    assert config.geometry is not None
    return channels_last(x) if config.overlaps else patches(x, config.geometry)


def _save(
    ctx: Any, call: Call, key: Key, origin: Origin | None, x: Tensor, x_cast: Tensor, w: Tensor, packed: Packed
) -> None:
    """Save w (the parameter, no copy) where g_x needs it, the key, the codes, and the tensors of x's origin for g_w."""
    trained = ctx.needs_input_grad[1]
    origin = origin if trained else None  # not on ctx: its tensors must be freed when autograd frees them
    ctx.call, ctx.shape, ctx.x_dtype, ctx.w_dtype, ctx.dtype = call, x.shape, x.dtype, w.dtype, x_cast.dtype
    ctx.source = "" if origin is None else origin.recipe
    ctx.remake, ctx.coded = (None, None) if origin is None else (origin.remake, origin.coded)
    given = () if origin is None else origin.tensors
    word = torch.tensor(key, dtype=torch.int64, device="cpu") if call.config.draws and isinstance(key, int) else key
    saved = w if ctx.needs_input_grad[0] else None, word if call.config.draws else None
    ctx.save_for_backward(*saved, *packed, *given)
    call.note(x_cast, packed, ctx.source, trained, w.shape[0])


def _saved(ctx: Any, by_rows: bool = False) -> tuple[Tensor | None, Key, Packed, Tensor | kernels.Coded | None]:
    """What `_save` saved: w, the key, the codes, and x if it has an origin, or the codes of its rows if kernels run."""
    w, key, codes, scale, *given = ctx.saved_tensors
    if ctx.remake is None:
        return w, key, (codes, scale), None
    origin = ctx.source, given, ctx.shape, ctx.dtype
    x = ctx.coded(*origin) if by_rows and ctx.call.traced is None and ctx.call.config.kernels else None
    return w, key, (codes, scale), ctx.remake(*origin) if x is None else x
