"""Prompts: one Markdown file each, loaded by name, content-hashed.

A file starts with a header between ``---`` lines that declares its variables; then come sections. ``## system``,
``## user`` and ``## assistant`` are the chat messages in order (worked examples are messages of their own, which small
models need). Any other section, such as ``## observation``, is a template that the agent fills later in the dialogue.
Only declared names are substituted, in one pass, so a value that itself contains braces is left alone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal, cast

from sesa.errors import ConfigError, NotFoundError
from sesa.types import Message

ChatRole = Literal["system", "user", "assistant"]
_CHAT = ("system", "user", "assistant")
_SLOT = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True)
class Prompt:
    """A parsed prompt file. ``sha256`` is the hash of the file's bytes and is recorded with the run."""

    name: str
    variables: frozenset[str]
    chat: tuple[tuple[ChatRole, str], ...]
    sections: Mapping[str, str]
    sha256: str

    def messages(self, **values: str) -> tuple[Message, ...]:
        """The chat messages with the declared variables substituted.

        Raises ConfigError for a missing or undeclared variable.
        """
        return tuple(Message(role=role, content=self._fill(text, values)) for role, text in self.chat)

    def section(self, name: str, /, **values: str) -> str:
        """A further section, filled. Raises ConfigError when the file has no such section."""
        if name not in self.sections:
            raise ConfigError(f"prompts/{self.name}.md: has no section '## {name}'")
        return self._fill(self.sections[name], values)

    def _fill(self, text: str, values: Mapping[str, str]) -> str:
        def value(match: re.Match[str]) -> str:
            name = match.group(1)
            if name not in self.variables:
                return match.group(0)
            if name not in values:
                raise ConfigError(f"prompts/{self.name}.md: variable {name!r} was not given")
            return values[name]

        unknown = set(values) - self.variables
        if unknown:
            raise ConfigError(f"prompts/{self.name}.md: does not declare {', '.join(sorted(unknown))}")
        return _SLOT.sub(value, text)


@cache
def load(name: str) -> Prompt:
    """The prompt ``name`` from this package. Raises NotFoundError or ConfigError."""
    path = resources.files(__name__) / f"{name}.md"
    if not re.fullmatch(r"[a-z0-9_]+", name) or not path.is_file():
        raise NotFoundError(f"no prompt {name!r}; there are: {', '.join(names())}")
    return parse(name, path.read_bytes())


def names() -> list[str]:
    """Names of all prompt files."""
    return sorted(Path(p.name).stem for p in resources.files(__name__).iterdir() if p.name.endswith(".md"))


def parse(name: str, raw: bytes) -> Prompt:
    """Parse a prompt file. Raises ConfigError naming the file and what is wrong with it."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompts/{name}.md: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    match = re.fullmatch(r"---\nvariables: \[([a-z_, ]*)\]\n---\n(.*)", text, re.DOTALL)
    if match is None:
        raise ConfigError(f"prompts/{name}.md: must start with '---', 'variables: [...]', '---'")
    variables = frozenset(v.strip() for v in match.group(1).split(",") if v.strip())
    chat: list[tuple[ChatRole, str]] = []
    sections: dict[str, str] = {}
    parts = re.split(r"^## ([a-z_]+)\n", match.group(2), flags=re.MULTILINE)
    if parts[0].strip():
        raise ConfigError(f"prompts/{name}.md: text before the first '## section' reaches no model; move it into one")
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        if title in _CHAT:
            chat.append((cast(ChatRole, title), body.strip("\n")))
        elif title in sections:
            raise ConfigError(f"prompts/{name}.md: section '## {title}' occurs twice")
        else:
            sections[title] = body.strip("\n")
    if not chat:
        raise ConfigError(f"prompts/{name}.md: has no message; add '## system', '## user' or '## assistant'")
    used = {slot for _, text in chat for slot in _SLOT.findall(text)} | {
        slot for text in sections.values() for slot in _SLOT.findall(text)
    }
    if unused := variables - used:
        raise ConfigError(f"prompts/{name}.md: declares {', '.join(sorted(unused))} but never uses it")
    return Prompt(name, variables, tuple(chat), sections, hashlib.sha256(raw).hexdigest())
