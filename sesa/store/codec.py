"""Records to rows and back, exactly. Pure functions; no database here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from sesa.errors import StoreError
from sesa.types import (
    Action,
    Answer,
    Ask,
    Failure,
    Hit,
    Message,
    ModelCall,
    Passage,
    Question,
    Rollout,
    Search,
    Turn,
    Usage,
)

Row = Mapping[str, Any]

_ACTION: TypeAdapter[Search | Answer | Ask | Any] = TypeAdapter(Action)


def dumps(value: Any) -> str:
    """JSON in which every float comes back exactly, NaN and infinities included."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def passage_key(passage: Passage) -> str:
    """Digest under which a passage is stored once per run."""
    return hashlib.sha256(dumps([passage.id, passage.title, passage.text]).encode()).hexdigest()[:32]


def passage_rows(run_id: str, passages: Iterable[Passage]) -> list[dict[str, Any]]:
    rows = {passage_key(p): p for p in passages}
    return [{"run_id": run_id, "key": key, **p.model_dump()} for key, p in rows.items()]


# ----------------------------------------------------------------------------------------------------------- rollouts


def rollout_row(run_id: str, rollout: Rollout) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "id": rollout.id,
        "step": rollout.step,
        "role": rollout.role.value,
        "question_id": rollout.question_id,
        "sample": rollout.sample,
        "stop_reason": rollout.stop_reason.value,
        "value": rollout.value if rollout.rewards else None,
        "turns": len(rollout.turns),
        "searches": len(rollout.searches),
        "sampled_tokens": rollout.sampled_tokens,
        "answer": rollout.answer,
        "bank_version": rollout.bank_version,
        "error": rollout.error,
    }


def reward_rows(run_id: str, rollout: Rollout) -> list[dict[str, Any]]:
    names = [r.name for r in rollout.rewards]
    if len(set(names)) != len(names):
        raise StoreError(f"rollout {rollout.id}: two rewards have one name ({', '.join(names)}); give each its own")
    return [
        {"run_id": run_id, "rollout_id": rollout.id, "position": i, **reward.model_dump()}
        for i, reward in enumerate(rollout.rewards)
    ]


def skill_rows(run_id: str, rollout: Rollout) -> list[dict[str, Any]]:
    return [
        {
            "run_id": run_id,
            "rollout_id": rollout.id,
            "position": i,
            "skill_id": skill.id,
            "similarity": skill.similarity,
            "loaded": skill.loaded,
        }
        for i, skill in enumerate(rollout.skills)
    ]


def turn_rows(run_id: str, rollout: Rollout) -> list[dict[str, Any]]:
    """The turns of a rollout, each prompt as what it adds to the turn before (see ``schema.turns``)."""
    rows = []
    context = np.empty(0, "<i4")
    messages: Sequence[Message] = ()
    for position, turn in enumerate(rollout.turns):
        call = turn.call
        try:
            prompt, reply = np.asarray(call.prompt_ids, "<i4"), np.asarray(call.token_ids, "<i4")
        except OverflowError:
            raise StoreError(f"rollout {rollout.id}, turn {position}: a token id does not fit 32 bits") from None
        shared = _common(context, prompt)
        kept = next(
            (i for i, (old, new) in enumerate(zip(messages, call.messages, strict=False)) if old != new),
            min(len(messages), len(call.messages)),
        )
        rows.append(
            {
                "run_id": run_id,
                "rollout_id": rollout.id,
                "position": position,
                "policy": call.policy,
                "policy_version": call.policy_version,
                "text": call.text,
                "action_kind": turn.action.kind,
                "action": dumps(turn.action.model_dump()),
                "observation": turn.observation,
                "hits": dumps([[passage_key(h.passage), h.score, h.rank, h.retriever] for h in turn.hits]),
                "finish_reason": call.finish_reason,
                "prompt_tokens": call.usage.prompt_tokens,
                "completion_tokens": call.usage.completion_tokens,
                "latency_s": call.latency_s,
                "token_ids": reply.tobytes(),
                "logprobs": np.asarray(call.logprobs, "<f8").tobytes(),
                "prompt_shared": shared,
                "prompt_ids": prompt[shared:].tobytes(),
                "messages_shared": kept,
                "messages": dumps([[m.role, m.content] for m in call.messages[kept:]]),
            }
        )
        context, messages = np.concatenate([prompt, reply]), call.messages
    return rows


