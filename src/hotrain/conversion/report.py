"""The report of a conversion: one row for each layer, what ran in its last step, and the bytes that are saved."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sized
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..compress.rematerialize import parsed, saved_by_reader
from ..compress.report import Buffers, Example, tensors
from ..layer_record import Ran
from ..method import Method
from ..nn.state import REVERTED, LayerState, layer_states
from ..plans import Point
from ..tables import bytes_text
from ..transform.tokens import Grid
from .undo import converted_layers, revert

_UNCALLED = "no training forward has called it (it is in evaluation mode, or its weight is used without calling it)"
_PLANNED = "no training forward yet: what the rows say is planned (in evaluation mode layers are exact)"


@dataclass(frozen=True)
class ConvertedRow:
    """A converted layer.

    Attributes:
        name: fully qualified.
        method: with the number format chosen for the device of the weight.
        ran: what the last training step did.
        reached: whether a forward has run through it.
    """

    name: str
    method: Method
    ran: Ran = field(compare=False)
    reached: bool = False

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
            return f"{self.method.name}  no gradient was asked of it" if self.reached else str(self.method)
        g_x, g_w, x = formats(self.ran)
        of = "" if not self.ran.exact_bytes or self.ran.frozen else f" of {bytes_text(self.ran.exact_bytes)}"
        return f"{self.method.name}  g_x:{g_x}  g_w:{g_w}  x:{x}, {bytes_text(self.saved_bytes)}{of}"


@dataclass(frozen=True)
class KeptRow:
    """A layer that stays exact, with the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class GoneRow:
    """A converted layer that is no longer in the model, with what is in its place."""

    name: str
    instead: str


