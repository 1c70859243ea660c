"""Traces every opaque operator on tensors of a GPU that is not here, and puts its kernels into the graph.

In a process without Triton's interpreter, since the nodes hold kernels that Triton compiles. Prints a line of JSON for
each operator: targets of the graph's nodes, and each result as the operator describes it and as the kernels make it.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

import hotrain
from hotrain.compress import kernel_nodes, launcher, rematerialize
from hotrain.kernels import support

assert hotrain
torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132)  # type: ignore[assignment]

OPS = torch.ops.hotrain
BF16, ROWS, CHANNELS = torch.bfloat16, 96, 192
RECIPE = rematerialize.normed("int4 nearest/row", (CHANNELS,))


def cases() -> Iterator[tuple[str, Callable[..., Any], list[Tensor]]]:
    """Each opaque operator by name: a call, and its tensors."""
    x, w = torch.empty(ROWS, CHANNELS, dtype=BF16, device="cuda"), torch.empty(CHANNELS, device="cuda")
    image = torch.empty(4, 64, 6, 6, dtype=BF16, device="cuda").to(memory_format=torch.channels_last)
    v = torch.empty(64, device="cuda")
    codes = torch.empty(ROWS, 1, CHANNELS // 2, dtype=torch.uint8, device="cuda")
    scale, r = torch.empty(ROWS, 1, 1, dtype=BF16, device="cuda"), torch.empty(ROWS, device="cuda")
    norm = 1e-5, BF16, BF16, True, False
    yield "norm_forward", lambda x, w: OPS.norm_forward(x, None, w, w, *norm, False, None, None, 1.0), [x, w]
    two = torch.empty(2, device="cuda")
    yield "norm_forward", lambda x, w, f: OPS.norm_forward(x, x, w, None, *norm, True, w, f, 1.0), [x, w, two]
    backward = lambda *t: OPS.norm_backward(*t, None, BF16, True, torch.float32, None, 1.0)  # noqa: E731
    yield "norm_backward", backward, [x, codes, scale, r, torch.empty(2, CHANNELS, device="cuda")]
    yield "activate", lambda x, w: OPS.activate(x, "gelu", "int8", w), [x, w]
    bytes_of_x = torch.empty(ROWS, 2, CHANNELS // 2, dtype=torch.uint8, device="cuda")
    scales = torch.empty(ROWS, 2, 1, dtype=BF16, device="cuda")
    for sums in (True, False):
        gradient = lambda x, *t, s=sums: OPS.activation_gradient(x, *t, "gelu", "int8", s)  # noqa: E731
        yield "activation_gradient", gradient, [x, bytes_of_x, scales]
    yield "keep_codes", lambda x: OPS.keep_codes(x, "int8"), [x]
    restored = lambda *t: OPS.restore_codes([*t, None], RECIPE, [4, ROWS // 4, CHANNELS], BF16)  # noqa: E731
    yield "restore_codes", restored, [codes, scale, w]
    heads = lambda *t: OPS.keep_heads(list(t[:4]), "int8", "int4 nearest", t[4])  # noqa: E731
    yield "keep_heads", heads, [*(x.view(2, -1, 1, CHANNELS) + n for n in range(4)), two.new_empty(2, 2, 1, CHANNELS)]
    key = torch.empty((), dtype=torch.int64, device="cuda")
    yield "drawn_mask", lambda key: OPS.drawn_mask(key, 512, 0.1), [key]
    yield "row_normalizer", lambda x: OPS.row_normalizer(x, 200), [x]
    yield "channel_statistics", OPS.channel_statistics, [image]
    yield "channel_statistics", lambda x: OPS.channel_statistics(x, 8), [image]
    of_groups = torch.empty(4, 8, device="cuda")
    group = lambda x, s, v: OPS.normalize(x, s, s, v, v, None, "silu", torch.float32)  # noqa: E731
    yield "normalize", group, [image, of_groups, v]
    yield "normalize", lambda x, v: OPS.normalize(x, v, v, v, None, x, "silu"), [image, v]
    full = torch.empty_like(image, dtype=torch.float32)
    yield "normalize", lambda x, v: OPS.normalize(x, v, v, v, None, None, "", BF16), [full, v]
    flat = 4 * 6 * 6
    packed = [
        torch.empty(flat, 1, 32, dtype=torch.uint8, device="cuda"),
        torch.empty(flat, 1, 1, dtype=BF16, device="cuda"),
        torch.empty(flat, 32, dtype=torch.uint8, device="cuda"),
    ]
    for passes_on in (True, False):
        gradient = lambda g, *t, p=passes_on: OPS.norm_gradient(g, None, *t, "silu", p)  # noqa: E731
        yield "norm_gradient", gradient, [image, *packed, v, v]
    behind = lambda g, t, *p: OPS.norm_gradient(g, None, *p, "", False, torch.float32, t)  # noqa: E731
    yield "norm_gradient", behind, [image, full, *packed, v, v]
    group = lambda g, *t: OPS.norm_gradient(g, None, *t, "silu", False, BF16)  # noqa: E731
    yield "norm_gradient", group, [image, *packed, of_groups, v]
    gated = lambda g, *t: OPS.gated_gradient(g, list(t), "silu", "int4 nearest/row")  # noqa: E731
    yield "gated_gradient", gated, [x, codes, scale, codes + 1, scale + 1]


def described(value: Any) -> list[Any]:
    """Shape, strides and dtype of each result."""
    many = value if isinstance(value, tuple | list) else [value]
    return [[list(t.shape), list(t.stride()) if t.numel() else [], str(t.dtype)] for t in many]


def main() -> None:
    """Print what becomes of each operator, and then the names of all there are."""
    with FakeTensorMode():
        for name, call, tensors in cases():
            graph = make_fx(call)(*tensors).graph
            before = described(graph.output_node().meta.get("val") or call(*tensors))
            changed = kernel_nodes.insert(graph)
            graph.lint()
            results: Any = graph.output_node().args[0]
            results = [results] if isinstance(results, Node) else results
            kernels = [n for n in graph.nodes if "triton_kernel_wrapper_functional" in str(n.target)]
            unread = [
                key
                for kernel in kernels
                for key, given in kernel.kwargs["kwargs"].items()
                if isinstance(given, Node) and key not in kernel.kwargs["tensors_to_clone"] and not _is_made(given)
            ]
            row = {
                "changed": changed,
                "targets": [str(n.target) for n in graph.nodes],
                "before": before,
                "after": described([n.meta["val"] for n in results]),
                "unwritten": unread,
            }
            print(json.dumps({"name": name, **row}))
        support._broken.add("batch_norm.statistics")  # as a compiler that fails leaves it
        (image,) = next(tensors for name, _, tensors in cases() if name == "channel_statistics")
        graph = make_fx(OPS.channel_statistics)(image).graph
        print(json.dumps({"broken": kernel_nodes.insert(graph), "all": sorted(launcher._implementations)}))


def _is_made(node: Node) -> bool:
    """Whether something was written to what a kernel reads."""
    return node.op == "placeholder" or node.target is operator.getitem or "empty" not in str(node.target)


if __name__ == "__main__":
    main()
