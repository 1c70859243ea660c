"""A hook of MkDocs: what the documents name is linked on the site, and what is outside of ``docs/`` gets a page.

In the repository a document names a file in a code span (`src/hotrain/backward.py`) and links CONTRIBUTING.md beside
its folder. On the site both are links: to a page with the file's source, and to the page of that document. Names of
the library (`hotrain.fit`) lead to the API reference. A document that is called by its file (``maths.md``) has its
name in the navigation, Markdown within ``<details>`` is rendered, and a number of a table does not break before its
unit.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
BESIDE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LANGUAGES = {".py": "python", ".toml": "toml", ".md": "markdown", ".json": "json", "Makefile": "make"}
FOLDERS = ("src", "recipes", "tests", "tools", "benchmarks", "examples")

_FENCE = r"^(?P<fence>`{3,}).*?^(?P=fence)$"
_LINK = r"\[(?P<text>(?:`[^`]*`|[^\[\]`])*)\]\((?P<target>[^)\s]+)\)"
_SPAN = r"(?<!`)`(?P<span>[^`\n]+)`(?!`)"
_BARE = r"(?<![\w/])docs/(?P<bare>\w+)\.md"
_PARTS = re.compile(rf"{_FENCE}|^(?P<heading>\#[^\n]*)$|{_LINK}|{_SPAN}|{_BARE}", re.DOTALL | re.MULTILINE)
_DOCUMENT = re.compile(r"`?(?:docs/)?(\w+\.md)`?")
_ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
# spaces within a number, and before it where it has a name
_HELD = re.compile(r" (?=± )|(?<=[±≤≥<>]) (?=[\d.])|(?<=\d) (?=(?:[KMG]iB|ms|[×%])(?![\w/]))|(?<=\bg_\w) (?=[<>\d])")
_NAME = re.compile(r"(hotrain\.\w+)(?:\(.*\))?")
_ELSEWHERE = {"hotrain.presets": "hotrain.presets.presets"}  # a function, and a module of its name


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents beside ``docs/``, and a page of each source file that a document names."""
    for name, uri in BESIDE.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text(encoding="utf-8")))
    named = {path for file in files.documentation_pages() for path in _named(file)}
    for path in sorted(named):
        page = File.generated(config, _source_uri(path), content=_source(path))
        page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn what a document names into links."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    public, titles = _public(), _titles(config.nav)

    def linked(match: re.Match[str]) -> str:
        if match["target"]:
            return f"[{_called(match['text'], titles)}]({_target(match['target'], uri)})"
        document = f"{match['bare']}.md" if match["bare"] else (match["span"] or "").removeprefix("docs/")
        if document in titles:
            return f"[{titles[document]}]({document})"
        span = match["span"]
        if span and _is_file(span):
            return f"[`{span}`]({_source_uri(span)})"
        name = span and _NAME.fullmatch(span)
        if name and name[1].removeprefix("hotrain.") in public and uri != "api.md":
            return f"[`{span}`][{_ELSEWHERE.get(name[1], name[1])}]"
        return match[0]

    markdown = _ROW.sub(lambda row: _HELD.sub("\N{NO-BREAK SPACE}", row[0]), markdown)
    return _PARTS.sub(linked, markdown.replace("\n<details>", "\n<details markdown>"))


def _titles(nav: Any) -> dict[str, str]:
    """Document → its name in the navigation."""
    found: dict[str, str] = {}
    for entry in nav:
        for title, below in entry.items():
            found |= {below: title} if isinstance(below, str) else _titles(below)
    return found


def _called(text: str, titles: dict[str, str]) -> str:
    """The text of a link: where it is the name of a file, what the navigation calls that document."""
    document = _DOCUMENT.fullmatch(text)
    return titles.get(document[1], text) if document else text


@cache
def _public() -> frozenset[str]:
    """The names in ``__all__``, read without importing PyTorch."""
    tree = ast.parse((ROOT / "src/hotrain/__init__.py").read_text(encoding="utf-8"))
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    return next(frozenset(ast.literal_eval(n.value)) for n in assigned if ast.unparse(n.targets[0]) == "__all__")


def _named(file: File) -> Iterator[str]:
    """The source files that a document names or links, as paths in the repository."""
    for match in _PARTS.finditer(file.content_string):
        path = match["span"] or _in_repository(match["target"] or "", file.src_uri)
        if _is_file(path):
            yield path


def _is_file(path: str) -> bool:
    """Whether a path is one of a source file: what is in ``docs/`` is on the site anyway."""
    return path.startswith(tuple(f"{folder}/" for folder in FOLDERS)) and (ROOT / path).is_file()


def _in_repository(target: str, uri: str) -> str:
    """The path in the repository that a link of a document leads to."""
    folder = "" if uri in BESIDE.values() else "docs"
    return posixpath.normpath(posixpath.join(folder, target.partition("#")[0]))


def _target(target: str, uri: str) -> str:
    """Where a link leads on the site; a link that leads nowhere stays, and ends the build."""
    if "://" in target or target.startswith("#"):
        return target
    path, (_, mark, anchor) = _in_repository(target, uri), target.partition("#")
    if path in BESIDE:
        return BESIDE[path] + mark + anchor
    if path.startswith("docs/"):
        return path.removeprefix("docs/") + mark + anchor
    return _source_uri(path) if _is_file(path) else target


def _source_uri(path: str) -> str:
    return f"source/{path}.md"


def _source(path: str) -> str:
    """A page with the text of a file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall(r"`+", text))])
    name = Path(path).name
    language = LANGUAGES.get(name, LANGUAGES.get(Path(path).suffix, "text"))
    head = "---\nsearch:\n  exclude: true\nhide: [toc]\n---\n"
    return f'{head}\n# {path}\n\n{fence}{language} linenums="1"\n{text}\n{fence}\n'
