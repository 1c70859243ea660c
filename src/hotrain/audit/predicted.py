"""Predicted bytes that autograd saves: a forward with fake tensors, which have a shape and no memory.

The measurement is `saved_bytes`, on a copy of the model with fake tensors, so that it takes no memory and no arithmetic
for any batch. The code that packs also gives the bytes. Predicted is what the reference saves on a CPU: on a GPU
kernels save a few bytes more with low-rank codes, and the backends of attention save other statistics.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..casting import autocast_to
from ..compress.report import Example, map_tensors
from ..functional import check_model
from ..nn.state import layer_states
from ..private import fakes
from .saved_bytes import SavedBytes, check_shapes, saved_bytes


def predicted_bytes(model: nn.Module, *inputs: Any, **kwargs: Any) -> SavedBytes:
    """Predict `saved_bytes` of ``model(*inputs, **kwargs)`` without running it, under the current autocast.

    Hooks of its modules do not run: they could keep fake tensors. What they save or change is not predicted. Where the
    model does not run without them, those of its own library do (transformers collects hidden states by hooks).

    Args:
        model: the model; it is not changed.
        *inputs: its arguments. Of tensors only shapes, strides and dtypes are read: ``torch.empty(shape,
            device="meta")`` will do.
        **kwargs: its keyword arguments.

    Raises:
        TypeError: it is no model.
        ValueError: the model needs values to run (it routes tokens, say), has a lazy module, or has a recurrent layer
            whose library says only when it runs what it keeps.
    """
    check_model("predicted_bytes", model)
    check_shapes("predicted_bytes", model)
    return _predicted(model, inputs, kwargs)


def before_and_now(model: nn.Module, example: Example, revert: Callable[[nn.Module], object]) -> tuple[int, int]:
    """Predict the bytes that a converted model saves for a batch: exact, and as converted.

    Args:
        revert: makes a converted model exact in place; called on a copy.

    Raises:
        ValueError: as `predicted_bytes`.
    """
    kind, dtype = example.autocast
    on = torch.autocast(kind, dtype or torch.bfloat16, enabled=dtype is not None)
    with on, torch.enable_grad():
        exact, now = (_predicted(model, example.args, example.kwargs, change).total for change in (revert, None))
    return exact, now


def _predicted(
    model: nn.Module, inputs: Any, kwargs: Any, change: Callable[[nn.Module], object] | None = None
) -> SavedBytes:
    """`saved_bytes` of a copy with fake tensors, after ``change`` was applied to the copy."""
    try:
        return _on_fakes(model, inputs, kwargs, change, hooked=False)
    except ValueError:
        if not any(_is_of_its_library(hook, module) for module, _, hook in _hooks(model)):
            raise
        return _on_fakes(model, inputs, kwargs, change, hooked=True)


def _hooks(model: nn.Module) -> list[tuple[nn.Module, Callable[[], object], Any]]:
    """Each hook with its module, and what removes it."""
    kinds = [(module, hooks) for module in model.modules() for hooks in fakes.hooks(module)]
    return [(module, partial(hooks.pop, n), hook) for module, hooks in kinds for n, hook in hooks.items()]


def _is_of_its_library(hook: Any, module: nn.Module) -> bool:
    """Whether a hook is of the library that the module's class is of."""
    libraries = [str(getattr(each, "__module__", "")).partition(".")[0] for each in (hook, type(module))]
    return libraries[0] == libraries[1]


def _on_fakes(
    model: nn.Module, inputs: Any, kwargs: Any, change: Callable[[nn.Module], object] | None, hooked: bool
) -> SavedBytes:
    """As `_predicted`, with the hooks of the model's own library, or none."""
    for name, module in model.named_modules():
        if _has_a_workspace(module):
            raise ValueError(
                f"predicted_bytes: {name or 'the model'!r} is an {type(module).__name__}, whose workspace has a size "
                "only when it runs; use hotrain.saved_bytes, which runs it"
            )
        if not hooked and _has_a_computed_weight(module):
            raise ValueError(f"predicted_bytes: {name or 'the model'!r} has a weight that a hook of its own computes")
    # Counters and amax histories have values, which a copy of them reads.
    memory: dict[int, Any] = {id(state.draws): copy.deepcopy(state.draws) for _, state in layer_states(model)}
    if not hooked:  # a function that is copied writes to what it wrote to
        memory |= {id(hooks): OrderedDict() for module in model.modules() for hooks in fakes.hooks(module)}
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True  # what refuses fake tensors raises: no traceback beside that
    try:
        # What the model makes is where its fake weights are: on the CPU, under its autocast if the GPU's is on.
        dtype = autocast_to("cuda")
        autocast = nullcontext() if dtype is None else torch.autocast("cpu", dtype)
        with fakes.mode(), torch.device("cpu"), autocast:
            for owner in (model.parameters(), model.buffers()):
                for t in owner:
                    shaped = _shape_alone(t)
                    memory[id(t)] = nn.Parameter(shaped, t.requires_grad) if isinstance(t, nn.Parameter) else shaped
            with _ShapesAlone():
                shapes = copy.deepcopy(model, memory)
            for module, remove, hook in _hooks(shapes):
                if not _is_of_its_library(hook, module):
                    remove()
            if change is not None:
                change(shapes)
            # One tensor that is given twice, as inputs and as labels, is one.
            args, named = map_tensors(lambda t: memory.setdefault(id(t), _shape_alone(t)), (inputs, dict(kwargs)))
            return saved_bytes(shapes, *args, **named)
    except ValueError:
        raise
    except Exception as error:  # whatever a model raises that reads values: SciPy's TypeError, an AssertionError
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"predicted_bytes: {type(model).__name__} does not run without values on these inputs ({first}); where "
            "they are as its forward takes them, use hotrain.saved_bytes, which runs it"
        ) from error
    finally:
        log.disabled = before


class _ShapesAlone(TorchFunctionMode):
    """Tensors that are copied become fake ones, wherever a module has them: not registered, in a list, in a dict."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copies = Tensor.__deepcopy__, Tensor.data.__get__  # type: ignore[attr-defined]  # of parameters the second
        # What is no leaf has no copy: a weight that a hook computes would be predicted without that.
        if func in copies and args[0].is_leaf:
            return _shape_alone(args[0])
        return func(*args, **(kwargs or {}))


def _has_a_computed_weight(module: nn.Module) -> bool:
    """Whether `torch.nn.utils.spectral_norm` or `weight_norm` has made a weight of the module an attribute."""
    made = [name for name, t in vars(module).items() if isinstance(t, Tensor)]
    own = {name for name, _ in module.named_parameters(recurse=False)}
    return any(f"{name}{end}" in own for name in made for end in ("_orig", "_g"))


def _has_a_workspace(module: nn.Module) -> bool:
    """Whether oneDNN or cuDNN computes the layer, whose workspace is empty on fake tensors: most of what it keeps."""
    on_gpu = isinstance(module, nn.RNNBase) and any(p.is_cuda for p in module.parameters())
    return isinstance(module, nn.LSTM) or on_gpu


def _shape_alone(t: Tensor) -> Tensor:
    """A fake tensor on the CPU, dense, in t's memory layout."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu", requires_grad=t.requires_grad)
