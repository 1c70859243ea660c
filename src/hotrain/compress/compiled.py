"""Partitioner pass for compiled graphs: saved tensors are quantized where their use in backward allows it.

`torch.compile` traces one joint graph and partitions it into forward and backward; what crosses the cut is saved.
PyTorch's own partitioner cuts. This pass then looks at each large floating-point tensor that crosses: `graph` says
which rounding its uses in backward allow; forward returns codes instead, and backward dequantizes them right before the
first use. Both are PyTorch's operators, which the compiler fuses with their neighbours. What stays in full precision is
recorded for the report, with its bytes and the function that needs it.

Dynamo marks the nodes of a converted model while it traces (`report.Buffers.region`). Graphs without such nodes are not
changed. Inductor gets the pass by its setting ``custom_partitioner_fn`` when a converted model is first traced; another
backend takes `partition` in place of `torch._functorch.partitioners.min_cut_rematerialization_partition`.
"""

from __future__ import annotations

import hashlib
import math
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ..planning import Roofs
from ..private import fakes, inductor, schema_of
from . import choosing, costs, formats, fusing, graph, rules
from .formats import SMALL, packer
from .graph import KEY, entries

_inductor = inductor()
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_VIEWS = tuple(getattr(torch.ops.aten, name).default for name in ("view", "reshape", "_unsafe_view"))
_MATRICES = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
_QUANTIZED = rules.FORM[rules.VALUE]
_FORMULA = 16.0  # bytes of copies in the time of an element that a formula quantizes: the amax is a pass of its own
_CHEAPER = 0.75  # of a tensor's bytes: the most that its derivative, kept in its place, may take

_regions: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def region(buffers: Any) -> str:
    """Register a model with the pass, and install the pass in Inductor.

    Args:
        buffers: the model's records, a `report.Buffers`.

    Returns:
        The mark of the model's nodes, in their metadata under `KEY`.
    """
    config = _inductor.config
    if not isinstance(config.custom_partitioner_fn, Partitioner):
        config.custom_partitioner_fn = Partitioner(config.custom_partitioner_fn)
    _regions[buffers.name] = buffers
    buffers.uncut = True
    return buffers.name


class Partitioner(_inductor.partitioner):  # type: ignore[name-defined,misc]
    """PyTorch's partitioner followed by `compress`.

    Args:
        inner: a partitioner to use in place of PyTorch's.
    """

    def __init__(self, inner: Any = None) -> None:
        self.inner = inner

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        return partition(gm, joint_inputs, self.inner, **kwargs)

    def uuid(self) -> object:
        """The part of Inductor's cache key for this pass: a hash of its files."""
        files = (__file__, *(str(m.__file__) for m in (graph, rules, formats, fusing, choosing, costs)))
        ours = hashlib.sha256(b"".join(Path(name).read_bytes() for name in files)).digest()
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
    """Partition a joint graph, with saved tensors quantized where their uses allow it.

    Args:
        gm: the joint graph; what has no line here is as PyTorch passes it to a partitioner.
        inner: the partitioner that cuts; None for PyTorch's own.

    Returns:
        The graphs of forward and backward.
    """
    inner = inner or _inductor.cut
    left = _choose(gm)
    forward, backward = inner(gm, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)
    if any(_region(node) for node in forward.graph.nodes):
        compress(forward, backward, num_fwd_outputs, kwargs.get("static_lifetime_input_indices") or (), left)
        for half in (forward, backward):
            _write_as_matrices(half.graph)
            if fusing.fuse(half.graph):
                half.graph.lint()
                half.recompile()
    return forward, backward


