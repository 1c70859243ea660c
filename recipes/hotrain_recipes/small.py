"""Small ViT and ResNet-18 from scratch at 32 pixels, the networks of the accuracy study; minutes on a GPU."""

from hotrain.presets import DEFAULT
from hotrain.train.run import TrainRun
from hotrain_recipes.registry import CIFAR, recipe


@recipe("small_vit_{data}", "32 px from scratch", data=tuple(CIFAR))
def small_vit(data: str) -> TrainRun:
    """A ViT of 7 blocks, width 256, on 64 tokens of 4×4 pixels, from scratch on {data}.

    Command: ``hotrain train small_vit_cifar10 --data cifar10.npz``

    Source: network, class-token-free, as in docs/maths.md's accuracy study (50 epochs); AdamW, rate, decay and
    warm-up are ours. At twice this rate the attention of blocks 2 to 7 collapses to one or two of the 64 tokens within
    six epochs, also with exact products (logits span 60 to 80), exact training is slower too, and noise, whether of
    half the batch or of a low rank, costs several times what it costs here (docs/noise.md).
    Measured: 20 epochs of half the images, three seeds, in docs/results.md (commit 142cb85).
    """
    return TrainRun(
        model="small_vit",
        data=data,
        method=DEFAULT,
        epochs=50,
        batch_size=128,
        lr=5e-4,
        weight_decay=0.05,
        warmup_epochs=5,
        min_lr=1e-5,
        amp="bf16",
    )


@recipe("small_resnet18_{data}", "32 px from scratch", data=tuple(CIFAR))
def small_resnet18(data: str) -> TrainRun:
    """ResNet-18 with a 3×3 stem, from scratch on {data}.

    Command: ``hotrain train small_resnet18_cifar10 --data cifar10.npz``

    Source: HOT supplement (SGD 0.1, multi-step, batch 128) with the weight decay usual for CIFAR; the supplement
    trains 200 epochs at 224 pixels (recipe ``resnet18_{data}``), this one 50 at 32.
    Measured: shorter runs, docs/results.md.
    """
    return TrainRun(
        model="small_resnet18",
        data=data,
        method=DEFAULT,
        epochs=50,
        batch_size=128,
        optimizer="momentum",
        lr=0.1,
        weight_decay=5e-4,
        schedule="multistep",
        milestones=(0.5, 0.75),
        warmup_epochs=1,
        amp="bf16",
    )
