"""One update of the embedded model on replies that it sampled itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_policy
import torch
from transformers import AutoTokenizer

from sesa.config import RunConfig, SamplingSection, SolverSection, TrainingSection
from sesa.embedded import embedded_model
from sesa.training.logprobs import score
from sesa.training.sequences import rollout_sequences
from sesa.training.updater import GrpoUpdater, load_policy
from sesa.types import PolicyVersion, Rollout


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads that wait for each other on busy cores take several times as long as one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def real_rollouts(model: Any, tokenizer: Any, per_group: int = 4) -> list[list[Rollout]]:
    """Groups sampled from the embedded model with transformers at temperature 0.8, with the sampler's own
    log-probabilities, rewarded for short replies."""
    out = []
    for g, question in enumerate(("Name a river in France.", "Name a colour.")):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        torch.manual_seed(g)
        sampled = model.generate(
            torch.tensor([prompt]),
            do_sample=True,
            temperature=0.8,
            top_k=0,
            top_p=1.0,
            max_new_tokens=24,
            num_return_sequences=per_group,
            output_scores=True,
            return_dict_in_generate=True,
        )
        logp = torch.log_softmax(torch.stack(sampled.scores, 1), -1)
        group = []
        for k in range(per_group):
            reply = sampled.sequences[k, len(prompt) :].tolist()
            end = tokenizer.eos_token_id
            reply = reply[: reply.index(end) + 1] if end in reply else reply
            old = [float(logp[k, t, token]) for t, token in enumerate(reply)]
            group.append(tiny_policy.rollout(f"{g}-{k}", [tiny_policy.call(prompt, reply, old)], -len(reply) - 0.1 * k))
        out.append(group)
    return out


@pytest.mark.real
def test_the_embedded_model_learns_from_what_it_sampled(tmp_path: Path) -> None:
    """One real update: ratio one within 2%, and afterwards the weights on disk give the trainer's log-probabilities,
    which moved the way the advantages point."""
    folder = embedded_model(None)
    base = PolicyVersion(policy="solver", version=0, path=str(folder))
    config = RunConfig(
        solver=SolverSection(sampling=SamplingSection(temperature=0.8, max_tokens=24), max_turns=1),
        training=TrainingSection(learning_rate=1e-5, epsilon=0.2, epsilon_high=0.285),
    )
    model = load_policy(folder).eval()
    batch = real_rollouts(model, AutoTokenizer.from_pretrained(folder))
    updater = GrpoUpdater(config, tmp_path)
    result = updater.update("solver", 1, batch, base)
    assert result.version is not None
    assert result.stats.ratio_mean == pytest.approx(1, abs=0.02)
    assert result.stats.ratio_max == pytest.approx(1, abs=0.02)
    assert result.stats.trained_tokens == sum(r.sampled_tokens for g in batch for r in g)

    trainer = updater._held["solver"].trainer
    written = load_policy(Path(result.version.path))
    gain = 0.0
    for row, rollout in zip(result.trained, (r for g in batch for r in g), strict=True):
        (sequence,) = rollout_sequences(rollout)
        before, after = score(model, sequence, 0.8), score(written, sequence, 0.8)
        own = score(trainer.model, sequence, 0.8)
        assert sum(abs(a - b) for a, b in zip(after, own, strict=True)) / len(own) < 0.02
        assert before == pytest.approx([sequence.logprobs[i] for i in sequence.sampled], abs=1e-3)
        assert row.advantage is not None
        gain += row.advantage * (sum(after) - sum(before))
    assert gain > 0
