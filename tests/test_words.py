"""Documents, docstrings, comments and messages use the words of the field, and docstrings have one style.

What is listed here as clean stays clean; a room that is cleaned joins the list.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# private word → the field's
WORDS = {
    r"bears?\b(?! in mind)|bore\b|borne": "tolerates",
    r"serves?\b|served\b": "supports, supported",
    r"walk(s|ed|ing)?\b": "goes through, a loop",
    r"aside\b": "disabled",
    r"settl(e|es|ed|ing)\b": "corrects, corrected; the amax of the last step",
    r"lies?\b|lay\b": "is, is stored; memory layout",
    r"kin\b": "similar",
    r"handed\b|hand(s|ing)? (over|back|to)\b": "passed, returned",
    r"held against\b": "compared with",
    r"nobody has thought through": "unsupported",
    r"stands? (in|between|behind|for|beside|above|below)\b|stood\b": "is",
    r"(a|one) scale a (token|row)\b": "a per-token scale, a per-row scale",
    r"ms a step\b": "ms/step",
}
# Words that read like a private one and are none, with what makes them so.
# (`lay:` and `served:` document arguments of that name, `bool served` declares one.)
FIELD = re.compile(
    r"\b(Hadamard walks|self-serv\w+|underl(ies|ay)|real lies|bool served)\b|^ +(lay|served):", re.MULTILINE
)
FORBIDDEN = re.compile("|".join(rf"\b(?:{word})" for word in WORDS), re.IGNORECASE)

DOCUMENTS = ["README.md", "CONTRIBUTING.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]
# Files and folders of Python whose docstrings, comments and messages are clean.
CLEAN = ["tools", "recipes", "benchmarks", "src/hotrain", "examples", "tests"]
# Those whose docstrings have the sections of Google's style, which documentation tools read.
STYLED = ["tools", "recipes", "benchmarks", "src/hotrain"]


def python_files(rooms: list[str]) -> list[Path]:
    """The files of a list of files and folders, without this one, which names the words."""
    found = []
    for room in rooms:
        path = ROOT / room
        assert path.exists(), f"{room} is not there any more: update the list"
        found += [path] if path.is_file() else sorted(path.rglob("*.py"))
    return [path for path in found if path != Path(__file__)]


def without_code(text: str) -> str:
    """Text without code spans, blocks, links' addresses and what is generated (that is checked where it comes from)."""
    text = re.sub(r"^<!-- generated.*?^<!-- /generated -->$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(`+).*?\1|\]\([^)]*\)", "", text)


def said(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings, comments, messages of a Python file, with their line."""
    source = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def private_words(text: str) -> list[str]:
    """The private words of a text, each with the field's."""
    found = []
    for match in FORBIDDEN.finditer(FIELD.sub("", without_code(text))):
        word = next(word for word in WORDS if re.match(word, match[0], re.IGNORECASE))
        found.append(f"{match[0]} ({WORDS[word]})")
    return found


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_use_the_words_of_the_field(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert private_words(text) == []


@pytest.mark.parametrize("path", python_files(CLEAN), ids=lambda path: str(path.relative_to(ROOT)))
def test_clean_code_uses_the_words_of_the_field(path: Path) -> None:
    found = [f"{path.name}:{line}: {word}" for line, text in said(path) for word in private_words(text)]
    assert found == []


@pytest.mark.parametrize(
    "text",
    ["what backward bears", "served by operators", "the walk", "modes put aside", "a tensor lies in rows", "ms a step"],
)
def test_private_words_are_found(text: str) -> None:
    assert private_words(text)


@pytest.mark.parametrize(
    "text", ["`served`", "relies on", "layout", "observed", "sidewalk", "```\nserved\n```", "handle"]
)
def test_other_words_are_not(text: str) -> None:
    assert private_words(text) == []


SECTIONS = ("Args:", "Returns:", "Yields:", "Raises:", "Example:")


def style_faults(docstring: str, arguments: list[str]) -> list[str]:
    """Where a docstring departs from Google's style: other styles' marks, arguments described outside of ``Args:``."""
    faults = re.findall(r"^\s*:(?:param|returns?|raises|type)\b.*$|^\s*-{3,}$", docstring, re.MULTILINE)
    section = ""
    for line in docstring.splitlines():
        if line.strip() in SECTIONS:
            section = line.strip()
        elif line and not line.startswith(" "):
            section = ""
        name = re.match(r"\s*(?:\w+, )*(\w+):\s+\S", line)
        if name and name[1] in arguments and section != "Args:":
            faults.append(line)
        if re.match(r"\s*Raises \w+(?:Error|Exception)\b", line):
            faults.append(line)
    return faults


@pytest.mark.parametrize("path", python_files(STYLED), ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_have_one_style(path: Path) -> None:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (docstring := ast.get_docstring(node)):
            arguments = [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
            found += [f"{path.name}:{node.lineno}: {fault}" for fault in style_faults(docstring, arguments)]
    assert found == []


@pytest.mark.parametrize(
    ("docstring", "faults"),
    [
        ("Sum.\n\nArgs:\n    x: (T, I).\n\nRaises:\n    ValueError: x is empty.", 0),
        ("Sum.\n\nx: (T, I).\nRaises ValueError for an empty x.", 2),  # prose that no tool reads
        ("Sum.\n\n:param x: (T, I)", 1),
        ("Sum.\n\nParameters\n----------\nx : array", 1),
    ],
)
def test_the_style_is_told_from_others(docstring: str, faults: int) -> None:
    assert len(style_faults(docstring, ["x"])) == faults
