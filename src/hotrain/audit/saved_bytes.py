"""Measured bytes that autograd keeps alive between forward and backward.

One forward in training mode runs under saved-tensor hooks. Every tensor that a node of the graph saves passes through
them, whatever saved it: an ATen operator, a `torch.autograd.Function`, a checkpoint. Counted are the distinct storages
that are alive when the forward has returned, each once and completely, because a view keeps all of its storage.
Parameters and buffers are not counted: they are alive anyway. Copies of weights made by autocast are counted under a
name of their own: they do not grow with the batch.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from ..compress.report import tensors
from ..functional import check_model
from ..nn.state import layer_states
from ..private import compiled_part, node_number, saved_tensor_hooks
from ..tables import bytes_text, table
from .unchanged import as_found

CHECKPOINT = "checkpoint input"
WEIGHT_COPY = "autocast copy of a weight"
ELSEWHERE = "outside the output's graph"


@dataclass(frozen=True)
class SavedBytes:
    """Bytes kept between forward and backward of one batch.

    Attributes:
        total: bytes of all distinct storages.
        by_module: module name ("" is the model itself) → bytes first saved in that module's own forward.
        by_operator: operator → bytes first saved by it, by the names of PyTorch's operators (``native_layer_norm``);
            converted layers are ``hotrain linear`` and so on.
        rows: one dict per storage: module, operator, dtype, shape (of the tensor that was saved first), bytes, and
            input: whether it is an input's own storage.
        device_peak: bytes, the allocator's peak over one forward and backward, above what was allocated before; or
            None.
    """

    total: int
    by_module: dict[str, int]
    by_operator: dict[str, int]
    rows: list[dict[str, Any]]
    device_peak: int | None = None

    @property
    def of_inputs(self) -> int:
        """Bytes of the total that are the inputs' own storages."""
        return sum(row["bytes"] for row in self.rows if row["input"])

    def __str__(self) -> str:
        lines = [
            f"kept between forward and backward: {bytes_text(self.total)} in {len(self.rows)} storages",
            table(["operator", "bytes", "share"], _shares(self.by_operator, self.total)),
            "",
            table(["module", "bytes", "share"], _shares(self.by_module, self.total)),
        ]
        if self.device_peak is not None:
            lines.append(f"\npeak of the device's allocator over forward and backward: {bytes_text(self.device_peak)}")
        return "\n".join(lines)


def saved_bytes(model: nn.Module, *inputs: Any, device_peak: bool = False, **kwargs: Any) -> SavedBytes:
    """Count what autograd keeps for the backward of ``model(*inputs, **kwargs)``.

    A model in eval mode is put into training mode for this one forward; a model in training mode keeps the modes of
    its parts (a frozen BatchNorm stays frozen). Call it under the autocast context that training uses. The batch itself
    is counted if a node saves it. Parameters, buffers, generators and random draws are restored, other attributes that
    forward writes are not; ``.grad`` is not changed.

    Args:
        model: the model, exact or converted.
        *inputs: its arguments, a batch.
        device_peak: also run a second forward with a backward and read the peak of the CUDA allocator, whose statistics
            are reset.
        **kwargs: its keyword arguments.

    Raises:
        TypeError: it is no model.
        ValueError: it has a lazy module, no output requires grad, or ``device_peak`` with no input on a CUDA device.
    """
    check_model("saved_bytes", model)
    check_shapes("saved_bytes", model)
    device = _cuda_device(inputs, kwargs) if device_peak else None
    with as_found(model), torch.enable_grad():
        if not model.training:
            model.train()
        seen = _Seen(model)
        own = {key for tensor in tensors([inputs, kwargs]) for key, _ in _storages(tensor)}
        with _module_stack(model, seen), saved_tensors_hooks(seen.pack, _unpack):
            output = model(*inputs, **kwargs)
        roots = [t.grad_fn for t in tensors(output) if t.grad_fn is not None]
        if not roots:
            raise ValueError(
                f"saved_bytes: no output of {type(model).__name__} requires grad, so nothing is kept for a backward; "
                "unfreeze a parameter, and call it outside torch.inference_mode()"
            )
        rows = seen.rows(_names_by_sequence(roots), own)
        del output, roots
        peak = _device_peak(model, inputs, kwargs, device) if device is not None else None
    total = sum(row["bytes"] for row in rows)
    return SavedBytes(total, _summed(rows, "module"), _summed(rows, "operator"), rows, peak)


