"""A model in several compiled graphs: each has the time that its own layers gain, and the report adds them up."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import nop

import hotrain
from hotrain import planning
from hotrain.compress import choosing, compiled
from hotrain.compress.report import Buffers
from hotrain.nn.state import LayerState
from hotrain.planning import Roofs

BACKEND = aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=compiled.partition)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Two(nn.Module):
    """Every kind of converted layer, in two halves with a graph break between them; each has outputs of its own."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 48, 4, stride=4)
        self.wide, self.other = nn.Linear(48, 64), nn.Linear(64, 64)  # equal outputs, different inputs
        self.mix = nn.Conv2d(64, 80, 3, padding=1)
        self.point = nn.Conv2d(80, 112, 1)
        self.parts = parts

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = self.other(self.wide(x))
        if self.parts == 2:
            torch._dynamo.graph_break()
        x = x.transpose(1, 2).reshape(-1, 64, 8, 8)
        return self.point(self.mix(x))


def gains_of_graphs(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The ms that each graph's layers gain, from here on, with questions of layers on a CPU as of a GPU's."""

    def question(self: LayerState, facts: tuple[Any, ...], geometry: Any) -> planning.Question:
        x, dtype, device, needs_x, w, weights, trained, bias, *others = facts
        rest = (self.running, self.grid, self.transposed, geometry, device, *others)
        return planning.Question(x, w, dtype, weights, bias, needs_x, trained, *rest)

    found: list[float] = []

    def choose(graph: Any, roofs: Roofs, gains: float, spare: float) -> tuple[dict[str, tuple[int, int]], float]:
        found.append(gains)
        return {}, 0.0

    monkeypatch.setattr(LayerState, "_question", question)
    monkeypatch.setattr(compiled, "_device_roofs", lambda gm: Roofs(copy=4e12, product=7e14))
    monkeypatch.setattr(choosing, "choose", choose)
    return found


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo's, behind a graph break
@pytest.mark.parametrize(("parts", "gains"), [(1, [48 + 64 + 64 + 80 + 112]), (2, [48 + 64 + 64, 80 + 112])])
@pytest.mark.parametrize("copied", [False, True])
def test_a_graph_has_the_time_that_its_own_layers_gain(
    parts: int, gains: list[int], copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's gain is here its number of outputs in ms; a CPU has no plan of its own."""
    found = gains_of_graphs(monkeypatch)
    monkeypatch.setattr(LayerState, "_why_exact", lambda *_: None)
    monkeypatch.setattr(planning, "rehearse", lambda question: None)
    monkeypatch.setattr(planning, "gain", lambda question, graphs: float(question.outputs))
    model = Two(parts).train()
    hotrain.convert(model, filter_fn=lambda *_: True)
    if copied:
        model = copy.deepcopy(model)
    torch.compile(model, backend=BACKEND)(torch.randn(2, 3, 32, 32)).sum().backward()
    assert sorted(found) == sorted(map(float, gains))


@pytest.mark.parametrize("last", [False, True])
def test_an_exact_layer_that_is_multiplied_has_its_gain(
    last: bool, monkeypatch: pytest.MonkeyPatch, laid_out_on_cpu: None
) -> None:
    """Patches of 3 channels, in 16 bits, as a product of 128 tokens by 48 columns: 1 ms of each of two equal layers,
    asked for the layout of their images."""
    found, asked = gains_of_graphs(monkeypatch), []

    def timed(q: planning.Question) -> None:
        if q.multiplies:
            asked.append(q)
            planning._of_patches[q] = 1.5, 0.5

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.others = nn.Conv2d(3, 64, 4, 4), nn.Conv2d(3, 64, 4, 4)
            self.narrow, self.out = nn.Conv2d(3, 64, 8, 4, 2), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            y = self.patches(x) + self.others(x) + self.narrow(x)
            return self.out(y.flatten(2).transpose(1, 2))

    monkeypatch.setattr(LayerState, "_why_exact", lambda *_: "slower")
    monkeypatch.setattr(planning, "_of_patches", {})
    monkeypatch.setattr(planning, "times_of_patches", timed)  # when the layer is traced, outside of compilers' modes
    form = torch.channels_last if last else torch.contiguous_format
    model, x = Net().to(memory_format=form), torch.randn(2, 3, 64, 64).contiguous(memory_format=form)
    hotrain.convert(model, filter_fn=lambda *_: True)
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(model, backend=BACKEND)(x).sum().backward()
    assert found == [2.0]
    assert {q.last for q in asked} == {last}
    assert {q.geometry.kernel for q in asked} == {(4, 4)}  # type: ignore[union-attr]


class Head(nn.Module):
    """What hotrain remembers of a result for the next layer, behind a graph break: norm, ReLU and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.classes = nn.Linear(32, 256), nn.LayerNorm(256), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        torch._dynamo.graph_break()
        return self.classes(nn.functional.dropout(nn.functional.relu(self.norm(x)), 0.1))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo's, behind a graph break
def test_graphs_behind_a_break_return_what_the_model_returns() -> None:
    """A tensor that an older object holds at the end of a graph is a result: it lives on, and backward gets a gradient
    of zeros for it. SegFormer's head returned 1 GiB of them."""
    results = []

    def noted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        results.append([tuple(value.shape) for value in graph(*inputs)])
        return BACKEND(graph, inputs)

    model = Head().train()
    hotrain.convert(model, plan="memory", filter_fn=lambda *_: True)
    torch.compile(model, backend=noted)(torch.randn(4, 64, 32)).sum().backward()
    assert results == [[(4, 64, 256)], [(4, 64, 10)]]
    assert "relu" in model.__dict__["_hotrain_buffers"].formats


def test_calls_that_are_kept_exact_are_counted_over_all_graphs() -> None:
    """A format is unused once no graph saves in it, and used again with the first that does."""
    buffers = Buffers()
    buffers.record("gelu", "int4")
    buffers.record_chosen({"gelu": (0, 2), "attention": (1, 1)})
    assert buffers.formats == {"gelu": "int4"}
    assert list(buffers.full) == ["attention, 1 of 1"]
    buffers = Buffers()
    buffers.record("gelu", "int4")
    buffers.record_chosen({"gelu": (2, 2)})
    assert buffers.formats == {}
    assert list(buffers.full) == ["gelu, 2 of 2"]
    buffers.record_chosen({"gelu": (1, 3)})
    assert buffers.formats == {"gelu": "int4"}
    assert list(buffers.full) == ["gelu, 3 of 5 in 2 graphs"]
    buffers.record_chosen({"gelu": (0, 1)})
    assert list(buffers.full) == ["gelu, 3 of 6 in 3 graphs"]


def test_a_plan_is_a_part_of_the_key_of_compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else PyTorch's cache would answer with the graph of another plan.

    The partitioner's part of the key is of all models that live; a graph has its own plan.
    """
    monkeypatch.setattr(compiled, "_regions", weakref.WeakValueDictionary())
    keys, codes, models = [], [], [Two(1).train() for _ in range(3)]

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        codes.append(gm.code)
        return gm.forward

    for model, (plan, spare) in zip(models, (("graphs", 0.0), ("graphs", 2.5), ("memory", 0.0)), strict=True):
        report = hotrain.convert(model, plan=plan)
        assert report.buffers is not None
        report.buffers.spare_ms = spare
        compiled.region(report.buffers)
        keys.append(compiled.Partitioner().uuid())
        torch._dynamo.reset()
        torch.compile(model, backend=backend)(torch.randn(2, 3, 32, 32))
    assert len(set(keys)) == 3
    assert len(set(codes)) == 3
