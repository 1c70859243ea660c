"""The documents say what is so: commands run as written, generated parts are up to date, names and files exist."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hotrain

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
README = ROOT / "README.md"
DOCS = {path.name: path for path in DOCUMENTS}
LINES = {"README.md": 150, "performance.md": 300, "map.md": 150}


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


@pytest.mark.slow
def test_readme_python_blocks_run_in_order_and_print_what_it_shows(
    timm: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first block with a ViT of one narrow block in the place of ViT-B, whose graphs take minutes to compile."""
    first, second = blocks(README, "python")
    create_model = timm.create_model

    def small(name: str, **options: object) -> object:
        return create_model(name, depth=1, embed_dim=64, num_heads=2, patch_size=32, **options)

    names: dict[str, Any] = {}
    with monkeypatch.context() as patch:
        patch.setattr(timm, "create_model", small)
        exec(compile(first, str(README), "exec"), names)
    assert names["loss"].isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in names["model"].parameters())
    assert names["fast"].report.converted, "README: hotrain.compile converts"
    capsys.readouterr()
    exec(compile(second, str(README), "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    shown = [line for line in blocks(README, "text")[0].splitlines() if line.strip() != "…"]
    assert len(shown) >= 3
    assert [line for line in shown if line not in printed] == [], "README shows what the report no longer prints"


@pytest.mark.slow
def test_shell_commands_run_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from hotrain.cli.main import app

    monkeypatch.chdir(tmp_path)
    ran = set()
    for words in commands("bash"):
        if words[0] == "hotrain":
            done = CliRunner().invoke(app, words[1:])
            assert done.exit_code == 0, f"{shlex.join(words)}\n{done.output}\n{done.exception!r}"
            ran.add(words[1])
    assert ran == {"recipes", "train", "compare", "memory", "frontier", "cost", "fidelity", "calibrate"}
    assert (tmp_path / "calibration.json").is_file(), "docs/cli.md says where calibrate writes"


def test_shell_blocks_hold_make_and_hotrain_only() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    used = [words for words in commands("bash") if words[0] != "hotrain"]
    assert [words[0] for words in used] == ["make"] * len(used), "a command here cannot be checked"
    in_text = {t for path in DOCUMENTS for t in re.findall(r"`make ([a-z -]+)`", path.read_text(encoding="utf-8"))}
    named = {t for words in used for t in words[1:]} | {t for text in in_text for t in text.split()}
    assert {"demo", "test", "setup", "check", "docs", "bench"} <= named
    assert named <= targets, f"no such target: {named - targets}"


def test_extras_that_documents_install_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    named = {
        extra
        for path in DOCUMENTS
        for found in re.findall(r"pip install '\.\[([\w,]+)\]'", path.read_text(encoding="utf-8"))
        for extra in found.split(",")
    }
    assert named
    assert named <= set(extras)
    assert {"train", "text"} <= set(extras), "README says what they bring"
    for name, version in re.findall(
        r"(Python|PyTorch) (\d+\.\d+)", README.read_text(encoding="utf-8").split("## Use")[0]
    ):
        declared = project["requires-python"] if name == "Python" else "".join(project["dependencies"])
        if f"{name} {version}." not in README.read_text(encoding="utf-8"):  # of a record: a version in full
            assert f">={version}" in declared, f"README: {name} {version}"


@pytest.mark.usefixtures("timm")
def test_commands_that_need_data_or_time_parse() -> None:
    import hotrain_recipes
    import timm
    import typer
    from hotrain_study.studies import studies

    from hotrain.cli.main import app
    from hotrain.train import parse_method

    group = typer.main.get_command(app)
    found = list(commands("console", prompt="$ "))
    assert {words[1] for words in found} >= {"train", "compare", "frontier", "memory"}
    for name, verb, *arguments in found:
        assert name == "hotrain", "a command here cannot be checked"
        command = group.commands[verb]  # type: ignore[attr-defined]
        options = command.make_context(verb, arguments).params
        if verb == "study":
            assert options["name"] in {None, "RECIPE", *studies()}
        if verb in ("study", "prepare", "report"):
            continue
        subject = options.get("recipe") or options["model"]
        assert subject in hotrain_recipes.all() or ("model" in options and timm.is_model(subject)), subject
        for text in (options.get("methods") or options.get("method") or "exact").split(","):
            name, overrides = parse_method(text)
            hotrain.preset(name, **overrides)


@pytest.fixture(scope="module")
def docs() -> Iterator[Any]:
    """tools/docs.py as a module."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        yield importlib.import_module("docs")
    finally:
        sys.path.remove(str(ROOT / "tools"))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_generated_parts_are_up_to_date(path: Path, docs: Any) -> None:
    text = path.read_text(encoding="utf-8")
    assert docs.rewritten(text, path.name) == text, "run make docs"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- generated: presets -->\n", "do not pair up"),  # no end: everything after it would be eaten
        ("<!-- /generated -->\n", "do not pair up"),
        ("<!-- generated: nonsense -->\n<!-- /generated -->\n", "unknown generated part 'nonsense'"),
        ("<!-- figure: vit exact ms -->1\n", "'<!-- figure: … -->' and a '<!-- /figure -->' do not pair up"),
        ("<!-- figure: vit exact ms -->1<!-- /figure -->", "no record has it"),
        ("<!-- figure: vit exact m -->1<!-- /figure -->", "accepted is SUBJECT VARIANT ms"),
    ],
)
def test_bad_markers_are_refused(text: str, message: str, docs: Any) -> None:
    with pytest.raises(ValueError, match=message):
        docs.rewritten(text, "a document")  # type: ignore[attr-defined]


def test_generated_text_replaces_the_old_and_nothing_else(docs: Any) -> None:
    text = "before\n<!-- generated: row-orders -->\nstale\n<!-- /generated -->\nafter\n"
    new = docs.rewritten(text)  # type: ignore[attr-defined]
    assert new.startswith("before\n<!-- generated: row-orders -->\n")
    assert new.endswith("<!-- /generated -->\nafter\n")
    assert "stale" not in new
    assert "0 8 2 10 12 3 14 11 4 1 15 6 9 7 13 5" in new  # the canonical order of the algorithms


def test_every_module_says_what_it_is_and_every_folder_is_in_the_map(docs: Any) -> None:
    text = DOCS["map.md"].read_text(encoding="utf-8")
    for path in (ROOT / "src/hotrain").rglob("*.py"):
        assert len(docs.first_sentence(path)) > 10, path
    for path in (ROOT / "src/hotrain").iterdir():
        if path.suffix == ".py" and not path.name.startswith("_"):
            assert f"`{path.name}`" in text
        elif (path / "__init__.py").is_file():
            assert f"`{path.name}/`" in text


MOST_CHANGES_OF_FILE = (40, 60)  # forward, and backward


def test_a_step_of_a_block_is_the_one_in_the_map() -> None:
    """A reader follows it from file to file: the counts are printed where they are promised, and stay few."""
    done = subprocess.run([sys.executable, "tools/walk.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    (row,) = (line for line in done.stdout.splitlines() if "fc2, eager" in line)
    assert row in DOCS["map.md"].read_text(encoding="utf-8").splitlines()
    changes = [int(cell.split("/")[2]) for cell in row.split("|")[2:4]]
    assert all(found <= most for found, most in zip(changes, MOST_CHANGES_OF_FILE, strict=True))


def test_packages_that_list_their_modules_list_all() -> None:
    for package in ("compress", "transform"):
        folder = ROOT / "src/hotrain" / package
        said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
        missing = [
            p.stem for p in folder.glob("*.py") if p.stem != "__init__" and not re.search(rf"\b{p.stem}\b", said)
        ]
        assert missing == [], f"{package}/__init__.py does not name them"


@pytest.mark.parametrize("name", LINES)
def test_documents_stay_short(name: str) -> None:
    lines = len(DOCS[name].read_text(encoding="utf-8").splitlines())
    assert lines <= LINES[name], f"{name} has {lines} lines: move what is generated or a detail to another document"


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_links_and_headings_that_documents_name_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    links = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    missing = []
    for link in links:
        target, _, anchor = link.partition("#")
        file = path.parent / target if target else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            missing.append(link)
    named = re.findall(r"`((?:src|recipes|tests|tools|docs|benchmarks)/[\w/.-]*)`", text)
    missing += [name for name in named if not (ROOT / name).exists()]
    assert missing == []


def test_documents_and_headings_that_code_points_to_exist() -> None:
    found = 0
    for folder in ("src", "recipes", "benchmarks", "tools"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".json", ".jsonl"):
                for name, heading in re.findall(
                    r'docs/(\w+\.md)(?:`?, \\?"([\w ]+)\\?")?', path.read_text(encoding="utf-8")
                ):
                    found += 1
                    assert name in DOCS, f"{path.relative_to(ROOT)}: docs/{name}"
                    assert not heading or heading.lower().replace(" ", "-") in anchors(DOCS[name]), (
                        f"{path.relative_to(ROOT)}: no heading {heading!r} in docs/{name}"
                    )
    assert found > 5


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
@pytest.mark.usefixtures("timm")  # with it transformers and Lightning import beside a CPU-only PyTorch
def test_names_that_documents_use_exist(path: Path) -> None:
    text = re.sub(r"^::: .*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)  # tests/test_site.py
    for dotted in sorted(set(re.findall(r"\bhotrain((?:\.[A-Za-z_]\w*)+)", text)) - {".egg"}):
        value: object = hotrain
        for part in dotted.split(".")[1:]:
            if not hasattr(value, part):
                try:
                    importlib.import_module(f"{value.__name__}.{part}")  # type: ignore[attr-defined]
                except ImportError as error:
                    if "is not installed; pip install" not in str(error):
                        raise
                    break  # an integration whose library is missing here
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


def test_no_line_begins_with_the_comment_of_a_figure() -> None:
    """Markdown takes such a line for HTML and ends the paragraph."""
    for document in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        lines = document.read_text(encoding="utf-8").splitlines()
        assert [line for line in lines if line.startswith("<!-- figure")] == [], document.name
