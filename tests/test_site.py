"""The documentation site, as far as it can be tested without MkDocs: its pages, its reference, its blocks of Python."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hotrain

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
# document → the test that runs its blocks
ELSEWHERE = {
    "README.md": "tests/test_docs.py",
    "integrations.md": "tests/integrations/test_examples.py",
    "optimizer.md": "tests/bench/test_optimizer_recipe.py",
}
BLOCK = re.compile(r"^(?:<!-- (in CI|not run): ([^\n]+) -->\n)?```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NARROW = "the model is narrow"


def programs() -> dict[str, list[tuple[str, str, str]]]:
    """Document → its blocks of Python: (what the comment before it says, why, the block)."""
    found = {p.name: BLOCK.findall(p.read_text(encoding="utf-8")) for p in [*ROOT.glob("*.md"), *DOCS.glob("*.md")]}
    return {name: blocks for name, blocks in found.items() if blocks}


def test_every_page_is_in_the_navigation_once() -> None:
    pages = re.findall(r": ([\w-]+\.md)\b", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(pages) == sorted([*(p.name for p in DOCS.glob("*.md")), "contributing.md", "changelog.md"])


@pytest.mark.parametrize("path", [*ROOT.glob("*.md"), *DOCS.glob("*.md")], ids=lambda path: path.name)
def test_what_belongs_to_an_item_of_a_list_is_four_spaces_in(path: Path) -> None:
    """GitHub takes two, Python-Markdown ends the list there, and shows what follows as it is written."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    inside = re.findall(r"\n\n( +)\S[^\n]*", text)
    assert [spaces for spaces in inside if len(spaces) % 4] == []


def test_every_public_name_is_in_the_reference() -> None:
    names = re.findall(r"^::: ([\w.]+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(names) == len(set(names))
    places = [
        name.rpartition(".")[::2] for name in names if "integrations" not in name
    ]  # their libraries may be missing
    assert [(module, name) for module, name in places if not hasattr(importlib.import_module(module), name)] == []
    last = [name.rsplit(".", 1)[1] for name in names]
    assert [name for name in hotrain.__all__ if name not in last and name != "__version__"] == []


def test_every_document_with_python_is_run() -> None:
    for name, test in ELSEWHERE.items():
        assert name in (ROOT / test).read_text(encoding="utf-8") or name == "README.md"
    assert {"index.md", "pays.md", "fit.md", "methods.md", "hot.md"} <= set(programs())


@pytest.mark.parametrize("name", sorted(set(programs()) - set(ELSEWHERE)))
def test_python_of_a_document_runs(
    name: str,
    timm: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    create_model = timm.create_model

    def narrow(model: str, **options: Any) -> Any:
        assert model.startswith("vit_"), f"{name}: say here how to make a {model} narrow"
        return create_model(model, depth=2, embed_dim=64, num_heads=2, patch_size=32, **options)

    monkeypatch.chdir(tmp_path)
    variables: dict[str, Any] = {"__name__": name}
    for mark, why, block in programs()[name]:
        code = compile(block, name, "exec")
        if mark == "not run":
            continue
        assert mark == "" or why == NARROW, f"{name}: CI knows no {why!r}"
        with monkeypatch.context() as patch:
            if mark:
                patch.setattr(timm, "create_model", narrow)
            exec(code, variables)
        assert "print(" not in block or capsys.readouterr().out.strip(), f"{name} prints nothing"
