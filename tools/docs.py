"""Rewrite the generated parts of the documents from the code and from the records under benchmarks/results.

``make docs`` runs it; ``python tools/docs.py --check`` writes nothing and exits 1 when a part is out of date. A part is
between ``<!-- generated: NAME ARGUMENTS -->`` and ``<!-- /generated -->``; `PARTS` says which there are. A number in a
sentence is between ``<!-- figure: SUBJECT VARIANT FIELD -->`` and ``<!-- /figure -->``, as `front.figure` reads it.
"""

from __future__ import annotations

import argparse
import ast
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import drawings
import floors
import formats_table
import front
import low_rank
import records
import studies

import hotrain
from hotrain.layer import Config
from hotrain.method import Method
from hotrain.transform.rows import Rows, order
from hotrain.transform.tokens import Grid

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/hotrain"
RECIPES = "recipes/hotrain_recipes"
LENGTHS: tuple[tuple[int, Grid | None], ...] = (
    (1, None),
    (7, None),
    (49, None),
    (49, Grid(7, 7)),
    (64, None),
    (64, Grid(8, 8)),
    (196, None),
    (196, Grid(14, 14)),
    (197, None),
    (197, Grid(14, 14, prefix=1)),
    (577, None),
    (577, Grid(24, 24, prefix=1)),
)

_PART = re.compile(r"^(<!-- generated: ([^>\n]*) -->\n)(.*?)^(<!-- /generated -->)$", re.DOTALL | re.MULTILINE)
_MARKER = re.compile(r"^<!-- /?generated.*-->$", re.MULTILINE)
_FIGURE = re.compile(r"(<!-- figure: ([^>\n]*) -->)([^<\n]*)(<!-- /figure -->)")
_FIGURE_MARKER = re.compile(r"<!-- /?figure")


