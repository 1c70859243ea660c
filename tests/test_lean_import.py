"""`import hotrain` pulls in torch only and touches no device, so that any program can afford it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

# What the library uses somewhere, and what those bring along: none of it may come with `import hotrain`.
HEAVY = [
    "timm", "torchvision", "transformers", "peft", "accelerate", "typer", "rich", "click", "matplotlib", "jinja2",
    "lightning", "torchao",
    "sklearn", "scipy", "PIL", "safetensors", "huggingface_hub", "yaml", "tqdm", "triton", "torch._inductor",
]  # fmt: skip

PROBE = """
import json, sys
import torch
before = set(sys.modules)
touched = []
import torch.cuda
for name in ("_lazy_init", "init", "is_available", "device_count", "current_device"):
    setattr(torch.cuda, name, lambda *a, n=name, **k: touched.append(n))
import hotrain
{then}
new = sorted(set(sys.modules) - before)
print(json.dumps({{"new": new, "touched": touched, "all": sorted(sys.modules)}}))
"""

USE = """
layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Conv2d(32, 32, 3))
hotrain.convert(layer)
layer[0](torch.randn(2, 16, 64)).sum().backward()
"""

BLOCK = """
model = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
hotrain.convert(model, memory="block")
model(torch.randn(8, 64, 64)).sum().backward()
"""


def probe(then: str = "") -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE.format(then=then)], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("then", ["", USE, BLOCK], ids=["import", "convert and a step", "a step of a block"])
def test_nothing_but_torch_and_no_device(then: str) -> None:
    """Also with warnings as errors. What torch has not loaded by itself must be ours or the standard library's."""
    seen = probe(then)
    assert seen["touched"] == []
    assert [name for name in HEAVY if name in seen["new"]] == []
    foreign = {name.split(".")[0] for name in seen["new"]} - set(sys.stdlib_module_names) - {"hotrain", "torch"}
    assert foreign == set()
    assert "torch._dynamo" not in seen["new"]  # seconds of import: only where something is compiled


def test_the_outer_rooms_and_the_questions_wait_until_asked() -> None:
    """`hotrain.calibrate` and the audit are there by name at once, and loaded when first used."""
    new = probe("dir(hotrain)")["new"]
    assert not [
        n
        for n in new
        if n.startswith(
            ("hotrain.train", "hotrain.cli", "hotrain.plotting", "hotrain.integrations", "hotrain.analysis")
        )
    ]
    asked = probe("hotrain.saved_bytes, hotrain.cost, hotrain.fidelity, hotrain.plan, hotrain.calibrate")["new"]
    assert "hotrain.audit.saved_bytes" in asked
    assert not [n for n in asked if n.startswith(("hotrain.train", "hotrain.cli", "hotrain.plotting"))]


def test_an_unknown_name_is_an_attribute_error() -> None:
    import hotrain

    with pytest.raises(AttributeError, match="module 'hotrain' has no attribute 'convertt'"):
        hotrain.convertt  # noqa: B018
    assert set(hotrain.__all__) <= set(dir(hotrain))
