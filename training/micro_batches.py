"""How the sequences of an update are split into forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sesa.training.prefix_tree import common_prefix
from sesa.training.sequences import TokenSequence


@dataclass(frozen=True, slots=True)
class Sample:
    """A sequence and the advantage of its rollout."""

    sequence: TokenSequence
    advantage: float


def plan_micro_batches(samples: Sequence[Sample], size: int, pair_cost: float | None) -> list[list[Sample]]:
    """Split into micro-batches whose forward passes hold at most ``size`` times the longest sequence. Deterministic.

    ``pair_cost`` None: padded batches of at most ``size`` sequences of like length, longest first, so that the peak of
    memory comes at once. Otherwise prefix trees: neighbours in lexicographic order, as long as the tokens that one
    shares with the tree are worth more than the attention between its other tokens and the tree, which the mask then
    hides; ``pair_cost`` is the cost of one attended pair of tokens in units of the rest of a token's forward pass.
    """
    if not samples:
        raise ValueError("an update needs at least one sequence")
    if pair_cost is None:
        order = sorted(samples, key=lambda s: (-len(s.sequence), s.sequence.rollout_id, s.sequence.ids))
        return [order[at : at + size] for at in range(0, len(order), size)]
    budget = size * max(len(sample.sequence) for sample in samples)
    order = sorted(samples, key=lambda s: (s.sequence.ids, s.sequence.rollout_id))
    batches: list[list[Sample]] = []
    nodes = 0
    for sample in order:
        shared = common_prefix(batches[-1][-1].sequence.ids, sample.sequence.ids) if batches else 0
        new = len(sample.sequence) - shared
        if batches and shared > 2 * new * nodes * pair_cost and nodes + new <= budget:
            batches[-1].append(sample)
            nodes += new
        else:
            batches.append([sample])
            nodes = len(sample.sequence)
    return batches


def attention_pair_cost(model: Any) -> float:
    """Cost of one attended pair of tokens (4 * heads * head size operations in each layer: scores and weighted sum)
    over that of a token in everything else (2 per parameter, embeddings aside)."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    parameters: int = (
        sum(p.numel() for p in model.base_model.parameters()) - model.get_input_embeddings().weight.numel()
    )
    operations: int = heads * head_size * config.num_hidden_layers
    return 2 * operations / parameters
