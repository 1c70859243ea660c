"""`LayerState`: method, random draws, plan and fallback of a converted layer, and the step of each forward."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from .. import autograd, ops, planning
from ..autograd import Step
from ..compress.sharing import Origin, Origins
from ..convolution import Geometry
from ..draws import ATTRIBUTE, Draws, place_all
from ..layer_record import Ran
from ..method import Method
from ..private import constant_in_graphs, static_in_graphs
from ..transform.tokens import Grid

REVERTED = "reverted"  # why a layer of an earlier conversion is exact, in the report of that conversion

_SAMPLES = "2-D input (or one token a sample): its rows are samples, not tokens"


@dataclass
class LayerState:
    """The state of one converted layer.

    Attributes:
        name: fully qualified, in its model.
        method: assignable; the next forward follows it.
        grid: of its tokens, where known.
        chosen: whether a `filter_fn` selected the layer, so that rows that are samples count as tokens too.
        fallback: why the layer ran exact, if it did.
        calls: training forwards that followed the method; of a compiled layer, those that were traced.
        plan: whether the layer stays exact on a GPU where its method would be slower (`hotrain.convert`).
        draws: its random draws.
        spec, random, low_rank: what Dynamo reads of the running method and the grid, and so guards on.
        origins: the producers of saved activations, for activation sharing (``memory="block"``).
        verdicts: cached decisions of the plan for the current method, grid and plan.
        running: the method with its number format chosen for the device of the last forward, or of the weight.
    """

    name: str
    method: Method
    grid: Grid | None = None
    chosen: bool = False
    fallback: str | None = None
    calls: int = 0
    plan: str = "memory"
    draws: Draws = field(default=None)  # type: ignore[assignment]
    spec: str = field(init=False, repr=False, default="")
    random: bool = field(init=False, repr=False, default=False)
    low_rank: bool = field(init=False, repr=False, default=False)
    origins: Origins | None = field(repr=False, compare=False, default=None)
    verdicts: dict[Any, str | None] = field(init=False, repr=False, compare=False, default_factory=dict)
    running: Method = field(init=False, repr=False, compare=False, default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.draws is None:
            self.draws = Draws.of(self.name)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("method", "grid", "plan"):
            self.__dict__["verdicts"] = {}
        if name == "method":
            self.__dict__["running"] = numbers_chosen(self.method, False)
        if name in ("method", "running", "grid") and "grid" in self.__dict__:
            self.__dict__["spec"] = ops.encode(self.running, self.grid)
            self.__dict__["random"] = self.running.draws
            self.__dict__["low_rank"] = self.running.grad_weight.is_low_rank

    @property
    def ran(self) -> Ran:
        """What the layer's last training step did."""
        return self.draws.ran

    @property
    def reached(self) -> bool:
        """Whether a training step has run through the layer."""
        return self.draws.ran.method is not None or self.draws.step >= 0

    def choose_numbers(self, device: torch.device) -> None:
        """Choose the number format of an automatic method for that device."""
        if self.method.automatic:
            kernels = autograd.kernels_for(device)
            running = numbers_chosen(self.method, kernels is not None and kernels.has_fp8(device))
            if running is not self.running:
                self.running = running

    def step(self, module: Any, x: Tensor, samples_only: bool, transposed: bool = False) -> Step | None:
        """The step of this forward, or None where the exact path runs.

        Args:
            module: the layer.
            x: its input.
            samples_only: whether the rows of x are samples rather than tokens (a 2-D input, one token per sample, a
                1×1 image). A low-rank step would mix them, so the layer runs exact unless a `filter_fn` selected it.
            transposed: whether the weight is (I, O).
        """
        if not module.training:
            return None
        asked = self._asked(module, x)
        if asked:
            self.choose_numbers(x.device)
            self.fallback = _SAMPLES if samples_only and self._mixes(module) else self._planned(module, x, transposed)
            if self.fallback is not None:
                return None
        # Also where no gradient is asked for: a checkpoint's first forward may run under no_grad, and its second one
        # repeats its draws.
        key: int | Tensor
        word = None
        if x.device.type == "cuda":
            if self.plan == "speed" and not torch.cuda.is_current_stream_capturing():
                advise_compiling()
            self._place(x.device)
            kernels = autograd.kernels_for(x.device)
            assert kernels is not None
            key, word = self.draws.next_on(x.device, kernels.next_key), self.draws.host_key()
        else:
            key = self.draws.next()
        if not asked:
            return None
        self.calls += 1
        return Step(
            self.running, key, self.grid, transposed, self.name, self.draws.handle, word,
            origin=self.origin(x), ran=self.draws.ran,
        )  # fmt: skip

    def _planned(self, module: Any, x: Tensor, transposed: bool) -> str | None:
        """Why the layer stays exact by the plan, cached for each shape."""
        if self.plan == "memory":
            return None
        w, dtype = module.weight, autograd.autocast_dtype(x)
        asked = (x.device, w.requires_grad, x.shape, dtype, x.requires_grad)
        if asked not in self.verdicts:
            geometry = getattr(module, "geometry", None)
            facts = (tuple(x.shape), dtype, x.requires_grad, tuple(w.shape), w.dtype, module.bias is not None)
            self.verdicts[asked] = self._plan(self._question(x.device, w.requires_grad, geometry, *facts, transposed))
        return self.verdicts[asked]

    def origin(self, x: Tensor) -> Origin | None:
        """The producer of x, if it saves an activation that x can be rematerialized from."""
        return None if self.origins is None else self.origins.of(x)

    def traced(
        self,
        module: Any,
        x: Tensor,
        samples_only: bool,
        transposed: bool = False,
        geometry: tuple[Any, ...] | None = None,
    ) -> bool | None:
        """`step` under Dynamo: whether kernels may run the layer, or None where the exact path runs.

        Nothing that changes from step to step is read, so that nothing is compiled twice; the record of the layer is
        written while it is traced.

        Args:
            module: the layer.
            x: its input.
            samples_only: as in `step`.
            transposed: whether the weight is (I, O).
            geometry: the fields of a convolution's `Geometry`.
        """
        if not self._asked(module, x):
            return None
        w = module.weight
        facts = (constants(x.shape), autograd.autocast_dtype(x), x.requires_grad, constants(w.shape), w.dtype)
        mixes = False
        if samples_only and self._mixes(module):  # a branch, which specializes a symbolic bool
            mixes = True
        return self._prepare(mixes, geometry, x.device, w.requires_grad, *facts, module.bias is not None, transposed)

    def _asked(self, module: Any, x: Tensor) -> bool:
        return autograd.differentiates() and (x.requires_grad or module.weight.requires_grad)

    def _mixes(self, module: Any) -> bool:
        return self.low_rank and module.weight.requires_grad and not self.chosen

    def _plan(self, question: planning.Question | None) -> str | None:
        """Why the layer stays exact on a GPU, or None."""
        if question is None or self.plan == "memory":
            return None
        why = self._without_kernel(question.device, question.dtype, question.geometry)
        if why is not None:
            return f"no kernel supports it here ({why}), and the reference is slower; plan='memory' converts it"
        return planning.verdict(question, graphs=self.plan == "graphs")

    def _without_kernel(self, device: torch.device, dtype: torch.dtype, geometry: Geometry | None) -> str | None:
        """Why no kernel supports the layer on a GPU, or None."""
        kernels = autograd.kernels_for(device)
        if kernels is None:
            return "not a GPU"
        if geometry is not None and not geometry.is_patches:
            return "its patches overlap"
        # The layout matters only in that there are tokens.
        why: str | None = kernels.reason(self.running, Step(self.running, 0, self.grid).layout((1, 16)), dtype, device)
        return why

    def _question(
        self,
        device: torch.device,
        trained: bool,
        geometry: Geometry | None,
        x: tuple[int, ...],
        dtype: torch.dtype,
        needs_x: bool,
        w: tuple[int, ...],
        weights: torch.dtype,
        bias: bool,
        transposed: bool,
    ) -> planning.Question | None:
        """The layer on a GPU as a question to `hotrain.planning`; `trained`: whether w requires a gradient."""
        if device.type != "cuda" or not trained:
            return None
        if geometry is not None and len(x) == 3:
            x = (1, *x)  # one image without a batch
        return planning.Question(
            x, w, dtype, weights, bias, needs_x, self.running, self.grid, transposed, geometry, device
        )

    @constant_in_graphs
    def _prepare(
        self, mixes: bool, geometry: tuple[Any, ...] | None, device: torch.device, trained: bool, *facts: Any
    ) -> bool | None:
        """The part of `traced` that runs outside of Dynamo, once, when the layer is traced; facts as in `_question`."""
        place = None if geometry is None else Geometry(*geometry)
        self.choose_numbers(device)
        question = self._question(device, trained, place, *facts)
        self.fallback = _SAMPLES if mixes else self._plan(question)
        self.calls += self.fallback is None
        for draws in place_all(device):
            _ready(draws, device)
        self._place(device)
        if self.fallback is not None:
            return None
        dtype: torch.dtype = facts[1]
        if question is not None:
            planning.rehearse(question)  # the reference caches tensors too, which a CUDA graph must not own
        return self._without_kernel(device, dtype, place) is None

    def _place(self, device: torch.device) -> None:
        if self.draws.place(device):
            _ready(self.draws, device)


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


def _ready(draws: Draws, device: torch.device) -> None:
    """Mark the layer's new tensors as static inputs of compiled graphs, and prepare the kernels' buffers."""
    for tensor in (draws.counter, draws.tag):
        static_in_graphs(tensor)  # type: ignore[arg-type]
    kernels = autograd.kernels_for(device)
    if kernels is not None:
        kernels.prepare(0, device)  # of layers whose tag was copied: `draws.handle_of`
        kernels.prepare(draws.handle, device)


def layer_state(module: nn.Module) -> LayerState | None:
    """The state of a converted module, None for another."""
    return module.__dict__.get(ATTRIBUTE)


def layer_states(model: nn.Module) -> Iterator[tuple[str, LayerState]]:
    """(fully qualified name, state) of every converted layer of a model, once each."""
    for name, module in model.named_modules():
        state = layer_state(module)
        if state is not None:
            yield name, state
