"""Random programs of 2 to 8 operators, and what exact PyTorch makes of them: ``tests/programs.py --count 20000``.

A program is the source of an `nn.Module`, an input and a way to convert it. It runs without hotrain and converted, and

* results have the same bits and strides, step by step; inputs and buffers are modified alike; nothing raises;
* gradients are there or not, and have dtypes and strides, as without, and differ by no more than `bounds` allows;
* no more bytes are kept between forward and backward, but for `SLACK`;
* `revert` leaves the model as it was.

All formats are set to eight bits, slopes too, so that an error of logic stands out against rounding.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import re
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hotrain
from hotrain.compress import compiled, eager, formats, sharing
from hotrain.compress.operators import base
from hotrain.compress.slopes import ACTIVATIONS
from hotrain.method import GradWeight, Method, Saved
from hotrain.saved import Levels

THRESHOLD = 256  # entries from which tensors are compressed here, in the place of `rules.SMALL`
# Slopes in eight bits with zero and one among the levels: sixteen times as fine as those of `ACTIVATIONS`.
_FINER = 16

# All rows, in floating point: what a converted layer loses is what the codes that it refers to lose.
FULL = Method("full", grad_weight=GradWeight(tile=16, rank=16), saved=Saved(), memory="block")
METHODS: dict[str, str | Method] = {"exact": "exact", "full": FULL, "hq8": "hq8"}

HEAD = """import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
"""


@contextlib.contextmanager
def small_and_fine() -> Iterator[None]:
    """Small tensors are compressed too, and everything in eight bits."""
    eight = {
        name: dataclasses.replace(a, levels=Levels(8, a.levels.first * _FINER, a.levels.per_one * _FINER))
        for name, a in ACTIVATIONS.items()
        if a.levels is not None
    }
    with contextlib.ExitStack() as stack:
        for module in (base, sharing, compiled, eager):
            stack.enter_context(mock.patch.object(module, "SMALL", THRESHOLD))
        stack.enter_context(mock.patch.dict(formats.FORMATS, dict.fromkeys(formats.FORMATS, "int8")))
        stack.enter_context(mock.patch.dict(ACTIVATIONS, eight))
        yield


# ---- programs ----


@dataclass
class Program:
    """setup: lines of ``__init__``.  lines: of ``forward``, each with what a gradient loses there (`bounds`).

    layout: of an image that goes in.  method: a key of `METHODS`.  converted: names of the layers to convert.
    """

    seed: int
    shape: tuple[int, ...]
    layout: str = "contiguous"
    requires_grad: bool = True
    method: str = "exact"
    setup: list[str] = field(default_factory=list)
    lines: list[tuple[str, str]] = field(default_factory=list)
    converted: list[str] = field(default_factory=list)

    @property
    def writes(self) -> bool:
        """Whether something is, or may be, written to in place."""
        written = any(re.search(r"[a-z]_\(|[-+*/]=|\] = |True\)", line) for line, _ in self.lines)
        return written or any("inplace=True" in line for line in self.setup)

    def source(self, watched: bool = False) -> str:
        """The module. watched: with calls of `see`, before the first line and behind each."""
        body = []
        for number, (line, _) in enumerate(self.lines):
            body += [f"self.see({number}, x)"] * watched + [line]
        body += [f"self.see({len(self.lines)}, x)"] * watched + ["return x"]
        inits = "\n        ".join(["super().__init__()", *self.setup])
        return (
            f"class Net(nn.Module):\n    def __init__(self):\n        {inits}\n\n"
            f"    def forward(self, x):\n        " + "\n        ".join(body) + "\n"
        )

    def model(self, watched: bool = True) -> Any:
        space = {"torch": torch, "nn": nn, "F": F, "checkpoint": checkpoint}
        exec(compile(self.source(watched), f"<program {self.seed}>", "exec"), space)
        torch.manual_seed(self.seed)
        net = space["Net"]().train()
        if watched:
            object.__setattr__(net, "see", _nothing)
        return net

    def input(self) -> Tensor:
        x = torch.randn(self.shape, generator=torch.Generator().manual_seed(self.seed))
        if self.layout == "channels_last":
            x = x.contiguous(memory_format=torch.channels_last)
        elif self.layout == "transposed":
            x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
        return x.requires_grad_(self.requires_grad)

    def convert(self, model: nn.Module) -> None:
        method = METHODS[self.method] if self.converted else "exact"
        wanted = set(self.converted)
        hotrain.convert(
            model, method, memory="block", number=None, plan="memory", filter_fn=lambda module, name: name in wanted
        )

    def __str__(self) -> str:
        """What can be pasted; `tests.programs` makes the tensors small and the formats fine."""
        how = {
            "contiguous": "",
            "channels_last": ".contiguous(memory_format=torch.channels_last)",
            "transposed": ".transpose(-1, -2).contiguous().transpose(-1, -2)",
        }
        method = self.method if self.converted else "exact"
        name = "programs.FULL" if method == "full" else repr(method)
        layers = f", filter_fn=lambda module, name: name in {self.converted}" if self.converted else ""
        return (
            f"# program {self.seed}\nimport hotrain, programs  # tests/programs.py\n{HEAD}\n{self.source()}\n"
            f"torch.manual_seed({self.seed}); model = Net().train()\n"
            f"x = torch.randn({self.shape}, generator=torch.Generator().manual_seed({self.seed})){how[self.layout]}"
            f".requires_grad_({self.requires_grad})\n"
            "with programs.small_and_fine():\n"
            f"    hotrain.convert(model, {name}, memory='block', number=None, plan='memory'{layers})\n"
            "    y = model(x.clone()); y.backward(torch.ones_like(y))\n"
        )


def _nothing(number: int, x: Tensor) -> None:
    pass


# What a line may add to the error of a gradient: see `bounds`.
EXACT, ROUND, WIDE, SLOPE = "exact", "round", "wide", "slope"


class _Writer:
    """Writes one program, running each line as it goes to know the shapes, and dropping those that PyTorch refuses."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        rng = self.rng
        kind = rng.choice(["tokens", "tokens", "image", "image", "matrix"])
        c = rng.choice([16, 20, 24, 32, 40, 48])
        shape: tuple[int, ...] = {
            "tokens": (rng.choice([1, 2, 3]), rng.choice([16, 17, 24]), c),
            "image": (rng.choice([1, 2, 3]), c, rng.choice([6, 7, 8]), rng.choice([6, 8, 9])),
            "matrix": (rng.choice([24, 32, 37]), c),
        }[kind]
        layout = rng.choice(["contiguous", "channels_last"]) if kind == "image" else "contiguous"
        if rng.random() < 0.07:
            layout = "transposed"
        self.program = Program(seed, shape, layout, rng.random() < 0.8)
        self.program.method = rng.choices(["exact", "full", "hq8"], [6, 3, 1])[0]
        self.self = nn.Module()
        self.space = {"torch": torch, "nn": nn, "F": F, "checkpoint": checkpoint, "self": self.self}
        self.x = self.program.input().detach().clone()
        self.space["x"] = self.x
        torch.manual_seed(seed)  # what lines draw decides on whether they are taken
        self.shortcuts: dict[str, tuple[int, ...]] = {}
        self.count = 0

    def write(self) -> Program:
        rng, wanted = self.rng, self.rng.randint(2, 8)
        for _ in range(40):
            if len(self.program.lines) >= wanted:
                break
            if not self.program.lines and rng.random() < 0.6:
                self._parameter_first()
                continue
            OPERATORS[rng.choice(_NAMES)](self)
        return self.program

    def _parameter_first(self) -> None:
        """What makes the tensor one with a gradient, and no leaf, as in a model behind its first layer."""
        OPERATORS[self.rng.choice(["linear", "conv", "scale", "norm"])](self)

    def name(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def add(self, line: str, loses: str, *setup: str, module: str = "") -> bool:
        """One line, with what it needs; False where PyTorch refuses it or its numbers grow too large."""
        space = dict(self.space)
        before = self.x.clone()
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for text in setup:
                    exec(text, space)
                exec(line, space)
            x = space["x"]
            fits = THRESHOLD <= x.numel() <= 20_000 and bool(x.isfinite().all()) and float(x.abs().amax()) < 1e3
        except (RuntimeError, ValueError, IndexError, TypeError):
            fits = False
        if not fits:
            if self.x.shape == before.shape and not torch.equal(self.x, before):
                self.x.copy_(before)
            return False
        self.space, self.x = space, x
        self.program.setup += setup
        self.program.lines.append((line, loses))
        if module and self.rng.random() < 0.6 and self.program.method != "exact":
            self.program.converted.append(module)
        return True


Operator = Callable[[_Writer], Any]
OPERATORS: dict[str, Operator] = {}


def _operator(write: Operator) -> Operator:
    OPERATORS[write.__name__.strip("_")] = write
    return write


@_operator
def linear(w: _Writer) -> None:
    c, out = w.x.shape[-1], w.rng.choice([16, 24, 32, 48])
    name, bias = w.name("l"), w.rng.random() < 0.7
    w.add(f"x = self.{name}(x)", ROUND, f"self.{name} = nn.Linear({c}, {out}, bias={bias})", module=name)


@_operator
def conv(w: _Writer) -> None:
    if w.x.dim() != 4:
        return
    c, kind, name = w.x.shape[1], w.rng.choice(["k", "1x1", "depthwise", "grouped"]), w.name("c")
    bias = w.rng.random() < 0.5
    if kind == "1x1":
        args = f"{c}, {w.rng.choice([16, 24, 32])}, 1"
    elif kind == "k":
        args = f"{c}, {w.rng.choice([16, 24])}, 3, stride={w.rng.choice([1, 1, 2])}, padding={w.rng.choice([0, 1])}"
    elif kind == "depthwise":
        args = f"{c}, {c}, {w.rng.choice([3, 5])}, padding={w.rng.choice([1, 2])}, groups={c}"
    else:
        args = f"{c}, {c}, 3, padding=1, groups={w.rng.choice([2, 4])}, dilation={w.rng.choice([1, 2])}"
    line = f"x = self.{name}(x)"
    w.add(line, ROUND, f"self.{name} = nn.Conv2d({args}, bias={bias})", module=name)


@_operator
def norm(w: _Writer) -> None:
    name, kinds = w.name("n"), ["layer", "rms", "composed"]
    kinds += ["group", "batch2d", "group", "batch2d"] if w.x.dim() == 4 else []
    kinds += ["batch1d", "group"] if w.x.dim() in (2, 3) else []
    if 1 in w.x.shape:  # whose gradients are wrong in PyTorch 2.13 on a CPU, where strides of g_y leave a choice
        kinds = [kind for kind in kinds if "batch" not in kind]
    if not w.program.requires_grad:  # PyTorch 2.13's backward dies on a CPU for one in channels-last
        kinds = [kind for kind in kinds if kind != "group"]
    kind, c, last = w.rng.choice(kinds), w.x.shape[1] if w.x.dim() > 1 else 1, w.x.shape[-1]
    make = {
        "layer": f"nn.LayerNorm({last}, elementwise_affine={w.rng.random() < 0.8})",
        "rms": f"nn.RMSNorm({last})",
        "group": f"nn.GroupNorm({w.rng.choice([1, 2, 4])}, {c})",
        "batch2d": f"nn.BatchNorm2d({c})",
        "batch1d": f"nn.BatchNorm1d({c})",
    }
    if kind == "composed":
        p = f"self.{name}"
        line = f"x = {p} * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))"
        w.add(line, ROUND, f"{p} = nn.Parameter(torch.rand({last}) + 0.5)")
        return
    setup = [f"self.{name} = {make[kind]}"]
    if "False" not in make[kind] and w.rng.random() < 0.5:
        setup.append(f"nn.init.uniform_(self.{name}.weight, 0.5, 1.5)")
    w.add(f"x = self.{name}(x)", ROUND, *setup)


_BY_BIT = ["relu", "relu6", "hardsigmoid", "leaky_relu"]
_BY_INPUT = ["silu", "hardswish", "softplus", "logsigmoid", "elu"]
_BY_SLOPE = ["gelu", "mish", "sigmoid", "tanh"]
_MODULES = {
    "relu": "ReLU", "relu6": "ReLU6", "hardsigmoid": "Hardsigmoid", "leaky_relu": "LeakyReLU", "silu": "SiLU",
    "hardswish": "Hardswish", "mish": "Mish", "elu": "ELU",
}  # fmt: skip


@_operator
def activation(w: _Writer) -> None:
    kind, loses = w.rng.choice([(_BY_BIT, EXACT), (_BY_INPUT, ROUND), (_BY_SLOPE, SLOPE)])
    f = w.rng.choice(kind)
    inplace = f in _MODULES and w.rng.random() < 0.5
    if f in _MODULES and w.rng.random() < 0.5:
        name = w.name("a")
        w.add(f"x = self.{name}(x)", loses, f"self.{name} = nn.{_MODULES[f]}(inplace={inplace})")
    elif inplace:
        w.add(f"x = F.{f}(x, inplace=True)", loses)
    elif f in ("relu", "sigmoid", "tanh"):
        home = w.rng.choice(["torch.{}(x)", "x.{}()", "x.{}_()", "F.{}(x)"])
        w.add(f"x = {home.format(f)}", loses)
    elif f == "gelu" and w.rng.random() < 0.5:
        w.add("x = F.gelu(x, approximate='tanh')", loses)
    else:
        w.add(f"x = F.{f}(x)", loses)


@_operator
def dropout(w: _Writer) -> None:
    p, inplace = w.rng.choice([0.0, 0.1, 0.5]), w.rng.random() < 0.4
    w.add(f"x = F.dropout(x, {p}, True, {inplace})", EXACT)


@_operator
def softmax(w: _Writer) -> None:
    dim = w.rng.choice([-1, -1, 1])
    w.add(f"x = {w.rng.choice(['F.softmax(x, {})', 'x.softmax({})', 'F.log_softmax(x, {})']).format(dim)}", ROUND)


@_operator
def attention(w: _Writer) -> None:
    if float(w.x.abs().max()) > 4:  # logits of some hundred, which nothing bounds
        return
    masks = ["", "", ", is_causal=True", ", attn_mask=self.{m}"]
    mask, name = w.rng.choice(masks), w.name("m")
    if w.x.dim() == 3 and w.x.shape[-1] % 8 == 0:
        b, t, c = w.x.shape
        heads = w.rng.choice([1, 2, 4])
        d = c // heads
        groups = w.rng.choice([heads, heads, 1]) if mask != ", attn_mask=self.{m}" else heads
        setup = [f"self.{name}p = nn.Linear({c}, {c + 2 * groups * d})"]
        split = f"q, k, v = self.{name}p(x).split([{c}, {groups * d}, {groups * d}], -1)"
        if not w.add(split, ROUND, *setup):
            return
        form = f".view({b}, {t}, -1, {d}).transpose(1, 2)"
        gqa = ", enable_gqa=True" if groups != heads else ""
        call = f"F.scaled_dot_product_attention(q{form}, k{form}, v{form}{mask.format(m=name)}{gqa})"
        tail = w.rng.choice([f".transpose(1, 2).reshape({b}, {t}, {c})", ".transpose(1, 2).flatten(2)", ""])
    elif w.x.dim() == 4:
        t = w.x.shape[2]
        call, tail = f"F.scaled_dot_product_attention(x, x, x{mask.format(m=name)})", ""
    else:
        return
    made = []
    if "self" in mask:
        boolean = f"torch.ones({t}, {t}, dtype=torch.bool).tril({w.rng.choice([0, 2])})"
        made = [f"self.register_buffer('{name}', {w.rng.choice([boolean, f'torch.randn({t}, {t})'])})"]
    w.add(f"x = {call}{tail}", ROUND, *made)


@_operator
def product(w: _Writer) -> None:
    last, c, name = w.x.shape[-1], w.x.shape[1], w.name("p")
    choices: list[tuple[str, str, list[str]]] = [
        (f"x = x * self.{name}", ROUND, [f"self.{name} = nn.Parameter(torch.rand({last}) + 0.5)"]),
        (f"x = x.mul(self.{name})", ROUND, [f"self.{name} = nn.Parameter(torch.rand({last}) + 0.5)"]),
        (f"x *= self.{name}", ROUND, [f"self.{name} = nn.Parameter(torch.rand({last}) + 0.5)"]),
        ("x = x * x", ROUND, []),
        ("x = x * x.sigmoid()", SLOPE, []),
        ("x = x ** 2", ROUND, []),
        ("x = x ** 3", ROUND, []),
        ("x = x.square()", ROUND, []),
        ("x = x.pow(2).mean(-1, keepdim=True) * x", ROUND, []),
        ("x = torch.einsum('...i,...j->...ij', x, x).sum(-1)", ROUND, []),
    ]  # fmt: skip
    if w.x.dim() > 2:
        two = torch.Size(w.x.shape[-2:])
        choices += [
            ("x = x @ x.transpose(-1, -2)", ROUND, []),
            (f"x = torch.matmul(x, self.{name})", ROUND, [f"self.{name} = nn.Parameter(torch.randn({last}, 24) / 5)"]),
            (f"x = x @ self.{name}", ROUND, [f"self.{name} = nn.Parameter(torch.randn({len(w.x)}, {last}, 20) / 5)"]),
            (f"x = self.{name} @ x", ROUND, [f"self.{name} = nn.Parameter(torch.randn({two[0]}, {two[0]}) / 4)"]),
        ]  # fmt: skip
    if w.x.dim() == 3:
        choices.append(("x = torch.bmm(x.transpose(1, 2), x)", ROUND, []))
        choices.append(("x = torch.bmm(x, x.mT) * 0.2", ROUND, []))
    if w.x.dim() == 4:
        gate = f"self.{name} = nn.Parameter(torch.rand({c}, 1, 1))"
        choices += [(f"x = x * self.{name}", ROUND, [gate]), ("x = x * x.mean((2, 3), keepdim=True)", ROUND, [])]
    line, loses, setup = w.rng.choice(choices)
    w.add(line, loses, *setup)


@_operator
def scale(w: _Writer) -> None:
    name = w.name("g")
    line = w.rng.choice([f"x = x * self.{name}", f"x = x + self.{name}", f"x += self.{name}"])
    w.add(line, ROUND, f"self.{name} = nn.Parameter(torch.rand({w.x.shape[-1]}) + 0.5)")


@_operator
def curve(w: _Writer) -> None:
    line, loses = w.rng.choice([
        ("x = x.clamp(max=2).exp()", WIDE), ("x = x.abs()", EXACT), ("x = (x.abs() + 0.1).sqrt()", WIDE),
        ("x = (x.abs() + 0.1).log()", WIDE), ("x = x / (1 + x.square())", ROUND), ("x = torch.erf(x)", ROUND),
        ("x = F.normalize(x, dim=-1)", WIDE), ("x = x.clamp(-1, 1)", EXACT), ("x = F.glu(x)", ROUND),
        ("x = x.sin()", ROUND), ("x = torch.where(x > 0, x, 0.1 * x)", EXACT),
        ("x = x - x.mean(-1, keepdim=True)", EXACT),
        ("x = x / x.std()", ROUND), ("x = x.cumsum(1) / 4", EXACT), ("x = torch.maximum(x, -x)", EXACT),
    ])  # fmt: skip
    w.add(line, loses)


@_operator
def in_place(w: _Writer) -> None:
    half = w.x.shape[-1] // 2
    line = w.rng.choice([
        "x += 1", "x.mul_(0.9)", "x /= 2", "x -= 0.5", "x.add_(0.1)", "x.masked_fill_(x > 1, 0.5)", "x[..., 0] = 0.5",
        "x[:, 1:3] += 1", f"x[..., :{half}] *= 0.5", "x[0] = x[-1]", "x[..., ::2].add_(1)", "x.clamp_(-2, 2)",
        "x.transpose(-1, -2).mul_(0.7)", "x.neg_()", "x.select(1, 0).zero_()", "x.data.mul_(1.0)", "x[x < -1] = 0.0",
        "x.flatten(1)[:, :5] += 1",
    ])  # fmt: skip
    w.add(line, EXACT)


@_operator
def shortcut(w: _Writer) -> None:
    if w.shortcuts and w.rng.random() < 0.7:
        name = w.rng.choice(list(w.shortcuts))
        line = w.rng.choice(["x = x + {}", "x = {} + x", "x += {}", "x = x * {}", "x = x.add({})", "x = x - {}",
                             "x = torch.cat([x, {}], -1)", "x = x * {}.mean()", "x.copy_(x + {})"])  # fmt: skip
        w.add(line.format(name), ROUND if "*" in line else EXACT)
        return
    name = w.name("s")
    if w.add(f"{name} = {w.rng.choice(['x', 'x', 'x.clone()', 'x * 0.5', 'x[:]', 'x.detach()'])}", EXACT):
        w.shortcuts[name] = tuple(w.x.shape)


@_operator
def view(w: _Writer) -> None:
    shape, lines = list(w.x.shape), []
    a, b = w.rng.sample(range(len(shape)), 2)
    lines += [f"x = x.transpose({a}, {b})", f"x = torch.transpose(x, {a}, {b})", "x = x.contiguous()", "x = x[..., 1:]"]
    lines += [f"x = x.permute({', '.join(map(str, w.rng.sample(range(len(shape)), len(shape))))})"]
    lines += ["x = x.flip(-1)", "x = torch.cat(x.chunk(2, -1)[::-1], -1)", "x = x.chunk(2, -1)[0]", "x = x[:, ::2]"]
    lines += ["x = torch.stack(x.unbind(1), 1)", "x = x.roll(1, 1)", "x = x.unsqueeze(0).squeeze(0)", "x = x.mT"]
    if len(shape) == 3:
        lines += [
            "x = x.flatten(0, 1)",
            f"x = x.reshape({shape[0]}, {shape[1]}, 4, -1)",
            "x = x.reshape(x.shape[0], -1)",
        ]
        lines += ["x = x.unsqueeze(2)", "x = x.view(-1, x.shape[-1])"]
    if len(shape) == 4:
        lines += ["x = x.flatten(2).transpose(1, 2)", "x = x.flatten(2)", "x = x.to(memory_format=torch.channels_last)"]
        lines += [
            "x = x.contiguous(memory_format=torch.channels_last)",
            "x = x.permute(0, 2, 3, 1)",
            "x = x[:, :, 1:, 1:]",
        ]
        lines += ["x = x.movedim(-1, 1)"]
    if len(shape) == 2:
        lines += ["x = x.view(1, *x.shape)", "x = x.unflatten(-1, (4, -1))", "x = x.reshape(1, -1, x.shape[-1])"]
    w.add(w.rng.choice(lines), EXACT)


@_operator
def pool(w: _Writer) -> None:
    if w.x.dim() != 4:
        return
    line = w.rng.choice([
        "x = F.max_pool2d(x, 2)", "x = F.max_pool2d(x, 3, 1, 1)", "x = F.avg_pool2d(x, 2)",
        "x = F.avg_pool2d(x, 3, 1, 1)",
        "x = F.adaptive_avg_pool2d(x, 4)", "x = F.max_pool2d(x, 2, ceil_mode=True)",
        "x = F.interpolate(x, scale_factor=2, mode='nearest')", "x = F.pixel_unshuffle(x[:, :, :6, :6], 2)",
        "x = F.pixel_shuffle(x[:, :16], 2)",
    ])  # fmt: skip
    w.add(line, EXACT)


@_operator
def pad(w: _Writer) -> None:
    line = w.rng.choice(["x = F.pad(x, (1, 1))", "x = F.pad(x, (0, 0, 1, 0))", "x = F.pad(x, (-1, 0))"])
    if w.x.dim() == 4:
        line = w.rng.choice([line, "x = F.pad(x, (1, 1, 1, 1))", "x = F.pad(x, (1, 0, 1, 0), mode='reflect')",
                             "x = F.pad(x, (-1, -1, -1, -1))",
                             "x = F.pad(x, (1, 1, 1, 1), mode='replicate')"])  # fmt: skip
    w.add(line, EXACT)


@_operator
def gradient(w: _Writer) -> None:
    """What is about gradients alone.

    A later write in place takes a view's hooks from it, or ends in a crash of PyTorch's: hence the copies.
    """
    line = w.rng.choice([
        "x = x * 0.5 + x.detach() * 0.5", "x = x.clone(); x.requires_grad and x.register_hook(lambda g: g * 2)",
        "x = x.clone(); x.requires_grad and x.register_hook(lambda g: None)", "x = x.clone()",
        "x = x.clone(); x.requires_grad and x.retain_grad()",
        "x = x + torch.no_grad()(torch.tanh)(x)",
    ])  # fmt: skip
    w.add(line, EXACT)


@_operator
def checkpointed(w: _Writer) -> None:
    c, name = w.x.shape[-1], w.name("k")
    hidden = w.rng.choice([16, 32])
    act = w.rng.choice(["nn.GELU()", "nn.ReLU()", "nn.SiLU()"])
    setup = f"self.{name} = nn.Sequential(nn.LayerNorm({c}), nn.Linear({c}, {hidden}), {act}, nn.Linear({hidden}, {c}))"
    how = w.rng.choice([f"checkpoint(self.{name}, x, use_reentrant=False)", f"self.{name}(x)"])
    if w.add(f"x = {w.rng.choice(['', 'x + '])}{how}", SLOPE, setup, module=f"{name}.1") and w.rng.random() < 0.5:
        w.program.converted += [f"{name}.3"] if w.program.method != "exact" else []


@_operator
def hooked(w: _Writer) -> None:
    c, name = w.x.shape[-1], w.name("h")
    hook = w.rng.choice([
        "register_forward_hook(lambda m, i, o: o * 0.5)", "register_forward_hook(lambda m, i, o: None)",
        "register_forward_pre_hook(lambda m, i: (i[0] + 1,))", "register_full_backward_hook(lambda m, i, o: None)",
    ])  # fmt: skip
    made = w.rng.choice([f"nn.Linear({c}, {c})", f"nn.LayerNorm({c})", "nn.GELU()", "nn.ReLU()"])
    if "backward" in hook and "GELU" in made:  # returns a view, at which `_Noise` cannot hook itself in
        return
    loses = SLOPE if "GELU" in made else EXACT if "ReLU" in made else ROUND
    w.add(
        f"x = self.{name}(x)",
        loses,
        f"self.{name} = {made}",
        f"self.{name}.{hook}",
        module=name if "Lin" in made else "",
    )


# Those with many kinds of their own are written more often.
_OFTEN = {"linear": 2, "conv": 3, "norm": 3, "activation": 4, "product": 3, "in_place": 3, "view": 4, "shortcut": 3,
          "curve": 2, "pad": 1, "pool": 2}  # fmt: skip
_NAMES = [name for name in OPERATORS for _ in range(_OFTEN.get(name, 1))]


def program(seed: int) -> Program:
    return _Writer(seed).write()


# ---- runs ----


@dataclass
class Ran:
    """What a run leaves."""

    y: Tensor
    strides: list[tuple[int, ...]]  # of x before each line and at the end
    values: list[Tensor]
    input: Tensor  # what became of it
    state: dict[str, Tensor]  # buffers and parameters
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


def run(p: Program, model: Any, dtype: torch.dtype = torch.float32, noise: _Noise | None = None) -> Ran:
    """Forward, and backward for a random gradient where there is something to differentiate."""
    leaf = p.input().detach().to(dtype).requires_grad_(p.requires_grad)
    x = leaf.clone(memory_format=torch.preserve_format)  # may be written to
    seen: list[Tensor] = []
    strides: list[tuple[int, ...]] = []

    def see(number: int, x: Tensor) -> None:
        strides.append(x.stride())
        seen.append(x.detach().clone())
        if noise is not None:
            noise.at(x, *(p.lines[n][1] if 0 <= n < len(p.lines) else EXACT for n in (number - 1, number)))

    if hasattr(model, "see"):
        object.__setattr__(model, "see", see)
    torch.manual_seed(p.seed)
    hooks = contextlib.nullcontext() if noise is None else saved_tensors_hooks(noise.pack, noise.unpack)
    with hooks:
        y = model(x)
    found = Ran(y.detach(), strides, seen, x.detach(), {n: t.detach().clone() for n, t in model.state_dict().items()})
    names = {"input": leaf, **dict(model.named_parameters())}
    if y.requires_grad:
        g = torch.randn(y.shape, generator=torch.Generator().manual_seed(p.seed + 1)).to(dtype)
        y.backward(g)
        found.gradients = {name: t.grad for name, t in names.items()}
    return found


# ---- how far gradients may be off ----


class _Noise:
    """Hooks under which an exact program keeps its tensors with an error: what a line may add to its gradients.

    ``round``: every large tensor that PyTorch saves there is off by up to a step of int8 with one scale for the whole
    tensor, where hotrain has one for each group and loses half of a step at most.
    ``slope``: as well, and slopes are off by up to 1/112, the coarser of their steps: so much of g_y is in g_x.
    ``wide``: by 2⁻⁸ of each entry, as bfloat16 is (and codes of int8 are not used).
    ``exact``: not at all: bits, signs, indices and places are exact.
    """

    def __init__(self, seed: int, spared: set[int], together: bool, writes: bool) -> None:
        self.loses, self.spared, self.together, self.writes = EXACT, spared, together, writes
        self.generator = torch.Generator().manual_seed(seed)
        self.behind: dict[int, Tensor] = {}  # g_y of slopes, by their number
        self.slopes = 0

    def at(self, x: Tensor, before: str, loses: str) -> None:
        """Between two lines."""
        self.loses = loses
        if not x.requires_grad or (self.writes and x._is_view()):  # whose hooks a write takes away
            return
        if before == SLOPE:
            x.register_hook(partial(self.behind.__setitem__, self.slopes))
        if loses == SLOPE:
            self.slopes += 1
            x.register_hook(partial(self._with_steps, self.slopes))

    def _with_steps(self, number: int, g_x: Tensor) -> Tensor:
        g_y = self.behind.get(number)
        return g_x if g_y is None or g_y.shape != g_x.shape else g_x + self._signs(g_x) * g_y / 112

    def _signs(self, t: Tensor) -> Tensor:
        signs = torch.rand(t.shape, generator=self.generator).to(t.dtype) * 2 - 1
        return torch.ones_like(signs) if self.together else signs

    def pack(self, t: Tensor) -> Tensor:
        plain = self.loses == EXACT or t.numel() < THRESHOLD or not t.is_floating_point()
        plain = plain or not bool(t.detach().isfinite().all())  # a mask
        if plain or t.untyped_storage().data_ptr() in self.spared:
            return t.detach().clone()
        if self.loses == WIDE:
            return t.detach() * (1 + self._signs(t) * 2**-8)
        return t.detach() + self._signs(t) * t.detach().abs().amax() * (1 + 2**-7) / (254 if self.together else 127)

    @staticmethod
    def unpack(t: Tensor) -> Tensor:
        return t


def bounds(p: Program, exact: Ran) -> dict[str, float]:
    """How far the norm of each gradient may be off: what the exact program makes of kept tensors with an error.

    An operator's bound is the error of what it keeps (`_Noise`); PyTorch's own backward carries it through the rest of
    the program, amplified where the program amplifies. Three times the largest of three draws with independent errors
    of up to a step, for they scatter (a slope with steps, as hardswish's, sees few entries); and one draw in which all
    errors go one way by half a step, as those of equal entries do. Besides what float32 itself loses against float64.
    """
    far: dict[str, float] = dict.fromkeys(exact.gradients, 0.0)
    for draw in range(4):
        model = p.model()
        own = {name for name, _ in model.named_parameters(recurse=False)}  # factors of products, which are rounded
        spared = {t.untyped_storage().data_ptr() for n, t in model.state_dict().items() if n not in own}
        noisy = run(p, model, noise=_Noise(draw, spared, draw == 3, p.writes)).gradients
        for name, g in exact.gradients.items():
            if g is not None:
                off = noisy[name]
                assert off is not None
                far[name] = max(far[name], (3 if draw < 3 else 1) * float((off - g).norm()))
    double = run(p, p.model().double(), torch.float64).gradients
    for name, g in exact.gradients.items():
        if g is not None:
            far[name] += 10 * float((double[name] - g).norm()) + 1e-4 * float(g.norm()) + 1e-7
    return far


# ---- what is to hold ----

SLACK = 4096  # bytes: of scales, of groups' padding and of statistics


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bits, any NaN like any other."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


def usable(p: Program) -> Ran | None:
    """What exact makes of it; None where PyTorch refuses the program, or its numbers are not finite or vary wildly."""
    try:
        exact = run(p, p.model())
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
    numbers = [exact.y, *(g for g in exact.gradients.values() if g is not None)]
    return exact if all(bool(t.isfinite().all()) and float(t.norm()) < 1e6 for t in numbers) else None


def examine(p: Program) -> list[str] | None:
    """What is wrong with a program, in words that begin with its kind; None where exact does not run (`usable`)."""
    exact = usable(p)
    if exact is None:
        return None
    model = p.model()
    before = _description(model)
    p.convert(model)
    try:
        got = run(p, model)
    except Exception as error:
        return [f"raises: {type(error).__name__}: {error} ({_place(error)})"]
    wrong = []
    for number, (a, b) in enumerate(zip(got.values, exact.values, strict=True)):
        if not same(a, b):
            wrong.append(f"forward: {_line(p, number)} differs by {_distance(a, b):.2g}")
            break
    for number, (s, t) in enumerate(zip(got.strides, exact.strides, strict=True)):
        if s != t:
            wrong.append(f"strides: {_line(p, number)} has {s}, not {t}")
            break
    if not same(got.input, exact.input):
        wrong.append("input: modified otherwise")
    wrong += [f"state: {name}" for name, t in exact.state.items() if not same(got.state[name], t)]
    if got.gradients.keys() != exact.gradients.keys():
        wrong.append("gradient: the result requires one in one of the two alone")
    wrong += _gradients(p, exact, got)
    if exact.y.requires_grad or exact.gradients:
        wrong += _bytes(p, model)
    hotrain.revert(model)
    if _description(model) != before:
        wrong.append("revert: classes or attributes are others than before")
    model.load_state_dict(p.model().state_dict())
    if not same(run(p, model).y, exact.y):
        wrong.append("revert: the result differs")
    return wrong


def _gradients(p: Program, exact: Ran, got: Ran, rounding: float = 0.0) -> list[str]:
    wrong: list[str] = []
    if not exact.gradients or got.gradients.keys() != exact.gradients.keys():
        return wrong
    far = bounds(p, exact) if p.method != "hq8" or not p.converted else {}
    for name, want in exact.gradients.items():
        g = got.gradients[name]
        if g is None or want is None:
            wrong += [f"gradient: of {name} is None in one of the two"] if (g is None) != (want is None) else []
            continue
        if g.dtype != want.dtype or _lies(g) != _lies(want):
            wrong.append(f"layout: gradient of {name} is {g.dtype}, {g.stride()}, not {want.dtype}, {want.stride()}")
        off = float((g - want).norm())
        size = float(want.norm())
        if name in far and not off <= far[name] + rounding * size:
            wrong.append(f"error: gradient of {name} is off by {off:.3g} of {size:.3g}, not {far[name]:.3g}")
    return wrong


def _lies(t: Tensor) -> list[int]:
    """Its strides, where they mean something."""
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]


