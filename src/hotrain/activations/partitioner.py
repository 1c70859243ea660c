"""What no operator serves, compiled: codes of what a graph keeps, where backward's use of it bears them.

`torch.compile` makes one graph of forward and backward and cuts it in two; what crosses the cut is kept. PyTorch's own
partitioner cuts, and here the two halves are gone over once more: of each large floating-point tensor that crosses,
`uses` says which rounding backward bears, forward hands over codes instead, and backward makes the tensor again right
before its first use. Both are PyTorch's operators, which the compiler fuses with what is around them. What stays in
full is written into the report, with its bytes and the function that asks for it.

Which tensors are a converted model's is written on the nodes while Dynamo traces (`mode.Buffers.region`). Graphs
without such nodes are left as they were cut. Inductor is told of all this by its own setting, when a converted model is
first traced; a backend of one's own is handed `partition` as it would be handed
`torch._functorch.partitioners.min_cut_rematerialization_partition`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch._inductor.config
from torch import Tensor
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch._subclasses import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from ..saved import as_it_was, memory_order
from . import graph_uses
from .eager_fallback import FORMS
from .format_policy import BITS, SMALL
from .mode import KEY

if TYPE_CHECKING:
    from .mode import Buffers

_COLUMNS = 16  # entries along which there are to be groups at least
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_SMOOTH_FORM = "int8"
_CHEAPER = 0.75  # of what is kept: what a derivative in its place may be

_regions: weakref.WeakValueDictionary[str, Buffers] = weakref.WeakValueDictionary()


def region(buffers: Buffers) -> str:
    """What is to be written on the nodes, under `KEY`, that belong to the model that writes to `buffers`."""
    config = torch._inductor.config
    if not isinstance(config.custom_partitioner_fn, Partitioner):
        config.custom_partitioner_fn = Partitioner(config.custom_partitioner_fn)
    _regions[buffers.name] = buffers
    buffers.uncut = True
    return buffers.name


class Partitioner(CustomPartitionerFn):
    """PyTorch's partitioner, or `inner`, and then `compress`."""

    def __init__(self, inner: CustomPartitionerFn | None = None) -> None:
        self.inner = inner

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        return partition(gm, joint_inputs, self.inner, **kwargs)

    def uuid(self) -> object:
        ours = get_hash_for_files((__file__, graph_uses.__file__))
        if self.inner is None:
            return ours
        theirs = self.inner.uuid()
        return None if theirs is None else (ours, theirs)


def partition(
    gm: GraphModule,
    joint_inputs: Sequence[object],
    inner: Callable[..., tuple[GraphModule, GraphModule]] | None = None,
    *,
    num_fwd_outputs: int,
    **kwargs: Any,
) -> tuple[GraphModule, GraphModule]:
    """The two halves of a graph, forward's tensors for backward in codes where they may be.

    gm, joint_inputs, num_fwd_outputs and kwargs are as PyTorch hands them to a partitioner; inner: one that cuts, by
    default `min_cut_rematerialization_partition`.
    """
    inner = inner or min_cut_rematerialization_partition
    forward, backward = inner(gm, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)
    if any(_region(node) for node in forward.graph.nodes):
        compress(forward, backward, num_fwd_outputs, kwargs.get("static_lifetime_input_indices") or ())
    return forward, backward


