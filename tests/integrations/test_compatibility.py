"""The twenty models of benchmarks/compatibility.py do what the table of docs/integrations.md says of them."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import compatibility
import pytest

import hotrain

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:(?!hotrain)")

ROOT = Path(__file__).parents[2]
AGAIN = "run `python benchmarks/compatibility.py --out benchmarks/results/…` and `make docs`"
COMPILED = {"test_resnet", "vit"}  # compiling all takes three minutes: the command does


def recorded() -> dict[str, dict[str, Any]]:
    """The latest record of each model: what the table is made of."""
    files = sorted((ROOT / "benchmarks" / "results").glob("compatibility_*.jsonl"), key=lambda path: path.stem[-10:])
    rows = [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["subject"]: row for row in rows}


@pytest.mark.parametrize("name", compatibility.SUBJECTS)
def test_a_model_does_what_the_table_says(name: str) -> None:
    """Each stage passes, as many layers are converted, and as much is kept."""
    row = recorded()[name]
    found = compatibility.tried(name, leave_out="" if name in COMPILED else "compile")
    assert row["stages"] == dict.fromkeys(compatibility.STAGES, ""), AGAIN
    ran = [stage for stage in compatibility.STAGES if stage != "compile" or name in COMPILED]
    assert found["stages"] == dict.fromkeys(ran, "")
    assert (found["converted"], found["kept"]) == (row["converted"], row["kept"]), AGAIN
    shares = [r["kept_bytes"] / r["exact_bytes"] for r in (found, row)]
    assert shares[0] == pytest.approx(shares[1], abs=0.01), AGAIN  # the table has two digits


def test_the_table_is_of_ten_models_of_each_library() -> None:
    libraries = [subject.library for subject in compatibility.SUBJECTS.values()]
    assert libraries.count("timm") == libraries.count("transformers") == 10
    assert list(recorded()) == list(compatibility.SUBJECTS), AGAIN


def test_no_class_of_these_models_is_named_in_the_core() -> None:
    """Nothing looks at which model it is; `train` and the command line, which build models, are not the core."""
    built = [subject.build() for subject in compatibility.SUBJECTS.values()]
    homes = ("timm.models", "transformers.models")
    names = {type(m).__name__ for model in built for m in model.modules() if type(m).__module__.startswith(homes)}
    assert {"VisionTransformer", "ResNet", "BertModel", "GPT2Block", "LlamaMLP", "WhisperDecoder"} < names
    core = ROOT / "src" / "hotrain"
    for path in core.rglob("*.py"):
        if path.relative_to(core).parts[0] in ("train", "cli", "integrations", "plotting"):
            continue
        assert not names & _words(ast.parse(path.read_text(encoding="utf-8"))), path


def _words(tree: ast.AST) -> set[str]:
    """Words of code and of its strings, without docstrings."""
    words: set[str] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            body[0].value = ast.Constant(None)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words |= set(re.findall(r"\w+", node.value))
        words |= {getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "name", "") or ""}
    return words


def test_words_of_code_are_found() -> None:
    code = '"""A Doc."""\ndef f(x):\n    """A Doc."""\n    return type(x).__name__ == "a.Llama" or is_a(x, hf.Bert)'
    assert {"Llama", "Bert", "f"} < _words(ast.parse(code))
    assert "Doc" not in _words(ast.parse(code))


def test_a_stage_that_fails_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose inference changes when it is converted would be found, and so would one that is not reverted."""
    real = hotrain.convert

    def spoiled(model: Any) -> Any:
        report = real(model)
        next(model.parameters()).data.add_(1.0)
        return report

    monkeypatch.setattr(compatibility.hotrain, "convert", spoiled)
    monkeypatch.setattr(compatibility.hotrain, "revert", lambda model: None)
    monkeypatch.setattr(compatibility, "STEPS", 1)
    stages = compatibility.tried("vit", "compile")["stages"]
    assert stages["convert"].startswith("AssertionError: outputs differ by")
    assert stages["revert"] == "AssertionError: classes differ from the exact model's"
