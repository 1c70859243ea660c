"""Activation sharing: a layer's input is dequantized in backward from the producer's saved activation, not saved twice.

A norm saves codes of x̂, and its result is γ x̂ + β; an activation saves codes of its input; the result of attention is
saved for attention's own gradient. The next layer asks `Origins` for the origin of its input, and if it is known saves
that: references to the same codes, and a recipe (`rematerialize`).
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..autograd import KERNELS, Origin
from ..private import constant_in_graphs, schema_of, version_of
from ..saved import memory_order
from . import rematerialize
from .codes import coded, whole
from .mode_stack import traced_graph
from .rules import SMALL

# ---- what is known of a tensor ----


@dataclass(frozen=True)
class Unfinished:
    """The arguments of a norm of images, and a shortcut added to it, so that an activation after it is fused with it.

    Compiled, the result of the norm alone is removed if nothing else reads it.
    """

    x: Tensor
    mean: Tensor
    r: Tensor
    w: Tensor | None
    b: Tensor | None
    shortcut: Tensor | None = None


@dataclass(frozen=True)
class Gate:
    """The argument and the name of an activation whose input is saved, so that a product after it is fused with it."""

    x: Tensor
    name: str


@dataclass(frozen=True)
class Exact:
    """The argument of a norm that saves it as it is: an activation after the norm has its input made of it again."""

    x: Tensor


_Kind = TypeVar("_Kind", Unfinished, Gate, Exact)


@constant_in_graphs
def traced_number() -> int | None:
    """Which graph is traced, that of a checkpoint being another than the one around it; None for none, or unknown."""
    graph = traced_graph()
    return None if graph is None else graph.__dict__.setdefault("_hotrain_number", next(_graphs))


@constant_in_graphs
def _traced_writes() -> str:
    """Which graph is traced, and how many in-place writes to large tensors it has so far.

    Functions with a body of their own (a checkpoint, an autograd function), which may write, count as writes.

    Dynamo has no version counters, does not say which tensors share memory, and passes some in-place functions to no
    mode (`torch.relu_`, `torch._foreach_add_`); but the graph traced so far can be read. If this PyTorch does not
    expose it, no two results are equal: then layers save codes of their own.
    """
    graph = traced_graph()
    if graph is None:
        return f"{next(_graphs)} unknown"
    number = graph.__dict__.setdefault("_hotrain_number", next(_graphs))
    return f"{number} {_count_writes(graph)}"


def _count_writes(graph: torch.fx.Graph) -> int:
    """Of the nodes that were counted before the last is remembered: graphs of thousands are asked a thousand times."""
    last, count = graph.__dict__.get("_hotrain_writes", (None, 0))
    if last is not None and last.prev.next is not last:  # it was erased
        last, count = None, 0
    node = next(iter(graph.nodes), None) if last is None else last.next
    while node is not None and node.op != "root":
        last, count = node, count + (_has_body(node) or writes(node))
        node = node.next
    graph.__dict__["_hotrain_writes"] = last, count
    return count


@constant_in_graphs
def read_apart() -> bool:
    """Whether the inputs of the last traced call share no memory; False if that is unknown."""
    graph = traced_graph()
    if graph is None:
        return False
    try:
        # In PyTorch 2.11 `reversed` of a list of nodes is a list, not an iterator.
        last = next(iter(reversed(graph.nodes)))
        read = [StorageWeakRef(node.meta["example_value"].untyped_storage()).cdata for node in last.all_input_nodes]
    except (KeyError, StopIteration):
        return False
    return len(read) > 1 and len(set(read)) == len(read)


def _has_body(node: torch.fx.Node) -> bool:
    kinds = type(node.target).__mro__ if node.op == "call_function" else ()
    return any(kind.__name__ == "HigherOrderOperator" for kind in kinds)


_graphs = itertools.count()


def writes(node: torch.fx.Node) -> bool:
    """Whether a node writes to a large tensor, which may share memory with one of known origin."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    if not (in_place or _is_flagged(node) or node.kwargs.get("out") is not None or _is_mutable(node.target)):
        return False
    values = [
        t.meta.get("example_value") for t in node.all_input_nodes
    ]  # SMALL counts bytes here, of the whole storage
    tensors = [t for t in values if isinstance(t, Tensor) and (t.is_floating_point() or t.dim() > 0)]  # but counters
    return any(t.untyped_storage().nbytes() >= SMALL for t in tensors)


