"""Custom ops of converted layers for `torch.compile`.

`linear` and `conv2d` are one node each in a Dynamo graph. AOTAutograd decomposes them: their derivative is that of
`hotrain.autograd`'s functions, so the product, the casts and the bias stay PyTorch's own operators, which Inductor
may fuse and a checkpointing policy may name. The rest is opaque: `keep` or `forward` in forward, `linear_gradients` or
`conv2d_gradients` in backward, each a function of `hotrain.autograd` that eager code calls directly, and their parts by
codes, which passes of `compress` put in their place.

A layer's configuration is passed as its word (`hotrain.layer`), so that compiled code can be cached across processes.
Layers with equal words share one graph and differ in the tensors they pass; the words of the amax history, whose
address is the layer's own, tell which layer's record is written. A graph is specialized to one number of tokens, since
the tiles depend on it: another number is another compilation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy

from . import autograd
from .autograd import Call, Grads, Origin, Packed
from .casting import autocast_to
from .compress import rematerialize
from .compress.codes import coded, sloped, whole
from .compress.launcher import opaque
from .draws import layer_of, next_key
from .geometry import channels_last
from .layer import Config
from .layer_record import AmaxHistory, Ran
from .private import graph_task
from .quantize.integer import wide
from .saved import Format

_lib = torch.library.Library("hotrain", "DEF")


# ---- the operators that are differentiated ----


def _layer(
    x: Tensor, w: Tensor, b: Tensor | None, counter: Tensor | None, history: Tensor, config: str, recipe: str,
    given: list[Tensor | None],
) -> Tensor:  # fmt: skip
    """A layer's result; `recipe` and `given` are x's origin, filled in by `compress.interpose`, which sees the call."""
    found = Config.of(config)
    call = Call(found, found.layout_of(tuple(x.shape)), autocast_to(x.device.type), traced=history, compiled=True)
    key = None if counter is None else _pinned_key(counter)
    remake = whole if x.device.type in autograd.KERNELS else rematerialize.make
    return autograd.apply(x, w, b, call, key, Origin(recipe, tuple(given), remake, coded) if recipe else None)


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


for _name in ("linear", "conv2d"):
    _lib.define(
        f"{_name}(Tensor x, Tensor w, Tensor? b, Tensor(a!)? counter, Tensor history, str config, str recipe, "
        "Tensor?[] given) -> Tensor"
    )
    _lib.impl(_name, _layer, "CompositeImplicitAutograd")


# ---- the operators that stay ----


def _layer_with(words: Tensor) -> tuple[AmaxHistory, Ran]:
    """History and record of the layer of those words; a copy of them has a record that nobody reads."""
    layer = layer_of(words)
    if layer is None or layer.history is None:
        return AmaxHistory(words), Ran()
    layer.ran = replace(layer.ran)  # that of an eager step is its call's
    return layer.history, layer.ran


def _pair(packed: Packed, like: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scale as an op returns them: empty where there are none."""
    codes, scale = packed
    return like.new_empty(0) if codes is None else codes, like.new_empty(0) if scale is None else scale


def _keep(x: Tensor, key: Tensor | None, history: Tensor, config: str) -> tuple[Tensor, Tensor]:
    found, (amax, ran) = Config.of(config), _layer_with(history)
    packed = autograd.pack(x, key, found, found.layout(x.shape[:-1]), amax)
    ran.kept(x, packed, graph_task() != -1, found.fits(x.shape[:-1]))
    return _pair(packed, x)


def _keep_fake(x: Tensor, key: Tensor | None, history: Tensor, config: str) -> tuple[Tensor, Tensor]:
    found, columns = Config.of(config), int(x.shape[-1])
    lay, saved = found.layout(x.shape[:-1]), found.method.saved
    if found.kernels:
        shapes = autograd.KERNELS[x.device.type].kept_shapes(columns, lay, found.method, x.dtype)
    else:  # found with one row
        row = torch.zeros(1, columns, dtype=x.dtype, device="cpu")
        one = Format(saved, columns, x.dtype).keep(row if saved.bits is None else wide(row), 0)
        shapes = [([lay.rows, *t.shape[1:]] if t.dim() else [], t.dtype) for t in one]
    codes, *scale = (x.new_empty(shape, dtype=dtype) for shape, dtype in shapes)
    return _pair((codes, scale[0] if scale else None), x)


