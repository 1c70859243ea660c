"""Models by name, optimizers by name, and what is said when either does not fit."""

from typing import Any

import pytest
import torch

from hotrain.train import TrainRun
from hotrain.train.models import SMALL, create_model, default_image_size, normalization, resolve_device
from hotrain.train.optimization import create_optimizer


@pytest.mark.parametrize("name", SMALL)
def test_small_models_run_at_their_size(name: str) -> None:
    size = default_image_size(name, 999)
    model = create_model(name, classes=7, channels=1, image_size=size)
    assert model(torch.zeros(2, 1, size, size)).shape == (2, 7)


def test_a_small_resnet_keeps_the_resolution_in_its_stem() -> None:
    model = create_model("small_resnet18", classes=10, channels=3, image_size=32)
    assert (model.conv1.stride, model.conv1.kernel_size) == ((1, 1), (3, 3))  # type: ignore[union-attr]
    assert model.maxpool(model.conv1(torch.zeros(1, 3, 32, 32))).shape[-2:] == (32, 32)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "size"),
    [("test_vit", 64), ("test_resnet", 40), ("test_efficientnet", 40), ("test_convnext", 64)],  # timm's own miniatures
)
def test_timm_models_at_another_size(name: str, size: int) -> None:
    model = create_model(name, classes=3, channels=3, image_size=size, args={"drop_path_rate": 0.1})
    assert model(torch.zeros(2, 3, size, size)).shape == (2, 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "vit_bas_patch16_224"}, "unknown name 'vit_bas_patch16_224'.*did you mean vit_base_patch16_224"),
        # what begins so, before what is like it
        ({"name": "vit_basse"}, "unknown name .vit_basse.*did you mean vit_base_"),  # most of the name is missing
        ({"name": "vit_bas"}, "unknown name .vit_bas.*did you mean vit_base_"),
        ({"name": "small_vit", "pretrained": True}, "has no published weights"),
        (
            {"name": "vit_tiny_patch16_224", "image_size": 8, "args": {"depth": 1}},
            "cuts images into patches of 16 pixels, the images have 8; enlarge them with image_size=224",
        ),
        ({"name": "test_vit", "args": {"colour": 1}}, "cannot be built with .*colour"),
        ({"name": "test_vit", "args": {"embed_dim": 63, "num_heads": 2}}, "cannot be built"),
    ],
)
def test_models_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_model(**{"classes": 2, "channels": 3, "image_size": 64, **fields})


def test_unreachable_weights_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    def offline(*args: object, **kwargs: object) -> None:
        raise OSError("We couldn't connect to the hub\nlong explanation")

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(RuntimeError, match=r"neither cached nor reachable \(We couldn't connect to the hub\)"):
        create_model("resnet18", classes=2, channels=3, image_size=64, pretrained=True)


def test_pretrained_weights_get_the_pixels_they_know() -> None:
    model = create_model("test_vit", classes=2, channels=3, image_size=64)
    assert normalization(model, True, 3) == (model.pretrained_cfg["mean"], model.pretrained_cfg["std"])  # type: ignore[index]
    assert normalization(model, False, 3) is None
    assert normalization(model, True, 1) is None


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device("cpu").type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_device("auto").type == "cuda"
    with pytest.raises(ValueError, match="device: got 'cuda:3', there are 1 CUDA devices"):
        resolve_device("cuda:3")


def test_biases_and_norms_do_not_decay() -> None:
    model = create_model("demo_vit", classes=10, channels=1, image_size=16)
    optimizer = create_optimizer(TrainRun(weight_decay=0.1), model)
    for group in optimizer.param_groups:
        assert all((p.ndim > 1) == (group["weight_decay"] == 0.1) for p in group["params"] if p is not model.pos_embed)


def test_an_unknown_optimizer_and_a_frozen_model() -> None:
    model = create_model("demo_vit", classes=10, channels=1, image_size=16)
    for name, hint in (
        ("adamm", r"; did you mean 'adam\w*'\?$"),
        ("bogus", ", such as adamw, momentum, sgd, lamb and lion$"),
    ):
        with pytest.raises(
            ValueError, match=rf"optimizer: got '{name}', accepted are the \d+ names of timm.*{hint}"
        ) as e:
            create_optimizer(TrainRun(optimizer=name), model)
        assert len(str(e.value)) < 160
    with pytest.raises(ValueError, match="no trainable parameter"):
        create_optimizer(TrainRun(), model.requires_grad_(False))
