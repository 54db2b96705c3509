"""The /retrieve interface: our server, our client against it, and the client against servers that misbehave."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from sesa.config import RetrievalSection, RunConfig
from sesa.corpus import Corpus
from sesa.errors import BadReplyError, BusyError, ConfigError, ServerBusyError, ServerError
from sesa.retrieval import open_local, open_retriever
from sesa.retrieval.http import HttpRetriever
from sesa.retrieval.http import backoff_s as pause
from sesa.retrieval.server import create_app, serve
from sesa.types import Passage

CORPUS = Corpus.of(
    [
        Passage(id="a", title="Ada", text="Ada Lovelace wrote a program.\nIt was the first."),
        Passage(id="b", title="", text="A passage without a title about engines."),
    ],
    "test",
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    retriever = open_local("bm25", CORPUS, tmp_path_factory.mktemp("cache"))
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(retriever), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join()
    listener.close()


@pytest.fixture(autouse=True)
def _no_pause_between_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sesa.retrieval.http.backoff_s", lambda failures: 0.001)


class Scripted(BaseHTTPRequestHandler):
    """Answers every POST with the status and the body that the test has set, after the faults it has set."""

    status = 200
    body: Any = b""
    faults: list[Any] = []  # noqa: RUF012 - statuses, "reset" or "cut-off"; set anew by each test
    requests: list[Any] = []  # noqa: RUF012 - set anew by each test

    def do_POST(self) -> None:
        type(self).requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        fault = self.faults.pop(0) if self.faults else None
        if fault == "reset":
            self.close_connection = True
            return
        if fault == "cut-off":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"result": [[')
            self.close_connection = True
            return
        if fault is not None:
            self.send_error(fault)
            return
        if self.body is None:
            threading.Event().wait(0.6)
            return
        data = self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def scripted() -> Iterator[tuple[str, type[Scripted]]]:
    handler = type("Handler", (Scripted,), {"requests": [], "faults": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/retrieve", handler
        server.shutdown()


def test_client_and_server_agree_with_the_local_retriever(served: str, tmp_path: Path) -> None:
    remote = open_retriever(RunConfig(retrieval=RetrievalSection(kind="http", url=served)), None)
    local = open_local("bm25", CORPUS, tmp_path)
    queries = ["Ada program", "engines", "zebra", ""]
    theirs, ours = remote.search(queries, 3), local.search(queries, 3)
    assert [[(h.passage, h.rank) for h in hits] for hits in theirs] == [
        [(h.passage, h.rank) for h in hits] for hits in ours
    ]
    assert [h.score for hits in theirs for h in hits] == pytest.approx([h.score for hits in ours for h in hits])
    assert {h.retriever for hits in theirs for h in hits} == {"http"}


def test_requests_of_other_projects_are_understood(served: str) -> None:
    import urllib.request

    def post(body: Any) -> Any:
        request = urllib.request.Request(
            f"{served}/retrieve", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    scored = post({"queries": ["Ada"], "topk": 3, "return_scores": True})["result"][0][0]
    assert scored["document"] == {"id": "a", "contents": '"Ada"\nAda Lovelace wrote a program.\nIt was the first.'}
    assert scored["score"] > 0
    assert post({"queries": ["Ada"]})["result"][0][0]["id"] == "a"
    with urllib.request.urlopen(f"{served}/health") as response:
        assert json.load(response) == {"status": "ok", "retriever": "bm25"}


def test_replies_of_other_projects_are_understood(scripted: tuple[str, type[Scripted]]) -> None:
    url, handler = scripted
    handler.body = {"result": [[{"id": 7, "contents": '"Title"\nBody'}, {"id": 8, "title": "T", "text": "X"}]]}
    (hits,) = HttpRetriever(url).search(["q"], 5)
    assert [h.passage for h in hits] == [
        Passage(id="7", title="Title", text="Body"),
        Passage(id="8", title="T", text="X"),
    ]
    assert hits[0].score > hits[1].score
    assert handler.requests == [{"queries": ["q"], "topk": 5, "return_scores": True}]


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (500, b"boom\nat line 3", ServerError, "answered 500 Internal Server Error: boom at line 3"),
        (503, b"later", ServerBusyError, "answered 503"),
        (429, b"", ServerBusyError, "answered 429"),
        (200, b"<html>", BadReplyError, "not JSON"),
        (200, {"results": []}, BadReplyError, 'expected "result" with one list for each of 2 queries'),
        (200, {"result": [[]]}, BadReplyError, "one list for each of 2 queries"),
        (200, {"result": [{}, []]}, BadReplyError, "expected a list of documents"),
        (200, {"result": [[{"document": {"id": "a"}, "score": 1}], []]}, BadReplyError, "document 1 is unusable"),
        (200, {"result": [[{"document": {"contents": "x"}, "score": 1}], []]}, BadReplyError, "KeyError: 'id'"),
        (200, {"result": [["text"], []]}, BadReplyError, "document 1 is unusable"),
        (200, {"result": [[{"document": {"id": "a", "contents": "x"}, "score": "high"}], []]}, BadReplyError, "float"),
    ],
)
def test_bad_replies_are_one_line_with_the_address(
    scripted: tuple[str, type[Scripted]], status: int, body: Any, kind: type[Exception], message: str
) -> None:
    url, handler = scripted
    handler.status, handler.body = status, body
    with pytest.raises(kind) as caught:
        HttpRetriever(url).search(["one", "two"], 3)
    assert str(caught.value).startswith(f"{url}: ") and message in str(caught.value)
    assert "\n" not in str(caught.value)


FOUND = {"result": [[{"document": {"id": "a", "contents": "x"}, "score": 1}]]}


@pytest.mark.parametrize("fault", [429, 503, "reset", "cut-off"])
def test_a_search_that_fails_in_transit_is_tried_twice_more(
    scripted: tuple[str, type[Scripted]], fault: int | str
) -> None:
    url, handler = scripted
    handler.body = FOUND
    handler.faults += [fault, fault]
    ((hit,),) = HttpRetriever(url).search(["q"], 1)
    assert hit.passage.id == "a"
    assert len(handler.requests) == 3 and handler.requests[0] == handler.requests[2]
    handler.faults += [fault] * 3
    with pytest.raises(ServerError, match=r"\(tried 3 times\)") as caught:
        HttpRetriever(url).search(["q"], 1)
    assert isinstance(caught.value, ServerBusyError) == (fault in (429, 503))
    assert str(caught.value).startswith(f"{url}: ") and "\n" not in str(caught.value)
    assert len(handler.requests) == 6


def test_a_refusal_and_a_wrong_answer_are_not_tried_again(scripted: tuple[str, type[Scripted]]) -> None:
    url, handler = scripted
    handler.faults += [400, 500]
    for said in ("answered 400", "answered 500"):
        with pytest.raises(ServerError, match=said):
            HttpRetriever(url).search(["q"], 1)
    handler.body = b"<html>"
    with pytest.raises(BadReplyError):
        HttpRetriever(url).search(["q"], 1)
    assert len(handler.requests) == 3


@pytest.mark.parametrize("failures", [1, 2])
def test_pauses_between_tries_are_short(failures: int) -> None:
    assert 0 < pause(failures) <= 1.0


def test_a_slow_server_and_no_server(scripted: tuple[str, type[Scripted]]) -> None:
    url, handler = scripted
    handler.body = None
    with pytest.raises(ServerError, match=r"within 0\.2 s; raise retrieval.timeout_s"):
        HttpRetriever(url, timeout_s=0.2).search(["q"], 1)
    assert len(handler.requests) == 1
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ServerError, match=r"cannot be reached.*check retrieval.url"):
        HttpRetriever(f"http://127.0.0.1:{port}").search(["q"], 1)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "file:///etc/passwd", "http://", "nonsense"])
def test_addresses_are_checked_at_the_door(url: str) -> None:
    with pytest.raises(ConfigError, match=r"retrieval\.url"):
        HttpRetriever(url)


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BusyError, match=f"127.0.0.1:{port}: the port is in use"):
            serve(open_local("bm25", CORPUS, tmp_path), port=port)
