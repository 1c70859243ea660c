"""The studies: which cells answer which claim of the papers, by priority. `hotrain study NAME` runs one."""

from __future__ import annotations

import functools
from typing import Literal

from hotrain_recipes import load_recipe

from hotrain.presets import DEFAULT
from hotrain.train.run import Lora, TrainRun, replace
from hotrain_study.cells import Cell, Study, grid, with_method

IN_FP8 = "hot-importance:number=e4m3"
"""What `hot-importance` is on a GPU with fp8, named as it ran."""
METHODS = (
    "exact",
    DEFAULT,
    "hot",
    "hot-unbiased",
    IN_FP8,
    "hla",
    "lbp-wht",
    "luq",
    "int4",
    f"{DEFAULT}@graphs",
)
"""Of Table 4 of HOT. Every layer is converted, but for ``@graphs``: there the plan leaves exact what loses time."""
IN_INTEGERS, IN_8_BITS = "hot-importance:number=int", "hot-importance:grad_input_bits=8+saved_bits=8"
"""In integers; and without the 4-bit codes of x and of g_x: which rounding costs accuracy, on the ViT."""
FOUR = ("exact", DEFAULT, "hot-unbiased", IN_FP8)
"""With a fourth seed on CIFAR-10: whether half of the rows of g_w cost accuracy is a question of 0.2 points."""
FEWER = tuple(method for method in METHODS if method not in (IN_FP8, f"{DEFAULT}@graphs"))
"""Of the studies of texts and of scenes."""
PRETRAINED = {"ResNet-18": "short_resnet18", "small ViT": "short_vit"}
LARGER = {"ResNet-50": "short_resnet50", "DeiT-Ti": "short_deit_tiny", "EfficientFormer-L1": "short_efficientformer_l1"}
NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}


def prepared(recipe: str, audit: bool = True) -> TrainRun:
    """The run of a recipe as a study trains it: compiled, channels last, few evaluations, bytes of one seed alone."""
    run = replace(load_recipe(recipe), plan="memory", compile=True, channels_last=True, audit=audit)
    return replace(run, eval_batch_size=1000, evaluate_every=4)


def pretraining() -> Study:
    """Table 4: two models on two data sets with every method, then one seed of three larger models, of one three."""
    cells: list[Cell] = []
    for data, seeds in (("cifar10", (0, 1, 2)), ("cifar100", (0, 1))):
        for seed in seeds:
            for model, recipe in PRETRAINED.items():
                group = f"{model}, {NAMES[data]}"
                cells += grid("pretraining", group, prepared(f"{recipe}_{data}", seed == 0), METHODS, (seed,))
        if data == "cifar10":
            for model, recipe in PRETRAINED.items():
                cells += grid("pretraining", f"{model}, CIFAR-10", prepared(f"{recipe}_cifar10", False), FOUR, (3,))
            run = prepared("short_vit_cifar10", False)
            cells += grid("pretraining", "small ViT, CIFAR-10", run, (IN_INTEGERS, IN_8_BITS), (0, 1, 2, 3))
    for model, recipe in LARGER.items():
        group = f"{model}, CIFAR-10"
        cells += grid("pretraining", group, prepared(f"{recipe}_cifar10"), METHODS, (0,))
    # The first seed was 1.5 points apart, more than any other model's.
    again = prepared("short_efficientformer_l1_cifar10", False)
    cells += grid("pretraining", "EfficientFormer-L1, CIFAR-10", again, ("exact", DEFAULT), (1, 2))
    return Study("pretraining", "Pre-training from scratch (HOT, Table 4)", tuple(cells))


def rank() -> Study:
    """Tables 1 and 2: rank, fixed and unbiased; the parts of HOT one by one; bytes and times of the parts, alone."""
    cells: list[Cell] = []
    steps = [
        Cell("rank", f"{model}, steps", method, with_method(_step_run(name, batch), method), "step", alone=True)
        for model, (name, batch) in STEPS.items()
        for method in ("exact", *PARTS[:2], "hot:scale=tensor", *PARTS[3:], f"{DEFAULT}@graphs")
    ]
    for seed in (0, 1):
        for model, recipe in PRETRAINED.items():
            run = prepared(f"{recipe}_cifar100", seed == 0)
            group = f"{model}, CIFAR-100"
            cells += grid("rank", group, run, ("exact", "hq", *RANKS), (seed,))
            cells += [_part("rank", group, run, part, seed) for part in PARTS if part != "hot:scale=token"]
            if seed == 0:
                cells += steps
                steps = []
    return Study("rank", "Rank and the parts of HOT (HOT, Tables 1 and 2)", tuple(cells))


