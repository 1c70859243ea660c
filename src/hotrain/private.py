"""Private PyTorch API: every use of it, what it is for, and what happens in a PyTorch that does not have it.

No other module uses any (`tests/test_private.py`). Missing names never raise: what needs them falls back, as their
docstring says, and `warn_of_missing` tells the user. PyTorch's operators are not counted as private, with or without an
underscore (`torch.ops.aten.*`, `torch._int_mm`, `torch._scaled_mm`, `torch._fused_sdp_choice`): exported programs
contain them.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import CodeType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

TESTED = ("2.11", "2.13")

# What falls back where a name is missing.
EXACT = "converted layers compute exact gradients"
FULL = "activations between the layers are saved in full precision"
PREDICTION = "bytes cannot be predicted"
SLOWER = "training is slower"
MISSING: dict[str, str] = {}  # name → what falls back

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _find(name: str, fallback: str) -> Any:
    """What ``torch.<name>`` is; None where this PyTorch does not have it, which is noted in `MISSING`."""
    found: Any = torch
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        MISSING[name] = fallback
    return found


def falls_back(what: str) -> str:
    """Why ``what`` (`EXACT` or another one) falls back, "" if it does not."""
    names = [name for name, fallback in MISSING.items() if fallback == what]
    return f"PyTorch {torch.__version__} has no torch.{', torch.'.join(names)}" if names else ""


@functools.cache
def warn_of_missing() -> None:
    """Warn, once per process, of what falls back in this PyTorch."""
    for what in dict.fromkeys(MISSING.values()):
        warnings.warn(
            f"hotrain: {falls_back(what)}: {what}. hotrain is tested with PyTorch {' and '.join(TESTED)}.", stacklevel=3
        )


def constant_in_graphs(function: _Function) -> _Function:
    """Decorator: Dynamo calls the function once while it traces and takes the result as a constant.

    `torch.compiler.assume_constant_result`, without its import of Dynamo, which takes seconds. Without it: Dynamo
    traces the function, or breaks the graph.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# ---- autograd ----

_functorch = _find("_C._are_functorch_transforms_active", EXACT)
_forward_level = _find("autograd.forward_ad._current_level", EXACT)
_top_hooks = _find("_C._autograd._top_saved_tensors_default_hooks", FULL)
_hooks_enabled = _find("_C._autograd._saved_tensors_hooks_is_enabled", FULL)
_version = _find("Tensor._version", FULL)
_versions = itertools.count()


graph_task: Callable[[], int] = _find("_C._current_graph_task_id", EXACT) or (lambda: -1)
"""The number of the backward pass that runs, −1 for none: a forward seen within one is a recomputation. Without it:
−1, and layers are exact."""

version_of: Callable[[Tensor], int] = (lambda _: next(_versions)) if _version is None else _version.__get__
"""The version counter, which grows with in-place writes. Without it: new each time, so that nothing is reused."""

is_view: Callable[[Tensor], bool] = _find("Tensor._is_view", SLOWER) or (lambda _: True)
"""Whether autograd treats a tensor as a view. Without it: True, and results are written by slower operators."""


any_autocast: Callable[[], bool] = _find("_C._is_any_autocast_enabled", SLOWER) or (lambda: True)
"""Whether autocast is on for any kind of device. Without it: True, and each kind is asked for."""


def differentiates() -> bool:
    """Whether this forward takes part in reverse-mode autograd with the gradients of a method.

    Exported and traced programs, `torch.func` and forward-mode derivatives use those of PyTorch: autograd functions
    with a context do not support them. Without it, or another name that `EXACT` needs: False, so that layers compute
    exact gradients.
    """
    return torch.is_grad_enabled() and not _is_traced_or_transformed()


# Evaluated outside of Dynamo's trace: inside, `is_exporting` of PyTorch 2.11 is always True.
@constant_in_graphs
def _is_traced_or_transformed() -> bool:
    if not _exact_names or _functorch() or torch.autograd.forward_ad._current_level >= 0:
        return True
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def _innermost_hooks() -> tuple[Any, bool]:
    return (None, False) if _top_hooks is None or _hooks_enabled is None else (_top_hooks(True), _hooks_enabled())


@constant_in_graphs
def _current_checkpoint() -> int:
    hooks = None if _top_hooks is None or _hooks_enabled is None else _top_hooks(True)
    if hooks is None:
        return 0
    name = getattr(hooks[0], "__qualname__", "")  # a functools.partial has none
    return id(hooks[0]) if name.startswith("_checkpoint_hook.") else 0


class SavedTensorHooks(NamedTuple):
    """The stack of default saved-tensor hooks.

    Attributes:
        innermost: () → the innermost ones, None for none, and whether hooks are allowed.
        checkpoint: () → identity of the non-reentrant checkpoint whose forward runs, 0 for none; told by the name of
            its hooks. A constant to Dynamo.
    """

    innermost: Callable[[], tuple[Any, bool]]
    checkpoint: Callable[[], int]