@dataclass
class ConversionReport:
    """What happened to each layer; ``str(report)`` prints it.

    `converted`, `kept` and `gone` are up to date: a layer that a training forward found unsuited, or did not call, or
    that another library has replaced, moves from one to the other, with its reason.

    Attributes:
        method: as requested.
        kept_rows: layers that `convert` left exact, with the reason; `kept` has those that training found, too.
        layers: name and state of each converted layer.
        buffers: the other compressed activations, from the first training forward on; None with ``memory="linear"``.
        plan: of `convert`.
        activations: names of the ReLUs that save 1 bit per element; their gradient is exact.
        times: (exact, converted), ms of forward and backward, measured by `hotrain.compile`.
        point: that the model follows, where `convert` was given one.
        grid: of the tokens, where `convert` was given one.
        model: a weak reference to the model; None for a copy, which reads no model.
    """

    method: Method
    kept_rows: list[KeptRow] = field(default_factory=list)
    layers: list[tuple[str, LayerState]] = field(default_factory=list)
    activations: list[str] = field(default_factory=list)
    buffers: Buffers | None = None
    plan: str = "speed"
    times: tuple[float, float] | None = None
    point: Point | None = None
    grid: Grid | None = None
    model: weakref.ref[nn.Module] | None = field(default=None, repr=False, compare=False)
    _totals: tuple[int, int] | None = field(default=None, init=False, repr=False, compare=False)
    _unknown: str = field(default="", init=False, repr=False, compare=False)
    _of: object = field(default=None, init=False, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"model": None}  # weak references cannot be pickled

    def _rows(self) -> Iterator[ConvertedRow | KeptRow | GoneRow]:
        model = None if self.model is None else self.model()
        there = set() if model is None else {id(state) for _, _, state in converted_layers(model)}
        trained = any(state.reached for _, state in self.layers)
        # Equal blocks that are compiled one by one share the code of the first, which the plan was made for.
        planned = {(s.spec, s.weight): (name, s.fallback) for name, s in self.layers[::-1] if s.fallback and s.asked}
        for name, state in self.layers:
            first = None if state.reached else planned.get((state.spec, state.weight))
            if model is not None and id(state) not in there and state.fallback != REVERTED:
                yield GoneRow(name, _instead(model, name))
            elif state.fallback is not None:
                yield KeptRow(name, state.fallback)
            elif first is not None:
                yield KeptRow(name, f"as {first[0]}, whose compiled code it runs: {first[1]}")
            elif trained and not state.reached:
                yield KeptRow(name, _UNCALLED)
            else:
                yield ConvertedRow(name, state.running, state.ran, state.reached)

    @property
    def converted(self) -> list[ConvertedRow]:
        """The layers that follow the method."""
        return [row for row in self._rows() if isinstance(row, ConvertedRow)]

    @property
    def kept(self) -> list[KeptRow]:
        """The layers that stay exact."""
        return self.kept_rows + [row for row in self._rows() if isinstance(row, KeptRow)]

    @property
    def gone(self) -> list[GoneRow]:
        """The layers that were converted and that something else has replaced since."""
        return [row for row in self._rows() if isinstance(row, GoneRow)]

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
                sizes = row.saved_bytes, 0 if row.ran.frozen else row.ran.exact_bytes
            names = ("method", "g_x", "g_w", "x", "kernels")
            first = {"layers": 0, **dict(zip(names, what, strict=True)), "bytes": None, "exact_bytes": None}
            group = groups.setdefault(what, first)
            group["layers"] += 1
            for key, size in zip(("bytes", "exact_bytes"), sizes, strict=True):
                if size is not None:
                    group[key] = (group[key] or 0) + size
        return list(groups.values())

    def totals(self) -> tuple[int | None, int] | None:
        """Bytes that the whole model saves between forward and backward of the first batch.

        Returns:
            (now, exact). Both are computed from shapes (`hotrain.predicted_bytes`), which is exact in eager mode; of
            a model that `hotrain.compile` compiled, *now* is measured in the first step: None if that runs within
            saved-tensor hooks, as in a checkpoint. None instead of the pair before a training forward, and for a model
            that `predicted_bytes` refuses, that is gone before its report was asked once, or whose inputs were not
            recorded (``memory="linear"``).
        """
        if self.buffers is None:
            return None
        example = self.buffers.example
        model = None if example is None else example.model()
        # What is compiled is counted once; what a model saves in training stays known in evaluation mode.
        stays = self.buffers.seen or model is None or not model.training
        if self._totals is None or not stays:
            if example is None and not self.buffers.seen:
                return None
            if model is None or example is None:
                self._unknown = "not known, the model is gone; print the report while there is the model"
                return None
            self._predict(model, example)
        if self._totals is None:
            return None
        exact, now = self._totals
        return (self.buffers.kept if self.buffers.seen else now), exact

    def _first_batch(self) -> str:
        """The shape of the first tensor of the first call, which the totals are of."""
        example = None if self.buffers is None else self.buffers.example
        first = None if example is None else next(tensors((example.args, example.kwargs)), None)
        return "" if first is None else f" of the first batch ({'×'.join(map(str, first.shape))})"

    def _by_torch_compile(self) -> str:
        """What graphs keep whose first call `hotrain.compile` has not seen, or nothing where there are none."""
        buffers = self.buffers
        if buffers is None or not (buffers.graphs or buffers.uncut):
            return ""
        if len(buffers.graphs) == 1 and not buffers.uncut:
            known = f"{bytes_text(buffers.graphs[0])}, by the graph of torch.compile"
        else:
            known = "not known of the graphs of torch.compile"
        return f"{known}; hotrain.compile(model) in its place compares it with exact's"

    def _by_parts(self) -> str:
        """What is to be done where layers have run and the model's forward was not seen, or nothing."""
        buffers = self.buffers
        if buffers is None or buffers.root is None or not any(state.reached for _, state in self.layers):
            return ""
        model = buffers.root()
        if model is None or model in buffers.entered:
            return ""
        return (
            "not known, no training step through the model's own forward was seen. Where training calls parts of the "
            "model, convert each of them: else only blocks of a list are compressed between their layers"
        )

    def _predict(self, model: nn.Module, example: Example) -> None:
        from ..audit.predicted import before_and_now

        if self._of != (settings := _settings(model)):
            self._totals, self._of, self._unknown = None, settings, ""
            try:
                self._totals = before_and_now(model, example, revert)
            except ValueError:
                self._unknown = "not known from shapes; hotrain.saved_bytes(model, batch), or **batch, measures a model"

    def _misfit(self, grid: Grid) -> str:
        """That no layer's input has as many tokens as the grid that `convert` was given, or nothing."""
        fits = {row.ran.fits for row in self.converted} - {None}
        if fits != {False}:
            return ""
        ends = f" + {grid.prefix} before" * bool(grid.prefix) + f" + {grid.suffix} behind" * bool(grid.suffix)
        return (
            f"grid {grid.height}×{grid.width}{ends}: no input has {grid.tokens} tokens; tiles are of consecutive ones"
        )

    def __str__(self) -> str:
        converted, kept, gone = self.converted, self.kept, self.gone
        rows = [(row.name, str(row)) for row in converted]
        rows += [(row.name, f"exact: {row.reason}") for row in kept]
        rows += [(row.name, f"gone: {row.instead}") for row in gone]
        width = max((len(name) for name, _ in rows), default=0)
        methods = ", ".join(dict.fromkeys(row.method.name for row in converted)) or self.method.name
        head = f"hotrain: {_count(converted, 'layer')} converted to {methods}, {len(kept)} kept exact"
        if self.method.name == "exact" and not converted:
            head = f"hotrain: exact products in {_count(kept, 'layer')}"
        if gone:
            head += f", {len(gone)} replaced since they were converted"
        if self.activations:
            head += f", {_count(self.activations, 'ReLU')} saved in 1 bit per element"
        if self.point is not None:
            recomputed = len(self.point.recomputed)
            head += f"\n  {self.point}" + (f"; {recomputed} blocks recompute" if recomputed else "")
        if self.times is not None:
            head += f"\n  forward and backward: {self.times[1]:.1f} ms, {self.times[0]:.1f} ms before (exact, eager)"
        totals = self.totals()
        if totals is not None and totals[0] is not None:
            share, batch = totals[0] / max(totals[1], 1), self._first_batch()
            now, exact = bytes_text(totals[0]), bytes_text(totals[1])
            head += f"\n  kept for backward{batch}: {now}, exact keeps {exact} ({share:.2f})"
        elif totals is not None:
            exact = bytes_text(totals[1])
            head += f"\n  kept for backward{self._first_batch()}: not seen; exact keeps {exact}, and "
            head += "hotrain.saved_bytes(compiled, batch) measures what the compiled model keeps"
        elif unknown := self._unknown or self._by_torch_compile() or self._by_parts():
            counted = None if self.buffers is None else self.buffers.kept
            known = "" if counted is None else f"{bytes_text(counted)}; exact's is "
            head += f"\n  kept for backward: {known}{unknown}"
        if self.layers and not any(state.reached for _, state in self.layers):
            head += f"\n  {_PLANNED}"
        if self.grid is not None and (wrong := self._misfit(self.grid)):
            head += f"\n  {wrong}"
        for group in self.ran():
            if group["g_x"] is not None and group["method"] != "exact":
                head += f"\n  {line_of(group)}"
        lines = [head, *(f"  {name:<{width}}  {what}" for name, what in rows)]
        return "\n".join(lines + ([] if self.buffers is None else [str(self.buffers)]))