@contextmanager
def counting(model: nn.Module) -> Iterator[Callable[[], int | None]]:
    """Context of a forward of the model, which changes nothing of it.

    Yields:
        () → bytes that it keeps, as `SavedBytes.total`; None within other saved-tensor hooks, which take them away, and
        where hooks are not allowed.
    """
    hooks, allowed = saved_tensor_hooks.innermost()
    if hooks is not None or not allowed:
        yield lambda: None
        return
    seen = _Seen(model)
    with saved_tensors_hooks(seen.pack, _unpack):
        yield lambda: sum(row["bytes"] for row in seen.rows({}, set()))


def check_shapes(function: str, model: nn.Module) -> None:
    """Raise ValueError for a model with a lazy module that has not run: running it here would change the model."""
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(t):
            raise ValueError(f"{function}: {name!r} is lazy and has no shape yet; run a forward pass before")


_CAST = "ToCopyBackward0"
_VIEWS_AND_CASTS = {_CAST, "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0"}


class _Kept:
    """What the graph refers to in place of a saved tensor; it is freed with its node."""

    __slots__ = ("__weakref__", "module", "operator", "sequence", "tensor")

    def __init__(self, tensor: Tensor, module: str, sequence: int, operator: str | None) -> None:
        self.tensor, self.module = tensor, module
        self.sequence, self.operator = sequence, operator  # the operator's name if it is known already


def _unpack(kept: _Kept) -> Tensor:
    return kept.tensor


class _Seen:
    """The pack hook and the tensors that it saw, in order."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.of_model = model, _storages_of_model(model)
        self.stack: list[str] = [""]
        self.packed: list[weakref.ref[_Kept]] = []

    def pack(self, tensor: Tensor) -> _Kept:
        # A node gets its number when it is made, and saves before the next one is made: it has the last number.
        sequence = node_number()
        # Detached: a result refers to its node, and if the node saves it, the two would keep each other alive.
        operator = CHECKPOINT if _called_by_checkpoint() else WEIGHT_COPY if self._is_weight_copy(tensor) else None
        kept = _Kept(tensor.detach(), self.stack[-1], sequence, operator)
        self.packed.append(weakref.ref(kept))
        return kept

    def _is_weight_copy(self, tensor: Tensor) -> bool:
        """Whether the tensor is a parameter cast to another dtype, or a view of that."""
        node, cast = tensor.grad_fn, False
        while node is not None and node.name() in _VIEWS_AND_CASTS:
            cast |= node.name() == _CAST
            node = node.next_functions[0][0]
        parameter = getattr(node, "variable", None)  # AccumulateGrad's
        return cast and parameter is not None and any(key in self.of_model for key, _ in _storages(parameter))

    def rows(self, operators: dict[int, str], inputs: set[int]) -> list[dict[str, Any]]:
        """One dict for each distinct storage that is alive, largest first."""
        rows = []
        counted = self.of_model | _storages_of_model(self.model)  # what layers own may be made in their first forward
        for reference in self.packed:
            kept = reference()
            if kept is None:  # its node was freed
                continue
            operator = kept.operator or operators.get(kept.sequence, ELSEWHERE)
            for key, size in _storages(kept.tensor):
                if key in counted:
                    continue
                counted.add(key)
                rows.append(
                    {
                        "module": kept.module,
                        "operator": operator,
                        "dtype": str(kept.tensor.dtype).removeprefix("torch."),
                        "shape": tuple(kept.tensor.shape),
                        "bytes": size,
                        "input": key in inputs,
                    }
                )
        return sorted(rows, key=lambda row: -row["bytes"])


def _called_by_checkpoint() -> bool:
    """Whether torch.utils.checkpoint is saving its inputs, for which not all versions make a node."""
    frames = islice(walk_stack(sys._getframe(2)), 3)
    return any(frame.f_globals.get("__name__") == "torch.utils.checkpoint" for frame, _ in frames)


@contextmanager
def _module_stack(model: nn.Module, seen: _Seen) -> Iterator[None]:
    """Context in which `seen.stack` has the names of the modules whose forward runs."""

    def enter(name: str, *_: Any) -> None:
        seen.stack.append(name)

    def leave(*_: Any) -> None:
        seen.stack.pop()

    compiled = [part for module in model.modules() if (part := compiled_part(module)) is not None]
    traced = {inner for part in compiled for inner in part.modules()}
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if module in traced:  # a hook would be traced too, and cause a recompilation
                continue
            hooks.enter_context(module.register_forward_pre_hook(partial(enter, name), prepend=True))
            hooks.enter_context(module.register_forward_hook(leave, always_call=True))
        yield


def _names_by_sequence(roots: list[Node]) -> dict[int, str]:
    """Sequence number → operator, for every node that a backward from `roots` would run."""
    return {node_number(node): operator_name(node) for node in _nodes(roots)}


def _nodes(roots: list[Node]) -> set[Node]:
    """All that a backward from `roots` would run."""
    found, todo = set[Node](), list(roots)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(following for following, _ in node.next_functions if following is not None)
    return found


def operator_name(node: Node) -> str:
    """Name of a node: ``AddmmBackward0`` → ``addmm``; hotrain's → ``hotrain linear``; others by class name."""
    name = re.sub(r"Backward\d*$", "", node.name().split("::")[-1])
    function = getattr(node, "_forward_cls", None)
    if function is None:
        return _snake(name)
    if function.__module__.split(".")[0] == "hotrain":
        return "hotrain " + _snake(re.sub(r"^Hadamard|Function$", "", name)).replace("_", " ")
    return name


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _storages_of_model(model: nn.Module) -> set[int]:
    # Draw counters and amax histories live with the layers, from step to step.
    owned: list[Tensor] = []
    for _, state in layer_states(model):
        owned += [] if state.draws.counter is None else [state.draws.counter]
        owned += [] if state.draws.history is None else [state.draws.history.words]
    tensors = [*model.parameters(), *model.buffers(), *owned]
    return {key for tensor in tensors for key, _ in _storages(tensor)}


