"""Custom ops of converted layers for `torch.compile`.

`linear` and `conv2d` are one node each in a Dynamo graph. AOTAutograd decomposes them: their derivative is that of
`hotrain.autograd`'s functions, so the product, the casts and the bias stay PyTorch's own operators, which Inductor
may fuse and a checkpointing policy may name. The rest is opaque: `keep` in forward and `linear_gradients` or
`conv2d_gradients` in backward run the kernels or the reference.

A layer's constants are passed as a string (`encode`), so that compiled code can be cached across processes. Layers with
equal strings share one graph and differ in the tensors they pass. A graph is specialized to one number of tokens,
since the tiles depend on it: another number is another compilation.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from . import autograd
from ._version import __version__
from .autograd import Grads, Needs, Step
from .backward import wide
from .compress.sharing import Origin
from .convolution import Geometry
from .draws import Draws, handle_of, in_backward, next_key, ran_of
from .method import GradInput, GradWeight, Method, Saved
from .saved import Format
from .transform.tokens import Grid, Layout

_lib = torch.library.Library("hotrain", "DEF")


def encode(method: Method, grid: Grid | None) -> str:
    """Method and grid as a string, with the version, so that compiled code of another version is not reused."""
    fields = dataclasses.asdict(method)
    del fields["knobs"], fields["automatic"]  # without effect once the number format is chosen
    return json.dumps([__version__, fields, None if grid is None else dataclasses.asdict(grid)])


@functools.lru_cache(maxsize=4096)
def decode(spec: str) -> tuple[Method, Grid | None]:
    """The method, without its knobs, and the grid of a string of `encode`."""
    _, fields, grid = json.loads(spec)
    parts = (GradInput(**fields["grad_input"]), GradWeight(**fields["grad_weight"]), Saved(**fields["saved"]))
    return Method(fields["name"], *parts, forward=fields["forward"]), None if grid is None else Grid(**grid)


@dataclass(frozen=True)
class TracedStep(Step):
    """A `Step` whose parts are custom ops.

    Attributes:
        tag: of the layer (`hotrain.draws.Draws`).
        spec: of `encode`.
        allowed: whether kernels may run it.
        source: the recipe of x where backward rematerializes it, else "".
    """

    tag: Tensor | None = None
    spec: str = ""
    allowed: bool = False
    source: str = ""

    def on(self, x: Tensor, lay: Layout | None) -> Step:
        return replace(self, served=self.allowed and self._is_served(x, lay))

    def keep(self, x: Tensor | None, lay: Layout) -> tuple[Tensor, ...]:
        key = self.key if isinstance(self.key, Tensor) else None
        kept = () if key is None else (key,)
        if x is None:
            return kept
        if self.method.saved.bits is None and self.method.grad_weight.tile == 1:
            return (*kept, x.reshape(-1, x.shape[-1]), x.new_empty(0))  # x itself: no operator may return its input
        return (*kept, *torch.ops.hotrain.keep(x, key, self.tag, self.spec, self.served))

    def keep_again(self, kept: tuple[Tensor, ...], x: Tensor, lay: Layout) -> tuple[Tensor, ...]:
        return (replace(self, key=kept[0]) if self.method.draws else self).keep(x, lay)

    def forward(
        self, x: Tensor, w: Tensor, b: Tensor | None, lay: Layout, keeps: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        key = self.key if isinstance(self.key, Tensor) else None
        y, codes, side = torch.ops.hotrain.forward(
            x, w, b, key, self.tag, self.spec, self.served, self.transposed, keeps
        )
        kept = () if key is None else (key,)
        return y, (*kept, codes, side) if keeps else kept

    def _take(self, kept: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(key, codes, scale) of what `keep` saved."""
        key, rest = (kept[0], kept[1:]) if self.method.draws else (None, kept)
        return (key, *rest) if rest else (key, None, None)  # type: ignore[return-value]

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
        key, codes, scale = self._take(kept)
        found = torch.ops.hotrain.linear_gradients(
            g_y, w, codes, scale, key, self.tag, self.spec, self.source, w_dtype, self.transposed, self.served, columns,
            list(needs),
        )  # fmt: skip
        return _where(needs, found)

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
        key, codes, scale = self._take(kept)
        fields = (getattr(geometry, field.name) for field in dataclasses.fields(geometry))
        found = torch.ops.hotrain.conv2d_gradients(
            g_y, w, codes, scale, key, self.tag, self.spec, self.source, w_dtype, list(shape), *_flat(*fields),
            list(needs),
        )  # fmt: skip
        return _where(needs, found)


def _where(needs: Sequence[bool], found: Sequence[Tensor]) -> Grads:
    """The gradients that are needed; the ops return empty tensors in place of the others."""
    g_x, g_w, g_b = (g if need else None for g, need in zip(found, needs, strict=True))
    return g_x, g_w, g_b


