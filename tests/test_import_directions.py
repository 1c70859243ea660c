"""Who may import whom, read off the source. An import inside a function or under TYPE_CHECKING counts as lazy."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import hotrain

ROOT = Path(hotrain.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# The rooms that everything else is built on, and those that may use them but are never used by them.
OUTER = ("hotrain.train", "hotrain.cli", "hotrain.plotting", "hotrain.integrations", "hotrain_recipes")
CORE_MAY_IMPORT = {"torch", "numpy"}
# The exceptions: what is imported only for a model that brought transformers, and only where a kernel is to run.
ALSO = {"hotrain.nn.hf": {"transformers"}, "hotrain.kernels": {"triton"}}
# Third parties that each outer room is there to bring in; a package named nowhere here is imported by nobody.
OUTER_MAY_IMPORT = {
    "hotrain.train": {
        "torch",
        "numpy",
        "timm",
        "torchvision",
        "safetensors",
        "PIL",
        "peft",
        "transformers",
        "sklearn",
        "scipy",
        "rich",
        "trackio",
    },
    "hotrain.cli": {"torch", "numpy", "typer", "rich", "click", "timm", "sklearn"},
    "hotrain.integrations": {"torch", "transformers", "accelerate", "lightning", "pytorch_lightning"},
    "hotrain.plotting": {"torch", "numpy", "matplotlib", "mpl_toolkits", "jinja2", "markupsafe"},
}
MAY_USE = {
    "hotrain.train": {"hotrain.train"},
    "hotrain.plotting": {"hotrain.plotting"},
    "hotrain.integrations": {"hotrain.integrations"},
    "hotrain.cli": {"hotrain.train", "hotrain.cli", "hotrain.plotting", "hotrain_recipes"},
}

# Each room imports only from rooms above it (and from itself).
ORDER = [
    ("hotrain._version", "hotrain.files", "hotrain.tables", "hotrain.private", "hotrain.casting"),
    ("hotrain.method",),
    ("hotrain.layer_record",),
    ("hotrain.presets", "hotrain.plans"),
    ("hotrain.draws",),
    ("hotrain.transform",),
    ("hotrain.quantize",),
    ("hotrain.products",),
    ("hotrain.published",),
    ("hotrain.saved",),
    ("hotrain.backward",),
    ("hotrain.geometry",),
    ("hotrain.convolution", "hotrain.forward"),
    ("hotrain.layer",),
    ("hotrain.kernels",),
    ("hotrain.autograd",),
    ("hotrain.planning",),
    ("hotrain.compress",),
    ("hotrain.ops",),
    ("hotrain.functional",),
    ("hotrain.nn",),
    ("hotrain.grids",),
    ("hotrain.audit",),
    ("hotrain.conversion",),
    ("hotrain.compiling",),
    ("hotrain.layer_gradients",),
    ("hotrain.calibration", "hotrain.ranks", "hotrain.budget", "hotrain.optim"),
    ("hotrain.analysis",),
]
RANK = {room: level for level, rooms in enumerate(ORDER) for room in rooms}


def dotted(path: Path) -> str:
    parts = ("hotrain", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(absolute module, whether it is imported when the file is) of every import statement of a file."""
    tree = ast.parse(path.read_text())
    package = dotted(path).split(".") if path.name == "__init__.py" else dotted(path).split(".")[:-1]

    def visit(node: ast.AST, eager: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            inside = eager and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                inside = False
            if isinstance(child, ast.Import):
                yield from ((alias.name, eager) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                module = ".".join([*base, *([child.module] if child.module else [])])
                # `from . import backward` names modules; `from .method import Method` names things in one
                for alias in child.names:
                    name = f"{module}.{alias.name}"
                    yield (name if _is_module(name) else module), eager
            else:
                yield from visit(child, inside)

    yield from visit(tree, eager=True)


def _is_module(name: str) -> bool:
    if not name.startswith("hotrain."):
        return False
    path = ROOT.joinpath(*name.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").exists()


def room(module: str) -> str:
    """`hotrain.nn.linear` → `hotrain.nn`; `hotrain.draws` is its own."""
    return ".".join(module.split(".")[:2])


def third_party(module: str) -> str | None:
    import sys

    top = module.split(".")[0]
    return None if top in sys.stdlib_module_names or top in ("hotrain", "__future__") else top


def is_outer(module: str) -> bool:
    return module.startswith(OUTER)


CORE_FILES = [f for f in FILES if not is_outer(dotted(f))]
OUTER_FILES = [f for f in FILES if is_outer(dotted(f))]


@pytest.mark.parametrize("path", CORE_FILES, ids=dotted)
def test_the_core_never_imports_the_outer_rooms(path: Path) -> None:
    assert [module for module, _ in imports(path) if is_outer(module)] == []


@pytest.mark.parametrize("path", CORE_FILES, ids=dotted)
def test_the_core_imports_torch_and_little_else(path: Path) -> None:
    """transformers in nn/hf.py alone, which is itself imported only for a model that brought transformers, and triton
    in kernels/, whose `__init__` imports it, and the modules that hold kernels, inside functions."""
    name = dotted(path)
    allowed = CORE_MAY_IMPORT | ALSO.get(name, ALSO.get(room(name), set()))
    assert {third_party(module) for module, _ in imports(path)} - {None} <= allowed


def test_only_kernels_pull_in_triton() -> None:
    """What imports triton when it is imported is imported at once by its like alone, in kernels/."""
    eager = {dotted(path): {module for module, at_once in imports(path) if at_once} for path in FILES}
    pulled = {name for name, modules in eager.items() if "triton" in {third_party(m) for m in modules}}
    assert pulled
    while more := {name for name, modules in eager.items() if modules & pulled} - pulled:
        pulled |= more
    assert {room(name) for name in pulled} == {"hotrain.kernels"}
    assert not pulled & {"hotrain.kernels", "hotrain.kernels.dispatch"}


@pytest.mark.parametrize("path", CORE_FILES, ids=dotted)
def test_rooms_import_only_from_rooms_before_them(path: Path) -> None:
    """method → transform → quantize → saved → backward → kernels → autograd → ops → functional → nn → the rest.

    Imports inside functions and for type annotations count too.
    """
    name = dotted(path)
    if name == "hotrain":
        return  # the front door: it imports from every room, the lean ones eagerly (test_lean_import.py)
    assert room(name) in RANK, f"{name} is in no room of ORDER: say where it belongs"
    late = [
        module
        for module, _ in imports(path)
        if module.startswith("hotrain.") and room(module) != room(name) and RANK[room(module)] >= RANK[room(name)]
    ]
    assert late == []


def test_no_circles() -> None:
    """Also not through imports inside functions or for annotations; the package's `__init__` imports everything."""
    waiting = {dotted(path): {module for module, _ in imports(path)} for path in FILES if path != ROOT / "__init__.py"}
    while free := {name for name, needs in waiting.items() if not needs & waiting.keys()}:
        waiting = {name: needs for name, needs in waiting.items() if name not in free}
    assert {name: sorted(needs & waiting.keys()) for name, needs in waiting.items()} == {}


@pytest.mark.parametrize("path", OUTER_FILES, ids=dotted)
def test_outer_rooms_use_the_core_and_what_they_are_there_for(path: Path) -> None:
    """The command line knows all; train, plotting and integrations know nobody else."""
    own = room(dotted(path))
    used = {room(module) for module, _ in imports(path) if is_outer(module)}
    used = {"hotrain_recipes" if u.startswith("hotrain_recipes") else u for u in used}
    assert used <= MAY_USE[own]
    assert {third_party(module) for module, _ in imports(path)} - {None} - {
        "hotrain_recipes",
        "hotrain_bench",
        "hotrain_study",
    } <= OUTER_MAY_IMPORT[own]


def test_the_walk_sees_what_is_there() -> None:
    """The rules above would pass on an empty list: a few imports that must be found, eager and lazy."""
    found = dict(imports(ROOT / "autograd.py"))
    assert found["hotrain.backward"] is True
    assert found["hotrain.transform.tokens"] is True
    assert dict(imports(ROOT / "conversion" / "candidates.py"))["hotrain.nn.hf"] is False
    assert len(CORE_FILES) > 20
    assert len(OUTER_FILES) > 10
