"""Dense prediction: SegFormer predicts a class for each pixel, YOLOS boxes; both of transformers, without download.

SegFormer: Xie et al., NeurIPS 2021, arXiv 2105.15203. YOLOS: Fang et al., NeurIPS 2021, arXiv 2106.00666.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotrain._version import require

MODELS = {"segformer_b0": "segmentation", "yolos_tiny": "detection"}
"""Names of models, and the task of each."""
METRICS = {"segmentation": "mean IoU", "detection": "AP at IoU 0.5"}
"""What a run's accuracy is, in percent, where it is not the share of images that are right."""


class Segmenter(nn.Module):
    """SegFormer, its stages called one by one: what transformers collects them with does not compile to one graph."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        if not hasattr(self.model.segformer, "stages"):
            raise ImportError("hotrain: segformer_b0 needs SegFormer's stages as transformers 5.17 has them; update it")

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes, H, W) of images (B, C, H, W)."""
        size, features = images.shape[-2:], []
        for stage in self.model.segformer.stages:
            images = stage(images)
            features.append(images)
        logits: Tensor = self.model.decode_head(features)  # of a quarter of the height and width
        return F.interpolate(logits, size=size, mode="bilinear", align_corners=False)


class Detector(nn.Module):
    """YOLOS: a ViT with a token for each box that it may predict."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        config, embeddings = model.config, model.vit.embeddings
        # transformers leaves them at zero, and tokens that are all equal would predict one box.
        for tokens in (embeddings.cls_token, embeddings.detection_tokens, embeddings.position_embeddings):
            nn.init.trunc_normal_(tokens, std=config.initializer_range)
        self.boxes: int = config.num_detection_tokens
        # As DETR starts: with transformers' smaller weights, meant to be replaced by others, boxes are learned slowly.
        for module in self.model.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
        # Positions that start apart: from small random ones a short run would first have to learn where patches are.
        rows, columns = (side // config.patch_size for side in config.image_size)
        with torch.no_grad():
            embeddings.position_embeddings[0, 1 : 1 + rows * columns] = positions(rows, columns, config.hidden_size)

    def forward(self, images: Tensor) -> Tensor:
        """Predictions (B, boxes, classes + 5) of images (B, C, H, W).

        The last class is *no object*; after the classes' logits come centre and size (x, y, w, h) from 0 to 1.
        """
        vit = self.model.vit
        tokens = vit.encoder(vit.embeddings(images), *images.shape[-2:]).last_hidden_state
        tokens = vit.layernorm(tokens)[:, -self.boxes :]
        logits, boxes = self.model.class_labels_classifier(tokens), self.model.bbox_predictor(tokens)
        return torch.cat((logits.float(), boxes.float().sigmoid()), -1)


def positions(rows: int, columns: int, width: int) -> Tensor:
    """Sines and cosines of the rows and columns of patches, (rows · columns, width); the width is divisible by 4."""
    frequency = 1 / 100 ** (torch.arange(width // 4, device="cpu") / (width // 4))
    places = torch.meshgrid(*(torch.arange(n, device="cpu") for n in (rows, columns)), indexing="ij")
    angles = [place.reshape(-1, 1) * frequency for place in places]
    return torch.cat([each(angle) for angle in angles for each in (torch.sin, torch.cos)], 1)


def create(name: str, *, classes: int, channels: int, image_size: int, args: dict[str, Any] | None = None) -> nn.Module:
    """Build one of `MODELS`: SegFormer-B0, or a YOLOS of DeiT-Ti's size with patches of 8 pixels and 15 boxes.

    Raises:
        ImportError: transformers is not installed, or too old.
    """
    require("transformers", "5", "text")
    from transformers import SegformerConfig, SegformerForSemanticSegmentation, YolosConfig, YolosForObjectDetection

    fixed: dict[str, Any] = {"num_channels": channels, "num_labels": classes}
    if MODELS[name] == "segmentation":
        return Segmenter(SegformerForSemanticSegmentation(SegformerConfig(**{**fixed, **(args or {})})))
    sizes = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 12, "num_attention_heads": 3}
    # With the class token 16 tokens before those of the patches: a whole tile.
    tokens = {"patch_size": 8, "num_detection_tokens": 15, "use_mid_position_embeddings": False}
    fixed |= {"image_size": (image_size, image_size)}
    return Detector(YolosForObjectDetection(YolosConfig(**{**sizes, **tokens, **fixed, **(args or {})})))
