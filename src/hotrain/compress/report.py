"""Records of what a converted model saves between its layers, for the report and the prediction of bytes."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from ..casting import autocast_to
from ..private import constant_in_graphs
from .rules import SMALL
from .sharing import Origins

_numbers = itertools.count()
EAGER = 'the host limits the speed of the GPU: use torch.compile, with CUDA graphs (mode="reduce-overhead") if possible'
UNCUT = "compiled: from a compiler's cache or by another backend, so that which operator keeps what is unknown"
ATTRIBUTE = "_hotrain_buffers"  # of a module: its `Buffers`


def map_tensors(change: Callable[[Tensor], Any], tree: Any) -> Any:
    """A call's arguments with each tensor in them, and in their mappings, tuples and lists, changed."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, MutableMapping):  # of its own class: transformers' have the values as attributes too
        mapped = copy.copy(tree)
        for key, value in tree.items():
            mapped[key] = map_tensors(change, value)
        return mapped
    if not isinstance(tree, tuple | list):
        return tree
    made = (map_tensors(change, value) for value in tree)
    return type(tree)(*made) if hasattr(tree, "_fields") else type(tree)(made)


def tensors(value: Any) -> Iterator[Tensor]:
    """Iterate over the tensors in nested mappings, sequences, sets and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from tensors(getattr(value, each.name))


@dataclass(frozen=True)
class Example:
    """The arguments of a model's first call as meta tensors, and the autocast that it ran under.

    Attributes:
        model: a weak reference to the model.
        args: positional arguments.
        kwargs: keyword arguments.
        autocast: device type, and dtype or None.
    """

    model: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    autocast: tuple[str, torch.dtype | None]

    @classmethod
    def of(cls, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Example:
        """The example of a call of the model with these arguments."""

        def shape_alone(t: Tensor) -> Tensor:
            return torch.empty_like(t, device="meta").requires_grad_(t.requires_grad)

        shapes, named = map_tensors(shape_alone, (args, dict(kwargs)))
        kind = next((t.device.type for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), "cpu")
        return cls(weakref.ref(model), shapes, named, (kind, autocast_to(kind)))


_KEPT = {"softmax": "as the product behind reads it, or in full precision"}  # of operators that are kept exact, how


def _counted(what: str, exact: int, of: int, graphs: int) -> str:
    return f"{what}, {exact} of {of}" + f" in {graphs} graphs" * (graphs > 1)


@dataclass
class Buffers:
    """What a converted model saves: by operator its format (`formats`), or why it is kept in full precision (`full`).

    Attributes:
        full: operator → why its tensors are kept in full precision.
        origins: tensors of the forward that runs whose producer's saved tensors can be shared.
        looked_at: functions without an operator of which `eager` knows what they save.
        passing: functions without a rule, of which nothing is left to look at.
        uncut: whether the model was traced, or ran in graphs of another, and `compiled` has seen none of its own.
        waits: whether the model ran in eager mode on a GPU.
        name: identity of the model in a graph's metadata.
        graphs: bytes that each compiled graph keeps.
        seen: whether the first step of a model that `hotrain.compile` compiled has run.
        kept: bytes that it keeps; None where it has run within saved-tensor hooks.
        example: the first call.
        root: a weak reference to the model; a copy's records have the copy.
        entered: modules whose forward has entered the mode; the model, or copies of it that share these records.
        must_not_lose: whether a compiled graph may keep tensors exact to be as fast as before.
        gains: of the model and some of its layers (`choosing.layers`): ms of a step that they are faster than exact.
        pace: of a model whose blocks may stay exact in eager mode.
        spare_ms: that a compiled graph may take longer than it is predicted to.
        chosen: operator → its calls in compiled graphs that are kept exact, of how many, in how many graphs.
        unused: formats that were recorded, and that no graph saves in.
        reverted: whether the model is exact again.
    """

    formats: dict[str, str] = field(default_factory=dict)
    full: dict[str, str] = field(default_factory=dict)
    origins: Origins = field(default_factory=Origins, repr=False, compare=False)
    looked_at: set[str] = field(default_factory=set, repr=False, compare=False)
    passing: set[Any] = field(default_factory=set, repr=False, compare=False)
    uncut: bool = field(default=False, repr=False, compare=False)
    waits: bool = field(default=False, repr=False, compare=False)
    name: str = field(default_factory=lambda: str(next(_numbers)), repr=False, compare=False)
    graphs: list[int] = field(default_factory=list, repr=False, compare=False)
    seen: bool = field(default=False, repr=False, compare=False)
    kept: int | None = field(default=None, repr=False, compare=False)
    example: Example | None = field(default=None, repr=False, compare=False)
    root: Any = field(default=None, repr=False, compare=False)
    entered: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet, repr=False, compare=False)
    must_not_lose: bool = field(default=False, repr=False, compare=False)
    gains: Callable[[Any, Sequence[Any]], float] | None = field(default=None, repr=False, compare=False)
    pace: Any = field(default=None, repr=False, compare=False)
    spare_ms: float = field(default=0.0, repr=False, compare=False)
    chosen: dict[str, tuple[int, int, int]] = field(default_factory=dict, repr=False, compare=False)
    unused: dict[str, str] = field(default_factory=dict, repr=False, compare=False)
    reverted: bool = field(default=False, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__ | {"passing": set(), "example": None, "root": None}
        del state["entered"]  # weak references cannot be pickled
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, entered=weakref.WeakSet())

    def see(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record the shapes of the first call, from which the report predicts total bytes."""
        if self.example is None:
            self.example = Example.of(model, args, kwargs)

    @constant_in_graphs
    def record(self, what: str, form: str) -> None:
        """Record that an operator saves its tensors in a format."""
        self.formats[what] = form

    @constant_in_graphs
    def record_full(self, what: str, why: str) -> None:
        """Record why an operator's tensors are kept in full precision."""
        self.full[what] = why

    def gained(self, layers: Sequence[Any]) -> float:
        """ms of a step that converted layers of a graph are faster than exact ones."""
        model = None if self.root is None else self.root()
        return 0.0 if model is None or self.gains is None else self.gains(model, layers)

    def record_chosen(self, counts: Mapping[str, tuple[int, int]]) -> None:
        """Record, by operator, how many calls a compiled graph keeps exact to be as fast as before, of how many."""
        for what, (exact, of) in counts.items():
            before = self.chosen.get(what, (0, 0, 0))
            self.chosen[what] = exact, of, graphs = before[0] + exact, before[1] + of, before[2] + 1
            how = _KEPT.get(what)
            rows = self.full if how is None else self.formats
            rows.pop(_counted(what, *before), None)
            if exact:
                faster = "faster so; plan='memory' compresses them"
                rows[_counted(what, exact, of, graphs)] = faster if how is None else f"{how}: {faster}"
            one, other = (self.formats, self.unused) if exact == of else (self.unused, self.formats)
            if what in one:
                other[what] = one.pop(what)

    def __str__(self) -> str:
        if self.reverted:
            return "  between the layers: as exact keeps it"
        rows = [(what, form) for what, form in self.formats.items()]
        rows += [(what, f"kept in full precision: {why}") for what, why in self.full.items()]
        rows += [("everything else", UNCUT)] * self.uncut + [("in eager mode", EAGER)] * self.waits
        if not rows and self.example is not None:
            what = f"in forward, outside of checkpoints, keeps {SMALL:,} entries in 16 or 32 bits"
            return f"  between the layers: as exact keeps it (no function of PyTorch that was seen {what})"
        if not rows:
            return "  between the layers: known after a training forward of the whole model"
        width = max(len(what) for what, _ in rows)
        return "\n".join(["  between the layers:", *(f"    {what:<{width}}  {how}" for what, how in rows)])

    @constant_in_graphs
    def plan(self) -> str:
        """What a compiled graph of this model is planned by."""
        return f"as fast as exact and {self.spare_ms} ms" if self.must_not_lose else "least memory"

    @constant_in_graphs
    def region(self) -> str:
        """The mark that Dynamo writes to the metadata of this model's nodes."""
        self.waits = False
        try:
            from . import compiled
        except (ImportError, AttributeError) as error:
            self.record_full("in compiled graphs", f"this PyTorch lacks what the partitioner needs: {error}")
            return ""
        return compiled.region(self)
