"""benchmarks/formats.py: errors that an average removes are told from those that it leaves; the policy comes back."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

from hotrain.compress import formats as policy
from hotrain.compress.interpose import Compressed
from hotrain.compress.report import Buffers
from hotrain.compress.slopes import ACTIVATIONS


@pytest.fixture(scope="module")
def formats() -> Iterator[ModuleType]:
    before = dict(policy.GROUPED)
    try:
        yield importlib.import_module("formats")
    finally:
        sys.modules.pop("formats", None)
        policy.GROUPED.clear()
        policy.GROUPED.update(before)


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_constant_error_persists_and_independent_ones_do_not(formats: ModuleType) -> None:
    """400 units of 256 entries: what is left of independent errors of 0.1 is 0.1/√400 · 256^-¼ · √2, under 0.002."""
    exact = draw(0, 400, 256)
    constant, independent = formats.Tally(), formats.Tally()
    constant.add(exact, exact + 0.1 * draw(1, 256))
    independent.add(exact, exact + 0.1 * draw(2, 400, 256))
    kept, lost = formats.Errors.of([constant]), formats.Errors.of([independent])
    assert kept.persistent == pytest.approx(kept.error, rel=1e-4)  # sums in float64 of errors rounded to float32
    assert lost.error == pytest.approx(0.1, rel=0.02)  # 100,000 draws: 0.3 % a standard deviation
    assert lost.persistent < 0.002


def test_parts_of_a_gradient_are_measured_as_one(formats: ModuleType) -> None:
    """A gradient that is halved: error 0.5, its direction as it was; in two parts as in one."""
    exact = draw(0, 5, 64).double()
    tallies = [formats.Tally(), formats.Tally()]
    for tally, part in zip(tallies, exact.split(32, 1), strict=True):
        for row in part:
            tally.add(row[None], row[None] / 2)
    found = formats.Errors.of(tallies)
    assert (found.error, found.scale, found.cosine) == pytest.approx((0.5, -0.5, 1.0), rel=1e-12)


def test_noise_is_what_two_batches_do_not_share(formats: ModuleType) -> None:
    """Orthogonal gradients share nothing; equal ones everything."""
    apart, alike = formats.Tally(), formats.Tally()
    for row in torch.eye(3, dtype=torch.float64):
        apart.add(row[None], row[None])
        alike.add(torch.ones(1, 3), torch.ones(1, 3))
    assert formats.Errors.of([apart]).noise == 1.0
    assert formats.Errors.of([alike]).noise == 0.0


def test_chosen_formats_hold_within_and_the_policy_comes_back(formats: ModuleType) -> None:
    x = draw(0, 64, 256).requires_grad_()
    before, slopes = dict(policy.FORMATS), dict(ACTIVATIONS)
    (exact,) = torch.autograd.grad(F.gelu(x).sum(), x)
    errors = []
    for form in ("slope 4 bits", "slope 3 bits", "input int8"):
        with formats.chosen({"slope": form}), formats.Only([F.gelu]) as only:
            y = F.gelu(x)
            (found,) = torch.autograd.grad(y.sum(), x)
            assert set(policy.FORMATS.values()) == {"exact"}
        assert only.buffers.formats
        errors.append(((found - exact).norm() / exact.norm()).item())
    # Steps of 1/11, of 1/5 and of 1/127 of the largest entry.
    assert errors[2] < errors[0] < errors[1]
    assert (before, slopes) == (policy.FORMATS, ACTIVATIONS)


def test_only_what_is_named_is_compressed(formats: ModuleType) -> None:
    x = draw(0, 64, 256).requires_grad_()
    with formats.Only([F.gelu]) as only:
        F.layer_norm(F.gelu(x), (256,))
    assert list(only.buffers.formats) == ["gelu"]
    with Compressed(Buffers()) as everything:
        F.layer_norm(F.gelu(x), (256,))
    assert list(everything.buffers.formats) == ["gelu", "layer_norm"]