# --- What a layer calls while it is traced


def linear(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    layer: Draws,
    spec: str,
    random: bool,
    kernels: bool,
    transposed: bool = False,
) -> Tensor:
    """`hotrain.functional.linear` under Dynamo.

    The origin of x is filled in by `compress.interpose`, which intercepts the call.

    Args:
        x: (*, I).
        w: (O, I), or (I, O) when `transposed`.
        b: (O,) or None.
        layer: draws of the layer, placed on x's device.
        spec: of `encode`.
        random: whether the method draws, so that the counter is incremented.
        kernels: whether kernels may run. An argument, since caches assume that a graph depends only on its arguments.
        transposed: whether w is (I, O).

    Returns:
        (*, O).
    """
    counter = layer.counter if random else None
    return torch.ops.hotrain.linear(x, w, b, counter, layer.tag, spec, kernels, "", [], transposed)


def conv2d(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    layer: Draws,
    spec: str,
    random: bool,
    kernels: bool,
    stride: Sequence[int],
    padding: Sequence[int] | str,
    dilation: Sequence[int],
    groups: int,
    padding_mode: str,
) -> Tensor:
    """`hotrain.functional.conv2d` under Dynamo: x (B, C, H, W) or (C, H, W); other arguments as of `linear`."""
    batch = x if x.dim() == 4 else x[None]
    geometry = _flat(w.shape[2:], stride, padding, dilation, groups, padding_mode)
    counter = layer.counter if random else None
    y = torch.ops.hotrain.conv2d(batch, w, b, counter, layer.tag, spec, kernels, "", [], *geometry)
    return y if x.dim() == 4 else y[0]


def _flat(
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int] | str,
    dilation: Sequence[int],
    groups: int,
    padding_mode: str,
) -> tuple[list[int], list[int], list[int], list[int], str, int, str]:
    """The fields of a `Geometry` as an op's arguments; `_geometry` is the inverse."""
    word, pads = (padding, [0, 0]) if isinstance(padding, str) else ("", list(padding))
    return list(kernel), list(stride), list(dilation), pads, word, groups, padding_mode


def _geometry(
    kernel: list[int], stride: list[int], dilation: list[int], pads: list[int], word: str, groups: int, mode: str
) -> Geometry:
    (kh, kw), (sh, sw), (dh, dw), (top, left) = kernel, stride, dilation, pads
    return Geometry((kh, kw), (sh, sw), word or (top, left), (dh, dw), groups, mode)


_GEOMETRY = "int[] kernel, int[] stride, int[] dilation, int[] pads, str padding, int groups, str padding_mode"


def _step(
    counter: Tensor | None, tag: Tensor, spec: str, kernels: bool, recipe: str, given: Sequence[Tensor | None],
    transposed: bool = False, name: str = "linear",
) -> TracedStep:  # fmt: skip
    method, grid = decode(spec)
    key = 0 if counter is None else _pinned_key(counter)
    origin = Origin(recipe, tuple(given)) if recipe else None
    return TracedStep(
        method, key, grid, transposed, name, origin=origin, tag=tag, spec=spec, allowed=kernels, source=recipe
    )


