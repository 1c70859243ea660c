"""Private PyTorch API: one module uses it, this PyTorch has all of it, and without a name its feature falls back."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import random
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import hotrain
from hotrain import private

ROOT = Path(hotrain.__file__).parent
FILES = [path for path in sorted(ROOT.rglob("*.py")) if path.name != "private.py"]

# PyTorch's operators, which exported programs contain, and what PyTorch's documents tell users to use.
OPERATORS = {"_int_mm", "_scaled_mm", "_fused_sdp_choice"}
DOCUMENTED = {"_indices", "_values"}  # of uncoalesced sparse tensors
OBJECTS = (Tensor, nn.Module(), torch.UntypedStorage, torch.autograd.graph.Node, torch.ops.aten.add.Tensor)
OF_PYTORCH = {name for kind in OBJECTS for name in dir(kind) if name.startswith("_") and not name.startswith("__")}
OF_PYTORCH |= {"_cdata", "_version", "_schema", "_orig_mod", "_compiled_call_impl", "_forward_cls"}


def chain(node: ast.AST) -> list[str]:
    """`torch._C._get` → ["torch", "_C", "_get"]; what a chain begins with otherwise is "?"."""
    if isinstance(node, ast.Attribute):
        return [*chain(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else ["?"]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def uses(path: Path) -> Iterator[str]:
    """Every use of a private name of PyTorch in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        modules: list[str] = []
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("torch"):
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names if alias.name.startswith("torch")]
        yield from (name for name in modules if any(map(is_private, name.split("."))))
        if not isinstance(node, ast.Attribute):
            continue
        parts = chain(node)
        if not is_private(parts[-1]) or parts[-1] in OPERATORS | DOCUMENTED:
            continue
        if parts[:3] == ["torch", "ops", "aten"] or parts[0] in ("_aten", "aten", "_prims"):
            continue
        own = parts[0] in ("self", "cls") and len(parts) == 2
        of_pytorch = parts[-1] in OF_PYTORCH or parts[-1].startswith("_dynamo")
        if parts[0] == "torch" or (of_pytorch and not own):
            yield ".".join(parts)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_other_module_uses_private_api(path: Path) -> None:
    assert list(uses(path)) == []


def test_the_search_finds_what_is_there() -> None:
    found = set(uses(ROOT / "private.py"))
    assert {"torch._inductor.config", "torch._functorch.partitioners.min_cut_rematerialization_partition"} <= found
    assert {"t._dynamo_static_input_type", "function._dynamo_marked_constant"} <= found


def public() -> list[str]:
    named = [name for name, kind in vars(private).items() if getattr(kind, "__module__", "") == private.__name__]
    others = "warn_of_missing", "falls_back", "Inductor", "Fakes", "FunctionModes", "SavedTensorHooks"
    functions = [n for n in named if n[0] != "_" and n not in others]
    return [*dict.fromkeys([*functions, *assigned()])]


def assigned() -> dict[str, str]:
    """Public names of `private` that are PyTorch's own functions, or what replaces them, and their docstrings."""
    body = ast.parse((ROOT / "private.py").read_text()).body
    return {
        node.target.id: ast.literal_eval(doc.value) if isinstance(doc, ast.Expr) else ""
        for node, doc in itertools.pairwise(body)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id.islower()
        if node.target.id[0] != "_"
    }


def test_there_are_at_most_twenty_and_each_says_what_happens_without_it() -> None:
    assert 10 < len(public()) <= 20
    for name in public():
        doc = assigned().get(name) or inspect.getdoc(getattr(private, name)) or ""
        assert "Without it" in doc or name == "fakes", name


