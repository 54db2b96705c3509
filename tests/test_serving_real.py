"""The real thing: vLLM serving the embedded model, published to, killed, restarted, and gone with its run."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from sesa.config import RunConfig, SamplingSection
from sesa.control import ServerControl
from sesa.embedded import embedded_model, packaged_gguf
from sesa.errors import ContextOverflowError, DependencyError, ServerError
from sesa.policy_client import PolicyClient
from sesa.serving import Serving
from sesa.types import Message, ModelCall, PolicyVersion

pytestmark = pytest.mark.real
pytest.importorskip("vllm")
try:
    packaged_gguf()
except DependencyError as missing:
    pytest.skip(str(missing), allow_module_level=True)

# Long enough to fill blocks of the prefix cache.
LONG = " ".join(f"Fact {n}: river number {n} is {7 * n + 40} kilometres long." for n in range(40))
QUESTION = (Message(role="user", content=f"{LONG} How long is river number 3? Answer in one sentence."),)
GREEDY = SamplingSection(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return embedded_model()


def changed(model_dir: Path, folder: Path, seed: int) -> Path:
    """A copy of the model with noise on its weights, as after an update (a much larger one than usual)."""
    shutil.copytree(model_dir, folder)
    rng = np.random.default_rng(seed)
    tensors = load_file(str(folder / "model.safetensors"))
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            noise = rng.standard_normal(tensor.shape, dtype=np.float32)
            tensors[name] = tensor + 0.05 * float(tensor.std()) * noise
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


async def ask(client: PolicyClient, messages: Sequence[Message] = QUESTION) -> ModelCall:
    return await client.generate(messages, sampling=GREEDY, seed=1)


def trainer_says(folder: Path, call: ModelCall) -> list[float]:
    """Log-probabilities of the sampled tokens under the weights in ``folder``, computed without vLLM."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*call.prompt_ids, *call.token_ids]])).logits[0, len(call.prompt_ids) - 1 : -1]
    taken = logits.log_softmax(-1).gather(1, torch.tensor([call.token_ids]).T)
    return [float(p) for p in taken[:, 0]]


def close(one: ModelCall, two: ModelCall) -> bool:
    """The same reply with the same log-probabilities, up to the order of float32 sums."""
    return one.token_ids == two.token_ids and np.allclose(one.logprobs, two.logprobs, atol=2e-3)


async def test_publish_kill_and_restart(model_dir: Path, tmp_path: Path) -> None:
    config = RunConfig()
    new = PolicyVersion(policy="solver", version=1, path=str(changed(model_dir, tmp_path / "v1", seed=1)))
    async with Serving(config, model_dir, tmp_path / "logs", progress=print) as serving:
        await serving.start()
        solver, proposer = serving.client("solver"), serving.client("proposer")

        first = await ask(solver)
        assert list(first.prompt_ids) == solver.template.start(QUESTION)
        assert solver.template.decode(first.token_ids).removesuffix("<|im_end|>") == first.text
        assert all(p <= 0 for p in first.logprobs)
        again = await ask(solver)
        assert close(first, again)
        assert (await ask(proposer)).token_ids == first.token_ids
        others = await ask(proposer)
        assert others.logprobs == (await ask(proposer)).logprobs

        # An exact second turn: the served ids are the ids before, the sampled ones and the bridge.
        more = Message(role="user", content="And river number 4?")
        ids = solver.template.extend(first.prompt_ids, first.token_ids, [more])
        second = await solver.generate([*QUESTION, more], sampling=GREEDY, prompt_ids=ids)
        assert second.prompt_ids[: len(first.prompt_ids) + len(first.token_ids)] == first.prompt_ids + first.token_ids

        # Stop strings stay in text and ids; a schema binds; a full context is told apart.
        halt = first.text[4:9]
        stopped = await solver.generate(QUESTION, sampling=GREEDY, stop=(halt,))
        assert stopped.text == first.text[:9]
        assert stopped.finish_reason == "stop"
        assert stopped.text in solver.template.decode(stopped.token_ids)
        schema = {
            "type": "object",
            "properties": {"length_km": {"type": "integer"}},
            "required": ["length_km"],
            "additionalProperties": False,
        }
        bound = await solver.generate(QUESTION, sampling=SamplingSection(max_tokens=40), schema=schema)
        assert list(json.loads(bound.text)) == ["length_km"]
        for length in (4096, 5000):
            with pytest.raises(ContextOverflowError):
                await solver.generate(QUESTION, sampling=GREEDY, prompt_ids=[5] * length)

        # Two seeds give two replies, one seed the same; the log-probabilities are of the tempered distribution.
        warm = SamplingSection(temperature=0.7, max_tokens=16)
        one, same, other = [await solver.generate(QUESTION, sampling=warm, seed=s) for s in (3, 3, 4)]
        assert one.token_ids == same.token_ids != other.token_ids

        # More prompt tokens at once than one batch takes, each call with a seed: a prompt must not be split.
        many = [(Message(role="user", content=f"Case {n}. {QUESTION[0].content}"),) for n in range(12)]
        short = SamplingSection(max_tokens=4)
        calls = await asyncio.gather(*(proposer.generate(m, sampling=short, seed=n) for n, m in enumerate(many)))
        assert sum(len(call.prompt_ids) for call in calls) > 2 * 4096

        # Publication: seen at once, nothing stale, the other policy's server untouched bit for bit.
        await serving.publish(new)
        after = await ask(solver)
        assert after.policy_version == 1
        assert after.token_ids != first.token_ids
        assert abs(after.logprobs[0] - first.logprobs[0]) > 0.01
        assert close(after, await ask(solver))
        assert close(after, await uncached(solver))
        assert (await ask(proposer)).logprobs == others.logprobs
        # Every weight is new, also those that two layers share: the reply is the new model's own.
        assert np.allclose(after.logprobs, trainer_says(Path(new.path), after), atol=1e-3)
        assert np.allclose(first.logprobs, trainer_says(model_dir, first), atol=1e-3)

        # The engine dies in the middle of calls: all are answered, by the published weights.
        asked = [asyncio.create_task(ask(solver)) for _ in range(4)]
        await asyncio.sleep(0.2)
        kill_engine(serving, "solver")
        for call in await asyncio.gather(*asked):
            assert call.policy_version == 1
            assert close(call, after)
        assert await serving.ensure_alive() == []
        assert close(await ask(solver), after)

        # And back to the first weights.
        await serving.publish(PolicyVersion(policy="solver", version=2, path=str(model_dir)))
        assert close(await ask(solver), first)

        # A server without our reload is told apart, is not harmed, and goes on with the weights it has.
        bare = solver_control(serving)
        with pytest.raises(ServerError, match="--worker-extension-cls"):
            await bare.replace_weights(model_dir, "x", 30.0, method="no_such_method")
        assert close(await ask(solver), first)

        started = [psutil.Process(s.process.pid) for s in serving._servers if s.process]
        members = [p for guard in started for p in [guard, *guard.children(recursive=True)]]
        assert len(members) >= 2 * 4
    assert all_gone(members)


