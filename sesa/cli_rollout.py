"""`sesa rollouts show`: everything that is known about one rollout, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sesa.cli_output import cell, indented, number, one_line
from sesa.skills import Bank
from sesa.store import Store
from sesa.types import Answer, Ask, Invalid, Question, Role, Rollout, Search, Skill, TrainedRow, Turn


@dataclass(frozen=True)
class RolloutView:
    """A rollout with what belongs to it. ``question`` is the one answered, or the one that a proposal asked."""

    rollout: Rollout
    question: Question | None
    skills: Mapping[str, Skill]
    trained: TrainedRow | None
    readings: tuple[str, ...] = ()

    def as_json(self, *, tokens: bool) -> dict[str, Any]:
        """The record with its neighbours; without ``tokens`` the ids, log-probabilities and messages are left out."""
        body = self.rollout.model_dump(mode="json")
        if not tokens:
            for turn in body["turns"]:
                for name in ("messages", "prompt_ids", "token_ids", "logprobs"):
                    del turn["call"][name]
        for skill in body["skills"]:
            known = self.skills.get(skill["id"])
            skill["text"] = known.model_dump(mode="json") if known else None
        return {
            **body,
            "value": self.rollout.value if self.rollout.rewards else None,
            "answer": self.rollout.answer,
            "sampled_tokens": self.rollout.sampled_tokens,
            "question": _question_json(self.question),
            "evidence_readings": self.readings,
            "trained": self.trained.model_dump() if self.trained else None,
        }


def _question_json(question: Question | None) -> dict[str, Any] | None:
    if question is None:
        return None
    return {**question.model_dump(mode="json"), "status": str(question.status), "refused_by": question.refused_by}


def collect(store: Store, run_id: str, rollout_id: str) -> RolloutView:
    """Read a rollout and what belongs to it; a question's id stands for its proposal. Raises NotFoundError."""
    named = store.questions(run_id, ids=[rollout_id])
    if named and named[0].proposal_id:
        rollout_id = named[0].proposal_id
    rollout = store.rollout(run_id, rollout_id)
    asked = store.questions(run_id, proposal_id=rollout_id)
    found = asked or store.questions(run_id, ids=[rollout.question_id])
    version = rollout.bank_version
    return RolloutView(
        rollout=rollout,
        question=found[0] if found else None,
        skills=Bank.from_store(store, run_id, version).skills if version is not None else {},
        trained=next(iter(store.trained(run_id, rollout_id=rollout_id)), None),
        readings=_readings(store, run_id, asked[0].id) if asked else (),
    )


def _readings(store: Store, run_id: str, question_id: str) -> tuple[str, ...]:
    """The rollouts in which the evidence of a question was read."""
    return tuple(row.id for row in store.rollout_rows(run_id, role=Role.JUDGE, question_id=question_id))


def show(view: RolloutView, *, tokens: bool) -> None:
    """Print a rollout for reading."""
    rollout = view.rollout
    print(f"rollout {rollout.id}  {rollout.role}  step {rollout.step}  sample {rollout.sample}")
    print(f"stop    {rollout.stop_reason}" + (f"  {one_line(rollout.error)}" if rollout.error else ""))
    if view.question:
        _show_question(view.question, proposed=view.question.proposal_id == rollout.id, readings=view.readings)
    if rollout.bank_version is not None:
        _show_skills(view)
    for position, turn in enumerate(rollout.turns, 1):
        _show_turn(position, turn, tokens=tokens, given=rollout.role is Role.JUDGE)
    _show_rewards(rollout)
    print(f"\ntokens  {_token_account(view)}")


def _show_question(question: Question, *, proposed: bool, readings: Sequence[str]) -> None:
    print(f"\n{'proposed' if proposed else 'question'} {question.id}  {question.status}")
    print(f"  text    {cell(one_line(question.text) or None)}")
    print(f"  target  {' | '.join(one_line(gold) for gold in question.golds)}")
    if proposed:
        print("  checks")
        for check in question.checks:
            print(f"    {check.name:20} {check.verdict}  {one_line(check.reason)}".rstrip())
        for reading in readings:
            print(f"    the evidence as it was read: sesa rollouts show {reading}")


def _show_skills(view: RolloutView) -> None:
    print(f"\nskills  bank version {view.rollout.bank_version}")
    for loaded in view.rollout.skills:
        known = view.skills.get(loaded.id)
        text = one_line(f"{known.trigger} → {known.description}", 110) if known else "(its text is not in the store)"
        print(f"  {'loaded    ' if loaded.loaded else 'considered'}  {loaded.similarity:.3f}  {loaded.id}  {text}")
    if not view.rollout.skills:
        print("  none considered")


def _show_turn(position: int, turn: Turn, *, tokens: bool, given: bool) -> None:
    call = turn.call
    print(
        f"\nturn {position}  {call.policy} v{call.policy_version}  prompt {len(call.prompt_ids)} tokens  "
        f"sampled {len(call.token_ids)}  {call.finish_reason}  {call.latency_s:.2f} s"
    )
    # A reading has no observations: all it was given is its prompt.
    for message in call.messages if tokens else call.messages[-1:] if given else ():
        print(f"  {message.role}:")
        print(indented(message.content, 4))
    if tokens:
        print(f"  prompt ids  {' '.join(map(str, call.prompt_ids))}")
        print(f"  token ids   {' '.join(map(str, call.token_ids))}")
        print(f"  log-probs   {' '.join(f'{value:.6g}' for value in call.logprobs)}")
    print("  sampled:")
    print(indented(call.text, 4))
    print(f"  action: {_action(turn)}")
    for hit in turn.hits:
        passage = hit.passage
        print(f"    {hit.rank}. {hit.score:.3f} {hit.retriever}  {one_line(passage.title)}  [{one_line(passage.id)}]")
        if tokens:
            print(indented(one_line(passage.text), 7))
    if turn.observation:
        print("  what the policy was shown:")
        print(indented(turn.observation, 4))


def _action(turn: Turn) -> str:
    match turn.action:
        case Search(query=text):
            return f"search  {one_line(text)}"
        case Answer(text=text):
            return f"answer  {one_line(text)}"
        case Ask(question=text):
            return f"ask  {one_line(text)}"
        case Invalid(reason=text):
            return f"invalid  {one_line(text)}"


def _show_rewards(rollout: Rollout) -> None:
    if not rollout.rewards:
        print("\nreward  none given")
        return
    print(f"\nreward  {number(rollout.value)}")
    for part in rollout.rewards:
        print(f"  {part.name:12} {number(part.value)} × {number(part.weight)}")


def _token_account(view: RolloutView) -> str:
    sampled, row = view.rollout.sampled_tokens, view.trained
    if row is None:
        return f"sampled {sampled}  not part of any update"
    if row.dropped is not None:
        return f"sampled {sampled}  not trained on: {row.dropped}"
    sign = "=" if sampled == row.trained_tokens else "≠"
    advantage = "none" if row.advantage is None else f"{row.advantage:+.4f}"
    return (
        f"sampled {sampled} {sign} trained {row.trained_tokens}  in {row.sequences} sequence(s)  "
        f"advantage {advantage}  {row.policy} v{row.version}"
    )
