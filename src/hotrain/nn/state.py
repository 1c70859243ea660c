"""`LayerState`: method, random draws, plan and fallback of a converted layer, and the forward of its class."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import cached

from .. import autograd, functional, ops, planning
from ..autograd import Call, Key
from ..casting import autocast_dtype, autocast_to
from ..compress.eager import sees_functions
from ..compress.mode_stack import current_checkpoint, left_to_eager, without_own_modes
from ..compress.sharing import Origins
from ..draws import ATTRIBUTE, Draws, place_all
from ..geometry import FEW, Geometry
from ..layer import Config
from ..layer_record import Ran
from ..method import Method
from ..private import CHILDREN, any_autocast, constant_in_graphs, differentiates, static_in_graphs
from ..transform.tokens import Grid

REVERTED = "reverted"  # why a layer of an earlier conversion is exact, in the report of that conversion

_SAMPLES = "2-D input (or one token a sample): its rows are samples, not tokens"

_OF_TENSORS = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]  # makes results of the same class
_SHAPES = 256  # of inputs that a layer remembers: their layouts have tensors of one element per token

Place = tuple[Any, ...]  # the fields of a `Geometry` but the kernel, as torch.nn.Conv2d has them


class LayerState:
    """The state of one converted layer.

    Attributes:
        name: fully qualified, in its model.
        method: assignable; the next forward follows it.
        grid: of its tokens, where known.
        plan: name of `plans.PLANS`: whether the layer stays exact on a GPU where its method would be slower.
        running: the method with its number format chosen for the device of the last forward, or of the weight.
        spec: of method, grid and plan: what Dynamo reads of them, and so guards on.
        chosen: whether a `filter_fn` selected the layer, so that rows that are samples count as tokens too.
        transposed: whether the weight is (I, O).
        weight: its shape, where `hotrain.convert` has made the state.
        fallback: why the layer ran exact, if it did.
        calls: training forwards that followed the method; of a compiled layer, those that were traced.
        draws: its random draws, the record of its last step, and its amax history.
        origins: the producers of saved activations, for activation sharing (``memory="block"``).
    """

    def __init__(self, name: str, method: Method, grid: Grid | None = None, chosen: bool = False) -> None:
        self.name, self.chosen, self.transposed = name, chosen, False
        self.weight: tuple[int, ...] | None = None
        self.fallback: str | None = None
        self.asked: planning.Question | None = None  # what a compiled step's plan was about
        self.traced: tuple[Any, ...] = ()  # the layer as `compress.choosing.layers` finds it in a compiled graph
        self.calls = 0
        self.begun = -1  # the step of the draws when the layer was converted
        self.draws = Draws.of(name)
        self.origins: Origins | None = None
        self.follow(method, grid, "memory")

    def follow(self, method: Method, grid: Grid | None, plan: str) -> None:
        """Set method, grid and plan; the next forward follows them."""
        self._method, self.grid, self.plan = method, grid, plan
        self.running = numbers_chosen(method, False)
        self.spec = f"{Config(self.running, grid).word} {method.automatic} {plan}"
        self._calls: dict[Any, Call | str] = {}  # (shapes, dtype, device …) of x and w → how it runs, or why exact

    @property
    def method(self) -> Method:
        return self._method

    @method.setter
    def method(self, method: Method) -> None:
        self.follow(method, self.grid, self.plan)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_calls": {}}

    @property
    def ran(self) -> Ran:
        """What the layer's last training step did."""
        return self.draws.ran

    @property
    def reached(self) -> bool:
        """Whether a training step has run through the layer."""
        return self.draws.ran.method is not None or self.draws.step > self.begun or bool(self._calls)

    def forget(self) -> None:
        """Begin a new record: what ran before was another conversion's."""
        self.draws.ran, self.begun, self.calls = Ran(), self.draws.step, 0

    def choose_numbers(self, device: torch.device) -> None:
        """Choose the number format of an automatic method for that device."""
        if self.method.automatic:
            kernels = autograd.KERNELS.get(device.type)
            self.running = numbers_chosen(self.method, kernels is not None and kernels.has_fp8(device))

    @constant_in_graphs
    def keep_nothing(self) -> None:
        """Record that this forward, of a frozen layer, keeps nothing: no gradient is asked of it."""
        self.draws.ran = Ran()

    @constant_in_graphs
    def stay_exact(self, why: str) -> None:
        """Record why this forward is PyTorch's own."""
        self.fallback = why

    @left_to_eager
    def _eager(
        self, module: Any, x: Tensor, place: Place | None, differentiated: bool, origins: Origins | None
    ) -> Tensor | None:
        w = module.weight
        if not isinstance(x, Tensor):
            _check(self, x, w, place)
        needs_x, trained = x.requires_grad, w.requires_grad
        if not (differentiated and (needs_x or trained)):
            _check(self, x, w, place)
            if differentiated:
                self.keep_nothing()
            # Also where no gradient is asked for: a checkpoint's first forward may run under no_grad, and its second
            # one repeats its draws.
            if x.device.type == "cuda":
                self._key_on_gpu(x.device, None)
            else:
                self.draws.next()
            return None
        device, kernels = x.device, autograd.KERNELS.get(x.device.type)
        off = None if kernels is None else kernels.switched_off()
        cast = autocast_to(device.type) if any_autocast() else None
        kind = type(x)
        seen = (kind, x.shape, x.dtype, device, x.layout, w.shape, needs_x, trained, cast, place, off)
        found = self._calls.get(seen)
        if found is None:
            _check(self, x, w, place)
            if len(self._calls) == _SHAPES:
                self._calls.clear()
            found = self._calls[seen] = self._decide(module, x, place)
        if isinstance(found, str):
            self.fallback = found
            return None
        self.fallback = None
        key = self._key_on_gpu(device, found.config) if device.type == "cuda" else self.draws.next()
        self.calls += 1
        origin = None if origins is None else origins.of(x)
        args = x, w, module.bias, found, key, origin
        try:
            if kind is Tensor or not sees_functions(kind):
                return autograd.apply(*args)
            # Results of an autograd function whose forward makes them of such a class are views, and not to be written
            # to.
            return kind.__torch_function__(autograd.apply, (kind,), args)  # type: ignore[no-any-return]
        except RuntimeError as error:  # PyTorch's: another dtype than the weight's, an image smaller than the kernel
            given = ", ".join(f"{what} {t.dtype} {tuple(t.shape)}" for what, t in (("input", x), ("weight", w)))
            error.add_note(f"hotrain: in layer {self.name!r}: {given}")
            raise

    def _decide(self, module: Any, x: Tensor, place: Place | None) -> Call | str:
        """How the layer runs an input like x, or why it stays exact; kept for each shape."""
        w, kind = module.weight, type(x)
        if sees_functions(kind) and getattr(kind.__torch_function__, "__func__", None) is not _OF_TENSORS:
            return (
                f"its input is a {kind.__name__}, whose own __torch_function__ decides what functions return; "
                "x.as_subclass(torch.Tensor) in front of the model converts it"
            )
        geometry = None if place is None else Geometry((w.shape[2], w.shape[3]), *_constant(place))
        self.choose_numbers(x.device)
        question = self._question(_facts(module, x), geometry)
        why = self._why_exact(question, w.requires_grad and _is_of_samples(x, place))
        if x.device.type == "cuda" and self.plan == "speed" and not torch.cuda.is_current_stream_capturing():
            advise_compiling()
        if why is not None:
            return why
        call = autograd.call_of(self._config(geometry), x, self.draws)
        if call.config.kernels:
            self._place(x.device)
        return call

    def _config(self, geometry: Geometry | None) -> Config:
        return Config(self.running, self.grid, self.transposed, geometry, name=self.name)

    def _key_on_gpu(self, device: torch.device, config: Config | None) -> Key:
        """The key of this forward, for its configuration if it follows the method: the reference is given an integer
        where the host knows it."""
        if self.draws.counter is None or self.draws.counter.device != device:
            self._place(device)
        key = self.draws.next_on(device, autograd.KERNELS[device.type].next_key)
        if config is None or config.kernels:
            return key
        word = self.draws.host_key()
        return key if word is None else word

    @constant_in_graphs
    def prepare(self, spec: str, samples: bool, place: Place | None, *facts: Any) -> tuple[str, bool] | None:
        """The part of `_traced` that runs outside of Dynamo, once, when the layer is traced.

        `spec` is an argument so that Dynamo reads it; `samples` is as of `_why_exact`, `facts` are of `_facts`.

        Returns:
            The word of the configuration and whether it draws; None where the exact path runs.
        """
        shape, dtype, device, _, w, *_ = facts
        geometry = None if place is None else Geometry(w[2:], *place)
        self.choose_numbers(device)
        question = self._question(facts, geometry)
        self.fallback, self.asked = self._why_exact(question, samples), question
        self.calls += self.fallback is None
        for draws in place_all(device):
            _make_ready(draws, device)
        self._place(device)
        if self.fallback is not None:
            if question is not None:
                planning.times_of_patches(question)
            return None
        config = self._config(geometry)
        kernels = autograd.unsupported(config, config.layout_of(shape), dtype, device) is None
        word = replace(config, kernels=kernels).word
        if question is not None:
            planning.rehearse(question)  # the reference caches tensors too, which a CUDA graph must not own
            self.traced = (word, *_sizes_of_gradients(question, config), question.outputs, question.trained)
        return word, config.draws

    def _question(self, facts: tuple[Any, ...], geometry: Geometry | None) -> planning.Question | None:
        """The layer on a GPU as a question to `hotrain.planning`; None elsewhere."""
        x, dtype, device, needs_x, w, weights, trained, bias, trains_bias, last = facts
        if device.type != "cuda":
            return None
        if geometry is not None and len(x) == 3:
            x = (1, *x)  # one image without a batch
        of_layer = self.running, self.grid, self.transposed, geometry, device
        return planning.Question(x, w, dtype, weights, bias, needs_x, trained, *of_layer, trains_bias, last)

    def _why_exact(self, question: planning.Question | None, samples: bool) -> str | None:
        """Why the layer stays exact, or None; there is a question where a plan may keep it exact.

        `samples` is whether rows are samples rather than tokens (a 2-D input, one token per sample, a 1×1 image), and
        the weight is trained. A low-rank step would mix them, unless a `filter_fn` selected the layer.
        """
        if samples and self.method.grad_weight.is_low_rank and not self.chosen:
            return _SAMPLES
        if question is None or self.plan == "memory":
            return None
        config = self._config(question.geometry)
        if config.overlaps:
            return "its patches overlap, so that its codes are multiplied in 16 bits, slower; plan='memory' converts it"
        # The layout matters only in that there are tokens.
        why = autograd.unsupported(config, config.layout((1, 16)), question.dtype, question.device)
        if why is not None:
            return f"no kernel supports it here ({why}), and the reference is slower; plan='memory' converts it"
        graphs = self.plan == "graphs"
        saved = question.trained and question.needs_x and len(question.x) > 2  # in codes, and not a batch of images
        unpacks = graphs and self.origins is not None and saved
        return planning.verdict(question, graphs, unpacks)

    def gain(self) -> tuple[tuple[Any, ...], float]:
        """The layer as `compress.choosing.layers` finds it in a graph, and the ms of a compiled step that it is faster
        converted, where its plan has measured it; of an exact one, that its patches are faster as a product."""
        q = self.asked
        if q is not None and self.fallback is None:
            return self.traced, planning.gain(q, graphs=self.plan == "graphs")
        if q is None or not q.multiplies:
            return (), 0.0
        return (planning.PATCHES, *_sizes_of_gradients(q, self._config(q.geometry))), planning.gain_of_patches(q)

    def _place(self, device: torch.device) -> None:
        if self.draws.place(device):
            _make_ready(self.draws, device)