saved_tensor_hooks: SavedTensorHooks = SavedTensorHooks(_innermost_hooks, _current_checkpoint)
"""Without it: none and not allowed, and activations between the layers are saved in full precision."""


def node_number(node: Any = None) -> int:
    """The number of a node of the graph, or of the newest one. Without it: 0, and `saved_bytes` names no operators."""
    if node is None:
        newest = getattr(torch.autograd, "_get_sequence_nr", None)
        return 0 if newest is None else newest() - 1
    number = getattr(node, "_sequence_nr", None)
    return 0 if number is None else number()


# ---- modes and dispatch ----

dispatch_modes: Callable[[], int] = _find("_C._len_torch_dispatch_stack", EXACT) or (lambda: 1)
"""How many tracers and other dispatch modes are active: if any, tensors must not be cached. Without it: 1."""

_disable_dispatch_modes = _find("utils._python_dispatch._disable_current_modes", EXACT)
_depth = _find("_C._len_torch_function_stack", FULL)
_function_at = _find("_C._get_function_stack_at", FULL)
_pop_function = _find("_C._pop_torch_function_stack", FULL)
_push_function = _find("_C._push_on_torch_function_stack", FULL)
_has_kernel = _find("_C._dispatch_has_kernel_for_dispatch_key", FULL)
_has_function_stack = None not in (_depth, _function_at, _pop_function, _push_function)
_function_depth: Callable[[], int] = _depth if _has_function_stack else lambda: 0


def no_dispatch_modes() -> AbstractContextManager[Any]:
    """Context for constants with data while a tracer is active. Without it: no effect, layers are exact."""
    return nullcontext() if _disable_dispatch_modes is None else _disable_dispatch_modes()


def _top_function_mode() -> Any:
    depth = _function_depth()
    return _function_at(depth - 1) if depth else None


