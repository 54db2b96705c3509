"""One GRPO update with TRL on sequences that were sampled elsewhere."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import PrinterCallback, ProgressCallback

from sesa.config import TrainingSection
from sesa.training.logprobs import ForwardCore, TokenScores, install_core, padded_scores
from sesa.training.micro_batches import Sample, attention_pair_cost, plan_micro_batches
from sesa.training.prefix_tree import supports_trees, tree_scores
from sesa.training.sequences import TokenSequence

# TRL looks at the installed vLLM, which it is never asked to talk to here, and both comment on it.
logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="TRL currently supports vLLM versions")
    from trl import GRPOConfig, GRPOTrainer


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one update did. ``applied`` is False when loss or gradient was not finite: the weights are untouched.

    ``loss`` is the objective that was minimised, ``grad_norm`` the 2-norm before clipping, ``ratio_*`` the ratio of
    the trainer's to the sampler's probability over trained tokens before the step, ``clipped`` the share of tokens
    outside the clip range, ``entropy`` the policy's (nats), ``kl`` that to the reference (nats); these three are means
    over micro-batches.
    """

    applied: bool
    loss: float
    grad_norm: float
    ratio_mean: float
    ratio_max: float
    entropy: float
    clipped: float
    kl: float | None
    tokens: int


class _NotFiniteError(ArithmeticError):
    """Ends ``train()`` before the optimiser could spread a NaN over the weights."""


