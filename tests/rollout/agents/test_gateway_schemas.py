"""What the gateway writes is valid by the types of the official clients, which do not check it themselves."""

import json
from typing import Any, get_args

import aiohttp
import anthropic.types as anthropics
import openai.types as openais
import openai.types.chat as chats
import openai.types.responses as responses
import pytest

PARAMETERS: Any = {"type": "object"}
FUNCTION: Any = {"name": "add", "parameters": PARAMETERS}
ASKED: Any = [{"role": "user", "content": "hello"}]
REQUESTS: dict[str, Any] = {
    "/v1/chat/completions": {"messages": ASKED, "tools": [{"type": "function", "function": FUNCTION}]}
    | {"logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}},
    "/v1/completions": {"prompt": "hello", "logprobs": 2},
    "/v1/messages": {"messages": ASKED, "max_tokens": 5, "tools": [{"name": "add", "input_schema": PARAMETERS}]},
    "/v1/responses": {"input": "hello", "tools": [{"type": "function", "strict": None, **FUNCTION}]}
    | {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
}


def check_event(event, found):
    """Check an event by its type, or by the one of several types whose `type` it has."""
    if not isinstance(event, type):
        (event,) = (kind for kind in get_args(get_args(event)[0]) if found["type"] in literals(kind))
    event.model_validate(found)


def literals(kind):
    return get_args(kind.model_fields["type"].annotation)


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
@pytest.mark.parametrize(
    ("path", "whole", "event"),
    [
        ("/v1/chat/completions", chats.ChatCompletion, chats.ChatCompletionChunk),
        ("/v1/completions", openais.Completion, openais.Completion),
        ("/v1/messages", anthropics.Message, anthropics.RawMessageStreamEvent),
        ("/v1/responses", responses.Response, responses.ResponseStreamEvent),
    ],
)
async def test_bodies_and_events(served, path, whole, event, finish_reason):
    served.episode.reasoning = "hm"
    served.episode.finish_reason = finish_reason
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer secret"}) as session:
        body = {"model": "policy", **REQUESTS[path]}
        for with_tools in (True, False):
            asked = body if with_tools else {name: value for name, value in body.items() if name != "tools"}
            async with session.post(served.url + path, json=asked) as answer:
                whole.model_validate_json(await answer.read())
            async with session.post(served.url + path, json={**asked, "stream": True}) as answer:
                lines = (await answer.text()).splitlines()
            data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
            for found in data[:-1] if data[-1] == "[DONE]" else data:
                check_event(event, json.loads(found))
    async with (
        aiohttp.ClientSession(headers={"Authorization": "Bearer secret"}) as session,
        session.get(served.url + "/v1/models") as answer,
    ):
        [openais.Model.model_validate(model) for model in (await answer.json())["data"]]
