"""A forward pass that computes each shared token once: the sequences of a group laid out as a prefix tree.

The rollouts of a group begin with the same prompt. In depth-first order, with a token's position being its depth and
its attention limited to its ancestors, one row gives every sequence the hidden states it would have on its own, so
loss and gradients agree with padded batches up to rounding, at the cost of the distinct tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sesa.training.logprobs import TokenScores, head_scores
from sesa.training.sequences import TokenSequence


@dataclass(frozen=True, slots=True)
class Tree:
    """A prefix tree of T nodes in depth-first order.

    Node n holds token ``ids[n]`` at ``depth[n]``; its descendants are the nodes after n and before ``ends[n]``.
    ``paths[s][t]`` is the node of token t of the s-th sequence given.
    """

    ids: list[int]
    depth: list[int]
    ends: list[int]
    paths: list[list[int]]

    def __len__(self) -> int:
        return len(self.ids)


def build_tree(sequences: Sequence[Sequence[int]]) -> Tree:
    """The prefix tree of token sequences. Taken in lexicographic order, each one branches off the one before it."""
    ids: list[int] = []
    depth: list[int] = []
    ends: list[int] = []
    paths: list[list[int]] = [[] for _ in sequences]
    previous: tuple[list[int], Sequence[int]] = ([], ())
    for number in sorted(range(len(sequences)), key=lambda n: tuple(sequences[n])):
        path, tokens = previous[0], sequences[number]
        shared = common_prefix(previous[1], tokens)
        for node in path[shared:]:
            ends[node] = len(ids)
        new = range(len(ids), len(ids) + len(tokens) - shared)
        ids += tokens[shared:]
        depth += range(shared, len(tokens))
        ends += [-1] * len(new)
        paths[number] = [*path[:shared], *new]
        previous = (paths[number], tokens)
    for node in previous[0]:
        ends[node] = len(ids)
    return Tree(ids, depth, ends, paths)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)


def tree_scores(model: Any, sequences: Sequence[TokenSequence], temperature: float) -> TokenScores:
    """Score sequences as one row that holds their prefix tree; a ``ForwardCore``, see ``supports_trees``."""
    device = model.get_input_embeddings().weight.device
    tree = build_tree([sequence.ids for sequence in sequences])
    node = torch.arange(len(tree), device=device)
    ends = torch.tensor(tree.ends, device=device)
    # Row n of the mask: every m at or before n whose subtree holds n.
    visible = (node[None, :] <= node[:, None]) & (node[:, None] < ends[None, :])
    hidden = model.base_model(
        input_ids=torch.tensor([tree.ids], device=device),
        position_ids=torch.tensor([tree.depth], device=device),
        attention_mask=visible[None, None],
        use_cache=False,
    ).last_hidden_state[0]
    sources = [path[t - 1] for s, path in zip(sequences, tree.paths, strict=True) for t in s.sampled]
    targets = [s.ids[t] for s in sequences for t in s.sampled]
    return head_scores(
        model, hidden[torch.tensor(sources, device=device)], torch.tensor(targets, device=device), temperature
    )


def supports_trees(model: Any) -> bool:
    """Whether a token's hidden state depends on its ancestors and its depth alone when a mask says so: full attention
    in every layer, in an implementation that takes a mask."""
    config = model.config.get_text_config()
    layers = getattr(config, "layer_types", None) or []
    sliding = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return (
        config._attn_implementation in ("sdpa", "eager")
        and not sliding
        and all(kind == "full_attention" for kind in layers)
        and hasattr(config, "num_attention_heads")
    )
