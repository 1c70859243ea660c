"""Per-layer timing of the exact backward and of a method's on this device, to convert only the layers that gain.

A method can save memory in a layer and still be slower there, above all where exact products are fast and the shape is
small. `plan` times both on the device and in the dtype of the model; its `filter_fn` keeps slower layers exact.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..audit.unchanged import as_found
from ..conversion import FilterFn, convert, revert
from ..functional import as_method
from ..method import Method
from ..nn.state import LayerState, layer_states
from ..planning import clock
from ..presets import DEFAULT
from ..tables import table
from .shapes import LayerShape, layer_shapes


@dataclass(frozen=True)
class Plan:
    """Times of a method and of exact, and the layers to convert.

    Attributes:
        method: that was timed.
        threshold: of method time / exact time, below which a layer is converted.
        device: type of the device.
        rows: one dict for each distinct shape: layers (names), kind, tokens, outputs, inputs, dtype, exact_ms and
            method_ms (ms of one layer's backward; the method's includes what it adds to the forward), ratio, convert
            (whether to), and reason (why not, where the layer cannot follow the method).
    """

    method: Method
    threshold: float
    device: str
    rows: list[dict[str, Any]]

    @property
    def chosen(self) -> frozenset[str]:
        """The layers to convert."""
        return frozenset(name for row in self.rows if row["convert"] for name in row["layers"])

    def filter_fn(self, module: nn.Module, name: str) -> bool:
        """Whether to convert a layer: ``hotrain.convert(model, plan.method, filter_fn=plan.filter_fn)``."""
        return name in self.chosen

    @property
    def exact_ms(self) -> float:
        """Time of all candidates' exact backward, in ms."""
        return sum(len(row["layers"]) * row["exact_ms"] for row in self.rows)

    @property
    def planned_ms(self) -> float:
        """The same with the chosen layers converted, in ms."""
        return sum(len(row["layers"]) * row["method_ms" if row["convert"] else "exact_ms"] for row in self.rows)

    def __str__(self) -> str:
        body = [
            [
                row["layers"][0] + (f" (+{len(row['layers']) - 1})" if len(row["layers"]) > 1 else ""),
                f"{row['tokens']}×{row['outputs']}×{row['inputs']}",
                row["dtype"],
                f"{row['exact_ms']:.3f}",
                f"{row['method_ms']:.3f}",
                f"{row['ratio']:.2f}",
                self.method.name if row["convert"] else f"exact{': ' + row['reason'] if row['reason'] else ''}",
            ]
            for row in self.rows
        ]
        title = (
            f"{self.method.name} on {self.device}: {len(self.chosen)} of {sum(len(r['layers']) for r in self.rows)} "
            f"layers gain (ratio below {self.threshold:g}); backward of all {self.exact_ms:.1f} ms exact, "
            f"{self.planned_ms:.1f} ms as planned"
        )
        headers = ["layers", "T×O×I", "dtype", "exact ms", f"{self.method.name} ms", "ratio", "keep"]
        return title + "\n" + table(headers, body)


def plan(
    model: nn.Module,
    *inputs: Any,
    method: str | Method = DEFAULT,
    repeats: int = 5,
    threshold: float = 1.0,
    filter_fn: FilterFn | None = None,
    **kwargs: Any,
) -> Plan:
    """Time, for every distinct layer shape in ``model(*inputs, **kwargs)``, the exact backward and a method's.

    Call it under the autocast context that training uses. The model is unchanged.

    Args:
        model: not converted; its candidates are the layers that `hotrain.convert(model, method, filter_fn=filter_fn)`
            would convert.
        *inputs: of the model.
        method: a preset's name or a `hotrain.Method`.
        repeats: timed runs of each, interleaved, after one that is not counted; the medians are compared.
        threshold: a layer is converted where method time / exact time is below it. Memory is not considered: raise it
            to convert layers that are a little slower.
        filter_fn: as in `hotrain.convert`.
        **kwargs: of the model.

    Returns:
        The times, and a `filter_fn` for `hotrain.convert`.

    Raises:
        ValueError: the model is converted, repeats < 1, or as `hotrain.convert`.
    """
    if type(repeats) is not int or repeats < 1:
        raise ValueError(f"plan: repeats={repeats!r} is not a positive integer")
    if any(True for _ in layer_states(model)):
        raise ValueError("plan: the model is converted already; call hotrain.revert(model) first")
    chosen = as_method(method)
    if chosen.is_exact:
        raise ValueError("plan: method 'exact' has nothing to compare with; name another preset")
    with as_found(model):
        calls: dict[str, LayerShape] = {}
        for shape in layer_shapes(model, *inputs, **kwargs):
            calls.setdefault(shape.name, shape)
        convert(model, chosen, filter_fn=filter_fn, plan="memory")
        try:
            states = {name: state for name, state in layer_states(model) if name in calls}
            if not states:
                raise ValueError(
                    f"plan: the forward of {type(model).__name__} called none of the layers it would convert"
                )
            rows = _rows(model, states, calls, repeats, threshold)
            device = next(model.parameters()).device.type
        finally:
            revert(model)
    return Plan(chosen, threshold, device, rows)


def _rows(
    model: nn.Module, states: dict[str, LayerState], calls: dict[str, LayerShape], repeats: int, threshold: float
) -> list[dict[str, Any]]:
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, shape in calls.items():
        if name in states:
            module = model.get_submodule(name)
            alike = replace(shape, name=""), module.weight.dtype, getattr(module, "geometry", None), states[name].grid
            groups.setdefault(alike, []).append(name)
    rows = []
    for members in groups.values():
        shape = calls[members[0]]
        exact_ms, method_ms = _time(model.get_submodule(members[0]), shape, repeats)
        ratio = method_ms / exact_ms if exact_ms else float("inf")
        reason = states[members[0]].fallback
        rows.append(
            {
                "layers": members,
                "kind": shape.kind,
                "tokens": shape.tokens,
                "outputs": shape.outputs,
                "inputs": shape.inputs,
                "dtype": str(shape.autocast or shape.dtype).removeprefix("torch."),
                "exact_ms": exact_ms,
                "method_ms": method_ms,
                "ratio": ratio,
                "convert": reason is None and ratio < threshold,
                "reason": reason,
            }
        )
    return rows


def _time(module: nn.Module, shape: LayerShape, repeats: int) -> tuple[float, float]:
    """Median milliseconds of (exact backward, the method's backward and what it adds to the forward)."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    x = torch.randn(shape.x, dtype=shape.dtype, device=weight.device)
    x.requires_grad_(shape.needs_grad_input)
    leaves = [leaf for leaf in (x, weight) if leaf.requires_grad]
    if not leaves:
        return 0.0, 0.0
    autocast = torch.autocast(x.device.type, shape.autocast, enabled=shape.autocast is not None)
    times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for repeat in range(repeats + 1):
        for converted in (False, True):
            module.training = converted
            with autocast, torch.enable_grad():
                start = clock(x.device)
                y = module.forward(x)
                middle = clock(x.device)
            g_y = torch.randn_like(y)
            resumed = clock(x.device)
            torch.autograd.grad(y, leaves, g_y)
            if repeat:
                times[converted].append((middle - start, clock(x.device) - resumed))
    (forward, exact), (with_save, backward) = (
        tuple(statistics.median(column) for column in zip(*times[run], strict=True)) for run in (False, True)
    )
    return exact * 1e3, (backward + max(0.0, with_save - forward)) * 1e3
