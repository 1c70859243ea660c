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

import functools
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

from ..planning import Roofs
from ..private import WRITTEN, fakes, inductor, memory_format_of
from . import choosing, exact_attention, formats, fusing, graph, in_place, kernel_nodes, nodes, padding, rules
from .graph import KEY
from .halves import Halves
from .losses import in_pieces
from .nodes import (
    FLOATS,
    VIEWS,
    base_of,
    bytes_of,
    called,
    is_alias,
    is_cast,
    is_ours,
    is_pointwise,
    numel,
    same_order,
    source_of,
)
from .rules import SMALL

_inductor = inductor()
_MATRICES = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
_hotrain = torch.ops.hotrain
_OF_TOKENS = _hotrain.keep.default, _hotrain.linear_gradients.default, _hotrain.conv2d_gradients.default
_STATISTICS = torch.ops.aten.var_mean.correction
_QUANTIZED = rules.FORM[rules.VALUE]
_FASTER = "faster so; plan='memory' compresses it"
_FORMULA = 16.0  # bytes of copies in the time of an element that a formula quantizes: amax is a pass of its own
_CHEAPER = 0.75  # of a tensor's bytes: the most that its derivative, kept in its place, may take

_regions: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def region(buffers: Any) -> str:
    """Register a model by its records, a `report.Buffers`, and install the pass in Inductor.

    Returns:
        The mark of the model's nodes, in their metadata under `KEY`.
    """
    config = _inductor.config
    if not isinstance(config.custom_partitioner_fn, Partitioner):
        config.custom_partitioner_fn = Partitioner(config.custom_partitioner_fn)
    if not isinstance(config.pre_grad_custom_pass, Losses):
        config.pre_grad_custom_pass = Losses(config.pre_grad_custom_pass)
    _regions[buffers.name] = buffers
    buffers.uncut = True
    return buffers.name


class Partitioner(_inductor.partitioner):  # type: ignore[name-defined,misc]
    """PyTorch's partitioner, or another one (``inner``), followed by `compress`."""

    def __init__(self, inner: Any = None) -> None:
        self.inner = inner

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        return partition(gm, joint_inputs, self.inner, **kwargs)

    def uuid(self) -> object:
        """The part of Inductor's cache key for this pass: a hash of the package, and what the plans of the converted
        models that live decide by."""
        plans = {(buffers.must_not_lose, buffers.spare_ms) for buffers in _regions.values()}
        ours = _hash_of_sources(), *sorted(plans)
        if self.inner is None:
            return ours
        theirs = self.inner.uuid()
        return None if theirs is None else (ours, theirs)


class Losses(_inductor.graph_pass):  # type: ignore[name-defined,misc]
    """`losses.in_pieces` on the graphs of Dynamo, and then another pass, or several (``inner``)."""

    def __init__(self, inner: Any = None) -> None:
        self.inner = () if inner is None else (inner,) if callable(inner) else tuple(inner)

    def __call__(self, graph: Graph) -> None:
        in_pieces(graph)
        for each in self.inner:
            each(graph)

    def uuid(self) -> object:
        """The part of Inductor's cache key for these passes; None where one of them has none."""
        theirs = [getattr(each, "uuid", lambda: None)() for each in self.inner]
        return None if None in theirs else (_hash_of_sources(), *theirs)


@functools.cache
def _hash_of_sources() -> bytes:
    files = sorted(Path(__file__).parents[1].rglob("*.py"))  # formulas that are traced are in most rooms
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).digest()


def partition(
    gm: GraphModule,
    joint_inputs: Sequence[object],
    inner: Callable[..., tuple[GraphModule, GraphModule]] | None = None,
    *,
    num_fwd_outputs: int,
    **kwargs: Any,
) -> tuple[GraphModule, GraphModule]:
    """The graphs of forward and backward of a joint graph, with saved tensors quantized where their uses allow it.

    ``inner`` is the partitioner that cuts, None for PyTorch's own; the rest is as PyTorch passes it to one.
    """
    inner = inner or _inductor.cut
    _inductor.order_by_memory()
    _without_copies(gm.graph)
    nodes.cancel_copies(gm.graph)
    fusing.merge_image_norms(gm.graph)
    exact_attention.pack_what_is_read(gm.graph)
    left = _choose(gm)
    forward, backward = inner(gm, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)
    if any(_region(node) for node in forward.graph.nodes):
        compress(forward, backward, num_fwd_outputs, kwargs.get("static_lifetime_input_indices") or (), left)
        for half in (forward, backward):
            _write_as_matrices(half.graph)
            _write_before_statistics(half.graph)
            changed = _gradients_of_convolutions(half.graph)
            changed |= padding.pad(half.graph, functools.partial(_device_roofs, gm))
            changed |= fusing.fuse(half.graph)
            changed |= _write_operands(half.graph)
            changed |= kernel_nodes.insert(half.graph)
            changed |= in_place.write(half.graph)
            if changed:
                half.graph.lint()
                half.recompile()
    return forward, backward