def _keep_from_codes(
    given: list[Tensor | None], recipe: str, shape: list[int], dtype: torch.dtype, key: Tensor | None, history: Tensor,
    config: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`_keep` of what `compress.codes.whole` makes of a recipe."""
    found, (amax, ran) = Config.of(config), _layer_with(history)
    x = (coded(recipe, given, shape, dtype) if found.kernels else None) or whole(recipe, given, shape, dtype)
    codes, scale = autograd.pack(x, key, found, found.layout(tuple(shape[:-1])), amax)
    ran.kept(x, (codes, scale), True, found.fits(tuple(shape[:-1])))
    assert codes is not None
    return _pair((codes, scale), codes)


def _keep_from_codes_fake(
    given: list[Tensor | None], recipe: str, shape: list[int], dtype: torch.dtype, key: Tensor | None, history: Tensor,
    config: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    first = given[0]
    assert first is not None
    return _keep_fake(first.new_empty(shape, dtype=dtype), key, history, config)


def _forward(
    x: Tensor, w: Tensor, b: Tensor | None, key: Tensor | None, history: Tensor, config: str, keeps: bool
) -> tuple[Tensor, Tensor, Tensor]:
    found, (amax, ran) = Config.of(config), _layer_with(history)
    y, packed = autograd.product(x, w, b, key, found, found.layout(x.shape[:-1]), amax, keeps)
    ran.kept(x, packed, graph_task() != -1, found.fits(x.shape[:-1]))
    return y, *_pair(packed, x)


def _forward_fake(
    x: Tensor, w: Tensor, b: Tensor | None, key: Tensor | None, history: Tensor, config: str, keeps: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty(*x.shape[:-1], w.shape[1 if Config.of(config).transposed else 0])
    return y, *(_keep_fake(x, key, history, config) if keeps else _pair((None, None), x))


def _note(ran: Ran, config: Config, product: str, codes: Tensor | None, source: str, needs: Sequence[bool]) -> None:
    """Record what this backward computes, for the report."""
    if codes is not None and config.method.saved.bits is None and config.method.grad_weight.tile == 1:
        ran.kept(codes, (codes,), False, None)  # x itself, saved without an op
    ran.step(config.method, config.kernels, product, source, not needs[1])


def _out(grads: Grads, g_y: Tensor, w_dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Gradients as an op returns them: contiguous, in g_y's dtype or in w's, empty if not needed."""
    dtypes = (g_y.dtype, w_dtype, w_dtype)
    return tuple(
        g_y.new_empty(0) if g is None else g.to(dtype).contiguous() for g, dtype in zip(grads, dtypes, strict=True)
    )


def _grad_codes_behind(
    g: Tensor, of_x: Tensor, scale_of_x: Tensor, name: str, form: str, side: Tensor | None, key: Tensor | None,
    history: Tensor, config: str, needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    """The codes that a layer's gradients need of what `activation_gradient` makes of g and the codes of x."""
    found, (amax, _) = Config.of(config), _layer_with(history)
    g_y = sloped(g, of_x, scale_of_x, name, form)
    if g_y is None:  # of other strides than the compiler said
        made, _ = torch.ops.hotrain.activation_gradient(g.contiguous(), of_x, scale_of_x, name, form, False)
        g_y = made.view(-1, made.shape[-1])
    lay, own = found.layout(g.shape[:-1]), (None, side)
    codes = autograd.KERNELS[g.device.type].grad_codes(g_y, own, found.method, lay, key, amax, needs)
    return tuple(g.new_empty(0) if part is None else part for part in codes)


def _grad_codes_of_parts(
    parts: list[Tensor], side: Tensor | None, key: Tensor | None, history: Tensor, config: str, needs: list[bool]
) -> tuple[Tensor, ...]:
    """The codes that a layer's gradients need of a g_y of three parts, each (*lead, O/3), side by side."""
    found, (amax, _), first = Config.of(config), _layer_with(history), parts[0]
    q, k, v = (part.reshape(-1, part.shape[-1]).contiguous() for part in parts)
    lay, kernels = found.layout(first.shape[:-1]), autograd.KERNELS[first.device.type]
    codes = kernels.grad_codes(kernels.Joined((q, k, v)), (None, side), found.method, lay, key, amax, needs)
    return tuple(first.new_empty(0) if part is None else part for part in codes)


def _grad_codes_of_parts_fake(
    parts: list[Tensor], side: Tensor | None, key: Tensor | None, history: Tensor, config: str, needs: list[bool]
) -> tuple[Tensor, ...]:
    joined = parts[0].new_empty(*parts[0].shape[:-1], len(parts) * parts[0].shape[-1])
    return _shapes_of_codes(joined, config, needs)


def _grad_codes_behind_fake(
    g: Tensor, of_x: Tensor, scale_of_x: Tensor, name: str, form: str, side: Tensor | None, key: Tensor | None,
    history: Tensor, config: str, needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    return _shapes_of_codes(g, config, needs)


def _shapes_of_codes(g_y: Tensor, config: str, needs: list[bool]) -> tuple[Tensor, ...]:
    found, kernels = Config.of(config), autograd.KERNELS[g_y.device.type]
    shapes = kernels.grad_shapes(g_y.shape[-1], found.layout(g_y.shape[:-1]), found.method, g_y.dtype, needs)
    return tuple(g_y.new_empty(0) if part is None else g_y.new_empty(part[0], dtype=part[1]) for part in shapes)


def _products_of_codes(
    parts: list[Tensor], w: Tensor | None, codes: Tensor | None, scale: Tensor | None, key: Tensor | None,
    history: Tensor, config: str, source: str, lead: list[int], dtype: torch.dtype, w_dtype: torch.dtype, outputs: int,
    columns: int, needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    """g_x and g_w of a Linear from what `grad_codes_behind`, or `_of_parts`, has returned before the sums."""
    found, (amax, ran) = Config.of(config), _layer_with(history)
    _note(ran, found, "tokens", codes, source, needs)
    present = [None if part.dim() == 1 and not part.numel() else part for part in parts]
    like, lay, kernels = parts[0 if needs[0] else 2], found.layout(tuple(lead)), autograd.KERNELS[parts[0].device.type]
    own, shape, to = (codes, scale), (outputs, columns), (dtype, w_dtype)
    grads = kernels.products([*present, None], w, own, found.method, lay, key, amax, needs, shape, to, found.transposed)
    return _out(grads, like.new_empty(0, dtype=dtype), w_dtype)


def _products_of_codes_fake(
    parts: list[Tensor], w: Tensor | None, codes: Tensor | None, scale: Tensor | None, key: Tensor | None,
    history: Tensor, config: str, source: str, lead: list[int], dtype: torch.dtype, w_dtype: torch.dtype, outputs: int,
    columns: int, needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    g_y = parts[0].new_empty(*lead, outputs, dtype=dtype)
    return _gradients_fake(g_y, w, codes, scale, key, history, config, source, w_dtype, columns, needs)


def _linear_gradients(
    g_y: Tensor, w: Tensor | None, codes: Tensor | None, scale: Tensor | None, key: Tensor | None, history: Tensor,
    config: str, source: str, w_dtype: torch.dtype, columns: int, needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    found, (amax, ran) = Config.of(config), _layer_with(history)
    _note(ran, found, "tokens", codes, source, needs)
    lay = found.layout(g_y.shape[:-1])
    grads = autograd.linear_gradients(g_y, w, (codes, scale), key, found, lay, amax, columns, w_dtype, needs)
    return _out(grads, g_y, w_dtype)


def _conv2d_gradients(
    g_y: Tensor, w: Tensor | None, codes: Tensor | None, scale: Tensor | None, key: Tensor | None, history: Tensor,
    config: str, source: str, w_dtype: torch.dtype, shape: list[int], needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    """With g_y and g_x channels-last, (B, H', W', O) and (B, H, W, C)."""
    found, (amax, ran) = Config.of(config), _layer_with(history)
    _note(ran, found, found.product(g_y.shape[-1]), codes, source, needs)
    lay = found.layout_of(tuple(shape))
    g_x, g_w, g_b = autograd.conv2d_gradients(
        g_y.permute(0, 3, 1, 2), w, (codes, scale), key, found, lay, amax, tuple(shape), w_dtype, needs
    )
    return _out((None if g_x is None else channels_last(g_x), g_w, g_b), g_y, w_dtype)


def _gradients_fake(
    g_y: Tensor, w: Tensor | None, codes: Tensor | None, scale: Tensor | None, key: Tensor | None, history: Tensor,
    config: str, source: str, w_dtype: torch.dtype, place: int | list[int], needs: list[bool],
) -> tuple[Tensor, ...]:  # fmt: skip
    found, outputs = Config.of(config), g_y.shape[-1]
    if isinstance(place, list):  # a convolution's: the shape of x
        assert found.geometry is not None
        g_x = g_y.new_empty(place[0], *place[2:], place[1])
        g_w = g_y.new_empty(outputs, place[1] // found.geometry.groups, *found.geometry.kernel)
    else:  # a Linear's: its columns
        g_x = g_y.new_empty(math.prod(g_y.shape[:-1]), place)
        g_w = g_y.new_empty((place, outputs) if found.transposed else (outputs, place))
    grads = g_x if needs[0] else None, g_w if needs[1] else None, g_y.new_empty(outputs) if needs[2] else None
    return _out(grads, g_y, w_dtype)


_OF_GRADIENTS = (
    "(Tensor g_y, Tensor? w, Tensor? codes, Tensor? scale, Tensor? key, Tensor history, str config, str source, "
    "ScalarType w_dtype, {} {}, bool[] needs) -> (Tensor, Tensor, Tensor)"
)
for _schema, _run, _fake in (
    ("keep(Tensor x, Tensor? key, Tensor history, str config) -> (Tensor, Tensor)", _keep, _keep_fake),
    (
        "keep_from_codes(Tensor?[] given, str recipe, int[] shape, ScalarType dtype, Tensor? key, Tensor history, "
        "str config) -> (Tensor, Tensor)",
        _keep_from_codes,
        _keep_from_codes_fake,
    ),
    (
        "forward(Tensor x, Tensor w, Tensor? b, Tensor? key, Tensor history, str config, bool keeps) "
        "-> (Tensor, Tensor, Tensor)",
        _forward,
        _forward_fake,
    ),
    ("linear_gradients" + _OF_GRADIENTS.format("int", "columns"), _linear_gradients, _gradients_fake),
    (
        "grad_codes_behind(Tensor g, Tensor of_x, Tensor scale_of_x, str name, str form, Tensor? side, Tensor? key, "
        "Tensor history, str config, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        _grad_codes_behind,
        _grad_codes_behind_fake,
    ),
    (
        "grad_codes_of_parts(Tensor[] parts, Tensor? side, Tensor? key, Tensor history, str config, bool[] needs) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        _grad_codes_of_parts,
        _grad_codes_of_parts_fake,
    ),
    (
        "products_of_codes(Tensor[] parts, Tensor? w, Tensor? codes, Tensor? scale, Tensor? key, Tensor history, "
        "str config, str source, int[] lead, ScalarType dtype, ScalarType w_dtype, int outputs, int columns, "
        "bool[] needs) -> (Tensor, Tensor, Tensor)",
        _products_of_codes,
        _products_of_codes_fake,
    ),
    ("conv2d_gradients" + _OF_GRADIENTS.format("int[]", "shape"), _conv2d_gradients, _gradients_fake),
):
    opaque(_schema, _fake, inlined=False)(_run)

linear, conv2d = torch.ops.hotrain.linear, torch.ops.hotrain.conv2d
