"""Callbacks for the trainers of other libraries: they convert at the right moment, check, and log what was saved.

`transformers` and `lightning`, each imported only when asked for; accelerate, timm, PEFT and torchao need no module
here (docs/integrations.md). `common` is what the callbacks share.
"""
