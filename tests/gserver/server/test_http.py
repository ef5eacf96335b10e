"""/generate and what surrounds it, over real HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
import torch

from streamrl.transport.generation import GenerateReply
from tests.gserver.serving import Client, serving
from tests.gserver.tiny import CHARACTERS, VOCABULARY, make_model, prompt, response_logprobs, save

TEN = {"max_new_tokens": 10, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model(), tmp_path_factory.mktemp("model"))


async def test_one_prompt(folder: Path) -> None:
    async with serving(folder) as client:
        body = {
            "rid": "mine",
            "input_ids": prompt(12),
            "sampling_params": TEN,
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
        }
        answer = await client.post("/generate", body)
    reply = msgspec.convert(answer, GenerateReply)
    meta = reply.meta_info
    assert meta.id == "mine"
    assert (meta.prompt_tokens, meta.completion_tokens) == (12, 10)
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 10}
    assert answer["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 10}]
    assert meta.output_token_logprobs is not None
    assert [token for _, token, _ in meta.output_token_logprobs] == reply.output_ids
    expected = response_logprobs(make_model(), prompt(12), reply.output_ids)
    given = torch.tensor([logprob for logprob, _, _ in meta.output_token_logprobs])
    assert torch.allclose(given, expected, atol=1e-4)
    assert meta.input_token_logprobs is not None
    assert [token for _, token, _ in meta.input_token_logprobs] == prompt(12)
    assert meta.input_token_logprobs[0][0] is None
    assert meta.output_top_logprobs is not None
    assert [len(pairs or []) for pairs in meta.output_top_logprobs] == [2] * 10
    assert reply.text == "".join((CHARACTERS + "\0")[token] for token in reply.output_ids).replace("\0", "")


async def test_text_is_tokenized_and_stop_tokens_leave_the_text(folder: Path) -> None:
    async with serving(folder) as client:
        seeded = {"sampling_seed": 4, "max_new_tokens": 30, "ignore_eos": True}
        whole = await client.post("/generate", {"text": "hello, 42", "sampling_params": seeded})
        stop = whole["output_ids"][20]
        where = whole["output_ids"].index(stop)
        params = {**seeded, "stop_token_ids": [stop]}
        by_token = await client.post("/generate", {"text": "hello, 42", "sampling_params": params})
        params = {**seeded, "stop": whole["text"][15:18]}
        by_text = await client.post("/generate", {"text": "hello, 42", "sampling_params": params})
    assert whole["meta_info"]["prompt_tokens"] == 9
    assert by_token["output_ids"] == whole["output_ids"][: where + 1]
    assert whole["text"].startswith(by_token["text"])
    assert by_token["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert by_text["text"] == whole["text"][: whole["text"].index(whole["text"][15:18])]


async def test_batches_and_siblings(folder: Path) -> None:
    async with serving(folder) as client:
        body = {
            "input_ids": [prompt(5), prompt(9)],
            "sampling_params": [{**TEN, "n": 3}, {"max_new_tokens": 4, "ignore_eos": True}],
            "rid": "batch",
        }
        several = await client.post("/generate", body)
        one = await client.post("/generate", {"input_ids": [prompt(5)], "sampling_params": TEN})
        seeded = {**TEN, "n": 4, "sampling_seed": 7}
        siblings = await client.post("/generate", {"input_ids": prompt(5), "sampling_params": seeded})
        again = await client.post("/generate", {"input_ids": prompt(5), "sampling_params": seeded})
    assert [len(reply["output_ids"]) for reply in several] == [10, 10, 10, 4]
    assert len({reply["meta_info"]["id"] for reply in several}) == 4
    assert isinstance(one, list)
    assert len({tuple(reply["output_ids"]) for reply in siblings}) == 4
    assert [reply["output_ids"] for reply in siblings] == [reply["output_ids"] for reply in again]


async def test_streams_are_cumulative(folder: Path) -> None:
    async with serving(folder) as client:
        seeded = {"sampling_seed": 4, "max_new_tokens": 60, "ignore_eos": True}
        whole = await client.post("/generate", {"input_ids": prompt(6), "sampling_params": seeded})
        stop = whole["text"][40:44]
        body = {
            "input_ids": prompt(6),
            "sampling_params": {**seeded, "stop": stop},
            "return_logprob": True,
        }
        events = [event async for event in client.events(body)]
    assert events.pop() is None
    texts = [event["text"] for event in events]
    expected = whole["text"][: whole["text"].index(stop)]
    assert texts[-1] == expected
    assert all(expected.startswith(text) for text in texts)
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    lengths = [len(event["output_ids"]) for event in events]
    assert lengths == sorted(lengths)
    assert len(events[-1]["meta_info"]["output_token_logprobs"]) == lengths[-1]


async def test_information(folder: Path) -> None:
    async with serving(folder) as client:
        assert await client.get("/health") is None
        assert await client.get("/health_generate") is None
        for path in ("/model_info", "/get_model_info"):
            assert await client.get(path) == {"model_path": str(folder), "weight_version": "default"}
        info = await client.get("/server_info")
        assert info["engine"] == "embedded"
        assert info["staged_weight_update"] is True
        assert info["context_length"] == 1024
        assert info["stats"]["requests_total"] == 1
        assert info["stats"]["running"] == 0


OK = {"input_ids": [1, 2, 3]}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "either text or input_ids"),
        ({"text": "a", "input_ids": [1]}, "either text or input_ids"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": [[1], []]}, "empty"),
        ({"text": ""}, "empty"),
        ({"text": "ÄÖ"}, "cannot be tokenized"),
        ({"input_ids": [VOCABULARY]}, f"token id {VOCABULARY} is outside the vocabulary"),
        ({"input_ids": [-1]}, "token id -1"),
        ({"input_ids": ["a"]}, "not a generate request"),
        ({"input_ids": [1.5]}, "not a generate request"),
        ({"input_ids": [1, [2]]}, "token ids or lists of them, not both"),
        ({"input_ids": [[1], 2]}, "token ids or lists of them, not both"),
        ({"input_ids": [1] * 1024}, "exceed the context of 1024"),
        ({**OK, "sampling_params": {"max_new_tokens": 1022}}, "exceed the context of 1024"),
        ({**OK, "sampling_params": {"temperature": -1}}, "temperature must be at least 0"),
        ({**OK, "sampling_params": {"temperature": "hot"}}, "sampling_params"),
        ({**OK, "sampling_params": {"top_p": 0}}, "top_p"),
        ({**OK, "sampling_params": {"top_p": 1.1}}, "top_p"),
        ({**OK, "sampling_params": {"top_k": 0}}, "top_k"),
        ({**OK, "sampling_params": {"min_p": 2}}, "min_p"),
        ({**OK, "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({**OK, "sampling_params": {"max_new_tokens": 4, "min_new_tokens": 5}}, "min_new_tokens"),
        ({**OK, "sampling_params": {"n": 0}}, "n must be at least 1"),
        ({**OK, "sampling_params": {"n": 5000}}, "several requests"),
        ({**OK, "sampling_params": {"stop": ["a", ""]}}, "empty string"),
        ({**OK, "sampling_params": {"stop_token_ids": [999]}}, "stop_token_ids"),
        ({**OK, "sampling_params": {"json_schema": "{}"}}, "json_schema"),
        ({**OK, "sampling_params": {"repetition_penalty": 1.2}}, "repetition_penalty"),
        ({**OK, "sampling_params": [TEN, TEN]}, "2 sampling_params for 1 prompts"),
        ({**OK, "image_data": "x.png"}, "image_data"),
        ({**OK, "return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
        ({**OK, "logprob_start_len": -2}, "logprob_start_len"),
        ({**OK, "rid": ["a", "b"]}, "rid"),
        ({"input_ids": [[1], [2]], "rid": ["a", "a-1"], "sampling_params": {"n": 2}}, "rid a-1"),
        ({**OK, "lora_path": "an adapter"}, "lora_path: a request here has the adapter that is served"),
        ([1, 2], "JSON object"),
        ("text", "JSON object"),
    ],
)
async def test_bad_requests_say_what_to_do(body: Any, said: str, shared: Client) -> None:
    answer = await shared.post("/generate", body, status=400)
    assert said in answer["error"]["message"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(folder: Path) -> Any:
    async with serving(folder) as client:
        yield client


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/pause_generation", {"mode": "sleep"}, "mode"),
        ("/abort_request", {}, "abort_all"),
        ("/begin_weight_update", [], "object"),
        ("/end_weight_update", {}, "begin_weight_update"),
        ("/destroy_weights_update_group", {"group_name": "x"}, "no weight group x"),
        ("/update_weights_from_disk", {"model_path": "/nowhere"}, "/nowhere"),
        ("/update_weight_version", {}, "new_version"),
        ("/weights_checker", {"action": "dance"}, "action"),
        ("/init_weights_update_group", {"group_name": "x"}, "master_address"),
    ],
)
async def test_bad_calls_say_what_to_do(path: str, body: Any, said: str, shared: Client) -> None:
    answer = await shared.post(path, body, status=400)
    assert said in answer["error"]["message"]


async def test_a_full_queue_answers_503(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.gserver.embedded.serving.MAX_QUEUED", 1)
    async with serving(folder, max_running=1) as client:
        await client.post("/pause_generation", {"mode": "in_place"})
        held = [asyncio.create_task(client.post("/generate", {**OK, "sampling_params": TEN})) for _ in range(2)]
        await client.until(queued=2)
        refused = await client.post("/generate", {**OK, "sampling_params": TEN}, status=503)
        assert "start more gservers" in refused["error"]["message"]
        refused = await client.post("/generate", {**OK, "sampling_params": {**TEN, "n": 2}}, status=503)
        await client.post("/continue_generation")
        assert [len(answer["output_ids"]) for answer in await asyncio.gather(*held)] == [10, 10]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_aborts_its_request(stream: bool, folder: Path) -> None:
    async with serving(folder, max_context=2048) as client:
        body = {**OK, "stream": stream, "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True, "n": 4}}
        async with aiohttp.ClientSession() as leaving:
            task = asyncio.create_task(leaving.post(client.url + "/generate", json=body))
            await client.until(running=4)
            if stream:
                response = await task
                await response.content.readline()
                response.close()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await client.until(running=0, queued=0)
        assert client.engine.stats()["tokens_generated_total"] < 4 * 2000
        await client.post("/generate", {**OK, "sampling_params": TEN})


async def test_aborts_by_name_and_all(folder: Path) -> None:
    async with serving(folder, max_context=2048) as client:
        long = {"max_new_tokens": 2000, "ignore_eos": True}
        tasks = [
            asyncio.create_task(
                client.post(
                    "/generate", {**OK, "rid": rid, "sampling_params": {**long, "n": n}, "return_logprob": True}
                )
            )
            for rid, n in (("a", 1), ("b", 2), ("c", 1))
        ]
        await client.until(running=4)
        again = await client.post("/generate", {**OK, "rid": "a"}, status=400)
        assert "rid a" in again["error"]["message"]
        for rid, n in (("b-1", 1), ("b", 3)):
            body: dict[str, Any] = {**OK, "rid": rid, "sampling_params": {**TEN, "n": n}}
            assert "rid b" in (await client.post("/generate", body, status=400))["error"]["message"]
        own = await client.post("/generate", {**OK, "rid": "a-0", "sampling_params": {**TEN, "n": 2}})
        assert [answer["meta_info"]["id"] for answer in own] == ["a-0-0", "a-0-1"]
        await client.post("/abort_request", {"rid": "nobody"})
        await client.post("/abort_request", {"rid": "b"})
        siblings = await tasks[1]
        assert not tasks[0].done()
        await client.post("/abort_request", {"abort_all": True})
        answers = [await tasks[0], *siblings, await tasks[2]]
    for answer in answers:
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        count = answer["meta_info"]["completion_tokens"]
        assert count == len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"]) < 2000


async def test_a_failed_step_answers_500(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(folder) as client:
        engine: Any = client.engine
        with monkeypatch.context() as patch:
            patch.setattr(engine._scheduler._model, "decode", lambda *_, **__: 1 / 0)
            answer = await client.post("/generate", {**OK, "sampling_params": TEN}, status=500)
            assert "ZeroDivisionError" in answer["error"]["message"]
            events = [event async for event in client.events({**OK, "sampling_params": TEN})]
            assert "ZeroDivisionError" in events[-2]["error"]["message"]
        await client.post("/generate", {**OK, "sampling_params": TEN})
