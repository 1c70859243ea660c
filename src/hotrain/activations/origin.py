"""Origins: what lets backward make a tensor again from codes that an operator before it keeps, so that the layer behind
it keeps nothing of its own.

A norm keeps codes of x̂, and its result is γ x̂ + β; an activation keeps codes of its input; the result of attention is
kept for attention's own gradient. Whoever reads such a tensor next asks `Origins` whether it knows this very tensor,
and if so keeps the origin: the same codes, once more referred to, and a recipe.

A recipe is a string, so that it can be an operator's argument: JSON, which uses up a list of tensors from the left.

    ["values", form, C]           codes and scales of rows of C entries
    ["values", form, C, "image"]  the same of (N, C, H, W), rows along its channels
    ["heads", form, C]            codes of (B, T, H, C), of attention's (B, H, T, C): good for its transpose only
    ["norm", values, cast]        values as above, then γ and β or None: γ x̂ + β; cast: x̂ is rounded first
    ["of", name, inner]           an activation's result
    ["product", inner, inner]     entry by entry
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import backward
from ..saved import Bits, Grouped, Levels
from .curves import ACTIVATIONS
from .policy import GROUPED, SMALL

_TAG = "partitioner_tag"  # of torch._functorch.partitioners


def restore(
    form: Grouped | Levels | Bits, kept: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype = torch.bool
) -> Tensor:
    """What backward reads of what forward kept.

    A compiler decides by itself what it keeps between forward and backward, and would at times keep a full tensor: the
    result of this, or that from which several codes can be made again. So it is told that this belongs to backward,
    and that codes are tensors in memory (which its partitioner takes those to be that enter an operator of `prims`),
    for others count twice.
    """
    if not torch.fx.traceback.has_preserved_node_meta():
        return form.restore(kept, shape, dtype)
    meta = torch.fx.traceback.current_meta
    before = meta.get(_TAG)
    meta[_TAG] = "must_be_in_backward"
    try:
        codes = torch.bitwise_not(torch.ops.prims.bitwise_not.default(kept[0]))
        return form.restore((codes, *kept[1:]), shape, dtype)
    finally:
        if before is None:
            meta.pop(_TAG, None)
        else:
            meta[_TAG] = before


def wide(t: Tensor) -> Tensor:
    """In float32, or float64 where it is."""
    return t.to(backward.wide(t.dtype))


# ---- recipes ----

_IMAGE = ', "image"'


def values(form: str, columns: int, image: bool = False) -> str:
    """The recipe of what `GROUPED[form]` keeps of rows of that many entries."""
    return f'["values", "{form}", {operator.index(columns)}{_IMAGE if image else ""}]'


def normed(inner: str, cast: bool) -> str:
    return f'["norm", {inner}, {"true" if cast else "false"}]'


def of(name: str, inner: str) -> str:
    return f'["of", "{name}", {inner}]'


def product(a: str, b: str) -> str:
    return f'["product", {a}, {b}]'


def heads(form: str, columns: int) -> str:
    """The recipe of attention's result, (B, H, T, D): there are codes of (B, T, H, D), so that alone can be made."""
    return f'["heads", "{form}", {operator.index(columns)}]'


def is_by_heads(recipe: str) -> bool:
    return recipe.startswith('["heads"')


def by_tokens(recipe: str) -> str:
    """The recipe of (B, T, H, D), from that of `heads`."""
    return recipe.replace("heads", "values", 1)


def is_in_order(recipe: str) -> bool:
    """Whether entries are made in the order of the tensor, so that any of its shapes can be made."""
    return not is_by_heads(recipe) and not is_image(recipe)


def is_image(recipe: str) -> bool:
    return _IMAGE in recipe


def is_recipe(form: str) -> bool:
    return form.startswith("[")


@functools.lru_cache(maxsize=4096)
def _parsed(recipe: str) -> Any:
    return json.loads(recipe)


