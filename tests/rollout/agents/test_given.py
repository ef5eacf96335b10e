"""A conversation whose last message is the beginning of the policy's answer."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from streamrl.rollout.agents.messages import ChatRequest, Message, MessagePiece, RequestRefused
from streamrl.rollout.agents.model_renderer import renderer_of
from streamrl.rollout.agents.protocols import anthropic, chat
from streamrl.rollout.agents.workflow import Episode, EpisodeScore, Score
from streamrl.types import Generation
from tests.rollout.agents.test_drift import ASKED, CHAT, SURE, Scripted

GIVEN = "The sum is"
QUESTION = {"role": "user", "content": "What is 2 + 2?"}
BEGUN: list[dict[str, Any]] = [QUESTION, {"role": "assistant", "content": GIVEN}]
CONTINUE = {"continue_final_message": True}


class Streaming(Scripted):
    """Tells its tokens one by one."""

    async def generate(self, input_ids: list[int], **more: Any) -> Generation:
        found = await super().generate(input_ids)
        for token in found.output_ids:
            more["on_tokens"]([token])
        ended = found.output_ids[-1:] == CHAT.encode("<|im_end|>")
        return msgspec.structs.replace(found, finish_reason="stop" if ended else "length")


@pytest.mark.parametrize(
    ("api", "more"), [(anthropic, {}), (chat, CONTINUE), (chat, {**CONTINUE, "add_generation_prompt": False})]
)
def test_the_beginning_of_an_answer_is_no_message_of_the_conversation(api: Any, more: dict[str, Any]) -> None:
    request = api.parse(json.dumps({"messages": BEGUN, "max_tokens": 9, **more}).encode()).request
    assert request == ChatRequest((Message("user", "What is 2 + 2?"),), given=GIVEN, max_tokens=9)


@pytest.mark.parametrize(
    ("api", "messages", "more", "words"),
    [
        (anthropic, [QUESTION, {"role": "assistant", "content": "Sum: "}], {}, "messages[1]: the text to continue"),
        (anthropic, BEGUN[1:], {}, "after other messages"),
        (
            anthropic,
            [QUESTION, {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "add"}]}],
            {},
            "messages[1]: the policy can only continue the text",
        ),
        (chat, BEGUN[:1], CONTINUE, "messages[0]: the policy can only continue the text"),
        (chat, BEGUN, {**CONTINUE, "add_generation_prompt": True}, "add_generation_prompt"),
        (chat, BEGUN, {"add_generation_prompt": False}, "add_generation_prompt"),
    ],
)
def test_what_cannot_be_gone_on_from_is_refused_by_name(
    api: Any, messages: Any, more: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestRefused) as refused:
        api.parse(json.dumps({"messages": messages, "max_tokens": 9, **more}).encode())
    assert words in str(refused.value)


@pytest.mark.parametrize("name", ["qwen3", "template"])
async def test_the_policy_goes_on_from_a_given_text_and_the_conversation_after_it(name: str) -> None:
    session: Any = Streaming(CHAT.encode(" 4<|im_end|>"), CHAT.encode("so 4<|im_end|>"))
    episode = Episode(session, renderer_of(CHAT, name=name), max_calls=10)
    pieces: list[MessagePiece] = []
    asked = ChatRequest((ASKED,), given=GIVEN)
    (first,) = await episode.complete(asked, call="first", on_piece=pieces.append)
    assert first.message.content == " 4"
    assert " 4".startswith("".join(piece.content for piece in pieces))
    text = CHAT.tokenizer.decode(list(first.prompt_ids), skip_special_tokens=False)
    assert text.endswith(f"<|im_start|>assistant\n{GIVEN}")
    further = ChatRequest((ASKED, Message("assistant", f"{GIVEN} 4"), SURE))
    (second,) = await episode.complete(further, call="second", on_piece=pieces.append)
    assert second.prompt_ids[: len(first.prompt_ids) + len(first.output_ids)] == (*first.prompt_ids, *first.output_ids)
    episode.delivered([first, second])
    (found,) = episode.trajectories(EpisodeScore(Score(1.0), []), discount=1.0)
    assert found.input_ids[found.loss_mask].tolist() == [*first.output_ids, *second.output_ids]
    assert (found.turns, episode.rewritten) == (2, 0)


@pytest.mark.parametrize("name", ["qwen3", "template"])
@pytest.mark.parametrize(
    ("cut", "given"),
    [
        ([*CHAT.encode("ad"), *CHAT.encode("d")], "add"),  # not how the tokenizer writes it
        (CHAT.encode("<think>\nTwo.\n</think>\n\nThe sum "), "The sum"),
    ],
    ids=["drifted", "reasoning and a space"],
)
async def test_an_answer_that_was_cut_off_goes_on_from_the_tokens_that_were_sampled(
    name: str, cut: list[int], given: str
) -> None:
    session: Any = Streaming(cut, CHAT.encode("is"), CHAT.encode(" 4<|im_end|>"))
    episode = Episode(session, renderer_of(CHAT, name=name), max_calls=10)
    pieces: list[MessagePiece] = []
    (first,) = await episode.complete(ChatRequest((ASKED,)), call="first", on_piece=pieces.append)
    answers, so_far = [first], given
    for call in ("second", "third"):
        pieces.clear()
        asked = ChatRequest((ASKED,), given=so_far)
        (answer,) = await episode.complete(asked, call=call, on_piece=pieces.append)
        assert answer.prompt_ids == (*answers[-1].prompt_ids, *answers[-1].output_ids)
        assert answer.message.content.startswith("".join(piece.content for piece in pieces))
        assert (answer.message.reasoning, [piece.reasoning for piece in pieces if piece.reasoning]) == ("", [])
        answers.append(answer)
        so_far += answer.message.content
    assert so_far.replace(" ", "") == given.replace(" ", "") + "is4"
    episode.delivered(answers)
    (found,) = episode.trajectories(EpisodeScore(Score(1.0), []), discount=1.0)
    assert found.input_ids[found.loss_mask].tolist() == [token for answer in answers for token in answer.output_ids]
    assert (found.turns, episode.rewritten, episode.rerendered) == (3, 0, 0)
