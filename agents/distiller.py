"""The distiller (failure summariser): whole failed trajectories in, candidate skills out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sesa import prompts
from sesa.agents.conversation import Conversation
from sesa.agents.search_agent import passage_line
from sesa.candidates import CANDIDATE_SCHEMA, parse_candidates
from sesa.config import SamplingSection
from sesa.errors import BadReplyError
from sesa.llm import ChatModel, Template
from sesa.types import Failure, Message, ModelCall, Rollout, Search, Skill

EVIDENCE_SHOWN = 3
"""Passages that the question was made from; more only lengthen the prompt."""


@dataclass(frozen=True)
class Distillation:
    """One reply of the distiller: its candidates, or the reason why it could not be read."""

    call: ModelCall
    candidates: tuple[Skill, ...]
    problem: str | None


async def distil(
    model: ChatModel,
    template: Template | None,
    failures: Sequence[Failure],
    rollouts: Sequence[Rollout],
    sampling: SamplingSection,
    *,
    step: int,
    seed: int,
    passage_words: int,
) -> Distillation:
    """Ask for candidates from ``failures`` and their trajectories (``rollouts``, in the same order).

    ``template`` is None for models that take messages rather than ids. Raises what the model raises; a reply that
    does not follow the schema is returned with its problem, for the caller to try again or to record.
    """
    cases = "\n\n".join(
        case_text(failure, rollout, passage_words) for failure, rollout in zip(failures, rollouts, strict=True)
    )
    messages: Sequence[Message] = prompts.load("distiller").messages(cases=cases)
    ids: Sequence[int] | None = None
    if template is not None:
        conversation = Conversation.start(template, messages)
        messages, ids = conversation.messages, conversation.prompt_ids
    call = await model.generate(messages, sampling=sampling, seed=seed, prompt_ids=ids, schema=CANDIDATE_SCHEMA)
    try:
        return Distillation(call, tuple(parse_candidates(call.text, failures, step)), None)
    except BadReplyError as error:
        return Distillation(call, (), str(error))


def case_text(failure: Failure, rollout: Rollout, passage_words: int) -> str:
    """One failure as the distiller sees it: the question, what was right and given, every search with its passages.

    What the loaded skills said is left out: a lesson must come from the trajectory, not from injected text.
    """
    lines = [
        "CASE",
        f"Question: {failure.question}",
        f"Right answer: {failure.target}",
        f"Given answer: {failure.prediction or 'none'}",
    ]
    fitting = f"{failure.question} {failure.target}"
    lines += [f"Evidence: {passage_line(p, passage_words, fitting)}" for p in failure.evidence[:EVIDENCE_SHOWN]]
    for turn in rollout.turns:
        if isinstance(turn.action, Search):
            lines.append(f"Search: {turn.action.query}")
            lines += [f"  [{h.rank}] {passage_line(h.passage, passage_words, turn.action.query)}" for h in turn.hits]
    return "\n".join(lines)
