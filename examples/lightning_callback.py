"""Train a LightningModule with Lightning's Trainer, and load its checkpoint into an exact one."""

import hotrain.train  # noqa: F401, I001 (first: torchvision may not fit PyTorch)
import lightning
import timm
import torch
from torch.utils.data import DataLoader, TensorDataset

from hotrain.integrations.lightning import HadamardCallback


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = timm.create_model("test_vit", num_classes=10, img_size=64, patch_size=8)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(folder: str, **options: object) -> tuple[Classifier, Classifier]:
    batches = DataLoader(TensorDataset(torch.randn(8, 3, 64, 64), torch.randint(10, (8,))), batch_size=4)
    trained = Classifier()
    callback = HadamardCallback()
    trainer = lightning.Trainer(max_steps=2, default_root_dir=folder, callbacks=[callback], **options)
    trainer.fit(trained, batches)
    print(callback.report)
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    return trained, Classifier.load_from_checkpoint(f"{folder}/last.ckpt")


if __name__ == "__main__":
    main("runs/lightning")
