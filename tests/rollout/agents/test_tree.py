"""Whatever an agent does with its conversations, each sampled token is trained on exactly once, as it was sampled."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.rollout.agents.messages import Message
from streamrl.rollout.agents.tree import EpisodeTree, PolicyCall
from streamrl.types import NO_VERSION, Generation, Trajectory

TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str, **fields: object) -> Message:
    return Message(role="assistant", content=text, **fields)  # type: ignore[arg-type]


class Episode:
    """An agent's side: asks, gets answers that are all different, and renders anew what continues nothing."""

    def __init__(self) -> None:
        self.tree = EpisodeTree()
        self.sampled: list[tuple[int, float, int]] = []
        self._next = 1000

    def ask(self, messages: list[Message], *, tokens: int = 2, tools: tuple[dict[str, object], ...] = ()) -> Message:
        parent, used = self.tree.find(messages, tools)
        before = () if parent is None else parent.token_ids
        prompt = (*before, *(len(message.content) for message in messages[used:]), 7)
        ids = list(range(self._next, self._next + tokens))
        self._next += tokens
        logprobs, versions = [-i / 1024 for i in ids], [i % 5 for i in ids]
        self.sampled += zip(ids, logprobs, versions, strict=True)
        reply = assistant(f"answer {ids[0]}")
        generation = Generation(ids, logprobs, versions, "stop", None, 0)
        self.tree.add(PolicyCall(parent, prompt, generation), messages=messages, reply=reply, tools=tools)
        return reply


def trajectories(tree: EpisodeTree, reward: float) -> list[Trajectory]:
    """Those of an episode of which every call has the same return."""
    return tree.trajectories([reward] * len(tree.calls))


@settings(deadline=None)
@given(st.data())
def test_every_sampled_token_is_trained_on_once_with_its_own_logprob_and_version(data: st.DataObject) -> None:
    episode = Episode()
    conversations: list[list[Message]] = []
    for step in range(data.draw(st.integers(1, 12), label="calls")):
        kind = data.draw(st.sampled_from(["new", "continue", "continue", "again", "edit"]), label="kind")
        if kind == "new" or not conversations:
            messages = [user(f"question {step}")]
        else:
            earlier = data.draw(st.sampled_from(conversations), label="conversation")
            if kind == "again":  # the same request once more: another sample of the same answer
                messages = earlier[:-1]
            elif kind == "edit":
                messages = [user("a summary of what was said"), *earlier[1:], user("go on")]
            else:
                messages = [*earlier, user(f"then {step}")]
        reply = episode.ask(messages, tokens=data.draw(st.integers(1, 4), label="tokens"))
        conversations.append([*messages, reply])

    trained: Counter[tuple[int, float, int]] = Counter()
    for trajectory in trajectories(episode.tree, 1.0):
        mask = trajectory.loss_mask
        assert mask.any()
        assert not mask[0]
        assert (trajectory.policy_versions[~mask] == NO_VERSION).all()
        assert (trajectory.behavior_logprobs[~mask] == 0).all()
        values = (trajectory.input_ids, trajectory.behavior_logprobs, trajectory.policy_versions)
        trained.update(zip(*(value[mask].tolist() for value in values), strict=True))
    assert trained == Counter(episode.sampled)
    assert sum(t.turns for t in trajectories(episode.tree, 1.0)) == len(episode.tree.calls)


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
