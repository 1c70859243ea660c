"""Twenty models of timm and transformers, small: convert, ten steps, save, load, revert, compile, export.

    python benchmarks/compatibility.py [--models test_vit,bert] [--out FILE]

Each model goes through `STAGES` in turn; a stage that fails is recorded with the message of its error. Nothing here
depends on the model but how it is built and called.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hotrain_bench.conditions import conditions, parser_of, write
from torch import Tensor, nn
from torch.nn import functional as F

import hotrain
import hotrain.train  # first: it lets timm load beside a CPU-only PyTorch

STEPS = 10
CLASSES = 10


@dataclass(frozen=True)
class Subject:
    """A model.

    Attributes:
        library: timm or transformers.
        build: makes it, with random weights.
        inputs: makes the keyword arguments of a training call; ``labels`` among them.
    """

    library: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]


def _timm(name: str, size: int = 64, **options: Any) -> Subject:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=CLASSES, **options)

    def inputs() -> dict[str, Tensor]:
        return {"x": torch.randn(4, 3, size, size), "labels": torch.randint(CLASSES, (4,))}

    return Subject("timm", build, inputs)


_SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def _transformers(model: str, inputs: Callable[[], dict[str, Tensor]], **sizes: Any) -> Subject:
    def build() -> nn.Module:
        import transformers

        kind = getattr(transformers, model)
        return kind(kind.config_class(use_cache=False, **sizes))

    return Subject("transformers", build, inputs)


def _tokens() -> dict[str, Tensor]:
    ids = torch.randint(3, 128, (4, 64))
    return {"input_ids": ids, "labels": ids}


def _sentences() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 128, (4, 64)), "labels": torch.randint(CLASSES, (4,))}


def _images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.randint(CLASSES, (4,))}


def _masks() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(4, 3, 64, 64), "labels": torch.randint(CLASSES, (4, 64, 64))}


def _speech() -> dict[str, Tensor]:
    return {"input_features": torch.randn(4, 16, 128), "labels": torch.randint(3, 128, (4, 16))}


_TEXT = {**_SIZES, "vocab_size": 128}
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "head_dim": 16}
_T5 = {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
_WHISPER = {
    **{f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in (("layers", 2), ("attention_heads", 4))},
    **{"encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "d_model": 64, "num_mel_bins": 16, "vocab_size": 128},
    **{"max_source_positions": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "decoder_start_token_id": 1,
}
_SEGFORMER = {"hidden_sizes": [32, 32, 64, 64], "depths": [1] * 4, "num_attention_heads": [1, 1, 2, 2]}

SUBJECTS: dict[str, Subject] = {
    "test_vit": _timm("test_vit", img_size=64, patch_size=8),
    "test_resnet": _timm("test_resnet"),
    "test_efficientnet": _timm("test_efficientnet"),
    "test_convnext": _timm("test_convnext"),
    "test_nfnet": _timm("test_nfnet"),
    "test_mambaout": _timm("test_mambaout"),
    "test_maxvit": _timm("test_maxvit", img_size=64),
    "mobilenetv3_small_050": _timm("mobilenetv3_small_050"),
    "test_vit_relpos": _timm("test_vit_relpos", img_size=64, patch_size=8),
    "swin_tiny_patch4_window7_224": _timm(
        "swin_tiny_patch4_window7_224", 56, img_size=56, embed_dim=32, depths=(2, 2), num_heads=(2, 4)
    ),
    "bert": _transformers("BertForSequenceClassification", _sentences, num_labels=CLASSES, **_TEXT),
    "modernbert": _transformers("ModernBertForSequenceClassification", _sentences, num_labels=CLASSES, **_TEXT,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2),
    "gpt2": _transformers("GPT2LMHeadModel", _tokens, vocab_size=128, n_positions=64, n_embd=64, n_layer=2, n_head=4,
        bos_token_id=1, eos_token_id=2),
    "llama": _transformers("LlamaForCausalLM", _tokens, **_TEXT),
    "qwen3": _transformers("Qwen3ForCausalLM", _tokens, **_GROUPED),
    "t5": _transformers("T5ForConditionalGeneration", _tokens, decoder_start_token_id=0, pad_token_id=0, **_T5),
    "vit": _transformers("ViTForImageClassification", _images, image_size=64, patch_size=8, num_labels=CLASSES,
        **_SIZES),
    "dinov2": _transformers("Dinov2ForImageClassification", _images, image_size=64, patch_size=8, num_labels=CLASSES,
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
    "segformer": _transformers("SegformerForSemanticSegmentation", _masks, num_labels=CLASSES, decoder_hidden_size=32,
        **_SEGFORMER),
    "whisper": _transformers("WhisperForConditionalGeneration", _speech, **_WHISPER),
}  # fmt: skip


@dataclass
class Trial:
    """A model on its way through the stages.

    Attributes:
        subject: what it is.
        exact: the model before conversion.
        model: the copy that is converted.
        batch: the arguments of its calls.
        found: what the stages found, for the record.
    """

    subject: Subject
    exact: nn.Module
    model: nn.Module
    batch: dict[str, Tensor]
    found: dict[str, Any] = field(default_factory=dict)


def loss_of(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    """The training loss: transformers' own, cross-entropy of timm's logits."""
    if "x" in batch:
        return F.cross_entropy(model(batch["x"]), batch["labels"])
    return model(**batch).loss


def output_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The logits in evaluation mode."""
    training = model.training
    with torch.no_grad():
        out = model.eval()(batch["x"]) if "x" in batch else model.eval()(**batch)
    model.train(training)
    return out if isinstance(out, Tensor) else out.logits


