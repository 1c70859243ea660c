"""Masks and boxes: scenes, SegFormer and YOLOS on them, their losses and metrics, folders as ADE20K's and COCO's."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from hotrain.train import TrainRun, build, load_data, replace, train
from hotrain.train.data import ArrayData
from hotrain.train.dense_folder import IGNORED, DenseFolder, read_item
from hotrain.train.detection import average_precision, judged, match, mean_average_precision, set_loss
from hotrain.train.distributed import Processes
from hotrain.train.evaluation import evaluate_dense, mask_accuracies
from hotrain.train.progress import silent
from hotrain.train.scenes import OBJECTS, SceneData, draws, scenes

pytestmark = pytest.mark.usefixtures("timm")

SMALL = {
    "segmentation": (
        "segformer_b0",
        {"depths": [1] * 4, "hidden_sizes": [32, 32, 64, 64], "num_attention_heads": [1, 1, 2, 2]}
        | {"decoder_hidden_size": 64, "drop_path_rate": 0.0, "classifier_dropout_prob": 0.0},
    ),
    "detection": (
        "yolos_tiny",
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": 4,
        },
    ),
}
TASKS = tuple(SMALL)


@pytest.fixture(scope="session")
def bright(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of 8 pixels that are bright or dark, with some noise: classes that a few updates tell apart."""
    random = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 256), ("test", 40)):
        y = np.arange(count) % 2
        level = np.where(y, 235, 0)[:, None, None, None]
        arrays[f"x_{split}"] = (level + random.integers(0, 20, (count, 8, 8, 3))).astype(np.uint8)
        arrays[f"y_{split}"] = y
    path = tmp_path_factory.mktemp("bright") / "bright.npz"
    np.savez(path, **arrays)
    return path


def run_on(data: Path, kind: str, out: Path, **fields: Any) -> TrainRun:
    model, args = SMALL[kind]
    common = {"task": kind, "data": str(data), "model": model, "model_args": args, "batch_size": 16, "lr": 2e-3}
    fixed = {"device": "cpu", "out_dir": str(out), "audit": False, "plan": "memory", "num_workers": 0}
    return TrainRun(**{**common, **fixed, **fields})


# ---- scenes ----


@pytest.fixture(scope="module")
def some(bright: Path) -> tuple[ArrayData, Tensor, Tensor, Tensor]:
    data = load_data(str(bright))
    assert isinstance(data, ArrayData)
    first, drawn = torch.arange(40), draws(40, 3, 7)
    picture, mask = scenes(data.x_train, data.y_train, first, drawn, 32, masks=True)
    _, boxes = scenes(data.x_train, data.y_train, first, drawn, 32, masks=False)
    return data, picture, mask, boxes


def test_pixels_masks_and_boxes_say_the_same(some: tuple[ArrayData, Tensor, Tensor, Tensor]) -> None:
    _, picture, mask, boxes = some
    assert picture.shape == (40, 3, 32, 32)
    assert boxes.shape == (40, OBJECTS, 5)
    assert sorted(mask.unique().tolist()) == [0, 1, 2]
    # Bright and dark images are those of their class in every channel; a background has these colours too, elsewhere.
    assert (picture.amin(1)[mask == 2] >= 235).all()
    assert (picture.amax(1)[mask == 1] < 20).all()
    for scene, objects in zip(mask, boxes, strict=True):
        corner = 32 * (objects[:, 1:3] - objects[:, 3:] / 2)
        for (label, *_, width, height), (left, top) in zip(objects.tolist(), corner.tolist(), strict=True):
            side = round(32 * width)
            assert (width, 6 <= side <= 12) == (height, True)
            assert left == pytest.approx(round(left), abs=1e-5)
            assert 0 <= left <= 32 - side
            assert 0 <= top <= 32 - side
            part = scene[round(top) : round(top) + side, round(left) : round(left) + side]
            if label >= 0:
                assert (part == 1 + label).double().mean() > 0.5, "more than half of it is seen"
    count = (boxes[..., 0] >= 0).sum(1)
    assert sorted(count.unique().tolist()) == [1, 2, 3, 4]
    # What has no box is a small part of a hidden image, or was never there.
    union = torch.zeros_like(mask, dtype=torch.bool)
    for scene, objects in zip(union, boxes, strict=True):
        for label, x, y, width, height in objects.tolist():
            if label >= 0:
                left, top = round(32 * (x - width / 2)), round(32 * (y - height / 2))
                scene[top : top + round(32 * height), left : left + round(32 * width)] = True
    assert (union & (mask == 0)).sum() == 0


