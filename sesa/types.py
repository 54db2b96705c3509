"""The central records. Everything imports this module; it imports nothing of ours.

Records are frozen pydantic models: their types are checked when they are built, so a target that arrives as a
one-element list is an error at the door instead of a comparison that never matches. Collections are tuples.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Record(BaseModel):
    """Base of all records: immutable, closed to unknown fields, serialisable with ``model_dump(mode="json")``."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


# ---------------------------------------------------------------------------------------------- roles and verdicts


class Role(StrEnum):
    """Who produced a rollout. Only PROPOSER and SOLVER are trained policies."""

    PROPOSER = "proposer"
    SOLVER = "solver"
    DISTILLER = "distiller"
    JUDGE = "judge"


class Verdict(StrEnum):
    """Outcome of a check or of a judge. UNKNOWN is an error of the checker: neither a pass nor a failure."""

    PASS = "pass"
    FAIL = "fail"
    UNKNOWN = "unknown"


class StopReason(StrEnum):
    """Why a rollout ended."""

    ANSWERED = "answered"
    ASKED = "asked"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    INVALID = "invalid"
    BACKEND_ERROR = "backend_error"
    CANCELLED = "cancelled"


# ------------------------------------------------------------------------------------------------------- retrieval


class Passage(Record):
    """One retrievable unit of the corpus. ``id`` is unique within a corpus."""

    id: str
    title: str
    text: str


class Hit(Record):
    """A passage as retrieved for one query. ``rank`` starts at 1; ``score`` is comparable within one retriever only."""

    passage: Passage
    score: float
    rank: int = Field(ge=1)
    retriever: str


class SeedAnswer(Record):
    """A target answer to pose a question about. ``passage_ids`` are corpus passages that contain it."""

    id: str
    answer: str = Field(min_length=1)
    aliases: tuple[str, ...] = ()
    type: Literal["entity", "date", "number"] = "entity"
    passage_ids: tuple[str, ...] = ()
    hops: int = Field(default=1, ge=1)


# ----------------------------------------------------------------------------------------------------- model calls


class Message(Record):
    """One chat message. ``content`` is plain text."""

    role: Literal["system", "user", "assistant"]
    content: str


class Usage(Record):
    """Token counts of one call, as the server reported them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class ModelCall(Record):
    """Exactly what one server call was given and returned; nothing is re-tokenised later.

    ``prompt_ids`` and ``token_ids`` are the server's own ids; ``logprobs[i]`` is the log-probability in nats of
    ``token_ids[i]`` under the sampling distribution. ``messages`` is the readable form of the prompt.
    """

    policy: str
    policy_version: int = Field(ge=0)
    messages: tuple[Message, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    text: str = ""
    finish_reason: str = "stop"
    usage: Usage = Usage()
    latency_s: float = 0.0

    @model_validator(mode="after")
    def _one_length(self) -> ModelCall:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.token_ids)} token ids but {len(self.logprobs)} log-probabilities")
        return self


class Search(Record):
    """The policy asked for passages."""

    kind: Literal["search"] = "search"
    query: str = Field(min_length=1)


class Answer(Record):
    """The solver committed to an answer."""

    kind: Literal["answer"] = "answer"
    text: str = Field(min_length=1)


class Ask(Record):
    """The proposer committed to a question."""

    kind: Literal["ask"] = "ask"
    question: str = Field(min_length=1)


class Invalid(Record):
    """The sampled text held no usable action; ``reason`` is shown to the policy as a correction."""

    kind: Literal["invalid"] = "invalid"
    reason: str


Action = Annotated[Search | Answer | Ask | Invalid, Field(discriminator="kind")]


class Turn(Record):
    """One assistant turn: the call, the action read from its sampled text, and what came back to the policy.

    ``observation`` is the exact text put in front of the next turn (passages or a correction); empty on the last.
    """

    call: ModelCall
    action: Action
    hits: tuple[Hit, ...] = ()
    observation: str = ""


# -------------------------------------------------------------------------------------------------------- rollouts


class Reward(Record):
    """A named part of a rollout's return."""

    name: str
    value: float
    weight: float = 1.0


