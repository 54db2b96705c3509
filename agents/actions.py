"""From sampled text to a typed action.

Only the text that the policy sampled in this turn is read: an example in the prompt, a tag inside a retrieved passage
or an answer in an earlier turn can never count as an action of this one.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

from sesa.types import Action, Answer, Ask, Invalid, Search

Tag = Literal["search", "answer", "question"]
TAGS: tuple[Tag, ...] = get_args(Tag)
_TAG = re.compile(r"<(/?)(search|answer|question)>")

# A reply ends at the first closing tag, whatever the model would write after it (an invented observation, say).
STOP: tuple[str, ...] = tuple(f"</{tag}>" for tag in TAGS)
CUT_OFF = "The reply was cut off by the token limit"


def parse_action(text: str, finish_reason: str, final: Literal["answer", "question"]) -> Action:
    """The first action in ``text``; Invalid, with a reason fit to be shown, where there is none.

    ``final`` is the action that ends this role's rollout; the other role's is not accepted. A turn that ended of its
    own accord may leave its last tag open (small models do): the action then ends with its line. One that was cut off
    by the token limit may not.
    """
    opened: re.Match[str] | None = None
    openings = 0
    for tag in _TAG.finditer(text):
        if tag[1]:  # the reply ends here, whatever stands behind it
            return _closed(text, opened, tag, final)
        opened, openings = tag, openings + 1
    if finish_reason == "length":
        return Invalid(reason=CUT_OFF)
    if opened is None:
        return Invalid(reason="No action was found")
    if openings > 1:
        return Invalid(reason=f"<{opened[2]}> was not closed")
    return _action(opened[2], text[opened.end() :].lstrip().partition("\n")[0], final)


def _closed(text: str, opened: re.Match[str] | None, closing: re.Match[str], final: str) -> Action:
    if opened is None:
        return Invalid(reason=f"</{closing[2]}> closed nothing")
    if opened[2] != closing[2]:
        return Invalid(reason=f"<{opened[2]}> was not closed")
    return _action(opened[2], text[opened.end() : closing.start()], final)


def _action(tag: str, content: str, final: str) -> Action:
    content = " ".join(content.split())
    if tag not in ("search", final):
        return Invalid(reason=f"<{tag}> is not an action here")
    if not content:
        return Invalid(reason=f"<{tag}> was empty")
    if tag == "search":
        return Search(query=content)
    return Answer(text=content) if tag == "answer" else Ask(question=content)
