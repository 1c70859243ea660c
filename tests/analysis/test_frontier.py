"""The frontier: points measured on a model that stays as found, picked by a budget, followed by `convert`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import TokenNet, assert_as_found, found
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hotrain
from hotrain import Frontier, Point, budget
from hotrain.analysis import frontier as module
from hotrain.analysis.steps import Step, batch_bytes, fixed_bytes
from hotrain.compress.checkpointing import Recomputed, blocks, recompute
from hotrain.plotting.steps import draw_frontier


class Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(64), nn.Dropout(0.1)
        self.fc1, self.fc2 = nn.Linear(64, inner), nn.Linear(inner, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.fc2(nn.functional.gelu(self.fc1(self.norm(x)))))


class Net(nn.Module):
    """Buffers, dropout, and blocks that keep more in codes than their inputs are."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(32, 64), nn.ModuleList(Block(512) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


X = torch.randn(256, 32, generator=torch.Generator().manual_seed(0))
NAMES = ["exact", "exact+checkpoint", "hotrain-memory", *(f"hotrain-memory+{n}/4" for n in (1, 2, 4))]


@pytest.fixture(scope="module")
def measured() -> tuple[Net, Frontier]:
    """A model in eval mode with a gradient, and its frontier; the model is checked to be as before."""
    torch.manual_seed(0)
    model = Net()
    model(X).sum().backward()
    model.eval()
    before, told = found(model), []
    with pytest.MonkeyPatch.context() as patch:  # equal blocks, equal times: the first ones are recomputed first
        patch.setattr(budget, "_seconds", lambda model, modules, *_: dict.fromkeys(modules, 1.0))
        result = hotrain.frontier(model, X, steps=1, on_point=told.append)
    assert_as_found(model, before)
    assert tuple(told) == result.points
    return model, result


def test_the_points(measured: tuple[Net, Frontier]) -> None:
    model, result = measured
    assert [point.name for point in result.points] == NAMES
    assert all(point.fits and point.how == "predicted" and point.device == "cpu" for point in result.points)
    exact, checkpoint, memory, *mixed = result.points
    assert exact.method is None is checkpoint.method
    assert {point.method.name for point in (memory, *mixed)} == {"hq8"}
    assert checkpoint.recomputed == mixed[-1].recomputed == tuple(blocks(model))
    peaks = [point.peak_bytes for point in (exact, memory, *mixed)]
    assert peaks == sorted(peaks, reverse=True), "the later point saves more"
    assert "Times were measured; peaks are predicted" in str(result)


@pytest.mark.parametrize("name", ["exact+checkpoint", "hotrain-memory", "hotrain-memory+2/4"])
def test_convert_follows_a_point_to_the_byte(name: str, measured: tuple[Net, Frontier]) -> None:
    """Also one that was written and read, on a model that was converted otherwise before."""
    _, result = measured
    chosen = next(point for point in result.points if point.name == name)
    point = Point.from_json(json.loads(json.dumps(chosen.to_json())))
    assert point == chosen
    model, twin = Net(), Net()
    hotrain.convert(model, "hot", memory="linear")
    report = hotrain.convert(model, plan=point)
    assert report.point == point
    assert str(point) in str(report)
    step = Step(model, None, torch.optim.AdamW)
    optimizer = step.optimizer()
    step.run(((X,), {}), optimizer)
    assert fixed_bytes(model, optimizer) + batch_bytes(model, ((X,), {}))[0] == point.peak_bytes
    if point.method is not None:
        hotrain.convert(twin, plan="memory")
    recompute({block: twin.get_submodule(block) for block in point.recomputed})
    assert hotrain.saved_bytes(model, X).total == hotrain.saved_bytes(twin, X).total
    assert sum(isinstance(block, Recomputed) for block in model.blocks) == len(point.recomputed)
    hotrain.revert(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in Net().modules()]


def point(name: str, ms: float | None, mib: float | None) -> Point:
    peak = None if mib is None else int(mib * 2**20)
    return Point(name, ms=ms, peak_bytes=peak, device="cpu", torch_version=torch.__version__)