def documents() -> list[Path]:
    """The documents that may hold generated parts."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def rewritten(text: str, where: str = "document") -> str:
    """`text` with every generated part and every figure made anew.

    Raises:
        ValueError: a part or a figure is unknown, or markers do not pair up; the message names `where`.
    """
    if len(_MARKER.findall(text)) != 2 * len(_PART.findall(text)):
        raise ValueError(f"{where}: a '<!-- generated: … -->' and a '<!-- /generated -->' do not pair up")
    if len(_FIGURE_MARKER.findall(text)) != 2 * len(_FIGURE.findall(text)):
        raise ValueError(f"{where}: a '<!-- figure: … -->' and a '<!-- /figure -->' do not pair up on one line")

    def part(match: re.Match[str]) -> str:
        name, *arguments = match[2].split()
        if name not in PARTS:
            raise ValueError(f"{where}: unknown generated part {name!r}; known: {', '.join(PARTS)}")
        return f"{match[1]}{PARTS[name](*arguments).strip()}\n{match[4]}"

    def number(match: re.Match[str]) -> str:
        try:
            return f"{match[1]}{front.figure(match[2])}{match[4]}"
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    return _FIGURE.sub(number, _PART.sub(part, text))


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def presets() -> str:
    """What each preset computes, loses and keeps."""
    rows = []
    for name in hotrain.presets():
        method = hotrain.preset(name)
        formula = str(method).removeprefix(name).strip().replace("  ", " · ")
        kept = f"{low_rank.kept(method):.3f}"
        if method.memory == "block":
            kept += "; 0 where it is shared"
        rows.append([f"`{name}`", formula, grad_input_loss(method), grad_weight_loss(method), kept])
    return table(["preset", "as it prints", "g_x loses", "g_w loses", "x kept"], rows)


def grad_input_loss(method: Method) -> str:
    """What g_x loses, and whether that is nothing on average."""
    path, rows = method.grad_input, method.grad_weight
    if path.transform == "lowpass":
        return f"**biased**: {rows.tile - rows.rank} of {rows.tile} rows"
    if path.bits is None:
        return "nothing"
    what = "4-bit powers of two" if path.number == "luq" else f"int{path.bits} rounding"
    if path.number == "luq":
        return f"{what}; biased through w's clip and rounding"
    biased = [o for o, r in (("g_y", path.rounding), ("w", path.weight_rounding)) if r != "stochastic"]
    return f"{what}; " + (f"biased through {' and '.join(biased)}" if biased else "nothing on average")


def grad_weight_loss(method: Method) -> str:
    """What g_w loses, and whether that is nothing on average."""
    path, saved = method.grad_weight, method.saved
    lost, biased = [], []
    if path.rank < path.tile and not path.sampled:
        return f"**biased**: {path.tile - path.rank} of {path.tile} rows" + (
            f", int{path.bits} rounding" if path.bits else ""
        )
    if path.drop:
        return f"**biased**: {path.drop:.0%} of g_y's entries"
    if path.sampled:
        lost.append(f"{path.tile - path.rank} of {path.tile} rows, drawn")
    if path.share < 1:
        lost.append(f"{1 - path.share:.0%} of the rows, drawn by norm")
    if path.bits is not None:
        lost.append("4-bit powers of two" if path.number == "luq" else f"int{path.bits} rounding")
        biased += ["g_y"] if path.number == "int" and path.rounding != "stochastic" else []
    if saved.bits is not None:
        lost.append(f"x in int{saved.bits}")
        biased += ["x"] if saved.rounding != "stochastic" else []
    if not lost:
        return "nothing"
    return ", ".join(lost) + "; " + (f"biased through {' and '.join(biased)}" if biased else "nothing on average")


def lengths() -> str:
    """Where the tiles of each length are, and how many rows are kept, for one sample and for 128."""
    method = hotrain.preset("hot-unbiased")
    rows = []
    for tokens, grid in LENGTHS:
        place = "–" if grid is None else f"{grid.height}×{grid.width}" + (f" + {grid.prefix}" if grid.prefix else "")
        one, many = (Config(method, grid).layout((samples, tokens)) for samples in (1, 128))
        flat = "in one line" if many.samples == 1 else "each by itself"
        first = f"{one.rows} ({one.kept_fraction:.2f})"
        batch = f"{many.rows} ({many.kept_fraction:.2f})"
        rows.append([tokens, place, one.square, one.line, one.dense, first, flat, batch])
    headers = ["tokens", "grid + prefix", "4×4 tiles", "16-token tiles", "dense", "rows kept of one sample"]
    return table([*headers, "128 samples", "rows kept of 128"], rows)


def row_orders() -> str:
    """The natural row indices of H₁₆ from low to high, and of H₆₄ those that LBP-WHT keeps."""
    rank = hotrain.preset("lbp-wht").grad_weight.rank
    lists = [
        ["H₁₆, `lp_l1` (4×4 tile)", order(16, "lp_l1")],
        ["H₁₆, `sequency`", order(16, "sequency")],
        [f"H₆₄, `lp_l1` (8×8 tile), the first {rank}", order(64, "lp_l1")[:rank]],
    ]
    return table(["rows", "from low to high"], [[name, " ".join(map(str, indices))] for name, indices in lists])


def sampling() -> str:
    """Splits of 8 rows of 16 into fixed and drawn ones."""
    rows = []
    for fixed, sampled in ((8, 0), (6, 2), (4, 4), (0, 8)):
        split = Rows(16, 8, sampled, "sequency")
        m = split.tile - fixed
        if not sampled:
            rows.append([f"{fixed}+0", m, "–", "–", "–", "squared bias ‖Σ_R M‖², the same in every step"])
            continue
        variance = f"{m * (m - sampled) / (sampled * (m - 1)):.2f} · Σ_R ‖M − M̄‖²"
        walk = m // math.gcd(m, sampled)
        rows.append([f"{fixed}+{sampled}", m, sampled, f"√{m / sampled:g} = {split.gain:.3f}", walk, variance])
    headers = ["fixed + drawn", "m left", "s drawn", "gain", "tiles to cover the tail", "error of one tile"]
    return table(headers, rows)


def recipes() -> str:
    """The recipes, a row a function, with the choices that its name offers."""
    import hotrain_recipes

    grouped: dict[object, list[hotrain_recipes.Recipe]] = {}
    for recipe in hotrain_recipes.all().values():
        grouped.setdefault(recipe.function, []).append(recipe)
    rows = []
    for members in grouped.values():
        first = members[0]
        pattern, choices = first.name, []
        for key, value in first.arguments.items():
            pattern = pattern.replace(value, "{" + key + "}", 1)
            values = dict.fromkeys(recipe.arguments[key] for recipe in members)
            choices.append(f"{key}: {', '.join(values)}")
        rows.append([first.family, f"`{pattern}`", "; ".join(choices) or "–", len(members)])
    total = sum(len(members) for members in grouped.values())
    return table(["family", "recipe", "choices", "recipes"], [*rows, ["", "", "", f"**{total}**"]])


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring.

    Raises:
        ValueError: the module has none.
    """
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not docstring:
        raise ValueError(f"{path.relative_to(ROOT)} has no docstring: say in one sentence what the file is")
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z0-9])", paragraph)[0]
    return sentence.rstrip(":").replace("``", "`").replace("|", "\\|")


