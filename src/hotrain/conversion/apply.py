"""`convert`: gives a model's layers the gradients of a method.

A layer is converted by changing its class: parameters, state_dict keys, hooks and isinstance checks stay. Every
Linear and convolution of the model appears in the report, as converted, or as exact with the reason.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..compress.checkpointing import blocks, recompute
from ..compress.interpose import unwrap, wrap
from ..compress.offload import offload
from ..compress.operators import share_inputs
from ..draws import Draws
from ..functional import as_method, check_model
from ..grids import grid_at, token_grids
from ..method import NUMBERS, Method
from ..nn.activation import PLANNED, BitReLU
from ..nn.state import ATTRIBUTE, LayerState, layer_state, layer_states
from ..plans import PLANS, Point
from ..presets import DEFAULT
from ..private import compiled_part, warn_of_missing
from ..tables import parse_bytes
from ..transform.tokens import Grid
from .candidates import candidates, default_reason, target_of
from .report import ConversionReport, KeptRow
from .undo import revert, revert_activations

for _operator in (ops.linear, ops.conv2d):
    share_inputs(_operator)

FilterFn = Callable[[nn.Module, str], bool]


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
        dense_prefix: keep those tokens, and those after the patches, exact in g_w; False puts them into the tiles with
            the rest.
        number: number format: ``"int"``, ``"e4m3"``, ``"e5m2"`` or ``"auto"``: e4m3 where the device has fp8 matrix
            units, else integers (`Method.override`). None is the method's own: ``"auto"`` for `hq8`,
            `hot-unbiased` and `hot-importance`, integers for the others. The report states the choice.
        forward: product of Linear layers: ``"exact"``, or of ``"fp8"`` or ``"int8"`` codes (`hotrain.forward`). None
            is the method's own, which is exact in all presets.
        plan: ``"speed"`` keeps those layers exact that would be slower on a GPU, measured at their first forward there
            (`hotrain.planning`), and in eager mode as many blocks as would be, timed in the first training steps
            (`hotrain.compress.pace`); ``"graphs"`` measures without launch overhead, for models that run as CUDA graphs
            (``torch.compile(mode="reduce-overhead")``); ``"memory"`` converts all layers. Without a GPU all are
            converted. A `Point` of `hotrain.frontier` has its own method and plan, recomputes blocks or offloads; it
            takes no other argument but defaults, and undoes what was converted before.
        memory: which saved activations are compressed: ``"linear"``, those of converted layers; ``"block"``, those of
            activation functions, norms, attention, dropout, products, pooling and exact layers as well
            (`hotrain.compress`): everything that is called while the model runs forward. None is the method's own.

    Raises:
        TypeError: the model is no module, or `filter_fn` no function.
        ValueError: the method is unknown, the grid is bad, the model is compiled already, scripted or in an
            nn.DataParallel, or has layers that were converted with another plan, no layer matched (with a
            `filter_fn`, or with ``memory="linear"``), or a point was measured on another device or PyTorch, or of
            another model.
    """
    check_model("convert", model)
    warn_of_missing()
    if isinstance(plan, Point):
        others = (method, filter_fn, grid, prefix_tokens, dense_prefix, number, forward, memory)
        if others != (DEFAULT, None, None, 0, True, None, None, None):
            raise ValueError(
                f"hotrain.convert: plan {plan.name!r} has all that it needs; leave out the other arguments"
            )
        return _follow(model, plan)
    method = as_method(method)
    if filter_fn is not None and not _takes_two(filter_fn):
        raise TypeError(
            f"hotrain.convert: filter_fn={filter_fn!r} is no function of (module, name); accepted is one, such as "
            "lambda module, name: 'mlp' in name"
        )
    if number not in (numbers := ("auto", None, *NUMBERS)):
        raise ValueError(f"hotrain.convert: number={number!r} is not one of {', '.join(map(repr, numbers))}")
    if plan not in PLANS:
        raise ValueError(f"hotrain.convert: plan={plan!r} {_no_plan(plan)}")
    asked = {"forward": forward, "memory": memory, "number": number}
    method = method.override(**{name: value for name, value in asked.items() if value is not None})
    _refuse_wrapped(model)
    report = ConversionReport(method, plan=plan, model=weakref.ref(model))
    if method.is_exact:
        report.kept_rows = [KeptRow(name, "method exact") for name, _, _ in candidates(model)]
        revert(model)
        if method.memory == "block":
            report.buffers = wrap(model)  # whoever asks for this asks for memory: no plan keeps a tensor exact
        return report
    grids = {} if grid is not None else token_grids(model)
    everywhere = report.grid = _as_grid(grid, prefix_tokens)
    chosen: list[tuple[str, nn.Module, type[nn.Module]]] = []
    for name, module, reason in candidates(model):
        if filter_fn is not None and reason is None and not filter_fn(module, name):
            reason = "excluded by filter_fn"
        elif filter_fn is None and reason is None:
            reason = default_reason(model, name, module)
        if reason is None:
            reason = "weight is sparse" if module.weight.layout != torch.strided else None
        target = target_of(module)
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
        raise ValueError(_none_of(model, report.kept_rows))
    if not chosen and not report.layers:
        warnings.warn(_none_of(model, report.kept_rows), stacklevel=2)
    for name, module, target in chosen:
        place = everywhere or grid_at(name, grids)
        if place is not None and not dense_prefix:
            place = replace(place, dense_prefix=False)
        state = layer_state(module)
        label = name or type(module).__name__
        if state is None:
            state = LayerState(label, method, place, filter_fn is not None)
        else:
            state.name, state.chosen, state.fallback = label, filter_fn is not None, None
            state.draws.layer = Draws.of(label).layer
            state.forget()
        state.follow(method, place, plan)
        state.transposed = getattr(target, "transposed", False)
        weight = module.weight
        assert isinstance(weight, Tensor)
        state.weight = tuple(weight.shape)
        state.choose_numbers(weight.device)
        module.__class__ = target
        module.__dict__[ATTRIBUTE] = state
        report.layers.append((name, state))
    if method.memory == "block":
        report.buffers = wrap(model, keeps_pace=plan == "speed")
        report.buffers.must_not_lose, report.buffers.gains = plan != "memory", _gains
    else:
        unwrap(model)
    for _, state in layer_states(model):
        state.origins = None if report.buffers is None else report.buffers.origins
    if method.memory == "block":
        revert_activations(model)  # BitReLUs of an earlier conversion: the mode compresses all ReLUs
    elif method.compresses:
        near = None if filter_fn is None else [name for name, _, _ in chosen]
        report.activations = _convert_activations(model, near, plan != "memory")
    return report


