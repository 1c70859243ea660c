"""Origins: what lets backward make a tensor again from codes that an operator before it keeps, so that the layer behind
it keeps nothing of its own.

A norm keeps codes of x̂, and its result is γ x̂ + β; an activation keeps codes of its input; the result of attention is
kept for attention's own gradient. Whoever reads such a tensor next asks `Origins` whether it knows this very tensor,
and if so keeps the origin: the same codes, once more referred to, and a recipe (`recipes`).
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .format_policy import SMALL
from .kernel_ops import whole
from .rematerialize import is_by_heads

# ---- who knows which tensor ----


@dataclass(frozen=True)
class Origin:
    """How a tensor is made again.  tensors: what the recipe uses up; they are kept by the operator before anyway."""

    recipe: str
    tensors: tuple[Tensor | None, ...]

    @property
    def remake(self) -> Callable[[Sequence[Tensor | None], Sequence[int], torch.dtype], Tensor]:
        """`launches.whole` with the recipe, without the tensors: autograd holds these, and gives them back."""
        return functools.partial(whole, self.recipe)


@dataclass(frozen=True)
class Unfinished:
    """The result of batch norm, and what was added to it: the function behind may be computed in the same kernel.

    A tracer drops the first result where nothing else reads it.
    """

    x: Tensor
    mean: Tensor
    r: Tensor
    w: Tensor | None
    b: Tensor | None
    shortcut: Tensor | None = None


def current_checkpoint() -> int:
    """Which non-reentrant checkpoint's forward this is, 0 for none."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    name = "" if hooks is None else getattr(hooks[0], "__qualname__", "")  # a partial of somebody's has none
    return id(hooks[0]) if hooks is not None and name.startswith("_checkpoint_hook.") else 0


current_checkpoint._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a tracer asks once


def _traced_graph() -> torch.fx.Graph:
    """What a tracer has traced so far. Raises ImportError or AttributeError where a PyTorch does not let it be read."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    graph: torch.fx.Graph = InstructionTranslator.current_tx().output.current_tracer.graph  # type: ignore[attr-defined]
    return graph


def _traced_writes() -> str:
    """Which graph is traced, and how often a large tensor has been written to in it.

    A tracer has no versions, does not say what shares memory, and hides some functions in place from modes
    (`torch.relu_`, `torch._foreach_add_`); but what it has traced so far can be read. Where a PyTorch does not let it
    be read, no two answers are the same: then layers keep codes of their own.
    """
    try:
        from torch._dynamo.eval_frame import skip_code

        graph = _traced_graph()
    except (ImportError, AttributeError):
        return f"{next(_graphs)} unknown"
    skip_code(current_checkpoint.__code__)  # where a graph breaks it is called in eager, and must not be compiled alone
    number = graph.__dict__.setdefault("_hotrain_number", next(_graphs))
    return f"{number} {sum(map(_writes, graph.nodes))}"


def read_apart() -> bool:
    """Whether the tensors that the last call in the trace read lie apart in memory; False where that cannot be seen."""
    try:
        # Reversed, PyTorch 2.11's list of nodes is a list again and no iterator.
        last = next(iter(reversed(_traced_graph().nodes)))
        read = [node.meta["example_value"].untyped_storage()._cdata for node in last.all_input_nodes]
    except (ImportError, AttributeError, KeyError, StopIteration):
        return False
    return len(read) > 1 and len(set(read)) == len(read)


read_apart._dynamo_marked_constant = True  # type: ignore[attr-defined]
_traced_writes._dynamo_marked_constant = True  # type: ignore[attr-defined]
_graphs = itertools.count()


def _writes(node: torch.fx.Node) -> bool:
    """Whether a node writes to a tensor that may share memory with one that is known."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    if not (in_place or _is_flagged(node) or node.kwargs.get("out") is not None or _is_mutable(node.target)):
        return False
    values = [t.meta.get("example_value") for t in node.all_input_nodes]
    return any(
        isinstance(t, Tensor) and t.is_floating_point() and t.untyped_storage().nbytes() >= SMALL for t in values
    )


