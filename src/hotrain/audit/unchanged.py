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
    numpy: Any = sys.modules.get("numpy")  # data sets draw from it; torch itself does not
    python, legacy = random.getstate(), numpy and numpy.random.get_state()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(gpus, device_type="cuda"):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(legacy)
        for module, training in modes:
            module.training = training
        for module, name, buffer, value in buffers:
            setattr(module, name, buffer)
            with torch.no_grad():
                buffer.copy_(value)
        for state, calls, fallback, step, generation, ran in counters:
            state.calls, state.fallback = calls, fallback
            state.draws.step, state.draws.generation, state.draws.ran = step, generation, ran
