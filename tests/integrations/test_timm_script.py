"""The patch that docs/integrations.md shows for timm's train.py: it fits, and the script trains with it.

timm's wheel has no train.py. ``HOTRAIN_TIMM_SCRIPT=path/to/train.py`` checks the patch, and the stand-in, against it;
`benchmarks/timm_script.py` runs it.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest
import timm_script

import hotrain
import hotrain.train  # first: it lets timm load beside a CPU-only PyTorch

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:(?!hotrain)")

PAIRS = timm_script.patch(timm_script.DOCUMENT.read_text(encoding="utf-8"))
# In the order of timm's script: beginnings of its lines that the stand-in has too.
ORDER = (
    "import torch\n",
    "import torch.nn as nn\n",
    "    model = create_model(\n",
    "    model.to(device=device, dtype=model_dtype)",
    "    optimizer = create_optimizer_v2(\n",
)
ANYWHERE = "        amp_autocast = partial(torch.autocast, device_type=device.type, dtype=amp_dtype)\n"
# Compiling and distributed wrapping come after the conversion.
AFTER = ("task.compile(", "task.prepare_distributed(", "torch.jit.script(")
STAND_IN = """
from contextlib import suppress
from functools import partial

import torch
import torch.nn as nn
from timm.models import create_model
from timm.optim import create_optimizer_v2


def main():
    device, model_dtype, amp_dtype = torch.device("cpu"), None, torch.bfloat16
    torch.manual_seed(0)
    model = create_model(
        "test_vit", num_classes=3, img_size=64, patch_size=8,
    )
    model.to(device=device, dtype=model_dtype)  # a comment, as in timm's file
    amp_autocast = suppress  # do nothing
    if AMP:
        amp_autocast = partial(torch.autocast, device_type=device.type, dtype=amp_dtype)
    optimizer = create_optimizer_v2(
        model, opt="adamw", lr=3e-4,
    )
    images, labels, losses = torch.randn(6, 3, 64, 64), torch.arange(6) % 3, []
    for _ in range(6):
        with amp_autocast():
            loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


trained = main()
"""


def in_order(script: str) -> None:
    places = [script.find(line) for line in ORDER]
    assert -1 not in places, f"the script has no line {ORDER[places.index(-1)]!r}"
    assert places == sorted(places)
    assert ANYWHERE in script  # timm 1.0.20 has it below the optimizer


def test_the_patch_is_an_import_and_a_call() -> None:
    assert [line.strip() for _, line in PAIRS] == ["import hotrain", "hotrain.convert(model)"]


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "bfloat16"])
def test_a_script_of_the_same_structure_trains_with_the_patch(amp: bool, tmp_path: Path) -> None:
    """Layers are converted, losses follow exact's, and an exact model takes the weights."""
    in_order(STAND_IN)
    found = {}
    for variant, text in (("exact", STAND_IN), ("converted", timm_script.patched(STAND_IN, PAIRS))):
        path = tmp_path / f"{variant}.py"
        path.write_text(text, encoding="utf-8")
        hotrain.manual_seed(0)
        found[variant] = runpy.run_path(str(path), {"AMP": amp})["trained"]
    (exact, want), (model, losses) = found["exact"], found["converted"]
    assert not list(hotrain.converted_layers(exact))
    assert len(list(hotrain.converted_layers(model))) == 25, "all but the head"
    # 8-bit gradients are off by a few percent: the two paths stay closer than what they learn by far.
    assert want[0] - want[-1] > 0.05
    assert max(abs(a - b) for a, b in zip(losses, want, strict=True)) < 0.2 * (want[0] - want[-1])
    exact.load_state_dict(model.state_dict())


@pytest.mark.parametrize("script", ["import os\n", "import torch.nn as nn\n" * 2], ids=["without", "twice"])
def test_a_script_that_the_patch_does_not_fit_is_refused(script: str) -> None:
    with pytest.raises(ValueError, match=r"the script has [02] lines 'import torch.nn as nn'"):
        timm_script.patched(script, PAIRS)


@pytest.mark.parametrize("diff", ["", "```diff\n+import hotrain\n```\n"], ids=["no diff", "a line without a place"])
def test_a_document_without_the_patch_is_refused(diff: str) -> None:
    with pytest.raises(ValueError, match="expected a diff"):
        timm_script.patch(f"## timm\n\n{diff}")


def test_the_patch_and_the_stand_in_fit_timms_own_script() -> None:
    path = os.environ.get("HOTRAIN_TIMM_SCRIPT")
    if not path:
        pytest.skip("HOTRAIN_TIMM_SCRIPT names no train.py: timm's wheel has none, and nothing is downloaded")
    script = Path(path).read_text(encoding="utf-8")
    in_order(script)
    new = timm_script.patched(script, PAIRS)
    compile(new, "train.py", "exec")
    call = new.index("    hotrain.convert(model)\n")
    assert new.index("create_model(\n") < call < new.index("create_optimizer_v2(\n")
    assert all(call < new.index(line) for line in AFTER if line in new)