class LoadedSkill(Record):
    """A skill considered for a rollout; ``loaded`` says whether it was put in front of the prompt."""

    id: str
    similarity: float
    loaded: bool = True


class Rollout(Record):
    """One trajectory of one policy. Failures are data: ``error`` is set when ``stop_reason`` is BACKEND_ERROR."""

    id: str
    role: Role
    question_id: str
    step: int = 0
    sample: int = 0
    turns: tuple[Turn, ...] = ()
    stop_reason: StopReason
    rewards: tuple[Reward, ...] = ()
    bank_version: int | None = None
    skills: tuple[LoadedSkill, ...] = ()
    error: str | None = None

    @property
    def value(self) -> float:
        """The rollout's return: the weighted sum of its reward parts."""
        return sum(r.value * r.weight for r in self.rewards)

    @property
    def finished(self) -> bool:
        """False for rollouts lost to a backend or a cancellation; those enter no statistic of the policy."""
        return self.stop_reason not in (StopReason.BACKEND_ERROR, StopReason.CANCELLED)

    @property
    def answer(self) -> str | None:
        """The last answer given, or None."""
        answers = [t.action.text for t in self.turns if isinstance(t.action, Answer)]
        return answers[-1] if answers else None

    @property
    def searches(self) -> tuple[str, ...]:
        """The queries, in order."""
        return tuple(t.action.query for t in self.turns if isinstance(t.action, Search))

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """Distinct policy versions that produced the turns; more than one means: not trained on."""
        return tuple(sorted({t.call.policy_version for t in self.turns}))

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens the policy sampled over all turns."""
        return sum(len(t.call.token_ids) for t in self.turns)

    def reward(self, name: str) -> float | None:
        """Unweighted value of the reward part ``name``, or None where it was not given."""
        return next((r.value for r in self.rewards if r.name == name), None)


class Check(Record):
    """One validity check of a proposed question and its verdict."""

    name: str
    verdict: Verdict
    reason: str = ""


class Question(Record):
    """A proposed question. ``checks`` says why it was accepted, refused or set aside."""

    id: str
    text: str
    target: str = Field(min_length=1)
    aliases: tuple[str, ...] = ()
    seed: SeedAnswer
    evidence: tuple[Passage, ...] = ()
    checks: tuple[Check, ...] = ()
    proposal_id: str | None = None
    step: int = 0

    @property
    def status(self) -> Verdict:
        """PASS when every check passed; else the verdict of the first check that did not. No checks: UNKNOWN."""
        if not self.checks:
            return Verdict.UNKNOWN
        return next((c.verdict for c in self.checks if c.verdict is not Verdict.PASS), Verdict.PASS)

    @property
    def refused_by(self) -> str | None:
        """Name of the check that refused or set aside the question, None when it is valid."""
        return next((c.name for c in self.checks if c.verdict is not Verdict.PASS), None)

    @property
    def golds(self) -> tuple[str, ...]:
        """Target and aliases."""
        return (self.target, *self.aliases)


class Group(Record):
    """The solver's attempts at one question."""

    question: Question
    rollouts: tuple[Rollout, ...]

    @property
    def finished(self) -> tuple[Rollout, ...]:
        return tuple(r for r in self.rollouts if r.finished)

    @property
    def success_rate(self) -> float | None:
        """Share of finished rollouts whose "correct" reward is 1; None with fewer than two finished rollouts.

        Rollouts lost to backend errors do not enter (arXiv 2607.29468).
        """
        done = self.finished
        return sum(r.reward("correct") == 1.0 for r in done) / len(done) if len(done) >= 2 else None


# ------------------------------------------------------------------------------------------------ failures, skills


