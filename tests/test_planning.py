"""The planner's own reasoning; what it measures needs a GPU (tests/kernels run its layers in the interpreter)."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hotrain
from hotrain import planning
from hotrain.geometry import Geometry
from hotrain.planning import Question

CPU = torch.device("cpu")
LINEAR = Question(
    (2, 32, 48), (64, 48), torch.float32, torch.float32, True, True, True, hotrain.preset("hot"), None, False, None, CPU
)
PATCHES = dataclasses.replace(
    LINEAR, x=(2, 3, 16, 16), w=(32, 3, 4, 4), geometry=Geometry((4, 4), (4, 4), (0, 0), (1, 1), 1, "zeros")
)
HALVES = dataclasses.replace(PATCHES, dtype=torch.bfloat16, weights=torch.bfloat16, needs_x=False)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(planning, "_times", {})
    monkeypatch.setattr(planning, "_roofs", {CPU: planning.Roofs(copy=4e12, product=8e14)})
    monkeypatch.setattr(planning, "_rehearsed", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_a_question_is_measured_once_and_apart_for_graphs(monkeypatch):
    asked = []
    monkeypatch.setattr(
        planning, "_measure", lambda q, graphs: asked.append(graphs) or (1.0, 0.5 if graphs else 2.0, 0.0)
    )
    for _ in range(2):
        said = "slower on this GPU: 2.000 ms/step, exact 1.000 ms/step; plan='memory' converts it"
        assert planning.verdict(LINEAR) == said
        assert planning.verdict(LINEAR, graphs=True) is None
    assert asked == [False, True]


def test_rounds_that_other_work_slows_down_do_not_count(monkeypatch):
    """Another process takes the GPU for most rounds, of one work or of both: until each has its fastest time twice."""
    quiet = {7: (1.0, 9.0), 11: (8.0, 2.0), 19: (1.01, 5.0), 23: (7.0, 2.02)}
    times = [t for n in range(40) for t in quiet.get(n, (5.0 + n, 6.0 + n))]
    monkeypatch.setattr(planning, "timed", lambda work, count: times.pop(0))
    assert planning.fastest([lambda: None, lambda: None]) == (1.0, 2.0)
    assert len(times) == 2 * (40 - 24)


def test_works_are_timed_a_few_times_where_the_times_agree_and_not_forever_where_they_do_not(monkeypatch):
    monkeypatch.setattr(planning, "timed", lambda work, count: work())
    calls = []
    assert planning.fastest([lambda: calls.append(0) or 1.0]) == (1.0,)
    assert len(calls) == 5
    falling = iter(0.5**n for n in range(40))
    assert planning.fastest([lambda: next(falling)], rounds=7) == (0.5**6,)


@pytest.mark.parametrize(("converted", "stays"), [(1.015, False), (1.025, True)])
def test_of_two_equal_times_the_one_with_less_memory_is_chosen(monkeypatch, converted, stays):
    """Times differ by up to 2 % from round to round; a step of many such layers counts what they lose (`gain`)."""
    monkeypatch.setattr(planning, "_measure", lambda *_: (1.0, converted, 0.0))
    assert (planning.verdict(LINEAR) is not None) == stays
    assert planning.verdict(LINEAR, unpacks=True) is not None, "an exact layer saves codes of x, too"
    assert planning.gain(LINEAR) == pytest.approx(1.0 - converted)


@pytest.mark.parametrize(("question", "part"), [(LINEAR, 0.5), (PATCHES, 0.5), (HALVES, 1.0)])
def test_half_of_what_a_layer_gains_is_counted_and_all_that_patches_gain(monkeypatch, question, part):
    """Compiled, patches are multiplied in forward, too: the time is that of other kernels, and not of warm caches."""
    monkeypatch.setattr(planning, "_measure", lambda *_: (1.0, 0.7, 0.0))
    assert planning.times(question, graphs=True) is not None
    assert planning.gain(question, graphs=True) == pytest.approx(part * 0.3)


@pytest.mark.parametrize(("host", "stays"), [(0.5, False), (0.6, True)])
def test_a_layer_stays_exact_where_the_host_would_be_the_limit(monkeypatch, host, stays):
    """Faster alone, but at more than half of exact's time to issue."""
    monkeypatch.setattr(planning, "_measure", lambda *_: (1.0, 0.9, host))
    why = planning.verdict(LINEAR)
    assert (why is not None) == stays
    if why is not None:
        assert "the host takes 0.600 ms to issue it" in why
        assert "hotrain.compile" in why


def _pointwise(inputs: int, outputs: int) -> Question:
    """A 1×1 convolution of 256 images of 14×14 pixels, in bfloat16."""
    point = Geometry((1, 1), (1, 1), (0, 0), (1, 1), 1, "zeros")
    shapes = {"x": (256, inputs, 14, 14), "w": (outputs, inputs, 1, 1)}
    return dataclasses.replace(LINEAR, dtype=torch.bfloat16, geometry=point, **shapes)


