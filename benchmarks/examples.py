"""Every example of `examples/`, run as it is on this machine's device; a record each of what its layers did.

    python benchmarks/examples.py [--only timm_train] [--plan memory] [--out FILE]

With ``--plan`` their conversions get this plan: without torch.compile "speed" leaves layers exact on a GPU.
Each runs in a process of its own, `examples/distributed.py` with torchrun on two devices. ``ran`` is read off the
report of the conversion that the example made; an example that fails is a record with its error.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from hotrain_bench.conditions import conditions, parser_of, write
from hotrain_bench.conversions import noted

ROOT = Path(__file__).resolve().parents[1]
LAST = "record of the example: "
# example → arguments of its main; where there are several, each is a run. FOLDER: an empty one
RUNS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "transformers_text": (("FOLDER",),),
    "transformers_images": (("FOLDER", "vit"), ("FOLDER", "segformer")),
    "transformers_lora": (("FOLDER", "after"), ("FOLDER", "before"), ("FOLDER", "full")),
    "detection_coco": (("FOLDER",),),
    "timm_train": ((), ("vit_base_patch16_224", 224, 64), ("resnet50", 224, 64)),
    "lightning_callback": (("FOLDER",),),
    "accelerate_loop": ((),),
    "torchao_adamw": ((),),
    "distributed": (("ddp", "FOLDER"), ("fsdp", "FOLDER"), ("fsdp", "--compile", "FOLDER")),
}


def inside(name: str, args: Sequence[Any], plan: str | None = None) -> dict[str, Any]:
    """Run one example in this process, with its own plan or with this one.

    Returns:
        Seconds, peak bytes on a GPU, the loss where the example returns one, and what the layers ran.
    """
    import hotrain.train  # noqa: F401 (first: it lets timm load beside a CPU-only PyTorch)

    sys.path.insert(0, str(ROOT / "examples"))
    made = noted(**({} if plan is None else {"plan": plan}))
    began = time.monotonic()
    named = {"folder": args[-1]} if name == "distributed" else {}  # one folder for all processes
    found = __import__(name).main(*(args[:-1] if named else args), **named)
    row: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1), "peak_bytes": None, "loss": None}
    if torch.cuda.is_available():
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    if hasattr(found, "state"):  # a Trainer of transformers
        row["loss"] = found.state.log_history[-1].get("train_loss")
    elif isinstance(found, float):
        row["loss"] = found
    return row | {"ran": [group for _, report in made for group in report.ran()]}


def alone(name: str, args: Sequence[Any], plan: str | None = None) -> dict[str, Any]:
    """Run one example in a process of its own, or in two, and return its row."""
    start = [sys.executable]
    if name == "distributed":
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # a Trainer in one process takes all that it sees
    environment = os.environ | ({} if name == "distributed" else {"CUDA_VISIBLE_DEVICES": first})
    with tempfile.TemporaryDirectory() as folder:
        words = [folder if arg == "FOLDER" else str(arg) for arg in args]
        command = [*start, __file__, *([] if plan is None else ["--plan", plan]), "--inside", name, *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    row: dict[str, Any] = {
        "bench": "examples",
        "subject": name,
        "variant": " ".join([*map(str, args), *([] if plan is None else [f"plan={plan}"])])
        .replace("FOLDER", "")
        .strip(),
        "error": None,
        **dict.fromkeys(("median_ms", "spread_ms", "peak_bytes", "activation_bytes")),
    }
    lines = [line for line in done.stdout.splitlines() if line.startswith(LAST)]
    if done.returncode or not lines:
        return row | {"error": " ".join(done.stderr.split())[-600:]}
    return row | json.loads(lines[-1].removeprefix(LAST))


def main() -> int:
    """Run the examples, write and print their records; 1 if one failed."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", help="comma-separated names")
    parser.add_argument("--plan", help="of their conversions, instead of their own")
    parser.add_argument("--at-once", type=int, default=4, help="processes side by side: times are not compared")
    parser.add_argument("--inside", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        name, *rest = args.inside
        words = [int(word) if word.isdecimal() else word for word in rest]
        if name == "distributed":
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
                torch.set_default_device("cuda")
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
            torch.distributed.init_process_group()
        print(LAST + json.dumps(inside(name, words, args.plan)), flush=True)
        if name == "distributed":
            torch.distributed.destroy_process_group()
        return 0
    chosen = args.only.split(",") if args.only else list(RUNS)
    if unknown := set(chosen) - set(RUNS):
        parser.error(f"--only: got {', '.join(sorted(unknown))}; examples are {', '.join(RUNS)}")
    common = conditions(torch.device("cuda" if torch.cuda.is_available() else "cpu"), sys.argv, args.commit)
    failed = False
    with ThreadPoolExecutor(args.at_once) as pool:
        runs = [(name, words) for name in chosen for words in RUNS[name]]
        for row in pool.map(lambda run: alone(*run, args.plan), runs):
            failed |= row["error"] is not None
            write(args.out, row | common)
            ran = [f"{g['layers']} {g['method']}" for g in row.get("ran", [])]
            print(row["subject"], row["variant"], row["error"] or f"{row['seconds']} s, {', '.join(ran)}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
