"""From messages to token ids, and exact continuation of a sampled conversation.

A multi-turn rollout must be trained on the very ids that were sampled, so a conversation is never rendered a second
time: `extend` appends to the ids of the previous prompt and reply only what the chat template puts between them and
the next reply.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from sesa.errors import ConfigError, DependencyError
from sesa.types import Message

# Stands for the sampled reply while the text around it is rendered; letters only, so that no template trims it.
_REPLY = "SampledReplyStandsHere"

# Starts of conversations whose ids are remembered: those of a step's groups, for both roles.
STARTS_KEPT = 256


class Template(Protocol):
    """What a policy client and a rollout need of a chat template."""

    special_tokens: tuple[str, ...]

    def start(self, messages: Sequence[Message]) -> list[int]: ...

    def extend(self, prompt_ids: Sequence[int], token_ids: Sequence[int], messages: Sequence[Message]) -> list[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def neutralise(self, text: str) -> str: ...


class ChatTemplate:
    """Tokenizer and chat template of a served model, read from its folder. Loads in about a second, without torch."""

    special_tokens: tuple[str, ...]

    def __init__(self, model_dir: Path) -> None:
        """Raises ConfigError where the folder holds no fast tokenizer or no chat template."""
        self.model_dir = Path(model_dir)
        self._tokenizer = _load_tokenizer(self.model_dir)
        added = (token.content for token in self._tokenizer.added_tokens_decoder.values())
        self.special_tokens = tuple(sorted({*added, *self._tokenizer.all_special_tokens}))
        self._breaker = special_token_breaker(self.special_tokens)
        # Not the library's own `encode`, which hands every text to a pool of threads as a batch of one; what it resets
        # before each text is reset here once.
        self._backend = self._tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        # The rollouts of a group begin with the same messages.
        self._started = lru_cache(STARTS_KEPT)(lambda messages: tuple(self.encode(self._render(messages))))

    def start(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a new conversation, with the generation prompt."""
        return list(self._started(tuple(messages)))

    def extend(self, prompt_ids: Sequence[int], token_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Ids of the next prompt: what was prompted, what was sampled, and the template's bridge to the next reply.

        The bridge is the end of the assistant turn, then ``messages``, then the generation prompt. Its first token
        is left out where the policy sampled it itself (a reply that ended of its own accord). Nothing earlier is
        tokenised again, so ``extend(p, t, m)[: len(p) + len(t)]`` is ``[*p, *t]``.
        """
        bridge = self._bridge(messages)
        skip = 1 if token_ids and bridge and token_ids[-1] == bridge[0] else 0
        return [*prompt_ids, *token_ids, *bridge[skip:]]

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; special tokens written in it are read as such, none is added."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def neutralise(self, text: str) -> str:
        """``text`` with every special token of the template broken up, so that it is tokenised as plain text."""
        return self._breaker(text)

    def _bridge(self, messages: Sequence[Message]) -> list[int]:
        around = [Message(role="user", content="?"), Message(role="assistant", content=_REPLY), *messages]
        _, found, after = self._render(around).partition(_REPLY)
        if not found:
            raise ConfigError(f"{self.model_dir}: the chat template drops the replies of the assistant; use another")
        return self.encode(after)

    def _render(self, messages: Sequence[Message]) -> str:
        from jinja2 import TemplateError

        chat = [{"role": m.role, "content": m.content} for m in messages]
        try:
            return str(self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        except TemplateError as error:
            roles = ", ".join(m.role for m in messages)
            raise ConfigError(f"{self.model_dir}: the chat template refuses the roles {roles}: {error}") from None


def special_token_breaker(special_tokens: Sequence[str]) -> Callable[[str], str]:
    """A function that puts a space after the first character of every one of ``special_tokens`` in a text.

    Tokens of one character and tokens with white space in them stay: they are runs of blanks, not mark-up.
    """
    # Longest first, so that a token which contains another is broken as a whole.
    breakable = sorted((t for t in special_tokens if len(t) > 1 and not re.search(r"\s", t)), key=len, reverse=True)
    if not breakable:
        return lambda text: text
    found = re.compile("|".join(map(re.escape, breakable)))

    def neutralise(text: str) -> str:
        # Repeated, because a token may begin inside another one. Ends: no match can contain a space put in.
        while found.search(text):
            text = found.sub(lambda m: f"{m.group()[0]} {m.group()[1:]}", text)
        return text

    return neutralise


def _load_tokenizer(model_dir: Path) -> Any:
    if not (model_dir / "tokenizer.json").is_file():
        raise ConfigError(f"{model_dir}: no tokenizer.json; model.path must be a folder with a fast tokenizer")
    try:
        # This class, and not AutoTokenizer, which imports torch (seven seconds) to read the same file.
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise DependencyError(
            f"transformers cannot be imported ({error}); install it: pip install transformers"
        ) from None
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(model_dir), local_files_only=True)
    except Exception as error:  # noqa: BLE001 - the tokenizers library raises bare Exception for a damaged file
        raise ConfigError(f"{model_dir}: its tokenizer cannot be read: {str(error).splitlines()[0]}") from None
    if not tokenizer.chat_template:
        raise ConfigError(f"{model_dir}: its tokenizer has no chat template; use an instruct model")
    return tokenizer