def test_least_times_are_bytes_by_the_copy_and_operations_by_the_product():
    """64 → 64 channels are bound by bytes: the products' operations do not show."""
    roofs = planning.Roofs(copy=4e12, product=8e14)
    entries = 256 * 196 * 64
    exact, converted = planning.least(_pointwise(64, 64), roofs)
    assert exact == pytest.approx(2 * 2 * 2 * entries / 4e12 * 1e3)
    # Read x and g_y (2 each), write half of each and all of g_y in codes (2); g_w reads the halves (1), g_x codes of
    # g_y, and writes two bytes (3).
    assert converted == pytest.approx((4 + 2 + 1 + 3) * entries / 4e12 * 1e3)
    wide_exact, wide_converted = planning.least(_pointwise(4096, 4096), roofs)
    operations = 2 * 256 * 196 * 4096**2
    assert wide_exact == pytest.approx(2 * operations / 8e14 * 1e3)
    assert wide_converted < 0.6 * wide_exact, (
        "half the contraction and twice the rate for one product, twice for the other"
    )


def test_a_frozen_layer_has_g_x_alone():
    """Exact reads g_y and writes g_x, two bytes each; its codes are written and read in between."""
    roofs = planning.Roofs(copy=4e12, product=8e14)
    entries = 256 * 196 * 64
    exact, converted = planning.least(dataclasses.replace(_pointwise(64, 64), trained=False), roofs)
    assert exact == pytest.approx((2 + 2) * entries / 4e12 * 1e3)
    assert converted == pytest.approx((2 + 1 + 1 + 2) * entries / 4e12 * 1e3)


def test_a_layer_that_bytes_bind_is_not_measured(monkeypatch):
    monkeypatch.setattr(planning, "_measure", lambda *_: pytest.fail("measured"))
    why = planning.verdict(_pointwise(256, 64))
    assert why is not None
    assert why.startswith("too few operations per byte")


@pytest.mark.parametrize(("cache", "measured"), [(20 << 20, True), (80 << 20, False)])
def test_a_layer_that_spares_an_unpacking_is_measured_where_the_cache_does_not_hold_x_and_y(
    monkeypatch, cache, measured
):
    """Half of the cache on an H200 and an H100 is between the two sizes; 50,176 × 384 in 16 bits are 37 MiB."""
    asked = []
    monkeypatch.setattr(planning, "_measure", lambda q, _: asked.append(q) or (1.0, 0.5, 0.5))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=cache))
    gpu = torch.device("cuda")
    monkeypatch.setitem(planning._roofs, gpu, planning.Roofs(copy=4e12, product=8e14))
    question = dataclasses.replace(_pointwise(384, 384), device=gpu)
    assert "too few operations per byte" in (planning.verdict(question) or "")
    why = planning.verdict(question, unpacks=True)
    assert (why is None) == measured
    assert bool(asked) == measured


@pytest.mark.parametrize(
    "question", [_pointwise(4096, 4096), dataclasses.replace(_pointwise(64, 64), dtype=torch.float32)]
)
def test_other_layers_are_measured(monkeypatch, question):
    """Wide ones may gain; in float32 exact has another roof."""
    monkeypatch.setattr(planning, "_measure", lambda *_: (1.0, 0.5, 0.5))
    assert planning.verdict(question) is None
    assert question in {q for q, _ in planning._times}


@pytest.mark.parametrize("name", ["hla", "exact"])
def test_methods_without_codes_have_no_least_time(name):
    question = dataclasses.replace(_pointwise(64, 64), method=hotrain.preset(name))
    assert planning.least(question, planning.Roofs(4e12, 8e14)) is None


def test_a_layer_without_room_to_measure_is_converted(monkeypatch):
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(planning, "_measure", full)
    assert planning.times(LINEAR) is None
    assert planning.verdict(LINEAR) is None


def test_nothing_is_measured_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(planning, "_measure", lambda *_: pytest.fail("measured"))
    assert planning.verdict(LINEAR) is None
    planning.rehearse(LINEAR)
    assert planning._times == {}
    assert planning._rehearsed == set()