def compress(forward: GraphModule, backward: GraphModule, results: int, static: Sequence[int] = ()) -> None:
    """Let forward hand codes to backward.

    results: of forward's outputs, those that its caller gets.  static: which of its arguments are parameters.
    """
    halves, account = _Halves(forward.graph, backward.graph, results), _Account()
    places = forward.graph.find_nodes(op="placeholder")
    weights = _made_of(forward.graph, {places[number] for number in static if number < len(places)})
    others = {_base(node) for node in (*places, *halves.outputs[:results]) if isinstance(node, Node)}
    groups = _by_memory(node for node in halves.kept if node not in places or node not in weights)

    made = halves.uses()
    for base, group in groups.items():
        node = group[0]
        if len(group) > 1 or base in others or node in weights or not _is_large(node):
            continue
        found = made.uses(halves.arguments[node.name])
        factors = made.factors(halves.arguments[node.name]) if found.whole == graph_uses.EXACT else None
        forms = None if factors is None else _cheaper(node, factors, halves.kept)
        if forms:
            account.add(node, found.names, "its derivative in " + ", ".join(sorted(set(forms.values()) - {""})), "")
            halves.hand_factors(node, forms)
            made = halves.uses()

    decided = []
    for base, group in groups.items():
        for node in filter(halves.is_needed, filter(_is_large, group)):
            form, why, names = _form(node, made.uses(halves.arguments[node.name]), alone=len(group) == 1)
            if node in weights:
                form, why, names = "", "they do not grow with the batch", {"copies of weights"}
            elif base in others:
                form, why, names = "", "whoever calls the graph holds them", {"arguments and results"}
            decided.append((node, form))
            account.add(node, names, form, why)
    for node, form in decided:
        if form:
            halves.hand_codes(node, form)
    if halves.finish():
        for half in (forward, backward):
            half.graph.lint()
            half.recompile()
    kept = halves.kept_bytes({places[number] for number in static if number < len(places)})
    for name in {_region(node) for node in forward.graph.nodes} & set(_regions):
        account.tell(name, kept)


