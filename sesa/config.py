"""The one configuration of a run: defaults < TOML file (with ``extends``) < command line.

Environment variables never change it; they hold secrets only, and a section names the variable it reads
(``api_key_env``). Unknown keys are refused with the nearest known name.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sesa.errors import ConfigError

MAX_EXTENDS = 20


class Section(BaseModel):
    # Strict: ``true`` is no number and "5" no count; a value of another type is a slip, not a way to write it.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RunSection(Section):
    steps: int = Field(1, ge=1, description="self-play steps to run")
    seed: int = Field(0, ge=0, description="seed of every random choice and of every sampled call")
    root: str = Field("runs", description="folder that holds the store, the checkpoints and the server logs")
    store: str = Field("", description="SQLAlchemy URL of the store; empty: SQLite file in the root folder")
    concurrency: int = Field(16, ge=1, description="rollouts in flight at once")


class ModelSection(Section):
    path: str = Field("embedded", description='"embedded", or a folder with safetensors and a tokenizer')
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="data type of serving and training")
    max_model_len: int = Field(4096, ge=256, description="longest prompt plus reply, in tokens")


class ServingSection(Section):
    layout: Literal["full", "lora"] = Field("full", description="a server per policy, or one server with adapters")
    attach: dict[str, str] = Field({}, description="base URL per policy of servers that already run; empty: start them")
    host: str = Field("127.0.0.1", description="address the started servers bind to")
    port: int = Field(0, ge=0, le=65535, description="first port; 0: any free one")
    ready_timeout_s: float = Field(300.0, gt=0, description="longest wait for a server to become ready")
    request_timeout_s: float = Field(300.0, gt=0, description="longest wait for one reply")
    retries: int = Field(2, ge=0, description="further tries of a call that failed in transit")
    restarts: int = Field(2, ge=0, description="restarts of a server that died, per run")
    kv_cache_gib: float = Field(1.0, gt=0, description="key-value cache per server on a CPU, in GiB")
    device: Literal["cpu", "gpu"] = Field("cpu", description="kind of machine the servers run on")
    gpu_memory_utilization: float = Field(0.4, gt=0, le=1, description="share of the GPU one server takes")
    extra_args: tuple[str, ...] = Field((), strict=False, description="further arguments for vLLM, as they are")


class CorpusSection(Section):
    path: str = Field("embedded", description='"embedded", a JSONL file of passages, or a Wikipedia XML dump')
    seeds: str = Field("", description="JSONL of seed answers; empty: extracted from the corpus")
    seed_pattern: str = Field("", description="regular expression that a seed answer must match as a whole; empty: all")
    skip_bad: bool = Field(False, description="skip unusable rows instead of stopping")
    cache: str = Field("", description="folder of indexes and converted models; empty: ~/.cache/sesa")


class RetrievalSection(Section):
    kind: Literal["bm25", "dense", "hybrid", "http"] = Field("dense", description="how passages are found")
    encoder: str = Field("embedded", description='"embedded" (all-MiniLM-L6-v2) or a sentence-transformers folder')
    url: str = Field("", description='address of a /retrieve server, for kind = "http"')
    top_k: int = Field(3, ge=1, description="passages per search")
    passage_words: int = Field(90, ge=10, description="words of a passage shown to a policy")
    timeout_s: float = Field(30.0, gt=0, description="longest wait for one search")


class SamplingSection(Section):
    temperature: float = Field(1.0, ge=0, description="sampling temperature; 0: greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="share of the probability sampled from; 1 where it is trained on")
    max_tokens: int = Field(512, ge=1, description="longest reply of one turn, in tokens")


class ProposerSection(Section):
    seeds: int = Field(4, ge=1, description="seed answers per step")
    proposals: int = Field(4, ge=1, description="proposals per seed answer")
    max_turns: int = Field(10, ge=1, description="assistant turns of a proposal")
    prompt: str = Field("proposer", description="name of the prompt file")
    sampling: SamplingSection = SamplingSection()


class SolverSection(Section):
    rollouts: int = Field(5, ge=1, description="solver rollouts per question")
    max_turns: int = Field(10, ge=1, description="assistant turns of a rollout")
    prompt: str = Field("solver", description="name of the prompt file")
    sampling: SamplingSection = SamplingSection()
    questions: int = Field(0, ge=0, description="most questions solved per step; 0: every valid one")


class ValiditySection(Section):
    min_chars: int = Field(10, ge=0, description="fewest characters of a question")
    max_chars: int = Field(1000, ge=1, description="most characters of a question")
    min_words: int = Field(11, ge=0, description="fewest words of a question")
    min_searches: int = Field(1, ge=0, description="fewest searches of a proposal")
    target_in_query: bool = Field(True, description="whether a query may contain the target answer")
    evidence_check: bool = Field(True, description="answer the question from its evidence, without searching")
    evidence_tries: int = Field(
        1, ge=1, description="answers read from the evidence, the first greedily; one must match. More for weak readers"
    )
    distractors: int = Field(4, ge=0, description="passages of other questions mixed into the evidence")


class RewardSection(Section):
    low: float = Field(0.0, ge=0, description="l of the frontier reward 4 (l + p)(h - p)")
    high: float = Field(1.0, gt=0, le=1, description="h of the frontier reward")
    penalty: float = Field(1.0, ge=0, description="lambda: subtracted where every or no rollout is right")
    invalid_penalty: float = Field(0.1, ge=0, description="subtracted for an invalid proposal")
    f1_weight: float = Field(0.0, ge=0, le=1, description="weight of F1 beside exact match in the solver's return")
    format_weight: float = Field(0.0, ge=0, le=1, description="weight of a well-formed trajectory")


class BankSection(Section):
    enabled: bool = Field(True, description="whether the solver reads skills")
    top_k: int = Field(3, ge=0, description="skills loaded per question")
    min_similarity: float = Field(0.25, ge=-1, le=1, description="cosine similarity below which no skill is loaded")
    admit_below: float = Field(0.93, ge=-1, le=1, description="largest cosine similarity of a new skill to the bank")
    max_active: int = Field(800, ge=1, description="active skills above which the lowest-scoring one is evicted")
    retire_after: int = Field(
        3, ge=1, description="loads after which helpful - hurt < 0 retires a skill; seed skills stay"
    )
    seed_skills: bool = Field(True, description="start with the hand-written seed skills")


class DistillerSection(Section):
    every: int = Field(10, ge=1, description="steps between consolidations")
    min_pending: int = Field(20, ge=1, description="pending failures a consolidation needs")
    max_chosen: int = Field(30, ge=1, description="most failures of one consolidation")
    queue: int = Field(300, ge=1, description="most pending failures; the oldest is dropped first")
    retries: int = Field(2, ge=0, description="further tries after malformed output")
    failures_per_call: int = Field(1, ge=1, description="failures put in front of the distiller at once")
    endpoint: str = Field(
        "policy", description='"policy" (the solver\'s server, with the weights of now) or a LiteLLM model name'
    )
    api_base: str = Field("", description="base URL of an OpenAI-compatible endpoint")
    api_key_env: str = Field("", description="environment variable that holds the key")
    sampling: SamplingSection = SamplingSection(temperature=0.7, max_tokens=384)


class JudgeSection(Section):
    enabled: bool = Field(False, description="ask a judge where exact match says no")
    endpoint: str = Field("", description="LiteLLM model name")
    api_base: str = Field("", description="base URL of an OpenAI-compatible endpoint")
    api_key_env: str = Field("", description="environment variable that holds the key")


class TrainingSection(Section):
    enabled: bool = Field(True, description="update the policies; off: rollouts and skills only")
    learning_rate: float = Field(1e-6, gt=0, description="of AdamW, after the warm-up")
    warmup_steps: int = Field(0, ge=0, description="updates over which the learning rate rises linearly")
    weight_decay: float = Field(0.0, ge=0, description="of AdamW")
    max_grad_norm: float = Field(1.0, gt=0, description="norm to which a larger gradient is clipped")
    epsilon: float = Field(0.2, gt=0, description="lower clip range of the ratio")
    epsilon_high: float = Field(0.285, gt=0, description="upper clip range of the ratio")
    beta: float = Field(0.0, ge=0, description="weight of the KL to the first weights; 0: no reference model")
    loss_type: Literal["grpo", "dr_grpo", "bnpo", "dapo"] = Field("dapo", description="loss reduction, named as in TRL")
    scale_rewards: Literal["group", "batch", "none"] = Field("group", description="how advantages are scaled")
    micro_batch: int = Field(4, ge=1, description="sequences per forward pass")
    gradient_checkpointing: bool = Field(False, description="compute activations twice to save memory")
    keep_versions: int = Field(3, ge=1, description="newest versions kept on disk, per policy")


class RunConfig(Section):
    """Everything that determines a run. Stored with the run, printed by ``--dry-run``."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    serving: ServingSection = ServingSection()
    corpus: CorpusSection = CorpusSection()
    retrieval: RetrievalSection = RetrievalSection()
    proposer: ProposerSection = ProposerSection()
    solver: SolverSection = SolverSection()
    validity: ValiditySection = ValiditySection()
    reward: RewardSection = RewardSection()
    bank: BankSection = BankSection()
    distiller: DistillerSection = DistillerSection()
    judge: JudgeSection = JudgeSection()
    training: TrainingSection = TrainingSection()

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        if self.retrieval.kind == "http" and not self.retrieval.url:
            raise ValueError('retrieval.url must be set for retrieval.kind = "http"')
        if self.reward.low >= self.reward.high:
            raise ValueError("reward.low must be below reward.high")
        if self.serving.layout == "lora" and self.training.enabled:
            raise ValueError(
                'training.enabled: training writes whole weights; set it false for serving.layout = "lora"'
            )
        if unknown := set(self.serving.attach) - {"proposer", "solver"}:
            raise ValueError(f"serving.attach: {unknown.pop()}: no such policy; there are proposer and solver")
        for name, section in (("proposer", self.proposer), ("solver", self.solver), ("distiller", self.distiller)):
            if section.sampling.max_tokens >= self.model.max_model_len:
                raise ValueError(f"{name}.sampling.max_tokens must be below model.max_model_len")
        try:
            re.compile(self.corpus.seed_pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"corpus.seed_pattern: no regular expression: {error}") from None
        for key, path in (
            ("run.root", self.run.root),
            ("corpus.path", self.corpus.path),
            ("model.path", self.model.path),
        ):
            if "\0" in path:
                raise ValueError(f"{key}: a path cannot hold a null character")
        if self.judge.enabled:
            raise ValueError("judge.enabled: the judge does not take part in runs yet; leave it false")
        if self.validity.min_chars > self.validity.max_chars:
            raise ValueError("validity.min_chars must not exceed validity.max_chars")
        return self