def _bytes(p: Program, model: nn.Module) -> list[str]:
    """No function keeps more than PyTorch's own does; what PyTorch keeps once for several, each may keep."""
    object.__setattr__(model, "see", _nothing)
    exact, each = p.model(), 0

    def pack(t: Tensor) -> Tensor:
        nonlocal each
        each += t.nbytes
        return t

    kept = [hotrain.saved_bytes(m, p.input().clone()).total for m in (model, exact)]  # clones, to be written to
    with saved_tensors_hooks(pack, lambda t: t):
        exact(p.input().clone())
    most = max(kept[1], each) + SLACK
    return [f"bytes: {kept[0]}, not {most}"] if kept[0] > most else []


def _description(model: nn.Module) -> dict[str, Any]:
    return {name: (type(m), sorted(m.__dict__)) for name, m in model.named_modules()}


# ---- compiled ----

# As Inductor cuts and decomposes, without a C++ compiler behind.
_BACKENDS = [
    aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=cut, decompositions=select_decomp_table())
    for cut in (min_cut_rematerialization_partition, compiled.partition)
]


def examine_compiled(p: Program) -> list[str] | None:
    """What is wrong with a program that is compiled, None where PyTorch does not compile it.

    Decompositions round otherwise than PyTorch's kernels: results are near, and gradients within `bounds` of those.
    """
    exact = usable(p)
    if exact is None or any("dropout" in line and "0.0" not in line for line, _ in p.lines):  # others are drawn
        return None
    ran = []
    for backend, converts in zip(_BACKENDS, (False, True), strict=True):
        torch._dynamo.reset()
        model = p.model(watched=False)
        if converts:
            p.convert(model)
        try:
            ran.append(run(p, torch.compile(model, backend=backend)))
        except Exception as error:
            if not converts:
                return None
            return [f"raises: {type(error).__name__}: {error} ({_place(error)})"]
    plain, got = (dataclasses.replace(one, gradients=_named(one.gradients)) for one in ran)
    wrong = []
    for what, a, b in (("forward", got.y, plain.y), ("input", got.input, plain.input)):
        if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-4, atol=1e-5 * (1 + float(b.abs().max()))):
            wrong.append(f"{what}: differs by {_distance(a, b):.2g}")
    # Decompositions may give other strides than the kernels (batch norm of a transposed tensor on a CPU): those
    # of eager mode are right too.
    if _lies(got.y) not in (_lies(plain.y), _lies(exact.y)):
        wrong.append(f"strides: of the result {got.y.stride()}, not {plain.y.stride()}")
    near = dataclasses.replace(exact, gradients=plain.gradients)
    return wrong + _gradients(p, near, got, rounding=1e-3)  # a sign of an entry near zero, where results are near alone


def _named(gradients: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name.removeprefix("_orig_mod."): g for name, g in gradients.items()}


def _line(p: Program, number: int) -> str:
    return "the input" if number == 0 else repr(p.lines[number - 1][0])


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max()) if a.shape == b.shape else float("nan")


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    found = [f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in frames if "hotrain" in f.filename]
    return found[-1] if found else "outside of hotrain"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="seed of the first program")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--compiled", action="store_true", help="compile each, as Inductor would cut it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ran, kinds = 0, Counter[str]()
    with small_and_fine():
        for seed in range(args.first, args.first + args.count):
            p = program(seed)
            wrong = examine_compiled(p) if args.compiled else examine(p)
            ran += wrong is not None
            for what in wrong or ():
                kinds[what.partition(":")[0]] += 1
                print(f"{seed}: {what}", flush=True)
            if wrong:
                print(p, flush=True)
    print(f"{args.count} programs, {ran} of them run by PyTorch; {dict(kinds) or 'nothing found'}")


if __name__ == "__main__":
    main()
