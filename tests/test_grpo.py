"""The GRPO step: what it optimises, in whichever micro-batches and layout it is computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_policy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_policy import light_process  # noqa: F401 - an autouse fixture
from transformers import AutoTokenizer

from sesa.config import TrainingSection
from sesa.training.grpo import RolloutTrainer
from sesa.training.logprobs import head_scores, padded_scores, score
from sesa.training.micro_batches import Sample, plan_micro_batches
from sesa.training.prefix_tree import build_tree, supports_trees, tree_scores
from sesa.training.sequences import TokenSequence, rollout_sequences

LOSS_TYPES = ("grpo", "dr_grpo", "bnpo", "dapo")
MAX_COMPLETION = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy.write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def samples(folder: Path) -> list[Sample]:
    """Three groups of four rollouts with one to three turns of uneven length, sampled at temperature 0.8."""
    model = tiny_policy.load(folder)
    out = []
    for group in range(3):
        prompt = list(range(3, 12 + 4 * group))
        for k in range(4):
            replies = [(2 + 3 * k,), (3, 1), (5,), (2, 2, 4)][k]
            sampled = tiny_policy.sampled_rollout(
                model, f"{group}-{k}", 0.0, prompt=prompt, replies=replies, temperature=0.8, seed=10 * group + k
            )
            (sequence,) = rollout_sequences(sampled)
            out.append(Sample(sequence, (-1.0) ** k * (1 + 0.3 * group + 0.1 * k)))
    return out


def trainer(folder: Path, tmp_path: Path, *, share: bool = True, **changes: Any) -> RolloutTrainer:
    defaults = {"learning_rate": 1e-3, "micro_batch": 64, "max_grad_norm": 1e9}
    return RolloutTrainer(
        tiny_policy.load(folder),
        AutoTokenizer.from_pretrained(folder),
        TrainingSection(**{**defaults, **changes}),
        temperature=0.8,
        max_completion_tokens=MAX_COMPLETION,
        seed=0,
        output_dir=tmp_path,
        reference=str(folder),
        share_prefixes=share,
    )


def gradients(it: RolloutTrainer, samples: Sequence[Sample]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one update, caught in front of the optimiser step."""
    caught: dict[str, torch.Tensor] = {}

    def keep(*_: Any) -> None:
        caught.update({name: p.grad.clone() for name, p in it.model.named_parameters() if p.grad is not None})

    hook = it.optimizer.register_step_pre_hook(keep)
    result = it.update(samples)
    hook.remove()
    return result.loss, caught