def turns_of(rows: Iterable[Row], passages: Mapping[str, Passage]) -> tuple[Turn, ...]:
    """The inverse of ``turn_rows``; ``rows`` in order of position, ``passages`` by key."""
    turns = []
    context: list[int] = []
    messages: tuple[Message, ...] = ()
    for row in rows:
        prompt = context[: row["prompt_shared"]] + np.frombuffer(row["prompt_ids"], "<i4").tolist()
        reply = np.frombuffer(row["token_ids"], "<i4").tolist()
        added = tuple(Message(role=role, content=content) for role, content in json.loads(row["messages"]))
        messages = messages[: row["messages_shared"]] + added
        call = ModelCall(
            policy=row["policy"],
            policy_version=row["policy_version"],
            messages=messages,
            prompt_ids=tuple(prompt),
            token_ids=tuple(reply),
            logprobs=tuple(np.frombuffer(row["logprobs"], "<f8").tolist()),
            text=row["text"],
            finish_reason=row["finish_reason"],
            usage=Usage(prompt_tokens=row["prompt_tokens"], completion_tokens=row["completion_tokens"]),
            latency_s=row["latency_s"],
        )
        hits = tuple(
            Hit(passage=passages[key], score=score, rank=rank, retriever=retriever)
            for key, score, rank, retriever in json.loads(row["hits"])
        )
        action = _ACTION.validate_python(json.loads(row["action"]))
        turns.append(Turn(call=call, action=action, hits=hits, observation=row["observation"]))
        context = prompt + reply
    return tuple(turns)


def hit_keys(rows: Iterable[Row]) -> set[str]:
    """Keys of the passages that turn rows refer to."""
    return {hit[0] for row in rows for hit in json.loads(row["hits"])}


def _common(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> int:
    """Length of the common prefix of two arrays."""
    size = min(len(left), len(right))
    differing = np.flatnonzero(left[:size] != right[:size])
    return int(differing[0]) if len(differing) else size


# ---------------------------------------------------------------------------------------------- questions, failures


def question_row(run_id: str, question: Question) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "id": question.id,
        "step": question.step,
        "status": question.status.value,
        "refused_by": question.refused_by,
        "text": question.text,
        "target": question.target,
        "proposal_id": question.proposal_id,
        "evidence": dumps([passage_key(p) for p in question.evidence]),
        "body": question.model_dump_json(exclude={"evidence"}),
    }


def question_of(row: Row, passages: Mapping[str, Passage]) -> Question:
    return Question.model_validate({**json.loads(row["body"]), "evidence": evidence_of(row, passages)})


def failure_row(run_id: str, failure: Failure, seq: int) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "id": failure.id,
        "seq": seq,
        "step": failure.step,
        "status": failure.status.value,
        "cause": failure.cause,
        "question_id": failure.question_id,
        "evidence": dumps([passage_key(p) for p in failure.evidence]),
        "body": failure.model_dump_json(exclude={"evidence", "status"}),
    }


def failure_of(row: Row, passages: Mapping[str, Passage]) -> Failure:
    body = json.loads(row["body"])
    return Failure.model_validate({**body, "status": row["status"], "evidence": evidence_of(row, passages)})


def evidence_of(row: Row, passages: Mapping[str, Passage]) -> tuple[Passage, ...]:
    return tuple(passages[key] for key in json.loads(row["evidence"]))


def evidence_keys(rows: Iterable[Row]) -> set[str]:
    return {key for row in rows for key in json.loads(row["evidence"])}