def _settings(model: nn.Module) -> object:
    """What a model saves depends on besides the batch: its modules, their methods and their switches, and which
    parameters train."""
    methods = [(name, state.method) for name, state in layer_states(model)]
    switches = [(id(type(m)), *(name for name, value in vars(m).items() if value is True)) for m in model.modules()]
    return methods, switches, [p.requires_grad for p in model.parameters()]


def _instead(model: nn.Module, name: str) -> str:
    """What is in the place of a layer that is gone."""
    found = dict(model.named_modules()).get(name)
    kind = "" if found is None else f"{type(found).__module__}.{type(found).__qualname__}"
    return f"its place has a {kind}" if kind else "the model has no module of this name"


def _count(found: Sized, what: str) -> str:
    return f"{len(found)} {what}{'' if len(found) == 1 else 's'}"


def line_of(group: dict[str, Any]) -> str:
    """A group of `ConversionReport.ran` as text."""
    count = _count(range(group["layers"]), "layer")
    if group["g_x"] is None:
        return f"{count}: {group['method']}, not run yet"
    if group["g_x"] == "exact" and group["x"] == "exact":
        return f"{count}: exact"
    by = "Triton kernels" if group["kernels"] else "plain PyTorch"
    of = f" of {bytes_text(group['exact_bytes'])}" if group["exact_bytes"] else ""
    size = f"{bytes_text(group['bytes'])}{of}"
    return f"{count}: g_x {group['g_x']}, g_w {group['g_w']}, x {group['x']} ({size}), {by}"


def formats(ran: Ran) -> tuple[str, str, str]:
    """(g_x, g_w, x) of a step that ran, in the notation of ``str(method)``."""
    method = ran.method
    assert method is not None
    g_x = str(method.grad_input).removeprefix("g_x:")
    if method.grad_input.number == "int" and method.grad_input.bits:
        g_x = g_x.replace("/auto", f"/{method.grad_input.scale_axis}")
    g_w = str(method.grad_weight).removeprefix("g_w:")
    if ran.product == "float":
        g_x = "exact"
    if ran.product != "tokens" and method.grad_weight.rows_text:
        number = "" if ran.product == "float" else method.grad_weight.number_text
        g_w = f"{number or 'exact'} of x restored from {method.grad_weight.rows_text}"
    if ran.frozen:
        g_w = "none: the weight is frozen"
    x = "nothing" if ran.frozen else str(method.saved).removeprefix("saved:")
    if ran.recomputed:
        return g_x, g_w, f"{x}, made in backward"
    return g_x, g_w, f"shared: {parsed(ran.source)}" if ran.source else x