LOW = (4, 2, 1)
RANKS = (
    "hot:scale=token",
    *(f"hot:scale=token+rank={r}" for r in LOW),
    "hot-unbiased:number=int+scale=token",
    *(f"hot-unbiased:number=int+scale=token+rank={r}" for r in LOW),
)
"""8 of 16 rows where no rank is named; integers and scales per token everywhere, so that only the rows differ."""
PARTS = ("hot:saved_bits=none+scale=token", "hot:scale=token", "hot", "hot:memory=block", DEFAULT)
"""HOT without its compressed buffer, with it, with LQS, with the activations between the layers, and the default.
What LQS saves at most is timed with one scale a tensor everywhere."""
STEPS = {"ViT-B/16": ("vit_base_patch16_224", 128), "ResNet-50": ("resnet50", 256)}


def _part(study: str, group: str, run: TrainRun, method: str, seed: int) -> Cell:
    return Cell(study, group, method, replace(_lqs(with_method(run, method)), seed=seed))


def _lqs(run: TrainRun) -> TrainRun:
    """LQS where the method leaves its scale open, as HOT uses it."""
    open_scale = run.resolve_method().grad_input.scale == "auto" and run.method == "hot"
    return replace(run, calibrate_batches=4) if open_scale else run


def _step_run(model: str, batch: int) -> TrainRun:
    return TrainRun(
        model=model, image_size=224, batch_size=batch, plan="memory", amp="bf16", compile=True, lr=1e-4, data="random",
        channels_last=model.startswith("resnet"),
    )  # fmt: skip


def fidelity() -> Study:
    """How far gradients are from exact over a training: two small models at CIFAR's size, two that train on a CPU."""
    # The number of `hot-importance` is the device's.
    methods = ["hot-importance" if method == IN_FP8 else method for method in (*METHODS[1:-1], "hq")]
    options = {"methods": methods, "draws": 8}
    cells = [
        Cell("fidelity", group, "exact", replace(load_recipe(recipe), method="exact"), "gradients", options=options)
        for group, recipe in (("ViT, digits", "demo_vit"), ("ResNet, digits", "demo_resnet"))
    ]
    for model, recipe in PRETRAINED.items():
        run = replace(prepared(f"{recipe}_cifar10"), method="exact", compile=False)
        cells.append(Cell("fidelity", f"{model}, CIFAR-10", "exact", run, "gradients", options=options))
    return Study("fidelity", "Error, bias, cosine, energy and LQS over a training", tuple(cells))


def evmt() -> Study:
    """EVMT-HLA: SimCLR, BYOL and DeiT-Ti with half of the rows, half of g_y dropped, and ours; then the rows."""
    cells: list[Cell] = []
    methods = ("exact", "hla", "dropout", DEFAULT, "hot-unbiased")
    for seed in (0, 1):
        for title, recipe in (("SimCLR", "simclr_resnet18"), ("BYOL", "byol_resnet18"), ("DeiT-Ti", "short_deit_tiny")):
            run = prepared(f"{recipe}_cifar10", seed == 0)
            run = run if run.task == "classification" else replace(run, evaluate_every=20)  # a probe is a training
            cells += grid("evmt", f"{title}, CIFAR-10", run, methods, (seed,))
        if seed == 0:
            run = replace(prepared("simclr_resnet18_cifar10"), evaluate_every=20)
            cells += grid("evmt", "SimCLR, CIFAR-10", run, [f"hla:rank={rows}" for rows in (14, 12, 6, 4, 2, 1)], (0,))
    return Study("evmt", "Low-rank g_w without labels and in DeiT (EVMT-HLA)", tuple(cells))


