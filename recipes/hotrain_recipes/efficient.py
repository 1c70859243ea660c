"""EfficientFormer-L1, -L3, -L7 and EfficientNetV2-S."""

from hotrain.presets import DEFAULT
from hotrain.train.run import TrainRun
from hotrain_recipes.registry import CIFAR, FOLDERS, recipe

FORMERS = ("efficientformer_l1", "efficientformer_l3", "efficientformer_l7")


@recipe("{model}_{data}", "EfficientFormer from scratch", model=FORMERS, data=(*CIFAR, *FOLDERS))
def efficientformer_scratch(model: str, data: str) -> TrainRun:
    """{model} from scratch on {data} at 224 pixels.

    Command: ``hotrain train efficientformer_l1_cifar100``

    Source: HOT supplement: AdamW, rate 1e-3, 200 epochs, batch 128, int8 gradients for the first 25 epochs.
    The paper's L1 with HOT: 94.01 (CIFAR-10), 76.06 (CIFAR-100), 83.05 (ImageNet-100).
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
        lr=1e-3,
        weight_decay=0.05,
        amp="bf16",
    )


@recipe("{model}_finetune_{data}", "EfficientFormer fine-tuned", model=FORMERS, data=tuple(CIFAR))
def efficientformer_finetune(model: str, data: str) -> TrainRun:
    """{model} with published ImageNet weights, fine-tuned on {data} at 224 pixels.

    Command: ``hotrain train efficientformer_l1_finetune_cifar100`` (needs the weights from the hub or its cache)

    Source: HOT supplement: batch 128, rate 2.5e-4, 50 epochs, AdamW, cosine; weight decay 0.01 as in its script.
    Measured: not yet measured here.
    """
    return TrainRun(
        model=model,
        pretrained=True,
        data=data,
        image_size=224,
        method=DEFAULT,
        calibrate_batches=4,
        epochs=50,
        batch_size=128,
        lr=2.5e-4,
        weight_decay=0.01,
        min_lr=1e-6,
        amp="bf16",
    )


@recipe("efficientnetv2_s_finetune_{data}", "EfficientNetV2 fine-tuned", data=(*CIFAR, *FOLDERS))
def efficientnetv2_finetune(data: str) -> TrainRun:
    """EfficientNetV2-S with published ImageNet weights, fine-tuned on {data} at 224 pixels.

    Command: ``hotrain train efficientnetv2_s_finetune_cifar100`` (needs the weights from the hub or its cache)

    Source: HOT supplement: batch 64, rate 1e-3, 50 epochs, AdamW, cosine; weight decay 0.01 as in its script.
    Measured: not yet measured here.
    """
    return TrainRun(
        model="tf_efficientnetv2_s",
        pretrained=True,
        data={**CIFAR, **FOLDERS}[data],
        image_size=224,
        method=DEFAULT,
        calibrate_batches=4,
        epochs=50,
        batch_size=64,
        lr=1e-3,
        weight_decay=0.01,
        min_lr=1e-6,
        amp="bf16",
    )
