"""What an episode continues when its model's template writes earlier turns anew, and when tokens drift."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.config import SamplingConfig
from streamrl.errors import AgentError
from streamrl.rollout.agents.messages import ChatRequest, Message
from streamrl.rollout.agents.model_renderer import renderer_of
from streamrl.rollout.agents.workflow import Episode, EpisodeScore, Score
from streamrl.rollout.chat import ChatTokenizer
from streamrl.types import Generation, Prompt
from tests.rollout.qwen import make_qwen

CHAT = make_qwen()
ASKED = Message("user", "What is 2 + 2?")
SURE = Message("user", "sure?")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Writes every message as it stands, wherever it is."""


class Scripted:
    """A session whose policy says the given tokens one after another."""

    def __init__(self, *said: list[int]) -> None:
        self.prompt = Prompt(seq=0, index=0, epoch=0, messages=[], input_ids=[1], answer=None, metadata={})
        self.sibling = 0
        self.episode = "0-0"
        self.chat: ChatTokenizer = CHAT
        self.sampling = SamplingConfig(max_new_tokens=50)
        self.max_context = 400
        self._said = iter(said)

    async def generate(self, input_ids: list[int], **_: Any) -> Generation:
        ids = next(self._said)
        return Generation(ids, [-0.5] * len(ids), [0] * len(ids), "stop", None, 0)


async def played(name: str, *said: list[int]) -> Episode:
    """An episode in which the user is never sure."""
    session: Any = Scripted(*said)
    episode = Episode(session, renderer_of(CHAT, name=name), max_calls=10)
    messages: list[Message] = []
    for question in (ASKED, *[SURE] * (len(said) - 1)):
        messages.append(question)
        (answer,) = await episode.complete(ChatRequest(messages=tuple(messages)), call=f"id{len(messages)}")
        messages.append(Message("assistant", answer.message.content))  # clients leave the reasoning out
        episode.delivered([answer])
    return episode


DRIFTED = [*CHAT.encode("ad"), *CHAT.encode("d"), *CHAT.encode("<|im_end|>")]
"""Not how the tokenizer writes it."""


async def test_who_names_an_answer_has_it_though_its_delivery_was_not_seen() -> None:
    session: Any = Scripted(CHAT.encode("4<|im_end|>"), CHAT.encode("so 4<|im_end|>"))
    episode = Episode(session, renderer_of(CHAT, name="template"), max_calls=10)
    for call in ("known", "unknown"):
        await episode.complete(ChatRequest(messages=(ASKED,)), call=call)
    with pytest.raises(AgentError, match="'0' names none of the 0 answers"):
        episode.earned(Score(1.0, {"0": 0.5}))
    earned = episode.earned(Score(1.0, {"chatcmpl-known": 0.5}))
    (found,) = episode.trajectories(earned, discount=1.0)
    assert (found.reward, found.input_ids[found.loss_mask].tolist()) == (1.5, CHAT.encode("4<|im_end|>"))


async def test_a_conversation_that_ends_with_the_policys_own_answer_goes_on_from_its_tokens() -> None:
    session: Any = Scripted(CHAT.encode("4<|im_end|>"), CHAT.encode("so 4<|im_end|>"))
    chat = make_qwen(CHATML)
    episode = Episode(session, renderer_of(chat, name="template"), max_calls=10)
    (first,) = await episode.complete(ChatRequest((ASKED,)), call="first")
    (second,) = await episode.complete(ChatRequest((ASKED, Message("assistant", "4"))), call="second")
    assert second.prompt_ids[: len(first.prompt_ids) + 2] == (*first.prompt_ids, *first.output_ids)
    episode.delivered([first, second])
    assert (episode.conversations, episode.rewritten, episode.rerendered) == (1, 0, 0)


@pytest.mark.parametrize("name", ["qwen3", "template"])
@pytest.mark.parametrize(
    ("said", "conversations", "rerendered", "drifted"),
    [
        ("4<|im_end|>", 1, 0, 0),
        ("<think>\nTwo.\n</think>\n\n4<|im_end|>", 2, 1, 0),
        (DRIFTED, {"qwen3": 2, "template": 1}, {"qwen3": 1, "template": 0}, 1),
    ],
)
async def test_a_conversation_goes_on_where_the_template_leaves_it_as_it_was(
    name: str, said: Any, conversations: Any, rerendered: Any, drifted: int
) -> None:
    tokens = CHAT.encode(said) if isinstance(said, str) else said
    episode = await played(name, tokens, CHAT.encode("so 4<|im_end|>"))

    def for_this(value: Any) -> int:
        return value[name] if isinstance(value, dict) else value

    found = episode.trajectories(EpisodeScore(Score(1.0), []), discount=1.0)
    assert len(found) == episode.conversations == for_this(conversations)
    assert episode.rerendered == for_this(rerendered)
    assert (episode.drifted, episode.rewritten) == (drifted, 0)
    sampled = [int(token) for one in found for token in one.input_ids[one.loss_mask]]
    assert sampled == [*tokens, *CHAT.encode("so 4<|im_end|>")]
    text = CHAT.tokenizer.decode(found[-1].input_ids.tolist(), skip_special_tokens=False)
    assert ("Two." in text) == (for_this(conversations) == 1 and "Two." in CHAT.decode(tokens))