def _choose(gm: GraphModule) -> float:
    """Keep exact what a model that must not become slower has no time for, and record it.

    Returns:
        How many elements may be packed by formulas in the time that is left.
    """
    elements = math.inf
    names = {_region(node) for node in gm.graph.nodes} & set(_regions)
    for buffers in (_regions[name] for name in names):
        roofs = _device_roofs(gm) if buffers.must_not_lose and len(names) == 1 else None
        if roofs is None:
            continue
        kept, ms = choosing.choose(gm.graph, roofs, buffers.gains())
        elements = max(ms, 0.0) * 1e-3 * roofs.copy / _FORMULA
        for what, (exact, of) in kept.items():
            if exact == of:
                buffers.served.pop(what, None)  # nothing is saved in the format that was recorded
            buffers.record_full(f"{what}, {exact} of {of}", "faster so; plan='memory' compresses them")
    if choosing.forget(gm.graph) or elements < math.inf:
        gm.recompile()
    return elements


def _device_roofs(gm: GraphModule) -> Roofs | None:
    """The measured rates of the graph's GPU; None on a CPU."""
    devices = {t.device for n in gm.graph.nodes if isinstance(t := n.meta.get("val"), Tensor)}
    device = next((d for d in devices if d.type == "cuda"), None)
    return None if device is None else Roofs.of(device)


def compress(
    forward: GraphModule, backward: GraphModule, results: int, static: Sequence[int] = (), left: float = math.inf
) -> None:
    """Replace tensors that forward saves for backward by codes, in place, and record the result for the report.

    Args:
        forward: the graph of forward.
        backward: the graph of backward.
        results: how many of forward's first outputs are for its caller.
        static: positions of forward's arguments that are parameters.
        left: how many elements may be quantized by formulas, so that the step does not become slower.
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
        factors = made.factors(halves.arguments[node.name]) if found.whole == rules.EXACT else None
        forms = None if factors is None else _cheaper(node, factors, halves.kept)
        elements = sum(entries(factor) for factor, form in forms.items() if form == _QUANTIZED) if forms else 0
        if forms and elements <= left:
            left -= elements
            account.add(node, found.names, "its derivative in " + _described(forms.values()), "")
            halves.replace_by_factors(node, forms)
            made = halves.uses()

    decided = []
    for base, group in groups.items():
        for node in filter(halves.is_needed, filter(_is_large, group)):
            form, why, names = _form(node, made.uses(halves.arguments[node.name]), alone=len(group) == 1)
            if form == _QUANTIZED and entries(node) > left:
                form = "bfloat16" if node.meta["val"].dtype == torch.float32 else ""
                why = why if form else "faster so; plan='memory' compresses it"
            left -= entries(node) if form == _QUANTIZED else 0
            if node in weights:
                form, why, names = "", "they do not grow with the batch", {"copies of weights"}
            elif base in others:
                form, why, names = "", "the caller of the graph holds them", {"arguments and results"}
            decided.append((node, form))
            account.add(node, names, form, why)
    for node, form in decided:
        if form:
            halves.replace_by_codes(node, form)
    for base, group in groups.items():
        for node in group:
            if base not in others and halves.is_needed(node) and _is_no_image(node):
                halves.replace_by_codes(node, "rows")
    if halves.finish():
        for half in (forward, backward):
            half.graph.lint()
            half.recompile()
    kept = halves.kept_bytes({places[number] for number in static if number < len(places)})
    for name in {_region(node) for node in forward.graph.nodes} & set(_regions):
        account.tell(name, kept)


def _is_no_image(node: Node) -> bool:
    """Whether a contiguous tensor of four axes has its channels last, being of a matrix product or of our kernels.

    In a model with convolutions Inductor takes what is saved with four axes for an image (N, C, H, W), and writes it
    in channels-last: a transposition, and strided reads in backward.
    """
    value = node.meta.get("val")
    if not (isinstance(value, Tensor) and value.dim() == 4 and formats.is_static(value) and value.is_contiguous()):
        return False
    return value.is_floating_point() and _has_rows(node, value.shape[-1], 8)


def _write_as_matrices(half: Graph) -> None:
    """Let Inductor write what is no image, and is read as a matrix, in the layout of that matrix.

    Where such a result reads many tensors, Inductor writes it in channels-last, and the matrix is a copy of it.
    """
    for node in half.nodes:
        if node.target in _VIEWS and isinstance(node.args[0], Node) and node.meta["val"].dim() == 2:
            source = node.args[0]
            if source.op == "call_function" and not _is_view(source) and _is_no_image(source):
                source.meta["inductor_realize_to_strides"] = True


def _has_rows(node: Node, columns: int, depth: int) -> bool:
    """Whether a node's last axis is that of a matrix product's result, or of an operator over rows."""
    value = node.meta.get("val")
    if node.op != "call_function" or not depth:
        return False
    if node.target is operator.getitem:
        source: Any = node.args[0]
        return str(source.target).startswith("hotrain.")
    if node.target in _MATRICES or str(node.target).startswith("hotrain."):
        return isinstance(value, Tensor) and value.shape[-1] == columns
    alike = (n for n in node.all_input_nodes if isinstance(t := n.meta.get("val"), Tensor) and t.dim() > 1)
    by_element = (
        node.target in _VIEWS or _turns_nothing(node) or torch.Tag.pointwise in getattr(node.target, "tags", ())
    )
    return by_element and any(_has_rows(n, columns, depth - 1) for n in alike if n.meta["val"].shape[-1] == columns)


def _turns_nothing(node: Node) -> bool:
    order: Any = node.args[1] if node.target is torch.ops.aten.permute.default else [1, 0]
    return list(order) == sorted(order)


def _made_of(half: Graph, parameters: set[Node]) -> set[Node]:
    """The parameters, and nodes computed from nothing else."""
    found = set(parameters)
    for node in half.nodes:
        if node.op == "call_function" and all(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def _region(node: Node) -> str:
    """The mark of the model that a node belongs to, "" for none; an argument belongs to its first user's."""
    if node.op == "placeholder":
        return next((_region(user) for user in node.users if user.op != "output"), "")
    return (node.meta.get("custom") or {}).get(KEY, "")


