"""Token grids (height, width, prefix tokens) of vision transformers, read from attributes of their modules.

A grid is used only for inputs that have its number of tokens; for others the tokens are a 1-D sequence.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from .transform.tokens import Grid


def token_grids(model: nn.Module) -> dict[str, Grid]:
    """The token grids of a model.

    Supports timm's ViT and DeiT (`patch_embed.grid_size`, class, distillation and register tokens), Swin (window
    attention and blocks at their resolution), EfficientFormer's attention (`resolution`), and transformers' ViT
    family (`config.image_size`, `config.patch_size`) with YOLOS, whose tokens of boxes follow the patches.

    Args:
        model: any model.

    Returns:
        Module name → the grid of the tokens that the modules below it get; the innermost one counts (`grid_at`).
    """
    found: dict[str, Grid] = {}
    for name, module in model.named_modules():
        grid = _grid_of(module)
        if grid is not None:
            found[name] = grid
    return found


def grid_at(name: str, grids: dict[str, Grid]) -> Grid | None:
    """The grid of the innermost module of `grids` that holds the module `name`."""
    while True:
        if name in grids:
            return grids[name]
        if not name:
            return None
        name = name.rpartition(".")[0]


def _grid_of(module: nn.Module) -> Grid | None:
    # timm's VisionTransformer and similar
    embed = getattr(module, "patch_embed", None)
    size = _pair(getattr(embed, "grid_size", None))
    if size is not None and isinstance(embed, nn.Module) and not hasattr(module, "layers"):
        prefix = getattr(module, "num_prefix_tokens", None)
        if not isinstance(prefix, int):
            prefix = int(getattr(module, "cls_token", None) is not None)
        return Grid(*size, prefix)
    # Swin: windows inside attention, the whole map inside the block's MLP
    window = _pair(getattr(module, "window_size", None))
    table = getattr(module, "relative_position_bias_table", None)
    rows = len(table) if isinstance(table, Tensor) and table.dim() else 0
    if window is not None and rows == (2 * window[0] - 1) * (2 * window[1] - 1):
        return Grid(*window)  # BEiT's table has three more entries, for its class token
    resolution = _pair(getattr(module, "input_resolution", None))
    if resolution is not None:
        return Grid(*resolution)
    # transformers' ViT, DeiT, BEiT, DINOv2 …
    config = getattr(module, "config", None)
    image, patch = _pair(getattr(config, "image_size", None)), _pair(getattr(config, "patch_size", None))
    if image is not None and patch is not None and all(patch):
        grid = (image[0] // patch[0], image[1] // patch[1])
        given = (getattr(config, f"num_{kind}_tokens", 0) for kind in ("register", "detection"))
        registers, boxes = (number if isinstance(number, int) else 0 for number in given)
        prefix = _position_tokens(module) + registers - boxes - math.prod(grid)
        # Modules further in have the config too but embed no positions; theirs is the grid around them.
        return Grid(*grid, prefix, suffix=boxes) if prefix >= 0 else None
    return None


def _position_tokens(module: nn.Module) -> int:
    """How many positions a transformers ViT or CLIP embeds (patches and prefix tokens), 0 if unknown."""
    for name, parameter in module.named_parameters():
        if name.endswith("position_embeddings") and parameter.dim() == 3:
            return parameter.shape[1]
        if name.endswith("position_embedding.weight"):
            return parameter.shape[0]
    return 0


def _pair(value: object) -> tuple[int, int] | None:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value, value
    if isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(v, int) and v > 0 for v in value):
        return value[0], value[1]
    return None
