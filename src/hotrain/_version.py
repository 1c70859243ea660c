"""The version, for packaging and for the records of a run; and the versions of other packages that work."""

from __future__ import annotations

import importlib.metadata
import re

import torch

__version__ = "0.1.0"

TORCH = "2.11"  # the first version that works


def install_extra(extra: str) -> str:
    """How to install extras of hotrain, which is on no registry."""
    return f"pip install '.[{extra}]' in a clone of hotrain"


def require(package: str, least: str, extra: str = "") -> None:
    """Raise ImportError unless a package is installed in a version that works.

    Args:
        package: its name on the registry.
        least: the first version that works, as ``major.minor`` or ``major.minor.micro``.
        extra: the extra of hotrain that brings it, if one does.

    Raises:
        ImportError: it is missing or too old; the message says what to install.
    """
    install = install_extra(extra) if extra else f"pip install '{package}>={least}'"
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f"hotrain: {package} is not installed; {install}") from error
    if not _is_at_least(version, least):
        raise ImportError(f"hotrain: {package} {version} is not supported; versions from {least} on work: {install}")


def require_torch() -> None:
    """Raise ImportError for a PyTorch that is too old, before something of hotrain fails in it."""
    if not _is_at_least(torch.__version__, TORCH):
        raise ImportError(
            f"hotrain: PyTorch {torch.__version__} is not supported; versions from {TORCH} on work: "
            f"pip install 'torch>={TORCH}'"
        )


def _is_at_least(version: str, least: str) -> bool:
    wanted = _numbers(least)
    return _numbers(version)[: len(wanted)] >= wanted


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


require_torch()
