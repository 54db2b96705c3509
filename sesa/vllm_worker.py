"""What a vLLM worker needs beside its own methods: a reload that reaches weights which two layers share.

vLLM loads this class into its worker processes (``--worker-extension-cls``) and offers its methods as control calls.
"""

from __future__ import annotations

from typing import Any


class WeightReload:
    """Mixed into the worker; ``reload_weights`` and ``model_runner`` are the worker's."""

    model_runner: Any
    reload_weights: Any

    def reload_every_weight(self, weights_path: str) -> None:
        """Replaces the weights by those in ``weights_path``, those of a tied output layer included.

        On CPUs a linear layer computes with a packed copy of its weight. vLLM 0.32 packs anew only the layers that a
        checkpoint names, and where input and output embeddings are tied it names the input alone: the output layer
        went on with the old weights, unnoticed, and log-probabilities were off by half a nat.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        self.reload_weights(weights_path=weights_path)
        for layer in self.model_runner.get_model().modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)
