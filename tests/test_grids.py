"""Token grids are read off models, and used only where they fit: a wrong grid would cut the wrong tiles silently."""

from __future__ import annotations

import math
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from zoo import ZOO, call

import hotrain
from hotrain.grids import grid_at, token_grids
from hotrain.transform.tokens import Grid


def grids_of(model: nn.Module) -> dict[str, Grid | None]:
    hotrain.convert(model)
    return {name: state.grid for name, _, state in hotrain.converted_layers(model)}


@pytest.mark.parametrize(
    ("name", "options", "want"),
    [
        ("test_vit", {}, Grid(10, 10, 1)),  # 160 px in patches of 16, a class token
        ("test_vit", {"class_token": False, "global_pool": "avg"}, Grid(10, 10, 0)),
        ("test_vit", {"reg_tokens": 4}, Grid(10, 10, 5)),
        ("deit_tiny_distilled_patch16_224", {"img_size": 64, "embed_dim": 48, "depth": 1}, Grid(4, 4, 2)),
        ("beit_base_patch16_224", {"img_size": 64, "embed_dim": 48, "depth": 1, "num_heads": 2}, Grid(4, 4, 1)),
    ],
)
def test_timm_vits(timm: ModuleType, name: str, options: dict[str, Any], want: Grid) -> None:
    """Every layer inside the blocks sees the one grid, prefix tokens counted."""
    grids = grids_of(timm.create_model(name, num_classes=10, **options))
    assert {grid for layer, grid in grids.items() if layer.startswith("blocks")} == {want}


def test_swin_sees_windows_in_attention_and_the_map_in_its_mlps(timm: ModuleType) -> None:
    model = ZOO["swin"].build()
    grids = grids_of(model)
    assert grids["layers.0.blocks.0.attn.qkv"] == Grid(7, 7)
    assert grids["layers.0.blocks.0.mlp.fc1"] == Grid(14, 14)
    assert grids["layers.1.blocks.0.mlp.fc2"] == Grid(7, 7)


def _hf(kind: str, **options: Any) -> nn.Module:
    import transformers

    sizes = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 96}
    config = getattr(transformers, f"{kind}Config")(image_size=32, patch_size=4, **sizes, **options)
    return getattr(transformers, f"{kind}Model")(config)


@pytest.mark.parametrize(
    ("kind", "options", "prefix"),
    [
        ("ViT", {}, 1),
        ("DeiT", {}, 2),  # class and distillation token
        ("Dinov2", {}, 1),
        ("Dinov2WithRegisters", {"num_register_tokens": 4}, 5),
        ("CLIPVision", {}, 1),
        ("SiglipVision", {}, 0),
    ],
)
def test_transformers_vits(kind: str, options: dict[str, Any], prefix: int) -> None:
    """The prefix is what the model embeds beside its patches; the grid fits the tokens that its layers really get."""
    model = _hf(kind, **options)
    grids = grids_of(model)
    inside = {name: grid for name, grid in grids.items() if "layer" in name}
    assert set(inside.values()) == {Grid(8, 8, prefix)}
    lengths = set()
    for name in inside:
        model.get_submodule(name).register_forward_pre_hook(lambda _, args: lengths.add(math.prod(args[0].shape[1:-1])))
    model(pixel_values=torch.randn(1, 3, 32, 32))
    assert 64 + prefix in lengths


def test_boxes_of_yolos_follow_the_patches() -> None:
    """The patches are where the model puts them: a layer's input, token by token, is that of the image's patches."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 96}
    config = transformers.YolosConfig(image_size=[32, 48], patch_size=8, num_detection_tokens=7, **sizes)
    model = transformers.YolosModel(config).eval()
    grids = grids_of(model)
    assert {grid for name, grid in grids.items() if "layer" in name} == {Grid(4, 6, 1, suffix=7)}
    images = [torch.zeros(1, 3, 32, 48) for _ in range(2)]
    images[1][..., 8:16, 16:24] = 1.0  # the patch of row 1 and column 2
    first, second = (model.embeddings(image) for image in images)
    assert first.shape[1] == Grid(4, 6, 1, suffix=7).tokens
    assert (first != second).any(-1).nonzero()[:, 1].tolist() == [1 + 6 * 1 + 2]


@pytest.mark.parametrize("name", ["bert", "gpt2", "resnet", "convnext"])
def test_models_without_a_token_grid_have_none(name: str) -> None:
    """Text is a line; convolutions and channels-last layers bring their own height and width."""
    assert token_grids(ZOO[name].build()) == {}


@pytest.mark.parametrize("name", ["vit", "swin", "hf_vit"])
def test_a_grid_found_is_a_grid_met(name: str) -> None:
    """Each layer's grid has the number of tokens of the input that it gets, or the input is its own grid."""
    entry = ZOO[name]
    model = entry.build()
    met: dict[str, bool] = {}
    hotrain.convert(model)
    for layer, module, state in hotrain.converted_layers(model):
        if isinstance(module, nn.Linear):

            def note(_: nn.Module, args: Any, layer: str = layer, grid: Grid | None = state.grid) -> None:
                x = args[0]
                met[layer] = x.dim() >= 4 or (grid is not None and grid.tokens == x.shape[-2])

            module.register_forward_pre_hook(note)
    call(model, entry.inputs())
    assert met
    assert all(met.values()), [layer for layer, fits in met.items() if not fits]