def _by_memory(kept: Iterable[Node]) -> dict[Node, list[Node]]:
    """Saved nodes by the tensor whose memory they share: several views are saved once, their codes would not be."""
    groups: dict[Node, list[Node]] = {}
    for node in dict.fromkeys(kept):
        groups.setdefault(_base(node), []).append(node)
    return groups


def _base(node: Node) -> Node:
    while node.op == "call_function" and _is_view(node):
        (node,) = node.all_input_nodes
    return node


def _is_view(node: Node) -> bool:
    schema = schema_of(node.target)
    aliases = schema is not None and schema.arguments and schema.arguments[0].alias_info is not None
    return bool(aliases) and len(node.all_input_nodes) == 1


def _is_large(node: Node) -> bool:
    """Whether a node is a large floating-point tensor of a converted model."""
    value = node.meta.get("val")
    return (
        isinstance(value, fakes.tensor)
        and value.dtype in _FLOATS
        and bool(_region(node))
        and entries(node) >= SMALL
        and not any(isinstance(n, int) and n == 0 for n in value.stride())  # an expanded tensor takes little memory
    )


def _form(node: Node, found: graph.Uses, alone: bool) -> tuple[str, str, set[str]]:
    """The form in which a node is saved ("" for as it is), the reason if not packed, and functions that use it."""
    kind = found.whole
    value = node.meta["val"]
    if kind == rules.VALUE and (graph.spans_magnitudes(node) or graph.is_normed(node)):
        kind = rules.RATIO
    if kind == graph.OURS:
        return "", "", found.names
    if kind == rules.EXACT:
        why = (
            "a checkpointed block is recomputed from it"
            if graph.CHECKPOINT in found.exact
            else "no rounding rule for it"
        )
        return "", why, found.exact
    if graph.is_statistic(node):
        return "", "a reduction, small beside its input", {"statistics"}
    if not alone:
        return "", "several views of one tensor are kept", found.names
    if kind == rules.RATIO:
        if value.dtype != torch.float32:
            return "", "its derivative needs full precision", found.names
        return "bfloat16", "", found.names
    if kind in (rules.VALUE, rules.SHAPE) and not isinstance(formats.Rows(value).columns, int):
        return "", "its size changes from call to call", found.names
    return {rules.VALUE: rules.FORM[rules.VALUE], rules.SIGN: "sign", rules.SHAPE: "shape"}[kind], "", found.names