ABOUT: dict[str, Any] = {"model": "Net", "inputs": [[8, 3]], "autocast": None, "compile": False, "steps": 5}
ABOUT |= {"optimizer": "AdamW", "device": "cpu", "versions": {}}
DRAWN = Frontier(
    (
        point("exact", 10.0, 100.0),
        point("exact+checkpoint", 14.0, 60.0),
        point("exact+offload", None, None),
        point("hotrain", 9.0, 70.0),
        point("hotrain-memory", 9.5, 40.0),
        point("hotrain-memory+1/4", 12.0, 40.0),
        point("hotrain-memory+4/4", 13.0, 20.0),
    ),
    ABOUT,
)


def test_what_another_point_beats_in_both_is_dominated() -> None:
    assert [p.name for p in DRAWN.front] == ["hotrain", "hotrain-memory", "hotrain-memory+4/4"]
    said = {line.split()[0]: line.split()[-1] for line in str(DRAWN).splitlines() if line.startswith(("exact", "hot"))}
    assert [name for name, word in said.items() if word == "dominated"] == [
        "exact", "exact+checkpoint", "hotrain-memory+1/4"
    ]  # fmt: skip
    assert "out of memory" in str(DRAWN)
    assert [row["dominated"] for row in DRAWN.rows()] == [p not in DRAWN.front for p in DRAWN.points]
    equals = Frontier((point("a", 1.0, 2.0), point("b", 1.0, 2.0)), ABOUT)
    assert len(equals.front) == 2, "equals do not beat each other"


def test_the_fastest_within_a_budget_and_the_smallest_within_a_time() -> None:
    best = {size: DRAWN.best(size).name for size in ("1GiB", "70MiB", "69MiB", "20MiB", 40 * 2**20)}
    assert list(best.values()) == ["hotrain", "hotrain", "hotrain-memory", "hotrain-memory+4/4", "hotrain-memory"]
    assert DRAWN.smallest(9.0).name == "hotrain"
    assert DRAWN.smallest(12.9).name == "hotrain-memory"
    assert DRAWN.smallest(100).name == "hotrain-memory+4/4"


def test_what_cannot_be_met_says_how_near_it_comes_and_with_what() -> None:
    with pytest.raises(ValueError, match=r"10.00 MiB cannot be met: the least is 20.00 MiB .* 2.00 times .* with") as e:
        DRAWN.best("10MiB")
    assert "hotrain-memory+4/4 at 13.0 ms/step" in str(e.value)
    with pytest.raises(ValueError, match=r"at most 5 ms/step: the fastest is hotrain, 9\.0 ms/step and 70\.00 MiB"):
        DRAWN.smallest(5)
    with pytest.raises(ValueError, match="'16 apples'"):
        DRAWN.best("16 apples")
    with pytest.raises(ValueError, match="every point ran out of memory"):
        Frontier((point("exact", None, None),), ABOUT).best("1GiB")


def test_record_round_trip(tmp_path: Path, measured: tuple[Net, Frontier]) -> None:
    for number, result in enumerate((DRAWN, measured[1])):
        path = tmp_path / f"{number}.jsonl"
        result.save(path)
        assert Frontier.load(path) == result
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == len(NAMES)
    assert {row["device"] for row in rows} == {"cpu"}
    assert rows[0]["versions"]["torch"] == torch.__version__
    for text, said in (("{", "no record"), ('{"record": 1}\n', "no record"), ("", "version"), ("[1]\n", "no record")):
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            Frontier.load(path)
    path.write_text(json.dumps({**rows[0], "record": 99}) + "\n")
    with pytest.raises(ValueError, match="99"):
        Frontier.load(path)
    with pytest.raises(ValueError, match="speed_ms"):
        Point.from_json({**rows[0]["point"], "speed_ms": 1.0})
    with pytest.raises(ValueError, match="exact"):
        Point.from_json({**rows[0]["point"], "method": {"name": "hq8"}})


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (replace(DRAWN.points[0], device="NVIDIA H200"), "device NVIDIA H200, here is cpu"),
        (replace(DRAWN.points[0], torch_version="2.0.0"), "PyTorch 2.0.0, here is"),
        (Point("a", recomputed=("blocks.7",)), "'blocks.7', which is no block of this Net"),
        ("16GiB", r"is a memory budget.*hotrain.frontier\(model, batch\).best\('16GiB'\)"),
        (16 * 2**30, "is a memory budget"),
        ("fast", "'speed', 'graphs', 'memory', or a point of hotrain.frontier"),
    ],
)
def test_what_convert_refuses(plan: Any, said: str) -> None:
    model = Net()
    hotrain.convert(model)
    before = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=said):
        hotrain.convert(model, plan=plan)
    assert [type(m) for m in model.modules()] == before, "as it was"