async def uncached(client: PolicyClient) -> ModelCall:
    """The same call, computed without the prefix cache: a salt gives it entries of its own."""
    from sesa.completions import completion_request

    body = completion_request(client.model, client.template.start(QUESTION), GREEDY, 1, (), None)
    return await client._call({**body, "cache_salt": os.urandom(8).hex()}, QUESTION, client.version)


def solver_control(serving: Serving) -> ServerControl:
    return serving._server_of("solver").control


def kill_engine(serving: Serving, policy: str) -> None:
    process = serving._server_of(policy).process
    assert process is not None
    family = psutil.Process(process.pid).children(recursive=True)
    max(family, key=lambda p: p.memory_info().rss).kill()


def all_gone(processes: list[psutil.Process], limit_s: float = 20.0) -> bool:
    _, left = psutil.wait_procs(processes, timeout=limit_s)
    return not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


async def test_failed_start_shows_the_servers_own_words(model_dir: Path, tmp_path: Path) -> None:
    given = RunConfig().model_dump()
    given["model"]["max_model_len"] = 100_000
    said: list[str] = []
    serving = Serving(RunConfig.model_validate(given), model_dir, tmp_path, policies=("solver",), progress=said.append)
    with pytest.raises(ServerError, match="100000") as caught:
        await serving.start()
    assert "\n" not in str(caught.value)
    assert [line for line in said if line.startswith("solver| ")]


RUN = """
import asyncio, sys
from pathlib import Path
from sesa.config import RunConfig, SamplingSection
from sesa.control import ServerControl
# RunConfig
from sesa.serving import Serving
async def main():
    async with Serving(RunConfig(), Path(sys.argv[1]), Path(sys.argv[2]), policies=("solver",)) as serving:
        await serving.start()
asyncio.run(main())
"""


async def test_killed_run_leaves_no_server(model_dir: Path, tmp_path: Path) -> None:
    run = subprocess.Popen([sys.executable, "-c", RUN, str(model_dir), str(tmp_path)])
    watched = psutil.Process(run.pid)
    for _ in range(1200):
        members = watched.children(recursive=True)
        # Guard, server, engine core, worker and multiprocessing's own helpers.
        if len(members) >= 5:
            break
        await asyncio.sleep(0.1)
    assert len(members) >= 5
    run.send_signal(signal.SIGKILL)
    run.wait(10)
    assert all_gone(members)
