"""A context that restores a model's modes, buffers, draw counters and all random generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..nn.state import layer_states


@contextmanager
def as_found(model: nn.Module) -> Iterator[None]:
    """Context that restores a model's modes and buffers, all random generators and converted layers' counters, bitwise.

    Parameters and their ``.grad`` are not copied: code in the context must not write to them (use
    ``torch.autograd.grad``).
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    states = [state for _, state in layer_states(model)]
    counters = [(s, s.calls, s.fallback, s.draws.step, s.draws.generation, replace(s.ran)) for s in states]
    generators = _generators()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for module, name, buffer, value in buffers:
            setattr(module, name, buffer)
            with torch.no_grad():
                buffer.copy_(value)
        for state, calls, fallback, step, generation, ran in counters:
            state.calls, state.fallback = calls, fallback
            state.draws.step, state.draws.generation, state.draws.ran = step, generation, ran
        _restore(generators)


def _generators() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:  # data sets draw from it; torch itself does not
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return states


def _restore(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