class RolloutTrainer(GRPOTrainer):  # type: ignore[misc]  # trl is untyped
    """TRL's GRPO trainer, fed with ready sequences; each ``update`` is exactly one optimiser step over all of them.

    TRL keeps the loss, clipping, KL, gradient accumulation, optimiser and precision. Replaced are: where batches come
    from (micro-batches of sequences of like length instead of prompts), and the forward pass (a ``ForwardCore``, which
    puts only sampled tokens through the vocabulary). TRL's loss then works on tensors of shape (B, T) that hold the
    sampled tokens alone, T being the largest number in one sequence of the micro-batch.

    The optimiser lives as long as the trainer; ``optimizer_state`` and ``load_optimizer`` carry it over a restart.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: TrainingSection,
        *,
        temperature: float,
        max_completion_tokens: int,
        seed: int,
        output_dir: Path,
        use_cpu: bool = True,
        bf16: bool = False,
        reference: str = "",
        share_prefixes: bool = True,
    ) -> None:
        """``temperature`` is the one the sequences were sampled with. ``max_completion_tokens`` is the longest reply of
        a whole rollout, the constant that the "dr_grpo" reduction divides by. ``reference`` is the folder of the
        weights that the KL is taken to, needed where ``settings.beta`` is positive. ``share_prefixes`` computes what
        sequences have in common once, where the model allows it; the result is the same up to rounding."""
        if settings.beta > 0:
            model.config._name_or_path = reference  # where TRL loads its reference model from
        self._settings = settings
        self._micro_batches: list[list[Sample]] = []
        self._sequences: Sequence[TokenSequence] = ()
        self._old = torch.empty(0)
        self._ratios: list[torch.Tensor] = []
        super().__init__(
            model=model,
            reward_funcs=_rewards_come_with_the_rollouts,
            processing_class=tokenizer,
            args=_trl_config(settings, temperature, max_completion_tokens, seed, output_dir, use_cpu, bf16),
            train_dataset=Dataset.from_dict({"prompt": [""]}),  # unused: see get_train_dataloader
        )
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        share = share_prefixes and supports_trees(self.model)
        self._pair_cost = attention_pair_cost(self.model) if share else None
        core: ForwardCore = tree_scores if share else padded_scores
        install_core(self.model, core)
        if self.ref_model is not None:
            install_core(self.ref_model, core)
        self.create_optimizer()
        self._schedule(0)

    @property
    def updates(self) -> int:
        """Updates made so far, those before a restart included."""
        return int(self.lr_scheduler.last_epoch)

    def optimizer_state(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "updates": self.updates}

    def load_optimizer(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self._schedule(int(state["updates"]))

    def update(self, samples: Sequence[Sample]) -> StepResult:
        """Take one optimiser step over ``samples`` (at least one)."""
        self._micro_batches = plan_micro_batches(samples, self._settings.micro_batch, self._pair_cost)
        self._ratios = []
        self._metrics["train"].clear()
        self.args.gradient_accumulation_steps = len(self._micro_batches)
        try:
            self.train()
            log = self.state.log_history[0]
        except _NotFiniteError:
            self.model.zero_grad()
            log = {"loss": math.nan, "grad_norm": math.nan}
        ratios = torch.cat(self._ratios)
        return StepResult(
            applied=math.isfinite(log["grad_norm"]),
            loss=log["loss"],
            grad_norm=log["grad_norm"],
            ratio_mean=float(ratios.mean()),
            ratio_max=float(ratios.max()),
            entropy=log.get("entropy", math.nan),
            clipped=log.get("clip_ratio/region_mean", math.nan),
            kl=log.get("kl"),
            tokens=len(ratios),
        )

    # ------------------------------------------------------------------------------------------ replaced parts of TRL

    def get_train_dataloader(self) -> Any:
        """One item per micro-batch: its number. TRL's own loader draws groups of prompts to generate from."""
        numbers = [{"number": number} for number in range(len(self._micro_batches))]
        return self.accelerator.prepare(DataLoader(numbers, batch_size=1, collate_fn=lambda rows: rows[0]))  # type: ignore[arg-type]

    def _prepare_inputs(self, generation_batch: dict[str, Any]) -> dict[str, Any]:
        return self._generate_and_score_completions(generation_batch)

    def _generate_and_score_completions(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The tensors of one micro-batch as TRL's loss expects them; nothing is generated."""
        samples = self._micro_batches[inputs["number"]]
        sequences = [sample.sequence for sample in samples]
        device = self.accelerator.device
        ids = [[s.ids[i] for i in s.sampled] for s in sequences]
        old = [[s.logprobs[i] for i in s.sampled] for s in sequences]
        everything = [sample for micro_batch in self._micro_batches for sample in micro_batch]
        steps = len(self._micro_batches)
        total = sum(sample.sequence.tokens for sample in everything)
        rows, tokens = len(samples) / len(everything), sum(map(len, ids)) / total
        batch: dict[str, Any] = {
            "sequences": sequences,
            "prompt_ids": torch.zeros(len(samples), 0, dtype=torch.long, device=device),
            "prompt_mask": torch.zeros(len(samples), 0, dtype=torch.long, device=device),
            "completion_ids": _pad(ids, torch.long, device),
            "completion_mask": _pad([[1] * len(row) for row in ids], torch.long, device),
            "old_per_token_logps": _pad(old, torch.float32, device),
            "advantages": torch.tensor([sample.advantage for sample in samples], device=device),
            # TRL multiplies this by the number of micro-batches; the product is the number of trained tokens.
            "num_items_in_batch": torch.tensor(total / steps, device=device),
            # TRL takes means inside a micro-batch and averages those, which is only right for equal ones.
            "share": {"dapo": 1.0, "bnpo": tokens * steps}.get(self.loss_type, rows * steps),
        }
        if self.ref_model is not None:
            with torch.no_grad():
                scores: TokenScores = self.ref_model(sequences=sequences, temperature=self.temperature)
            mask = batch["completion_mask"].bool()
            batch["ref_per_token_logps"] = torch.zeros(mask.shape, device=device).masked_scatter(mask, scores.logprobs)
        return batch

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        self._sequences = inputs["sequences"]
        self._old = inputs["old_per_token_logps"][inputs["completion_mask"].bool()]
        loss: torch.Tensor = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        share: float = inputs["share"]
        return loss * share

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Scores of the sampled tokens, laid out as (B, T) like ``input_ids``, which holds just those."""
        scores: TokenScores = model(sequences=self._sequences, temperature=self.temperature)
        self._ratios.append(torch.exp(scores.logprobs.detach() - self._old))
        mask = attention_mask.bool()
        blank = torch.zeros(mask.shape, device=mask.device)
        return blank.masked_scatter(mask, scores.logprobs), blank.masked_scatter(mask, scores.entropies), None

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float:
        norm = float(super()._get_grad_norm(model, grad_norm=grad_norm))
        if not math.isfinite(norm):
            raise _NotFiniteError
        return norm

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return 0  # transformers counts "input_ids", which our batches do not have

    def _send_telemetry(self) -> None:
        """TRL reports each construction to its makers; a run here reports to nobody."""

    def _schedule(self, updates: int) -> None:
        """Linear warm-up, then constant; over updates, not over the single step of one ``train()``."""
        for group in self.optimizer.param_groups:
            group["initial_lr"] = self._settings.learning_rate
        warmup = max(1, self._settings.warmup_steps)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda done: min(1.0, (done + 1) / warmup), last_epoch=updates - 1
        )


def _pad(rows: Sequence[Sequence[float]], dtype: torch.dtype, device: Any) -> torch.Tensor:
    """(B, T) with zeros after the end of each row."""
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=dtype, device=device)


def _rewards_come_with_the_rollouts(**_: Any) -> list[float]:
    raise AssertionError("TRL asks for a reward function, but advantages are computed before the update")


def _trl_config(
    settings: TrainingSection,
    temperature: float,
    max_completion_tokens: int,
    seed: int,
    output_dir: Path,
    use_cpu: bool,
    bf16: bool,
) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(output_dir),
        max_steps=1,
        seed=seed,
        use_cpu=use_cpu,
        bf16=bf16,
        fp16=False,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        adam_beta2=0.95,  # gradients of few, small batches: a memory of 20 updates rather than 1000
        optim="adamw_torch_fused",
        gradient_checkpointing=settings.gradient_checkpointing,
        epsilon=settings.epsilon,
        epsilon_high=settings.epsilon_high,
        beta=settings.beta,
        loss_type=settings.loss_type,
        temperature=temperature,
        max_completion_length=max_completion_tokens,
        # Our batches come ready made: one item of the loader is one micro-batch. These three only have to satisfy
        # GRPOConfig's check that a generation batch holds whole groups.
        per_device_train_batch_size=2,
        num_generations=2,
        steps_per_generation=1,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        log_level="error",
    )
