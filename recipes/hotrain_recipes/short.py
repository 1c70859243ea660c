"""The networks of the studies, on schedules as short as exact training reaches its known level with."""

from hotrain.presets import DEFAULT
from hotrain.train.run import TrainRun
from hotrain_recipes.registry import CIFAR, recipe

FAMILY = "studies, from scratch"


@recipe("short_{model}_{data}", FAMILY, model=("resnet18", "resnet50"), data=tuple(CIFAR))
def resnet(model: str, data: str) -> TrainRun:
    """{model} with a 3×3 stem on {data} at 32 pixels, 48 epochs.

    Command: ``hotrain train short_resnet18_cifar10 --data cifar10.npz``

    Source: the usual short schedule for CIFAR: SGD with Nesterov's momentum, one rise and one fall of the rate,
    batches of 512 with the rate that belongs to them (0.4, four times that of 128), smoothing 0.1, crops, flips and
    erased rectangles. Exact training is expected at 94 % or more on all 50,000 images of CIFAR-10.
    Measured: 94.49 % for resnet18 on CIFAR-10 (exact, one seed, commit 2bf0b41, docs/results.md). 28 epochs end at 92.7
    to 93.1 %, with rates of 0.4 and 0.8, weight decays of 1e-3 and 2e-3, and with erasing (five runs of
    benchmarks/results/studies/schedules_resnet18.jsonl).
    """
    return TrainRun(
        model=f"small_{model}",
        data=data,
        method=DEFAULT,
        epochs=48,
        batch_size=512,
        optimizer="sgd",  # timm's, with Nesterov's momentum
        lr=0.4,
        weight_decay=1e-3,
        warmup_epochs=4,
        smoothing=0.1,
        random_erase=0.5,
        amp="bf16",
    )


@recipe("short_{model}_{data}", FAMILY, model=("vit", "deit_tiny"), data=tuple(CIFAR))
def vit(model: str, data: str) -> TrainRun:
    """{model} on tokens of 4×4 pixels of {data}, 40 epochs.

    Command: ``hotrain train short_vit_cifar10 --data cifar10.npz``

    Source: AdamW and weight decay as usual for ViTs; the rate is that of ``small_vit_cifar10``, times the root of two
    for twice the batch. ``vit`` is ``small_vit`` (7 blocks, width 256, 64 tokens), ``deit_tiny`` is timm's DeiT-Ti
    with patches of 4 pixels (12 blocks, width 192, 65 tokens).
    Measured: 83.30 % for vit on CIFAR-10 (exact, one seed, commit 9e84746, docs/results.md).
    """
    tiny = model == "deit_tiny"
    return TrainRun(
        model="deit_tiny_patch16_224" if tiny else "small_vit",
        model_args={"patch_size": 4} if tiny else {},
        data=data,
        image_size=32,
        method=DEFAULT,
        epochs=40,
        batch_size=256,
        lr=7e-4,
        weight_decay=0.05,
        warmup_epochs=4,
        min_lr=1e-5,
        smoothing=0.1,
        amp="bf16",
    )


@recipe("short_efficientformer_l1_{data}", FAMILY, data=tuple(CIFAR))
def efficientformer(data: str) -> TrainRun:
    """EfficientFormer-L1 on {data} at 224 pixels, 12 epochs.

    Command: ``hotrain train short_efficientformer_l1_cifar10 --data cifar10.npz``

    Source: HOT supplement, AdamW and rate 1e-3 at batch 128; 12 of its 200 epochs, because the model is built for 224
    pixels alone. It compares methods early in training and reaches no published level.
    Measured: 71.34 % on CIFAR-10 (exact, one seed, commit d828958, docs/results.md).
    """
    return TrainRun(
        model="efficientformer_l1",
        data=data,
        image_size=224,
        method=DEFAULT,
        epochs=12,
        batch_size=256,
        lr=1e-3,
        weight_decay=0.05,
        warmup_epochs=1,
        amp="bf16",
    )


@recipe("{task}_resnet18_{data}", "studies, without labels", task=("simclr", "byol"), data=tuple(CIFAR))
def two_views(task: str, data: str) -> TrainRun:
    """ResNet-18 with a 3×3 stem trained with {task} on {data}, 60 epochs; a linear probe and k-NN judge its features.

    Command: ``hotrain train simclr_resnet18_cifar10 --data cifar10.npz``

    Source: EVMT-HLA trains SimCLR with Adam, batches of 256 and a ResNet-50 for 200 epochs; batch, rate and length are
    ours. Its BYOL never trained projector and predictor; this one does.
    Measured: linear probe on CIFAR-10, simclr 77.61 %, byol 73.13 % (exact, one seed, commit c489af6,
    docs/results.md).
    """
    return TrainRun(
        task=task,  # type: ignore[arg-type]
        model="small_resnet18",
        data=data,
        method=DEFAULT,
        epochs=60,
        batch_size=512,
        lr=1e-3,
        weight_decay=1e-4,
        warmup_epochs=5,
        amp="bf16",
    )