def language() -> Study:
    """An encoder that classifies phrases and a decoder that predicts bytes, by the methods of Table 4."""
    cells: list[Cell] = []
    for seed in (0, 1, 2):
        for title, recipe in (
            ("BERT (6 blocks), SST-2", "short_bert_sst2"),
            ("GPT (6 blocks), text", "short_gpt_text"),
        ):
            run = replace(load_recipe(recipe), plan="memory", compile=True, audit=seed == 0)
            cells += grid("language", title, run, FEWER, (seed,))
    return Study("language", "Language: an encoder and a decoder from scratch", tuple(cells))


def dense() -> Study:
    """A segmenter and a detector on scenes of CIFAR-10's images, by the methods of the study of texts.

    Two more seeds of exact and the default: with two, a difference of less than a point does not decide.
    """
    cells: list[Cell] = []
    for seed in (0, 1, 2, 3):
        for title, recipe in (
            ("SegFormer-B0, scenes", "short_segformer_scenes"),
            ("YOLOS, scenes", "short_yolos_scenes"),
        ):
            run = replace(load_recipe(recipe), plan="memory", compile=True, audit=seed == 0, evaluate_every=4)
            cells += grid("dense", title, run, FEWER if seed < 2 else ("exact", DEFAULT), (seed,))
    return Study("dense", "Dense prediction: a segmenter and a detector from scratch", tuple(cells))


def lora() -> Study:
    """Table 3: HOT on the frozen layers, the adapters, both or neither; a ViT from one CIFAR, adapted to the other."""
    cells: list[Cell] = []
    for first, then in (("cifar100", "cifar10"), ("cifar10", "cifar100")):
        run = replace(prepared(f"short_vit_{first}", audit=False), method="exact")
        start = Cell("lora", f"small ViT, first {NAMES[first]}", "exact", run)
        cells.append(start)
        run = replace(prepared(f"short_vit_{then}"), epochs=10, lr=1e-3, weight_decay=0.0, warmup_epochs=1)
        for seed in (0, 1, 2):
            for label, method, where in COMBINATIONS:
                adapted = replace(with_method(run, method), lora=Lora(convert=where), seed=seed, audit=seed == 0)
                group = f"small ViT, {NAMES[first]} → {NAMES[then]}"
                cells.append(Cell("lora", group, label, adapted, needs=start.id))
    return Study("lora", "LoRA: which layers may be converted (HOT, Table 3)", tuple(cells))


COMBINATIONS: tuple[tuple[str, str, Literal["frozen", "adapters", "both"]], ...] = (
    ("exact", "exact", "frozen"),
    ("hot, frozen", "hot", "frozen"),
    ("hot, adapters", "hot", "adapters"),
    ("hot, both", "hot", "both"),
    (f"{DEFAULT}, frozen", DEFAULT, "frozen"),
)
"""Label, method and the layers that get it."""

COUNTED = {
    "ViT-B/16": "vit_base_patch16_224",
    "ResNet-50": "resnet50",
    "EfficientFormer-L1": "efficientformer_l1",
    "EfficientFormer-L7": "efficientformer_l7",
}


def costs() -> Study:
    """Table 5, bit operations and bytes: the published formulas beside what is counted; no GPU and no data."""
    cells = []
    for group, model in COUNTED.items():
        for method in ("exact", "lbp-wht", "luq", "hot", *(f"hot:rank={r}" for r in LOW), "hq", "hla", DEFAULT):
            run = TrainRun(model=model, image_size=224, batch_size=128, amp="bf16", device="cpu", data="shapes")
            kept = group == "ViT-B/16" and method in ("exact", "hot", "hla", DEFAULT)
            cells.append(
                Cell("costs", group, method, with_method(run, method), "costs", options={"kept": kept, "classes": 100})
            )
    return Study("costs", "Bit operations and bytes: published formulas and corrected ones", tuple(cells))


@functools.cache
def studies() -> dict[str, Study]:
    """Return all studies by name."""
    return {
        study.name: study for study in (pretraining(), lora(), evmt(), rank(), language(), dense(), fidelity(), costs())
    }