def _pinned_key(counter: Tensor) -> Tensor:
    """The next key, marked as MUST_SAVE, since backward cannot recompute it: the counter has been incremented by then.

    The partitioner counts the key as computed in forward because `next_key` writes it into the counter's tensor.
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # only where the compiler runs already

    key, tracing = next_key(counter), get_proxy_mode()
    if tracing is not None:
        last = next(n for n in reversed(tracing.tracer.graph.nodes) if n.target is torch.ops.aten.bitwise_xor.Tensor)
        last.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # whatever a checkpoint's policy said
    return key


# --- The operators that are differentiated


_lib.define(
    "linear(Tensor x, Tensor w, Tensor? b, Tensor(a!)? counter, Tensor tag, str spec, bool kernels, str recipe, "
    "Tensor?[] given, bool transposed) -> Tensor"
)
_lib.define(
    "conv2d(Tensor x, Tensor w, Tensor? b, Tensor(a!)? counter, Tensor tag, str spec, bool kernels, str recipe, "
    f"Tensor?[] given, {_GEOMETRY}) -> Tensor"
)


def _linear(
    x: Tensor, w: Tensor, b: Tensor | None, counter: Tensor | None, tag: Tensor, spec: str, kernels: bool,
    recipe: str, given: list[Tensor | None], transposed: bool,
) -> Tensor:  # fmt: skip
    return autograd.Linear.apply(x, w, b, _step(counter, tag, spec, kernels, recipe, given, transposed))


def _conv2d(
    x: Tensor, w: Tensor, b: Tensor | None, counter: Tensor | None, tag: Tensor, spec: str, kernels: bool,
    recipe: str, given: list[Tensor | None], kernel: list[int], stride: list[int], dilation: list[int],
    pads: list[int], padding: str, groups: int, padding_mode: str,
) -> Tensor:  # fmt: skip
    geometry = _geometry(kernel, stride, dilation, pads, padding, groups, padding_mode)
    step = _step(counter, tag, spec, kernels, recipe, given, name="conv2d")
    return autograd.Conv2d.apply(x, w, b, geometry, step)


_lib.impl("linear", _linear, "CompositeImplicitAutograd")
_lib.impl("conv2d", _conv2d, "CompositeImplicitAutograd")


# --- The operators that stay


def _kept_shapes(method: Method, lay: Layout, columns: int, dtype: torch.dtype) -> list[tuple[list[int], torch.dtype]]:
    """Shapes and dtypes of what `Format.keep` saves of such rows, found with one row."""
    row = torch.zeros(1, columns, dtype=dtype if method.saved.bits is None else wide(dtype))
    found = Format(method.saved, columns, dtype).keep(row, 0)
    return [([lay.rows, *t.shape[1:]] if t.dim() else [], t.dtype) for t in found]


def _as_pair(kept: tuple[Tensor, ...], like: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scale, the latter empty where there is none: an op has a fixed number of outputs."""
    codes, *scale = kept
    return codes, scale[0] if scale else like.new_empty(0)


_lib.define("keep(Tensor x, Tensor? key, Tensor tag, str spec, bool served) -> (Tensor, Tensor)")


def _runtime_step(key: Tensor | None, tag: Tensor | None, spec: str, served: bool, transposed: bool = False) -> Step:
    """The step that an op runs by the kernels or by the reference."""
    method, grid = decode(spec)
    if served:
        assert tag is not None
        return Step(method, tag if key is None else key, grid, transposed, handle=handle_of(tag), served=True)
    return Step(method, 0 if key is None else int(key) & ((1 << 64) - 1), grid, transposed)


def _keep(x: Tensor, key: Tensor | None, tag: Tensor, spec: str, served: bool) -> tuple[Tensor, Tensor]:
    step = _runtime_step(key, tag, spec, served)
    kept = step.keep(x, step.layout(x.shape[:-1]))
    kept = kept if key is None else kept[1:]
    ran_of(tag).kept(x, kept, in_backward())
    return _as_pair(kept, x)


def _keep_fake(x: Tensor, key: Tensor | None, tag: Tensor, spec: str, served: bool) -> tuple[Tensor, Tensor]:
    method, grid = decode(spec)
    lay, columns = Step(method, 0, grid).layout(x.shape[:-1]), int(x.shape[-1])
    kernels = autograd.kernels_for(x.device) if served else None
    if kernels is not None:
        shapes = kernels.kept_shapes(columns, lay, method, x.dtype)
    else:
        shapes = _kept_shapes(method, lay, columns, x.dtype)
    kept = tuple(x.new_empty(shape, dtype=dtype) for shape, dtype in shapes)
    return _as_pair(kept, x)


_lib.define(
    "forward(Tensor x, Tensor w, Tensor? b, Tensor? key, Tensor tag, str spec, bool served, bool transposed, "
    "bool keeps) -> (Tensor, Tensor, Tensor)"
)


