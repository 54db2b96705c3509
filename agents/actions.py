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
    """The first complete action in ``text``; Invalid, with a reason fit to be shown, where there is none.

    An action lies between the first closing tag and the opening tag right before it, so that the same action is read
    whether or not a server went on after a STOP string. ``final`` is the action that ends this role's rollout; the
    other role's is not accepted. Takes time linear in the text.
    """
    opened: re.Match[str] | None = None
    for found in _TAG.finditer(text):
        if not found.group(1):
            opened = found
        elif opened is None:
            return Invalid(reason=f"</{found.group(2)}> closed nothing")
        elif opened.group(2) != found.group(2):
            return Invalid(reason=f"<{opened.group(2)}> was not closed")
        else:
            return _action(opened.group(2), " ".join(text[opened.end() : found.start()].split()), final)
    if finish_reason == "length":
        return Invalid(reason=CUT_OFF)
    return Invalid(reason=f"<{opened.group(2)}> was not closed" if opened else "No action was found")


def _action(tag: str, content: str, final: Literal["answer", "question"]) -> Action:
    if tag not in ("search", final):
        return Invalid(reason=f"<{tag}> is not an action here")
    if not content:
        return Invalid(reason=f"<{tag}> was empty")
    if tag == "search":
        return Search(query=content)
    return Answer(text=content) if tag == "answer" else Ask(question=content)