def make(recipe: str, tensors: Sequence[Tensor | None], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The tensor of that recipe, of a shape in which its entries follow one another as in the tensor it is of."""
    return _made(_parsed(recipe), iter(tensors), shape, dtype)


def _made(recipe: Any, supply: Iterator[Tensor | None], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    kind, *rest = recipe
    if kind == "values":
        return _values(rest, supply, shape, dtype)
    if kind == "of":
        return ACTIVATIONS[rest[0]].f(_made(rest[1], supply, shape, dtype))
    if kind == "product":
        return _made(rest[0], supply, shape, dtype) * _made(rest[1], supply, shape, dtype)
    (_, form, columns, *image), cast = rest
    normal = _values((form, columns, *image), supply, shape if image else (-1, columns), backward.wide(dtype))
    w, b = next(supply), next(supply)
    if cast:
        normal = wide(normal.to(dtype))
    along = (1, -1, *[1] * (len(shape) - 2)) if image else (-1,)
    shaped = b if w is None else w
    if shaped is not None and shaped.dim() > 1:
        normal, along = normal.view(-1, *shaped.shape), tuple(shaped.shape)
    if w is not None:
        normal = normal * wide(w).view(along)
    if b is not None:
        normal = normal + wide(b).view(along)
    return normal.to(dtype).reshape(tuple(shape))


def _values(parts: Sequence[Any], supply: Iterator[Tensor | None], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    form, columns, *image = parts
    kept = next(supply), next(supply)
    if image:
        n, c, *rest = shape
        return restore(GROUPED[form], kept, (n, *rest, c), dtype).movedim(-1, 1)  # type: ignore[arg-type]
    return restore(GROUPED[form], kept, (-1, columns), dtype).reshape(tuple(shape))  # type: ignore[arg-type]


# ---- who knows which tensor ----


@dataclass(frozen=True)
class Origin:
    """How a tensor is made again.  tensors: what the recipe uses up; they are kept by the operator before anyway."""

    recipe: str
    tensors: tuple[Tensor | None, ...]

    @property
    def remake(self) -> Callable[[Sequence[Tensor | None], Sequence[int], torch.dtype], Tensor]:
        """`make` with the recipe, without the tensors: autograd holds these, and gives them back."""
        return functools.partial(make, self.recipe)


def current_checkpoint() -> int:
    """Which non-reentrant checkpoint's forward this is, 0 for none."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    name = "" if hooks is None else getattr(hooks[0], "__qualname__", "")  # a partial of somebody's has none
    return id(hooks[0]) if hooks is not None and name.startswith("_checkpoint_hook.") else 0


current_checkpoint._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a tracer asks once


def _traced_writes() -> str:
    """Which graph is traced, and how often a large tensor has been written to in it.

    A tracer has no versions, does not say what shares memory, and hides some functions in place from modes
    (`torch.relu_`, `torch._foreach_add_`); but what it has traced so far can be read. Where a PyTorch does not let it
    be read, no two answers are the same: then layers keep codes of their own.
    """
    try:
        from torch._dynamo.eval_frame import skip_code
        from torch._dynamo.symbolic_convert import InstructionTranslator

        graph = InstructionTranslator.current_tx().output.current_tracer.graph
    except (ImportError, AttributeError):
        return f"{next(_graphs)} unknown"
    skip_code(current_checkpoint.__code__)  # where a graph breaks it is called in eager, and must not be compiled alone
    number = graph.__dict__.setdefault("_hotrain_number", next(_graphs))
    return f"{number} {sum(map(_writes, graph.nodes))}"


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
    checkpoint: int = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"recent": (), "checkpoint": 0}

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
            # Parameters are copied: the layer behind reads them in backward before the norm does, when FSDP may not
            # have gathered them yet.
            kept = tuple(p.detach().clone() if p is not None and p.requires_grad else p for p in tensors)
        self.recent = ((held, Origin(recipe, kept)), *self.recent[: _RECENT - 1])

    def of(self, t: Tensor, by_heads: bool = False) -> Origin | None:
        """The origin of this very tensor, unchanged since, or None.

        by_heads: also of what attention returns, of which only a transpose can be made.
        """
        if not self.recent:
            return None
        found = None
        if torch.compiler.is_dynamo_compiling():
            now = _traced_writes()
            for held, origin in self.recent:
                if found is None and held[0] is t and held[1] == now:
                    found = origin
        elif current_checkpoint() == self.checkpoint:
            for held, origin in self.recent:
                # What a tracer noted stays with the tracer: it may have been written to since its graph ended.
                if found is None and isinstance(held[0], weakref.ref) and held[0]() is t and t._version == held[1]:
                    found = origin
        return None if found is None or (is_by_heads(found.recipe) and not by_heads) else found
