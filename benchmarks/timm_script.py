"""timm's own train.py, as it is and with the two lines of docs/integrations.md, side by side on a CPU.

    python benchmarks/timm_script.py path/to/train.py [--cases float32] [--seeds 3] [--source COMMIT] [--out FILE]

timm's wheel has no train.py: it is a file of timm's repository. Both scripts train a small ViT on scikit-learn's digits
0 to 2 as a folder of images, with EMA and checkpoints. Each script then resumes from the checkpoint of either, and an
exact model of timm loads each.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hotrain_bench.conditions import conditions, parser_of, write
from hotrain_bench.conversions import noted

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "integrations.md"
LAST = "record of the script: "
MODEL = "test_vit"
SIZES = {"img_size": 64, "patch_size": 8}
CLASSES = 3
EPOCHS = 4
OPTIONS = (
    *("--model", MODEL, "--num-classes", str(CLASSES), "--input-size", "3", "64", "64", "--model-kwargs"),
    *(f"{name}={value}" for name, value in SIZES.items()),
    *("--device", "cpu", "--workers", "1", "--batch-size", "16", "--no-aug", "--smoothing", "0", "--gp", "avg"),
    *("--opt", "adamw", "--lr", "1e-3", "--warmup-epochs", "1", "--log-interval", "1"),  # 1: the loss of every step
    *("--model-ema", "--model-ema-decay", "0.9"),
)
AUTOCAST = ("--amp", "--amp-dtype", "bfloat16")
CASES: dict[str, tuple[str, ...]] = {
    "float32": (),
    "bfloat16": AUTOCAST,
    "bfloat16 compiled": (*AUTOCAST, "--torchcompile", "aot_eager"),
}


def patch(document: str) -> list[tuple[str, str]]:
    """The patch in the document's section on timm: pairs of a line of the script, and the line to add below it.

    Raises:
        ValueError: the section shows none, or an added line without a line of the script above it.
    """
    found = re.search(r"^## timm$.*?^```diff\n(.*?)^```$", document, re.DOTALL | re.MULTILINE)
    lines = found[1].splitlines() if found else []
    pairs = [(lines[i - 1], line) for i, line in enumerate(lines) if line.startswith("+")]
    if not pairs or any(not above.startswith(" ") for above, _ in pairs):
        raise ValueError("the document's section on timm: expected a diff, each added line below a line of the script")
    return [(above[1:], line[1:]) for above, line in pairs]


def patched(script: str, pairs: Sequence[tuple[str, str]]) -> str:
    """The script with each line added below its own, which may end in a comment.

    Raises:
        ValueError: the script has no such line, or several.
    """
    for above, line in pairs:
        places = list(re.finditer(rf"^{re.escape(above)}(?: +#.*)?$", script, re.MULTILINE))
        if len(places) != 1:
            raise ValueError(f"the script has {len(places)} lines {above.strip()!r}: the patch is for one")
        script = f"{script[: places[0].end()]}\n{line}{script[places[0].end() :]}"
    return script


def images(folder: Path) -> None:
    """Digits 0 to 2 of scikit-learn as PNG files, 128 of each to train on and the rest for validation."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    for label in range(CLASSES):
        for number, pixels in enumerate(digits.images[digits.target == label]):
            path = folder / ("train" if number < 128 else "validation") / str(label) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((15 * pixels).astype("uint8")).convert("RGB").resize((64, 64)).save(path)


def inside(script: str, options: Sequence[str]) -> dict[str, Any]:
    """Run the script in this process; layers and bytes of the conversion that it made, empty if it made none."""
    import hotrain.train  # noqa: F401 (first: it lets timm load beside a CPU-only PyTorch)

    made = noted()
    sys.argv = [script, *options]
    runpy.run_path(script, run_name="__main__")
    if not made:
        return {}
    now, before = made[0][1].totals() or (None, None)
    layers = {"converted": len(made[0][1].converted), "kept": len(made[0][1].kept)}
    return {**layers, "kept_bytes": now, "exact_bytes": before}


