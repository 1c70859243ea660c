"""The documents say what is so: commands run as written, generated parts are up to date, names and files exist."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hotrain

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
README = ROOT / "README.md"
# Named in docs/map.md as places for things to come; when one is there, its line has to move.
PLANNED = {
    "recipes/hotrain_recipes/simclr.py",
    "recipes/hotrain_recipes/bert.py",
}


def blocks(document: Path, language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands(language: str, prompt: str = "") -> Iterator[list[str]]:
    """The command lines of every document's blocks of that language, split, without their comments."""
    for document in DOCUMENTS:
        for block in blocks(document, language):
            for line in block.splitlines():
                words = shlex.split(line.removeprefix(prompt), comments=True)
                if words:
                    yield words


def test_readme_python_blocks_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = blocks(README, "python")
    assert len(source) == 3
    names: dict[str, object] = {}
    for block in source:
        exec(compile(block, str(README), "exec"), names)
    printed = capsys.readouterr().out
    model = names["model"]
    assert isinstance(model, importlib.import_module("torch").nn.Module)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    for said in ("49 layers converted to hq8", "exact: head", "hotrain linear", "hotrain norm"):
        assert said in printed, f"README's example no longer prints {said!r}"


@pytest.mark.slow
def test_shell_commands_run_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from hotrain.cli.main import app

    monkeypatch.chdir(tmp_path)
    ran = 0
    for words in commands("bash"):
        if words[0] == "hotrain":
            done = CliRunner().invoke(app, words[1:])
            assert done.exit_code == 0, f"{shlex.join(words)}\n{done.output}\n{done.exception!r}"
            ran += 1
    assert ran == 7
    assert (tmp_path / "calibration.json").is_file(), "README says where calibrate writes"


def test_shell_blocks_hold_make_and_hotrain_only() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    used = [words for words in commands("bash") if words[0] != "hotrain"]
    assert [words[0] for words in used] == ["make"] * len(used), "a command here cannot be checked"
    in_text = {t for path in DOCUMENTS for t in re.findall(r"`make ([a-z -]+)`", path.read_text(encoding="utf-8"))}
    named = {t for words in used for t in words[1:]} | {t for text in in_text for t in text.split()}
    assert {"demo", "test", "setup", "check", "docs", "bench"} <= named
    assert named <= targets, f"no such target: {named - targets}"


def test_commands_that_need_data_parse() -> None:
    import hotrain_recipes
    import typer

    from hotrain.cli.main import app
    from hotrain.train import parse_method

    group = typer.main.get_command(app)
    found = list(commands("console", prompt="$ "))
    assert found
    for _, verb, *arguments in found:
        command = group.commands[verb]  # type: ignore[attr-defined]
        options = command.make_context(verb, arguments).params
        assert options["recipe"] in hotrain_recipes.all()
        for text in (options.get("methods") or options.get("method") or "exact").split(","):
            name, overrides = parse_method(text)
            hotrain.preset(name, **overrides)


