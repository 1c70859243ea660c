"""A converted model with torchao's 8-bit AdamW: less memory for activations and for the optimizer's state."""

import hotrain.train  # noqa: I001 (first: torchvision may not fit PyTorch)
import timm
import torch
from torchao.optim import AdamW8bit


def main() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = timm.create_model("test_vit", num_classes=10, img_size=64, patch_size=8).to(device)
    hotrain.convert(model)
    optimizer = AdamW8bit(model.parameters(), lr=1e-3)  # it compiles its step at the first call
    for _ in range(2):
        images, labels = torch.randn(4, 3, 64, 64, device=device), torch.randint(10, (4,), device=device)
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {loss:.2f}")
    return model, optimizer


if __name__ == "__main__":
    main()
