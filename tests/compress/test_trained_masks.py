"""Attention whose mask is trained (Swin's and BEiT's position biases), in a plan: traced on tensors of a GPU not here.

Only the memory-efficient kernel, which a CPU has not, gives the mask's gradient.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

import hotrain
from hotrain.compress import choosing
from hotrain.compress.rematerialize import ATTENTION, CUSTOM
from hotrain.planning import Roofs

assert hotrain
ROOFS = Roofs(copy=4e12, product=7e14)
BATCH, HEADS, TOKENS, WIDTH, SCALE = 64, 4, 48, 32, 0.2
FORWARD = torch.ops.aten._scaled_dot_product_efficient_attention.default
BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
GRADIENTS = torch.ops.hotrain.attention_gradients.default


def joint(trained: bool, expanded: bool) -> Graph:
    """Forward, and the gradients of q, k, v and of the mask from what was packed; packing itself is left out."""

    def step(g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> list[Tensor]:
        bias = mask.expand(BATCH, HEADS, TOKENS, TOKENS)
        y = FORWARD(q, k, v, bias, True, 0.0, False, scale=SCALE)[0]
        restored = (t * 1.0 for t in (q, k, v))
        grads = GRADIENTS(g, *restored, bias, [], 0.0, False, SCALE, "efficient", trained, 7)
        return [y, *grads[: 3 + trained]]

    with FakeTensorMode():
        heads = [torch.empty(BATCH, HEADS, TOKENS, WIDTH, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        mask = torch.empty(1 if expanded else BATCH, HEADS, TOKENS, TOKENS, dtype=torch.bfloat16, device="cuda")
        graph = make_fx(step)(*heads, mask).graph
    (forward,) = graph.find_nodes(op="call_function", target=FORWARD)
    forward.meta[CUSTOM] = {ATTENTION: 7}
    return graph


def results(graph: Graph) -> list[Any]:
    (found,) = graph.output_node().args
    assert isinstance(found, list | tuple)
    return list(found)


@pytest.mark.parametrize("trained", [False, True])
def test_it_is_kept_exact_where_there_is_no_time(trained: bool) -> None:
    """Backward is then PyTorch's on what forward had, with the mask's gradient where that is asked for."""
    graph = joint(trained, expanded=False)
    _, *before = results(graph)
    shapes = [n.meta["val"].shape for n in before]
    assert choosing.choose(graph, ROOFS, -1e3)[0]["scaled_dot_product_attention"] == (1, 1)
    graph.lint()
    assert not graph.find_nodes(op="call_function", target=GRADIENTS)
    (backward,) = graph.find_nodes(op="call_function", target=BACKWARD)
    assert backward.args[10] == [True, True, True, trained]
    g, q, k, v, mask = (n for n in graph.nodes if n.op == "placeholder")
    assert list(backward.args[:4]) == [g, q, k, v]
    assert isinstance(backward.args[4], Node)
    assert mask in backward.args[4].all_input_nodes
    _, *after = results(graph)
    assert [n.args for n in after] == [(backward, place) for place in range(3 + trained)]
    assert [n.meta["val"].shape for n in after] == shapes


def test_its_time_counts() -> None:
    """As that of other masks: a step with nothing to gain has no time for it."""
    left = [choosing.choose(joint(trained, expanded=False), ROOFS, 1e3)[1] for trained in (False, True)]
    assert left[0] == left[1] < 1e3
    assert choosing.choose(joint(True, expanded=False), ROOFS, 0.0)[0]["scaled_dot_product_attention"] == (1, 1)


def test_a_mask_in_memory_is_read_once_more() -> None:
    """By the second run of forward: 64 times as many bytes as of one that is broadcast over 64 windows."""
    late = [-choosing.choose(joint(True, expanded), ROOFS, 1e3)[1] for expanded in (False, True)]
    entries = HEADS * TOKENS * TOKENS * (BATCH - 1)
    assert late[0] - late[1] == pytest.approx(1.1 * 1e3 * 2 * entries / ROOFS.copy, rel=1e-6)