def test_this_pytorch_has_every_name() -> None:
    """Fails with the names that went away, where a PyTorch newer than those tested lacks some."""
    assert private.MISSING == {}
    assert private.inductor().cut is not None
    lowering = inspect.getsource(importlib.import_module("torch._inductor.graph"))
    assert all(f'"{key}"' in lowering for key in (private.WRITTEN, private.STRIDES))
    assert private.compiled_part(torch.compile(nn.Linear(2, 2))) is not None
    assert len(private.fakes.hooks(nn.Linear(2, 2))) == 4
    x = torch.ones(2, requires_grad=True)
    y = x.sin()
    assert private.node_number() == private.node_number(y.grad_fn)
    for set_by_pytorch, mark in (
        (torch.compiler.assume_constant_result(lambda: 0), private.constant_in_graphs(lambda: 0)),
        (torch.zeros(1), torch.zeros(1)),
    ):
        if isinstance(mark, Tensor):
            torch._dynamo.mark_static_address(set_by_pytorch, guard=False)
            private.static_in_graphs(mark)
        assert vars(set_by_pytorch) == vars(mark)


def test_every_operator_that_is_named_exists() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            parts = chain(node) if isinstance(node, ast.Attribute) else []
            if parts[:1] == ["_aten"] and len(parts) == 2:
                assert hasattr(torch.ops.aten, parts[1]), f"{path.name}: {parts[1]}"
    assert all(hasattr(torch, name) for name in OPERATORS)


def test_the_versions_are_those_of_the_project() -> None:
    asked = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())["project"]["dependencies"][0]
    assert asked == f"torch>={private.TESTED[0]}"


STEP = """
import sys, warnings
import torch
owner, name = {name!r}.rsplit(".", 1)
owner = eval(owner)
delattr(owner, name)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import hotrain
    torch.manual_seed(0)
    nn = torch.nn
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    x = torch.randn(4, 64, 64)
    exact = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    report = hotrain.convert(model, {method!r}, memory="block")
    got = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
print("warned", [str(w.message) for w in caught if "hotrain" in str(w.message)])
print("equal", all(torch.equal(a, b) for a, b in zip(exact, got)))
print(report)
"""


def step_without(name: str, method: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", STEP.format(name=name, method=method)], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize(
    "name",
    [
        "torch._C._current_graph_task_id",
        "torch.utils._python_dispatch._disable_current_modes",
    ],
)
def test_layers_without_a_name_that_they_need_are_exact_and_say_so(name: str) -> None:
    out = step_without(name, "hq8")
    assert f"has no {name}: {private.EXACT}" in out
    assert "equal True" in out


@pytest.mark.parametrize(
    "name", ["torch._C._autograd._top_saved_tensors_default_hooks", "torch._C._len_torch_function_stack"]
)
def test_activations_without_a_name_that_they_need_are_kept_and_say_so(name: str) -> None:
    out = step_without(name, "exact")
    assert f"has no {name}: {private.FULL}" in out
    assert "equal True" in out
    assert f"kept in full precision: PyTorch {torch.__version__} has no {name}" in out


def test_nothing_is_warned_of_where_all_is_there() -> None:
    out = step_without("torch.pi", "hq8")
    assert "warned []" in out
    assert "equal False" in out


def test_inductor_takes_results_out_of_their_tuple_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuple of an operator's results holds all of them until the last one is taken, at the end in this order."""
    from torch._inductor import config, memory
    from torch._inductor.ir import MultiOutput
    from torch._inductor.utils import run_and_get_code

    late: list[int] = []

    def at_the_end(nodes: list[object], *args: object) -> list[object]:
        results = [n for n in nodes if isinstance(getattr(n, "node", None), MultiOutput)]
        unread = [n for n in results if not n.mpi_node.succ_nodes]  # type: ignore[attr-defined]
        late.append(len(unread))
        return [*(n for n in nodes if n not in unread), *unread]

    order = memory.reorder_for_peak_memory

    def worst(nodes: list[object], *args: object) -> list[object]:
        order(nodes, *args)  # which plans
        return at_the_end(nodes, *args)

    def two(x: Tensor) -> list[Tensor]:
        found, made = x, []
        for _ in range(3):
            found, indices = torch.ops.aten.topk.default(found * 2, 8)
            made.append(indices)
        return [found, *made]

    def places() -> list[int]:
        """How many lines behind each operator its last result is taken."""
        torch._dynamo.reset()
        with config.patch(fx_graph_cache=False):
            _, (code, *_) = run_and_get_code(torch.compile(two), torch.randn(4, 64))
        lines = [line for line in code.splitlines() if not any(word in line for word in ("assert_", "#", "del "))]
        names = [line.split()[0] for line in lines if "aten.topk.default(" in line and " = " in line]
        first = {name: next(n for n, line in enumerate(lines) if line.split()[:1] == [name]) for name in names}
        return [max(n for n, line in enumerate(lines) if f" = {name}[" in line) - first[name] for name in names]

    monkeypatch.setattr(memory, "reorder_for_peak_memory", worst)
    scattered = places()
    private._order_by_memory.__wrapped__()
    assert places() == [2, 2, 2]
    assert late == [4, 4]
    assert max(scattered) > 2


