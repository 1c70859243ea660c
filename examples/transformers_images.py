"""Train a "vit" (classes) or a "segformer" (masks) from scratch with transformers' Trainer, on random images."""

import hotrain.train  # noqa: F401, I001 (first: torchvision may not fit PyTorch)
import sys
import tempfile

import torch
import transformers as hf

from hotrain.integrations.transformers import HadamardCallback


def vit() -> tuple[torch.nn.Module, torch.Tensor]:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.ViTConfig(image_size=64, patch_size=8, num_labels=5, **sizes)
    return hf.ViTForImageClassification(config), torch.randint(5, (8,))


def segformer() -> tuple[torch.nn.Module, torch.Tensor]:
    sizes = {"hidden_sizes": [32, 32, 64, 64], "depths": [1, 1, 1, 1], "decoder_hidden_size": 32}
    config = hf.SegformerConfig(num_attention_heads=[1, 1, 2, 2], num_labels=5, **sizes)
    return hf.SegformerForSemanticSegmentation(config), torch.randint(5, (8, 64, 64))


def main(folder: str, which: str = "vit") -> hf.Trainer:
    if which not in ("vit", "segformer"):
        raise ValueError(f"the model is {which!r}; accepted are vit and segformer")
    model, labels = (vit if which == "vit" else segformer)()
    examples = [{"pixel_values": x, "labels": y} for x, y in zip(torch.randn(8, 3, 64, 64), labels, strict=True)]
    arguments = hf.TrainingArguments(
        folder, max_steps=2, logging_steps=1, per_device_train_batch_size=4, report_to="none"
    )
    trainer = hf.Trainer(model, arguments, train_dataset=examples, callbacks=[HadamardCallback()])
    trainer.train()
    return trainer


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(__doc__ if "--help" in sys.argv else main(folder, *sys.argv[1:]).state.log_history[-1])