def _is_flagged(node: torch.fx.Node) -> bool:
    """Whether a function of `torch.nn.functional` is called with inplace=True."""
    code = getattr(node.target, "__code__", None)
    names = () if code is None else code.co_varnames[: code.co_argcount]
    place = names.index("inplace") if "inplace" in names else len(node.args)
    return bool(node.args[place] if place < len(node.args) else node.kwargs.get("inplace", False))


def _is_mutable(target: Any) -> bool:
    """Whether that is an operator which writes; hotrain's write to counters and statistics alone."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return any(_is_mutable(getattr(target, name)) for name in target.overloads())
    ours = isinstance(target, torch._ops.OpOverload) and target.namespace == "hotrain"
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable and not ours


_OPERATORS = ("add", "floordiv", "matmul", "mod", "mul", "pow", "sub", "truediv")
_IN_PLACE = frozenset(
    [f"i{name}" for name in _OPERATORS] + [f"__i{name}__" for name in _OPERATORS] + ["setitem", "__setitem__"]
)
_RECENT = 8  # tensors that are known at a time: within a block, what is read again is read soon


@dataclass
class Origins:
    """The tensors of the forward that runs whose origin is known.

    In eager they are held weakly; a tracer's are only there while it traces. checkpoint: in whose forward this is: what
    is recomputed must find what it found first, so nothing is known across its borders.
    """

    recent: tuple[tuple[Any, Origin], ...] = field(default=(), repr=False)
    unfinished: tuple[tuple[Any, Unfinished], ...] = field(default=(), repr=False)
    checkpoint: int = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"recent": (), "unfinished": (), "checkpoint": 0}

    def begin(self) -> int:
        """A block's forward begins: nothing is known. Returns what `end` asks for."""
        before = self.checkpoint
        self.recent, self.checkpoint = (), current_checkpoint()
        return before

    def end(self, before: int) -> None:
        """The forward is over, the one around it goes on."""
        self.recent, self.checkpoint = (), before

    def note(self, t: Tensor, recipe: str, *tensors: Tensor | None) -> None:
        """That t can be made of these."""
        if torch.compiler.is_dynamo_compiling():
            held: Any = t, _traced_writes()
            kept = tuple([None if part is None else part.detach() for part in tensors])
        else:
            held = weakref.ref(t), t._version
            kept = tensors
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                # Parameters are copied: the layer behind reads them in backward before the norm does, when FSDP may not
                # have gathered them yet.
                kept = tuple(p.detach().clone() if p is not None and p.requires_grad else p for p in tensors)
        self.recent = ((held, Origin(recipe, kept)), *self.recent[: _RECENT - 1])

    def note_unfinished(self, t: Tensor, what: Unfinished) -> None:
        """That t, while a tracer runs, is what that is so far."""
        self.unfinished = (((t, _traced_writes()), what), *self.unfinished[: _RECENT - 1])

    def unfinished_of(self, t: Tensor) -> Unfinished | None:
        """What this very tensor, unchanged since, is so far; None in eager, or where it is something else."""
        if not self.unfinished or not torch.compiler.is_dynamo_compiling():
            return None
        found = None
        for held, what in self.unfinished:
            # The trace is read for this very tensor alone: that goes through all of it.
            if found is None and held[0] is t and held[1] == _traced_writes():
                found = what
        return found

    def of(self, t: Tensor, by_heads: bool = False) -> Origin | None:
        """The origin of this very tensor, unchanged since, or None.

        by_heads: also of what attention returns, of which only a transpose can be made.
        """
        if not self.recent:
            return None
        found = None
        if torch.compiler.is_dynamo_compiling():
            for held, origin in self.recent:
                if found is None and held[0] is t and held[1] == _traced_writes():
                    found = origin
        elif current_checkpoint() == self.checkpoint:
            for held, origin in self.recent:
                # What a tracer noted stays with the tracer: it may have been written to since its graph ended.
                if found is None and isinstance(held[0], weakref.ref) and held[0]() is t and t._version == held[1]:
                    found = origin
        return None if found is None or (is_by_heads(found.recipe) and not by_heads) else found
