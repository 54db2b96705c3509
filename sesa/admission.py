"""Which candidate skills may enter the bank: one named check each; the first that refuses ends the list.

A skill is a procedure, not a fact: it must not carry the answer, the entities or the wording of the failures it was
distilled from. Published is the similarity bound (SESA, arXiv 2607.29468); the other checks are ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sesa.config import BankSection
from sesa.leakage import leaked
from sesa.skill_index import DECIMALS, Encoder, embed
from sesa.skills import Bank
from sesa.text import longest_shared_run, words
from sesa.types import Failure, Skill, SkillStatus

MAX_WORDS = {"description": 60, "trigger": 40, "avoidance": 40, "query_template": 20}
COPIED_WORDS = 8

# Mark-up that chat templates and the agents' own action formats give a meaning to.
_TAG_NAMES = (
    "search|answer|question|information|observation|documents?|passages?|think|tool_call|tool_response|tools?|"
    "system|user|assistant|bos|eos|s|pad|unk|start_of_turn|end_of_turn"
)
_TEMPLATE_TOKENS = re.compile(rf"<\|[^|<>]*\|>|</?(?:{_TAG_NAMES})\s*>|\[/?INST\]|<</?SYS>>|\x00", re.IGNORECASE)
_TAKEOVER = re.compile(
    r"\b(?:ignore|disregard|forget|override)\b[^.]{0,40}\b(?:instructions?|prompts?|rules?|guidance|above|previous)\b"
    r"|\byou are now\b|\bsystem prompt\b",
    re.IGNORECASE,
)

# Answers that every procedure may mention, and words that open a question without naming anything.
_CLOSED_WORDS = "yes no true false both none neither one first second a an the"
_OPENING_WORDS = (
    "who whom whose what which when where why how is are was were do does did has have had can could will would "
    "should in on at of for from to by with the a an and or if between among during after before name given besides "
    "i it he she they this that these those there"
)
_CLOSED = frozenset(_CLOSED_WORDS.split())
_OPENINGS = frozenset(_OPENING_WORDS.split())
_NAME = re.compile(r"[A-Z][\w'’.-]*(?:\s+(?:of|the|de|da|von|van|la|le)(?=\s+[A-Z])|\s+[A-Z][\w'’.-]*)*")
_QUOTED = re.compile(r"[\"“«]([^\"”»]{2,80})[\"”»]")
_YEAR = re.compile(r"\b1\d{3}\b|\b20\d{2}\b")


@dataclass(frozen=True)
class Refusal:
    """Why a candidate may not enter: the check that refused it, a sentence, and its numbers."""

    check: str
    reason: str
    detail: dict[str, Any] = field(default_factory=dict)


class Admission:
    """Judges the candidates of one batch in turn, each against the active bank and those admitted before it."""

    def __init__(self, bank: Bank, failures: Mapping[str, Failure], config: BankSection, encoder: Encoder) -> None:
        self._bank = bank
        self._failures = failures
        self._config = config
        self._encoder = encoder
        self._against: list[Skill] = list(bank.active)
        self._vectors = bank.index(encoder).vectors

    def judge(self, candidate: Skill) -> Refusal | None:
        """None where the candidate is admitted (it then counts for the next ones), else the first refusal."""
        sources = [self._failures[key] for key in candidate.provenance if key in self._failures]
        checks: list[Callable[[], Refusal | None]] = [
            lambda: known(candidate, self._bank),
            lambda: well_sized(candidate),
            lambda: no_template_tokens(candidate),
            lambda: sourced(candidate, self._failures),
            lambda: no_answer(candidate, sources),
            lambda: no_entity(candidate, sources),
            lambda: no_copy(candidate, sources, self._bank),
            lambda: self._dissimilar(candidate),
        ]
        for check in checks:
            refusal = check()
            if refusal is not None:
                return refusal
        self._against.append(candidate)
        vector = embed([candidate.text], self._encoder)
        self._vectors = vector if not len(self._vectors) else np.vstack([self._vectors, vector])
        return None

    def drop(self, retired: set[str]) -> None:
        """Leave skills that this commit retires out of the comparison: a better wording may take their place."""
        keep = [i for i, skill in enumerate(self._against) if skill.id not in retired]
        self._against = [self._against[i] for i in keep]
        self._vectors = self._vectors[keep]

    def _dissimilar(self, candidate: Skill) -> Refusal | None:
        """Cosine similarity to every active skill, and to those admitted in this batch, at most ``admit_below``."""
        if not self._against:
            return None
        similarities = np.round(self._vectors @ embed([candidate.text], self._encoder)[0], DECIMALS)
        nearest = min(range(len(self._against)), key=lambda i: (-similarities[i], self._against[i].id))
        similarity, other = float(similarities[nearest]), self._against[nearest].id
        if similarity <= self._config.admit_below:
            return None
        return Refusal(
            "similarity",
            f"similarity {similarity:.3f} to {other}; at most {self._config.admit_below} is allowed",
            {"similarity": similarity, "limit": self._config.admit_below, "nearest": other},
        )


def known(candidate: Skill, bank: Bank) -> Refusal | None:
    """The same text is not in the bank already; one that was retired or evicted comes back by a restore only."""
    other = bank.skills.get(candidate.id)
    if other is None or other.status is SkillStatus.REFUSED:
        return None
    return Refusal("known", f"the same skill is in the bank, {other.status}", {"status": str(other.status)})


def well_sized(candidate: Skill) -> Refusal | None:
    """Each part is short enough for a prompt, and trigger and description say something."""
    for name, limit in MAX_WORDS.items():
        count = len(getattr(candidate, name).split())
        if count > limit:
            return Refusal("schema", f"{name} has {count} words; at most {limit} are allowed", {name: count})
    for name in ("trigger", "description"):
        count = len(words(getattr(candidate, name)))
        if count < 3:
            return Refusal("schema", f"{name} has {count} words; at least 3 are needed", {name: count})
    return None


def no_template_tokens(candidate: Skill) -> Refusal | None:
    """No mark-up of chat templates or of actions, and no instruction to set the prompt aside."""
    for pattern, what in ((_TEMPLATE_TOKENS, "template_tokens"), (_TAKEOVER, "instruction")):
        found = pattern.search(_whole(candidate))
        if found:
            return Refusal(what, f"it contains {found.group()!r}", {"found": found.group()})
    return None


def sourced(candidate: Skill, failures: Mapping[str, Failure]) -> Refusal | None:
    """It names the failures it was distilled from, and they are at hand: without them nothing can be checked."""
    missing = [key for key in candidate.provenance if key not in failures]
    if candidate.provenance and not missing:
        return None
    told = f"its source {missing[0]} is not at hand" if missing else "it names no source"
    return Refusal("source", told, {"missing": missing})


def no_answer(candidate: Skill, sources: Sequence[Failure]) -> Refusal | None:
    """No target answer or alias of its sources, nor the wrong answer that was given where it is a name or number."""
    for failure in sources:
        given = failure.prediction or ""
        wrong = (given,) if re.search(r"[A-Z\d]", given) else ()
        golds = [g for g in (failure.target, *failure.aliases, *wrong) if not set(words(g)) <= _CLOSED]
        found = leaked(_whole(candidate), golds)
        if found is not None:
            return Refusal("answer", f"it contains the answer {found!r}", {"found": found, "failure": failure.id})
    return None


def no_entity(candidate: Skill, sources: Sequence[Failure]) -> Refusal | None:
    """No name, quoted title or year of the questions it was distilled from."""
    text = _whole(candidate)
    capitalised = set(re.findall(r"(?<=[\w,;:)] )[A-Z][\w'’-]{2,}", text))  # within a sentence, so a name
    for failure in sources:
        names = entities(failure)
        parts = {part for name in names for part in re.findall(r"[A-Z][\w'’-]{2,}", name)}
        found = leaked(text, names) or next(iter(sorted(capitalised & parts)), None)
        if found is not None:
            return Refusal("entity", f"it names {found!r} of its source", {"found": found, "failure": failure.id})
    return None


def no_copy(candidate: Skill, sources: Sequence[Failure], bank: Bank) -> Refusal | None:
    """No run of 8 or more words copied from the question, its evidence, or the skills that were loaded."""
    for failure in sources:
        origins = [("question", failure.question)]
        origins += [(passage.id, f"{passage.title} {passage.text}") for passage in failure.evidence]
        for key in failure.skills:
            if key in bank.skills:
                origins += [(key, getattr(bank.skills[key], part)) for part in MAX_WORDS]
        for origin, source in origins:
            run = max(longest_shared_run(getattr(candidate, part), source, COPIED_WORDS) for part in MAX_WORDS)
            if run:
                return Refusal("copy", f"{run} words in a row come from {origin}", {"words": run, "from": origin})
    return None


def entities(failure: Failure) -> list[str]:
    """What a failure's question names: capitalised runs, quoted titles, years, and evidence titles it mentions.

    The titles serve questions in lower case, which have no capitals to go by.
    """
    question = failure.question
    found = [m.group(1) for m in _QUOTED.finditer(question)] + _YEAR.findall(question)
    lower = set(re.findall(r"[a-z][\w'’-]*", " ".join(passage.text for passage in failure.evidence)))
    for match in _NAME.finditer(question):
        for name in re.split(r"(?<=[a-z]{3})\.\s+", match.group()):  # "Peggy. What" runs over the end of a sentence
            while name and re.split(r"[ '’]", name)[0].casefold() in _OPENINGS:
                name = name.partition(" ")[2]
            # "Film" that opens a question and "Year" in a title are no names where the evidence writes them small.
            if name and name.casefold() not in lower:
                found.append(name.rstrip(".-'’"))
    titles = [re.sub(r"\s*\([^)]*\)$", "", passage.title) for passage in failure.evidence]
    found += [title for title in titles if words(title) and leaked(question, [title])]
    return [name for name in dict.fromkeys(found) if not set(words(name)) <= _OPENINGS | _CLOSED]


def _whole(skill: Skill) -> str:
    return " . ".join(getattr(skill, part) for part in MAX_WORDS)