def test_a_scene_has_the_image_of_its_index_and_is_a_function_of_its_numbers(
    some: tuple[ArrayData, Tensor, Tensor, Tensor],
) -> None:
    data, picture, mask, _ = some
    drawn = draws(40, 3, 7)
    again, _ = scenes(data.x_train, data.y_train, torch.tensor([3]), drawn[3:4], 32, masks=True)
    assert torch.equal(again[0], picture[3])
    alone = drawn[:, 0] < 1 / OBJECTS
    assert alone.any()
    for i in alone.nonzero().flatten().tolist():
        assert mask[i].unique().tolist() == [0, 1 + int(data.y_train[i])]


def test_test_scenes_are_the_same_for_every_seed_and_batch_and_of_test_images(bright: Path, tmp_path: Path) -> None:
    run = run_on(bright, "segmentation", tmp_path, method="exact")
    first = build(run)
    assert isinstance(first.data, SceneData)
    assert first.data.classes == ("background", "0", "1")
    assert (first.data.image_size, first.example()[0].shape) == (32, (16, 3, 32, 32))
    other = build(replace(run, seed=1, eval_batch_size=7))
    joined = [torch.cat([x for x, _ in setup.feed.test_batches()]) for setup in (first, other)]
    assert len(joined[0]) == 40
    assert torch.equal(*joined)
    assert not torch.equal(first.example()[0], other.example()[0])
    one, two = (next(first.feed.updates(epoch))[0][0] for epoch in (0, 1))
    assert not torch.equal(one, two), "an epoch has scenes of its own"
    assert torch.equal(one, first.example()[0])
    dark = replace(run, data=str(tmp_path / "dark.npz"))
    arrays = dict(np.load(bright))
    arrays["x_test"] = np.zeros_like(arrays["x_test"])
    np.savez(dark.data, **arrays)
    setup = build(dark)
    image, target = next(setup.feed.test_batches())
    assert len(image[:, :, :, :].permute(0, 2, 3, 1)[target > 0].unique(dim=0)) == 1, "test images alone, all black"


# ---- losses and metrics ----


def boxes_of(*rows: tuple[float, ...]) -> Tensor:
    return torch.tensor([rows])


def predictions(*rows: tuple[float, int, tuple[float, ...]], classes: int = 2) -> Tensor:
    """(score, label, box): logits whose softmax gives the label this score."""
    made = []
    for score, label, box in rows:
        logits = torch.full((classes + 1,), (1 - score) / classes).log()
        logits[label] = float(np.log(score))
        made.append(torch.cat((logits, torch.tensor(box))))
    return torch.stack(made)[None]


HERE, THERE = (0.25, 0.25, 0.2, 0.2), (0.75, 0.75, 0.2, 0.2)


def test_a_prediction_hits_the_free_object_of_its_class() -> None:
    near = (0.29, 0.25, 0.2, 0.2)  # IoU 0.16 / 0.24 = 2/3 with HERE
    far = (0.35, 0.25, 0.2, 0.2)  # IoU 0.1 / 0.3 = 1/3
    objects = boxes_of((0, *HERE), (1, *THERE), (-1, *HERE))
    made = predictions((0.6, 0, HERE), (0.9, 0, near), (0.8, 1, HERE), (0.7, 1, THERE), (0.5, 0, far))
    scores, labels, hits = judged(made, objects)
    torch.testing.assert_close(scores, torch.tensor([[0.9, 0.8, 0.7, 0.6, 0.5]]))
    assert labels.tolist() == [[0, 1, 1, 0, 0]]
    # The exact box comes second to its object and is one too many; of class 1 the first is at the other object.
    assert hits.tolist() == [[True, False, True, False, False]]


