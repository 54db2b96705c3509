"""Seed answers: what is extracted from text, where it is found again, and what a bad seed file says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from embedded_corpus import embedded_corpus

from sesa.config import CorpusSection
from sesa.corpus import Corpus
from sesa.errors import DataError
from sesa.seeds import extract_seeds, load_seeds, read_seeds
from sesa.types import Passage, SeedAnswer

DATA = Path(__file__).parents[2] / "shared/data"


def corpus(*texts: str, title: str = "") -> Corpus:
    return Corpus.of([Passage(id=f"p{i}", title=title, text=text) for i, text in enumerate(texts)], "test")


def answers(*texts: str, kind: str | None = None) -> set[str]:
    return {seed.answer for seed in extract_seeds(corpus(*texts)) if kind in (None, seed.type)}


def test_names_dates_and_quantities() -> None:
    text = (
        "However, the explorer Vasco da Gama reached Calicut on 20 May 1498. Meanwhile the Battle of the Nile, won by "
        "Dr. Horatio Nelson in 1798, cost $2.5 million and 1,234 soldiers. It lasted 48% longer. The fleet of J. R. R. "
        "Tolkien sailed 30 km in the 16th century."
    )
    assert answers(text, kind="date") == {"20 May 1498", "1798", "16th century"}
    assert answers(text, kind="number") == {"$2.5 million", "1,234 soldiers", "48%", "30 km"}
    found = answers(text, kind="entity")
    assert {"Vasco da Gama", "Battle of the Nile", "Horatio Nelson", "J. R. R. Tolkien"} <= found
    assert not found & {"However", "Meanwhile", "The", "It", "Dr", "The fleet"}


def test_a_capital_at_the_start_of_a_sentence_is_no_name() -> None:
    text = "Whales swim in the sea. Oceans are deep. Many whales swim. The oceans are cold. Whales eat. Oceans warm."
    assert answers(text, kind="entity") == set()


def test_names_do_not_cross_sentences() -> None:
    assert answers("They met in Paris Texas. Rome Georgia was next. Then in Oslo Norway.") >= {"Paris Texas"}
    assert not [a for a in answers("They met Anna Berg. Carl Holm was late, and Carl Holm left.") if "Berg. Carl" in a]


def test_single_words_need_to_stand_alone_and_twice() -> None:
    text = "We saw Plutarch there, and Plutarch wrote. We met Alan Turing, then Alan Kay, Alan Perlis, and once Alan."
    found = answers(text, text.replace("wrote", "spoke"), kind="entity")
    assert "Plutarch" in found and "Alan Turing" in found and "Alan" not in found


def test_every_passage_that_contains_the_answer_is_given() -> None:
    seeds = extract_seeds(
        corpus(
            "In 1833 Ada Lovelace met Charles Babbage in London.",
            "Ada Lovelace's notes were printed; Babbage read them.",
            "The late Lady Ada Lovelace King was a countess.",
            "Ada Lovelacey is somebody else, as is adalovelace.",
        )
    )
    assert next(s for s in seeds if s.answer == "Ada Lovelace").passage_ids == ("p0", "p1", "p2")


def test_what_occurs_everywhere_is_too_general() -> None:
    texts = [f"The city of New York has house {i}." for i in range(25)]
    assert "New York" not in {s.answer for s in extract_seeds(corpus(*texts))}
    assert "New York" in {s.answer for s in extract_seeds(corpus(*texts), max_passages=25)}


def test_extraction_is_deterministic_and_any_prefix_is_a_sample() -> None:
    texts = [f"In {1800 + i} Mr. Carl Number{i} met Eva Holm." for i in range(20)]
    seeds = extract_seeds(corpus(*texts))
    assert seeds == extract_seeds(corpus(*texts)) and len({s.id for s in seeds}) == len(seeds)
    assert extract_seeds(corpus(*texts), limit=7) == seeds[:7]
    assert {s.type for s in seeds[:15]} == {"date", "entity"}


def test_seeds_of_the_embedded_corpus_are_many_and_of_all_kinds(tmp_path: Path) -> None:
    section = CorpusSection(cache=str(tmp_path))
    text = embedded_corpus()
    seeds = load_seeds(section, text)
    kinds = [seed.type for seed in seeds]
    assert min(kinds.count(kind) for kind in ("entity", "date", "number")) > 500
    assert all(1 <= len(s.passage_ids) <= 20 for s in seeds)
    assert {"Malala Yousafzai", "Hafizullah Amin", "Charles Babbage"} <= {s.answer for s in seeds}
    assert not {"However", "The", "He", "In", "American"} & {s.answer for s in seeds}
    assert load_seeds(section, text) == seeds and len(list((tmp_path / "seeds").glob("*.jsonl"))) == 1


# ------------------------------------------------------------------------------------------------------------ files


def seed_file(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_a_seed_file_is_read(tmp_path: Path) -> None:
    row = {"answer": "Latin", "type": "entity", "source": "x", "passage_ids": ["p1", "p2"]}
    latin, date = read_seeds(seed_file(tmp_path / "s.jsonl", row, {"answer": "1603", "type": "date", "hops": 2}))
    assert latin == SeedAnswer(id=latin.id, answer="Latin", type="entity", passage_ids=("p1", "p2"), hops=1)
    assert (date.type, date.hops) == ("date", 2)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"answer": ""}, "answer: is empty"),
        ({"answer": ["Latin"]}, "answer: must be a string"),
        ({"type": "entity"}, "answer: missing"),
        ({"answer": "x", "type": "place"}, "type: must be one of entity, date, number"),
        ({"answer": "x", "hops": "2"}, "hops: must be a number"),
        ({"answer": "x", "passage_ids": "p1"}, "passage_ids: must be a list of strings"),
        ({"answer": "Greek"}, "second time"),
        ("[", "not valid JSON"),
    ],
)
def test_bad_seeds_are_named(tmp_path: Path, bad: Any, reason: str) -> None:
    path = seed_file(tmp_path / "s.jsonl", {"answer": "Greek"}, bad)
    with pytest.raises(DataError) as caught:
        read_seeds(path)
    assert str(caught.value).startswith(f"{path}:2: ") and reason in str(caught.value)
    assert [s.answer for s in read_seeds(path, skip_bad=True)] == ["Greek"]


@pytest.mark.skipif(not DATA.is_dir(), reason="shared data absent")
def test_the_shared_seeds_are_read_whole() -> None:
    section = CorpusSection(path=str(DATA / "passages.jsonl"), seeds=str(DATA / "seed_answers.jsonl"))
    seeds = load_seeds(section, corpus("unused"))
    assert len(seeds) == 2555 and sum(s.type == "date" for s in seeds) == 383