def _made_of(graph: Graph, parameters: set[Node]) -> set[Node]:
    """What is made of parameters and of nothing else, they themselves among it."""
    found = set(parameters)
    for node in graph.nodes:
        if node.op == "call_function" and all(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def _region(node: Node) -> str:
    """Whose a node is; of an argument, whose is the first that uses it."""
    if node.op == "placeholder":
        return next((_region(user) for user in node.users if user.op != "output"), "")
    return (node.meta.get("custom") or {}).get(KEY, "")


def _by_memory(kept: Iterable[Node]) -> dict[Node, list[Node]]:
    """What is kept, by whose memory it is: full views of one tensor are kept once, and their codes would not be."""
    groups: dict[Node, list[Node]] = {}
    for node in dict.fromkeys(kept):
        groups.setdefault(_base(node), []).append(node)
    return groups


def _base(node: Node) -> Node:
    while node.op == "call_function" and _is_view(node):
        (node,) = node.all_input_nodes
    return node


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    aliases = schema is not None and schema.arguments and schema.arguments[0].alias_info is not None
    return bool(aliases) and len(node.all_input_nodes) == 1


def _is_large(node: Node) -> bool:
    """Whether it is a large floating-point tensor of a converted model."""
    value = node.meta.get("val")
    return (
        type(value) is FakeTensor
        and value.dtype in _FLOATS
        and bool(_region(node))
        and graph_uses.entries(node) >= SMALL
        and not any(isinstance(n, int) and n == 0 for n in value.stride())  # an expanded one's memory is small
    )


def _form(node: Node, found: graph_uses.Uses, alone: bool) -> tuple[str, str, set[str]]:
    """In which form it is to be kept, "" for as it is, and why so; of which functions."""
    kind = found.whole
    value = node.meta["val"]
    if kind == graph_uses.VALUE and (graph_uses.spans_magnitudes(node) or graph_uses.is_normed(node)):
        kind = graph_uses.RATIO
    if kind == graph_uses.OURS:
        return "", "", found.names
    if kind == graph_uses.EXACT:
        return "", _reason(found.exact), found.exact
    if graph_uses.is_statistic(node):
        return "", "a sum or a mean of many, which is small beside them", {"statistics"}
    if not alone:
        return "", "several views of one tensor are kept", found.names
    if kind == graph_uses.RATIO:
        if value.dtype != torch.float32:
            return "", "its derivative asks for all digits", found.names
        return "bfloat16", "", found.names
    if kind in (graph_uses.VALUE, graph_uses.SHAPE) and not isinstance(_Rows(value).columns, int):
        return "", "of a size that changes from call to call", found.names
    return {graph_uses.VALUE: _SMOOTH_FORM, graph_uses.SIGN: "sign", graph_uses.SHAPE: "shape"}[kind], "", found.names


def _cheaper(node: Node, factors: Mapping[Node, str], kept: Sequence[Node]) -> dict[Node, str]:
    """Forms for what is made from a kept tensor, "" for as it is; nothing where they would not be much less than it."""
    forms, size, known = {}, 0.0, {n.name: n for n in kept}
    for factor, kind in factors.items():
        value, number = factor.meta.get("val"), graph_uses.entries(factor)
        if not isinstance(value, Tensor):
            return {}
        if value.dtype == torch.bool and _is_static(value):
            form, each = "bits", 1 / 8
        elif kind == graph_uses.SIGN and value.dtype in _FLOATS:
            form, each = "sign", 1
        elif value.dtype not in _FLOATS or number < SMALL:
            form, each = "", value.dtype.itemsize
        elif kind == graph_uses.RATIO or graph_uses.spans_magnitudes(factor, known):
            form, each = ("bfloat16" if value.dtype == torch.float32 else ""), 2
        elif isinstance(_Rows(value).columns, int):
            form, each = _SMOOTH_FORM, 1 + 1 / 16
        else:
            return {}
        forms[factor] = form
        size += number * each
    return forms if size < _CHEAPER * graph_uses.entries(node) * node.meta["val"].dtype.itemsize else {}


def _reason(names: set[str]) -> str:
    if graph_uses.CHECKPOINT in names:
        return "from it a block is recomputed"
    return "there is no rule for it"


class _Account:
    """What became of the kept tensors, for the reports."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, tuple[str, ...], str, str], int] = {}

    def add(self, node: Node, names: set[str], form: str, why: str) -> None:
        if form or why:
            key = _region(node), tuple(sorted(names)), form, why
            self.rows[key] = self.rows.get(key, 0) + graph_uses.entries(node) * node.meta["val"].dtype.itemsize

    def tell(self, region: str, kept: int) -> None:
        """Write it into the report.  kept: bytes that cross the cut in all."""
        buffers = _regions[region]
        buffers.uncut = False
        buffers.graphs.append(kept)
        for (where, names, form, why), size in self.rows.items():
            if where == region:
                what = ", ".join(names)
                if form:
                    buffers.serve(f"{what} (saved)", form)
                else:
                    buffers.leave(what, f"{size / 2**20:.1f} MiB, compiled: {why}")


# ---- forward hands over codes, backward makes the tensor again ----


class _Halves:
    """The graphs of forward and backward, and what crosses from one to the other.

    outputs: of forward; the first ones are `results` for its caller.  kept: the others, by their nodes in forward.
    arguments: the same by their names, as nodes of backward.
    """

    def __init__(self, forward: Graph, backward: Graph, results: int) -> None:
        self.forward, self.backward, self.results = forward, backward, results
        self.output = forward.output_node()
        self.outputs: list[Any] = list(self.output.args[0])  # type: ignore[arg-type]
        self.arguments = {node.name: node for node in backward.find_nodes(op="placeholder")}
        crossing = [node for node in self.outputs[results:] if isinstance(node, Node)]
        self.kept = [node for node in dict.fromkeys(crossing) if node.name in self.arguments]
        self.handed: dict[Node, list[Node]] = {}  # by what was kept until now
        self.taken: list[Node] = []  # new arguments of backward

    def uses(self) -> graph_uses.Backward:
        old = (self.arguments[node.name] for node in self.kept if self.is_needed(node))
        return graph_uses.Backward(self.backward, [*old, *self.taken])

    def is_needed(self, node: Node) -> bool:
        return node not in self.handed and bool(self.arguments[node.name].users)

    def hand_codes(self, node: Node, form: str) -> None:
        """Codes of a kept tensor in its place."""
        argument = self.arguments[node.name]
        self.handed[node] = self._hand(node, argument, form, argument)

    def hand_factors(self, node: Node, forms: Mapping[Node, str]) -> None:
        """In place of a kept tensor what backward makes from it, made in forward."""
        copies = self._in_forward(forms)
        argument = self.arguments[node.name]
        self.handed[node] = [
            part for factor, form in forms.items() for part in self._hand(copies[factor], factor, form, argument)
        ]
        for dead in reversed(list(self.backward.nodes)):
            if dead.op == "call_function" and not dead.users and not dead.is_impure():
                self.backward.erase_node(dead)

    def finish(self) -> bool:
        """Write down what crosses now; False where that is what crossed before."""
        for node in self.kept:
            if not self.arguments[node.name].users and isinstance(node.meta.get("val"), Tensor):
                self.handed.setdefault(node, [])
                self.backward.erase_node(self.arguments[node.name])
        if not self.handed:
            return False
        kept = [self.handed.get(node, [node]) for node in self.outputs[self.results :]]
        new = [*([node] for node in self.outputs[: self.results]), *kept]
        self.output.args = (tuple(part for parts in new for part in parts),)
        described = self.output.meta.get("desc")
        if described is not None and len(described) == len(new):
            self.output.meta["desc"] = [d for d, parts in zip(described, new, strict=True) for _ in parts]
        return True

    def kept_bytes(self, parameters: set[Node]) -> int:
        """Bytes of the memory that crosses the cut, without that of parameters, each once."""
        crossing: Any = self.output.args[0]
        bases = {_base(node) for node in crossing[self.results :] if isinstance(node, Node)} - parameters
        held = [base for base in bases if isinstance(base.meta.get("val"), Tensor)]
        return sum(graph_uses.entries(base) * base.meta["val"].dtype.itemsize for base in held)

    def _in_forward(self, wanted: Iterable[Node]) -> dict[Node, Node]:
        """Nodes of backward that are made from kept tensors alone, made in forward."""
        needed, waiting = set(), list(wanted)
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                waiting += node.all_input_nodes
        there = {node.name: node for node in self.forward.nodes}
        copies = {node: there[node.name] for node in needed if node.op == "placeholder"}
        given = set(copies.values())
        last = next(node for node in reversed(self.forward.nodes) if node in given)
        with self.forward.inserting_before(last.next):
            for node in self.backward.nodes:
                if node in needed and node not in copies:
                    copies[node] = self.forward.node_copy(node, copies.__getitem__)
        return copies

    def _hand(self, source: Node, target: Node, form: str, place: Node) -> list[Node]:
        """Codes of `source` of forward; backward takes them as arguments before `place`, and uses what it makes of them
        instead of `target`."""
        keep, restore = _pair(source.meta["val"], form)
        # Right behind it: what is made at the end of forward would keep the tensor alive until then.
        codes = _inline(self.forward, source.next, keep, [source]) if form else [source]
        taken = []
        for number, part in enumerate(codes):
            if form or part.name not in self.arguments:
                part.name = _free(f"{source.name}_codes_{number}", self.forward, self.backward)
            part.meta["saved_tensor_with_no_vc_check"] = place.meta.get("saved_tensor_with_no_vc_check", False)
            with self.backward.inserting_before(place):
                taken.append(self.backward.placeholder(part.name))
            taken[-1].meta = {**part.meta}
        self.taken += taken
        order = {n: number for number, n in enumerate(self.backward.nodes)}
        first = min(target.users, key=order.__getitem__)
        (made,) = _inline(self.backward, first, restore, taken) if form else taken
        target.replace_all_uses_with(made)
        return codes


def _inline(graph: Graph, before: Node, fn: Callable[..., Any], inputs: Sequence[Node]) -> list[Node]:
    """fn of the nodes, as nodes: each of PyTorch's operators that Inductor knows."""
    from torch._inductor.decomposition import select_decomp_table

    values = [node.meta["val"] for node in inputs]
    mode = detect_fake_mode(values)
    assert mode is not None
    with mode, torch.no_grad():
        traced = make_fx(fn, decomposition_table=select_decomp_table())(*values)
    places = traced.graph.find_nodes(op="placeholder")
    env: dict[Node, Any] = dict(zip(places, inputs, strict=True))
    with graph.inserting_before(before):
        for step in traced.graph.nodes:
            if step.op == "output":
                results = step.args[0] if isinstance(step.args[0], tuple | list) else [step.args[0]]
                return [env[result] for result in results]
            if step.op == "get_attr":
                raise RuntimeError(f"hotrain: {step.target} is no operator's argument; please report this")
            if step.op != "placeholder":
                env[step] = graph.node_copy(step, env.__getitem__)
    raise AssertionError("a graph without an output")


def _free(name: str, *graphs: Graph) -> str:
    taken = {node.name for graph in graphs for node in graph.nodes}
    return next(n for n in (name, *(f"{name}_{i}" for i in range(len(taken) + 1))) if n not in taken)


class _Rows:
    """How a tensor like `value` lies as rows: its axes from the sparsest to the densest, and how many of the last ones
    make a row.

    Codes keep the other axes' sizes, from which backward has them where they change from call to call.
    """

    def __init__(self, value: Tensor) -> None:
        if _is_static(value):
            self.order = memory_order(value)
        else:
            self.order = sorted(range(value.dim()), key=lambda axis: -graph_uses.hint(value.stride(axis)))
        sizes = [value.shape[axis] for axis in self.order]
        self.lasting = 0  # of the last axes
        columns: Any = 1
        while self.lasting < len(sizes) and (self.lasting == 0 or columns < _COLUMNS):
            self.lasting += 1
            columns = columns * sizes[-self.lasting]
            if not isinstance(columns, int):
                break
        self.row, self.columns = sizes[-self.lasting :], columns

    def of(self, t: Tensor) -> Tensor:
        """(..., columns)"""
        return t.permute(self.order).unsqueeze(0).flatten(-self.lasting)

    def back(self, rows: Tensor) -> Tensor:
        return as_it_was(rows.unflatten(-1, self.row).squeeze(0), self.order)


def _is_static(value: Tensor) -> bool:
    return all(isinstance(n, int) for n in (*value.shape, *value.stride()))


def _pair(value: Tensor, form: str) -> tuple[Callable[[Tensor], Any], Callable[..., Tensor]]:
    """How a tensor like `value` becomes codes in that form, and how it comes back."""
    dtype, shape, lies = value.dtype, value.shape, _Rows(value)
    if form == "bits":
        return (lambda t: BITS.keep(t)), (lambda kept: BITS.restore((kept,), shape))
    if form in ("bfloat16", "sign"):
        return (lambda t: FORMS[form].keep(t)), (lambda kept: FORMS[form].restore((kept,), (), dtype))
    if form == "shape":
        return (lambda t: (lies.of(t)[..., :0].clone(),)), (lambda kept: lies.back(F.pad(kept, (0, lies.columns))))

    def keep(t: Tensor) -> tuple[Tensor, ...]:
        rows = lies.of(t)
        return tuple(part.view(*rows.shape[:-1], *part.shape[1:]) for part in FORMS[form].keep(rows))

    def restore(*kept: Tensor) -> Tensor:
        flat = [part.flatten(0, -3) for part in kept]
        rows = FORMS[form].restore(flat, (flat[0].shape[0], lies.columns), dtype)
        return lies.back(rows.view(*kept[0].shape[:-2], lies.columns))

    return keep, restore
