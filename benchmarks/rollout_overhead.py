"""What the solver's graph costs beside a bare asyncio loop, and the policy client beside a plain HTTP post.

Usage: python benchmarks/rollout_overhead.py [--rollouts N] [--rounds N] [--calls N] [--at-once N] [--model DIR|bytes]

A scripted server in a process of its own replies after a fixed 50 ms with 40 tokens and their log-probabilities: first
a search, then an answer. Both arms use the same client, agent, conversation and retriever; the bare arm is a ``while``
loop that keeps no records. They take turns, and so do the clients, so that a machine that slows down meanwhile slows
all of them; every figure is the median of the rounds. Processor time is that of this process, without the server's.

Run it on an idle machine: it is the waiting for replies that hides the graph's processor time, and the busier the cores
are with other things, the nearer the ratio comes to that of the processor times.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import aiohttp
import orjson

from sesa.agents.solver import solver
from sesa.collector import rare_collections
from sesa.completions import completion_request
from sesa.config import RunConfig, load_config
from sesa.embedded import resolve_model
from sesa.files import cache_folder
from sesa.graphs.solver import SolveTask, solve
from sesa.llm import ByteTemplate, ChatTemplate, OpenAIPolicyClient, PolicyClient, Template
from sesa.types import Answer, Hit, ModelCall, Passage, Search

ROOT = Path(__file__).resolve().parents[1]
DELAY_MS, TOKENS, START_LIMIT_S = 50, 40, 60.0
QUESTIONS = ("who built the tower", "where was the chemist born", "when did the war end", "which river is longest")
TEXT = "The tower in Paris was built by the company of an engineer for the fair of that year, and it still stands. " * 4

Exchange = tuple[tuple[int, ...], tuple[int, ...], str]  # prompt ids, sampled ids, observation
Solve = Callable[[RunConfig, PolicyClient, int], Awaitable[list[Exchange]]]
Call = Callable[[int], Awaitable[object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=640, help="of each arm in each round")
    parser.add_argument("--calls", type=int, default=640, help="of each client in each round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--delay-ms", type=float, default=DELAY_MS)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "cpu.toml")
    parser.add_argument("--model", default="", help='folder of the tokenizer, or "bytes"; default: that of the config')
    args = parser.parse_args()
    config = load_config(args.config)
    model_dir = None if args.model == "bytes" else _model_dir(config, args.model)
    template: Template = ChatTemplate(model_dir) if model_dir else ByteTemplate()
    with scripted_server(args.delay_ms, model_dir) as url:
        bench = Bench(config, url, template, args.at_once)
        with rare_collections():  # as in a run, for every arm
            try:
                rollouts = asyncio.run(bench.rollouts(args.rollouts, args.rounds))
            except NotComparable as error:
                raise SystemExit(str(error)) from None
            clients = asyncio.run(bench.clients(args.calls, args.rounds))
    print(f"{args.delay_ms:g} ms and {TOKENS} tokens a reply, {args.at_once} at once, medians of {args.rounds} rounds")
    graph, bare = rollouts["graph"], rollouts["bare loop"]
    for name, arm in rollouts.items():
        rates = f"{arm.rate:8.1f} rollouts/s {2 * arm.rate:8.1f} calls/s"
        print(f"{name:16s} {rates} {arm.cpu_ms:8.3f} ms of processor a rollout")
    print(f"same calls       {args.rollouts * args.rounds} rollouts of two calls in each arm, equal in ids and text")
    print(f"ratio            {graph.rate / bare.rate:8.2f} graph to bare loop, rollouts/s (at least 0.75 wanted)")
    print(f"processor ratio  {bare.cpu_ms / graph.cpu_ms:8.2f} bare loop to graph, processor time a rollout")
    plain = clients["plain post"]
    for name, arm in clients.items():
        print(f"{name:16s} {arm.cpu_ms:8.3f} ms of processor a call {arm.cpu_ms / plain.cpu_ms:8.2f} of the plain post")


class NotComparable(Exception):
    """The arms did different work."""


@dataclass(frozen=True)
class Arm:
    """Medians over the rounds: pieces of work per second of wall clock, milliseconds of processor time for each."""

    rate: float
    cpu_ms: float


@dataclass(frozen=True)
class Bench:
    """Both comparisons, against the server at ``url``."""

    config: RunConfig
    url: str
    template: Template
    at_once: int

    async def rollouts(self, count: int, rounds: int) -> dict[str, Arm]:
        """Rollouts through the graph and through the bare loop. NotComparable where their calls were not the same."""
        client = PolicyClient("solver", self.url, self.template)
        arms = {"graph": through_graph, "bare loop": through_bare_loop}
        expected: dict[int, list[Exchange]] = {}
        wrong: list[str] = []

        def checked(arm: Solve) -> Call:
            async def run(number: int) -> None:
                made = await arm(self.config, client, number)
                if len(made) != 2:
                    wrong.append(f"rollout {number} had {len(made)} calls, not a search and an answer")
                if made != expected.setdefault(number, made):
                    wrong.append(f"rollout {number} differs between the arms: the ratio would mean nothing")

            return run

        measured = await self._interleaved({name: checked(arm) for name, arm in arms.items()}, count, rounds)
        await client.close()
        if wrong:
            raise NotComparable(wrong[0])
        return measured

    async def clients(self, count: int, rounds: int) -> dict[str, Arm]:
        """The same call through a plain post and through each client."""
        messages = solver(self.config, QUESTIONS[0], []).prompt.messages(question=QUESTIONS[0], skills="")
        ids = self.template.start(messages)
        sampling = self.config.solver.sampling
        url = f"{self.url}/v1/completions"
        ours, official = (kind("solver", self.url, self.template) for kind in (PolicyClient, OpenAIPolicyClient))

        def through(client: PolicyClient) -> Call:
            return lambda n: client.generate(messages, sampling=sampling, seed=n, prompt_ids=ids)

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def plain(n: int) -> object:
                body = orjson.dumps(completion_request("solver", ids, sampling, n, (), None))
                headers = {"Content-Type": "application/json"}
                async with session.post(url, data=body, headers=headers) as response:
                    return orjson.loads(await response.read())["choices"][0]["token_ids"]

            arms: dict[str, Call] = {
                "plain post": plain,
                "PolicyClient": through(ours),
                "openai library": through(official),
            }
            measured = await self._interleaved(arms, count, rounds)
        await ours.close()
        await official.close()
        return measured

    async def _interleaved(self, arms: dict[str, Call], count: int, rounds: int) -> dict[str, Arm]:
        for arm in arms.values():
            await all_of(arm, min(count, self.at_once), self.at_once)  # opens the connections, imports the library
        wall: dict[str, list[float]] = {name: [] for name in arms}
        cpu: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(rounds):
            # Each arm goes first equally often.
            for name in sorted(arms, reverse=number % 2 == 1):
                started, used = time.perf_counter(), time.process_time()
                await all_of(arms[name], count, self.at_once)
                wall[name].append(time.perf_counter() - started)
                cpu[name].append(time.process_time() - used)
            _say(f"round {number + 1} of {rounds}")
        return {name: Arm(count / median(wall[name]), 1000 * median(cpu[name]) / count) for name in arms}


async def all_of(work: Call, count: int, at_once: int) -> None:
    """Does ``work(0)`` … ``work(count - 1)``, ``at_once`` of them at a time."""
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await work(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(worker())


async def through_graph(config: RunConfig, client: PolicyClient, number: int) -> list[Exchange]:
    """One rollout as training makes it."""
    task = SolveTask(id=str(number), question_id=str(number), question=_question(number))
    rollout = await solve(config, client, SEARCHER, task, sampling=config.solver.sampling, seed=number)
    return [_exchange(turn.call, turn.observation) for turn in rollout.turns]


async def through_bare_loop(config: RunConfig, client: PolicyClient, number: int) -> list[Exchange]:
    """The same conversation without LangGraph and without the records of a rollout."""
    agent = solver(config, _question(number), [])
    conversation = agent.open(client.template)
    exchanges: list[Exchange] = []
    while len(exchanges) < config.solver.max_turns:
        seed = number + len(exchanges)
        call, action = await agent.act(client, conversation, config.solver.sampling, seed)
        if isinstance(action, Answer):
            return [*exchanges, _exchange(call, "")]
        assert isinstance(action, Search), action
        hits = await SEARCHER.search(action.query, config.retrieval.top_k)
        conversation = conversation.after(call, agent.observe(hits, action.query))
        exchanges.append(_exchange(call, conversation.messages[-1].content))
    return exchanges


class InstantSearcher:
    """Passages without a search: what retrieval costs is no matter of this comparison."""

    def __init__(self) -> None:
        passages = [Passage(id=f"p{n}", title=f"Tower {n}", text=TEXT) for n in range(10)]
        self._hits = [Hit(passage=p, score=1.0, rank=n, retriever="instant") for n, p in enumerate(passages, 1)]

    async def search(self, query: str, k: int) -> list[Hit]:
        """The first ``k`` of ten passages, whatever the query."""
        return self._hits[:k]


SEARCHER = InstantSearcher()


@contextmanager
def scripted_server(delay_ms: float, model_dir: Path | None) -> Iterator[str]:
    """The address of a scripted server, which is stopped at the end."""
    command = [sys.executable, str(ROOT / "tests" / "scripted_server.py"), "--tokens", str(TOKENS)]
    command += ["--delay-ms", str(delay_ms), *(["--model-dir", str(model_dir)] if model_dir else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            if not line.startswith("ready on "):
                raise SystemExit(f"the scripted server did not start: {line.strip() or 'see above'}")
            yield line.removeprefix("ready on ").strip()
        finally:
            server.terminate()


def _exchange(call: ModelCall, observation: str) -> Exchange:
    return call.prompt_ids, call.token_ids, observation


def _question(number: int) -> str:
    # Eight attempts at each question, as in a group.
    return f"{QUESTIONS[number // 8 % len(QUESTIONS)]} {number // 8}?"


def _model_dir(config: RunConfig, path: str) -> Path:
    model = config.model.model_copy(update={"path": path}) if path else config.model
    return resolve_model(model, cache_folder(config.corpus.cache), _say)


def _say(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main()