def _is_flagged(node: torch.fx.Node) -> bool:
    """Whether a function of `torch.nn.functional` is called with inplace=True."""
    code = getattr(node.target, "__code__", None)
    names = () if code is None else code.co_varnames[: code.co_argcount]
    place = names.index("inplace") if "inplace" in names else len(node.args)
    return bool(node.args[place] if place < len(node.args) else node.kwargs.get("inplace", False))


def _is_mutable(target: Any) -> bool:
    """Whether the target is an operator that writes to arguments; hotrain's own write to statistics alone."""
    if isinstance(target, type(torch.ops.aten.add)):
        return any(_is_mutable(getattr(target, name)) for name in target.overloads())
    is_operator = isinstance(target, type(torch.ops.aten.add.Tensor)) and target.namespace != "hotrain"
    return is_operator and schema_of(target).is_mutable


_OPERATORS = ("add", "floordiv", "matmul", "mod", "mul", "pow", "sub", "truediv")
_IN_PLACE = frozenset(
    [
        *[f"i{name}" for name in _OPERATORS],
        *[f"__i{name}__" for name in _OPERATORS],
        "setitem",
        "__setitem__",
        "written",
    ]
)


def turned(t: Tensor) -> bool:
    """Whether rows of t (..., C) are contiguous, without gaps, in another order than that of the axes."""
    if t.dim() < 3 or t.is_contiguous() or t.stride(-1) != 1:
        return False
    return t.permute(memory_order(t)).is_contiguous()


_TWINS = 64  # as many as there are between an image and its last reader
_RECENT = 8  # tensors with a known origin at a time; within a block, tensors are read again soon


