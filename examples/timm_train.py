"""The loop of timm's train.py and the two lines to add: its optimizers, schedulers and EMA work as before."""

import hotrain.train  # noqa: I001 (the first line: before timm, for a torchvision that does not fit PyTorch)
import timm
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, ModelEmaV3


def main(name: str = "test_vit", size: int = 160, batch: int = 4, epochs: int = 2, **model_args) -> float:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = timm.create_model(name, num_classes=10, **model_args).to(device)
    hotrain.convert(model)  # the second line: after the model is on its device, before it is compiled
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75)
    scheduler, epochs = create_scheduler_v2(optimizer, sched="cosine", num_epochs=epochs, warmup_epochs=0)
    ema = ModelEmaV3(model, decay=0.9)
    loss_fn, losses = LabelSmoothingCrossEntropy(0.1), AverageMeter()
    batches = [(torch.randn(batch, 3, size, size), torch.randint(10, (batch,))) for _ in range(2)]  # create_loader
    for epoch in range(epochs):
        model.train()
        for images, labels in batches:
            with torch.autocast(device, torch.bfloat16):
                loss = loss_fn(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(model)
            losses.update(loss.item(), batch)
        scheduler.step(epoch + 1)
    ema.eval()(images.to(device))
    return losses.avg


if __name__ == "__main__":
    print(main())
