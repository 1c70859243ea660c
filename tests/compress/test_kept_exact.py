"""Which tensors are kept exact for the time that a step lacks: those that take least memory for it."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

import hotrain
from hotrain.compress import choosing, compiled, nodes, readings
from hotrain.planning import Roofs

# ms that each saves, and its bytes
TIMES = {"large": (1.0, 100), "middle": (0.2, 30), "small": (0.15, 16), "costs": (-0.1, 10)}


@pytest.mark.parametrize(
    ("late", "wanted"),
    [
        (0.0, []),
        (0.1, ["small"]),  # not the large one, which saves most for its bytes
        (0.18, ["middle"]),
        (0.9, ["large"]),
        (1.05, ["large", "small"]),
        (1.3, ["large", "middle", "small"]),
        (9.0, ["large", "middle", "small"]),  # all that save time, though it is not enough
    ],
)
def test_the_fewest_bytes_for_the_time(late: float, wanted: list[str]) -> None:
    done: list[str] = []
    kept: collections.Counter[str] = collections.Counter()
    found = [choosing.Candidate(name, *numbers, lambda name=name: done.append(name)) for name, numbers in TIMES.items()]
    left = choosing._keep_exact(found, late, kept)
    assert sorted(done) == wanted
    assert kept == collections.Counter(wanted)
    assert left == pytest.approx(late - sum(TIMES[name][0] for name in wanted))


def test_one_that_is_enough_is_taken_before_several() -> None:
    """The first saves most for its bytes, but five of it would take more than the one."""
    done: list[str] = []
    times = {**{f"{n}": (0.1, 10) for n in range(5)}, "one": (0.5, 45)}
    found = [choosing.Candidate(name, *numbers, lambda name=name: done.append(name)) for name, numbers in times.items()]
    choosing._keep_exact(found, 0.5, collections.Counter())
    assert done == ["one"]


class Explicit(nn.Module):
    """Attention by products of q, k and v, whose heads are not first in memory: for a product each is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.out = nn.ModuleList(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 64)

    def projected(self, x: Tensor) -> Iterable[Tensor]:
        return (layer(x) for layer in self.inputs)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(*x.shape[:2], 2, 32).transpose(1, 2) for t in self.projected(x))
        scores = (q @ k.transpose(-2, -1) * 32**-0.5).float()  # as autocast on a GPU has it
        y = torch.softmax(scores, -1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Fused(Explicit):
    """q, k and v are columns of one layer's result, so that none of them is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.ModuleList([nn.Linear(64, 192)])

    def projected(self, x: Tensor) -> Iterable[Tensor]:
        return self.inputs[0](x).chunk(3, -1)


def all_exact(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """Let graphs have no time for any codes; the counts of the last one, once it was compiled."""
    counts: dict[str, tuple[int, int]] = {}

    def chosen(gm: torch.fx.GraphModule) -> float:
        counts.update(choosing.choose(gm.graph, Roofs(4e12, 7e14), -1e3)[0])
        choosing.forget(gm.graph)
        gm.recompile()
        return 0.0

    monkeypatch.setattr(compiled, "SMALL", 100)
    monkeypatch.setattr(compiled, "_choose", chosen)
    return counts


@pytest.mark.parametrize("kind", [Explicit, Fused])
def test_what_a_product_copies_is_kept_as_it_reads_it(kind: type[Explicit], monkeypatch: pytest.MonkeyPatch) -> None:
    """As exact training keeps it. Of the view that the copy is of, backward would make another: in VOLO, whose unfolded
    images are such views, kernels of 0.6 of a step's 21.6 ms (H200)."""
    copies: list[int] = []

    def look(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        copies.append(len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)))
        return make_boxed_func(gm.forward)

    def compiled_by(partition: Any, model: nn.Module) -> Any:
        decompositions = select_decomp_table()
        options = {"partition_fn": partition, "decompositions": decompositions}
        return torch.compile(model, backend=aot_autograd(fw_compiler=look, bw_compiler=look, **options))

    torch.manual_seed(0)
    exact, x = kind(), torch.randn(16, 49, 64, requires_grad=True)
    model = copy.deepcopy(exact)
    compiled_by(min_cut_rematerialization_partition, exact)(x).square().sum().backward()
    wanted = [x.grad, *(p.grad for p in exact.parameters())]
    x.grad = None
    chosen = all_exact(monkeypatch)
    hotrain.convert(model, "exact", memory="block")
    compiled_by(compiled.partition, model)(x).square().sum().backward()
    assert (chosen["matmul"], chosen["softmax"]) == ((3, 3), (1, 1))
    assert copies[2:] == copies[:2]
    got, want = (
        torch.cat([t.flatten() for t in ts]) for ts in ([x.grad, *(p.grad for p in model.parameters())], wanted)
    )
    assert (got - want).norm() <= 0.02 * want.norm()