def plain_loss(model: Any, samples: Sequence[Sample], loss_type: str, old_shift: float = 0.0) -> torch.Tensor:
    """The objective written out sequence by sequence, with the model's ordinary forward pass."""
    per_sequence = []
    for sample in samples:
        s = sample.sequence
        logits = model(input_ids=torch.tensor([s.ids])).logits[0] / 0.8
        logp = torch.log_softmax(logits, -1)[[i - 1 for i in s.sampled], [s.ids[i] for i in s.sampled]]
        ratio = torch.exp(logp - (torch.tensor([s.logprobs[i] for i in s.sampled]) + old_shift))
        a = sample.advantage
        per_sequence.append(-torch.minimum(ratio * a, ratio.clamp(1 - 0.2, 1 + 0.285) * a))
    flat = torch.cat(per_sequence)
    if loss_type == "grpo":
        return torch.stack([row.mean() for row in per_sequence]).mean()
    return flat.sum() / (MAX_COMPLETION * len(samples)) if loss_type == "dr_grpo" else flat.mean()


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference of two gradients, relative to the largest entry."""
    assert a.keys() == b.keys()
    scale = max(float(g.abs().max()) for g in a.values())
    assert scale > 0
    return max(float((a[name] - b[name]).abs().max()) for name in a) / scale


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("share", [True, False])
def test_loss_and_gradient_are_those_of_the_formula(
    folder: Path, tmp_path: Path, samples: list[Sample], loss_type: str, share: bool
) -> None:
    # Off-policy by a fixed shift, so that both clips bind on some tokens.
    for shift in (0.0, 0.3, -0.3):
        moved = [
            Sample(
                TokenSequence(
                    s.ids, s.mask, tuple((p + shift) * m for p, m in zip(s.logprobs, s.mask, strict=True)), "r"
                ),
                sample.advantage,
            )
            for sample in samples
            for s in [sample.sequence]
        ]
        model = tiny_policy.load(folder)
        expected = plain_loss(model, moved, loss_type)
        expected.backward()
        loss, got = gradients(trainer(folder, tmp_path, share=share, loss_type=loss_type, micro_batch=5), moved)
        assert loss == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
        assert largest_difference({n: p.grad for n, p in model.named_parameters()}, got) < 1e-5


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_micro_batches_add_up_to_one_batch(folder: Path, tmp_path: Path, samples: list[Sample], loss_type: str) -> None:
    whole_loss, whole = gradients(trainer(folder, tmp_path, share=False, loss_type=loss_type), samples)
    for size in (1, 5):  # 5 leaves a last micro-batch of two
        it = trainer(folder, tmp_path, share=False, loss_type=loss_type, micro_batch=size)
        loss, got = gradients(it, samples)
        assert len(it._micro_batches) == math.ceil(len(samples) / size)
        assert loss == pytest.approx(whole_loss, rel=1e-4, abs=1e-6)
        assert largest_difference(whole, got) < 1e-5


def test_kl_to_the_reference_is_added_whatever_the_micro_batch(
    folder: Path, tmp_path: Path, samples: list[Sample]
) -> None:
    results = []
    for size, share in ((64, False), (3, False), (3, True)):
        it = trainer(folder, tmp_path, share=share, beta=0.5, micro_batch=size)
        first = it.update(samples)
        assert first.kl == pytest.approx(0, abs=1e-6)  # the policy is still its own reference
        assert first.grad_norm > 0
        results.append((it.update(samples), it))
    (a, one), *others = results
    assert a.kl is not None
    assert a.kl > 1e-4
    for b, it in others:
        assert b.loss == pytest.approx(a.loss, rel=1e-3)
        for p, q in zip(one.model.parameters(), it.model.parameters(), strict=True):
            assert (p - q).detach().abs().max().item() < 2e-4


def test_first_update_is_on_policy_and_one_step(folder: Path, tmp_path: Path, samples: list[Sample]) -> None:
    it = trainer(folder, tmp_path, micro_batch=5)
    before = [p.clone() for p in it.model.parameters()]
    result = it.update(samples)
    assert result.applied
    assert result.ratio_mean == pytest.approx(1, abs=1e-5)
    assert result.ratio_max == pytest.approx(1, abs=1e-4)
    assert result.tokens == sum(s.sequence.tokens for s in samples)
    assert result.grad_norm > 0
    assert result.clipped == 0
    assert 0 < result.entropy < math.log(tiny_policy.VOCABULARY)
    steps = {int(state["step"]) for state in it.optimizer.state.values()}
    assert steps == {1}
    # The first step of AdamW moves no weight further than the learning rate.
    moved = max((p - q).detach().abs().max().item() for p, q in zip(it.model.parameters(), before, strict=True))
    assert 0 < moved < 1.01e-3


def test_wrong_temperature_shows_in_the_ratio(folder: Path, tmp_path: Path, samples: list[Sample]) -> None:
    it = trainer(folder, tmp_path)
    it.temperature = 1.0  # sampled at 0.8
    assert abs(it.update(samples).ratio_mean - 1) > 0.02


def test_a_step_makes_good_replies_likelier_and_bad_ones_less_so(
    folder: Path, tmp_path: Path, samples: list[Sample]
) -> None:
    it = trainer(folder, tmp_path)
    before = [sum(score(it.model, s.sequence, 0.8)) for s in samples]
    it.update(samples)
    after = [sum(score(it.model, s.sequence, 0.8)) for s in samples]
    for sample, then, now in zip(samples, before, after, strict=True):
        assert (now - then) * sample.advantage > 0


def test_unsampled_tokens_have_no_gradient(folder: Path, tmp_path: Path, samples: list[Sample]) -> None:
    """Whatever the policy read may change its loss through attention only: their own log-probability does not count.
    An objective with all sampled tokens masked out but one is the gradient of that one."""
    s = samples[0].sequence
    last = s.sampled[-1]
    only = TokenSequence(
        s.ids, tuple(i == last for i in range(len(s))), tuple(p * (i == last) for i, p in enumerate(s.logprobs)), "r"
    )
    model = tiny_policy.load(folder)
    logits = model(input_ids=torch.tensor([s.ids])).logits[0, last - 1] / 0.8
    (-torch.log_softmax(logits, -1)[s.ids[last]] * 2.0).backward()
    _, got = gradients(trainer(folder, tmp_path), [Sample(only, 2.0)])
    assert largest_difference({n: p.grad for n, p in model.named_parameters()}, got) < 1e-5


def test_optimizer_state_carries_over_a_restart(folder: Path, tmp_path: Path, samples: list[Sample]) -> None:
    kept = trainer(folder, tmp_path, warmup_steps=4)
    rates = []
    for _ in range(3):
        rates.append(kept.optimizer.param_groups[0]["lr"])
        kept.update(samples)
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3])

    first = trainer(folder, tmp_path, warmup_steps=4)
    first.update(samples)
    first.update(samples)
    torch.save(first.optimizer_state(), tmp_path / "state.pt")
    first.model.save_pretrained(tmp_path / "second")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "second")
    again = trainer(tmp_path / "second", tmp_path, warmup_steps=4)
    again.load_optimizer(torch.load(tmp_path / "state.pt", weights_only=True))
    assert again.updates == 2
    assert again.optimizer.param_groups[0]["lr"] == pytest.approx(0.75e-3)
    again.update(samples)
    for p, q in zip(kept.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(
    folder: Path, tmp_path: Path, samples: list[Sample]
) -> None:
    it = trainer(folder, tmp_path, micro_batch=5)
    before = [p.clone() for p in it.model.parameters()]
    s = samples[0]
    result = it.update([*samples[1:], Sample(s.sequence, math.inf)])
    assert not result.applied
    assert all(torch.equal(p, q) for p, q in zip(it.model.parameters(), before, strict=True))


def test_bfloat16_keeps_float32_weights(folder: Path, tmp_path: Path, samples: list[Sample]) -> None:
    it = RolloutTrainer(
        tiny_policy.load(folder),
        AutoTokenizer.from_pretrained(folder),
        TrainingSection(learning_rate=1e-3),
        temperature=0.8,
        max_completion_tokens=MAX_COMPLETION,
        seed=0,
        output_dir=tmp_path,
        bf16=True,
    )
    for _ in range(2):
        result = it.update(samples)
        assert result.applied
    assert {p.dtype for p in it.model.parameters()} == {torch.float32}


def test_training_is_silent(
    folder: Path, tmp_path: Path, samples: list[Sample], capfd: pytest.CaptureFixture[str]
) -> None:
    it = trainer(folder, tmp_path)
    capfd.readouterr()
    it.update(samples)
    it.update(samples)
    assert capfd.readouterr() == ("", "")


# ------------------------------------------------------------------------------------------------------ forward cores


def test_scores_are_the_model_s_own(folder: Path, samples: list[Sample]) -> None:
    model = tiny_policy.load(folder)
    for sample in samples:
        s = sample.sequence
        with torch.no_grad():
            logp = torch.log_softmax(model(input_ids=torch.tensor([s.ids])).logits[0] / 0.8, -1)
        expected = [float(logp[i - 1, s.ids[i]]) for i in s.sampled]
        assert score(model, s, 0.8) == pytest.approx(expected, abs=1e-5)
        assert [s.logprobs[i] for i in s.sampled] == pytest.approx(expected, abs=1e-5)


def test_tree_and_padded_agree_in_scores_and_gradients(folder: Path, samples: list[Sample]) -> None:
    sequences = [sample.sequence for sample in samples]
    weights = torch.linspace(-1, 1, sum(s.tokens for s in sequences))
    results = []
    for core in (tree_scores, padded_scores):
        model = tiny_policy.load(folder)
        scores = core(model, sequences, 0.8)
        (scores.logprobs * weights).sum().backward()
        results.append((scores, {n: p.grad for n, p in model.named_parameters()}))
    (tree, a), (padded, b) = results
    assert torch.allclose(tree.logprobs, padded.logprobs, atol=1e-5)
    assert torch.allclose(tree.entropies, padded.entropies, atol=1e-5)
    assert largest_difference(a, b) < 1e-5


def test_tiles_of_the_output_head_change_nothing(
    folder: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = torch.randn(23, 64, requires_grad=True)
    targets = torch.randint(0, tiny_policy.VOCABULARY, (23,))
    results = []
    for elements in (2**25, 5 * tiny_policy.VOCABULARY):
        monkeypatch.setattr("sesa.training.logprobs.HEAD_TILE", elements)
        model = tiny_policy.load(folder)
        hidden.grad = None
        scores = head_scores(model, hidden, targets, 0.7)
        scores.logprobs.sum().backward()
        results.append((scores.logprobs, scores.entropies, hidden.grad, model.lm_head.weight.grad))
    for a, b in zip(*results, strict=True):
        assert a is not None
        assert b is not None
        assert torch.allclose(a, b, atol=1e-5)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=6))
def test_a_tree_holds_each_prefix_once_in_depth_first_order(sequences: list[list[int]]) -> None:
    tree = build_tree(sequences)
    assert len(tree) == len({tuple(s[: k + 1]) for s in sequences for k in range(len(s))})
    for s, path in zip(sequences, tree.paths, strict=True):
        assert [tree.ids[node] for node in path] == s
        assert [tree.depth[node] for node in path] == list(range(len(s)))
        # The ancestors that the mask shows to the last token are the path itself.
        last = path[-1]
        assert [m for m in range(last + 1) if last < tree.ends[m]] == path


@given(st.lists(st.lists(st.integers(3, 5), min_size=2, max_size=7), min_size=1, max_size=8), st.integers(1, 4))
@settings(max_examples=50)
def test_micro_batches_hold_every_sequence_once_within_their_budget(rows: list[list[int]], size: int) -> None:
    samples = [
        Sample(TokenSequence(tuple(r), (False,) + (True,) * (len(r) - 1), (0.0,) * len(r), str(n)), 1.0)
        for n, r in enumerate(rows)
    ]
    longest = max(map(len, rows))
    for pair_cost in (0.0, 0.1, None):
        batches = plan_micro_batches(samples, size, pair_cost)
        assert sorted(s.sequence.rollout_id for b in batches for s in b) == sorted(map(str, range(len(rows))))
        for batch in batches:
            cost = (
                len(build_tree([s.sequence.ids for s in batch]))
                if pair_cost is not None
                else len(batch) * max(len(s.sequence) for s in batch)
            )
            assert cost <= size * longest


def test_an_empty_update_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sequence"):
        plan_micro_batches([], 4, None)


def test_sequences_share_a_tree_where_the_prefix_outweighs_the_hidden_attention() -> None:
    def sample(name: str, ids: list[int]) -> Sample:
        return Sample(TokenSequence(tuple(ids), (False,) + (True,) * (len(ids) - 1), (0.0,) * len(ids), name), 1.0)

    prompt, other = [5] * 100, [6] * 100
    rows = [sample(f"{n}{k}", [*p, *[10 + k] * 10]) for n, p in (("a", prompt), ("b", other)) for k in range(4)]
    names = [[s.sequence.rollout_id for s in batch] for batch in plan_micro_batches(rows, 8, 1e-3)]
    assert names == [["a0", "a1", "a2", "a3"], ["b0", "b1", "b2", "b3"]]
    dear = plan_micro_batches(rows, 8, 1.0)  # 100 shared tokens against 2 * 10 * 110 hidden pairs
    assert [len(batch) for batch in dear] == [1] * 8


def test_trees_are_only_used_where_the_mask_is_all_that_decides(folder: Path) -> None:
    model = tiny_policy.load(folder)
    assert supports_trees(model)
    model.config.sliding_window = 128
    assert not supports_trees(model)
    model.config.sliding_window = None
    model.config._attn_implementation = "flash_attention_2"
    assert not supports_trees(model)
