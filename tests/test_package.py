"""The wheel, in an environment of PyTorch and NumPy alone; the versions that are said; the commands of CI."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

import hotrain
from hotrain import private

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCES = {"src": "hotrain", "recipes": "hotrain_recipes"}
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
STEP = """
import sys, torch, hotrain
assert hotrain.__file__.startswith(sys.prefix), hotrain.__file__
model = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
report = hotrain.convert(model, "hq8", memory="block")
model(torch.randn(2, 16, 64)).square().sum().backward()
print(len(report.converted), all(p.grad.isfinite().all() for p in model.parameters()))
from hotrain.cli.__main__ import main
sys.argv = ["hotrain", "--version"]
main()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a copy of the sources, so that the build leaves nothing behind."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in (*SOURCES, "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder)
    run([sys.executable, "-c", BUILD, "dist"], folder)
    (found,) = (folder / "dist").iterdir()
    return found


def run(command: list[str | Path], folder: Path, fails: bool = False) -> subprocess.CompletedProcess[str]:
    """Outside of the repository and without its paths."""
    environment = {"PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    assert (done.returncode != 0) == fails, done.stderr
    return done


def brought_by(*names: str) -> set[Path]:
    """The files and folders in site-packages of some distributions and of all that they need."""
    waiting, seen, found = list(names), set[str](), set[Path]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # a requirement of another system
        waiting += [re.split(r"[^\w.-]", r)[0] for r in distribution.requires or () if "extra ==" not in r]
        tops = {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
        found |= {Path(str(distribution.locate_file(top))) for top in tops}
    return found


def test_what_is_in_the_wheel(wheel: Path) -> None:
    """Every module of both packages and their mark as typed: no test, benchmark, record or data file."""
    assert wheel.name == f"hotrain-{hotrain.__version__}-py3-none-any.whl"
    expected = {
        str(path.relative_to(ROOT / folder))
        for folder, package in SOURCES.items()
        for path in [*(ROOT / folder / package).rglob("*.py"), ROOT / folder / package / "py.typed"]
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        information = f"hotrain-{hotrain.__version__}.dist-info/"
        about = archive.read(f"{information}METADATA").decode()
    files = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE")
    assert names == expected | {information + name for name in files}
    assert wheel.stat().st_size < 1 << 20
    needed = re.findall(r"^Requires-Dist: ([^;\n]+)$", about, re.MULTILINE)
    assert [re.split(r"\W", each)[0] for each in needed] == ["torch", "numpy"]
    assert re.findall(r"^Provides-Extra: (.+)$", about, re.MULTILINE) == list(PROJECT["optional-dependencies"])
    assert f"\nRequires-Python: {PROJECT['requires-python']}\n" in about


def test_the_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """PyTorch, NumPy and what they need are linked into it: nothing that an extra brings."""
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=True)
    python = folder / "bin/python"
    run([sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel], tmp_path)
    (packages,) = folder.glob("lib/python*/site-packages")
    for path in brought_by("torch", "numpy"):
        (packages / path.name).symlink_to(path)
    assert not [name for name in ("typer", "timm", "matplotlib", "transformers") if (packages / name).exists()]
    assert run([python, "-W", "error", "-c", STEP], tmp_path).stdout.split("\n")[:2] == [
        "2 True",
        f"hotrain {hotrain.__version__}",
    ]
    refused = run([folder / "bin/hotrain", "--help"], tmp_path, fails=True)
    assert refused.stderr.count("\n") == 1
    assert "needs typer; pip install '.[train,plot]' in a clone of hotrain" in refused.stderr


def test_versions_that_are_said_agree() -> None:
    """The table of CONTRIBUTING.md is what the package declares, and CI runs each Python that it declares."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\n## Versions\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d\.\d+) \| (\S+?),? .*\| (.+) \|$", text, re.MULTILINE)
    tested = {python: torch for python, torch, _ in rows if torch != "–"}
    declared = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert sorted(tested) == sorted(declared)
    assert sorted(version.rpartition(".")[0] for version in tested.values()) == sorted(private.TESTED)
    assert PROJECT["requires-python"] == f">={min(tested)}"
    assert {python for python, _, said in rows if said.startswith(("not tested", "refused"))} == {"3.10", "3.13"}
    matrix = workflow()["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert set(tested) <= set(matrix)


def test_ci_runs_what_a_developer_runs() -> None:
    steps = [step["run"] for job in workflow()["jobs"].values() for step in job["steps"] if "run" in step]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert steps[0] == "bash .ci/run"
    assert [step for step in steps[1:] if step.removeprefix("make ") not in targets] == []
    assert (ROOT / ".ci/run").read_text(encoding="utf-8").endswith("exec make check test\n")


def test_templates_of_issues_are_forms() -> None:
    """GitHub shows none that lacks a name, a description or a body of labelled fields."""
    forms = sorted((ROOT / ".github/ISSUE_TEMPLATE").iterdir())
    assert [path.name for path in forms] == ["bug.yml", "proposal.yml"]
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert form["name"]
        assert form["description"]
        ids = [field["id"] for field in form["body"]]
        assert len(ids) == len(set(ids)) == sum(bool(field["attributes"]["label"]) for field in form["body"])


def workflow() -> Any:
    return yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
