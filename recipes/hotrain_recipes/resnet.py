"""ResNet-18, -34 and -50 from scratch, as the HOT paper pre-trains them."""

from hotrain.presets import DEFAULT
from hotrain.train.run import TrainRun
from hotrain_recipes.registry import CIFAR, FOLDERS, recipe


@recipe(
    "{model}_{data}",
    "ResNet from scratch",
    model=("resnet18", "resnet34", "resnet50"),
    data=(*CIFAR, *FOLDERS),
)
def resnet(model: str, data: str) -> TrainRun:
    """{model} from scratch on {data} at 224 pixels.

    Command: ``hotrain train resnet18_cifar100``

    Source: HOT supplement: SGD, rate 0.1, multi-step, 200 epochs, batch 128, int8 gradients for the first 25
    epochs; crop, flip and resize of CIFAR to 224 as in its code. The supplement states neither milestones nor
    weight decay: halves and three quarters, 1e-4, are the usual ones.
    The paper's accuracies for ResNet-18 with HOT: 94.77 (CIFAR-10), 75.53 (CIFAR-100), 86.26 (ImageNet-100).
    Measured: not yet measured here.
    """
    return TrainRun(
        model=model,
        data={**CIFAR, **FOLDERS}[data],
        image_size=224,
        method=DEFAULT,
        bit_warmup_epochs=25,
        calibrate_batches=4,
        calibrate_at=25,
        epochs=200,
        batch_size=128,
        optimizer="momentum",
        lr=0.1,
        weight_decay=1e-4,
        schedule="multistep",
        milestones=(0.5, 0.75),
        amp="bf16",
    )