def rooms() -> str:
    """What each module and folder is, from its docstring, and what it imports, from its import statements.

    In italics what is imported later or for types only; a folder says how many files it has.
    """
    found: dict[str, dict[str, bool]] = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        if parts[0] not in ("__init__", "_version"):
            _note_imports(found.setdefault(parts[0], {}), path, parts)
    for path in sorted((ROOT / RECIPES).glob("*.py")):
        _note_imports(found.setdefault("hotrain_recipes", {}), path, ("hotrain_recipes", path.stem))
    rows = []
    for room, used in _by_depth(found):
        names = [name if at_once else f"*{name}*" for name, at_once in sorted(used.items()) if name != room]
        folder = ROOT / RECIPES if room == "hotrain_recipes" else ROOT / PACKAGE / room
        count = len(list(folder.glob("*.py")))
        name = f"`{room}/` ({count})" if count else f"`{room}.py`"
        what = first_sentence(folder / "__init__.py" if count else folder.with_suffix(".py"))
        rows.append([name, what, ", ".join(names) or "–"])
    return table(["module, or folder (files)", "what it is", "imports"], rows)


def _by_depth(found: dict[str, dict[str, bool]]) -> list[tuple[str, dict[str, bool]]]:
    """Rooms in the order of the data flow: each after what it imports at once."""
    depth = dict.fromkeys(found, 0)
    for _ in found:
        for room, used in found.items():
            below = [depth[other] for other, at_once in used.items() if at_once and other in found and other != room]
            depth[room] = max(below, default=-1) + 1
    return sorted(found.items(), key=lambda item: (depth[item[0]], item[0]))