def test_a_point_of_another_model_is_refused(measured: tuple[Net, Frontier]) -> None:
    """One without blocks to recompute too: of other widths, or of fewer blocks."""
    _, result = measured
    chosen = next(point for point in result.points if point.name == "hotrain-memory")
    shallow, narrow = Net(), Net()
    del shallow.blocks[2:]
    narrow.stem = nn.Linear(16, 64)
    for model, has in ((shallow, "this Net has 7 and "), (narrow, "this Net has 13 and ")):
        said = f"measured with a model of 13 layers and {chosen.parameters} parameters, {has}.*hotrain.frontier"
        with pytest.raises(ValueError, match=said):
            hotrain.convert(model, plan=chosen)
        assert type(model.blocks[0].fc1) is nn.Linear
    record = chosen.to_json()
    del record["layers"], record["parameters"]  # as records had it before
    hotrain.convert(narrow, plan=Point.from_json(record))


def test_bad_calls() -> None:
    with pytest.raises(ValueError, match="leave out the other arguments"):
        hotrain.convert(Net(), "hot", plan=Point("a"))
    with pytest.raises(ValueError, match="plan='fast'"):
        Point("a", plan="fast")
    with pytest.raises(ValueError, match="offload=True"):
        Point("a", recomputed=("blocks.0",), offload=True)
    frontier = partial(hotrain.frontier, Net(), X)
    for options, said in (
        ({"steps": 0}, "steps=0"),
        ({"method": "exact"}, "'exact' is exact"),
    ):
        with pytest.raises(ValueError, match=said):
            frontier(**options)
    model = Net()
    hotrain.convert(model, plan=Point("a", offload=True))
    with pytest.raises(ValueError, match=r"frontier: the model is converted.*revert"):
        hotrain.frontier(model, X)


def test_out_of_memory_is_a_point_and_other_errors_name_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without blocks has no point that checkpoints some."""
    plain, failure = module.timed, torch.OutOfMemoryError("CUDA out of memory")

    def timed(step: Step, *args: Any, **options: Any) -> Any:
        if not any(True for _ in hotrain.converted_layers(step.model)):
            raise failure
        return plain(step, *args, **options)

    monkeypatch.setattr(module, "timed", timed)
    model, images = TokenNet(), torch.randn(2, 3, 16, 16)
    before = found(model)
    exact, memory = hotrain.frontier(model, images, steps=1).points
    assert_as_found(model, before)
    assert (exact.ms, exact.peak_bytes, str(exact)) == (None, None, "exact: out of memory")
    assert memory.fits
    failure = RuntimeError("shapes")  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="shapes") as caught:
        hotrain.frontier(model, images, steps=1)
    assert caught.value.__notes__ == ["hotrain.frontier: at the point 'exact'"]
    assert_as_found(model, before)


def test_each_point_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []

    def with_backend(model: nn.Module, mode: str | None) -> Callable[..., Any]:
        modes.append(mode)
        return torch._dynamo.optimize("aot_eager")(model)

    monkeypatch.setattr(module, "compile_in_mode", with_backend)
    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64))
    result = hotrain.frontier(model, X, steps=1, compile=True)
    assert [p.name for p in result.points] == ["exact", "hotrain", "hotrain-memory"]
    assert [p.plan for p in result.points] == ["speed", "graphs", "memory"]
    assert modes == [None] * 3
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3


@pytest.mark.parametrize(("own", "spare"), [(9.0, 1.0), (9.9, None), (11.0, None), (None, None)])
def test_time_that_is_left_is_spent_in_a_point_of_its_own(own: float | None, spare: float | None) -> None:
    """Compiled on a GPU, from two hundredths of exact's time on; not where the converted steps ran out of memory."""
    measured: list[Point] = []
    method = hotrain.preset("hq8")
    plans = module._plans(nn.Sequential(), ((X,), {}), method, torch.device("cuda"), True, measured)
    for plan in plans:
        if plan.name == "hotrain-memory":
            break
        ms = 10.0 if plan.name == "exact" else own
        measured.append(replace(plan, ms=ms, peak_bytes=None if ms is None else 1))
    found = {point.name: point for point in measured}
    assert list(found) == ["exact", "exact+offload", "hotrain", *["hotrain+spare"] * (spare is not None)]
    if spare is not None:
        assert (found["hotrain+spare"].spare_ms, found["hotrain+spare"].plan) == (spare, "graphs")


