"""What documents claim: numbers come from records, names are names of the code, presets do what is said of them."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hotrain_bench.step import CHECKPOINTED, VARIANTS, variant_of

import hotrain
from hotrain.kernels import support
from hotrain.method import Method
from hotrain.presets import DEFAULT
from hotrain.train import parse_method
from hotrain.transform.tokens import Grid

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
README = ROOT / "README.md"


@pytest.fixture(scope="module")
def docs() -> Iterator[Any]:
    """tools/docs.py as a module."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        yield importlib.import_module("docs")
    finally:
        sys.path.remove(str(ROOT / "tools"))


def prose(path: Path) -> str:
    """A document without what is generated, code, addresses of links and laboratory notes."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"^<!-- generated.*?^<!-- /generated -->$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^```.*?^```$|^    .*$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!-- figure.*?<!-- /figure -->|\]\([^)]*\)|(`+).*?\1", "", text)
    return re.sub(r"^## Laboratory notes.*?(?=^## (?!Laboratory)|\Z)", "", text, flags=re.DOTALL | re.MULTILINE)


# --- numbers

# A number with a unit of what is measured. Of bits, bytes, seeds, epochs, tokens and shapes prose may speak.
MEASURED = re.compile(
    r"[−+-]?\d[\d.,]* ?(?:ms|µs|s\b|seconds?|GiB|MiB|GB|MB|TB/s|TFLOP/s|TOP/s|GFLOP/s|%|points?|×"
    r"|times (?:as|faster|slower)|W\b|MHz)(?!\w)"
)
# document → why its numbers are no measurements of this code
COMPUTED = {
    "maths.md": "formulas, published figures, and a study that it says was made before this library",
    "hot.md": "published figures",
}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_measured_numbers_in_prose_are_printed_from_records(path: Path) -> None:
    if path.name in COMPUTED:
        return
    found = [match[0] for match in MEASURED.finditer(prose(path))]
    assert found == [], (
        "a measured number in a sentence: use `<!-- figure: … -->` (tools/docs.py), or a generated table"
    )


@pytest.mark.parametrize(
    "sentence", ["takes 3.7 GiB", "0.2 points", "1.2 ms", "two 46 % of", "1.5× faster", "−0.37 points"]
)
def test_the_pattern_of_measured_numbers_finds_them(sentence: str) -> None:
    assert MEASURED.search(sentence)


def test_laboratory_notes_say_that_they_are_not_recorded() -> None:
    for path in DOCUMENTS:
        for note in re.findall(
            r"^## Laboratory notes\n\n(.*?)\n\n", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        ):
            assert "not recorded" in note, path.name


def _hadamard() -> str:
    method = hotrain.preset("hot")
    assert method.grad_weight.tile == 16
    assert method.grad_weight.rank == 8
    assert method.grad_weight.sampled == 0
    unbiased = hotrain.preset("hot-unbiased").grad_weight
    assert unbiased.sampled * 2 == unbiased.rank == 8, "README: draws half of them"
    return "order 16; 8 of its 16 rows"


def _bits() -> str:
    method = hotrain.preset(DEFAULT)
    assert (method.grad_input.bits, method.grad_weight.bits, method.saved.bits) == (8, 8, 8)
    policy = importlib.import_module("hotrain.compress.formats")
    bits = {policy.GROUPED[form].bits for form in policy.FORMATS.values()}
    assert bits | {policy.SLOPES.bits} == {4, 8}
    return "8-bit codes; 4 to 8 bits"


# number in README's prose → what it is, checked against the code where there is something to check
FREE = {
    "16": _hadamard,
    "8": _bits,
    "4": _bits,
    "8.9": lambda: "the compute capability from which GPUs multiply fp8: the next test reads it off the kernels",
    "8.0": lambda: "the compute capability of the kernels: likewise",
    "3.11": lambda: "Python: test_docs checks it against pyproject",
    "2.11": lambda: "PyTorch: test_docs checks it against pyproject",
    "1.00": lambda: "where time is equal",
    "1": lambda: "of 1-D convolutions",
    "3": lambda: "of 3-D convolutions",
    "2025": lambda: "a year", "2023": lambda: "a year", "2503.21261": lambda: "HOT on arXiv",
}  # fmt: skip


def test_free_numbers_of_the_readme_are_few_and_true() -> None:
    found = set(re.findall(r"(?<![\w.\-/])\d[\d.]*\d|(?<![\w.\-/])\d", prose(README)))
    assert found - set(FREE) == set(), "a number without a record: print it from one, or check it against the code"
    assert set(FREE) - found == set(), "README does not say it any more"
    for check in FREE.values():
        assert check()


def test_compute_capabilities_are_those_of_the_kernels() -> None:
    support = importlib.import_module("hotrain.kernels.support")
    text = Path(support.__file__).read_text(encoding="utf-8")
    assert "(8, 9)" in text
    assert "the kernels need compute capability 8.0" in text


# --- names


def written_names(path: Path) -> set[str]:
    return set(
        re.findall(r"`([a-z][\w+:=.-]*)`", re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.S | re.M))
    )


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_variants_and_methods_that_documents_name_exist(path: Path) -> None:
    """Names like ``exact+graphs``, ``hotrain-memory`` and ``hot:rank=4`` are variants of the bench or methods."""
    wrong = []
    for name in written_names(path):
        if name.removesuffix(CHECKPOINTED) in VARIANTS or name in hotrain.presets():
            continue
        if name.startswith("hotrain:"):
            variant_of(name)
        elif name.partition(":")[0] in hotrain.presets():
            preset, overrides = parse_method(name)
            hotrain.preset(preset, **overrides)
        elif name.startswith(("exact+", "exact-", "hotrain-", "hotrain+", "torchao-", "hot-", "hq-", "lbp-")):
            wrong.append(name)
    assert wrong == []


def test_every_variant_of_a_step_table_is_explained(docs: Any) -> None:
    text = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^\| (`[^|]+`) \| [^|]+ \|$", text, re.MULTILINE))
    names = {name for cell in explained for name in re.findall(r"`([^`]+)`", cell)}
    suffixes = tuple(name[1:] for name in names if name.startswith("…"))
    printed = set(re.findall(r"^\| [\w-]+/[\w@]+ \| ([\w+:=.-]+) \|", docs.records.steps(), re.MULTILINE))
    assert printed
    unexplained = {name for name in printed if name not in names and not name.endswith(suffixes)}
    assert unexplained == set(), "docs/performance.md: say in the table of variants what they are"


def test_recipes_and_presets_are_counted_by_the_code(docs: Any) -> None:
    import hotrain_recipes

    assert f"| **{len(hotrain_recipes.all())}** |" in (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| `([\w-]+)`( \(default\))? \|", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert [name for name, _ in lines] == list(hotrain.presets())
    assert [name for name, default in lines if default] == [DEFAULT]
    assert len([name for name in hotrain_recipes.all() if name.startswith("demo_")]) == 2, "README: two small models"


# --- presets


def test_the_default_is_what_the_readme_says() -> None:
    method = hotrain.preset(DEFAULT)
    assert method.memory == "block"
    assert method.forward == "exact"
    assert method.grad_input.transform == "hadamard"
    assert method.grad_weight.rank == method.grad_weight.tile == 16
    fp8 = method.override(number="e4m3")
    assert (fp8.grad_input.number, fp8.grad_weight.number, fp8.saved.number) == ("e4m3",) * 3
    assert fp8.grad_input.transform is None, "README: g_x goes without H"
    assert fp8.grad_weight.rank == fp8.grad_weight.tile == 16


@pytest.mark.parametrize("name", hotrain.presets())
def test_kept_bytes_of_the_table_are_those_of_the_storages(
    name: str, docs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = hotrain.preset(name)
    monkeypatch.setattr(docs.low_rank, "EXAMPLE", ((4, 197), 64, Grid(14, 14, prefix=1)))
    x = torch.randn(4, 197, 64, dtype=torch.bfloat16)
    w = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.data_ptr() != w.data_ptr():
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        hotrain.functional.linear(x, w, method=method, grid=Grid(14, 14, prefix=1))
    key = 8 if method.draws else 0
    assert sum(kept.values()) - key == docs.low_rank.kept_bytes(method)


TOKENS, CHANNELS, DRAWS = 64, 32, 256


@pytest.mark.parametrize("name", hotrain.presets())
def test_a_gradient_is_biased_if_and_only_if_the_table_says_so(name: str, docs: Any) -> None:
    """Over N draws the squared error of the mean is v/N where nothing is lost on average, v a draw's variance.

    Its sum over 1024 and 2048 entries deviates by less than a fifth of that (entries of a product are correlated, but
    over many more than 50 directions): twice is far outside; what is rounded to nearest or cut off stays.
    """
    method = hotrain.preset(name)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, CHANNELS, generator=generator)
    w = torch.randn(CHANNELS, CHANNELS, generator=generator)
    g_y = torch.randn(TOKENS, CHANNELS, generator=generator)
    exact = {"g_x": g_y @ w, "g_w": g_y.T @ x}
    draws: dict[str, list[torch.Tensor]] = {"g_x": [], "g_w": []}
    for key in range(DRAWS):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        hotrain.functional.linear(a[None], b, method=method, key=key)[0].backward(g_y)
        assert a.grad is not None
        assert b.grad is not None
        draws["g_x"].append(a.grad)
        draws["g_w"].append(b.grad)
    for path, loss in (("g_x", docs.grad_input_loss(method)), ("g_w", docs.grad_weight_loss(method))):
        found = torch.stack(draws[path])
        error = (found.mean(0) - exact[path]).square().sum().item()
        noise = found.var(0).sum().item() / DRAWS
        rounding = 1e-12 * exact[path].square().sum().item()
        if loss == "nothing" or loss.endswith("nothing on average"):
            assert error <= 2 * noise + rounding, (path, loss)
        else:
            assert "biased" in loss
            assert error > 2 * noise + rounding, (path, loss)


def test_methods_with_kernels_are_those_that_the_document_names() -> None:
    text = (ROOT / "docs/kernels.md").read_text(encoding="utf-8")
    sentence = re.search(r"the methods (.*?) have kernels", text, re.DOTALL)
    assert sentence
    named = set(re.findall(r"`([\w-]+)`", sentence[1]))
    presets = {name: hotrain.preset(name) for name in hotrain.presets() if name != "exact"}
    by_kernels = {name for name, method in presets.items() if support._unsupported_method(method) is None}
    assert named == by_kernels, "the sentence of docs/kernels.md names others than kernels/support.py supports"
    limits = (ROOT / "docs/limitations.md").read_text(encoding="utf-8")
    missing = {name for name in presets.keys() - by_kernels if f"`{name}`" not in limits}
    assert not missing, "docs/limitations.md does not say that these have no kernels"


def test_biased_presets_of_the_readme(docs: Any) -> None:
    """README: HOT and HLA fix these rows, which makes g_w biased."""
    losses: dict[str, str] = {name: docs.grad_weight_loss(_of(name)) for name in hotrain.presets()}
    assert losses["hot"].startswith("**biased**")
    assert losses["hla"].startswith("**biased**")
    assert losses["hot-unbiased"].endswith("nothing on average")


def _of(name: str) -> Method:
    return hotrain.preset(name)