def _forward(
    x: Tensor, w: Tensor, b: Tensor | None, key: Tensor | None, tag: Tensor, spec: str, served: bool, transposed: bool,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    step = _runtime_step(key, tag, spec, served, transposed)
    y, kept = step.forward(x, w, b, step.layout(x.shape[:-1]), keeps)
    kept = kept if key is None else kept[1:]
    ran_of(tag).kept(x, kept, in_backward())
    return (y, *_as_pair(kept, x)) if keeps else (y, x.new_empty(0), x.new_empty(0))


def _forward_fake(
    x: Tensor, w: Tensor, b: Tensor | None, key: Tensor | None, tag: Tensor, spec: str, served: bool, transposed: bool,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    y = x.new_empty(*x.shape[:-1], w.shape[1 if transposed else 0])
    return (y, *_keep_fake(x, key, tag, spec, served)) if keeps else (y, x.new_empty(0), x.new_empty(0))


_lib.define(
    "linear_gradients(Tensor g_y, Tensor? w, Tensor? codes, Tensor? scale, Tensor? key, Tensor tag, str spec, "
    "str source, ScalarType w_dtype, bool transposed, bool served, int columns, bool[] needs) "
    "-> (Tensor, Tensor, Tensor)"
)
_lib.define(
    "conv2d_gradients(Tensor g_y, Tensor? w, Tensor? codes, Tensor? scale, Tensor? key, Tensor tag, str spec, "
    "str source, ScalarType w_dtype, int[] shape, "
    f"{_GEOMETRY}, bool[] needs) -> (Tensor, Tensor, Tensor)"
)


def _kept_of(key: Tensor | None, codes: Tensor | None, scale: Tensor | None, step: Step) -> tuple[Tensor, ...]:
    """What `Step.keep` returned, from an op's arguments."""
    kept: tuple[Tensor, ...] = () if key is None else (key,)
    if codes is not None and scale is not None:
        alone = step.method.saved.bits is None and not step.served
        kept = (*kept, codes) if alone else (*kept, codes, scale)
    return kept


def _note(step: Step, tag: Tensor, codes: Tensor | None, source: str, needs: Sequence[bool]) -> None:
    """Record what this backward computes, for the report."""
    ran = ran_of(tag)
    if codes is not None and step.method.saved.bits is None and step.method.grad_weight.tile == 1:
        ran.kept(codes, (codes,), False)  # x itself, saved without an op
    ran.step(step.method, step.served, source, not needs[1])


def _out(grads: Grads, g_y: Tensor, w_dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Gradients as an op returns them: contiguous, in g_y's dtype or in w's, empty if not needed."""
    dtypes = (g_y.dtype, w_dtype, w_dtype)
    return tuple(
        g_y.new_empty(0) if g is None else g.to(dtype).contiguous() for g, dtype in zip(grads, dtypes, strict=True)
    )


def _linear_gradients(
    g_y: Tensor, w: Tensor | None, codes: Tensor | None, scale: Tensor | None, key: Tensor | None, tag: Tensor,
    spec: str, source: str, w_dtype: torch.dtype, transposed: bool, served: bool, columns: int, needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    step = _runtime_step(key, tag, spec, served, transposed)
    kept, lay = _kept_of(key, codes, scale, step), step.layout(g_y.shape[:-1])
    _note(step, tag, codes, source, needs)
    grads = step.gradients(g_y, w, kept, columns, lay, w_dtype, (needs[0], needs[1], needs[2]))
    return _out(grads, g_y, w_dtype)


def _linear_gradients_fake(
    g_y: Tensor, w: Tensor | None, codes: Tensor | None, scale: Tensor | None, key: Tensor | None, tag: Tensor,
    spec: str, source: str, w_dtype: torch.dtype, transposed: bool, served: bool, columns: int, needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    rows, outputs = math.prod(g_y.shape[:-1]), g_y.shape[-1]
    weight = g_y.new_empty((columns, outputs) if transposed else (outputs, columns))
    grads = (g_y.new_empty(rows, columns), weight, g_y.new_empty(outputs))
    return _out(_where(needs, grads), g_y, w_dtype)


def _conv2d_gradients(
    g_y: Tensor, w: Tensor | None, codes: Tensor | None, scale: Tensor | None, key: Tensor | None, tag: Tensor,
    spec: str, source: str, w_dtype: torch.dtype, shape: list[int], kernel: list[int], stride: list[int],
    dilation: list[int], pads: list[int], padding: str, groups: int, padding_mode: str, needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    step = _runtime_step(key, None, spec, served=False)
    _note(step, tag, codes, source, needs)
    geometry = _geometry(kernel, stride, dilation, pads, padding, groups, padding_mode)
    batch, channels, height, width = shape
    grads = step.conv_gradients(
        g_y, w, _kept_of(key, codes, scale, step), (batch, channels, height, width), geometry,
        w_dtype, (needs[0], needs[1], needs[2]),
    )  # fmt: skip
    return _out(grads, g_y, w_dtype)


def _conv2d_gradients_fake(
    g_y: Tensor, w: Tensor | None, codes: Tensor | None, scale: Tensor | None, key: Tensor | None, tag: Tensor,
    spec: str, source: str, w_dtype: torch.dtype, shape: list[int], kernel: list[int], stride: list[int],
    dilation: list[int], pads: list[int], padding: str, groups: int, padding_mode: str, needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    outputs = g_y.shape[1]
    weight = g_y.new_empty(outputs, shape[1] // groups, *kernel)
    grads = (g_y.new_empty(shape), weight, g_y.new_empty(outputs))
    return _out(_where(needs, grads), g_y, w_dtype)


for _name, _run, _fake in (
    ("keep", _keep, _keep_fake),
    ("forward", _forward, _forward_fake),
    ("linear_gradients", _linear_gradients, _linear_gradients_fake),
    ("conv2d_gradients", _conv2d_gradients, _conv2d_gradients_fake),
):
    _lib.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hotrain::{_name}", _fake, lib=_lib)