def _cheaper(node: Node, factors: Mapping[Node, str], kept: Sequence[Node]) -> dict[Node, str]:
    """The forms of what is made from a saved tensor, to keep in its place; empty if that saves too few bytes."""
    forms, size, known = {}, 0.0, {n.name: n for n in kept}
    for factor, kind in factors.items():
        value, number = factor.meta.get("val"), entries(factor)
        if not isinstance(value, Tensor):
            return {}
        if value.dtype == torch.bool and formats.is_static(value):
            form, each = "bits", 1 / 8
        elif kind == rules.SIGN and value.dtype in _FLOATS:
            form, each = "sign", 1
        elif value.dtype not in _FLOATS or number < SMALL:
            form, each = "", value.dtype.itemsize
        elif kind == rules.RATIO or graph.spans_magnitudes(factor, known):
            form, each = ("bfloat16" if value.dtype == torch.float32 else ""), 2
        elif isinstance(formats.Rows(value).columns, int):
            form, each = rules.FORM[rules.VALUE], 1 + 1 / 16
        else:
            return {}
        forms[factor] = form
        size += number * each
    return forms if size < _CHEAPER * entries(node) * node.meta["val"].dtype.itemsize else {}


def _described(forms: Iterable[str]) -> str:
    """Forms in the words of the report."""
    return ", ".join(sorted({"1 bit per element" if form == "bits" else form for form in forms} - {""}))


