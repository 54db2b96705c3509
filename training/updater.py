"""Updates of a run's policies: selects what to train on, takes the step, writes the new version."""

from __future__ import annotations

import gc
import hashlib
import json
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from sesa.config import ProposerSection, RunConfig, SolverSection
from sesa.errors import ConfigError, DataError
from sesa.machine import memory_bytes
from sesa.training import checkpoints
from sesa.training.advantages import Selection, select
from sesa.training.checkpoints import OPTIMIZER, Manifest
from sesa.training.grpo import RolloutTrainer
from sesa.training.logprobs import refuse_scaled_logits
from sesa.training.micro_batches import Sample
from sesa.training.sequences import rollout_sequences
from sesa.types import PolicyVersion, Role, Rollout, TrainedRow, TrainStats

NOT_FINITE = "not_finite"  # drop reason of all rollouts of an update whose loss or gradient was NaN or infinite
BYTES_PER_PARAMETER = 16  # float32 weights, gradients and the two moments of AdamW
WORKING_BYTES = 2**31  # activations and logits of a micro-batch, roughly


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """``version`` is None when nothing was trained; ``trained`` has a row for every rollout of the update."""

    stats: TrainStats
    version: PolicyVersion | None
    trained: tuple[TrainedRow, ...]


@dataclass(slots=True)
class _Held:
    """A trainer in memory and the version whose weights it holds."""

    trainer: RolloutTrainer
    version: int
    sha256: str
    reference: str


