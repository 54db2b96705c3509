"""Chat templates of several families on a small byte-level tokenizer, and the embedded model's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sesa.chat_template import ChatTemplate
from sesa.errors import ConfigError
from sesa.types import Message

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Trims contents, has no line break after the end of a turn, names its roles in mark-up.
LLAMA = (
    "<|begin|>{% for m in messages %}<|head|>{{ m['role'] }}<|tail|>\n\n{{ m['content'] | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|tail|>\n\n{% endif %}"
)
# Ends the assistant's turn alone with a token, and refuses a system message.
MISTRAL = (
    "<|begin|>{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }}<|im_end|>"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
SILENT = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|begin|>", "<|head|>", "<|tail|>", "[INST]", "[/INST]")


def save_tokenizer(folder: Path, template: str | None) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    # As many tokenizers have: runs of blanks as tokens of their own.
    tokenizer.add_tokens([AddedToken("    ", normalized=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[CHATML, LLAMA, MISTRAL], ids=["chatml", "llama", "mistral"])
def template(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    return ChatTemplate(save_tokenizer(tmp_path_factory.mktemp("tokenizer"), request.param))


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    return ChatTemplate(save_tokenizer(tmp_path_factory.mktemp("chatml"), CHATML))


def user(text: str) -> Message:
    return Message(role="user", content=text)


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Z")), min_size=1, max_size=12)


@settings(deadline=None, max_examples=60)
@given(first=WORDS, reply=WORDS, observed=WORDS, ended=st.booleans())
def test_extension_is_what_the_template_would_have_written(
    template: ChatTemplate, first: str, reply: str, observed: str, ended: bool
) -> None:
    prompt = template.start([user(template.neutralise(first))])
    # Mistral's template puts a blank before the reply, which a policy samples itself.
    lead = " " if template.decode(prompt).endswith("[/INST]") else ""
    sampled = template.encode(lead + template.neutralise(reply)) + (template.encode("<|im_end|>") if ended else [])
    joined = template.extend(prompt, sampled, [user(template.neutralise(observed))])
    assert joined[: len(prompt) + len(sampled)] == [*prompt, *sampled]
    turns = [user(first), Message(role="assistant", content=reply), user(observed)]
    safe = [m.model_copy(update={"content": template.neutralise(m.content)}) for m in turns]
    assert joined == template.start(safe)


def test_extension_without_messages_opens_the_next_reply(chatml: ChatTemplate) -> None:
    assert chatml.decode(chatml.extend([], chatml.encode("Hi"), [])) == "Hi<|im_end|>\n<|im_start|>assistant\n"


def test_reply_that_ends_in_another_special_token_still_gets_its_end(chatml: ChatTemplate) -> None:
    sampled = chatml.encode("Hi<|im_start|>")
    assert chatml.decode(chatml.extend([], sampled, [user("?")])).startswith("Hi<|im_start|><|im_end|>\n")


def test_start_is_what_transformers_gives(template: ChatTemplate) -> None:
    messages = [user("Who?"), Message(role="assistant", content="Ann."), user("When? 日本")]
    reference = PreTrainedTokenizerFast.from_pretrained(template.model_dir)
    chat = [m.model_dump() for m in messages]
    expected = reference.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)
    assert template.start(messages) == list(expected["input_ids"])


@settings(deadline=None)
@given(st.lists(st.sampled_from([*SPECIAL, "<", "|", "im_end|>", "<|im_", "    ", " ", "x"]), max_size=10))
def test_neutralised_text_reads_the_same_and_holds_no_mark_up(chatml: ChatTemplate, parts: list[str]) -> None:
    text = "".join(parts)
    safe = chatml.neutralise(text)
    mark_up = {chatml.encode(t)[0] for t in SPECIAL}
    assert not mark_up & set(chatml.encode(safe))
    assert safe.replace(" ", "") == text.replace(" ", "")


def test_special_tokens_are_listed(chatml: ChatTemplate) -> None:
    assert set(SPECIAL) <= set(chatml.special_tokens)


def test_folder_without_a_usable_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        ChatTemplate(tmp_path)
    bare = save_tokenizer(tmp_path / "bare", None)
    with pytest.raises(ConfigError, match="no chat template"):
        ChatTemplate(bare)
    (bare / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="its tokenizer cannot be read") as caught:
        ChatTemplate(bare)
    assert "\n" not in str(caught.value)


def test_templates_that_cannot_carry_a_rollout_say_so(tmp_path: Path) -> None:
    silent = ChatTemplate(save_tokenizer(tmp_path / "silent", SILENT))
    with pytest.raises(ConfigError, match="drops the replies"):
        silent.extend([1], [2], [user("?")])
    mistral = ChatTemplate(save_tokenizer(tmp_path / "mistral", MISTRAL))
    with pytest.raises(ConfigError, match="refuses the roles system, user: only user and assistant"):
        mistral.start([Message(role="system", content="s"), user("?")])


@pytest.mark.real
def test_embedded_models_template() -> None:
    from sesa.embedded import embedded_model

    template = ChatTemplate(embedded_model())
    prompt = template.start([user("Who?")])
    assert template.decode(prompt).endswith("<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n")
    ended = template.encode("Ann<|im_end|>")
    observed = template.extend(prompt, ended, [user("No.")])
    assert observed == template.extend(prompt, ended[:-1], [user("No.")])
    assert {"<|im_start|>", "<|im_end|>", "<|endoftext|>"} <= set(template.special_tokens)
