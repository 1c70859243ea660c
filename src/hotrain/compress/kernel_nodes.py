"""Kernels as nodes of a compiled graph: Inductor launches them itself, as it launches its own.

An opaque operator is Python that runs in every step: dispatch, checks, allocations and Triton's launcher. Where no CUDA
graph hides it (DDP, FSDP2, plain `torch.compile`), the GPU may wait for it. After the last pass that looks for
operators, each is replaced by what it does on a GPU: allocations, PyTorch's operators, and a node for each kernel
(`torch.library.wrap_triton`), whose results are new tensors, so that no pass reorders what is written and what is read.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .. import autograd
from ..private import fakes, inductor
from . import launcher
from .nodes import copied, keep_strides, replace_results, traced

_aten = torch.ops.aten
_EMPTY = (
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_permuted.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
)
_inductor = inductor()


def insert(half: Graph) -> bool:
    """Replace the opaque operators of a graph by their kernels, where kernels run; False if nothing has changed.

    A CUDA graph launches without the host; there the operators stay. So does one whose kernel has failed to compile
    before, and whose reference runs since (`plan="speed"` has tried each by then).
    """
    changed = False
    if _inductor.kernel is None or _inductor.config.triton.cudagraphs:
        return False
    for node in list(half.nodes):
        run = launcher.implementation(node.target)
        if run is None or not _on_kernels(node):
            continue
        found = _kernels_of(node, run)
        if found is not None:
            _splice(half, node, found)
            changed = True
    for kernel in half.find_nodes(op="call_function", target=_inductor.kernel_with_results) if changed else ():
        _write_once(kernel)
    return changed


def _on_kernels(node: Node) -> bool:
    """Whether the operator's tensors are on a device with kernels, and of fixed sizes."""
    values: list[Any] = [n.meta.get("val") for n in node.all_input_nodes]
    if not values or not all(fakes.include(t) and all(isinstance(n, int) for n in t.shape) for t in values):
        return False
    kernels = autograd.KERNELS.get(values[0].device.type)
    return kernels is not None and kernels.inlines(values[0].device)


def _kernels_of(node: Node, run: Any) -> Graph | None:
    """What the operator does, as a graph of its tensor arguments; None if it launches nothing."""
    inputs = node.all_input_nodes

    def called(*tensors: Tensor) -> Any:
        given = dict(zip(inputs, tensors, strict=True))
        return run(*map_arg(node.args, given.__getitem__), **map_arg(node.kwargs, given.__getitem__))

    found = traced(called, inputs)
    kernels = found.find_nodes(op="call_function", target=_inductor.kernel)
    if not kernels or found.find_nodes(op="get_attr") or not all(_made_functional(found, n) for n in kernels):
        return None
    return found


def _made_functional(graph: Graph, node: Node) -> bool:
    """Give a kernel's node results: the tensors that it was the first to write. False if one is passed twice."""
    given: dict[str, Any] = dict(node.kwargs["kwargs"])  # type: ignore[arg-type]
    written = {name: n for name, n in given.items() if isinstance(n, Node) and n.target in _EMPTY}
    if len(set(written.values())) < len(written):
        return False
    earlier = set(itertools.takewhile(lambda n: n is not node, graph.nodes))
    with graph.inserting_before(node):
        kernel = graph.call_function(_inductor.kernel_with_results, (), {**node.kwargs, "tensors_to_clone": [*written]})
        kernel.meta["val"] = {name: n.meta["val"] for name, n in written.items()}
        keep_strides(kernel)  # which are among its numbers
        earlier.add(kernel)
        for name, empty in written.items():
            made = graph.call_function(operator.getitem, (kernel, name))
            made.meta["val"] = empty.meta["val"]
            empty.replace_all_uses_with(made, delete_user_cb=lambda n: n not in earlier)
    graph.erase_node(node)
    return True


def _write_once(kernel: Node) -> None:
    """Let Inductor write what a kernel reads before the kernel: else each argument is a copy, of one tensor too.

    So it is for what is no view of memory, as a transposed sum: of a norm's kernels, which pass x for what is absent,
    ten.
    """
    for node in kernel.all_input_nodes:
        if node.op == "call_function" and node.target is not operator.getitem and node.target not in _EMPTY:
            node.meta["inductor_realize_to_strides"] = True


def _splice(half: Graph, node: Node, found: Graph) -> None:
    """Put the nodes of a traced operator in its place."""
    results = copied(found, half, node, node.all_input_nodes)
    if isinstance(node.meta["val"], Tensor):
        node.replace_all_uses_with(results[0])
        half.erase_node(node)
    else:
        replace_results(half, node, results)