def _without_function_modes(kind: type, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    removed: list[Any] = []
    while (depth := _function_depth()) and isinstance(_function_at(depth - 1), kind):
        removed.append(_pop_function())
    try:
        return call(*args, **kwargs)
    finally:
        while removed:
            _push_function(removed.pop())


class FunctionModes(NamedTuple):
    """The stack of TorchFunctionModes.

    Attributes:
        top: () → the innermost one, None if there is none.
        without: (kind, call, *args, **kwargs) → what the call returns with those of a class removed from the top.
    """

    top: Callable[[], Any]
    without: Callable[..., Any]


function_modes: FunctionModes = FunctionModes(_top_function_mode, _without_function_modes)
"""For hotrain's own mode. Without it: there are none, and hotrain's mode is not used."""


@functools.cache
def autocasts_itself(operator: str, device: str) -> bool:
    """Whether autocast lists the ATen operator on that device. Without it: False, and `FULL` falls back."""
    return _has_kernel is not None and _has_kernel(f"aten::{operator}", f"Autocast{device.upper()}")


def memory_format_of(t: Tensor) -> torch.memory_format:
    """The memory format by which PyTorch's operators choose that of their result. Without it: contiguous."""
    try:
        from torch._prims_common import suggest_memory_format
    except ImportError:
        return torch.contiguous_format
    return suggest_memory_format(t)


def schema_of(operator: Any) -> Any:
    """The schema of an operator, None for other functions. Without it: None, as if it neither writes nor aliases."""
    return getattr(operator, "_schema", None)


# ---- fake tensors ----


class Fakes(NamedTuple):
    """Tensors with a shape and no memory, and the context in which all tensors are made so."""

    tensor: type[Any]
    mode: Callable[[], AbstractContextManager[Any]]

    def include(self, t: Any) -> bool:
        """Whether t is one; False where there are none."""
        return isinstance(t, self.tensor) and self.tensor is not Tensor

    @staticmethod
    def hooks(module: nn.Module) -> list[dict[int, Any]]:
        """A module's hooks, before and behind forward and backward, by kind. Without it: none, and fakes reach them."""
        kinds = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
        return [vars(module)[kind] for kind in kinds if kind in vars(module)]


_fake_mode = _find("_subclasses.FakeTensorMode", PREDICTION)
_as_dispatched = _find("_C._PreserveDispatchKeyGuard", PREDICTION)


@contextmanager
def _fakes_made() -> Iterator[None]:
    """PyTorch's mode. Afterwards autograd is as before, also where `jvp` failed: what it set ends with its frames."""
    if why := falls_back(PREDICTION):
        raise NotImplementedError(why)
    with _as_dispatched(), _fake_mode():
        try:
            yield
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            raise


fakes = Fakes(_find("_subclasses.FakeTensor", PREDICTION) or Tensor, _fakes_made)
"""For `predicted_bytes`, and to recognize them. Without it: nothing is predicted."""


# ---- modules ----

CONV_FORWARD = "_conv_forward"
"""The method that forward of `nn.Conv2d` calls, and that users replace (convolutions of images that are tiles). Without
it: there is nothing to replace."""

CHILDREN = "_modules"
"""A module's children by name; "parametrizations" is the one that computes its weights. `is_parametrized` asks by a
`getattr` that Dynamo repeats in Python before each call. Without it: parametrized weights are computed for each use."""

CONV_PADS = "_reversed_padding_repeated_twice"
"""What forward of `nn.Conv2d` pads by where the mode is not zeros: (left, right, top, bottom), set when the layer is
made. Without it: `padding` and the kernel."""


# ---- several processes ----


def default_store() -> Any:
    """The key-value store of a distributed run, None without one. Without it: None, and each rank has its own plan."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return None
    found = getattr(distributed.distributed_c10d, "_get_default_store", None)
    return None if found is None else found()


# ---- torch.compile ----


def static_in_graphs(t: Tensor) -> None:
    """Let CUDA graphs read t at its address.

    `torch._dynamo.mark_static_address`, without its import of Dynamo. Without it: CUDA graphs copy t at each step.
    """
    t._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]


def compiled_part(module: nn.Module) -> nn.Module | None:
    """The module that `torch.compile` or `Module.compile` traces in this one's place. Without it: None."""
    original = dict(module.named_children()).get("_orig_mod")
    if original is None and getattr(module, "_compiled_call_impl", None) is not None:
        return module
    return original  # type: ignore[no-any-return]


def traced_graph_of(left_to_eager: Sequence[Callable[..., Any]]) -> torch.fx.Graph | None:
    """The graph that Dynamo has traced so far. Without it: None, and layers share no activations when compiled; without
    strategies of frames Dynamo compiles what runs in eager mode as well, slower.

    Args:
        left_to_eager: functions that Dynamo must not compile, with all that they call, where they run in eager mode
            after a graph break; nor `FunctionModes.without`, but what that calls may be a block of the user's.
    """
    try:
        from torch._dynamo import eval_frame
        from torch._dynamo.symbolic_convert import InstructionTranslator

        graph: torch.fx.Graph = InstructionTranslator.current_tx().output.current_tracer.graph  # type: ignore[attr-defined]
    except (ImportError, AttributeError):
        return None
    with suppress(AttributeError):
        skip, rest = eval_frame.FrameAction.SKIP, eval_frame.FrameAction.DEFAULT
        for function, inside in (*((each, skip) for each in left_to_eager), (_without_function_modes, rest)):
            code: CodeType = function.__code__  # type: ignore[attr-defined]
            eval_frame.set_code_exec_strategy(code, eval_frame.FrameExecStrategy(skip, inside))
    return graph


WRITTEN = "inductor_realize_to_strides"
"""In the ``meta`` of a graph's node: Inductor writes its result to memory, in strides of its own choice, and does not
compute it where it is read. Without it: the compiled step is slower."""


STRIDES = "eager_input_vals"
"""In the ``meta`` of a graph's node: the values of its arguments, whose strides Inductor keeps to for a custom operator
or a kernel. Without it: the order of their strides alone, and a kernel may read what is padded as if it were not."""


class Inductor(NamedTuple):
    """What the passes of `compress` use of Inductor and AOTAutograd."""

    config: Any  # whose `custom_partitioner_fn` it sets
    partitioner: type  # the base class of that setting
    graph_pass: type  # the base class of its `pre_grad_custom_pass`, which it sets too
    cut: Callable[..., tuple[torch.fx.GraphModule, torch.fx.GraphModule]]  # PyTorch's own partitioner
    decompositions: Callable[[], Any]  # what operators become before Inductor's lowering
    backend: Callable[..., Any]  # (mode, options, dynamic) → the backend of `torch.compile` with them
    # The target of a node that launches a Triton kernel, which writes to its arguments. None: operators stay.
    kernel: Any
    kernel_with_results: Any  # the same, written as a function: its results are new tensors
    order_by_memory: Callable[[], None]  # has Inductor's order count all that holds memory


@functools.cache
def inductor() -> Inductor:
    """Inductor's hooks for partitioners and graphs.

    Without it: AttributeError or ImportError, and compiled graphs save in full precision what no operator of hotrain's
    saves.

    Before 2.13, Inductor describes all that the arguments of a custom operator are computed from, where it first meets
    that operator, for a log that is mostly off. In a deep graph this takes hours, so it is left until it is written.
    """
    import torch._inductor.config as config
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
    from torch._inductor.decomposition import select_decomp_table

    _ = config.custom_partitioner_fn, config.pre_grad_custom_pass  # AttributeError where a setting is missing
    if torch.__version__ < "2.13":
        with suppress(ImportError, AttributeError):
            from torch._inductor.exc import OperatorIssue
            from torch._logging import LazyString

            later: Any = functools.partial(LazyString, OperatorIssue.operator_str)  # type: ignore[call-arg]
            OperatorIssue.operator_str = staticmethod(later)  # type: ignore[assignment]
    with suppress(ImportError):
        importlib.import_module("torch._higher_order_ops.triton_kernel_wrap")  # an attribute of torch from then on
    wrap = "_higher_order_ops.triton_kernel_wrap.triton_kernel_wrapper"
    launch, with_results = (_find(f"{wrap}_{name}", SLOWER) for name in ("mutation", "functional"))
    if with_results is None:
        launch = None
    cut, backend = min_cut_rematerialization_partition, torch._TorchCompileInductorWrapper
    return Inductor(
        config, CustomPartitionerFn, CustomGraphPass, cut, select_decomp_table, backend, launch, with_results,
        _order_by_memory,
    )  # fmt: skip


@functools.cache
def _order_by_memory() -> None:
    """Have Inductor's order by peak memory count what holds memory, and compute weights' gradients when they can be.

    An operator's tuple holds all its results until the last one is taken, so they are taken right behind the operator.
    And what Inductor fuses across blocks, as sums of gradients, draws these blocks in front of their weights'
    gradients, which then keep activations and gradients until the end. Without it: more memory.
    """
    with suppress(ImportError, AttributeError):
        from torch._inductor import memory

        order: Callable[..., list[Any]] = memory.reorder_for_peak_memory
        inputs_of, peak_of = memory.get_freeable_input_buf, memory.estimate_peak_memory

        def by_memory(nodes: list[Any], buffers: Any, fused: Any, inputs: Any, outputs: Any, *rest: Any) -> list[Any]:
            found = order(nodes, buffers, fused, inputs, outputs, *rest)
            freed = inputs_of(found, inputs)
            orders = _results_behind(_reductions_early(found)), _results_behind(found)
            return min(orders, key=lambda each: peak_of(each, freed, outputs)[0])

        memory.reorder_for_peak_memory = by_memory  # type: ignore[assignment]


def _is_result(node: Any) -> bool:
    """Whether a scheduled node of Inductor takes a result out of a tuple."""
    return type(getattr(node, "node", None)).__name__ == "MultiOutput"


def _results_behind(nodes: Sequence[Any]) -> list[Any]:
    """Inductor's scheduled nodes, those that take a result out of a tuple right behind what makes the tuple."""
    made = {buffer.get_name() for node in nodes for buffer in node.get_outputs()}
    of: dict[str, list[Any]] = {}
    for node in nodes:
        if _is_result(node) and (name := node.node.inputs[0].get_name()) in made:
            of.setdefault(name, []).append(node)
    moved = {node for results in of.values() for node in results}
    ordered: list[Any] = []

    def put(node: Any) -> None:
        ordered.append(node)
        for buffer in node.get_outputs():
            for result in of.get(buffer.get_name(), ()):
                put(result)

    for node in nodes:
        if node not in moved:
            put(node)
    return ordered


def _reductions_early(nodes: Sequence[Any]) -> list[Any]:
    """Inductor's scheduled nodes, those that make little of much as soon as what they read is there.

    What only such a node reads, as the input that a weight's gradient dequantizes, is computed right before it.
    """
    place = {buffer.get_name(): n for n, node in enumerate(nodes) for buffer in node.get_outputs()}
    reads = [{place[d.name] for d in node.unmet_dependencies if d.name in place} - {n} for n, node in enumerate(nodes)]
    readers: list[set[int]] = [set() for _ in nodes]
    for n, each in enumerate(reads):
        for m in each:
            readers[m].add(n)
    step, moved = list(range(len(nodes))), set[int]()
    for n, node in enumerate(nodes):
        made = sum(buffer.mpi_buffer.size_alloc for buffer in node.get_outputs())  # a tuple: of all its results
        read = max((buffer.mpi_buffer.size_free for buffer in node.mpi_node.pred_buffers), default=0)
        if 8 * made > read or _is_result(node) or any(buffer.get_mutations() for buffer in node.get_outputs()):
            continue
        group, rest = {n}, [*reads[n]]
        while rest:
            m = rest.pop()
            if m not in moved and readers[m] <= group:
                group.add(m)
                rest += reads[m]
        ready = max((step[k] for m in group for k in reads[m] - group), default=-1)
        moved |= group
        for m in group:
            step[m] = ready
    return [nodes[n] for n in sorted(range(len(nodes)), key=lambda n: (step[n], n in moved, n))]


_exact_names = EXACT not in MISSING.values()