def _storages(tensor: Tensor) -> list[tuple[int, int]]:
    """(identity, bytes) of the storages under a tensor: several for sparse tensors and wrapper subclasses."""
    if hasattr(tensor, "__tensor_flatten__"):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [pair for part in inner if isinstance(part, Tensor) for pair in _storages(part)]  # a mesh is none
    if tensor.layout is torch.sparse_coo:
        return _storages(tensor._indices()) + _storages(tensor._values())
    storage = tensor.untyped_storage()
    return [(StorageWeakRef(storage).cdata, storage.nbytes())]


def _cuda_device(inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for tensor in tensors([inputs, kwargs]):
        if tensor.is_cuda:
            return tensor.device
    raise ValueError("saved_bytes: device_peak=True reads the CUDA allocator, but no input is on a CUDA device")


def sum_of_results(outputs: Any) -> Tensor:
    """The sum, (), in float32, of all tensors in a model's outputs that require a gradient: a loss for measuring."""
    return torch.stack([t.float().sum() for t in tensors(outputs) if t.requires_grad]).sum()


def _device_peak(model: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> int:
    leaves = [t for t in [*model.parameters(), *tensors([inputs, kwargs])] if t.requires_grad]
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    torch.autograd.grad(sum_of_results(model(*inputs, **kwargs)), leaves, allow_unused=True)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _shares(sizes: dict[str, int], total: int) -> list[list[str]]:
    return [[name or "(model)", bytes_text(size), f"{size / max(total, 1):.1%}"] for name, size in sizes.items()]


def bytes_inside(audit: SavedBytes, names: Iterable[str]) -> dict[str, int]:
    """Name of a module → bytes first saved in it, or in a module inside of it."""
    inside = dict.fromkeys(names, 0)
    for module, size in audit.by_module.items():
        for name in inside:
            if module == name or module.startswith(f"{name}."):
                inside[name] += size
    return inside


def _summed(rows: list[dict[str, Any]], field: str) -> dict[str, int]:
    """Bytes by one field of the rows, largest first."""
    sizes: Counter[str] = Counter()
    for row in rows:
        sizes[row[field]] += row["bytes"]
    return dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))