class GrpoUpdater:
    """One GRPO update per call, for any policy of the run. Weights and optimiser stay in memory between updates of a
    policy where memory allows; what is on disk is enough to carry on in another process with the same result."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        """ConfigError when the configuration asks for something the update cannot do."""
        _check(config)
        transformers_logging.disable_progress_bar()  # progress is the run's to show
        self._config = config
        self._run_dir = run_dir
        self._held: dict[str, _Held] = {}
        self._lock = threading.Lock()

    def update(self, policy: str, step: int, groups: Sequence[Sequence[Rollout]], base: PolicyVersion) -> UpdateResult:
        """Train ``policy`` from ``base`` on the groups of ``step`` and write the next version. Blocking.

        The same call made twice (a run cut off before the store knew of the version) finds what the first one wrote
        and trains nothing. DataError for missing or damaged weights, StorageFullError when the disk is full.
        """
        with self._lock:
            return self._update(policy, step, groups, base)

    def prune(self, policy: str, protect: Collection[int] = ()) -> list[int]:
        """Delete all but the newest ``training.keep_versions`` versions of a policy and those in ``protect`` (the
        published one); numbers of the deleted ones."""
        with self._lock:
            folder = checkpoints.version_folder(self._run_dir, policy, 0).parent
            held = {self._held[policy].version} if policy in self._held else set()
            return checkpoints.prune(folder, self._config.training.keep_versions, {*protect, *held})

    def _update(self, policy: str, step: int, groups: Sequence[Sequence[Rollout]], base: PolicyVersion) -> UpdateResult:
        began = time.monotonic()
        selection = select(groups, base.version, self._config.training.scale_rewards)
        samples = [
            Sample(sequence, advantage)
            for rollout, advantage in selection.kept
            for sequence in rollout_sequences(rollout)
        ]
        sampled = sum(rollout.sampled_tokens for rollout, _ in selection.kept)
        stats = TrainStats(
            policy=policy,
            step=step,
            version=base.version,
            sequences=len(samples),
            sampled_tokens=sampled,
            trained_tokens=sum(sample.sequence.tokens for sample in samples),
            groups=selection.groups,
            dropped=selection.dropped,
        )
        if stats.trained_tokens != sampled:
            raise AssertionError(f"{policy}, step {step}: {stats.trained_tokens} trained tokens for {sampled} sampled")
        if not samples:
            stats = stats.model_copy(update={"seconds": time.monotonic() - began})
            return UpdateResult(stats, None, _rows(policy, step, base.version, groups, selection, None))

        fingerprint = self._fingerprint(policy, step, base, selection)
        folder = checkpoints.version_folder(self._run_dir, policy, base.version + 1)
        manifest = checkpoints.find(folder, fingerprint)
        if manifest is None:
            held = self._hold(policy, base)
            try:
                manifest = self._train(held, samples, stats, folder, fingerprint, base, began)
            except BaseException:
                del self._held[policy]  # its weights may be ahead of what is on disk
                raise
            if manifest is None:
                del self._held[policy]
                lost = len(selection.kept)
                dropped = {**selection.dropped, NOT_FINITE: lost}
                stats = stats.model_copy(
                    update={"dropped": dropped, "groups": 0, "sequences": 0, "trained_tokens": 0, "sampled_tokens": 0}
                )
                rows = _rows(policy, step, base.version, groups, selection, NOT_FINITE)
                return UpdateResult(stats, None, rows)
        version = PolicyVersion(
            policy=policy, version=manifest.version, path=str(folder), step=step, sha256=manifest.sha256
        )
        return UpdateResult(manifest.stats, version, _rows(policy, step, manifest.version, groups, selection, None))

    def _train(
        self,
        held: _Held,
        samples: Sequence[Sample],
        stats: TrainStats,
        folder: Path,
        fingerprint: str,
        base: PolicyVersion,
        began: float,
    ) -> Manifest | None:
        """Take the step and write the version; None when loss or gradient was not finite."""
        parameters = sum(p.numel() for p in held.trainer.model.parameters())
        checkpoints.require_space(folder, parameters * 12 + 2**24)
        result = held.trainer.update(samples)
        if not result.applied:
            return None

        def save(target: Path) -> None:
            held.trainer.model.save_pretrained(target)
            with (target / OPTIMIZER).open("wb") as file:  # given a path, torch hides why a write failed
                torch.save(held.trainer.optimizer_state(), file)

        def describe(files: dict[str, str], sha256: str) -> Manifest:
            return Manifest(
                policy=stats.policy,
                version=base.version + 1,
                step=stats.step,
                base_version=base.version,
                fingerprint=fingerprint,
                reference=held.reference,
                sha256=sha256,
                files=files,
                stats=stats.model_copy(
                    update={
                        "version": base.version + 1,
                        "loss": result.loss,
                        "grad_norm": result.grad_norm,
                        "ratio_mean": result.ratio_mean,
                        "ratio_max": result.ratio_max,
                        "seconds": time.monotonic() - began,
                    }
                ),
            )

        manifest = checkpoints.write_version(folder, Path(base.path), save, describe)
        held.version, held.sha256 = manifest.version, manifest.sha256
        return manifest

    def _hold(self, policy: str, base: PolicyVersion) -> _Held:
        """The trainer with the weights of ``base`` and the optimiser state that goes with them."""
        held = self._held.get(policy)
        if held is not None and held.version == base.version and held.sha256 == _digest(base):
            return held
        self._held.pop(policy, None)
        manifest = checkpoints.check_base(base)
        reference = manifest.reference if manifest else base.path
        role = self._role(policy)
        model = load_policy(Path(base.path))
        self._make_room(sum(p.numel() for p in model.parameters()))
        trainer = RolloutTrainer(
            model,
            AutoTokenizer.from_pretrained(base.path),
            self._config.training,
            temperature=role.sampling.temperature,
            max_completion_tokens=role.sampling.max_tokens * role.max_turns,
            seed=self._config.run.seed,
            output_dir=checkpoints.version_folder(self._run_dir, policy, 0).parent,
            use_cpu=self._config.serving.device == "cpu",
            bf16=self._config.model.dtype == "bfloat16",
            reference=reference,
        )
        state = Path(base.path) / OPTIMIZER
        if manifest is not None and state.exists():
            trainer.load_optimizer(torch.load(state, map_location="cpu", weights_only=True))
        self._held[policy] = _Held(trainer, base.version, _digest(base), reference)
        return self._held[policy]

    def _make_room(self, parameters: int) -> None:
        """Let go of the other policies' trainers where this one's would not fit beside them."""
        on_gpu = self._config.serving.device == "gpu"
        available = torch.cuda.mem_get_info()[0] if on_gpu else memory_bytes()[1]
        if self._held and available < parameters * BYTES_PER_PARAMETER + WORKING_BYTES:
            self._held.clear()
            gc.collect()

    def _role(self, policy: str) -> ProposerSection | SolverSection:
        return self._config.proposer if policy == Role.PROPOSER else self._config.solver

    def _fingerprint(self, policy: str, step: int, base: PolicyVersion, selection: Selection) -> str:
        """Identity of an update: everything that its result depends on."""
        digest = hashlib.sha256()
        settings = self._config.training.model_dump(exclude={"enabled", "keep_versions"})
        role = self._role(policy)
        parts = [policy, step, base.version, _digest(base), settings, self._config.run.seed, self._config.model.dtype]
        digest.update(json.dumps([*parts, role.sampling.model_dump(), role.max_turns], sort_keys=True).encode())
        for rollout, advantage in selection.kept:
            calls = [(turn.call.prompt_ids, turn.call.token_ids, turn.call.logprobs) for turn in rollout.turns]
            digest.update(json.dumps([rollout.id, advantage, calls]).encode())
        return digest.hexdigest()


def load_policy(folder: Path) -> Any:
    """The causal language model in ``folder``, in float32 (the optimiser's precision, whatever is served).

    DataError when transformers cannot load it; ConfigError when its logits are scaled in a way not supported.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder}: not a model that can be trained: {str(error).splitlines()[0]}") from error
    refuse_scaled_logits(model.config, str(folder))
    return model