def _none_of(model: nn.Module, rows: list[KeptRow]) -> str:
    """What is said where no layer is converted."""
    why = "\n".join(f"  {row.name or type(model).__name__}: {row.reason}" for row in rows[:12])
    why += f"\n  … and {len(rows) - 12} more" if len(rows) > 12 else ""
    return (
        f"hotrain.convert: no layer of {type(model).__name__} matched:\n{why or '  it has no Linear or Conv2d'}\n"
        "Layers are converted whose class is nn.Linear, nn.Conv2d or transformers' Conv1D itself; put these in the "
        "place of subclasses. Pass filter_fn=lambda module, name: ... to choose layers yourself, small ones and heads "
        'too; convert(model, "exact", memory="block") compresses only the activations between them.'
    )


def _no_plan(plan: Any) -> str:
    """What is said of a plan that is none: a budget is met by measuring, which needs a batch."""
    try:
        parse_bytes(str(plan))
    except ValueError:
        points = "a point of hotrain.frontier (what found.best('16GiB') returns, not its name)"
        return f"is not one of {', '.join(map(repr, PLANS))}, or {points}"
    return (
        "is a memory budget, and there is no batch to measure what fits: point = hotrain.frontier(model, batch)"
        f".best({plan!r}) finds the fastest that does, and convert(model, plan=point) takes it"
    )


def _takes_two(filter_fn: object) -> bool:
    """Whether it can be called with a module and a name, as far as its signature says."""
    if not callable(filter_fn):
        return False
    try:
        inspect.signature(filter_fn).bind(None, "")
    except TypeError:
        return False
    except ValueError:  # written in C, without a signature
        pass
    return True


def _follow(model: nn.Module, point: Point) -> ConversionReport:
    _refuse_wrapped(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    point.check(device)
    point.check_model(model)
    found = blocks(model)
    if missing := [name for name in point.recomputed if name not in found]:
        raise ValueError(
            f"hotrain.convert: plan {point.name!r} recomputes {missing[0]!r}, which is no block of this "
            f"{type(model).__name__}; it was measured with another model"
        )
    revert(model)
    report = convert(model, "exact" if point.method is None else point.method, plan=point.plan)
    if report.buffers is not None:
        report.buffers.spare_ms = point.spare_ms
    recompute({name: found[name] for name in point.recomputed})
    if point.offload:
        offload(model)
    report.point = point
    return report


def _gains(model: nn.Module, layers: Sequence[Any]) -> float:
    """`Buffers.gains`."""
    found = dict(state.gain() for _, state in layer_states(model))
    return sum(found.get(layer, 0.0) for layer in layers)


def _refuse_wrapped(model: nn.Module) -> None:
    """Raise ValueError for a model that is compiled already, in whole or in part, scripted, or replicated."""
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            f"hotrain.convert: the model is a {type(model).__name__} of torch.jit, whose layers run outside of Python. "
            "Convert the model that it was made of, and compile that by hotrain.compile(model) instead"
        )
    for name, module in model.named_modules():
        where = f"{name!r} is" if name else "the model is"
        if compiled_part(module) is not None:
            raise ValueError(
                f"hotrain.convert: {where} compiled already. Convert first and compile then: "
                "fast = hotrain.compile(model) does both (of a compiled model, `._orig_mod` is the model itself)"
            )
        if isinstance(module, nn.DataParallel):
            raise ValueError(
                f"hotrain.convert: {where} an nn.DataParallel, which copies its layers in every step. Convert what is "
                "inside, `.module`, and train that with one process for each GPU (DistributedDataParallel)"
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


def _as_grid(grid: Grid | tuple[int, int] | None, prefix: int) -> Grid | None:
    if type(prefix) is not int or prefix < 0:
        raise ValueError(f"hotrain.convert: prefix_tokens={prefix!r} is not a number of tokens, 0 or more")
    if grid is None or isinstance(grid, Grid):
        if prefix:
            place = "grid=(height, width)" if grid is None else f"Grid(..., prefix={prefix})"
            raise ValueError(f"hotrain.convert: prefix_tokens={prefix} has no effect without a grid; give {place}")
        for name, least in (("height", 1), ("width", 1), ("prefix", 0), ("suffix", 0)):
            value = getattr(grid, name, least)
            if type(value) is not int or value < least:
                raise ValueError(f"hotrain.convert: {grid} has {name}={value!r}; accepted are integers from {least}")
        return grid
    if not isinstance(grid, tuple | list) or len(grid) != 2 or any(type(n) is not int or n < 1 for n in grid):
        raise ValueError(f"hotrain.convert: grid={grid!r} is not (height, width) in patches")
    return Grid(grid[0], grid[1], prefix)
