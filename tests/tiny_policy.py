"""A random two-layer Llama with a tokenizer, and rollouts sampled from it: the real trainer in milliseconds.

torch and transformers load inside the functions that need them: tests of pure code import this module too.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sesa.training.sequences import TokenSequence
from sesa.types import Answer, ModelCall, Reward, Role, Rollout, StopReason, Turn

VOCABULARY = 97


@pytest.fixture(autouse=True, scope="module")
def light_process() -> Iterator[None]:
    """A model this small only waits for its threads, and for the garbage collection that each ``train()`` begins with:
    what the imports left behind is taken out of it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


def write_tiny_model(folder: Path, seed: int = 0) -> Path:
    """Write a model folder (safetensors, configuration, tokenizer, chat template) and return it."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    raw = Tokenizer(WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def load(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def call(
    prompt: Sequence[int], reply: Sequence[int], logprobs: Sequence[float] | None = None, version: int = 0
) -> ModelCall:
    return ModelCall(
        policy="solver",
        policy_version=version,
        prompt_ids=tuple(prompt),
        token_ids=tuple(reply),
        logprobs=tuple(logprobs if logprobs is not None else [-1.0] * len(reply)),
    )


def rollout(name: str, calls: Sequence[ModelCall], value: float, stop: StopReason = StopReason.ANSWERED) -> Rollout:
    turns = tuple(Turn(call=c, action=Answer(text="x")) for c in calls)
    return Rollout(
        id=name,
        role=Role.SOLVER,
        question_id="q",
        turns=turns,
        stop_reason=stop,
        rewards=(Reward(name="correct", value=value),),
    )


def sampled_rollout(
    model: Any,
    name: str,
    value: float,
    *,
    prompt: Sequence[int],
    replies: Sequence[int] = (6,),
    observation: int = 5,
    temperature: float = 1.0,
    version: int = 0,
    seed: int = 0,
) -> Rollout:
    """Sample a rollout of ``len(replies)`` turns, each extending the one before, with the model's own
    log-probabilities at ``temperature``, the way a server would return them."""
    import torch

    from sesa.training.logprobs import score

    generator = torch.Generator().manual_seed(seed)
    calls: list[ModelCall] = []
    ids = list(prompt)
    for turn, length in enumerate(replies):
        if turn:
            ids += torch.randint(3, VOCABULARY, (observation,), generator=generator).tolist()
        start = len(ids)
        for _ in range(length):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0, -1] / temperature
            ids.append(int(torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)))
        mask = (False,) * start + (True,) * (len(ids) - start)
        whole = TokenSequence(tuple(ids), mask, (0.0,) * len(ids), name)
        calls.append(call(ids[:start], ids[start:], score(model, whole, temperature), version))
    return rollout(name, calls, value)
