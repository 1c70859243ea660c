"""Modules whose class has ways of its own of being copied, set and subclassed."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hotrain


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(x))


class Locked(Pair):
    """It has something that no copy can have, and leaves it out of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "lock"}


class Frozen(Pair):
    """It takes no attribute once it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.built = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "built" in self.__dict__ and name != "training":
            raise AttributeError(f"{name} is set")
        super().__setattr__(name, value)


class Registered(Pair):
    """It keeps a list of its subclasses, which need a name."""

    found: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, name: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.found[name] = cls


class One(Registered, name="one"):
    pass


@pytest.mark.parametrize("kind", [Locked, Frozen, One])
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_class_with_ways_of_its_own_is_converted_copied_and_reverted(kind: type[Pair], way: str) -> None:
    """A `__getstate__` was passed over, so that copies failed on what it leaves out; a `__setattr__` that refuses and
    an `__init_subclass__` with arguments ended `convert` half-way."""
    model = kind()
    hotrain.convert(model)
    twin = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    x = torch.randn(4, 96, 64)
    for one in (model, twin):
        assert len(list(hotrain.converted_layers(one))) == 1
        assert hotrain.saved_bytes(one, x).total < hotrain.saved_bytes(Pair(), x).total / 2
        hotrain.revert(one)
        assert type(one) is kind
    assert Registered.found == {"one": One}


class GradientCheckpointingLayer(nn.Module):
    """As in transformers from 5.23 on: what a subclass's forward is wrapped in acts in the last subclass alone."""

    checkpointed: ClassVar[int] = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        forward = cls.forward

        @functools.wraps(forward)
        def wrapped(self: Any, x: Tensor) -> Any:
            if type(self).forward is not wrapped:
                return forward(self, x)
            GradientCheckpointingLayer.checkpointed += 1
            return checkpoint(functools.partial(forward, self), x, use_reentrant=False)

        cls.forward = wrapped


class CheckpointedPair(GradientCheckpointingLayer, Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(x)).relu()


def test_a_base_class_that_wraps_the_forward_of_its_last_subclass() -> None:
    model, x = nn.Sequential(CheckpointedPair(), CheckpointedPair()), torch.randn(8, 64, 64)
    before = model(x), hotrain.saved_bytes(model, x).total
    hotrain.convert(model)
    count = GradientCheckpointingLayer.checkpointed
    assert torch.equal(model(x), before[0])
    assert GradientCheckpointingLayer.checkpointed == count + 2
    assert hotrain.saved_bytes(model, x).total <= before[1]
    hotrain.revert(model)
    assert type(model[0]) is CheckpointedPair
