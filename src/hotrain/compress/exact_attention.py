"""Attention in graphs: which codes are read, and the exact backward, PyTorch's operators for forward's kernel."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from .nodes import called, part_of

_aten = torch.ops.aten

# Forward's operator → the kind of kernel, and which of its results are the parts of `backward`.
KINDS: dict[Any, tuple[str, tuple[int | None, ...]]] = {
    _aten._scaled_dot_product_flash_attention.default: ("flash", tuple(range(8))),
    _aten._scaled_dot_product_cudnn_attention.default: ("cudnn", tuple(range(8))),
    _aten._scaled_dot_product_efficient_attention.default: ("efficient", (0, 1, None, None, None, None, 2, 3)),
    _aten._scaled_dot_product_flash_attention_for_cpu.default: ("cpu", (0, 1, *[None] * 6)),
}


def pack_what_is_read(graph: Graph) -> None:
    """Leave out the codes of an output that no layer behind reads: nn.MultiheadAttention's last product has a copy of
    it, with samples behind tokens."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.hotrain.keep_heads.default):
        tensors, *rest = node.args
        of_output = [part for part in node.users if part.args[1] >= 6]  # type: ignore[operator]
        if len(tensors) == 4 and not any(part.users for part in of_output):  # type: ignore[arg-type]
            for part in of_output:
                graph.erase_node(part)
            shorter = called(graph, node, node, node.target, list(tensors[:3]), *rest)  # type: ignore[index]
            node.replace_all_uses_with(shorter)
            graph.erase_node(node)


def put_back(graph: Graph, node: Node, forward: Node) -> list[Node]:
    """The gradients of q, k and v, and of the mask if it is wanted, before the operator that computes them of codes."""
    args: Any = node.args
    given: Any = forward.args
    g, _, _, _, _, _, dropout, causal, scale, _, wants_mask, _ = args
    kind, places = KINDS[forward.target]
    bias = forward.kwargs.get("attn_mask") if kind in ("flash", "cpu") else given[3]
    parts = [None if place is None else part_of(graph, forward, place) for place in places]
    q, k, v, *_ = given
    run, operands, more = backward(kind, g, q, k, v, bias, parts, dropout, causal, wants_mask)
    made = called(graph, node, node, run, *operands, **more, scale=scale)
    return [called(graph, node, node, operator.getitem, made, place) for place in range(3 + wants_mask)]


def backward(
    kind: str, g: Any, q: Any, k: Any, v: Any, bias: Any, parts: Sequence[Any], dropout: float, causal: bool, mask: bool
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """PyTorch's operator of backward and its arguments but for the scale, which are tensors, or nodes of a graph.

    Args:
        kind: of `operators.attention.backend`.
        g, q, k, v: gradient of the result, and the inputs.
        bias: the mask as numbers; None for none.
        parts: forward's result, the logsumexp, the sequences' ends and longest in q and k, seed and offset of dropout.
        dropout, causal: of forward.
        mask: whether the gradient of the mask is wanted.
    """
    out, lse, ends_q, ends_k, max_q, max_k, seed, offset = parts
    first, ends = (g, q, k, v), (ends_q, ends_k, max_q, max_k, dropout, causal)
    if kind == "flash":
        run = _aten._scaled_dot_product_flash_attention_backward.default
        return run, (*first, out, lse, *ends, seed, offset), {}
    if kind == "cudnn":
        run = _aten._scaled_dot_product_cudnn_attention_backward.default
        return run, (*first, out, lse, seed, offset, bias, *ends), {}
    if kind == "efficient":
        run = _aten._scaled_dot_product_efficient_attention_backward.default
        return run, (*first, bias, out, lse, seed, offset, dropout, [True, True, True, mask], causal), {}
    run = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return run, (*first, out, lse, dropout, causal), {"attn_mask": bias}