@pytest.mark.parametrize(
    "question",
    [
        LINEAR,
        PATCHES,
        dataclasses.replace(LINEAR, w=(48, 64), transposed=True),
        dataclasses.replace(LINEAR, trained=False),
    ],
)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_what_is_timed_is_a_training_step_of_the_layer(question, weights):
    """Exact and converted give gradients of the same tensors, under autocast where the weights are kept wider."""
    question = dataclasses.replace(question, dtype=torch.bfloat16, weights=weights)
    state = torch.get_rng_state()
    layer = planning._Layer(question)
    assert torch.equal(torch.get_rng_state(), state), "the user's random numbers are left alone"
    with layer.mode():
        exact, converted = layer.exact(), layer.converted()
        assert exact.dtype == converted.dtype == torch.bfloat16
        torch.testing.assert_close(exact, converted)
        layer.run(layer.exact)
        layer.run(layer.converted)
    assert layer.w.requires_grad == question.trained
    assert layer.x.grad is None, "grad() and not backward(): nothing is left behind"


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("bias", ["trained", "frozen", "none"])
def test_a_compiled_exact_layer_reads_its_gradient_for_the_bias(monkeypatch, graphs, bias):
    """The compiler fuses the sum that PyTorch runs alone: in graphs the sum is a read of g_y, in eager mode timed."""
    summed = []
    grad = torch.autograd.grad

    def noted(y, wanted, g):
        summed.append(any(t.ndim == 1 for t in wanted))
        return grad(y, wanted, g)

    monkeypatch.setattr(torch.autograd, "grad", noted)
    monkeypatch.setattr(planning, "captured", lambda work: work)
    monkeypatch.setattr(planning, "_issued", lambda _: 0.0)
    monkeypatch.setattr(planning, "fastest", lambda works, **_: [work() for work in works] and (1.0, 0.5))
    question = dataclasses.replace(LINEAR, bias=bias != "none", trains_bias=bias == "trained")
    exact, converted, _ = planning._measure(question, graphs)
    read = 1e3 * 2 * 32 * 64 * 4 / 4e12 if graphs and bias == "trained" else 0.0
    assert (exact, converted) == (pytest.approx(1.0 + read), 0.5)
    assert summed[-2] == (bias == "trained" and not graphs), "exact, of the last round"
    assert summed[-1] == (bias == "trained"), "converted: its kernels sum what they read"


@pytest.mark.parametrize(
    ("question", "gained"),
    [
        (HALVES, 0.75),
        (PATCHES, 0.0),  # of float32
        (dataclasses.replace(HALVES, trained=False), 0.0),
        (dataclasses.replace(HALVES, needs_x=True), 0.0),
        (dataclasses.replace(HALVES, x=(2, 16, 16, 16), w=(32, 16, 4, 4)), 0.0),  # of channels that cuDNN knows
        (dataclasses.replace(HALVES, geometry=Geometry((4, 4), (2, 2), (0, 0), (1, 1), 1, "zeros")), 0.0),
        (dataclasses.replace(LINEAR, dtype=torch.bfloat16, weights=torch.bfloat16), 0.0),
    ],
)
def test_what_patches_gain_as_a_product_is_measured_once(monkeypatch, question, gained):
    """Of an exact layer, the convolution against the product, with their gradients, and the copies that cut x."""
    asked, copied = [], 2 * math.prod(question.x) * question.dtype.itemsize
    monkeypatch.setattr(planning.Roofs, "of", lambda device: planning.Roofs(copied * 1e3, 1e14))
    monkeypatch.setattr(planning, "_of_patches", {})
    monkeypatch.setattr(planning, "captured", lambda work: work)
    monkeypatch.setattr(planning, "fastest", lambda works: [asked.append(work()) for work in works] and (3.0, 1.25))
    assert planning.gain_of_patches(question) == 0.0
    assert [planning.times_of_patches(question) for _ in range(2)] == [(3.0, 2.25) if gained else None] * 2
    assert planning.gain_of_patches(question) == gained
    assert len(asked) == (2 if gained else 0)


@pytest.mark.parametrize("last", [False, True])
def test_patches_are_timed_in_the_layout_of_the_images(last):
    """Of few channels cuDNN takes longer for the default layout; other images are laid out by compiled code."""
    layer = planning._Layer(dataclasses.replace(HALVES, last=last))
    form = torch.channels_last if last else torch.contiguous_format
    assert all(t.is_contiguous(memory_format=form) for t in (layer.x, layer.g))
    with layer.mode():
        (convolved,), (multiplied,) = (work() for work in layer.patches())
    assert (multiplied - convolved).norm() <= 2**-7 * convolved.norm()  # two gradients in bfloat16
    wide = planning._Layer(dataclasses.replace(HALVES, x=(2, 16, 16, 16), w=(32, 16, 4, 4), last=last))
    assert wide.x.is_contiguous(memory_format=torch.channels_last)


def test_a_rehearsal_runs_the_layer_once(monkeypatch):
    runs = []
    monkeypatch.setattr(planning._Layer, "run", lambda self, forward: runs.append(forward.__name__))
    planning.rehearse(LINEAR)
    planning.rehearse(LINEAR)
    assert runs == ["converted"]


def test_convert_passes_the_plan_on():
    net = nn.Sequential(nn.Linear(48, 64))
    for plan in ("speed", "graphs", "memory"):
        hotrain.convert(net, "hot", plan=plan)
        assert net[0]._hotrain.plan == plan
    with pytest.raises(ValueError, match="plan='fast' is not one of 'speed', 'graphs', 'memory'"):
        hotrain.convert(net, "hot", plan="fast")


def test_convert_leaves_the_forward_that_a_method_has():
    """A method in which the product was chosen keeps it unless the call says otherwise."""
    net = nn.Sequential(nn.Linear(48, 64))
    method = hotrain.preset("hot", forward="fp8")
    for given, wanted in ((None, "fp8"), ("int8", "int8"), ("exact", "exact")):
        hotrain.convert(net, method, forward=given)
        assert net[0]._hotrain.method.forward == wanted
