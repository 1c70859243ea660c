"""Thousands of training steps of small converted models: memory, tensors and objects stay as many as they were.

Each subject is trained in a process of its own. After each round, a fixed number of steps that sees every shape once,
garbage is collected and four numbers are read: the tensors that Python knows and their bytes, the objects that its
garbage collector tracks, and the process's resident memory, with what malloc holds free returned first. The first third
of the rounds is warm-up. After it the counts of tensors and their bytes must be those of the first round behind the
warm-up, in every round; tracked objects may be `OBJECTS` more at the end, the medians of the first and last third
compared; and the line of least squares through resident memory may rise by `SLOPE` in 1,000 steps. `CONTROLS` leak on
purpose, one of them twice what `SLOPE` allows, and each has to be found.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotrain
from hotrain_campaign.cases import Tally, ended, in_child

OBJECTS = 50  # tracked objects: some appear once, when an error message or a cache is first made
SLOPE = 1 << 20  # bytes in 1,000 steps: a run of 100,000 would grow by 100 MiB; a control leaks twice as much
ROUND = 60  # steps

Step = Callable[[int], None]


@dataclass(frozen=True)
class Subject:
    """A training step, repeated.

    Attributes:
        make: makes the step, a function of its number.
        leaks: a control, which has to be found.
    """

    make: Callable[[], Step]
    leaks: bool = False


def _vit() -> nn.Module:
    import timm

    sizes: dict[str, Any] = {"embed_dim": 64, "depth": 2, "num_heads": 2, "patch_size": 8}
    return timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10, dynamic_img_size=True, **sizes)


def _resnet() -> nn.Module:
    import timm

    return timm.create_model("resnet18", layers=(1, 1, 1, 1), channels=(16, 32, 48, 64), num_classes=10)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "use_cache": False}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=128, **sizes))


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, num_attention_heads=4, use_cache=False, **sizes))


def _images(number: int) -> tuple[Tensor, ...]:
    """Batches of 2 to 6 images in three sizes; the same again after 15 steps."""
    count = 2 + number % 5
    return torch.randn(count, 3, *((32, 32), (32, 48), (40, 24))[number % 3]), torch.arange(count)


def _tokens(number: int) -> tuple[Tensor, ...]:
    """One or two sequences of 7 to 61 tokens; the same again after 10 steps."""
    ids = torch.randint(128, (1 + number % 2, (7, 16, 33, 61, 48)[number % 5]))
    return ids, ids


def _loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    out = model(inputs)
    out = getattr(out, "logits", out)
    return F.cross_entropy(out.flatten(0, -2).float(), labels.flatten())


def _trained(
    build: Callable[[], nn.Module],
    batch: Callable[[int], tuple[Tensor, ...]],
    method: str | None = "hq8",
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
    amp: bool = False,
    **options: Any,
) -> Step:
    torch.manual_seed(0)
    model = build().train()
    if method is not None:
        hotrain.convert(model, method, **options)
    net = prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(number: int) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            loss = _loss(net, *batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _everywhere(model: nn.Module, inputs: Tensor, labels: Tensor) -> None:
    _loss(model, inputs, labels).backward()
    model.zero_grad()


def _converted_and_reverted(build: Callable[[], nn.Module], batch: Callable[[int], tuple[Tensor, ...]]) -> Step:
    """One model, converted to another method in each step and reverted."""
    model = build().train()

    def step(number: int) -> None:
        hotrain.convert(
            model, ("hq8", "hot-unbiased", "hq4", "exact")[number % 4], memory=("block", "linear")[number % 4 in (1, 2)]
        )
        _everywhere(model, *batch(number))
        hotrain.revert(model)

    return step


def _made_anew(build: Callable[[], nn.Module], batch: Callable[[int], tuple[Tensor, ...]]) -> Step:
    """A new model in each step, converted, trained once, saved into another one and dropped."""

    def step(number: int) -> None:
        models = [build().train() for _ in range(2)]
        for model in models:
            hotrain.convert(model)
        models[1].load_state_dict(models[0].state_dict())
        _everywhere(models[1], *batch(number))

    return step


def _in_trouble(build: Callable[[], nn.Module], batch: Callable[[int], tuple[Tensor, ...]]) -> Step:
    """Steps that end without backward, in an exception in forward, in evaluation, or with a graph that is dropped."""
    model = build().train()
    hotrain.convert(model)

    def step(number: int) -> None:
        inputs, labels = batch(number)
        if number % 5 == 0:
            _loss(model, inputs, labels)
        elif number % 5 == 1:
            with contextlib.suppress(RuntimeError, ValueError, IndexError, AssertionError):
                model(inputs[:, :2])
        elif number % 5 == 2:
            with torch.no_grad():
                model.eval()(inputs)
            model.train()
        else:
            torch.autograd.grad(_loss(model, inputs, labels), [next(model.parameters())])

    return step


def _compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager", dynamic=False)  # type: ignore[return-value]


def _checkpointed(model: nn.Module) -> nn.Module:
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model


def _one_image_size(number: int) -> tuple[Tensor, ...]:
    return torch.randn(4, 3, 32, 32), torch.arange(4)


def _leaking(what: Callable[[list[Any], Tensor], None]) -> Step:
    kept: list[Any] = []
    model = _vit().train()
    hotrain.convert(model)
    first = next(model.children())
    first.register_forward_hook(lambda module, inputs, output: what(kept, output))

    def step(number: int) -> None:
        _everywhere(model, *_one_image_size(number))

    return step


CONTROLS = {
    "a tensor a step": lambda kept, x: kept.append(x.detach()[:1, :1].clone()),
    "an object a step": lambda kept, x: kept.append([kept]),
    "2 KiB a step that no tensor has": lambda kept, x: kept.append(os.urandom(2 << 10)),
}

SUBJECTS: dict[str, Subject] = {
    "ViT": Subject(partial(_trained, _vit, _images)),
    "ViT, plan=memory": Subject(partial(_trained, _vit, _images, plan="memory")),
    "ViT, bf16 autocast": Subject(partial(_trained, _vit, _images, amp=True)),
    "ViT, exact layers, memory=block": Subject(partial(_trained, _vit, _images, "exact", memory="block")),
    "ViT, hot-unbiased": Subject(partial(_trained, _vit, _images, "hot-unbiased")),
    "ViT, checkpointed": Subject(partial(_trained, _vit, _images, prepare=_checkpointed)),
    "ViT, compiled (aot_eager)": Subject(partial(_trained, _vit, _one_image_size, prepare=_compiled)),
    "ResNet": Subject(partial(_trained, _resnet, _images)),
    "ResNet, plan=memory": Subject(partial(_trained, _resnet, _images, plan="memory")),
    "ResNet, hot-unbiased": Subject(partial(_trained, _resnet, _images, "hot-unbiased")),
    "ResNet, compiled (aot_eager)": Subject(partial(_trained, _resnet, _one_image_size, prepare=_compiled)),
    "GPT-2": Subject(partial(_trained, _gpt2, _tokens)),
    "GPT-2, plan=memory": Subject(partial(_trained, _gpt2, _tokens, plan="memory")),
    "Llama": Subject(partial(_trained, _llama, _tokens)),
    "Llama, hot-unbiased, memory=block": Subject(partial(_trained, _llama, _tokens, "hot-unbiased", memory="block")),
    "Llama, checkpointed": Subject(partial(_trained, _llama, _tokens, prepare=_checkpointed)),
    "ViT, converted and reverted": Subject(partial(_converted_and_reverted, _vit, _images)),
    "ResNet, converted and reverted": Subject(partial(_converted_and_reverted, _resnet, _images)),
    "Llama, converted and reverted": Subject(partial(_converted_and_reverted, _llama, _tokens)),
    "ViT, a new model a step": Subject(partial(_made_anew, _vit, _images)),
    "ResNet, a new model a step": Subject(partial(_made_anew, _resnet, _images)),
    "ViT, steps that are not finished": Subject(partial(_in_trouble, _vit, _images)),
    **{f"control: {name}": Subject(partial(_leaking, what), leaks=True) for name, what in CONTROLS.items()},
}


@dataclass(frozen=True)
class Reading:
    """What is there between two rounds."""

    tensors: int
    tensor_bytes: int
    objects: int
    resident: int


def reading() -> Reading:
    """Collect garbage, return free memory to the system, and count."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    found = gc.get_objects()
    tensors = [x for x in found if type(x) in (Tensor, nn.Parameter)]
    seen = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.device.type == "cpu"}
    return Reading(len(tensors), sum(seen.values()), len(found), resident)