@pytest.fixture(scope="module")
def docs() -> Iterator[object]:
    """tools/docs.py as a module."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        yield importlib.import_module("docs")
    finally:
        sys.path.remove(str(ROOT / "tools"))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_generated_parts_are_up_to_date(path: Path, docs: object) -> None:
    text = path.read_text(encoding="utf-8")
    assert docs.rewritten(text, path.name) == text, "run make docs"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- generated: presets -->\n", "do not pair up"),  # no end: everything after it would be eaten
        ("<!-- /generated -->\n", "do not pair up"),
        ("<!-- generated: nonsense -->\n<!-- /generated -->\n", "unknown generated part 'nonsense'"),
    ],
)
def test_bad_markers_are_refused(text: str, message: str, docs: object) -> None:
    with pytest.raises(ValueError, match=message):
        docs.rewritten(text, "a document")  # type: ignore[attr-defined]


def test_generated_text_replaces_the_old_and_nothing_else(docs: object) -> None:
    text = "before\n<!-- generated: row-orders -->\nstale\n<!-- /generated -->\nafter\n"
    new = docs.rewritten(text)  # type: ignore[attr-defined]
    assert new.startswith("before\n<!-- generated: row-orders -->\n")
    assert new.endswith("<!-- /generated -->\nafter\n")
    assert "stale" not in new
    assert "0 8 2 10 12 3 14 11 4 1 15 6 9 7 13 5" in new  # the canonical order of the algorithms


def test_every_file_has_a_line_in_the_map_and_no_line_a_missing_file() -> None:
    text = (ROOT / "docs/map.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| `((?:src|recipes|tools|benchmarks)/[\w/.]+)` \| (.+) \|$", text, re.MULTILINE)
    named = [name for name, _ in lines]
    assert len(named) == len(set(named)), "a file has two lines"
    folders = ("src/hotrain", "recipes/hotrain_recipes", "tools", "benchmarks")
    on_disk = {str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py")}
    assert on_disk - set(named) == set(), "files without a line: run make docs, or name their folder in docs/map.md"
    assert set(named) - on_disk == set(), "lines of missing files"
    assert all(len(what) > 10 for _, what in lines)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_links_that_documents_name_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    links = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    missing = [target for target in links if target and not (path.parent / target).exists()]
    named = re.findall(r"`((?:src|recipes|tests|tools|docs|benchmarks)/[\w/.-]*)`", text)
    missing += [name for name in named if name not in PLANNED and not (ROOT / name).exists()]
    assert missing == []
    assert [name for name in PLANNED if (ROOT / name).exists()] == [], "it is there now: give it its own line"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_names_that_documents_use_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for dotted in sorted(set(re.findall(r"\bhotrain((?:\.[A-Za-z_]\w*)+)", text)) - {".egg"}):
        value: object = hotrain
        for part in dotted.split(".")[1:]:
            if not hasattr(value, part):
                importlib.import_module(f"{value.__name__}.{part}")  # type: ignore[attr-defined]
            value = getattr(value, part)


def test_presets_of_the_changelog_are_those_of_the_code() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    missing = [name for name in hotrain.presets() if not re.search(rf"(?<![\w-]){name}(?![\w-])", text)]
    assert missing == []


def test_versions_and_licence_agree() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {hotrain.__version__}\n" in citation
    assert "\nlicense: Apache-2.0\n" in citation
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in licence
    assert "Version 2.0, January 2004" in licence
    assert "END OF TERMS AND CONDITIONS" in licence


def our_files() -> list[Path]:
    """The text files that are, or are about to be, in the repository; outside of git, all but ignored folders."""
    try:
        listed = subprocess.run(
            ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        paths = [ROOT / name for name in listed]
    except (OSError, subprocess.CalledProcessError):
        skipped = {"runs", "data", "build", "dist", "__pycache__"}
        paths = [
            path
            for path in ROOT.rglob("*")
            if not any(part in skipped or part.startswith(".") for part in path.relative_to(ROOT).parts)
        ]
    endings = {".py", ".md", ".toml", ".txt", ".cff", ".jsonl", ".json", ".html", ".yml", ".yaml", ""}
    return [path for path in paths if path.is_file() and path.suffix in endings]


@pytest.mark.parametrize(
    ("what", "pattern", "example"),
    [
        ("a machine's path", r"(?<![\w.~])/(?:home|Users|root|work|mnt|workspace)/\w", "/{}/me".format("home")),
        (
            "a registry's host",
            r"(?:pypi|pythonhosted|download\.pytorch)\.(?:org|com)",
            "pypi{}org".format("."),
        ),
        ("a registry's option", r"[a-z-]+index[-]url", "--extra-index{}url".format("-")),
        ("an address with a port", r"https?://[\w.-]+:\d{2,5}", "http:{}10.0.0.1:80".format("//")),
    ],
    ids=("path", "host", "option", "address"),
)
def test_no_trace_of_a_machine(what: str, pattern: str, example: str) -> None:
    assert re.search(pattern, example)
    files = our_files()
    assert len(files) > 100
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert found == [], f"{what} has no place in the repository"
