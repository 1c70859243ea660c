"""Model conversion: `convert` gives a model's layers the gradients of a method, `revert` undoes it.

A layer is converted by changing its class: parameters, state_dict keys, hooks and isinstance checks stay. Every
Linear and convolution of the model appears in the report, as converted, or as exact with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import ops
from .compress.checkpointing import blocks, keep_all, recompute
from .compress.interpose import unwrap, wrap
from .compress.offload import keep_on_device, offload
from .compress.operators import share_inputs
from .compress.rematerialize import describe, saved_by_reader
from .compress.report import Buffers
from .draws import Draws
from .functional import FLOATS, as_method
from .grids import grid_at, token_grids
from .layer_record import Ran
from .method import NUMBERS, Method
from .nn import HadamardLinear
from .nn.activation import PLANNED, BitReLU
from .nn.conv import ConvertedConv2d
from .nn.state import ATTRIBUTE, REVERTED, LayerState, layer_state, layer_states
from .plans import PLANS, Point
from .presets import DEFAULT
from .private import compiled_part, warn_of_missing
from .tables import bytes_text, parse_bytes
from .transform.tokens import Grid

for _operator in (ops.linear, ops.conv2d):
    share_inputs(_operator)

FilterFn = Callable[[nn.Module, str], bool]

SMALLEST = 32  # in- or output channels (times kernel size) below which a layer has nothing to gain

_ROOM = f"{__package__}.nn."  # the package with the classes of converted layers
_UNCALLED = "no training forward has called it (its weight may be used without calling the layer)"
_WRAPPERS = ("base_model", "model", "module", "base_layer", "_orig_mod", "_fsdp_wrapped_module")
_HEADS = ("head", "head_dist", "fc", "classifier", "lm_head", "score", "cls", "heads")


@dataclass(frozen=True)
class ConvertedRow:
    """A converted layer.

    Attributes:
        name: fully qualified.
        method: with the number format chosen for the device of the weight.
        ran: what the last training step did.
    """

    name: str
    method: Method
    ran: Ran = field(compare=False)

    @property
    def saved(self) -> list[tuple[str, int]]:
        """(dtype, bytes) of each tensor that one call of the layer alone keeps alive until backward: codes and scales
        of its input, and the key of its draws. Empty before the first training step."""
        if self.ran.method is None:
            return []
        key = [("int64", 8)] if self.ran.method.draws else []
        return [*self.ran.shapes, *saved_by_reader(self.ran.source, self.ran.elements), *key]

    @property
    def saved_bytes(self) -> int:
        """The bytes of `saved`."""
        return sum(size for _, size in self.saved)

    def __str__(self) -> str:
        if self.ran.method is None:
            return str(self.method)
        g_x, g_w, x = formats(self.ran)
        of = "" if not self.ran.exact_bytes or self.ran.frozen else f" of {bytes_text(self.ran.exact_bytes)}"
        return f"{self.method.name}  g_x:{g_x}  g_w:{g_w}  x:{x}, {bytes_text(self.saved_bytes)}{of}"


@dataclass(frozen=True)
class KeptRow:
    """A layer that stays exact, with the reason."""

    name: str
    reason: str


@dataclass
class ConversionReport:
    """What happened to each layer; ``str(report)`` prints it.

    `converted` and `kept` are up to date: a layer that a training forward found unsuited, or did not call, moves from
    one to the other, with its reason.

    Attributes:
        method: as requested.
        kept_rows: layers that `convert` left exact, with the reason; `kept` has those that training found, too.
        layers: name and state of each converted layer.
        buffers: the other compressed activations, from the first training forward on; None with ``memory="linear"``.
        plan: of `convert`.
        activations: names of the ReLUs that save 1 bit per element; their gradient is exact.
        times: (exact, converted), ms of forward and backward, measured by `hotrain.compile`.
        point: that the model follows, where `convert` was given one.
    """

    method: Method
    kept_rows: list[KeptRow] = field(default_factory=list)
    layers: list[tuple[str, LayerState]] = field(default_factory=list)
    activations: list[str] = field(default_factory=list)
    buffers: Buffers | None = None
    plan: str = "speed"
    times: tuple[float, float] | None = None
    point: Point | None = None
    _totals: tuple[int, int] | None = field(default=None, init=False, repr=False, compare=False)

    def _rows(self) -> Iterator[ConvertedRow | KeptRow]:
        trained = any(state.reached for _, state in self.layers)
        for name, state in self.layers:
            if state.fallback is not None:
                yield KeptRow(name, state.fallback)
            elif trained and not state.reached:
                yield KeptRow(name, _UNCALLED)
            else:
                yield ConvertedRow(name, state.running, state.ran)

    @property
    def converted(self) -> list[ConvertedRow]:
        """The layers that follow the method."""
        return [row for row in self._rows() if isinstance(row, ConvertedRow)]

    @property
    def kept(self) -> list[KeptRow]:
        """The layers that stay exact."""
        return self.kept_rows + [row for row in self._rows() if isinstance(row, KeptRow)]

    def ran(self) -> list[dict[str, Any]]:
        """What the layers did in their last training step, as recorded by the layers themselves.

        Returns:
            One dict for each group of layers that did the same:

            - ``layers``: how many;
            - ``method``, ``g_x``, ``g_w``: the preset and the formats in force; ``exact`` for layers that stay exact,
              ``g_x=None`` for layers that no step has reached;
            - ``x``: the format of the saved input; ``shared: …`` where backward rematerializes it from the saved
              activation of the preceding op;
            - ``kernels``: whether Triton kernels ran, else the reference in plain PyTorch;
            - ``bytes``: saved by the layers themselves of their inputs, for one call of each; None for exact layers;
            - ``exact_bytes``: of the same inputs without hotrain; None for exact layers.
        """
        groups: dict[tuple[Any, ...], dict[str, Any]] = {}
        rows: list[ConvertedRow | KeptRow] = [*self.converted, *self.kept]
        for row in rows:
            sizes: tuple[int | None, int | None] = (None, None)
            if isinstance(row, KeptRow):
                what: tuple[Any, ...] = ("exact", "exact", "exact", "exact", False)
            elif row.ran.method is None:
                what = (row.method.name, None, None, None, False)
            else:
                what = (row.method.name, *formats(row.ran), row.ran.kernels)
                sizes = row.saved_bytes, row.ran.exact_bytes
            names = ("method", "g_x", "g_w", "x", "kernels")
            first: dict[str, Any] = {"layers": 0, **dict(zip(names, what, strict=True)), "bytes": None}
            group = groups.setdefault(what, {**first, "exact_bytes": None})
            group["layers"] += 1
            for key, size in zip(("bytes", "exact_bytes"), sizes, strict=True):
                if size is not None:
                    group[key] = (group[key] or 0) + size
        return list(groups.values())

    def totals(self) -> tuple[int | None, int] | None:
        """Bytes that the whole model saves between forward and backward of the first batch.

        Returns:
            (now, exact). Both are computed from shapes (`hotrain.predicted_bytes`), which is exact in eager mode; of
            compiled graphs *now* is measured on the graphs, None where a compiler's cache hid it. None instead of the
            pair before a training forward, and for a model that cannot run on fake tensors or whose inputs were not
            recorded (``memory="linear"``).
        """
        example = None if self.buffers is None else self.buffers.example
        model = None if example is None else example.model()
        if self.buffers is None or example is None or model is None:
            return None
        if self._totals is None:
            from .audit.predicted import before_and_now

            try:
                self._totals = before_and_now(model, example, revert)
            except ValueError:
                return None
        exact, now = self._totals
        if self.buffers.uncut:
            return None, exact
        return (sum(self.buffers.graphs) if self.buffers.graphs else now), exact

    def __str__(self) -> str:
        converted, kept = self.converted, self.kept
        rows = [(row.name, str(row)) for row in converted]
        rows += [(row.name, f"exact: {row.reason}") for row in kept]
        width = max((len(name) for name, _ in rows), default=0)
        methods = ", ".join(dict.fromkeys(row.method.name for row in converted)) or self.method.name
        head = f"hotrain: {len(converted)} layers converted to {methods}, {len(kept)} kept exact"
        if self.activations:
            head += f", {len(self.activations)} ReLUs save 1 bit per element"
        if self.point is not None:
            recomputed = len(self.point.recomputed)
            head += f"\n  {self.point}" + (f"; {recomputed} blocks recompute" if recomputed else "")
        if self.times is not None:
            head += f"\n  forward and backward: {self.times[1]:.1f} ms, {self.times[0]:.1f} ms before (exact, eager)"
        totals = self.totals()
        if totals is not None and totals[0] is not None:
            share = totals[0] / max(totals[1], 1)
            head += f"\n  kept for backward: {bytes_text(totals[0])}, exact keeps {bytes_text(totals[1])} ({share:.2f})"
        lines = [head, *self._summary(), *(f"  {name:<{width}}  {what}" for name, what in rows)]
        return "\n".join(lines + ([] if self.buffers is None else [str(self.buffers)]))

    def _summary(self) -> list[str]:
        """One line per group of layers that did the same, once a step has run."""
        return [f"  {line_of(group)}" for group in self.ran() if group["g_x"] not in (None, "exact")]


def line_of(group: dict[str, Any]) -> str:
    """A group of `ConversionReport.ran` as text."""
    count = f"{group['layers']} layer{'s' if group['layers'] != 1 else ''}"
    if group["g_x"] is None:
        return f"{count}: {group['method']}, not run yet"
    if group["g_x"] == "exact" and group["x"] == "exact":
        return f"{count}: exact"
    by = "Triton kernels" if group["kernels"] else "plain PyTorch"
    size = f"{bytes_text(group['bytes'])} of {bytes_text(group['exact_bytes'])}"
    return f"{count}: g_x {group['g_x']}, g_w {group['g_w']}, x {group['x']} ({size}), {by}"


def formats(ran: Ran) -> tuple[str, str, str]:
    """(g_x, g_w, x) of a step that ran, in the notation of ``str(method)``."""
    method = ran.method
    assert method is not None
    g_x = str(method.grad_input).removeprefix("g_x:")
    if method.grad_input.number == "int" and method.grad_input.bits:
        g_x = g_x.replace("/auto", f"/{method.grad_input.scale_axis}")
    g_w = "none: the weight is frozen" if ran.frozen else str(method.grad_weight).removeprefix("g_w:")
    x = "nothing" if ran.frozen else str(method.saved).removeprefix("saved:")
    if ran.recomputed:
        return g_x, g_w, f"{x}, made in backward"
    return g_x, g_w, f"shared: {describe(ran.source)}" if ran.source else x


def convert(
    model: nn.Module,
    method: str | Method = DEFAULT,
    *,
    filter_fn: FilterFn | None = None,
    grid: Grid | tuple[int, int] | None = None,
    prefix_tokens: int = 0,
    dense_prefix: bool = True,
    number: str | None = None,
    forward: str | None = None,
    plan: str | Point = "speed",
    memory: str | None = None,
) -> ConversionReport:
    """Give the model's Linear and convolution layers the training gradients of `method`, in place.

    ReLU modules, whose output PyTorch saves for the ReLU and the next layer at once, save 1 bit per element instead
    where the method saves less than x; their gradient stays exact. (For images on a GPU only with ``plan="memory"``:
    else the next convolution stays exact and saves that output.) Converting again changes the method of the layers
    that the call selects.

    Args:
        model: any `torch.nn.Module` that is not compiled yet.
        method: a preset's name or a `hotrain.Method`. The default `hq8` is full rank in 8 bits, with the activations
            between the layers compressed.
        filter_fn: (module, fully qualified name) → whether to convert. It replaces the default exclusions (the
            classification head, layers under 32 channels, adapters, 2-D inputs).
        grid: (height, width) of the patches of a token sequence, for models where it cannot be detected
            (`hotrain.grids`).
        prefix_tokens: how many class or register tokens precede the patches of `grid`.
        dense_prefix: keep those tokens exact in g_w; False puts them into the tiles with the rest.
        number: number format: ``"int"``, ``"e4m3"``, ``"e5m2"`` or ``"auto"``: e4m3 where the device has fp8 matrix
            units, else integers (`Method.override`). None is the method's own: ``"auto"`` for `hq8` and
            `hot-unbiased`, as published for the others. The report states the choice.
        forward: product of Linear layers: ``"exact"``, or of ``"fp8"`` or ``"int8"`` codes (`hotrain.forward`). None
            is the method's own, which is exact in all presets.
        plan: ``"speed"`` keeps those layers exact that would be slower on a GPU, measured at their first forward there
            (`hotrain.planning`); ``"graphs"`` measures without launch overhead, for models that run as CUDA graphs
            (``torch.compile(mode="reduce-overhead")``); ``"memory"`` converts all layers. Without a GPU all are
            converted. A `Point` of `hotrain.frontier` has its own method and plan, recomputes blocks or offloads; it
            takes no other argument, and undoes what was converted before.
        memory: which saved activations are compressed: ``"linear"``, those of converted layers; ``"block"``, those of
            activation functions, norms, attention, dropout, products, pooling and exact layers as well
            (`hotrain.compress`): everything that is called while the model runs forward. None is the method's own.

    Returns:
        A report with one row per layer.

    Raises:
        TypeError: the model is no module.
        ValueError: the method is unknown, the grid is bad, the model is compiled already or has layers that were
            converted with another plan, no layer matched (with a `filter_fn`, or with ``memory="linear"``), or a point
            was measured on another device or PyTorch, or of another model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"hotrain.convert: the model is a {type(model).__name__}; accepted is a torch.nn.Module")
    warn_of_missing()
    if isinstance(plan, Point):
        others = (method, filter_fn, grid, prefix_tokens, dense_prefix, number, forward, memory)
        if others != (DEFAULT, None, None, 0, True, None, None, None):
            raise ValueError(
                f"hotrain.convert: plan {plan.name!r} has all that it needs; leave out the other arguments"
            )
        return _follow(model, plan)
    method = as_method(method)
    if number not in (numbers := ("auto", None, *NUMBERS)):
        raise ValueError(f"hotrain.convert: number={number!r} is not one of {', '.join(map(repr, numbers))}")
    if plan not in PLANS:
        raise ValueError(f"hotrain.convert: plan={plan!r} {_no_plan(plan)}")
    asked = {"forward": forward, "memory": memory, "number": number}
    method = method.override(**{name: value for name, value in asked.items() if value is not None})
    _refuse_compiled(model)
    report = ConversionReport(method, plan=plan)
    if method.is_exact:
        report.kept_rows = [KeptRow(name, "method exact") for name, _, _ in _layers(model)]
        revert(model)
        if method.memory == "block":
            report.buffers = wrap(model)  # whoever asks for this asks for memory: no plan keeps a tensor exact
        return report
    grids = {} if grid is not None else token_grids(model)
    everywhere = _as_grid(grid, prefix_tokens)
    chosen: list[tuple[str, nn.Module, type[nn.Module]]] = []
    for name, module, reason in _layers(model):
        if filter_fn is not None and not filter_fn(module, name):
            reason = reason or "excluded by filter_fn"
        elif filter_fn is None and reason is None:
            reason = _default_reason(model, name, module)
        if reason is None:
            reason = "weight is sparse" if module.weight.layout != torch.strided else None
        target = _target(module)
        state = layer_state(module)
        if reason is not None and state is not None:
            report.layers.append((name, state))  # converted by an earlier call, and stays so
            if state.plan != plan:
                raise ValueError(
                    f"hotrain.convert: {name!r} was converted with plan={state.plan!r} and stays so, this call has "
                    f"plan={plan!r}; hotrain.revert(model) first, or give the same plan"
                )
        elif reason is not None or target is None:
            report.kept_rows.append(KeptRow(name, reason or f"no Hadamard layer for {type(module).__name__}"))
        else:
            chosen.append((name, module, target))
    # Any model has activations between its layers to compress; a filter that matches nothing is a mistake.
    if not chosen and (filter_fn is not None or method.memory != "block"):
        why = (
            "\n".join(f"  {row.name}: {row.reason}" for row in report.kept_rows[:12]) or "  it has no Linear or Conv2d"
        )
        raise ValueError(
            f"hotrain.convert: no layer of {type(model).__name__} matched:\n{why}\n"
            "Pass filter_fn=lambda module, name: ... to choose layers yourself; "
            'convert(model, "exact", memory="block") compresses only the activations between them.'
        )
    for name, module, target in chosen:
        place = everywhere or grid_at(name, grids)
        if place is not None and not dense_prefix:
            place = Grid(place.height, place.width, place.prefix, dense_prefix=False)
        state = layer_state(module)
        label = name or type(module).__name__
        if state is None:
            state = LayerState(label, method, place, filter_fn is not None)
        else:
            state.name, state.chosen, state.fallback = label, filter_fn is not None, None
            state.draws.layer = Draws.of(label).layer
        state.follow(method, place, plan)
        state.transposed = getattr(target, "transposed", False)
        weight = module.weight
        assert isinstance(weight, Tensor)
        state.choose_numbers(weight.device)
        module.__class__ = target
        module.__dict__[ATTRIBUTE] = state
        report.layers.append((name, state))
    if method.memory == "block":
        report.buffers = _wrapped(model, plan)
    else:
        unwrap(model)
    for _, state in layer_states(model):
        state.origins = None if report.buffers is None else report.buffers.origins
    if method.memory == "block":
        _revert_activations(model)  # BitReLUs of an earlier conversion: the mode compresses all ReLUs
    elif method.compresses:
        near = None if filter_fn is None else [name for name, _, _ in chosen]
        report.activations = _convert_activations(model, near, plan != "memory")
    return report


