"""Fine-tune a Llama with transformers' Trainer: convert "before" PEFT adds LoRA, or "after", or train it in "full"."""

import hotrain.train  # noqa: F401, I001 (first: torchvision may not fit PyTorch)
import sys
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hotrain.integrations.transformers import HadamardCallback


def main(folder: str, order: str = "after") -> Trainer:
    if order not in ("before", "after", "full"):
        raise ValueError(f"the order is {order!r}; accepted are before, after and full")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes))  # or LlamaForCausalLM.from_pretrained(name)
    callback = HadamardCallback()
    if order == "before":
        callback.convert(model)
    if order != "full":
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    # In the orders "after" and "full" the callback converts in the Trainer; adapters stay exact.
    examples = [{"input_ids": ids, "labels": ids} for ids in torch.randint(128, (8, 64))]
    arguments = TrainingArguments(folder, max_steps=2, logging_steps=1, per_device_train_batch_size=4, report_to="none")
    trainer = Trainer(model, arguments, train_dataset=examples, callbacks=[callback])
    trainer.train()
    return trainer


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(__doc__ if "--help" in sys.argv else main(folder, *sys.argv[1:]).state.log_history[-1])
