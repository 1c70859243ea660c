"""Versions that work are those of pyproject.toml, and where another is installed the message says which do."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
import torch

import hotrain
from hotrain import _version as required
from hotrain.cli.errors import is_mistake

SOURCE = Path(hotrain.__file__).parent
PROJECT = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CALL = re.compile(r'require\("([\w-]+)", "([\d.]+)"(?:, "(\w+)")?\)')
REQUIRED = {match for path in SOURCE.rglob("*.py") for match in CALL.findall(path.read_text(encoding="utf-8"))}


def test_every_integrated_library_is_checked() -> None:
    assert {package for package, _, _ in REQUIRED} == {
        "timm", "peft", "transformers", "accelerate", "lightning", "pytorch-lightning"
    }  # fmt: skip
    assert f"torch>={required.TORCH}" in PROJECT["dependencies"]


@pytest.mark.parametrize(("package", "least", "extra"), sorted(REQUIRED))
def test_missing_and_old_packages_say_what_to_install(
    package: str, least: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The versions are those of the extra."""
    extras = PROJECT["optional-dependencies"][extra or "dev"]
    declared = dict(d.partition(";")[0].split(">=") for d in extras if ">=" in d)
    assert least.removesuffix(".0") == declared[package.removeprefix("pytorch-")]
    numbers = [int(n) for n in least.split(".")]
    before = ".".join(map(str, [*numbers[:-1], numbers[-1] - 1] if numbers[-1] else [numbers[0] - 1, 99]))
    for version in ("0.9.1", before, f"{before}.post1"):
        monkeypatch.setattr(importlib.metadata, "version", lambda _, v=version: v)
        with pytest.raises(
            ImportError, match=rf"{package} {version} is not supported; .* from {least} on work"
        ) as error:
            required.require(package, least, extra)
        assert is_mistake(error.value)

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    # hotrain itself is on no registry, so that its extras come from a clone
    what = f"'.[{extra}]' in a clone of hotrain" if extra else f"'{package}>={least}'"
    with pytest.raises(ImportError, match=re.escape(f"{package} is not installed; pip install {what}") + "$"):
        required.require(package, least, extra)
    for version in (least, f"{least}.0", "30.1.0.dev3", f"{least}rc1"):
        monkeypatch.setattr(importlib.metadata, "version", lambda _, v=version: v)
        required.require(package, least, extra)


@pytest.mark.parametrize("version", ["2.10.1", "2.9.0+cu128", "1.13"])
def test_an_old_pytorch_says_which_work(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(
        ImportError, match=rf"PyTorch {re.escape(version)} is not supported; versions from 2.11 on work"
    ):
        required.require_torch()


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0a0+git123", "2.13.0+cpu", "3.0"])
def test_a_new_one_is_accepted(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    required.require_torch()