def _no_plan(plan: Any) -> str:
    """What is said of a plan that is none: a budget is met by measuring, which needs a batch."""
    try:
        parse_bytes(str(plan))
    except ValueError:
        return f"is not one of {', '.join(map(repr, PLANS))}, or a point of hotrain.frontier"
    return (
        "is a memory budget, and there is no batch to measure what fits: point = hotrain.frontier(model, batch)"
        f".best({plan!r}) finds the fastest that does, and convert(model, plan=point) takes it"
    )


def _follow(model: nn.Module, point: Point) -> ConversionReport:
    _refuse_compiled(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    point.check(device)
    found = blocks(model)
    if missing := [name for name in point.recomputed if name not in found]:
        raise ValueError(
            f"hotrain.convert: plan {point.name!r} recomputes {missing[0]!r}, which is no block of this "
            f"{type(model).__name__}; it was measured with another model"
        )
    revert(model)
    report = convert(model, "exact" if point.method is None else point.method, plan=point.plan)
    recompute({name: found[name] for name in point.recomputed})
    if point.offload:
        offload(model)
    report.point = point
    return report


def _wrapped(model: nn.Module, plan: str) -> Buffers:
    buffers = wrap(model)
    root = buffers.root
    buffers.must_not_lose = plan != "memory"

    def gains() -> float:
        alive = root()
        return 0.0 if alive is None else sum(state.gain() for _, state in layer_states(alive))

    buffers.gains = gains
    return buffers


def _refuse_compiled(model: nn.Module) -> None:
    """Raise ValueError for a model that is compiled already, in whole or in part."""
    for name, module in model.named_modules():
        if compiled_part(module) is not None:
            where = f"{name!r} is" if name else "the model is"
            raise ValueError(
                f"hotrain.convert: {where} compiled already. Convert first and compile then: "
                "fast = hotrain.compile(model) does both (of a compiled model, `._orig_mod` is the model itself)"
            )


def _convert_activations(model: nn.Module, near: list[str] | None, planned: bool) -> list[str]:
    """Turn ReLUs into `BitReLU`s: all of them, or those beside (or around) the layers named in `near`."""
    parents = None if near is None else {name.rpartition(".")[0] for name in near}
    found = []
    for name, module in model.named_modules():
        if type(module) is nn.ReLU and (parents is None or name.rpartition(".")[0] in parents):
            module.__class__ = BitReLU
        if type(module) is BitReLU:
            module.__dict__.pop(PLANNED, None)
            if planned:
                module.__dict__[PLANNED] = True
            found.append(name)
    return found


def _revert_activations(model: nn.Module) -> None:
    for module in model.modules():
        if type(module) is BitReLU:
            module.__class__ = nn.ReLU  # type: ignore[assignment]
            module.__dict__.pop(PLANNED, None)


def revert(model: nn.Module) -> None:
    """Undo `convert` and `checkpoint_blocks`, in place: every layer gets its own class back.

    Args:
        model: converted or not.

    Raises:
        RuntimeError: a layer's class was changed again after conversion (a parametrization, FSDP2's `fully_shard` on
            the layer itself). Nothing is changed then.
    """
    layers = [(name, module) for name, module in model.named_modules() if layer_state(module) is not None]
    for name, module in layers:
        if not type(module).__module__.startswith(_ROOM):
            raise RuntimeError(
                f"hotrain.revert: {name!r} has become a {type(module).__name__} since its conversion; "
                "undo that first (a parametrization: torch.nn.utils.parametrize.remove_parametrizations)"
            )
    unwrap(model)
    keep_all(model)
    keep_on_device(model)
    _revert_activations(model)
    for _, module in layers:
        module.__dict__.pop(ATTRIBUTE).fallback = REVERTED
        module.__class__ = next(c for c in type(module).__mro__ if not c.__module__.startswith(_ROOM))


def converted_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, LayerState]]:
    """The converted layers of a model.

    Args:
        model: converted or not.

    Yields:
        (fully qualified name, module, state) of each, once.
    """
    for name, module in model.named_modules():
        state = layer_state(module)
        if state is not None:
            yield name, module, state