@pytest.mark.parametrize("cast", [True, False], ids=["bfloat16", "float32"])
def test_a_softmax_is_kept_as_the_product_reads_it(cast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: of its result in float32 PyTorch's partitioner saves the scores, besides its cast for the product."""
    saved: list[torch.dtype] = []

    def look(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        (output,) = gm.graph.find_nodes(op="output")
        values = [node.meta["val"] for node in output.all_input_nodes]
        saved.extend(t.dtype for t in values if isinstance(t, Tensor) and t.numel() == 16 * 2 * 49 * 49)
        return make_boxed_func(gm.forward)

    def step(model: nn.Module, partition: Any) -> Tensor:
        saved.clear()
        backend = aot_autograd(fw_compiler=look, partition_fn=partition, decompositions=select_decomp_table())
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            y = torch.compile(model, backend=backend)(x)
        y.square().sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    torch.manual_seed(0)
    exact, x = Explicit(), torch.randn(16, 49, 64, requires_grad=True)
    model = copy.deepcopy(exact)
    want = step(exact, min_cut_rematerialization_partition)
    of_exact = list(saved)
    chosen = all_exact(monkeypatch)
    report = hotrain.convert(model, "exact", memory="block")
    got = step(model, compiled.partition)
    assert saved == ([torch.bfloat16] if cast else of_exact)
    assert len(of_exact) == (2 if cast else 1), "else this test cannot fail"
    report.buffers.record_chosen(chosen)
    assert "softmax, 1 of 1" in str(report)
    assert "softmax  " not in str(report)
    assert (got - want).norm() <= 2**-7 * want.norm()  # float32 is kept in bfloat16 where there is no time


@pytest.mark.parametrize("logarithms", [True, False])
def test_only_a_softmax_is_kept_as_its_cast(logarithms: bool) -> None:
    """Of others with a cast, as an activation's input that a product reads, too, the report says what is kept."""
    graph = torch.fx.Graph()
    t = graph.placeholder("t")
    cast = graph.call_function(nodes.CASTS[0], (t, torch.bfloat16))
    unpacked = graph.call_function(torch.ops.aten.exp2.default if logarithms else torch.ops.aten.mul.Tensor, (t,))
    group = [readings.Reading(tensor, [], {unpacked}, set()) for tensor in (t, cast)]
    assert readings.casts_of(group) == ({t: group[1]} if logarithms else {})


def _joint(monkeypatch: pytest.MonkeyPatch, look: Callable[[torch.fx.Graph], None]) -> None:
    """Let a test see the joint graph of compressed attention by products, under autocast."""

    def chosen(gm: torch.fx.GraphModule) -> float:
        look(gm.graph)
        choosing.forget(gm.graph)
        gm.recompile()
        return 0.0

    monkeypatch.setattr(compiled, "SMALL", 100)
    monkeypatch.setattr(compiled, "_choose", chosen)
    model = Explicit()
    hotrain.convert(model, "exact", memory="block")
    backend = aot_autograd(
        fw_compiler=lambda gm, _: make_boxed_func(gm.forward),
        partition_fn=compiled.partition,
        decompositions=select_decomp_table(),
    )
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(model, backend=backend)(torch.randn(16, 49, 64, requires_grad=True))


def test_a_softmax_costs_its_logarithms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact, one tensor is left of its probabilities in float32 and in bfloat16; in Swin-T packing one takes as long as
    copying 10 bytes, and so does unpacking it for a product."""
    found: list[choosing.Candidate] = []
    fixed: list[float] = []

    def look(graph: torch.fx.Graph) -> None:
        for own, its in zip((found, fixed), choosing._candidates(graph, Roofs(1e12, 7e14)), strict=True):
            own.extend(its)  # type: ignore[attr-defined]

    _joint(monkeypatch, look)
    entries = 16 * 2 * 49 * 49
    assert min(fixed) == pytest.approx(-1e3 * entries * 16 / 1e12), "exact training computes it again"
    (softmax,) = (c for c in found if c.nbytes == (2 - 1) * entries)
    assert softmax.ms == pytest.approx(1e3 * entries * (10 + 10 - 1) / 1e12)


def test_padded_products_leave_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four fifths of what they gain alone."""
    left: list[float] = []

    def look(graph: torch.fx.Graph) -> None:
        for gained in (0.0, 2.0):
            monkeypatch.setattr(choosing.padding, "gain", lambda *_, gained=gained: gained)
            left.append(choosing.choose(graph, Roofs(4e12, 7e14), 0.0, spare_ms=1e3)[1])

    _joint(monkeypatch, look)
    assert left[1] - left[0] == pytest.approx(1.6)


@pytest.mark.parametrize("view", [lambda t: t.transpose(-1, -2), lambda t: t.flatten(0, 1)], ids=["view", "none"])
def test_views_of_another_memory_layout_are_renewed(view: Callable[[Tensor], Tensor]) -> None:
    """As where q, columns of a projection, comes in the place of what was unpacked: without a view of it, by a copy."""

    def step(unpacked: Tensor, source: Tensor) -> list[Tensor]:
        return [view(unpacked), source.cos()]

    dense, heads = torch.randn(4, 6, 8), torch.randn(6, 4, 24)[..., :8].transpose(0, 1)
    gm = make_fx(step, tracing_mode="fake")(dense, heads)
    place, source = gm.graph.find_nodes(op="placeholder")
    users = list(place.users)
    place.replace_all_uses_with(source)
    nodes.renew(users)
    gm.recompile()
    got, _ = gm(dense, heads)
    (results,) = gm.graph.output_node().args
    assert torch.equal(got, view(heads))
    assert got.stride() == results[0].meta["val"].stride()  # type: ignore[index, union-attr]
