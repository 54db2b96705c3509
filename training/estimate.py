"""What a run will take, estimated from its configuration without starting anything."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from sesa.config import RunConfig
from sesa.embedded import tensor_shapes
from sesa.vllm_command import servers_to_start

# Per parameter in float32: weights, gradient, two moments of AdamW.
TRAINER_BYTES = 16
SERVER_OVERHEAD = 2 << 30
GIB = 1 << 30


@dataclass(frozen=True)
class Estimate:
    """Upper bounds for one step of the loop, and the memory and disk of the whole run. Sizes in bytes."""

    proposals: int
    questions: int
    attempts: int
    calls: int
    sampled_tokens: int
    prompt_tokens: int
    memory: int
    disk: int
    parameters: int | None


def estimate(config: RunConfig, model_dir: Path | None) -> Estimate:
    """Bounds, not forecasts: every proposal valid, every rollout as long as it may get.

    ``model_dir`` is None where the model has not been made yet; the embedded model's size is used then.
    """
    p, s, d = config.proposer, config.solver, config.distiller
    proposals = p.seeds * p.proposals
    questions = min(proposals, s.questions or proposals)
    attempts = questions * s.rollouts
    reader = proposals * config.validity.evidence_tries if config.validity.evidence_check else 0
    distilled = -(-d.max_chosen // d.failures_per_call) * (1 + d.retries) / d.every if config.bank.enabled else 0
    calls = proposals * p.max_turns + reader + attempts * s.max_turns + round(distilled)
    sampled = (
        proposals * p.max_turns * p.sampling.max_tokens
        + reader * 48
        + attempts * s.max_turns * s.sampling.max_tokens
        + round(distilled) * d.sampling.max_tokens
    )
    parameters = (
        count_parameters(model_dir) if model_dir else (134_515_008 if config.model.path == "embedded" else None)
    )
    served = (parameters or 0) * (4 if config.model.dtype == "float32" else 2)
    memory = servers_to_start(config) * (served + int(config.serving.kv_cache_gib * GIB) + SERVER_OVERHEAD)
    disk = 0
    if config.training.enabled:
        memory += (parameters or 0) * TRAINER_BYTES * 2
        # Weights and both moments of each kept version, of two policies, and one being written.
        disk += (parameters or 0) * 12 * 2 * (config.training.keep_versions + 1)
    per_token = 30  # id, log-probability and text of a token in the store; prompts compress far better
    disk += sampled * per_token * config.run.steps
    return Estimate(
        proposals, questions, attempts, calls, sampled, calls * config.model.max_model_len, memory, disk, parameters
    )


def count_parameters(model_dir: Path) -> int | None:
    """Number of weights in the safetensors files of a folder, from their headers alone; None where there are none.

    Raises ConfigError where one is damaged.
    """
    shards = sorted(model_dir.expanduser().glob("*.safetensors"))
    return sum(math.prod(shape) for shard in shards for shape in tensor_shapes(shard).values()) or None


def describe(found: Estimate, config: RunConfig) -> str:
    """The estimate as lines for people."""
    size = f"{found.parameters / 1e6:.0f} million parameters" if found.parameters else "model size unknown"
    more = "" if found.parameters else f" and what the model itself takes: no safetensors in {config.model.path}"
    return "\n".join(
        [
            f"estimate for {config.run.steps} step(s), as upper bounds ({size}):",
            f"  per step: {found.proposals} proposals, up to {found.questions} questions and {found.attempts} attempts",
            f"  per step: up to {found.calls:,} model calls, {found.sampled_tokens:,} sampled tokens, "
            f"{found.prompt_tokens:,} prompt tokens",
            f"  memory: about {found.memory / GIB:.1f} GiB (servers, their caches, and the trainer beside them){more}",
            f"  disk: up to {found.disk / GIB:.1f} GiB (kept versions with optimiser state, and the store){more}",
        ]
    )
