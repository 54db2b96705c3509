"""The model servers of a run: started or attached to, kept alive, given new weights.

Layout `full`: one server per policy, whose weights are replaced in place. Layout `lora`: one server with the base
weights; each publication is an adapter under a new name, because the prefix cache is keyed by it.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from sesa.chat_template import ChatTemplate
from sesa.config import RunConfig
from sesa.control import RELOAD, ServerControl
from sesa.embedded import check_model_folder, tensor_shapes
from sesa.errors import BusyError, ConfigError, ServerError
from sesa.policy_client import PolicyClient
from sesa.server_process import ServerProcess, free_ports, healthy
from sesa.types import PolicyVersion
from sesa.vllm_command import require_memory, vllm_command, vllm_environment

# How long a server that failed a call may take to show that it has died.
DEATH_LIMIT_S = 15.0
SHARED = "shared"


@dataclass
class _Server:
    """One server, of one policy (`full`) or of all (`lora`). ``process`` is None where it was attached to."""

    name: str
    url: str
    policies: list[str]
    control: ServerControl
    process: ServerProcess | None = None
    restarts: int = 0
    # When it was last given the weights it had lost, by the monotonic clock; of an attached server, which has no
    # process that would say when it became ready.
    restored_at: float = 0.0
    # Held while the server is started or its weights change.
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Serving:
    """Owns the servers of a run. ``async with Serving(...) as serving: await serving.start()``."""

    def __init__(
        self,
        config: RunConfig,
        model_dir: Path,
        log_dir: Path,
        policies: Sequence[str] = ("proposer", "solver"),
        *,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        """``model_dir`` holds the weights of version 0 and the tokenizer; server logs go to ``log_dir``.

        ``progress`` is given a line now and then while servers start. Raises ConfigError where serving.attach does
        not fit the policies.
        """
        self.config = config
        self.model_dir = Path(model_dir)
        self.log_dir = Path(log_dir)
        self.policies = tuple(policies)
        self._progress = progress or (lambda line: None)
        self._servers: list[_Server] = []
        self._clients: dict[str, PolicyClient] = {}
        self._versions: dict[str, PolicyVersion] = {}
        _check_attach(config, self.policies)

    async def __aenter__(self) -> Serving:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------------------------------------------ start and end

    async def start(self, versions: Mapping[str, PolicyVersion] | None = None) -> None:
        """Starts the servers, all at once, and waits until they serve ``versions`` (default: version 0 of each).

        On any failure everything that was started is ended. Raises ServerError, BusyError, DependencyError.
        """
        base = {p: PolicyVersion(policy=p, version=0, path=str(self.model_dir)) for p in self.policies}
        self._versions = base | {p: v for p, v in (versions or {}).items() if p in base}
        for version in self._versions.values():
            self._check_weights(version)
        self._servers = self._lay_out()
        require_memory(self.config, self.model_dir, sum(not self._attached(s) for s in self._servers))
        template = ChatTemplate(self.model_dir)
        started = False
        try:
            await _all([self._bring_up(server) for server in self._servers])
            for server in self._servers:
                names = await server.control.served_names()
                for policy in server.policies:
                    self._clients[policy] = self._make_client(server, policy, template, names)
                    if self._attached(server) and policy not in (versions or {}):
                        self._clients[policy].version = version_in(await server.control.weight_version())
            for policy in versions or {}:
                if policy in base and self._attached(self._server_of(policy)):
                    await self.publish(self._versions[policy])
            started = True
        finally:
            if not started:
                await self.close()

    async def close(self) -> None:
        """Closes the clients and ends the servers that were started. Attached servers run on."""
        await asyncio.gather(*(client.close() for client in self._clients.values()))
        processes = [server.process for server in self._servers if server.process]
        await asyncio.gather(*(process.stop() for process in processes))

    def client(self, policy: str) -> PolicyClient:
        """The client of ``policy``; its ``version`` follows the publications. ConfigError for an unknown name."""
        if policy not in self._clients:
            known = ", ".join(self._clients) or "none: the servers are not started"
            raise ConfigError(f"{policy}: no such policy is served (served: {known})")
        return self._clients[policy]

    # -------------------------------------------------------------------------------------------------- publication

    async def publish(self, version: PolicyVersion) -> None:
        """Serves ``version`` of its policy from the next call on; calls in flight end with the version before.

        Raises ConfigError where the folder does not hold fitting weights (the server is not touched), ServerError
        where the publication fails; then the version before goes on being served, after a restart if need be.
        """
        self._check_weights(version)
        client, server = self.client(version.policy), self._server_of(version.policy)
        if self.config.serving.layout == "lora":
            await self._publish_adapter(client, server, version)
        else:
            await self._publish_weights(client, server, version)

    async def _publish_weights(self, client: PolicyClient, server: _Server, version: PolicyVersion) -> None:
        limit = self.config.serving.request_timeout_s
        async with client.exclusive(limit), server.lock:
            try:
                # A GPU computes with the weights themselves: a server that others started there needs no help of ours.
                method = "reload_weights" if self._attached(server) and self.config.serving.device == "gpu" else RELOAD
                await server.control.replace_weights(Path(version.path), label(version), limit, method)
            except (ServerError, asyncio.CancelledError):
                # Half-way between two sets of weights. A server of ours is ended and comes back with the old ones.
                if server.process:
                    await server.process.stop()
                raise
            self._versions[version.policy] = version
            client.version = version.version

    async def _publish_adapter(self, client: PolicyClient, server: _Server, version: PolicyVersion) -> None:
        before = client.model
        name = label(version) if self._is_adapter(version) else server.name
        async with server.lock:
            if name != server.name and name not in await server.control.served_names():
                await server.control.load_adapter(name, Path(version.path))
            self._versions[version.policy] = version
            client.model, client.version = name, version.version
        if before not in (name, server.name) and await client.drained(before, self.config.serving.request_timeout_s):
            await server.control.unload_adapter(before)

    # ------------------------------------------------------------------------------------------------- staying alive

    async def ensure_alive(self, since: float | None = None) -> list[str]:
        """Restarts, with the weights they served, the servers that have died; returns their names.

        With ``since`` (``time.monotonic()`` before a call that failed) also the names of those that somebody else
        found dead and that have come back after it, so that every caller whom an outage cost a call learns of it.
        Raises ServerError where one has died more often than serving.restarts, or an attached one does not answer.
        """
        restarted = []
        for server in self._servers:
            async with server.lock:
                if server.process and server.process.alive and await healthy(server.url):
                    if since is not None and server.process.ready_at > since:
                        restarted.append(server.name)
                    continue
                if server.process:
                    await self._restart(server)
                    restarted.append(server.name)
                elif not await healthy(server.url):
                    raise ServerError(
                        f"{server.url}: the attached server of {server.name} does not answer; start it again"
                    )
        for policy, version in self._versions.items():
            server = self._server_of(policy)
            replaceable = self._attached(server) and version.version and self.config.serving.layout == "full"
            if replaceable and await server.control.weight_version() != label(version):
                # Somebody restarted it, and it serves the weights it was started with.
                await self.publish(version)
                server.restored_at = time.monotonic()
                restarted.append(server.name)
            elif since is not None and server.restored_at > since:
                restarted.append(server.name)
        return restarted

    async def _recover(self, policy: str, since: float) -> bool:
        """Asked by a client whose call failed in transit: True when the server has come back since ``since``."""
        server = self._server_of(policy)
        if server.process is None:
            return False
        limit = time.monotonic() + DEATH_LIMIT_S
        while time.monotonic() < limit:
            async with server.lock:
                if server.process.ready_at > since:
                    return True
                if not server.process.alive:
                    await self._restart(server)
                    return True
            if await healthy(server.url, timeout_s=5.0):
                return False
            await asyncio.sleep(0.5)
        return False

    async def _restart(self, server: _Server) -> None:
        assert server.process is not None
        last = (server.process.last_lines(1) or ["nothing in its log"])[0]
        await server.process.stop()
        if server.restarts >= self.config.serving.restarts:
            raise ServerError(
                f"{server.name}: its server died {server.restarts + 1} times (serving.restarts): {last[-200:]}"
                f" (log: {server.process.log})"
            )
        server.restarts += 1
        self._progress(f"{server.name}: its server died; restart {server.restarts} of {self.config.serving.restarts}")
        await self._bring_up(server)

    async def _bring_up(self, server: _Server) -> None:
        if self._attached(server):
            if not await healthy(server.url):
                raise ServerError(f"{server.url}: the attached server of {server.name} does not answer; is it running?")
            return
        port = int(server.url.rsplit(":", 1)[1])
        weights, adapters = self.model_dir, {}
        if self.config.serving.layout == "lora":
            adapters = {label(v): v.path for v in self._versions.values() if self._is_adapter(v)}
        else:
            # Started from the published folder: no call can meet other weights, not even just after a restart.
            weights = Path(self._versions[server.policies[0]].path)
        command = vllm_command(self.config, weights, self.model_dir, server.name, port, adapters)
        log = self.log_dir / f"{server.name}.log"
        server.process = ServerProcess(server.name, command, vllm_environment(self.config), server.url, log)
        await server.process.start()
        await server.process.wait_ready(self.config.serving.ready_timeout_s, self._progress)
        if self.config.serving.layout == "full":
            await server.control.label(label(self._versions[server.policies[0]]))

    # ------------------------------------------------------------------------------------------------------- layout

    def _lay_out(self) -> list[_Server]:
        serving = self.config.serving
        by_url: dict[str, list[str]] = defaultdict(list)
        own: list[list[str]] = []
        for policy in self.policies:
            if policy in serving.attach:
                by_url[ServerControl(serving.attach[policy]).url].append(policy)
            elif serving.layout == "lora" and own:
                own[0].append(policy)
            else:
                own.append([policy])
        servers = [_Server(ps[0], url, ps, ServerControl(url)) for url, ps in by_url.items()]
        for policies, port in zip(own, free_ports(serving.host, serving.port, len(own)), strict=True):
            name = SHARED if serving.layout == "lora" else policies[0]
            # A server bound to every address is reached on this machine's own.
            host = "127.0.0.1" if serving.host in ("0.0.0.0", "::") else serving.host
            url = f"http://{host}:{port}"
            servers.append(_Server(name, url, policies, ServerControl(url)))
        return servers

    def _make_client(self, server: _Server, policy: str, template: ChatTemplate, names: list[str]) -> PolicyClient:
        version = self._versions[policy]
        wanted = label(version) if self._is_adapter(version) else server.name
        if self._attached(server):
            wanted = policy if policy in names else names[0]
            if policy not in names and len(names) > 1 and self.config.serving.layout == "full":
                raise ConfigError(f"{server.url}: serves {', '.join(names)}; none is called {policy}")
            server.name = wanted
        elif wanted not in names:
            raise BusyError(f"{server.url}: serves {', '.join(names)} instead of {wanted}: another server has the port")

        async def recover(since: float) -> bool:
            return await self._recover(policy, since)

        return PolicyClient(
            policy,
            server.url,
            template,
            model=wanted,
            version=version.version,
            timeout_s=self.config.serving.request_timeout_s,
            retries=self.config.serving.retries,
            recover=recover,
        )

    def _server_of(self, policy: str) -> _Server:
        return next(server for server in self._servers if policy in server.policies)

    def _attached(self, server: _Server) -> bool:
        return server.policies[0] in self.config.serving.attach

    def _is_adapter(self, version: PolicyVersion) -> bool:
        return self.config.serving.layout == "lora" and Path(version.path) != self.model_dir

    def _check_weights(self, version: PolicyVersion) -> None:
        """A server that is told to load what is not there does not refuse: its engine dies. So look first."""
        folder = Path(version.path)
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder; the weights of {label(version)} are gone")
        if self._is_adapter(version):
            if not (folder / "adapter_config.json").is_file():
                raise ConfigError(
                    f"{folder}: no adapter_config.json; {label(version)} is to be an adapter (serving.layout)"
                )
            return
        check_model_folder(folder)
        if folder == self.model_dir:
            return
        given, served = _shapes(folder), _shapes(self.model_dir)
        if given != served:
            odd = sorted(name for name in given.keys() | served.keys() if given.get(name) != served.get(name))
            raise ConfigError(
                f"{folder}: does not fit the served model in {len(odd)} tensors, the first {odd[0]}:"
                f" {given.get(odd[0], 'missing')} for {served.get(odd[0], 'none')}"
            )


def label(version: PolicyVersion) -> str:
    """Name of a version as servers know it, e.g. ``solver-v0007``."""
    return f"{version.policy}-v{version.version:04d}"


def version_in(name: str) -> int:
    """The version in a name made by `label`; 0 for any other, such as that of a server which never took weights."""
    number = re.search(r"-v(\d+)$", name)
    return int(number[1]) if number else 0


async def _all(jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Runs ``jobs`` at once; the first failure ends the others and is raised."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    return {name: shape for shard in folder.glob("*.safetensors") for name, shape in tensor_shapes(shard).items()}


def _check_attach(config: RunConfig, policies: Sequence[str]) -> None:
    attach = config.serving.attach
    if odd := sorted(set(attach) - set(policies)):
        raise ConfigError(f"serving.attach: {odd[0]}: no such policy; the policies are {', '.join(policies)}")
    urls = [ServerControl(url).url for url in attach.values()]
    if config.serving.layout == "full" and len(set(urls)) < len(urls):
        raise ConfigError("serving.attach: two policies on one server; serving.layout = full needs a server for each")
    if config.serving.layout == "lora" and attach and (len(attach) < len(policies) or len(set(urls)) > 1):
        raise ConfigError("serving.attach: serving.layout = lora has one server; give its address for every policy")
