"""Each operator by the kernels, where they support its call, and the layer behind it: no operator runs another's
kernel, and the input that it lets a layer rematerialize is the one that the layer gets.

The kernels run in Triton's interpreter, or on a GPU where there is one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from operator_cases import CASES, differentiate, distance, transposed, with_operators
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")

from hotrain import autograd, kernels
from hotrain.compress import sharing

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
every = pytest.mark.parametrize("name", CASES)
# numpy, of which the interpreter is made, warns of infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _by_kernels(small_tensors_too: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "SMALL", 2)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(autograd, "KERNELS", dict.fromkeys(("cpu", "cuda"), kernels))


def inputs(name: str) -> list[Tensor]:
    return [t.detach().to(DEVICE).requires_grad_() for t in CASES[name].inputs()]


@every
def test_gradients_are_as_close_as_the_format(name: str) -> None:
    """In eager mode, where forward is PyTorch's to the bit."""
    given = inputs(name)
    got = differentiate(lambda *t: with_operators(CASES[name].call, *t), given)
    want = differentiate(CASES[name].call, given)
    assert torch.equal(got[0], want[0])
    assert distance(got[1:], want[1:]) <= CASES[name].loss + 2.0**-20


@every
def test_compiled_it_is_as_close(name: str) -> None:
    """A compiled graph has other operators, whose forward is a kernel of ours for some: float32 in another order."""
    if name == "dropout":
        pytest.skip("compiled, it draws another mask (tests/kernels/test_masks.py)")
    given = inputs(name)
    torch._dynamo.reset()
    compiled: Callable[..., Tensor] = torch.compile(CASES[name].call, backend="aot_eager")
    got = differentiate(lambda *t: with_operators(compiled, *t), given)
    want = differentiate(CASES[name].call, given)
    assert distance(got[:1], want[:1]) <= 2.0**-18
    assert distance(got[1:], want[1:]) <= CASES[name].loss + 2.0**-18


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@every
def test_its_result_can_be_written_to(name: str, compiles: bool) -> None:
    """As by an activation function in place, wherever PyTorch's result can: a norm by kernels returned a view."""
    if compiles and name == "dropout":
        pytest.skip("compiled, it draws another mask (tests/kernels/test_masks.py)")
    given = inputs(name)

    def call(*tensors: Tensor) -> Tensor:
        return CASES[name].call(*tensors).mul_(1.5)

    try:
        want = differentiate(call, given)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
        pytest.skip("PyTorch saves its result")
    torch._dynamo.reset()
    run: Callable[..., Tensor] = torch.compile(call, backend="aot_eager") if compiles else call
    got = differentiate(lambda *t: with_operators(run, *t), given)
    assert distance(got[:1], want[:1]) <= 2.0**-18
    assert distance(got[1:], want[1:]) <= CASES[name].loss + 2.0**-18


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:\\s*Online softmax is disabled:UserWarning")
@pytest.mark.parametrize("layout", ["dense", "transposed"])
@every
def test_inductor_compiles_it(name: str, layout: str) -> None:
    """What is no kernel of ours is Inductor's: of a transposed input, as behind a patch embedding, nearly all.

    Index arithmetic that leaves int32 does not compile there, though PyTorch's does, and Inductor's for a CPU.
    """
    if name == "dropout":
        pytest.skip("compiled, it draws another mask (tests/kernels/test_masks.py)")
    given = inputs(name)
    if layout == "transposed":
        given = [transposed(t) for t in given]
    torch._dynamo.reset()
    compiled: Callable[..., Tensor] = torch.compile(CASES[name].call)
    got = differentiate(lambda *t: with_operators(compiled, *t), given)
    want = differentiate(CASES[name].call, given)
    assert distance(got[:1], want[:1]) <= 2.0**-18
    assert distance(got[1:], want[1:]) <= CASES[name].loss + 2.0**-18


@every
def test_a_layer_behind_it_gets_its_input(name: str) -> None:
    """g_w of a linear layer, whose x may be made of the operator's codes: within what they lose."""
    given = inputs(name)
    w = torch.randn(5, CASES[name].call(*given).shape[-1], device=DEVICE, requires_grad=True)

    def behind(*t: Tensor) -> Tensor:
        return F.linear(CASES[name].call(*t[1:]), t[0])

    got, want = (differentiate(call, [w, *given])[1:2] for call in (lambda *t: with_operators(behind, *t), behind))
    # x in int8, or in 4 bits where it is made of codes of 4
    assert distance(got, want) <= 0.2