def test_a_plan_with_spare_time_is_followed() -> None:
    model = Net()
    chosen = Point("hotrain+spare", hotrain.preset("hq8"), "graphs", spare_ms=2.5)
    again = Point.from_json(json.loads(json.dumps(chosen.to_json())))
    assert again == chosen
    report = hotrain.convert(model, plan=again)
    assert report.buffers is not None
    assert report.buffers.spare_ms == 2.5
    old = {name: value for name, value in chosen.to_json().items() if name != "spare_ms"}
    assert Point.from_json(old) == replace(chosen, spare_ms=0.0)
    with pytest.raises(ValueError, match="spare_ms=-1"):
        replace(chosen, spare_ms=-1)


def test_every_step_casts_the_weights() -> None:
    """Under one autocast context for all steps, PyTorch would keep the weights' casts of the first."""

    class Casts(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func is torch.ops.aten._to_copy.default and kwargs["dtype"] is torch.bfloat16
            return func(*args, **(kwargs or {}))

    model = nn.Linear(32, 32)
    step = Step(model, None, torch.optim.SGD)
    optimizer, counts = torch.optim.SGD(model.parameters(), lr=0.1), []
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            with Casts() as casts:
                step.run(((X,), {}), optimizer)
            counts.append(casts.count)
    assert counts[0] == counts[1] >= 3  # x, weight and bias at least


def test_figure_names_each_point_once_and_no_label_covers_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

    from hotrain.plotting import steps

    drawn: list[Figure] = []
    plain = steps.to_svg
    monkeypatch.setattr(steps, "to_svg", lambda figure, said: (drawn.append(figure), plain(figure, said))[1])
    rows = DRAWN.rows()
    rows[-1]["point"] |= {"method": {"name": "hq8"}, "recomputed": ["a"]}
    rows.append({**rows[0], "point": {**rows[0]["point"], "name": "slow", "ms": 200.0}})
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", draw_frontier(rows))
    for p in DRAWN.points:
        assert texts.count(p.name) == p.fits
    assert texts.count("slow, 200 ms") == 1
    assert "peak memory of a training step (MiB); +n/m: n of m blocks checkpointed" in texts
    boxes = [text.get_window_extent() for text in drawn[0].axes[0].texts]
    for number, box in enumerate(boxes):
        for other in boxes[:number]:
            common = Bbox.intersection(box, other)
            assert common is None or common.width * common.height < 0.05 * box.width * box.height
    with pytest.raises(ValueError, match="no variant was measured"):
        draw_frontier(rows[2:3])


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True])
def test_on_a_gpu_steps_run(compile: bool) -> None:
    model = Net().cuda()
    model.stem(X.cuda()).sum().backward()
    before = found(model)
    result = hotrain.frontier(model, X.repeat(64, 1).cuda(), compile=compile)
    assert_as_found(model, before)
    by_name = {p.name: p for p in result.points}
    assert {"exact", "exact+offload", "hotrain", "hotrain-memory", "hotrain-memory+4/4"} <= set(by_name)
    assert all(p.fits and p.how == "ran" and p.device == torch.cuda.get_device_name() for p in result.points)
    if not compile:  # a compiled backward asks for all of its saved tensors at once
        assert by_name["exact+offload"].peak_bytes < by_name["exact"].peak_bytes
    assert by_name["hotrain-memory"].peak_bytes < by_name["exact"].peak_bytes
    assert torch.cuda.memory_allocated() < 1 << 28
