"""Which layers are converted, to which class, and for each other one the reason why not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..functional import FLOATING
from ..nn import HadamardLinear
from ..nn.conv import ConvertedConv2d
from ..nn.state import layer_state
from ..private import CONV_FORWARD, fakes

SMALLEST = 32  # in- or output channels (times kernel size) below which a layer has nothing to gain

_SCRIPTED = "made by torch.jit, whose layers run outside of Python; put the module that it was made of in its place"
_WRAPPERS = ("base_model", "model", "module", "base_layer", "_orig_mod", "_fsdp_wrapped_module")
_HEADS = ("head", "head_dist", "fc", "classifier", "lm_head", "score", "cls", "heads")


def conv1d_of(module: nn.Module) -> type[nn.Module] | None:
    """transformers' Conv1D among the classes of a module, without importing transformers."""
    kinds = type(module).__mro__
    return next((c for c in kinds if c.__name__ == "Conv1D" and c.__module__ == "transformers.pytorch_utils"), None)


def target_of(module: nn.Module) -> type[nn.Module] | None:
    """The class that the module is converted to; for a converted one, its own."""
    if layer_state(module) is not None:
        return type(module)
    if type(module) is nn.Linear:
        return HadamardLinear
    if type(module) is nn.Conv2d:
        return ConvertedConv2d
    if type(module) is conv1d_of(module):
        from ..nn.hf import HadamardConv1D

        return HadamardConv1D
    return None


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module, str | None]]:
    """(name, module, reason it is unsupported or None) of every Linear and convolution, shared ones once, and of what
    has products of its own: recurrent layers, experts."""
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((name, module))
    without_call = {
        id(module.out_proj): name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)
    }
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            yield name, module, "its projections are used without calling a layer (nn.MultiheadAttention)"
        elif isinstance(module, nn.Linear | nn.Conv2d) or conv1d_of(module) is not None:
            yield name, module, _hindrance(module, owners, without_call)
        elif isinstance(module, torch.jit.ScriptModule):
            if not isinstance(model.get_submodule(name.rpartition(".")[0]), torch.jit.ScriptModule):
                yield name, module, _SCRIPTED
        elif isinstance(module, nn.modules.conv._ConvNd):
            yield (
                name,
                module,
                f"{type(module).__name__} is not supported; accepted are Linear, Conv2d and transformers' Conv1D",
            )
        elif isinstance(module, nn.RNNBase | nn.RNNCellBase | nn.Bilinear) or _has_stacked_weights(module):
            yield name, module, f"{type(module).__name__} computes products of its own, without calling a layer"


def _has_stacked_weights(module: nn.Module) -> bool:
    """Whether it has a matrix for each of several experts, or heads, in one parameter; a position embedding has one."""
    if isinstance(module, nn.utils.parametrize.ParametrizationList):  # its layer has a row
        return False
    own = module.parameters(recurse=False)
    return any(not is_lazy(p) and p.dim() > 2 and min(p.shape) > 1 and p.numel() >= SMALLEST**2 for p in own)