def test_average_precision_by_hand() -> None:
    """Hits at ranks 1, 3 and 4 of five, for four objects: precisions 1, 2/3, 3/4, of which the second becomes 3/4."""
    scores = torch.tensor([0.5, 0.9, 0.8, 0.7, 0.6])
    hits = torch.tensor([False, True, False, True, True])
    assert average_precision(scores, hits, 4) == pytest.approx((1 + 3 / 4 + 3 / 4) / 4)
    assert average_precision(scores, ~hits, 2) == pytest.approx((1 / 2 + 2 / 5) / 2)
    assert average_precision(scores[:0], hits[:0], 4) == 0
    labels = torch.tensor([1, 0, 0, 0, 0])
    mean = mean_average_precision(scores, labels, hits, torch.tensor([4, 0]))
    assert mean == pytest.approx((1 + 3 / 4 + 3 / 4) / 4), "a class without an object does not count"
    assert mean_average_precision(scores, labels, hits, torch.tensor([4, 2])) == pytest.approx(mean / 2)


def test_intersection_over_union_by_hand() -> None:
    """Class 0: 6 right, 2 missed, 1 too many; class 1: 1 right, 1 missed, 2 too many; class 2 does not occur."""
    table = torch.tensor([[6.0, 2, 0], [1, 1, 0], [0, 0, 0]])
    found = mask_accuracies(table)
    assert found["accuracy"] == pytest.approx(100 * (6 / 9 + 1 / 4) / 2)
    assert found["pixel_accuracy"] == pytest.approx(70)