def slope(readings: list[Reading]) -> float:
    """Bytes of resident memory in 1,000 steps, by least squares, behind the warm-up."""
    kept = [r.resident for r in readings[len(readings) // 3 :]]
    return statistics.linear_regression([n * ROUND / 1000 for n in range(len(kept))], kept).slope


def verdict(readings: list[Reading]) -> str:
    """What grew, in a sentence; empty where nothing did."""
    kept = readings[len(readings) // 3 :]
    third = max(1, len(kept) // 3)
    for name in ("tensors", "tensor_bytes"):
        values = [getattr(r, name) for r in kept]
        if max(values) != min(values):
            return f"{name} went from {values[0]:,} to {values[-1]:,}"
    before, after = (statistics.median(r.objects for r in part) for part in (kept[:third], kept[-third:]))
    if after - before > OBJECTS:
        return f"objects grew from {before:,.0f} to {after:,.0f}"
    rise = slope(readings)
    return f"resident grew by {rise:,.0f} bytes in 1,000 steps" if rise > SLOPE else ""


def _soak(make: Callable[[], Step], steps: int, out: Path) -> None:
    step = make()
    readings = []  # tuples of numbers, which the garbage collector does not track
    for number in range(steps):
        step(number)
        if number % ROUND == ROUND - 1:
            readings.append(tuple(vars(reading()).values()))
    out.write_text(json.dumps(readings))


def soaked(
    steps: int, folder: Path, say: Callable[[str], None], names: list[str] | None = None
) -> Iterator[tuple[str, Tally, dict[str, Any]]]:
    """Train each subject for so many steps.

    Yields:
        Its name, a tally with its steps as cases, and its readings behind the warm-up, some of them, with their slope.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or list(SUBJECTS):
        subject = SUBJECTS[name]
        out = folder / "readings.json"
        out.unlink(missing_ok=True)
        code = ended(in_child(partial(_soak, subject.make, steps, out), folder / "said"), 1200)
        tally = Tally(cases=steps)
        found: dict[str, Any] = {}
        if code != 0:
            said = " ".join((folder / "said").read_text().split())[-300:]
            tally.findings.append(f"ended with {code}: {said}")
        else:
            readings = [Reading(*r) for r in json.loads(out.read_text())]
            grew = verdict(readings)
            kept = {(n + 1) * ROUND: vars(r) for n, r in enumerate(readings)}
            some = list(kept)[len(kept) // 3 :: max(1, len(kept) // 15)]
            found = {"slope": slope(readings), "bound": SLOPE, "grew": grew}
            found["readings"] = [{"steps": steps, **kept[steps]} for steps in dict.fromkeys([*some, list(kept)[-1]])]
            if subject.leaks and not grew:
                tally.findings.append("a leak on purpose was not found")
            elif grew and not subject.leaks:
                tally.findings.append(grew)
        tally.outcomes["finding" if tally.findings else "found" if subject.leaks else "flat"] += steps
        for finding in tally.findings:
            say(f"{name}: {finding}")
        yield name, tally, found