def _is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D, converted or not, without importing transformers."""
    kind = type(module).__mro__[1] if layer_state(module) is not None else type(module)
    return kind.__module__ == "transformers.pytorch_utils" and kind.__name__ == "Conv1D"


def _target(module: nn.Module) -> type[nn.Module] | None:
    """The class that the module is converted to; for a converted one, its own."""
    if layer_state(module) is not None:
        return type(module)
    if type(module) is nn.Linear:
        return HadamardLinear
    if type(module) is nn.Conv2d:
        return ConvertedConv2d
    if _is_conv1d(module):
        from .nn.hf import HadamardConv1D

        return HadamardConv1D
    return None


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str | None]]:
    """(name, module, reason it is unsupported or None) of every Linear and convolution, shared ones once."""
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((name, module))
    without_call = {
        id(module.out_proj): name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)
    }
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            yield name, module, "its projections are used without calling a layer (nn.MultiheadAttention)"
        elif isinstance(module, nn.Linear | nn.Conv2d) or _is_conv1d(module):
            yield name, module, _hindrance(module, owners, without_call)
        elif isinstance(module, nn.modules.conv._ConvNd):
            yield (
                name,
                module,
                f"{type(module).__name__} is not supported; accepted are Linear, Conv2d and transformers' Conv1D",
            )


def _hindrance(
    module: nn.Module, owners: dict[int, list[tuple[str, nn.Module]]], without_call: dict[int, str]
) -> str | None:
    """Why a conversion would have no effect or a wrong one."""
    if id(module) in without_call:
        return f"its weight is used without calling it (nn.MultiheadAttention {without_call[id(module)]!r})"
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        return "lazy: it has no weight yet; run a forward pass, then convert"
    if nn.utils.parametrize.is_parametrized(module):
        return "parametrized: its weight is computed anew in every forward; remove the parametrization, then convert"
    if layer_state(module) is None and _target(module) is None:
        own = type(module).forward not in (nn.Linear.forward, nn.Conv2d.forward)
        return f"{type(module).__name__} is a subclass" + (" with a forward of its own" if own else "")
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    weight = module.weight
    if not isinstance(weight, Tensor) or weight.dtype not in FLOATS:
        return f"weight of dtype {getattr(weight, 'dtype', type(weight).__name__)}; accepted are floating-point weights"
    for name, other in owners.get(id(weight), []):
        if other is not module and _target(other) is None:
            return f"tied weight: {name!r} ({type(other).__name__}) uses it as well"
    return None


def _default_reason(model: nn.Module, name: str, module: nn.Module) -> str | None:
    """The default exclusions, when no filter_fn is given."""
    adapter = _adapter_of(model, name)
    if adapter is not None:
        return f"adapter of {adapter!r}: adapters stay exact"
    if _is_head(model, name, module):
        return "head"
    weight = module.weight
    assert isinstance(weight, Tensor)
    outputs = weight.shape[1] if _is_conv1d(module) else weight.shape[0]
    contraction = weight.numel() // max(1, outputs)
    groups = getattr(module, "groups", 1)
    if contraction * groups < SMALLEST or outputs < SMALLEST:
        return f"too small: {contraction * groups} → {outputs} channels, under {SMALLEST}"
    return None


def _is_head(model: nn.Module, name: str, module: nn.Module) -> bool:
    classifier = getattr(model, "get_classifier", None)
    if callable(classifier):
        heads = classifier()
        heads = heads if isinstance(heads, tuple | list) else (heads,)
        if any(module is part for head in heads if isinstance(head, nn.Module) for part in head.modules()):
            return True
    # By name only at the outer levels: a block's inner "fc" is not a head.
    path = [part for part in name.split(".") if part not in _WRAPPERS]
    return bool(path) and path[0] in _HEADS


def _adapter_of(model: nn.Module, name: str) -> str | None:
    """The PEFT layer whose adapter the module is, None if it is none (a base layer is none)."""
    parts = name.split(".")
    for depth in range(len(parts)):
        parent = model.get_submodule(".".join(parts[:depth]))
        is_peft = any(c.__name__ == "BaseTunerLayer" and c.__module__.startswith("peft.") for c in type(parent).__mro__)
        if is_peft and parts[depth] != "base_layer":
            return ".".join(parts[:depth])
    return None


def _as_grid(grid: Grid | tuple[int, int] | None, prefix: int) -> Grid | None:
    if type(prefix) is not int or prefix < 0:
        raise ValueError(f"hotrain.convert: prefix_tokens={prefix!r} is not a number of tokens, 0 or more")
    if grid is None or isinstance(grid, Grid):
        if prefix:
            place = "grid=(height, width)" if grid is None else f"Grid(..., prefix={prefix})"
            raise ValueError(f"hotrain.convert: prefix_tokens={prefix} has no effect without a grid; give {place}")
        return grid
    if not isinstance(grid, tuple | list) or len(grid) != 2 or any(type(n) is not int or n < 1 for n in grid):
        raise ValueError(f"hotrain.convert: grid={grid!r} is not (height, width) in patches")
    return Grid(grid[0], grid[1], prefix)