def load_config(path: str | Path | None = None, overrides: dict[str, str] | None = None) -> RunConfig:
    """Read a configuration.

    ``overrides`` maps dotted keys to the text given on the command line ("solver.rollouts" -> "5").
    Raises ConfigError naming the key, where it was set, and the nearest known name or the values allowed.
    """
    layers = _read_toml(Path(path), ()) if path else []
    for key, text in (overrides or {}).items():
        layers.append(("command line", _nest(key, key.split("."), text)))
    data: dict[str, Any] = {}
    for origin, layer in layers:
        _refuse_unknown(layer, RunConfig, "", origin)
        data = _merge(data, layer)
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        if first["loc"]:
            key = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{_origin(layers, [key])}: {key}: {message}, got {first['input']!r}") from None
        # Keys that do not fit together: what was set last is the likelier slip.
        raise ConfigError(f"{_origin(layers, re.findall(r'[a-z_]+(?:[.][a-z_]+)+', message))}: {message}") from None


def stored_config(values: Mapping[str, Any], run_id: str) -> RunConfig:
    """The configuration stored with a run. Raises ConfigError where it does not fit this version of the program."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "configuration"
        raise ConfigError(
            f"run {run_id}: {key}: {first['msg']}; the run was started by another version of SESA: use that one"
        ) from None


def config_keys() -> list[tuple[str, str, Any]]:
    """All (dotted key, description, default), in order: the source of the README's table and of ``--help``."""
    return list(_leaves(RunConfig, ""))