def test_the_innermost_module_counts() -> None:
    grids = {"": Grid(8, 8), "a.b": Grid(2, 2)}
    assert grid_at("a.b.c", grids) == Grid(2, 2)
    assert grid_at("a.c", grids) == Grid(8, 8)
    assert grid_at("a.bc", {"a.b": Grid(2, 2)}) is None


def test_a_grid_given_by_hand_goes_to_every_layer() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    hotrain.convert(model, grid=(8, 8), prefix_tokens=2)
    assert {s.grid for _, _, s in hotrain.converted_layers(model)} == {Grid(8, 8, 2)}
    tiled = Grid(4, 4, 1, dense_prefix=False)
    for options in ({"grid": Grid(4, 4, 1), "dense_prefix": False}, {"grid": tiled}):
        hotrain.convert(model, **options)
        assert {s.grid for _, _, s in hotrain.converted_layers(model)} == {tiled}


@pytest.mark.parametrize("compiles", [False, True])
def test_a_grid_that_fits_no_layer_is_said(compiles: bool) -> None:
    """The report names it; a grid that some layers' tokens have (heads have none) is not named."""
    if compiles:
        torch.compiler.reset()
    for grid, said in (((7, 7), True), ((8, 8), False)):
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        report = hotrain.convert(model, "hla", grid=grid)
        assert "grid" not in str(report), "nothing has run"
        call = torch.compile(model, backend="aot_eager") if compiles else model
        call(torch.randn(4, 64, 64)).sum().backward()
        assert ("grid 7×7: no input has 49 tokens" in str(report)) == said


def test_the_grid_changes_the_gradient_and_a_grid_that_does_not_fit_does_not() -> None:
    """On a 8×8 map that varies along its height only, square tiles keep all and lines of 16 lose: the grid is used."""
    height = torch.linspace(-1, 1, 8).repeat_interleave(8)
    x = (height[None, :, None] * torch.randn(1, 1, 64)).expand(2, 64, 64)
    exact = nn.Linear(64, 64)
    exact(x).square().sum().backward()
    grads = {}
    for grid in ((8, 8), (7, 7), None):
        layer = nn.Linear(64, 64)
        layer.load_state_dict(exact.state_dict())
        hotrain.convert(layer, "hla", grid=grid)
        layer(x).square().sum().backward()
        grads[grid] = layer.weight.grad
    assert torch.equal(grads[(7, 7)], grads[None])
    assert not torch.equal(grads[(8, 8)], grads[None])
    # rows constant along the width: within a 4×4 tile only the v rows of sequency 0..3 × h = 0 carry energy, and the
    # 8 kept rows hold all four but the highest; its share on a ramp of 4 steps is under a twentieth
    error = (grads[(8, 8)] - exact.weight.grad).norm() / exact.weight.grad.norm()
    assert error < 0.05


class Other(nn.Module):
    """Attributes of the names that timm, Swin and transformers use, of other kinds."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        for name, value in attributes.items():
            setattr(self, name, value)

    def get_classifier(self, task: str) -> nn.Module:
        return self.layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"window_size": 7, "relative_position_bias_table": nn.Embedding(169, 4)},
        {"window_size": 7, "relative_position_bias_table": torch.zeros(())},
        {"config": SimpleNamespace(image_size=32, patch_size=8, num_register_tokens="4")},
        {"patch_embed": "conv", "num_prefix_tokens": "1"},
    ],
    ids=["classifier with an argument", "table in a module", "table of one number", "registers", "patch embedding"],
)
def test_names_alone_say_nothing(attributes: dict[str, Any]) -> None:
    """They are of another model: no grid is read off, and nothing of theirs is called that raises."""
    assert set(grids_of(Other(**attributes)).values()) == {None}
