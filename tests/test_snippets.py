from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sesa.snippets import snippet

TEXT = (
    "In 1939 he enrolled at a school in Moscow. During the war they moved to a small town. "
    "He went back to his old school, where the poet Andrey Voznesensky was a class-mate. He studied piano too."
)


def test_a_short_text_is_given_whole() -> None:
    assert snippet("one\ntwo  three", "zebra", 3) == "one two three"


def test_the_window_begins_with_the_sentence_that_matches() -> None:
    shown = snippet(TEXT, "Andrey Voznesensky", 16)
    assert shown.startswith("He went back")
    assert "Andrey Voznesensky" in shown


def test_without_a_match_the_beginning_is_shown() -> None:
    assert snippet(TEXT, "zebra", 5) == "In 1939 he enrolled at"


def test_a_match_deep_in_one_long_sentence_is_found() -> None:
    text = " ".join(f"w{n}" for n in range(200)) + " target " + " ".join(f"v{n}" for n in range(200))
    assert "target" in snippet(text, "target", 10).split()


@given(st.text(alphabet="ab. \nXé", max_size=300), st.text(alphabet="ab Xé", max_size=20), st.integers(1, 12))
def test_it_is_a_run_of_the_texts_words(text: str, query: str, limit: int) -> None:
    shown = snippet(text, query, limit).split()
    words = text.split()
    assert len(shown) == min(limit, len(words))
    assert any(words[at : at + len(shown)] == shown for at in range(len(words) + 1))
