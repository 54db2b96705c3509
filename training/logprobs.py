"""The forward pass of an update: log-probabilities of sampled tokens, and nothing else through the vocabulary.

A forward core takes whole sequences and returns scores for their sampled tokens, in order. ``padded_scores`` is the
reference; another layout of the same tokens (a prefix tree, packed rows) replaces it by having the same signature.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from sesa.errors import ConfigError
from sesa.training.sequences import TokenSequence

HEAD_TILE = 2**25  # logits held at once, in elements: 128 MiB in float32

# Scalings between the output head and the distribution, which the tiled head below does not apply.
_SCALED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier")


class TokenScores(NamedTuple):
    """Two float32 tensors of shape (N,), N the number of sampled tokens: log-probabilities and entropies, in nats.

    Only ``logprobs`` carries a gradient.
    """

    logprobs: torch.Tensor
    entropies: torch.Tensor


ForwardCore = Callable[[Any, Sequence[TokenSequence], float], TokenScores]


def padded_scores(model: Any, sequences: Sequence[TokenSequence], temperature: float) -> TokenScores:
    """Score sequences as one batch, padded on the right.

    A causal model cannot see padding that comes after a token, so no attention mask is needed and every position is
    what it was at sampling time.
    """
    device = model.get_input_embeddings().weight.device
    width = max(len(sequence) for sequence in sequences)
    ids = torch.tensor([[*s.ids, *[0] * (width - len(s))] for s in sequences], device=device)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    rows = torch.tensor([row for row, s in enumerate(sequences) for _ in s.sampled], device=device)
    positions = torch.tensor([position for s in sequences for position in s.sampled], device=device)
    return head_scores(model, hidden[rows, positions - 1], ids[rows, positions], temperature)


def head_scores(model: Any, hidden: torch.Tensor, targets: torch.Tensor, temperature: float) -> TokenScores:
    """Log-probability of ``targets`` (N,) after hidden states (N, H), with logits divided by ``temperature``.

    The logits are made in tiles of rows; with more than one tile they are computed again in the backward pass, so
    that memory does not grow with the number of sampled tokens times the vocabulary.
    """
    head = model.get_output_embeddings()
    rows = max(1, HEAD_TILE // head.weight.shape[0])
    if len(targets) <= rows:
        return TokenScores(*_tile(head, hidden, targets, temperature))
    tiles = [
        checkpoint(_tile, head, hidden[at : at + rows], targets[at : at + rows], temperature, use_reentrant=False)
        for at in range(0, len(targets), rows)
    ]
    return TokenScores(torch.cat([tile[0] for tile in tiles]), torch.cat([tile[1] for tile in tiles]))


def _tile(
    head: Any, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = head(hidden).float() / temperature
    normaliser = torch.logsumexp(logits, dim=-1)
    logprobs = logits.gather(1, targets[:, None])[:, 0] - normaliser
    with torch.no_grad():
        entropies = normaliser - (torch.exp(logits - normaliser[:, None]) * logits).sum(-1)
    return logprobs, entropies.detach()


def install_core(model: Any, core: ForwardCore) -> None:
    """Make ``model(sequences=…, temperature=…)`` run ``core``.

    The call goes through the module's own forward, so that wrappers which hook it (distributed gradients, mixed
    precision) see it. All other calls reach the original forward.
    """
    original = model.forward

    def forward(self: Any, *args: Any, sequences: Any = None, temperature: float = 1.0, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if sequences is None else core(self, sequences, temperature)

    model.forward = types.MethodType(forward, model)


def score(model: Any, sequence: TokenSequence, temperature: float = 1.0) -> list[float]:
    """The model's own log-probabilities (nats) of a sequence's sampled tokens, in order. ``model`` as transformers
    loads it; compare with ``sequence.logprobs`` at ``sequence.sampled`` to see that server and trainer agree."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        scores = padded_scores(model, [sequence], temperature)
    model.train(was_training)
    return [float(value) for value in scores.logprobs]


def refuse_scaled_logits(config: Any, where: str) -> None:
    """ConfigError when a model scales its logits in a way that ``head_scores`` does not apply."""
    text = config.get_text_config()
    for name in _SCALED_LOGITS:
        if getattr(text, name, None) not in (None, 1, 1.0):
            raise ConfigError(f"{where}/config.json: {name}: the trainer does not apply it; choose a model without it")
