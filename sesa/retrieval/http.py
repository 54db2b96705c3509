"""Client for the ``/retrieve`` interface that search-RL projects serve their retrievers by.

POST {"queries": [...], "topk": k, "return_scores": true} answers {"result": [[{"document": {"id", "contents"},
"score"}, ...], ...]}: one list per query. ``contents`` is the quoted title, a line break, the text.
"""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from sesa.errors import BadReplyError, ConfigError, ServerBusyError, ServerError, TransitError
from sesa.retrieval.base import answerable, as_hits
from sesa.types import Hit, Passage

_REMEDY = "check retrieval.url and that the server runs"
# Of one search: the first try and two more.
TRIES = 3


class HttpRetriever:
    """Retrieval by another process or machine. ``url`` may name the server alone or its ``/retrieve`` path.

    Proxy settings of the environment are not used. A search that fails in transit, or that the server refuses for
    now (429, 503), is tried twice more; one that takes too long is not, because it would take as long again. Errors:
    ServerBusyError (still 429 or 503), ServerError (unreachable, too slow, any other status), BadReplyError (an answer
    of another form).
    """

    name = "http"

    def __init__(self, url: str, *, timeout_s: float = 30.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"retrieval.url: {url!r} is not an address such as http://127.0.0.1:8000/retrieve")
        self.url = url if parts.path.strip("/") else f"{url.rstrip('/')}/retrieve"
        self.timeout_s = timeout_s
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """See `Retriever.search`; all queries go in one request."""
        hits: list[list[Hit]] = [[] for _ in queries]
        asked = answerable(queries, k)
        if not asked:
            return hits
        reply = self._post({"queries": [queries[place] for place in asked], "topk": k, "return_scores": True})
        result = reply.get("result") if isinstance(reply, dict) else None
        if not isinstance(result, list) or len(result) != len(asked):
            raise BadReplyError(f'{self.url}: expected "result" with one list for each of {len(asked)} queries')
        for place, rows in zip(asked, result, strict=True):
            hits[place] = self._hits(rows, k)
        return hits

    def _post(self, body: Mapping[str, Any]) -> Any:
        failures = 0
        while True:
            try:
                return self._try(body)
            except (ServerBusyError, TransitError) as error:
                failures += 1
                if failures >= TRIES:
                    kind = ServerBusyError if isinstance(error, ServerBusyError) else ServerError
                    raise kind(f"{error} (tried {failures} times)") from None
            time.sleep(backoff_s(failures))

    def _try(self, body: Mapping[str, Any]) -> Any:
        request = urllib.request.Request(
            self.url, json.dumps(body).encode(), {"Content-Type": "application/json", "Accept": "application/json"}
        )
        try:
            with self._open(request, timeout=self.timeout_s) as response:
                payload = response.read()
        except urllib.error.HTTPError as error:
            with error:
                detail = " ".join(error.read(300).decode("utf-8", "replace").split())
            kind = ServerBusyError if error.code in (429, 503) else ServerError
            raise kind(f"{self.url}: the retrieval server answered {error.code} {error.reason}: {detail}") from None
        except TimeoutError:
            raise ServerError(
                f"{self.url}: no answer within {self.timeout_s:g} s; raise retrieval.timeout_s or {_REMEDY}"
            ) from None
        except urllib.error.URLError as error:
            slow = isinstance(error.reason, TimeoutError)
            if slow:
                raise ServerError(f"{self.url}: no connection within {self.timeout_s:g} s; {_REMEDY}") from None
            raise TransitError(f"{self.url}: cannot be reached ({error.reason}); {_REMEDY}") from None
        except (OSError, http.client.HTTPException) as error:
            raise TransitError(f"{self.url}: the connection broke ({error}); {_REMEDY}") from None
        try:
            return json.loads(payload)
        except ValueError:
            raise BadReplyError(f"{self.url}: the answer is not JSON: {payload[:80]!r}; {_REMEDY}") from None

    def _hits(self, rows: Any, k: int) -> list[Hit]:
        if not isinstance(rows, list):
            raise BadReplyError(f'{self.url}: expected a list of documents in "result", got {str(rows)[:80]!r}')
        passages: list[Passage] = []
        scores: list[float] = []
        for rank, row in enumerate(rows[:k], start=1):
            try:
                scored = isinstance(row, dict) and "document" in row
                passages.append(_document(row["document"] if scored else row))
                # Servers that send no scores keep the order: a falling score stands in for it.
                scores.append(float(row["score"]) if scored else 1 / rank)
            except (KeyError, TypeError, ValueError) as error:
                raise BadReplyError(
                    f"{self.url}: document {rank} is unusable ({type(error).__name__}: {error}): {str(row)[:80]!r}"
                ) from None
        return as_hits(passages, scores, self.name)


def backoff_s(failures: int) -> float:
    """Pause before the next try: 0.5 s doubled per further failure, spread so that callers disperse."""
    return 0.25 * 2.0**failures * random.uniform(0.5, 1.0)


def _document(document: Any) -> Passage:
    if not isinstance(document, dict):
        raise TypeError("not an object")
    contents = document.get("contents") or document.get("text")
    if not isinstance(contents, str) or not contents.strip():
        raise ValueError('neither "contents" nor "text"')
    title = document.get("title")
    text = contents.strip()
    if not isinstance(title, str) or not title:
        title, _, rest = text.partition("\n")
        title, text = (title.strip().strip('"'), rest.strip()) if rest.strip() else ("", text)
    return Passage(id=str(document["id"]), title=title, text=text)