# Functions in the place of methods: of each method that it traces, Dynamo checks before every call of the compiled code
# that the object has none of its own. Of an object that is an argument of a constant's function it checks the identity,
# so that blocks could not share their code: `prepare` is a method.


def forward(
    state: LayerState, module: Any, exact: Callable[[Any, Tensor], Tensor], x: Tensor, place: Place | None = None
) -> Tensor:
    """The result of a layer in training.

    Args:
        state: of the layer.
        module: the layer.
        exact: PyTorch's own forward, for where the method does not run. Of `super()` Dynamo would check each class.
        x: its input.
        place: of a convolution.

    Raises:
        TypeError, ValueError: as `functional.check_input`.
    """
    if "parametrizations" not in getattr(module, CHILDREN, ()):
        y = _by_method(state, module, x, place)
        return exact(module, x) if y is None else y
    with cached():  # weight and bias are read several times; PyTorch computes them once in a forward
        y = _by_method(state, module, x, place)
        return exact(module, x) if y is None else y


def _by_method(state: LayerState, module: Any, x: Tensor, place: Place | None) -> Tensor | None:
    """The result by the method, or None where PyTorch's own forward is to run."""
    if torch.compiler.is_dynamo_compiling():
        return _traced(state, module, x, place)
    # Nothing is shared across the borders of a checkpoint, of which the second forward must find the same.
    origins = state.origins if state.origins and state.origins.checkpoint == current_checkpoint() else None
    args = module, x, place, differentiates(), origins
    return without_own_modes(state._eager, *args)  # type: ignore[no-any-return]


