"""Tables, claims and the page of studies: every cell is shown, and numbers are those of the records."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hotrain_study import measures
from hotrain_study import studies as known
from hotrain_study.cells import Cell, Study, grid, lines, with_method
from hotrain_study.figures import draw_surface
from hotrain_study.page import render
from hotrain_study.tables import BETTER, CLAIMS, HELD, OPEN, WORSE, advice, head, kind_of, tables, verdict

import hotrain
from hotrain.train.run import TrainRun

STUDIES = known.studies()
GROUP = CLAIMS[0].group
RUN = TrainRun(data="cifar10")
CHOSEN = Study("pretraining", "title", tuple(grid("pretraining", GROUP, RUN, ("exact", "hot", "hq8"), (0, 1, 2))))


def row(cell: Cell, accuracy: float | None, **more: Any) -> dict[str, Any]:
    history = [{"epoch": epoch, "accuracy": accuracy, "train_loss": 1.0} for epoch in (1, 2)]
    names = {**cell.names(), "status": "finished", "accuracy": accuracy, "error": None, "history": history}
    return {**names, "config": cell.run.to_dict(), "device": "a device", "commit": "abc", **more}


def rows(hot: float, hq8: float, step: float = 0.1) -> list[dict[str, Any]]:
    level = {"exact": 95.0, "hot": 95.0 + hot, "hq8": 95.0 + hq8}
    noise = {"exact": 0.0, "hot": step, "hq8": step}
    return [row(c, level[c.method] + noise[c.method] * (c.run.seed - 1)) for c in CHOSEN.cells]


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_that_was_not_run_shows_every_cell(name: str) -> None:
    study = STUDIES[name]
    shown = tables(study, [])
    text = str([table.rows for table in shown])
    assert {cell.method for cell in study.cells} <= {c.strip("`") for t in shown for r in t.rows for c in r[:1]} | {
        "exact"
    }
    assert text.count("not run") >= len({(cell.group, cell.method, cell.kind) for cell in study.cells})
    assert all(len(line) == len(table.headers) for table in shown for line in table.rows if len(line) > 1)


def test_the_cells_of_the_issue_are_there_in_their_order() -> None:
    cells = STUDIES["pretraining"].cells
    small = [cell for cell in cells if cell.group in ("ResNet-18, CIFAR-10", "small ViT, CIFAR-10")]
    assert cells[: len(small)] == tuple(small), "CIFAR-10 first"
    roundings = (known.IN_INTEGERS, known.IN_8_BITS)
    table = [cell for cell in small if cell.method not in roundings]
    for seed in range(3):
        assert [c.method for c in table if c.run.seed == seed] == 2 * [c.method for c in table[: len(known.METHODS)]]
    assert {c.method for c in table if c.run.seed == 3} == {"exact", "hq8", "hot-unbiased", known.IN_FP8}
    for method in roundings:
        assert {c.run.seed for c in small if c.method == method} == {0, 1, 2, 3}
    assert {cell.run.plan for cell in cells if "@" not in cell.method} == {"memory"}, "every layer is converted"
    for study in STUDIES.values():
        for cell in study.cells:
            if cell.kind == "train":
                same = [c for c in study.cells if (c.group, c.kind) == (cell.group, "train")]
                assert len({(c.run.epochs, c.run.lr, c.run.batch_size, c.run.model) for c in same}) == 1


def test_bits_per_byte_are_of_text_models_alone_and_worse_is_above_zero() -> None:
    """A loss of log 2 is one bit; a row without a loss, as of a run that diverged, is still shown."""
    study = STUDIES["language"]
    chosen = [cell for cell in study.cells if cell.run.seed == 0 and cell.method in ("exact", "hot", "hla")]
    made = []
    for cell in chosen:
        loss = {"exact": 1.0, "hot": 1.25}.get(cell.method, 0.0) * math.log(2)
        made.append(row(cell, 50.0, history=[{"epoch": 1, "accuracy": 50.0, "test_loss": loss}]))
        if cell.method == "hla":
            made[-1] = row(cell, None, history=[], status="diverged")
    accuracy, bits = tables(study, made)
    assert (accuracy.headers[1:], bits.headers[1:]) == (
        ["BERT (6 blocks), SST-2", "GPT (6 blocks), text"],
        ["GPT (6 blocks), text"],
    )
    shown = {line[0]: line[1] for line in bits.rows}
    assert shown["`exact`"].startswith("1.000")
    assert shown["`hot`"].startswith("1.250 (+0.250)")
    assert shown["`hla`"].startswith("1 diverged")
    assert shown["`luq`"] == "not run"
    assert "above zero is worse" in bits.note


def test_masks_and_boxes_have_tables_of_their_metric() -> None:
    """Each model in the table of what it predicts, and in no other."""
    study = STUDIES["dense"]
    chosen = [cell for cell in study.cells if cell.run.seed == 0 and cell.method in ("exact", "hot")]
    made = []
    for cell in chosen:
        history = [{"epoch": 1, "accuracy": 40.0, "train_loss": 1.0, "pixel_accuracy": 90.0}]
        made.append(row(cell, 40.0, history=history, metric="mean IoU"))
    iou, pixels, precision = tables(study, made)
    assert (iou.title, pixels.title, precision.title) == ("Mean IoU", "Pixel accuracy", "AP at IoU 0.5")
    assert iou.headers == pixels.headers == ["method", "SegFormer-B0, scenes"]
    assert precision.headers == ["method", "YOLOS, scenes"]
    assert iou.rows[0] == ["`exact`", "40.00; 1 of 4 runs"]
    assert pixels.rows[0] == ["`exact`", "90.00; 1 of 4 runs"]
    page = render("title", [], [study], made)
    assert "SegFormer-B0, scenes: points above exact" in page
    assert "mean IoU minus exact" in page


@pytest.mark.parametrize(
    ("gap", "said"),
    # the standard error of (gap - 0.1, gap, gap + 0.1) is 0.058
    [(-0.46, HELD), (-0.36, HELD), (-0.7, WORSE), (-0.2, BETTER)],
)
def test_a_claim_holds_within_two_standard_errors(gap: float, said: str) -> None:
    assert verdict(CLAIMS[0], CHOSEN, rows(gap, 0.0))[0] == said


def test_one_seed_decides_nothing() -> None:
    some = [each for each in rows(-5.0, -5.0) if each["seed"] == 0]
    kind, text = verdict(CLAIMS[0], CHOSEN, some)
    assert (kind, text.endswith("-5.10 after one seed")) == (OPEN, True)
    assert "decides nothing" in advice([CHOSEN], some, "hq8")[0]
    assert verdict(CLAIMS[0], CHOSEN, [])[0] == OPEN


def test_what_to_choose_follows_the_gap() -> None:
    assert advice([CHOSEN], rows(0.0, -0.05), "hq8")[0].endswith(f"costs no accuracy: {GROUP} (-0.05 ± 0.06).")
    assert advice([CHOSEN], rows(0.0, -0.5), "hq8")[0].startswith("Choose exact unless memory is short")


def test_a_mean_loss_within_a_large_error_is_not_no_loss() -> None:
    """(-1.4, 0.1, -0.2): a mean of -0.5, and a standard error as large."""
    made = [{**row, "accuracy": 90.0} for row in rows(0.0, 0.0)]
    for seed, gap in enumerate((-1.4, 0.1, -0.2)):
        row = next(one for one in made if one["method"] == "hq8" and one["seed"] == seed)
        row["accuracy"] += gap
    assert advice([CHOSEN], made, "hq8")[0].startswith("`hq8` after seeds that differ too much to decide")


def test_the_head_is_ten_lines_at_most() -> None:
    """Also where every model asks for a choice of its own: what is chosen is a line, not the model."""
    made = []
    for place, cell in enumerate(STUDIES["pretraining"].cells):
        if cell.method in ("exact", "hq8"):
            made.append(row(cell, 80.0 + (cell.method == "hq8") * (place % 3 - 1) + cell.run.seed))
    assert len({row["group"] for row in made}) > 4
    assert len(head(STUDIES, [], "hq8")) <= 10
    assert len(head(STUDIES, made, "hq8")) <= 10


def test_runs_that_diverged_or_failed_are_in_the_table() -> None:
    some = rows(-0.4, 0.0)
    hot = [each for each in some if each["method"] == "hot"]
    hot[0] |= {"status": "diverged", "accuracy": None, "error": "the loss is nan"}
    hot[1] |= {"status": "failed", "accuracy": None, "error": "killed"}
    table = tables(CHOSEN, some)[0]
    assert table.headers == ["method", GROUP]
    assert table.rows[1] == ["`hot`", "94.70 (-0.30); 1 diverged; 1 failed"]
    assert tables(CHOSEN, some[:4])[0].rows[1][1].endswith("1 of 3 runs")
    assert lines(CHOSEN, some)[1].count("diverged") == 1


def test_the_page_shows_tables_and_figures() -> None:
    page = render("title", ["HOT <held>"], [CHOSEN], rows(-0.4, 0.0))
    assert page.count("<svg") == 2, "gaps and curves"
    assert "HOT &lt;held&gt;" in page
    assert "94.60 ± 0.10 (-0.40 ± 0.06)" in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_kinds_of_layers() -> None:
    assert [kind_of(n) for n in ("blocks.0.mlp.fc1", "blocks.0.attn.proj", "layer2.0.downsample.0", "conv1")] == [
        "fc1",
        "attn.proj",
        "downsample.0",
        "conv1",
    ]


def test_costs_are_those_of_the_analyses() -> None:
    run = with_method(TrainRun(model="demo_vit", model_args={"depth": 1}, image_size=16, batch_size=4), "hot")
    found = measures.costs(run, kept=True)
    assert 0 < found["overhead"] < found["corrected"]["backward"] < 2 * found["corrected"]["forward"]
    # HOT's Table 5, and what it prints (docs/maths.md)
    assert round(found["table_5"]["stages.3.fc2 of EfficientFormer-L7"]["overhead_exchanged"], 1) == 11.5
    exact = measures.costs(with_method(run, "exact"), kept=True)
    assert found["kept"] < exact["kept"]
    assert exact["corrected"]["backward"] <= 2 * exact["corrected"]["forward"]
    assert measures.costs(with_method(run, "hla"))["paper"] is None


def test_a_step_and_gradients_over_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    args = {"depth": 1, "embed_dim": 32}
    run = TrainRun(model="demo_vit", model_args=args, image_size=16, batch_size=8, device="cpu", steps=4, epochs=1)
    found = measures.step(with_method(run, "hq8"), classes=10, steps=3)
    assert found["step_ms"] > 0
    assert found["kept"] < measures.step(run, classes=10, steps=3)["kept"]
    run = TrainRun(**{**run.__dict__, "image_size": None})
    found = measures.gradients(run, methods=("hot", "hot-unbiased:number=int"), at=(0, 1), images=8, draws=2)
    assert [moment["update"] for moment in found["moments"]] == [4]
    moment = found["moments"][0]
    for method in ("hot", "hot-unbiased:number=int"):
        assert all(layer["g_w"][0] > 0.01 for layer in moment["methods"][method].values() if layer["g_w"])
    assert all(abs(sum(layer["g_y"]) - 1) < 0.01 for layer in moment["energy"].values())
    assert set(moment["lqs"]) <= set(moment["methods"]["hot"])
    cell = Cell("fidelity", "g", "exact", run, "gradients")
    study = Study("fidelity", "t", (cell,))
    table = tables(study, [row(cell, None, figures=found)])
    assert [each.headers[-1] for each in table] == ["4", "4"]
    assert render("t", [], [study], [row(cell, None, figures=found)]).count("<svg") >= 3


def test_neighbours_have_a_table_where_there_are_no_labels() -> None:
    run = TrainRun(task="simclr", model="small_resnet18", data="cifar10")
    study = Study("evmt", "t", tuple(grid("evmt", "SimCLR", run, ("exact", "hla"), (0,))))
    found = [row(cell, 80.0 + cell.run.seed) for cell in study.cells[:1]]
    found[0]["history"][-1]["knn"] = 75.5
    probe, near = tables(study, found)
    assert probe.rows == [["`exact`", "80.00"], ["`hla`", "not run"]]
    assert near.rows == [["`exact`", "75.50"], ["`hla`", "not run"]]


def test_a_surface_keeps_outliers_and_leaves_the_model_as_it_is() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Conv2d(100, 100, 1))
    hotrain.convert(model, "hot", filter_fn=lambda *_: True)
    g = torch.full((2, 100, 32), 0.5)
    g[0, 71, 13] = -9.0
    g[1] = 100.0  # another sample

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model[0](x) * g).sum() + (model[1](x[..., None]) * g[..., None]).sum()  # type: ignore[index]

    linear, conv = measures.gradient_surface(model, torch.randn(2, 100, 32), loss, size=10)
    assert (linear["layer"], linear["tokens"], linear["channels"]) == ("0", 100, 32)
    values = torch.tensor(linear["values"])
    assert values.shape == (10, 10)
    assert values[7, 4] == linear["largest"] == 9.0
    assert values.sum() == 9.0 + 99 * 0.5
    assert torch.tensor(conv["values"]).sum() == 9.0 + 99 * 0.5
    assert (conv["tokens"], conv["channels"]) == (32, 100)
    (whole,) = measures.gradient_surface(model, torch.randn(2, 100, 32), loss, layers=["1"], size=1000)
    assert torch.equal(torch.tensor(whole["values"]), g[0].T.abs())
    assert all(p.grad is None for p in model.parameters())


def test_a_flat_surface_is_drawn_and_a_line_refused() -> None:
    """All-zero g_y is real (a dead layer): no division by its maximum."""
    flat = {"layer": "fc1", "values": [[0.0] * 4] * 4}
    assert draw_surface(flat, "title").count("<svg") == 1
    with pytest.raises(ValueError, match="at least 2 × 2"):
        draw_surface(flat | {"values": [[0.0] * 4]}, "title")
