"""Kernel tests run on a GPU where there is one, and in Triton's interpreter elsewhere: the same tests, fewer sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs on a GPU is chosen with the other tests that do (`make test-gpu`)."""
    if torch.cuda.is_available():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    """Triton's interpreter (3.7) without two halves of its time that change no number.

    It computes overflow checks that it only reads with `debug=True`, and it replaces the functions of `triton.language`
    again whenever a jitted function calls another: once in a launch for each module is enough.
    """
    if torch.cuda.is_available():
        yield
        return
    interpreter: Any = pytest.importorskip("triton.runtime.interpreter")
    patch_lang: Callable[[Any], Any] = interpreter._patch_lang
    launch: Callable[..., None] = interpreter.GridExecutor.__call__
    patched: set[str] = set()

    def patch_once(fn: Any) -> Any:
        if fn.__globals__["__name__"] in patched:
            return None
        patched.add(fn.__globals__["__name__"])
        return patch_lang(fn)

    def launch_anew(executor: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(executor, *args, **kwargs)

    builder = interpreter.interpreter_builder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    pytest.importorskip("triton")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def poison(device: torch.device) -> Iterator[None]:
    """Fill freed memory with NaN bytes, on a CPU new memory with NaN, so that an entry that no program writes shows."""
    if device.type == "cuda":
        blocks = [torch.full((1 << 20,), 0x7F, dtype=torch.uint8, device=device) for _ in range(64)]
        del blocks
        yield
        return
    torch.use_deterministic_algorithms(True)  # which has PyTorch fill what `torch.empty` returns
    yield
    torch.use_deterministic_algorithms(False)