def random_predictions(images: int, queries: int, objects: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = torch.cat(
        (torch.randn(images, queries, 4, generator=generator), torch.rand(images, queries, 4, generator=generator)), -1
    )
    wanted = torch.rand(images, objects, 5, generator=generator)
    wanted[..., 0] = torch.randint(3, (images, objects), generator=generator)
    return made, wanted


def test_objects_are_matched_at_the_least_cost() -> None:
    """Against every assignment of three objects to five predictions, one object left out in one image."""
    made, wanted = random_predictions(4, 5, 3)
    wanted[1, 1, 0] = -1
    found = match(made, wanted)
    assert found[1, 1] == -1

    def cost(image: int, chosen: tuple[int, ...], real: list[int]) -> float:
        total = 0.0
        for k, q in zip(real, chosen, strict=True):
            one = match_cost(made[image, q], wanted[image, k])
            total += one
        return total

    for image in range(4):
        real = [k for k in range(3) if wanted[image, k, 0] >= 0]
        every = {chosen: cost(image, chosen, real) for chosen in itertools.permutations(range(5), len(real))}
        mine = tuple(int(found[image, k]) for k in real)
        assert every[mine] == pytest.approx(min(every.values()))


def match_cost(predicted: Tensor, wanted: Tensor) -> float:
    """DETR's cost of one pair, written anew with scalars."""
    x, y, w, h = predicted[-4:].tolist()
    label, u, v, a, b = wanted.tolist()
    wide = max(0.0, min(x + w / 2, u + a / 2) - max(x - w / 2, u - a / 2))
    high = max(0.0, min(y + h / 2, v + b / 2) - max(y - h / 2, v - b / 2))
    union = w * h + a * b - wide * high
    around = (max(x + w / 2, u + a / 2) - min(x - w / 2, u - a / 2)) * (
        max(y + h / 2, v + b / 2) - min(y - h / 2, v - b / 2)
    )
    giou = wide * high / union - (around - union) / around
    chance = float(predicted[:-4].softmax(0)[int(label)])
    return 5 * (abs(x - u) + abs(y - v) + abs(w - a) + abs(h - b)) - 2 * giou - chance


def test_the_loss_is_that_of_transformers() -> None:
    """Its YOLOS loss, and its gradient, with objects left out in some images and one image without any."""
    from transformers import YolosConfig
    from transformers.loss.loss_for_object_detection import ForObjectDetectionLoss

    made, wanted = random_predictions(5, 6, 4, seed=1)
    wanted[0, 2:, 0] = -1
    wanted[3, :, 0] = -1
    there = wanted[..., 0] >= 0
    labels = [
        {"class_labels": each[real][:, 0].long(), "boxes": each[real][:, 1:]}
        for each, real in zip(wanted, there, strict=True)
    ]
    mine, theirs = made.clone().requires_grad_(), made.clone().requires_grad_()
    loss = set_loss(mine, wanted)
    other, *_ = ForObjectDetectionLoss(
        theirs[..., :-4], labels, torch.device("cpu"), theirs[..., -4:], YolosConfig(num_labels=3)
    )
    torch.testing.assert_close(loss, other)
    torch.testing.assert_close(*(torch.autograd.grad(each, x)[0] for each, x in ((loss, mine), (other, theirs))))


def test_more_objects_than_predictions_and_predictions_that_are_not_finite() -> None:
    made, wanted = random_predictions(2, 2, 3)
    assert (match(made, wanted) >= 0).sum(1).tolist() == [2, 2]
    assert set_loss(made, wanted).isfinite()
    made[0, 0] = torch.nan
    assert set_loss(made, wanted).isnan(), "the trainer says that the run diverged"


@pytest.mark.parametrize("task", TASKS)
def test_perfect_predictions_are_at_100_percent(task: str, bright: Path, tmp_path: Path) -> None:
    setup = build(run_on(bright, task, tmp_path, method="exact", eval_batch_size=16))
    targets = iter([target for _, target in setup.feed.test_batches()])

    class Oracle(torch.nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            target = next(targets)
            if task == "segmentation":
                return 9.0 * torch.nn.functional.one_hot(target, 3).permute(0, 3, 1, 2)
            labels = target[..., 0].long()
            logits = torch.nn.functional.one_hot(labels.where(labels >= 0, 2), 3)
            return torch.cat((9.0 * logits, target[..., 1:]), -1)

    row = evaluate_dense(Oracle(), setup, Processes())
    assert row["accuracy"] == pytest.approx(100)
    assert row["test_loss"] < 0.01
    assert row.get("pixel_accuracy", 100) == pytest.approx(100)


# ---- models ----


def test_the_detector_is_that_of_transformers(bright: Path, tmp_path: Path) -> None:
    """With a grid that `hotrain.grids` finds, and boxes that start apart."""
    from hotrain.grids import grid_at, token_grids

    setup = build(run_on(bright, "detection", tmp_path, method="exact"))
    model, (x, _) = setup.model.eval(), setup.example()
    with torch.no_grad():
        got, want = model(x), model.model(x)  # type: ignore[operator]
    torch.testing.assert_close(got, torch.cat((want.logits, want.pred_boxes), -1), rtol=1e-4, atol=1e-5)
    grid = grid_at("model.vit.encoder.layer.0.attention", token_grids(model))
    assert grid is not None
    assert (grid.height, grid.width, grid.prefix, grid.suffix) == (8, 8, 1, 15)
    assert len(got[0].unique(dim=0)) == 15, "tokens that start equal would predict one box"


def test_the_segmenter_is_that_of_transformers(bright: Path, tmp_path: Path) -> None:
    setup = build(run_on(bright, "segmentation", tmp_path, method="exact"))
    model, (x, _) = setup.model.eval(), setup.example()
    with torch.no_grad():
        want = model.model(x).logits  # type: ignore[operator]
        assert want.shape == (16, 3, 8, 8)
        want = torch.nn.functional.interpolate(want, size=(32, 32), mode="bilinear", align_corners=False)
        torch.testing.assert_close(model(x), want)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_one_graph_with_the_same_loss(task: str, bright: Path, tmp_path: Path) -> None:
    """Compiled without a break, converted; the loss is the eager one's to float32's rounding."""
    setup = build(run_on(bright, task, tmp_path, method="hq8", batch_size=4))
    x, target = setup.example()
    torch._dynamo.reset()
    compiled = torch.compile(setup.model.train(), backend="aot_eager", fullgraph=True)
    loss = setup.loss(compiled(x), target)
    loss.backward()
    torch.testing.assert_close(loss.detach(), setup.loss(setup.model(x), target).detach(), rtol=1e-4, atol=1e-5)
    gradients = [p.grad for p in setup.model.parameters() if p.requires_grad]
    assert all(g is not None and g.isfinite().all() for g in gradients)


# ---- training ----


@pytest.mark.slow
@pytest.mark.parametrize(("task", "method"), [("segmentation", "hq8"), ("detection", "hq8")])
def test_it_learns(task: str, method: str, bright: Path, tmp_path: Path) -> None:
    """Masks twice as good as background everywhere; boxes, which learn slower, at three quarters of the first loss."""
    epochs, lr = (8, 2e-3) if task == "segmentation" else (12, 1e-3)
    fields = {"epochs": epochs, "lr": lr, "clip": 1.0, "warmup_epochs": 1, "evaluate_every": epochs}
    run = run_on(bright, task, tmp_path, method=method, **fields)
    setup = build(run)
    untrained = evaluate_dense(setup.model, setup, Processes())
    background = torch.cat([target for _, target in setup.feed.test_batches()]) == 0
    result = train(run, on_progress=silent)
    last = result.history[-1]
    if task == "segmentation":
        assert last["accuracy"] > 2 * 100 * float(background.double().mean()) / 3  # its IoU, and none of two classes
    else:
        assert untrained["accuracy"] < 1 < last["accuracy"]
        assert last["test_loss"] < 0.75 * untrained["test_loss"]
    if method != "exact":
        assert result.layers is not None
        assert sum(group["layers"] for group in result.layers if group["method"] == method) >= 8


@pytest.mark.parametrize("task", TASKS)
def test_a_resumed_run_is_the_uninterrupted_one(task: str, bright: Path, tmp_path: Path) -> None:
    run = run_on(bright, task, tmp_path / "whole", method="hot-unbiased", steps=4)
    whole = train(run, on_progress=silent)
    part = train(replace(run, out_dir=str(tmp_path / "part")), stop_after=2, on_progress=silent)
    rest = train(None, resume=part.checkpoint_path, on_progress=silent)
    weights = [torch.load(r.checkpoint_path, weights_only=True)["model"] for r in (whole, rest)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert whole.history[-1]["accuracy"] == rest.history[-1]["accuracy"]


def test_scales_are_calibrated_with_the_loss_of_boxes(bright: Path, tmp_path: Path) -> None:
    result = train(
        run_on(bright, "detection", tmp_path, method="hot", calibrate_batches=1, steps=1), on_progress=silent
    )
    assert result.layers


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model": "demo_vit", "model_args": {}},
            "demo_vit. is not for task='segmentation'; accepted are segformer_b0",
        ),
        ({"task": "detection"}, "segformer_b0. is not for task='detection'"),
        ({"task": "classification"}, "segformer_b0. is not for task='classification'"),
        ({"data": "folder"}, "or a folder with annotations/, not one of classes"),
    ],
)
def test_what_does_not_fit(fields: dict[str, Any], message: str, bright: Path, folder: Path, tmp_path: Path) -> None:
    fields = {**fields, **({"data": str(folder)} if "data" in fields else {})}
    with pytest.raises(ValueError, match=message):
        build(replace(run_on(bright, "segmentation", tmp_path), **fields))


