"""Every recipe builds a valid run for a model that timm has; their number is part of the contract."""

from collections import Counter

import hotrain_recipes
import pytest
import timm
from hotrain_recipes.registry import recipe

from hotrain.train import TrainRun, dense, language
from hotrain.train.models import SMALL, create_model

RECIPES = hotrain_recipes.all()


def test_the_count_by_family() -> None:
    # A recipe that is lost by an edit of the table is missed here.
    assert Counter(r.family for r in RECIPES.values()) == {
        "32 px from scratch": 4,
        "DeiT from scratch": 6,
        "EfficientFormer fine-tuned": 6,
        "EfficientFormer from scratch": 15,
        "EfficientNetV2 fine-tuned": 5,
        "ResNet from scratch": 15,
        "ViT fine-tuned": 8,
        "ViT from scratch": 6,
        "ViT with LoRA": 4,
        "demo": 2,
        "studies, from scratch": 10,
        "studies, scenes": 2,
        "studies, texts": 2,
        "studies, without labels": 4,
    }
    assert len(RECIPES) == 89


@pytest.mark.parametrize("name", RECIPES)
def test_it_builds(name: str) -> None:
    entry = RECIPES[name]
    run = entry.run()
    assert isinstance(run, TrainRun)
    assert run.name == name
    assert run == hotrain_recipes.load_recipe(name)
    assert run.model in (*SMALL, *language.MODELS, *dense.MODELS) or timm.is_model(run.model)
    if run.pretrained:
        assert timm.models.is_model_pretrained(run.model)
    assert "{" not in entry.description
    assert entry.description.endswith(".")
    assert "Command: ``" in entry.document
    if entry.family != "demo":
        assert "Source: " in entry.document
        assert "easured" in entry.document


def test_every_command_in_a_docstring_names_a_recipe() -> None:
    for entry in RECIPES.values():
        command = entry.document.split("Command: ``")[1].split("``")[0]
        assert command.split(" train ")[1].split()[0] in RECIPES


def test_variants_replace_fields() -> None:
    run = hotrain_recipes.load_recipe("small_vit_cifar10", epochs=3, method="hot")
    assert (run.epochs, run.method, run.name) == (3, "hot", "small_vit_cifar10")
    with pytest.raises(ValueError, match="did you mean 'epochs'"):
        hotrain_recipes.load_recipe("small_vit_cifar10", epoch=3)
    with pytest.raises(ValueError, match="unknown recipe 'resnet18_cifar1'; did you mean resnet18_cifar10"):
        hotrain_recipes.load_recipe("resnet18_cifar1")


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match=r"'demo_vit' exists already, in hotrain_recipes\.demo"):
        recipe("demo_vit", "demo")(lambda: TrainRun())


def test_the_small_vit_is_that_of_the_accuracy_study() -> None:
    """Width 256, 7 blocks, 64 tokens of 4×4 pixels, no class token."""
    model = create_model("small_vit", classes=10, channels=3, image_size=32)
    assert (model.embed_dim, len(model.blocks), model.patch_embed.num_patches) == (256, 7, 64)  # type: ignore[arg-type,union-attr]
    assert model.num_prefix_tokens == 0