def _without_copies(joint: Graph) -> None:
    """What an operator writes to its operand (`base.written`) is, in a graph without writes, its result.

    Only where nothing else has that result: a copy that a model makes stays one.
    """
    for node in joint.find_nodes(op="call_function", target=torch.ops.aten.copy.default):
        _, made, *_ = node.args
        value, source = node.meta.get("val"), made.meta.get("val")
        same = isinstance(value, Tensor) and isinstance(source, Tensor) and value.dtype == source.dtype
        alone = made.op == "call_function" and base_of(made) is made and len(made.users) == 1
        if same and alone and _region(node) and value.shape == source.shape and value.stride() == source.stride():
            node.replace_all_uses_with(made)
            joint.erase_node(node)


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
        gained = buffers.gained(choosing.layers(gm.graph))
        counts, ms = choosing.choose(gm.graph, roofs, gained, buffers.spare_ms)
        elements = max(ms, 0.0) * 1e-3 * roofs.copy / _FORMULA
        buffers.record_chosen(counts)
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
    halves, account = Halves(forward.graph, backward.graph, results), _Account()
    places = forward.graph.find_nodes(op="placeholder")
    parameters = {places[number] for number in static if number < len(places)}
    weights = _made_of(forward.graph, parameters)
    others = {base_of(node) for node in (*places, *halves.outputs[:results]) if isinstance(node, Node)}
    groups = _by_memory(node for node in halves.kept if node not in places or node not in weights)

    made = halves.uses()
    for base, group in groups.items():
        node = group[0]
        if len(group) > 1 or base in others or node in weights or not _is_large(node):
            continue
        found = made.uses(halves.arguments[node.name])
        factors = made.factors(halves.arguments[node.name]) if found.whole == rules.EXACT else None
        forms = None if factors is None else _cheaper(node, factors, halves.kept)
        elements = sum(numel(factor) for factor, form in forms.items() if form == _QUANTIZED) if forms else 0
        if forms and elements <= left:
            left -= elements
            account.add(node, found.names, "its derivative in " + _described(forms.values()), "")
            halves.replace_by_factors(node, forms)
            made = halves.uses()
        elif found.bits and found.whole not in (rules.EXACT, graph.OURS) and numel(node) <= left:
            halves.compute_in_forward(node, found.bits)
            made = halves.uses()

    decided = []
    for base, group in groups.items():
        for node in filter(halves.is_needed, filter(_is_large, group)):
            form, why, names = _form(node, made.uses(halves.arguments[node.name]), alone=len(group) == 1)
            if form == _QUANTIZED and numel(node) > left:
                form = "bfloat16" if node.meta["val"].dtype == torch.float32 else ""
                why = why if form else _FASTER
            left -= numel(node) if form == _QUANTIZED else 0
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
    kept = halves.kept_bytes(parameters)
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
        if node.target in VIEWS and isinstance(node.args[0], Node) and node.meta["val"].dim() == 2:
            source = node.args[0]
            if source.op == "call_function" and not is_alias(source) and _is_no_image(source):
                source.meta[WRITTEN] = True


def _write_before_statistics(half: Graph) -> None:
    """Let Inductor write a tensor before its mean and variance are taken over more than the last axis.

    Exact training saves that tensor, so it is in memory when the statistics are computed. Where its codes are saved,
    Inductor would compute it within the reduction: a concatenation or a pooling, once for each pass.
    """
    for node in half.find_nodes(op="call_function", target=_STATISTICS):
        axes: Any = node.args[1] if len(node.args) > 1 else None
        dims: int = node.args[0].meta["val"].dim()  # type: ignore[union-attr]
        of_rows = axes is not None and [axis % dims for axis in axes] == [dims - 1]
        source = source_of(node.args[0], lambda n: is_alias(n) or is_cast(n) or n.target is nodes.CLONE)
        if source.op == "call_function" and _is_large(source) and not of_rows:
            source.meta[WRITTEN] = True


def _gradients_of_convolutions(half: Graph) -> bool:
    """Prepare the gradients of convolutions, in place. False: no change.

    PyTorch's operator copies g_y and x into its memory layout by a slower kernel, in each call: Inductor writes g_y in
    it here, and x where it is computed. Then g_w and g_x are two calls, in this order, where x is dequantized for them:
    it is free by the second.
    """
    changed = False
    for node in half.find_nodes(op="call_function", target=torch.ops.aten.convolution_backward.default):
        *given, mask = node.args
        g_y, x, w, *_ = given
        if numel(x) < SMALL:
            continue
        layout, made_here = _layout_of(x.meta["val"], w.meta["val"]), source_of(x, is_alias).op == "call_function"
        for place, t in enumerate([g_y, x] if mask[1] and made_here else [g_y]):
            if layout is not None and not t.meta["val"].is_contiguous(memory_format=layout):
                given[place] = called(half, node, node, nodes.CLONE, t, memory_format=layout)
                node.update_arg(place, given[place])
                changed = True
        if not (mask[0] and mask[1] and made_here):
            continue
        for wanted in ([False, *mask[1:]], [True, False, False]):
            with half.inserting_before(node):
                part = half.call_function(node.target, (*given, wanted))
            part.meta = dict(node.meta)
            part.meta["val"] = tuple(t if want else None for t, want in zip(node.meta["val"], wanted, strict=True))
            for user in [user for user in node.users if wanted[user.args[1]]]:
                user.replace_input_with(node, part)
        half.erase_node(node)
        changed = True
    return changed