def run(script: Path, out: Path, options: Sequence[str]) -> dict[str, Any]:
    """Run the script in a process of its own.

    Returns:
        ``losses``, ``eval_losses`` (of the EMA): one an epoch; and what `inside` found.

    Raises:
        RuntimeError: it failed, with the end of what it said.
    """
    command = [sys.executable, __file__, str(script), "--inside", *options, "--output", str(out.parent)]
    done = subprocess.run([*command, "--experiment", out.name], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(LAST)]
    if done.returncode or not lines:
        raise RuntimeError(f"{script.name}: {' '.join(done.stderr.split())[-600:]}")
    with (out / "summary.csv").open(encoding="utf-8") as file:
        epochs = list(csv.DictReader(file))
    losses = {"losses": "train_loss", "eval_losses": "eval_loss"}
    found = {name: [float(epoch[column]) for epoch in epochs] for name, column in losses.items()}
    return found | json.loads(lines[-1].removeprefix(LAST))


def loads(checkpoint: Path) -> bool:
    """Whether an exact model of timm has the keys of the checkpoint's weights and of its EMA, and takes them."""
    import hotrain.train  # noqa: F401, I001 (first: it lets timm load beside a CPU-only PyTorch)
    import timm

    model = timm.create_model(MODEL, num_classes=CLASSES, global_pool="avg", **SIZES)
    saved = torch.load(checkpoint, map_location="cpu", weights_only=False)  # made by this command
    for name in ("state_dict", "state_dict_ema"):
        model.load_state_dict(saved[name])
    return True


def side_by_side(case: str, scripts: dict[str, Path], data: Path, work: Path, seeds: int) -> list[dict[str, Any]]:
    """Train by both scripts, and resume from each checkpoint of seed 0 by both: a row a script."""
    options = [*OPTIONS, *CASES[case], "--data-dir", str(data)]
    rows: list[dict[str, Any]] = []
    for variant, script in scripts.items():
        runs = []
        for seed in range(seeds):
            words = [*options, "--epochs", str(EPOCHS), "--seed", str(seed)]
            runs.append(run(script, work / f"{variant}_{seed}", words))
            print(case, variant, seed, runs[-1], flush=True)
        curves = {name: [one.pop(name) for one in runs] for name in ("losses", "eval_losses")}
        rows.append({"subject": case, "variant": variant, **curves, **runs[0]})
    for row in rows:
        last = work / f"{row['variant']}_0" / "last.pth.tar"
        row["loads"] = loads(last)
        row["resumed"] = {}
        for variant, script in scripts.items():
            words = [*options, "--epochs", str(EPOCHS + 1), "--resume", str(last)]
            found = run(script, work / f"{row['variant']}_then_{variant}", words)
            row["resumed"][variant] = found["losses"]
            print(case, row["variant"], "resumed by", variant, found["losses"], flush=True)
    return rows


def main() -> None:
    """Patch, run and print; append the records."""
    parser = parser_of(__doc__)
    parser.add_argument("script", type=Path, help="timm's train.py")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--source", help="commit of timm's repository that the script is of")
    parser.add_argument("--inside", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside is not None:
        print(LAST + json.dumps(inside(str(args.script), args.inside)), flush=True)
        return
    common = conditions(torch.device("cpu"), sys.argv, args.commit)
    empty = dict.fromkeys(("median_ms", "spread_ms", "peak_bytes", "activation_bytes"))
    exact = args.script.read_text(encoding="utf-8")
    texts = {"exact": exact, "converted": patched(exact, patch(DOCUMENT.read_text(encoding="utf-8")))}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        images(data)
        scripts = {variant: Path(folder) / f"train_{variant}.py" for variant in texts}
        for variant, path in scripts.items():
            path.write_text(texts[variant], encoding="utf-8")
        for number, case in enumerate(args.cases.split(",")):
            work = Path(folder) / f"case{number}"
            for row in side_by_side(case, scripts, data, work, args.seeds):
                write(args.out, {"bench": "timm-script", "source": args.source, **row, **empty, **common})


if __name__ == "__main__":
    main()