class FailureStatus(StrEnum):
    PENDING = "pending"
    CONSOLIDATED = "consolidated"
    DROPPED = "dropped"


class Failure(Record):
    """A frontier failure waiting to be distilled; ``id`` is the id of the failed rollout."""

    id: str
    question_id: str
    question: str
    target: str
    aliases: tuple[str, ...] = ()
    evidence: tuple[Passage, ...] = ()
    prediction: str | None
    skills: tuple[str, ...] = ()
    stop_reason: StopReason
    cause: str = "other"
    step: int = 0
    status: FailureStatus = FailureStatus.PENDING


class SkillStatus(StrEnum):
    ACTIVE = "active"
    RETIRED = "retired"
    EVICTED = "evicted"
    REFUSED = "refused"


class SkillSource(StrEnum):
    SEED = "seed"
    MINED = "mined"
    DISTILLED = "distilled"
    HUMAN = "human"
    IMPORTED = "imported"


class Counters(Record):
    """How often a skill was loaded, and into how many correct (helpful) and substantively wrong (hurt) rollouts."""

    retrieved: int = 0
    helpful: int = 0
    hurt: int = 0

    @property
    def score(self) -> int:
        return self.helpful - self.hurt


class Skill(Record):
    """A procedure the solver may read: when it applies (``trigger``), what to do, what to avoid, what to search."""

    id: str
    description: str = Field(min_length=1)
    trigger: str = Field(min_length=1)
    avoidance: str = ""
    query_template: str = ""
    source: SkillSource = SkillSource.DISTILLED
    status: SkillStatus = SkillStatus.ACTIVE
    counters: Counters = Counters()
    provenance: tuple[str, ...] = ()
    created_step: int = 0

    @property
    def text(self) -> str:
        """What is embedded for retrieval and compared for admission."""
        return f"{self.trigger} {self.description}"


class SkillEventKind(StrEnum):
    CREATED = "created"
    ADMITTED = "admitted"
    REFUSED = "refused"
    CREDITED = "credited"
    RETIRED = "retired"
    EVICTED = "evicted"
    RESTORED = "restored"
    EDITED = "edited"
    ROLLED_BACK = "rolled_back"


class SkillEvent(Record):
    """One change of the bank. ``version`` is the bank version that first contains it; ``detail`` its numbers."""

    version: int = Field(ge=0)
    kind: SkillEventKind
    skill_id: str
    reason: str
    step: int = 0
    detail: dict[str, Any] = {}


# ------------------------------------------------------------------------------------------------------- training


class PolicyVersion(Record):
    """One set of weights of a policy. Version 0 is the model the run started from."""

    policy: str
    version: int = Field(ge=0)
    path: str
    step: int = 0
    sha256: str = ""
    published: bool = False


class TrainStats(Record):
    """What one update of one policy did.

    ``dropped`` counts what was left out, by reason: groups under "zero_variance" and "too_few_rollouts", rollouts under
    every other. ``grad_norm`` is the one before clipping; ``ratio_*`` compare the trainer's with the sampler's
    probabilities of the trained tokens before the step.
    """

    policy: str
    step: int
    version: int
    loss: float | None = None
    grad_norm: float | None = None
    sequences: int = 0
    trained_tokens: int = 0
    sampled_tokens: int = 0
    ratio_mean: float | None = None
    ratio_max: float | None = None
    groups: int = 0
    dropped: dict[str, int] = {}
    seconds: float = 0.0


class TrainedRow(Record):
    """Token account of one rollout in an update: what was sampled, what was trained on, or why it was left out.

    ``trained_tokens == sampled_tokens`` unless ``dropped`` names a reason; ``advantage`` is None where dropped.
    ``version`` is the policy version the update produced.
    """

    rollout_id: str
    policy: str
    version: int = Field(ge=0)
    step: int = 0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    sequences: int = 0
    advantage: float | None = None
    dropped: str | None = None