def _same(got: Tensor, want: Tensor) -> None:
    if not torch.equal(got, want):
        raise AssertionError(f"outputs differ by {float((got - want).abs().max()):g}")


def _train(model: nn.Module, batch: dict[str, Tensor]) -> float:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(STEPS):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss)


def convert(trial: Trial) -> None:
    """Convert; inference is that of the exact model, to the bit."""
    want = output_of(trial.exact, trial.batch)
    trial.found["report"] = hotrain.convert(trial.model)
    _same(output_of(trial.model, trial.batch), want)


def train(trial: Trial) -> None:
    """Ten steps of AdamW on one batch, and the same for the exact model; both must learn it."""
    first = float(loss_of(copy.deepcopy(trial.exact).train(), trial.batch))
    trial.found["loss"], trial.found["exact_loss"] = _train(trial.model, trial.batch), _train(trial.exact, trial.batch)
    if not trial.found["loss"] < first:
        raise AssertionError(f"loss {trial.found['loss']:g} after {STEPS} steps, {first:g} before")


def save_and_load(trial: Trial) -> None:
    """Save as safetensors and as a state_dict; an exact model, and a converted one, load it."""
    from safetensors.torch import load_model, save_model

    want = output_of(trial.model, trial.batch)
    with tempfile.TemporaryDirectory() as folder:
        save_model(trial.model, f"{folder}/model.safetensors")
        torch.save(trial.model.state_dict(), f"{folder}/model.pt")
        other = trial.subject.build()
        load_model(other, f"{folder}/model.safetensors")
        _same(output_of(other, trial.batch), want)
        other = trial.subject.build()
        hotrain.convert(other)
        other.load_state_dict(torch.load(f"{folder}/model.pt", weights_only=True))
        _same(output_of(other, trial.batch), want)


def export(trial: Trial) -> None:
    """`torch.export` of the converted model in evaluation mode: the exact program, without operators of hotrain."""
    batch = {key: t for key, t in trial.batch.items() if "x" not in trial.batch or key == "x"}
    model = copy.deepcopy(trial.model).eval()
    program = torch.export.export(model, (), batch, strict=False)
    ours = [node for node in program.graph.nodes if "hotrain" in str(node.target)]
    if ours:
        raise AssertionError(f"the program has {ours[0].target}")


def compile_(trial: Trial) -> None:
    """A compiled step (backend aot_eager) has finite gradients."""
    torch.compiler.reset()
    model = copy.deepcopy(trial.model).train()
    loss_of(torch.compile(model, backend="aot_eager"), trial.batch).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not parameter.grad.isfinite().all():
            raise AssertionError(f"the gradient of {name} is not finite")


def revert(trial: Trial) -> None:
    """Revert: every class is the exact model's again, and inference is unchanged to the bit."""
    want = output_of(trial.model, trial.batch)
    hotrain.revert(trial.model)
    classes = [[type(module) for module in model.modules()] for model in (trial.model, trial.exact)]
    if classes[0] != classes[1]:
        raise AssertionError("classes differ from the exact model's")
    _same(output_of(trial.model, trial.batch), want)


STAGES: dict[str, Callable[[Trial], None]] = {
    "convert": convert,
    "ten steps": train,
    "save, load": save_and_load,
    "compile": compile_,
    "export": export,
    "revert": revert,
}


def tried(name: str, leave_out: str = "") -> dict[str, Any]:
    """Take a model through the stages.

    Args:
        name: of `SUBJECTS`.
        leave_out: a stage that is not run.

    Returns:
        ``stages``: stage → "" or the error; ``converted`` and ``kept``: numbers of layers; ``kept_bytes`` and
        ``exact_bytes``: what is saved for backward; ``loss`` and ``exact_loss`` after ten steps.
    """
    torch.manual_seed(0)
    hotrain.manual_seed(0)
    subject = SUBJECTS[name]
    exact = subject.build().train()
    trial = Trial(subject, exact, copy.deepcopy(exact), subject.inputs())
    stages: dict[str, str] = {}
    for stage, run in STAGES.items():
        if stage == leave_out:
            continue
        try:
            run(trial)
            stages[stage] = ""
        except Exception as error:  # recorded, whatever it is
            stages[stage] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[:200]
        if stage == "ten steps" and "report" in trial.found:
            report = trial.found.pop("report")
            now, before = report.totals() or (None, None)
            trial.found |= {"converted": len(report.converted), "kept": len(report.kept)}
            trial.found |= {"kept_bytes": now, "exact_bytes": before}
    return {"library": subject.library, "stages": stages, **trial.found}


def main() -> None:
    """Print what each model did, and append it to the record."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", default=",".join(SUBJECTS))
    args = parser.parse_args()
    common = conditions(torch.device("cpu"), sys.argv, args.commit)
    warnings.filterwarnings("ignore")
    empty = dict.fromkeys(("median_ms", "spread_ms", "peak_bytes", "activation_bytes"))
    for name in args.models.split(","):
        row = {"bench": "compatibility", "subject": name, "variant": "hotrain", **tried(name)}
        print(name, row["stages"], f"loss {row.get('loss')}, exact {row.get('exact_loss')}", flush=True)
        write(args.out, {**row, **empty, **common})


if __name__ == "__main__":
    main()
