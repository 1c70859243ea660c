"""A training loop with accelerate: convert, then prepare, which wraps the model for autocast and distributed runs."""

import hotrain.train  # noqa: I001 (first: torchvision may not fit PyTorch)
import timm
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def main(**options: object) -> tuple[torch.nn.Module, hotrain.ConversionReport]:
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, **options)
    data = TensorDataset(torch.randn(16, 3, 64, 64), torch.randint(10, (16,)))
    model = timm.create_model("test_vit", num_classes=10, img_size=64, patch_size=8).to(accelerator.device)
    report = hotrain.convert(model)  # before prepare
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    for images, labels in batches:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model), report


if __name__ == "__main__":
    trained, report = main()
    print(report)