def test_inductor_describes_operators_only_where_that_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a deep graph that text grows exponentially, and before 2.13 each first operator of a kind made it."""
    from torch._inductor.exc import OperatorIssue
    from torch.torch_version import TorchVersion

    described: list[str] = []

    def slow(target: object, args: object, kwargs: object) -> str:
        described.append(str(target))
        return f"target: {target}"

    monkeypatch.setattr(OperatorIssue, "operator_str", staticmethod(slow))
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    private.inductor.__wrapped__()
    text = OperatorIssue.operator_str("aten.mm", [], {})
    assert described == []
    assert f"{text}" == "target: aten.mm"


class Planned:
    """A scheduled node of Inductor: the buffers that it reads by name, and the size of its own."""

    def __init__(self, name: str, reads: dict[str, int], size: int, mutates: bool = False) -> None:
        def buffer(name: str, size: int) -> SimpleNamespace:
            sizes = SimpleNamespace(size_alloc=size, size_free=size)
            return SimpleNamespace(get_name=lambda: name, mpi_buffer=sizes, get_mutations=lambda: [""] * mutates)

        self.name, self.node = name, None
        self.unmet_dependencies = [SimpleNamespace(name=each) for each in reads]
        self.mpi_node = SimpleNamespace(pred_buffers=[buffer(each, size) for each, size in reads.items()])
        self.get_outputs = lambda: [buffer(name, size)]


def test_what_makes_little_of_much_runs_as_soon_as_it_can() -> None:
    """Two blocks' backward, whose sums are fused: these draw the second block in front of the first's gradients."""
    nodes = [
        Planned("g1", {}, 64),
        Planned("g2", {"g1": 64}, 64),
        Planned("sums", {"g1": 64, "g2": 64}, 1),  # fused, of both
        Planned("written", {"g2": 64}, 0, mutates=True),  # in place
        Planned("x1", {"codes": 16}, 64),  # dequantized for w1 alone
        Planned("w1", {"g1": 64, "x1": 64}, 4),
        Planned("x2", {"codes": 16}, 64),
        Planned("w2", {"g2": 64, "x2": 64}, 4),
        Planned("large", {"x2": 64}, 64),
        Planned("cast", {"w1": 4}, 8),
    ]
    order = [node.name for node in private._reductions_early(nodes)]
    assert order == ["g1", "x1", "w1", "g2", "sums", "written", "x2", "w2", "large", "cast"]


def test_that_order_computes_nothing_before_what_it_reads() -> None:
    """Of random graphs, of which a third of the nodes make little."""
    for seed in range(200):
        draw = random.Random(seed)
        nodes: list[Planned] = []
        for n in range(draw.randrange(1, 60)):
            reads = {each.name: 64 for each in draw.sample(nodes, min(len(nodes), draw.randrange(4)))}
            nodes.append(Planned(str(n), reads, draw.choice([1, 64, 64]), mutates=draw.random() < 0.1))
        order = private._reductions_early(nodes)
        assert sorted(map(id, order)) == sorted(map(id, nodes))
        done: set[str] = set()
        for node in order:
            assert {d.name for d in node.unmet_dependencies} <= done
            done.add(node.name)