def test_fields_that_are_not_for_masks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mixup: it is not for task='segmentation'"):
        run_on(tmp_path, "segmentation", tmp_path, mixup=0.2)


# ---- folders ----


@pytest.fixture
def ade(tmp_path: Path) -> Path:
    """Six training and two test images of 40×24 pixels: left half class 1, right half class 2, a column of neither."""
    root = tmp_path / "ade"
    for split, count in (("training", 6), ("validation", 2)):
        for kind in ("images", "annotations"):
            (root / kind / split).mkdir(parents=True)
        for i in range(count):
            pixels = np.zeros((24, 40, 3), np.uint8)
            pixels[:, 20:] = 200
            mask = np.ones((24, 40), np.uint8)
            mask[:, 20:] = 2
            mask[:, :5] = 0
            Image.fromarray(pixels).save(root / "images" / split / f"{i}.jpg")
            Image.fromarray(mask).save(root / "annotations" / split / f"{i}.png")
    return root


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    """Four training and two test images of 40×20 pixels; of the first two objects, a crowd and an empty box."""
    root = tmp_path / "coco"
    (root / "annotations").mkdir(parents=True)
    for split, count in (("train2017", 4), ("val2017", 2)):
        (root / split).mkdir()
        images = [{"id": 10 + i, "file_name": f"{i}.png"} for i in range(count)]
        boxes = [{"image_id": 10 + i, "category_id": 7 if i % 2 else 3, "bbox": [4, 2, 10, 5]} for i in range(count)]
        boxes += [
            {"image_id": 10, "category_id": 7, "bbox": [20, 10, 20, 10], "iscrowd": 0},
            {"image_id": 10, "category_id": 7, "bbox": [0, 0, 40, 20], "iscrowd": 1},
            {"image_id": 10, "category_id": 7, "bbox": [0, 0, 0, 20]},
        ]
        categories = [{"id": 7, "name": "dog"}, {"id": 3, "name": "cat"}]
        table = {"images": images, "annotations": boxes, "categories": categories}
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(table))
        for i in range(count):
            Image.fromarray(np.full((20, 40, 3), 40 * i, np.uint8)).save(root / split / f"{i}.png")
    return root


