"""Which call a request continues; what is trained on is in test_exactly_once.py and test_returns.py."""

from __future__ import annotations

import pytest

from streamrl.rollout.agents.messages import Message
from streamrl.rollout.agents.tree import EpisodeTree, PolicyCall
from streamrl.types import Generation

TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str, **fields: object) -> Message:
    return Message(role="assistant", content=text, **fields)  # type: ignore[arg-type]


def test_of_two_answers_with_the_same_text_the_one_with_the_reasoning_sent_back_or_the_newest_is_continued() -> None:
    tree = EpisodeTree()
    messages = [user("hello")]
    calls = {}
    for token, thought in enumerate(("first", "second", "third")):
        generation = Generation([token], [-0.5], [0], "stop", None, 0)
        calls[thought] = PolicyCall(None, (9,), generation)
        reply = assistant("answer", reasoning=thought)
        tree.add(calls[thought], messages=messages, reply=reply, tools=[])
    for thought, chosen in (("first", "first"), (" second\n", "second"), ("", "third"), ("edited", "third")):
        sent_back = assistant("answer", reasoning=thought)
        assert tree.find([*messages, sent_back, user("go on")], []) == (calls[chosen], 2)
    tree.drop_leaf(calls["third"])  # the client has not received it
    assert tree.find([*messages, assistant("answer"), user("go on")], []) == (calls["second"], 2)


@pytest.mark.parametrize(
    "other",
    [
        [user("hello"), assistant("another answer"), user("go on")],
        [user("hallo"), assistant("answer"), user("go on")],
        [Message(role="system", content="be brief"), user("hello"), assistant("answer"), user("go on")],
        [user("hello")],
    ],
)
def test_another_history_continues_nothing(other: list[Message]) -> None:
    tree = EpisodeTree()
    made = PolicyCall(None, (1,), Generation([2], [-0.5], [0], "stop", None, 0))
    tree.add(made, messages=[user("hello")], reply=assistant("answer"), tools=[])
    assert tree.find([user("hello"), assistant("answer"), user("go on")], []) == (made, 2)
    assert tree.find(other, []) == (None, 0)
    assert tree.find([user("hello"), assistant("answer"), user("go on")], [TOOL]) == (None, 0)