class _Account:
    """In which form each saved tensor is kept, or why in full precision, for the reports."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, tuple[str, ...], str, str], int] = {}

    def add(self, node: Node, names: set[str], form: str, why: str) -> None:
        if form or why:
            key = _region(node), tuple(sorted(names)), form, why
            self.rows[key] = self.rows.get(key, 0) + entries(node) * node.meta["val"].dtype.itemsize

    def tell(self, region: str, kept: int) -> None:
        """Record it for the report of one model, with all bytes that cross the cut."""
        buffers = _regions[region]
        buffers.uncut = False
        buffers.graphs.append(kept)
        for (where, names, form, why), size in self.rows.items():
            if where == region:
                what = ", ".join(names)
                if form:
                    buffers.record(f"{what} (saved)", form)
                else:
                    buffers.record_full(what, f"{size / 2**20:.1f} MiB, compiled: {why}")


# ---- forward returns codes, backward dequantizes them ----


class _Halves:
    """The graphs of forward and backward, and what crosses from one to the other.

    Attributes:
        outputs: outputs of forward; the first ``results`` are for its caller.
        kept: the others that backward takes, as nodes of forward.
        arguments: name → node of backward.
    """

    def __init__(self, forward: Graph, backward: Graph, results: int) -> None:
        self.forward, self.backward, self.results = forward, backward, results
        self.output = forward.output_node()
        self.outputs: list[Any] = list(self.output.args[0])  # type: ignore[arg-type]
        self.arguments = {node.name: node for node in backward.find_nodes(op="placeholder")}
        crossing = [node for node in self.outputs[results:] if isinstance(node, Node)]
        self.kept = [node for node in dict.fromkeys(crossing) if node.name in self.arguments]
        self.replaced: dict[Node, list[Node]] = {}  # node → what crosses in its place
        self.taken: list[Node] = []  # new arguments of backward

    def uses(self) -> graph.Backward:
        old = (self.arguments[node.name] for node in self.kept if self.is_needed(node))
        return graph.Backward(self.backward, [*old, *self.taken])

    def is_needed(self, node: Node) -> bool:
        return node not in self.replaced and bool(self.arguments[node.name].users)

    def replace_by_codes(self, node: Node, form: str) -> None:
        """Replace a saved tensor by its codes."""
        argument = self.arguments[node.name]
        self.replaced[node] = self._replace(node, argument, form, argument)

    def replace_by_factors(self, node: Node, forms: Mapping[Node, str]) -> None:
        """Replace a saved tensor by what backward makes from it, computed in forward."""
        copies = self._in_forward(forms)
        argument = self.arguments[node.name]
        self.replaced[node] = [
            part for factor, form in forms.items() for part in self._replace(copies[factor], factor, form, argument)
        ]
        for dead in reversed(list(self.backward.nodes)):
            if dead.op == "call_function" and not dead.users and not dead.is_impure():
                self.backward.erase_node(dead)

    def finish(self) -> bool:
        """Update forward's outputs; False if nothing has changed."""
        for node in self.kept:
            if not self.arguments[node.name].users and isinstance(node.meta.get("val"), Tensor):
                self.replaced.setdefault(node, [])
                self.backward.erase_node(self.arguments[node.name])
        if not self.replaced:
            return False
        kept = [self.replaced.get(node, [node]) for node in self.outputs[self.results :]]
        new = [*([node] for node in self.outputs[: self.results]), *kept]
        self.output.args = (tuple(part for parts in new for part in parts),)
        described = self.output.meta.get("desc")
        if described is not None and len(described) == len(new):
            self.output.meta["desc"] = [d for d, parts in zip(described, new, strict=True) for _ in parts]
        return True

    def kept_bytes(self, parameters: set[Node]) -> int:
        """Bytes of the storages that cross the cut, each once, without parameters."""
        crossing: Any = self.output.args[0]
        bases = {_base(node) for node in crossing[self.results :] if isinstance(node, Node)} - parameters
        saved = [base for base in bases if isinstance(base.meta.get("val"), Tensor)]
        return sum(entries(base) * base.meta["val"].dtype.itemsize for base in saved)

    def _in_forward(self, wanted: Iterable[Node]) -> dict[Node, Node]:
        """Copy nodes of backward that depend on saved tensors alone to forward."""
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

    def _replace(self, source: Node, target: Node, form: str, place: Node) -> list[Node]:
        """Pack `source` in forward and unpack it in backward in place of `target`, after arguments before `place`."""
        keep, restore = packer(source.meta["val"], form)
        # Right after it: codes made at the end of forward would keep the tensor alive until then.
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


def _inline(half: Graph, before: Node, fn: Callable[..., Any], inputs: Sequence[Node]) -> list[Node]:
    """Trace fn into a graph as operators that Inductor supports; returns the nodes of its results."""
    values = [node.meta["val"] for node in inputs]
    mode = next(value.fake_mode for value in values if isinstance(value, fakes.tensor))
    with mode, torch.no_grad():
        traced = make_fx(fn, decomposition_table=_inductor.decompositions())(*values)
    places = traced.graph.find_nodes(op="placeholder")
    env: dict[Node, Any] = dict(zip(places, inputs, strict=True))
    with half.inserting_before(before):
        for step in traced.graph.nodes:
            if step.op == "output":
                results = step.args[0] if isinstance(step.args[0], tuple | list) else [step.args[0]]
                return [env[result] for result in results]
            if step.op == "get_attr":
                raise RuntimeError(
                    f"hotrain: packing a saved tensor traced the constant {step.target}; please report this"
                )
            if step.op != "placeholder":
                env[step] = half.node_copy(step, env.__getitem__)
    raise AssertionError("a graph without an output")


def _free(name: str, *halves: Graph) -> str:
    taken = {node.name for half in halves for node in half.nodes}
    return next(n for n in (name, *(f"{name}_{i}" for i in range(len(taken) + 1))) if n not in taken)