def _hindrance(
    module: nn.Module, owners: dict[int, list[tuple[str, nn.Module]]], without_call: dict[int, str]
) -> str | None:
    """Why a conversion would have no effect or a wrong one."""
    if id(module) in without_call:
        return f"its weight is used without calling it (nn.MultiheadAttention {without_call[id(module)]!r})"
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        return "lazy: it has no weight yet; run a forward pass, then convert"
    if nn.utils.parametrize.is_parametrized(module):
        return "parametrized: its weight is computed anew in every forward; convert first, then add the parametrization"
    if layer_state(module) is None and target_of(module) is None:
        if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            return "fully_shard was called on this layer itself, which changes its class: convert before fully_shard"
        kind = type(module)
        own = kind.forward not in [base.forward for base in (nn.Linear, nn.Conv2d, conv1d_of(module)) if base]
        # timm has a Linear of its own: its name alone would contradict the sentence.
        called = f"{kind.__module__}.{kind.__name__}" if hasattr(nn, kind.__name__) else kind.__name__
        return f"{called} is a subclass" + (" with a forward of its own" if own else "")
    for name in ("forward", CONV_FORWARD):
        if name in module.__dict__:
            return f"its {name} was replaced on the instance"
        for base in type(module).__mro__:
            if base in (nn.Linear, nn.Conv2d, conv1d_of(module)) and _is_replaced(base, name):
                return f"{base.__name__}.{name} was replaced on the class"
    weight = module.weight
    if not isinstance(weight, Tensor) or weight.dtype not in FLOATING:
        return f"weight of dtype {getattr(weight, 'dtype', type(weight).__name__)}; accepted are floating-point weights"
    if _computes_by_itself(weight):
        return f"its weight is a {type(weight).__name__}, whose products are its own; accepted are plain tensors"
    for name, other in owners.get(id(weight), []):
        if other is not module and target_of(other) is None:
            return f"tied weight: {name!r} ({type(other).__name__}) uses it as well"
    return None


def _is_replaced(kind: type, name: str) -> bool:
    """Whether a method of PyTorch's or transformers' class was written elsewhere, whatever its name is."""
    method = getattr(kind, name, None)
    return method is not None and getattr(method, "__globals__", None) is not vars(sys.modules[kind.__module__])


def _computes_by_itself(t: Tensor) -> bool:
    """Whether a tensor's class defines PyTorch's operators anew, as torchao's quantized weights do: such a class has
    few of them, and not those of a compressed backward. A DTensor is the tensor itself where FSDP gathers it."""
    kind: Any = type(t)
    is_sharded = any(base.__name__ == "DTensor" for base in kind.__mro__)
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and not is_sharded and not fakes.include(t)


def default_reason(model: nn.Module, name: str, module: nn.Module) -> str | None:
    """The default exclusions, when no filter_fn is given."""
    adapter = _adapter_of(model, name)
    if adapter is not None:
        return f"adapter of {adapter!r}: adapters stay exact"
    if _is_head(model, name, module):
        return "head"
    weight = module.weight
    assert isinstance(weight, Tensor)
    outputs = weight.shape[0] if conv1d_of(module) is None else weight.shape[1]
    contraction = weight.numel() // max(1, outputs)
    groups = getattr(module, "groups", 1)
    if contraction * groups < SMALLEST or outputs < SMALLEST:
        window = weight.shape[2:]
        inputs = "·".join(map(str, (contraction * groups // window.numel(), *window)))
        return f"too small: {inputs} → {outputs} channels, under {SMALLEST}"
    parent = model.get_submodule(name.rpartition(".")[0])
    if module.bias is None and isinstance(getattr(parent, "logit_scale", None), Tensor):
        return "its output is normalized to cosines: where it is zero, as in a padded window, g_y is without bound"
    return None


def _is_head(model: nn.Module, name: str, module: nn.Module) -> bool:
    classifier = getattr(model, "get_classifier", None)
    if callable(classifier):
        try:
            heads = classifier()
        except Exception:  # another function of that name
            heads = ()
        heads = heads if isinstance(heads, tuple | list) else (heads,)
        if any(module is part for head in heads if isinstance(head, nn.Module) for part in head.modules()):
            return True
    # By name only at the outer levels: a block's inner "fc" is not a head.
    path = [part for part in name.split(".") if part not in _WRAPPERS]
    return bool(path) and path[0] in _HEADS


def _adapter_of(model: nn.Module, name: str) -> str | None:
    """The PEFT layer whose adapter the module is, None if it is none (a base layer is none)."""
    parts = name.split(".")
    for depth in range(len(parts)):
        parent = model.get_submodule(".".join(parts[:depth]))
        is_peft = any(c.__name__ == "BaseTunerLayer" and c.__module__.startswith("peft.") for c in type(parent).__mro__)
        if is_peft and parts[depth] != "base_layer":
            return ".".join(parts[:depth])
    return None