def test_a_folder_as_ade20ks(ade: Path, tmp_path: Path) -> None:
    data = load_data(str(ade))
    assert isinstance(data, DenseFolder)
    assert (data.train_size, data.test_size, data.classes) == (6, 2, ("1", "2"))
    found = read_item(data.train[0], data, 8, False)
    assert found is not None
    image, mask = found
    assert mask[0].tolist() == [IGNORED, 0, 0, 0, 1, 1, 1, 1]
    assert (image.shape, float(image[0, 0, 0])) == ((3, 8, 8), pytest.approx(0, abs=9))
    turned = read_item(data.train[0], data, 8, True)
    assert turned is not None
    assert torch.equal(turned[0], image.flip(-1))
    assert torch.equal(turned[1], mask.flip(-1))
    (ade / "objectInfo150.txt").write_text(
        "Idx\tRatio\tTrain\tVal\tStuff\tName\n1\t0.1\t1\t1\t1\twall, side\n2\t0\t0\t0\t0\tsky\n"
    )
    assert load_data(str(ade)).classes == ("wall", "sky")
    run = run_on(ade, "segmentation", tmp_path / "runs", image_size=32, batch_size=2, steps=3, method="hq8")
    result = train(run, on_progress=silent)
    assert {"accuracy", "pixel_accuracy"} <= result.history[-1].keys()


def test_a_folder_as_cocos(coco: Path, tmp_path: Path) -> None:
    data = load_data(str(coco))
    assert isinstance(data, DenseFolder)
    assert (data.train_size, data.test_size, data.classes, data.objects) == (4, 2, ("cat", "dog"), 2)
    found, turned = (read_item(data.train[0], data, 8, mirror) for mirror in (False, True))
    assert found is not None
    assert turned is not None
    want = torch.tensor([[0, 9 / 40, 4.5 / 20, 10 / 40, 5 / 20], [1, 30 / 40, 15 / 20, 0.5, 0.5]])
    torch.testing.assert_close(found[1], want)
    torch.testing.assert_close(turned[1][:, 1], 1 - want[:, 1])
    alone = read_item(data.train[1], data, 8, False)
    assert alone is not None
    assert alone[1][:, 0].tolist() == [1, -1]
    run = run_on(coco, "detection", tmp_path / "runs", image_size=32, batch_size=2, steps=3, method="hq8")
    assert train(run, on_progress=silent).accuracy is not None


def _spoil_ade(root: Path, how: str) -> None:
    mask = root / "annotations" / "training" / "0.png"
    if how == "mask":
        mask.unlink()
    elif how == "size":
        Image.fromarray(np.ones((24, 39), np.uint8)).save(mask)
    elif how == "colours":
        Image.fromarray(np.ones((24, 40, 3), np.uint8)).save(mask)
    elif how == "class":
        (root / "objectInfo150.txt").write_text("Name\nwall\n")
    elif how == "damaged":
        mask.write_bytes(b"no image")
    else:
        (root / "images" / "validation").rename(root / "images" / "val")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("mask", r"0\.jpg has no mask .*0\.png"),
        ("size", r"0\.png has \(39, 24\) pixels, its image \(40, 24\)"),
        ("colours", "got RGB, accepted are masks with one number at each pixel"),
        ("class", "has class 2, accepted are 0 to 1, and 255"),
        ("damaged", r"0\.png cannot be decoded"),
        ("folder", "images/validation is missing"),
    ],
)
def test_masks_that_are_not_as_they_should(how: str, message: str, ade: Path, tmp_path: Path) -> None:
    _spoil_ade(ade, how)
    run = run_on(ade, "segmentation", tmp_path / "runs", image_size=32, batch_size=6, steps=1)
    with pytest.raises(ValueError, match=message):
        train(run, on_progress=silent)


def test_lists_that_are_not_as_cocos(coco: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the data .* are for detection"):
        build(run_on(coco, "segmentation", tmp_path))
    file = coco / "annotations" / "instances_val2017.json"
    table = json.loads(file.read_text())
    table["annotations"][0]["category_id"] = 4
    file.write_text(json.dumps(table))
    with pytest.raises(ValueError, match=r"instances_val2017\.json is not as COCO's \(KeyError: 4\)"):
        load_data(str(coco))
    file.unlink()
    with pytest.raises(ValueError, match=r"has 0 files instances_val\*\.json, accepted is one"):
        load_data(str(coco))