def _write_operands(half: Graph) -> bool:
    """Let Inductor write tokens as the matrix that a layer's operators read: they would copy it by a slower kernel."""
    changed, layout = False, torch.contiguous_format
    for node in half.nodes:
        if node.target not in _OF_TOKENS:
            continue
        tokens, *rest = node.args
        value = tokens.meta["val"]
        if numel(tokens) >= SMALL and formats.is_static(value) and not value.is_contiguous():
            written = called(half, node, node, nodes.CLONE, tokens, memory_format=layout)
            node.replace_all_uses_with(called(half, node, node, node.target, written, *rest, **node.kwargs))
            half.erase_node(node)
            changed = True
    return changed


def _layout_of(x: Tensor, w: Tensor) -> torch.memory_format | None:
    """The memory layout in which cuDNN convolves an image: channels_last if x or w is. None for what is no image."""
    if x.dim() != 4 or not formats.is_static(x):
        return None
    return torch.channels_last if torch.channels_last in map(memory_format_of, (x, w)) else torch.contiguous_format


def _has_rows(node: Node, columns: int, depth: int) -> bool:
    """Whether a node's last axis is that of a matrix product's result, or of an operator over rows."""
    value = node.meta.get("val")
    if node.op != "call_function" or not depth:
        return False
    if node.target is operator.getitem:
        return is_ours(node.args[0])  # type: ignore[arg-type]
    if node.target in _MATRICES or is_ours(node):
        return isinstance(value, Tensor) and value.shape[-1] == columns
    alike = (n for n in node.all_input_nodes if isinstance(t := n.meta.get("val"), Tensor) and t.dim() > 1)
    by_element = same_order(node) or is_pointwise(node)
    return by_element and any(_has_rows(n, columns, depth - 1) for n in alike if n.meta["val"].shape[-1] == columns)


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
        groups.setdefault(base_of(node), []).append(node)
    return groups


def _is_large(node: Node) -> bool:
    """Whether a node is a large floating-point tensor of a converted model."""
    value = node.meta.get("val")
    return (
        isinstance(value, fakes.tensor)
        and value.dtype in FLOATS
        and bool(_region(node))
        and numel(node) >= SMALL
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
    if found.bits:
        return "", _FASTER, found.names | found.exact
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
    return rules.FORM[kind], "", found.names


def _cheaper(node: Node, factors: Mapping[Node, str], kept: Sequence[Node]) -> dict[Node, str]:
    """The forms of what is made from a saved tensor, to keep in its place; empty if that saves too few bytes."""
    forms, size, known = {}, 0.0, {n.name: n for n in kept}
    for factor, kind in factors.items():
        value, number = factor.meta.get("val"), numel(factor)
        if not isinstance(value, Tensor):
            return {}
        if value.dtype == torch.bool and formats.is_static(value):
            form, each = "bits", 1 / 8
        elif kind == rules.SIGN and value.dtype in FLOATS:
            form, each = "sign", 1
        elif value.dtype not in FLOATS or number < SMALL:
            form, each = "", value.dtype.itemsize
        elif kind == rules.RATIO or graph.spans_magnitudes(factor, known):
            form, each = ("bfloat16" if value.dtype == torch.float32 else ""), 2
        elif isinstance(formats.Rows(value).columns, int):
            form, each = rules.FORM[rules.VALUE], 1 + 1 / 16
        else:
            return {}
        forms[factor] = form
        size += number * each
    return forms if size < _CHEAPER * bytes_of(node) else {}


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
            self.rows[key] = self.rows.get(key, 0) + bytes_of(node)

    def tell(self, region: str, kept: int) -> None:
        """Record it for the report of one model, with all bytes that cross the cut."""
        buffers = _regions[region]
        buffers.uncut = False
        buffers.graphs.append(kept)
        forms: dict[str, list[str]] = {}
        for (where, names, form, why), size in self.rows.items():
            what = ", ".join(names)
            if where == region and form:
                forms.setdefault(what, []).append(form)
                buffers.record(f"{what} (saved)", ", ".join(sorted(forms[what])))
            elif where == region:
                buffers.record_full(what, f"{size / 2**20:.1f} MiB, compiled: {why}")