def _check(state: LayerState, x: Tensor, w: Tensor, place: Place | None) -> None:
    """Check the input against the weight, whose shape PyTorch reads in place of `in_features` and `in_channels`."""
    if place is None:
        functional.check_input(state, x, w.shape[0 if state.transposed else 1], -1)
    else:
        functional.check_input(state, x, w.shape[1] * place[3], -3)


def _traced(state: LayerState, module: Any, x: Tensor, place: Place | None) -> Tensor | None:
    """`LayerState._eager` under Dynamo.

    Nothing that changes from step to step is read, so that nothing is compiled twice; the record of the layer is
    written when the compiled code runs.
    """
    w = module.weight
    _check(state, x, w, place)
    if not differentiates():
        return None
    if not (x.requires_grad or w.requires_grad):
        state.keep_nothing()
        return None
    samples = False
    if w.requires_grad and _is_of_samples(x, place):  # a branch, which specializes a symbolic bool
        samples = True
    found = state.prepare(state.spec, samples, None if place is None else _constant(place), *_facts(module, x))
    if found is None:
        return None
    config, draws = found
    layer = ops.linear if place is None else ops.conv2d
    counter = state.draws.counter if draws else None
    history = state.draws.history.words  # type: ignore[union-attr]
    y: Tensor = layer(x, w, module.bias, counter, history, config, "", [])
    return y


