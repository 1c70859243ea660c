"""From a clone to a converted training step of one's own timm model, timed, as a new user does it.

    python benchmarks/newcomer.py [--model vit_small_patch16_224] [--out FILE]

A new folder gets a clone of this repository, an environment by `venv`, and ``pip install '.[train]'`` without pip's
cache. A script that trains a timm model runs there as it is, then with the three lines of docs/index.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import torch
from hotrain_bench.conditions import conditions, parser_of, write

ROOT = Path(__file__).resolve().parents[1]
OWN = """
import timm
import torch

model = timm.create_model("{model}", num_classes=37)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
images, labels = torch.randn(8, 3, 224, 224), torch.randint(37, (8,))
for _ in range(2):
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# line → the lines that follow it in the changed script; None: at its end
LINES = {"import timm": "import hotrain", "model = ": "report = hotrain.convert(model)", None: "print(report)"}
ASKED = "import json, os, torch; print(json.dumps([torch.__version__, len(os.sched_getaffinity(0))]))"


def changed(script: str, lines: Mapping[str | None, str] = LINES) -> str:
    """The script with the three lines.

    Args:
        script: a training script.
        lines: beginning of a line → the line that is added behind it; None: at the end.
    """
    found = script.splitlines()
    for after, line in lines.items():
        places = [i for i, old in enumerate(found) if after is not None and old.startswith(after)]
        found.insert(places[0] + 1 if places else len(found), line)
    return "\n".join(found) + "\n"


def wheels(report: Mapping[str, Any]) -> dict[str, int]:
    """How many packages pip installed, and of how many, and of how many bytes, the file was on this machine's disk.

    Args:
        report: of ``pip install --report``.
    """
    local = [urlparse(item["download_info"]["url"]) for item in report["install"]]
    paths = [Path(unquote(url.path)) for url in local if url.scheme == "file"]
    files = [path for path in paths if path.is_file()]  # the clone itself is a folder
    return {"packages": len(local) - 1, "local": len(files), "local_bytes": sum(path.stat().st_size for path in files)}


def timed(model: str, folder: Path) -> dict[str, Any]:
    """Go from the clone to the step.

    Args:
        model: a name of timm's, for images of 224 pixels.
        folder: an empty one.

    Returns:
        ``seconds`` of each stage, the installed ``torch``, the number of ``cores``, and `wheels`.

    Raises:
        RuntimeError: a stage failed, or the step did not run converted.
    """
    python = folder / "environment/bin/python"
    scripts = {"own.py": OWN.format(model=model).lstrip()}
    scripts["own_changed.py"] = changed(scripts["own.py"])
    for name, text in scripts.items():
        (folder / name).write_text(text, encoding="utf-8")
    install = [python, "-m", "pip", "install", "-q", "--no-cache-dir", "--report", folder / "report.json", ".[train]"]
    stages: dict[str, tuple[list[str | Path], Path]] = {
        "`git clone`": (["git", "clone", "-q", f"file://{ROOT}", folder / "clone"], folder),
        "`python3 -m venv`": ([sys.executable, "-m", "venv", folder / "environment"], folder),
        "`pip install '.[train]'`": (install, folder / "clone"),
        "the script as it was": ([python, "own.py"], folder),
        "the script with three more lines": ([python, "own_changed.py"], folder),
    }
    seconds, printed = {}, ""
    for stage, (command, where) in stages.items():
        begun = time.monotonic()
        printed = run(command, where)
        seconds[stage] = round(time.monotonic() - begun, 1)
        print(stage, seconds[stage], flush=True)
    if " layers converted to " not in printed:
        raise RuntimeError(f"newcomer: the changed script printed no report: {printed[-500:]}")
    version, cores = json.loads(run([python, "-c", ASKED], folder))
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return {"seconds": seconds, "torch": version, "cores": cores, **wheels(report)}


def run(command: list[str | Path], folder: Path) -> str:
    """Run a command without the paths of this process's Python; return what it printed."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"newcomer: {' '.join(map(str, command))}: {done.stderr[-2000:]}")
    return done.stdout


def main() -> None:
    """Time it, and append the record."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="vit_small_patch16_224")
    args = parser.parse_args()
    common = conditions(torch.device("cpu"), sys.argv, args.commit)
    empty = dict.fromkeys(("median_ms", "spread_ms", "peak_bytes", "activation_bytes"))
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        found = timed(args.model, Path(folder))
    write(args.out, {"bench": "newcomer", "subject": args.model, "variant": "hotrain", **empty, **common, **found})


if __name__ == "__main__":
    main()