def _leaves(model: type[BaseModel], prefix: str, values: BaseModel | None = None) -> Any:
    values = values if values is not None else model()
    for name, field in model.model_fields.items():
        value = getattr(values, name)
        if isinstance(value, BaseModel):
            yield from _leaves(type(value), f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", field.description or "", value


def _read_toml(path: Path, seen: tuple[Path, ...]) -> list[tuple[str, dict[str, Any]]]:
    """The file and those it extends as (file, what it sets), the one that has the last word at the end."""
    try:
        path = path.expanduser().resolve()
        if path in seen:
            raise ConfigError(f"{path}: extends itself, through {' -> '.join(p.name for p in (*seen, path))}")
        if len(seen) >= MAX_EXTENDS:
            raise ConfigError(f"{path}: is the end of {len(seen)} files that extend each other; put them into fewer")
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: is no regular file; name a TOML file")
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except ConfigError:
        raise
    except FileNotFoundError:
        asked = f" (asked for by {seen[-1]})" if seen else "; those shipped are in configs/"
        raise ConfigError(f"{path}: no such configuration file{asked}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except (ValueError, RuntimeError) as error:  # a number or a nesting beyond all bounds; ~nobody; a loop of links
        raise ConfigError(f"{path}: cannot be read: {str(error)[:200] or type(error).__name__}") from None
    parent = data.pop("extends", None)
    if parent is None:
        return [(str(path), data)]
    if not isinstance(parent, str):
        raise ConfigError(f"{path}: extends: must be the name of one file, got {parent!r}")
    return [*_read_toml(path.parent / parent, (*seen, path)), (str(path), data)]


def _origin(layers: Sequence[tuple[str, dict[str, Any]]], keys: Sequence[str]) -> str:
    """Where one of ``keys`` was set last."""
    return next((origin for origin, layer in reversed(layers) for key in keys if _sets(layer, key)), "defaults")


def _sets(layer: Any, key: str) -> bool:
    """Whether ``key``, or in place of its section something else, is set."""
    for part in key.split("."):
        if not isinstance(layer, dict):
            return True
        if part not in layer:
            return False
        layer = layer[part]
    return True


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _merge(out[key], value) if both else value
    return out


def _nest(key: str, parts: list[str], text: str) -> dict[str, Any]:
    return {parts[0]: _nest(key, parts[1:], text) if len(parts) > 1 else _literal(key, text)}


def _literal(key: str, text: str) -> Any:
    """A command-line value: TOML where it parses (5, true, ["a"]), else the text itself.

    Where the key takes a text, what parses as something else is a text too: ``--run.root 2026`` names a folder.
    """
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except (ValueError, RecursionError):  # no TOML, or a number or nesting beyond all bounds
        return text
    default = next((default for name, _, default in config_keys() if name == key), None)
    return text if isinstance(default, str) and not isinstance(value, str) else value


def _refuse_unknown(data: dict[str, Any], model: type[BaseModel], prefix: str, where: str) -> None:
    for key, value in data.items():
        field = model.model_fields.get(key)
        if field is None:
            raise ConfigError(f"{where}: {prefix}{key}: unknown key{_suggest(prefix + key)}")
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{where}: {prefix}{key}: is a section; set one of its keys, e.g. {_first_key(prefix + key)}"
                )
            _refuse_unknown(value, kind, f"{prefix}{key}.", where)


def _first_key(section: str) -> str:
    return next(key for key, _, _ in config_keys() if key.startswith(section + "."))


def _suggest(key: str) -> str:
    """The nearest known key: one of the same section, else one of that name in another, else what the section has."""
    known = [name for name, _, _ in config_keys()]
    section, _, last = key.rpartition(".")
    under = f"{section}." if section else ""
    siblings = sorted({name.removeprefix(under).partition(".")[0] for name in known if name.startswith(under)})
    near = [under + name for name in difflib.get_close_matches(last, siblings, n=1)]
    near = near or [name for name in known if name.rpartition(".")[2] == last]
    if near:
        return f"; did you mean {near[0]}?"
    return f"; {f'[{section}]' if section else 'a configuration'} has {', '.join(siblings)}"


def markdown_table() -> str:
    """Every key with its default, as docs/configuration.md shows them: ``python -m sesa.config`` prints it."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for key, text, default in config_keys():
        shown = toml_value(default).replace("|", "\\|")
        lines.append(f"| `{key}` | `{shown}` | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def toml_value(value: Any) -> str:
    """A configuration value as it is written in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return str(value)


if __name__ == "__main__":
    print(markdown_table())