def _is_of_samples(x: Tensor, place: Place | None) -> bool:
    return math.prod(x.shape[1:-1] if place is None else x.shape[-2:]) == 1


def _sizes_of_gradients(question: planning.Question, config: Config) -> tuple[int, ...]:
    """The shape of x where patches overlap, else the tokens and columns of the products of backward."""
    x, geometry = question.x, config.geometry
    if config.overlaps:
        return x
    lead = x[:-1] if geometry is None else (x[0], *geometry.output_size(*x[-2:]))
    return math.prod(lead), question.columns


def _facts(module: Any, x: Tensor) -> tuple[Any, ...]:
    """What a plan depends on: of x its shape, dtype in a product, device and gradient, then of the weight, and bias;
    and whether an image of few channels is in channels_last, others being laid out so."""
    w, b = module.weight, module.bias
    of_x = constants(x.shape), autocast_dtype(x), x.device, x.requires_grad
    of_b = b is not None, b is not None and b.requires_grad
    few = w.dim() == 4 and w.shape[1] < FEW
    last = not few or not (x.is_contiguous() and w.is_contiguous())
    return *of_x, constants(w.shape), w.dtype, w.requires_grad, *of_b, last


def _constant(place: Place) -> Place:
    """The fields of a convolution, with integers where Dynamo may have made them symbolic."""
    return tuple(
        [n if isinstance(n, str) else constants(n) if isinstance(n, tuple) else operator.index(n) for n in place]
    )


def _make_ready(draws: Draws, device: torch.device) -> None:
    """Mark a layer's new tensors as static inputs of compiled graphs, and prepare what the kernels share."""
    for tensor in (draws.counter, draws.history.words):  # type: ignore[union-attr]
        static_in_graphs(tensor)  # type: ignore[arg-type]
    if device.type in autograd.KERNELS:
        autograd.KERNELS[device.type].prepare(device)


@cache
def advise_compiling() -> None:
    """Warn, once per process, that eager mode on a GPU is slower than compiled graphs."""
    warnings.warn(
        "hotrain: this model runs in eager mode on a GPU, where the host limits its speed; "
        "fast = hotrain.compile(model) trains it as CUDA graphs.",
        stacklevel=2,
    )


@lru_cache(maxsize=1024)
def numbers_chosen(method: Method, fp8: bool) -> Method:
    """`Method.on_device`, the same object each time."""
    return method.on_device(fp8)


def constants(sizes: Sequence[int]) -> tuple[int, ...]:
    """Sizes that Dynamo may have made symbolic, as integers: a graph is specialized to one shape."""
    return tuple([operator.index(n) for n in sizes])


def layer_state(module: nn.Module) -> LayerState | None:
    """The state of a converted module, None for another."""
    return module.__dict__.get(ATTRIBUTE)


def layer_states(model: nn.Module) -> Iterator[tuple[str, LayerState]]:
    """(fully qualified name, state) of every converted layer of a model, once each."""
    for name, module in model.named_modules():
        state = layer_state(module)
        if state is not None:
            yield name, state