def _note_imports(used: dict[str, bool], path: Path, parts: tuple[str, ...]) -> None:
    """Add the rooms that one file imports, and whether at once; ``hotrain`` for the public names of the package."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    at_once = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        for room in _rooms_of(node, parts):
            used[room] = used.get(room, False) or id(node) in at_once


def _rooms_of(node: ast.AST, parts: tuple[str, ...]) -> Iterator[str]:
    """The rooms that a statement of the file `parts` imports."""
    targets: list[list[str]] = []
    if isinstance(node, ast.ImportFrom):
        base = ["hotrain", *parts[: len(parts) - node.level]] if node.level else []
        base += node.module.split(".") if node.module else []
        targets = [[*base, alias.name] for alias in node.names]
    elif isinstance(node, ast.Import):
        targets = [alias.name.split(".") for alias in node.names]
    for target in targets:
        if target[0] == "hotrain_recipes":
            yield "hotrain_recipes"
        elif target[0] == "hotrain":
            inner = target[1] if len(target) > 1 else ""
            is_room = (ROOT / PACKAGE / inner).is_dir() or (ROOT / PACKAGE / f"{inner}.py").is_file()
            if not inner or inner != "_version":
                yield inner if inner and is_room else "hotrain"


FIGURES = "figures"


def _figure_name(subject: str) -> str:
    return f"step_peak_{subject.replace('/', '_')}.svg"


def step_figures() -> str:
    """Peak memory against step time, a figure a subject, and which variants no other beats."""
    from hotrain.plans import undominated

    lines = []
    for subject, points in records.step_points().items():
        best = [f"`{name}`" for name in undominated(points)]
        line = " (dashed line)" if len(best) > 1 else ""
        lines.append(f"![Peak memory against step time: {subject}]({FIGURES}/{_figure_name(subject)})")
        lines.append(f"{subject}: no other variant takes both less memory and less time than {', '.join(best)}{line}.")
    return (
        "\n\n".join(lines)
        or f"*No run with `{records.SMALLER}` is recorded yet: `make docs` draws the figures of one.*"
    )


def example(name: str) -> str:
    """A file of ``examples/``, as a block of Python."""
    text = (ROOT / "examples" / name).read_text(encoding="utf-8")
    return f"```python\n{text.strip()}\n```"


def figures() -> dict[Path, str]:
    """The files that documents embed, and what is in them."""
    from hotrain.plotting.steps import draw_steps

    folder = ROOT / "docs" / FIGURES
    steps = {_figure_name(subject): draw_steps(points, subject) for subject, points in records.step_points().items()}
    drawn = {f"{name}.svg": draw() for name, draw in drawings.ALL.items()} | {"low_rank.svg": low_rank.curve()}
    return {folder / name: text for name, text in {**steps, **drawn}.items()}


PARTS: dict[str, Callable[..., str]] = {
    "headline": front.headline,
    "pays": front.pays,
    "pays-all": front.every_model,
    "without-graphs": front.without_graphs,
    "preset-lines": front.presets,
    "presets": presets,
    "lengths": lengths,
    "row-orders": row_orders,
    "sampling": sampling,
    "recipes": recipes,
    "rooms": rooms,
    "layers": records.layers,
    "targets": records.targets,
    "gpu-layers": records.gpu_layers,
    "floor": records.floor,
    "floors": floors.table,
    "kernels": records.kernels,
    "step-targets": records.step_targets,
    "steps": records.steps,
    "zoo": records.zoo,
    "optimizer": records.optimizer,
    "step-figures": step_figures,
    "curves": records.curves,
    "shared-inputs": records.shared_inputs,
    "noise": records.noise,
    "variance": records.variance,
    "low-rank": records.low_rank,
    "compatibility": records.compatibility,
    "timm-script": records.timm_script,
    "newcomer": records.newcomer,
    "scaling": records.scaling,
    "examples": records.examples,
    "campaign": records.campaign,
    "example": example,
    "accuracy": records.accuracy,
    "evidence": records.evidence,
    "study": studies.study,
    "study-head": studies.head,
    "half": low_rank.table,
    "half-answer": low_rank.answer,
    "formats": formats_table.operators,
    "formats-together": formats_table.together,
    "rules": formats_table.rule_book,
}


def main() -> int:
    """Write, or with ``--check`` only compare; returns the exit status."""
    parser = argparse.ArgumentParser(description="Rewrite the generated parts of the documents.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a part is out of date")
    check = parser.parse_args().check
    wanted = {path: rewritten(path.read_text(encoding="utf-8"), path.name) for path in documents()} | figures()
    stale = 0
    for path, new in wanted.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != new:
            stale += 1
            print(f"{path.relative_to(ROOT)} {'is out of date: run make docs' if check else 'rewritten'}")
            if not check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(new, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