@recipe("short_segformer_scenes", "studies, scenes")
def segmenter() -> TrainRun:
    """SegFormer-B0 from scratch on scenes of CIFAR-10's images, 12 epochs: a class for each pixel, or background.

    Command: ``hotrain train short_segformer_scenes --data cifar10.npz``

    Source: AdamW with weight decay 0.01 and a small backbone as in SegFormer's paper, whose rate (6e-5, tenfold in the
    head) is that of a pre-trained one; 1e-3 is ours. A scene has one to four images on a canvas of 128 pixels
    (`hotrain.train.scenes`), 50,000 new ones an epoch; its accuracy is the mean IoU of eleven classes.
    Measured: mean IoU 54.48 % (exact, one seed, commit c489af6, docs/results.md). Background everywhere is at 7.4 %.
    """
    return TrainRun(
        task="segmentation",
        model="segformer_b0",
        data="cifar10",
        image_size=128,
        method=DEFAULT,
        epochs=12,
        batch_size=64,
        eval_batch_size=500,
        lr=1e-3,
        weight_decay=0.01,
        warmup_epochs=0.5,
        clip=1.0,
        amp="bf16",
    )


@recipe("short_yolos_scenes", "studies, scenes")
def detector() -> TrainRun:
    """YOLOS of DeiT-Ti's size from scratch on scenes of CIFAR-10's images, 20 epochs: boxes of up to four images.

    Command: ``hotrain train short_yolos_scenes --data cifar10.npz``

    Source: the sizes of YOLOS-Ti, but for patches of 8 pixels and 15 boxes; DETR's matching and losses as there,
    without its pre-training, so that weights start as DETR's and patches with positions of sines and cosines. Rate,
    decay and length are ours. Scenes as of ``short_segformer_scenes``; its accuracy is the mean average precision at
    IoU 0.5.
    Measured: AP 24.49 % (exact, one seed, commit c3f139a, docs/results.md).
    """
    return TrainRun(
        task="detection",
        model="yolos_tiny",
        data="cifar10",
        image_size=128,
        method=DEFAULT,
        epochs=20,
        batch_size=64,
        eval_batch_size=500,
        lr=5e-4,
        weight_decay=0.05,
        warmup_epochs=0.5,
        clip=1.0,
        amp="bf16",
    )


@recipe("short_bert_sst2", "studies, texts")
def encoder() -> TrainRun:
    """A BERT of 6 blocks, width 256, from scratch on the phrases of SST-2, 5 epochs.

    Command: ``hotrain train short_bert_sst2 --data sst2.npz``

    Source: sizes of BERT-mini with two blocks more; words of the training phrases that occur twice, 64 of a phrase.
    Without pre-training an encoder is expected at 78 to 82 % on GLUE's dev set.
    Measured: 79.93 % (exact, one seed, commit d87a70c, docs/results.md).
    """
    return TrainRun(
        model="small_bert",
        data="sst2",
        method=DEFAULT,
        epochs=5,
        batch_size=256,
        eval_batch_size=436,  # half of the dev set: batches of one shape
        lr=3e-4,
        weight_decay=0.05,
        warmup_epochs=0.5,
        clip=1.0,
        amp="bf16",
    )


@recipe("short_gpt_text", "studies, texts")
def decoder() -> TrainRun:
    """A GPT of 6 blocks, width 384, from scratch on windows of 256 bytes of texts, 12 epochs.

    Command: ``hotrain train short_gpt_text --data text.npz``

    Source: sizes, dropout (0.2), rate and batch of nanoGPT's character model, which ends at 1.47 nats a byte on
    Tiny Shakespeare. Its accuracy is the share of next bytes that are right; bits per byte are its test loss / log 2.
    Measured: 61.45 % (exact, one seed, commit d87a70c, docs/results.md).
    """
    return TrainRun(
        model="small_gpt",
        data="text",
        method=DEFAULT,
        epochs=12,
        batch_size=64,
        eval_batch_size=64,
        lr=1e-3,
        weight_decay=0.1,
        warmup_epochs=0.5,
        min_lr=1e-4,
        clip=1.0,
        amp="bf16",
    )
