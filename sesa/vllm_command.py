"""The command line and environment of a vLLM server, and what it takes of the machine."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from sesa.config import RunConfig
from sesa.control import EXTENSION
from sesa.errors import DependencyError, ServerError
from sesa.machine import cores, memory_bytes

GIB = 2**30
# Beside weights and key-value cache: three processes that each hold an interpreter with torch (measured: 2.0 GiB).
PROCESSES_GIB = 2.0
# Requests in one batch on a CPU. More gain nothing on two cores, and the start-up profiles this many.
CPU_MAX_SEQS = 32
CPU_BATCHED_TOKENS = 2048


def vllm_command(
    config: RunConfig,
    weights: Path,
    tokenizer: Path,
    served_name: str,
    port: int,
    adapters: Mapping[str, str] | None = None,
) -> list[str]:
    """Arguments that serve ``weights`` under ``served_name`` on ``port``.

    ``adapters`` (name to folder) are loaded at start, in the layout `lora`. Raises DependencyError without vLLM.
    """
    if importlib.util.find_spec("vllm") is None:
        raise DependencyError(
            "vllm is not installed: make install, or set serving.attach to servers that run elsewhere"
        )
    serving, model = config.serving, config.model
    # The module, not the `vllm` command, which fails in the CPU build for want of its own metadata.
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(weights), "--tokenizer", str(tokenizer), "--served-model-name", served_name]
    command += ["--host", serving.host, "--port", str(port), "--seed", str(config.run.seed)]
    command += ["--dtype", model.dtype, "--max-model-len", str(model.max_model_len)]
    # Log-probabilities of the distribution that was sampled from, temperature included: those the update needs.
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    command += ["--uvicorn-log-level", "warning"]
    command += ["--worker-extension-cls", EXTENSION]
    if serving.device == "cpu":
        command += ["--enforce-eager", "--kv-cache-memory-bytes", str(int(serving.kv_cache_gib * GIB))]
        # Whole prompts at a time: with a seeded call, vLLM 0.32 dies of a prompt taken in pieces on a CPU ("CPU
        # Generator does not use offset"), and every call of ours carries a seed.
        batched = max(CPU_BATCHED_TOKENS, model.max_model_len)
        command += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(batched)]
        command += ["--max-num-seqs", str(CPU_MAX_SEQS)]
    else:
        command += ["--gpu-memory-utilization", str(serving.gpu_memory_utilization)]
    if serving.layout == "lora":
        # Each policy's adapter of now and, while it is replaced, of before.
        command += ["--enable-lora", "--max-loras", "2", "--max-cpu-loras", "4", "--max-lora-rank", "64"]
        if adapters:
            command += ["--lora-modules", *(f"{name}={path}" for name, path in adapters.items())]
    return [*command, *serving.extra_args]


def vllm_environment(config: RunConfig) -> dict[str, str]:
    """The environment of a server: this process's own, offline and quiet, with the control endpoints open.

    They are open to whoever reaches the port, so servers bind to 127.0.0.1 unless told otherwise.
    """
    # The trainer's way of waiting is not for servers, which have the cores to themselves while they answer.
    ours = ("VLLM_", "OMP_WAIT_POLICY")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    env |= {
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if config.serving.layout == "lora":
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if config.serving.device == "cpu":
        # Left to itself it binds to one core of two.
        env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores()))
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            env.pop(name, None)
    return env


def weights_bytes(folder: Path) -> int:
    """Size of the safetensors files in ``folder``."""
    return sum(p.stat().st_size for p in folder.glob("*.safetensors"))


def server_bytes(config: RunConfig, model_dir: Path) -> int:
    """Memory that one server takes on a CPU, in bytes."""
    return int((PROCESSES_GIB + config.serving.kv_cache_gib) * GIB) + weights_bytes(model_dir)


def servers_to_start(config: RunConfig) -> int:
    """How many servers a run of both policies starts itself: none for a policy that serving.attach has one for."""
    own = sum(policy not in config.serving.attach for policy in ("proposer", "solver"))
    return min(own, 1) if config.serving.layout == "lora" else own


def require_memory(config: RunConfig, model_dir: Path, servers: int) -> None:
    """Raises ServerError where ``servers`` servers do not fit in the memory that is free."""
    if config.serving.device != "cpu" or not servers:
        return
    needed, (_, free) = servers * server_bytes(config, model_dir), memory_bytes()
    if needed > free:
        raise ServerError(
            f"{servers} vLLM servers take about {needed / GIB:.1f} GiB of memory, {free / GIB:.1f} are free:"
            " lower serving.kv_cache_gib or end other programs"
        )