def _check(config: RunConfig) -> None:
    if config.serving.layout == "lora":
        raise ConfigError('serving.layout: training writes whole weights; set it to "full" or training.enabled = false')
    if config.model.dtype == "float16":
        raise ConfigError("model.dtype: float16 cannot be trained stably; set it to bfloat16 or float32")
    if config.serving.device == "gpu" and not torch.cuda.is_available():
        raise ConfigError("serving.device: torch sees no GPU; install a CUDA build of torch or set it to cpu")
    for name in ("proposer", "solver"):
        sampling = getattr(config, name).sampling
        if sampling.top_p < 1:
            raise ConfigError(
                f"{name}.sampling.top_p: {sampling.top_p:g} cuts off tokens the trainer gives weight to, so that its "
                "probabilities cannot be compared with the sampler's; set it to 1 or training.enabled = false"
            )
        if sampling.temperature == 0:
            raise ConfigError(f"{name}.sampling.temperature: at 0 all rollouts of a group are alike; set it above 0")


def _digest(base: PolicyVersion) -> str:
    return base.sha256 or checkpoints.weights_digest(Path(base.path))


def _rows(
    policy: str, step: int, version: int, groups: Sequence[Sequence[Rollout]], selection: Selection, lost: str | None
) -> tuple[TrainedRow, ...]:
    """The token account of every rollout; ``lost`` is the reason why the selected ones were not trained on either."""
    advantages = {} if lost else {rollout.id: advantage for rollout, advantage in selection.kept}
    rows = []
    for rollout in (rollout for group in groups for rollout in group):
        sequences = rollout_sequences(rollout) if rollout.id in advantages else ()
        rows.append(
            TrainedRow(
                rollout_id=rollout.id,
                policy=policy,
                version=version,
                step=step,
                sampled_tokens=rollout.sampled_tokens,
                trained_tokens=sum(sequence.tokens for sequence in sequences),
                sequences=len(sequences),
                advantage=advantages.get(rollout.id),
                dropped=None if rollout.id in advantages else selection.reasons.get(rollout.id, lost),
            )
        )
    return tuple(rows)
