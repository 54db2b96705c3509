"""The clients against a scripted server: exact ids, every fault a one-line error, retries, gates, cancellation."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import Prompt, ScriptedServer

from sesa.config import SamplingSection
from sesa.errors import BadReplyError, ConfigError, ContextOverflowError, ServerBusyError, ServerError, SesaError
from sesa.llm import ByteTemplate, ChatModel, OpenAIPolicyClient, PolicyClient, RouterModel, ScriptedModel
from sesa.types import Message

USER = (Message(role="user", content="Who wrote it?"),)
SAMPLING = SamplingSection(max_tokens=200)
Client = type[PolicyClient]


@pytest.fixture(autouse=True)
def _no_pause_between_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sesa.policy_client.backoff_s", lambda failures: 0.001)


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer(lambda prompt: f"seed {prompt.seed} <answer>Ann</answer> and more") as running:
        yield running


@pytest.fixture(params=[PolicyClient, OpenAIPolicyClient])
async def client(request: pytest.FixtureRequest, server: ScriptedServer) -> AsyncIterator[PolicyClient]:
    made = request.param("solver", server.url, server.template, version=3, timeout_s=5.0)
    yield made
    await made.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ------------------------------------------------------------------------------------------------- what a call holds


async def test_call_holds_what_the_server_returned(client: PolicyClient, server: ScriptedServer) -> None:
    call = await client.generate(USER, sampling=SAMPLING, seed=7, stop=("</answer>",))
    template = ByteTemplate()
    assert isinstance(client, ChatModel)
    assert (call.policy, call.policy_version, call.finish_reason) == ("solver", 3, "stop")
    assert call.text == "seed 7 <answer>Ann</answer>"
    assert list(call.prompt_ids) == template.start(USER)
    assert template.decode(call.token_ids) == call.text
    assert len(call.logprobs) == len(call.token_ids) == call.usage.completion_tokens
    assert all(-2 <= p <= 0 for p in call.logprobs)
    assert call.usage.prompt_tokens == len(call.prompt_ids)
    assert call.messages == USER
    assert call.latency_s > 0


async def test_request_names_every_sampling_parameter(client: PolicyClient, server: ScriptedServer) -> None:
    sampling = SamplingSection(temperature=0.8, top_p=0.9, max_tokens=11)
    await client.generate(USER, sampling=sampling, seed=5, stop=("x",), schema={"type": "object"})
    body = server.calls[-1]
    expected = {
        "model": "solver",
        "prompt": ByteTemplate().start(USER),
        "temperature": 0.8,
        "top_p": 0.9,
        "max_tokens": 11,
        "seed": 5,
        "stop": ["x"],
        "logprobs": 0,
        "return_token_ids": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": True,
        "structured_outputs": {"json": {"type": "object"}},
        # Sent although neutral: else the model's generation_config.json decides.
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    assert body == expected


async def test_given_ids_are_the_prompt(client: PolicyClient, server: ScriptedServer) -> None:
    call = await client.generate(USER, sampling=SAMPLING, prompt_ids=[1, 2, 3])
    assert server.calls[-1]["prompt"] == [1, 2, 3]
    assert call.prompt_ids == (1, 2, 3)


async def test_cut_off_reply_says_length(client: PolicyClient) -> None:
    call = await client.generate(USER, sampling=SamplingSection(max_tokens=5))
    assert (call.finish_reason, len(call.token_ids)) == ("length", 5)


async def test_turns_join_exactly(client: PolicyClient) -> None:
    first = await client.generate(USER, sampling=SAMPLING, stop=("</answer>",))
    observation = Message(role="user", content="No passages.")
    ids = client.template.extend(first.prompt_ids, first.token_ids, [observation])
    second = await client.generate((*USER, observation), sampling=SAMPLING, prompt_ids=ids)
    sampled = (*first.prompt_ids, *first.token_ids)
    assert second.prompt_ids[: len(sampled)] == sampled
    text = client.template.decode(second.prompt_ids)
    assert text.endswith("</answer><|im_end|>\n<|im_start|>user\nNo passages.<|im_end|>\n<|im_start|>assistant\n")


# ------------------------------------------------------------------------------------------------------------ faults


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ("400", ServerError, "HTTP 400: scripted failure 400"),
        ("html", BadReplyError, "not JSON"),
        ("empty", BadReplyError, ""),
        ("nan", BadReplyError, ""),
        ("null-logprob", BadReplyError, "token_logprobs["),
        ("short-logprobs", BadReplyError, "log-probabilities"),
        ("no-ids", BadReplyError, "token_ids"),
        ("other-prompt", BadReplyError, "prompt_token_ids"),
        ("odd-finish", BadReplyError, "finish_reason: stop or length expected, got tool_calls"),
    ],
)
async def test_bad_reply_is_one_line_with_the_url_and_not_retried(
    client: PolicyClient, server: ScriptedServer, fault: str, kind: type[SesaError], says: str
) -> None:
    server.fail_next(fault)
    with pytest.raises(kind) as caught:
        await client.generate(USER, sampling=SAMPLING)
    message = str(caught.value)
    assert server.url in message
    assert says in message
    assert "\n" not in message
    assert len(server.calls) == 1
    assert (await client.generate(USER, sampling=SAMPLING)).text.startswith("seed 0")


@pytest.mark.parametrize("fault", ["429", "503", "500", "reset", "cut-off", "abort", "unfinished"])
async def test_failure_in_transit_is_tried_again(client: PolicyClient, server: ScriptedServer, fault: str) -> None:
    server.fail_next(fault, fault)
    call = await client.generate(USER, sampling=SAMPLING, seed=4)
    assert call.text.startswith("seed 4")
    assert len(server.calls) == 3


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("429", ServerBusyError), ("500", ServerError), ("cut-off", ServerError), ("abort", ServerError)],
)
async def test_tries_are_bounded(
    client: PolicyClient, server: ScriptedServer, fault: str, kind: type[SesaError]
) -> None:
    server.fail_next(*[fault] * 9)
    with pytest.raises(kind, match="tried 3 times"):
        await client.generate(USER, sampling=SAMPLING)
    assert len(server.calls) == 3


@pytest.mark.parametrize("kind", [PolicyClient, OpenAIPolicyClient])
async def test_nobody_listens(kind: Client) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    client = kind("solver", url, ByteTemplate(), retries=1)
    with pytest.raises(ServerError, match=url) as caught:
        await client.generate(USER, sampling=SAMPLING)
    assert "tried 2 times" in str(caught.value)
    await client.close()


@pytest.mark.parametrize("kind", [PolicyClient, OpenAIPolicyClient])
async def test_silence_ends_at_the_limit_and_is_not_tried_again(kind: Client, server: ScriptedServer) -> None:
    client = kind("solver", server.url, server.template, timeout_s=0.2)
    server.fail_next("hang", "hang")
    started = time.monotonic()
    with pytest.raises(ServerError, match=r"no reply within 0\.2 s"):
        await client.generate(USER, sampling=SAMPLING)
    assert time.monotonic() - started < 2
    assert len(server.calls) == 1
    await client.close()


@pytest.mark.parametrize("kind", [PolicyClient, OpenAIPolicyClient])
async def test_silence_of_a_server_that_has_come_back_since_is_tried_again(
    kind: Client, server: ScriptedServer
) -> None:
    asked: list[float] = []

    async def recover(since: float) -> bool:
        asked.append(since)
        return True

    began = time.monotonic()
    client = kind("solver", server.url, server.template, timeout_s=0.3, retries=0, recover=recover)
    server.fail_next("hang")
    assert (await client.generate(USER, sampling=SAMPLING)).text.startswith("seed 0")
    assert len(server.calls) == 2
    assert len(asked) == 1 and began <= asked[0] <= time.monotonic() - 0.3
    await client.close()


async def test_a_connection_that_does_not_come_about_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sesa.policy_client.CONNECT_TIMEOUT_S", 0.1)
    with socket.socket() as deaf, socket.socket() as one, socket.socket() as two:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)  # and nobody accepts: what comes after those who wait is not answered
        for waiting in (one, two):
            waiting.setblocking(False)
            waiting.connect_ex(deaf.getsockname())
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        client = PolicyClient("solver", url, ByteTemplate(), retries=1)
        with pytest.raises(ServerError, match=r"no connection within 0\.1 s.*\(tried 2 times"):
            await client.generate(USER, sampling=SAMPLING)
        await client.close()


async def test_full_context_is_told_apart(client: PolicyClient, server: ScriptedServer) -> None:
    with pytest.raises(ContextOverflowError, match="maximum context length is 4096"):
        await client.generate(USER, sampling=SAMPLING, prompt_ids=[1] * 5000)
    with pytest.raises(ContextOverflowError, match="max_tokens must be at least 1, got 0"):
        await client.generate(USER, sampling=SAMPLING, prompt_ids=[1] * 4096)
    assert len(server.calls) == 2
    assert (await client.generate(USER, sampling=SAMPLING, prompt_ids=[1] * 4095)).finish_reason == "length"


async def test_unknown_model_says_which_are_served(server: ScriptedServer) -> None:
    client = PolicyClient("proposer", server.url, server.template)
    with pytest.raises(ServerError, match=r"`proposer` does not exist. Valid aliases: solver"):
        await client.generate(USER, sampling=SAMPLING)
    await client.close()


def test_address_without_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        PolicyClient("solver", "127.0.0.1:8000", ByteTemplate())


def test_address_may_end_in_v1() -> None:
    assert PolicyClient("solver", "http://h:1/v1/", ByteTemplate()).url == "http://h:1/v1/completions"


# ---------------------------------------------------------------------------------- publication gate, recovery, cancel


async def test_every_call_has_one_version(server: ScriptedServer) -> None:
    client = PolicyClient("solver", server.url, server.template)
    server.delay_s = 0.1
    before = [asyncio.create_task(client.generate(USER, sampling=SAMPLING)) for _ in range(5)]
    await asyncio.sleep(0.02)
    async with client.exclusive(5.0):
        assert server.in_flight == 0
        during = asyncio.create_task(client.generate(USER, sampling=SAMPLING))
        await asyncio.sleep(0.05)
        assert len(server.calls) == 5
        client.version = 1
    assert {(await task).policy_version for task in before} == {0}
    assert (await during).policy_version == 1
    await client.close()


async def test_gate_opens_again_when_calls_do_not_end(server: ScriptedServer) -> None:
    client = PolicyClient("solver", server.url, server.template, timeout_s=30)
    server.fail_next("hang")
    stuck = asyncio.create_task(client.generate(USER, sampling=SAMPLING))
    await asyncio.sleep(0.05)
    with pytest.raises(ServerError, match="1 calls of solver had not ended"):
        async with client.exclusive(0.05):
            pytest.fail("entered with a call in flight")
    assert (await client.generate(USER, sampling=SAMPLING)).text
    stuck.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stuck
    async with client.exclusive(1.0):
        client.version = 1
    await client.close()


async def test_cancelled_call_is_dropped_by_the_server(client: PolicyClient, server: ScriptedServer) -> None:
    server.fail_next("hang")
    task = asyncio.create_task(client.generate(USER, sampling=SAMPLING))
    while not server.in_flight:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(100):
        if not server.in_flight:
            break
        await asyncio.sleep(0.02)
    assert server.in_flight == 0


async def test_call_survives_a_restart_of_its_server() -> None:
    port = free_port()
    running: list[ScriptedServer] = []

    async def restart(since: float) -> bool:
        if not running:
            running.append(await ScriptedServer(lambda prompt: "back", port=port).__aenter__())
        return True

    client = PolicyClient("solver", f"http://127.0.0.1:{port}", ByteTemplate(), retries=0, recover=restart)
    assert (await client.generate(USER, sampling=SAMPLING)).text == "back"
    await client.close()
    await running[0].__aexit__()


# -------------------------------------------------------------------------------------------- scripted model, template


async def test_scripted_model_is_as_consistent_as_a_server(server: ScriptedServer) -> None:
    script: Callable[..., str] = lambda messages, seed: f"seed {seed} <answer>Ann</answer> and more"  # noqa: E731
    model = ScriptedModel("solver", script, version=3)
    client = PolicyClient("solver", server.url, server.template, version=3)
    one = await model.generate(USER, sampling=SAMPLING, seed=9, stop=("</answer>",))
    two = await client.generate(USER, sampling=SAMPLING, seed=9, stop=("</answer>",))
    assert one.model_copy(update={"latency_s": 0.0}) == two.model_copy(update={"latency_s": 0.0})
    assert model.calls == [one]
    await client.close()


async def test_scripted_error_is_raised() -> None:
    def script(messages: Any, seed: int) -> str:
        raise ServerError("http://h: gone")

    with pytest.raises(ServerError, match="gone"):
        await ScriptedModel("solver", script).generate(USER, sampling=SAMPLING)


TEXTS = st.text(st.sampled_from("<|im_start>end| aé\n"), max_size=40)


@given(TEXTS)
def test_bytes_decode_to_what_was_encoded(text: str) -> None:
    template = ByteTemplate()
    assert template.decode(template.encode(text)) == text


@given(
    st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im_", "start|>", "end|>", "<", " ", "x"]), max_size=12)
)
def test_neutralised_text_holds_no_special_token(parts: list[str]) -> None:
    template = ByteTemplate()
    safe = template.neutralise("".join(parts))
    assert all(token < 256 for token in template.encode(safe))
    assert safe.replace(" ", "") == "".join(parts).replace(" ", "")


@given(TEXTS, st.booleans(), TEXTS)
def test_extension_keeps_what_was_sampled(reply: str, ended: bool, said: str) -> None:
    template = ByteTemplate()
    prompt = template.start(USER)
    sampled = template.encode(template.neutralise(reply)) + ([template.eos_id] if ended else [])
    observation = Message(role="user", content=said)
    joined = template.extend(prompt, sampled, [observation])
    assert joined[: len(prompt) + len(sampled)] == [*prompt, *sampled]
    # The turn ends once, whether the policy ended it or not, and the whole reads as the template would write it.
    whole = [*USER, Message(role="assistant", content=template.neutralise(reply)), observation]
    assert joined == template.start(whole)


# ------------------------------------------------------------------------------------------------------------ router


async def test_router_reaches_an_endpoint_and_sends_the_schema() -> None:
    async with ScriptedServer(lambda prompt: '{"verdict": "pass"}', models=("judge",)) as server:
        model = RouterModel("judge", "hosted_vllm/judge", api_base=f"{server.url}/v1", retries=0)
        schema = {"type": "object"}
        call = await model.generate(USER, sampling=SAMPLING, seed=3, stop=("END",), schema=schema)
        assert call.text == '{"verdict": "pass"}'
        assert (call.policy, call.token_ids, call.usage.completion_tokens) == ("judge", (), 3)
        body = server.calls[-1]
        assert body["response_format"]["json_schema"]["schema"] == schema
        assert (body["messages"][0]["content"], body["seed"], body["stop"]) == ("Who wrote it?", 3, ["END"])


@pytest.mark.parametrize(
    ("fault", "kind"), [("429", ServerBusyError), ("500", ServerError), ("400", ServerError), ("html", SesaError)]
)
async def test_router_errors_are_ours_and_one_line(fault: str, kind: type[SesaError]) -> None:
    async with ScriptedServer(lambda prompt: "yes", models=("judge",)) as server:
        model = RouterModel("judge", "hosted_vllm/judge", api_base=f"{server.url}/v1", retries=0, timeout_s=5)
        server.fail_next(*[fault] * 4)
        with pytest.raises(kind) as caught:
            await model.generate(USER, sampling=SAMPLING)
        assert server.url in str(caught.value)
        assert "\n" not in str(caught.value)


def test_router_without_its_key_says_which_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match="NO_SUCH_KEY is not set"):
        RouterModel("judge", "openai/gpt", api_key_env="NO_SUCH_KEY")


async def test_script_sees_prompt_and_seed() -> None:
    seen: list[Prompt] = []

    def script(prompt: Prompt) -> str:
        seen.append(prompt)
        return "ok"

    async with ScriptedServer(script) as server:
        client = PolicyClient("solver", server.url, server.template)
        await client.generate(USER, sampling=SAMPLING, seed=11)
        await client.close()
    assert "Who wrote it?" in seen[0].text
    assert seen[0].seed == 11