@dataclass
class Origins:
    """Tensors of the running forward with a known origin.

    In eager mode they are weak references; under Dynamo they exist only while it traces. Nothing is known across the
    borders of a checkpoint, whose second forward must find the same origins.

    Attributes:
        recent: (tensor and its version, origin), the latest first.
        unfinished: (tensor and its version, norm or activation), under Dynamo.
        checkpoint: `mode_stack.current_checkpoint` of the running forward.
        running: how many forwards of a model or a checkpointed block have begun and not ended.
        twins: (tensor and its version, the same in the layout of kernels), under Dynamo (`layouts`).
        read: tensors in whose place others were read (twins, an operator that computes them again), under Dynamo.
    """

    recent: tuple[tuple[Any, Origin], ...] = field(default=(), repr=False)
    unfinished: tuple[tuple[Any, Unfinished | Gate | Exact], ...] = field(default=(), repr=False)
    checkpoint: int = 0
    running: int = 0
    twins: tuple[tuple[Any, Tensor], ...] = field(default=(), repr=False)
    read: tuple[Tensor, ...] = field(default=(), repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {"recent": (), "unfinished": (), "checkpoint": 0, "running": 0}

    def begin(self, checkpoint: int) -> int | None:
        """Start the forward of a model or a checkpointed block, with nothing known; returns the argument of `end`.

        None for a part of the running forward that is in the same checkpoint: what that one made is known.
        """
        if self.running and checkpoint == self.checkpoint:
            return None
        before = self.checkpoint
        self.recent, self.checkpoint, self.running = (), checkpoint, self.running + 1
        return before

    def end(self, before: int | None) -> None:
        """End that forward; the enclosing one continues."""
        if before is not None:
            self.recent, self.checkpoint, self.running = (), before, self.running - 1

    def note(self, t: Tensor, recipe: str, *tensors: Tensor | None, by_heads: bool = False) -> None:
        """Record the `Origin` of a tensor: a recipe of `rematerialize`, and the tensors that it takes."""
        if torch.compiler.is_dynamo_compiling():
            known: Any = t, _traced_writes()
            kept = tuple([None if part is None else part.detach() for part in tensors])
        else:
            known = weakref.ref(t), version_of(t)
            kept = tensors
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                # Parameters are copied: in backward the next layer reads them before the norm, when FSDP may not have
                # gathered them yet.
                kept = tuple(p.detach().clone() if p is not None and p.requires_grad else p for p in tensors)
        remake = whole if t.device.type in KERNELS else rematerialize.make
        self.recent = ((known, Origin(recipe, kept, remake, coded, by_heads)), *self.recent[: _RECENT - 1])

    def note_unfinished(self, t: Tensor, what: Unfinished | Gate | Exact) -> None:
        """Record, under Dynamo, that t is the result of this norm or activation."""
        self.unfinished = (((t, _traced_writes()), what), *self.unfinished[: _RECENT - 1])

    def unfinished_of(self, t: Tensor, kind: type[_Kind]) -> _Kind | None:
        """What t is the result of, unchanged since; None in eager mode, for another tensor, or another kind."""
        if not self.unfinished or not torch.compiler.is_dynamo_compiling():
            return None
        found: _Kind | None = None
        for known, what in self.unfinished:
            # Counting writes reads the graph: it is done for this tensor alone.
            if found is None and isinstance(what, kind) and known[0] is t and known[1] == _traced_writes():
                found = what
        if found is not None and kind is not Exact:
            self.read = (t, *self.read[: _TWINS - 1])
        return found

    def note_twin(self, t: Tensor, twin: Tensor) -> None:
        """Record, under Dynamo, that twin is t in another layout; what was known of twin holds, if t was written to."""
        now = _traced_writes()
        self.twins = (((t, now), twin), *self.twins[: _TWINS - 1])
        self.recent = tuple([((twin, now), o) if known[0] is twin else (known, o) for known, o in self.recent])
        self.unfinished = tuple([((twin, now), w) if known[0] is twin else (known, w) for known, w in self.unfinished])

    def has_hook(self, t: Tensor) -> None:
        """Let operators read t itself from now on, whose gradient has a hook.

        Raises:
            NotImplementedError: an operator has read it, whose gradient the hook would not see.
        """
        if [other for other in self.read if other is t]:
            raise NotImplementedError(
                "hotrain: a compiled tensor gets a hook after an operator has read it; register the hook before"
            )
        self.twins = tuple([(known, twin) for known, twin in self.twins if known[0] is not t])
        self.unfinished = tuple([(known, what) for known, what in self.unfinished if known[0] is not t])

    def twin(self, t: Tensor) -> Tensor | None:
        """t in the layout of kernels, where it is known and nothing was written since."""
        found = None
        for known, twin in self.twins:
            if found is None and known[0] is t and known[1] == _traced_writes():
                found = twin
        if found is not None:
            self.read = (t, *self.read[: _TWINS - 1])
        return found

    def in_rows(self, t: Tensor) -> Tensor:
        """Under Dynamo, tokens (..., C) with rows in the order of their axes: t itself, its twin, or a new one."""
        if not turned(t):
            return t
        twin = self.twin(t)
        if twin is None:
            twin = t.contiguous()
            self.note_twin(t, twin)
        return twin

    def had_twin(self, t: Tensor) -> bool:
        """Whether t is a copy of a twin, and has no hook: then no gradient of it is seen."""
        found = False
        for known, _ in self.twins:  # PyTorch 2.11's compiler traces no bool() of a list
            if known[0] is t:
                found = True
        return found

    def of(self, t: Tensor, by_heads: bool = False) -> Origin | None:
        """The origin of a tensor, in the forward, and checkpoint, that began last.

        None if t is another object, or was written to since. With `by_heads` attention's result alone is found, of
        which the transpose alone can be made; without it everything else.
        """
        if not self.recent:
            return None
        found = None
        if torch.compiler.is_dynamo_compiling():
            for known, origin in self.recent:
                if found is None and known[0] is t and known[1] == _traced_writes():
                    found = origin
        else:
            for (known, version), origin in self.recent:
                # Entries made under Dynamo are skipped: their tensors may have been written to since.
                if isinstance(known, weakref.ref) and known() is t and version_of(t) == version:
                    found = origin
                    break
        return found if found is not None and found.by_heads == by_heads else None
