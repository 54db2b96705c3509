"""One flat vocabulary of errors. Each is also a standard type; each message is one line that names the thing, the
place (file and line, key, URL) and the remedy. The command line prints it and exits with code 2.

A bad rollout is data on the rollout, not one of these.
"""

from __future__ import annotations


class SesaError(Exception):
    """Base of all expected errors."""


class ConfigError(SesaError, ValueError):
    """A configuration file, key or command-line value is unusable."""


class DataError(SesaError, ValueError):
    """A corpus, question or seed file, or a row in it, is unusable."""


class NotFoundError(SesaError, LookupError):
    """A run, rollout, skill or file that was named does not exist."""


class StoreError(SesaError, RuntimeError):
    """The run store cannot be opened, is from a newer version, or refused a write."""


class StorageFullError(SesaError, OSError):
    """The disk is full; what was committed before is intact."""


class ServerError(SesaError, ConnectionError):
    """A model or retrieval server is unreachable, failed to start, or replied with something unusable."""


class ServerBusyError(ServerError):
    """The server refused the call for now (429, 503); trying again later is right."""


class TransitError(ServerError):
    """A call did not reach its server, or the reply did not come back whole: the server may have died; try again."""


class ContextOverflowError(ServerError):
    """The prompt leaves no room for a reply in the model's context; the rollout ends, the server is well."""


class BadReplyError(SesaError, ValueError):
    """A server answered, but not in the promised form."""


class DependencyError(SesaError, ImportError):
    """A package that this operation needs is not installed."""


class BusyError(SesaError, RuntimeError):
    """A run, port or store is in use by another process."""
