"""A response through updates, aborts and failures of gservers; where it ends; what the manager hears of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streamrl.config import SamplingConfig
from streamrl.errors import DeadlineExceeded, PeerError, StreamRLError, WireError
from streamrl.records.lineage import Lineage, LineageHistory
from streamrl.rollout import generation
from streamrl.rollout.generation import Endings, Generator, GroupRoute, InFlightReports, RequestCount, of_history
from streamrl.stop_strings import StopStrings
from streamrl.transport.control import InFlight, InFlightReply
from streamrl.transport.generation import MIXED_WEIGHTS, GenerateReply, GenerateRequest, GenerationClient
from streamrl.types import Generation
from tests.rollout.engine import Engine, Script, answer, failure, serving

PROMPT = [5, 6, 7]


class FixedRoutes:
    """Names gservers in turn, and none when they are used up; remembers which failed."""

    def __init__(self, *urls: str) -> None:
        self.urls = list(urls)
        self.failed: list[str] = []

    async def find_another(self, failed: str) -> str:
        self.failed.append(failed)
        return self.urls.pop(0) if self.urls else ""


@pytest.fixture
async def client() -> AsyncIterator[GenerationClient]:
    made = GenerationClient(timeout=30.0)
    yield made
    await made.close()


def make_generator(
    client: GenerationClient,
    *,
    patience: float,
    part: int,
    policy_version: Callable[[], int] = lambda: 0,
    named_adapters: bool = False,
    **sampling: Any,
) -> Generator:
    """For a model whose tokens are characters, and whose token 0 ends a response."""
    return Generator(
        client,
        sampling=SamplingConfig(**sampling),
        seed=1,
        patience=patience,
        tokens_per_request=part,
        decode=lambda tokens: "".join(map(chr, tokens)),
        eos_token_ids={0},
        policy_version=policy_version,
        named_adapters=named_adapters,
    )


async def generate(
    client: GenerationClient,
    gserver: str,
    *,
    budget: int = 8,
    routes: Any = None,
    patience: float = 20.0,
    part: int = 4096,
    **sampling: Any,
) -> Generation:
    generator = make_generator(client, patience=patience, part=part, **sampling)
    route = GroupRoute(gserver, find_another=(routes or FixedRoutes()).find_another)
    return await generator.generate(PROMPT, max_new_tokens=budget, rid="3.0.0", route=route)


def script(*answers: Any) -> Script:
    return lambda request, number: answers[number]


def prompts(engine: Engine) -> list[tuple[Any, int]]:
    return [(request.input_ids, request.sampling_params.max_new_tokens) for request in engine.requests]  # type: ignore[union-attr]


async def test_one_answer(client: GenerationClient) -> None:
    async with serving(script(answer([10, 11, 2], version="4", matched=2))) as engine:
        generation = await generate(client, engine.url, top_p=0.9, stop=["x"], temperature=0.5)
    assert generation == Generation(
        output_ids=[10, 11, 2],
        logprobs=[-0.10, -0.11, -0.02],
        versions=[4, 4, 4],
        finish_reason="stop",
        matched=2,
        interruptions=0,
    )
    params = engine.requests[0].sampling_params
    assert (params.top_p, params.stop, params.temperature, params.stop_token_ids) == (0.9, ["x"], 0.5, None)  # type: ignore[union-attr]
    assert engine.requests[0].return_logprob


async def test_versions_come_from_the_spans(client: GenerationClient) -> None:
    spans = [("3", 0, 2), ("4", 2, 2), ("5", 2, 3)]
    async with serving(script(answer([10, 11, 12], version="9", spans=spans, finish="length"))) as engine:
        generation = await generate(client, engine.url)
    assert generation.versions == [3, 3, 5]
    assert generation.finish_reason == "length"


async def test_a_cut_response_is_continued_from_its_own_tokens(client: GenerationClient) -> None:
    answers = [
        answer([10, 11], finish="abort", version="0"),
        answer([], finish="abort", version="1"),
        answer([12], finish="abort", version="1"),
        answer([13, 2], version="2"),
    ]
    async with serving(script(*answers)) as engine:
        generation = await generate(client, engine.url, budget=6)
    assert prompts(engine) == [(PROMPT, 6), ([*PROMPT, 10, 11], 4), ([*PROMPT, 10, 11], 4), ([*PROMPT, 10, 11, 12], 3)]
    assert generation.output_ids == [10, 11, 12, 13, 2]
    assert generation.versions == [0, 0, 1, 2, 2]
    assert generation.logprobs == [-0.10, -0.11, -0.12, -0.13, -0.02]
    assert generation.interruptions == 3
    assert len({request.rid for request in engine.requests}) == 4


@pytest.mark.parametrize(
    ("tokens", "spans", "kept"),
    [
        ([10, 11, 12], [("3", 0, 2), (MIXED_WEIGHTS, 2, 3)], [10, 11]),
        ([10, 11, 12], [("3", 0, 1), (MIXED_WEIGHTS, 1, 2), ("4", 2, 3)], [10]),
        ([10, 2], [(MIXED_WEIGHTS, 0, 2)], []),
        ([10, 2], [], []),
        ([], [], []),
    ],
)
async def test_no_token_of_mixed_weights_is_taken_and_another_gserver_goes_on(
    client: GenerationClient, tokens: list[int], spans: Any, kept: list[int]
) -> None:
    mixed = answer(tokens, version=MIXED_WEIGHTS, spans=spans, finish="stop" if tokens else "abort")
    async with serving(script(mixed)) as engine, serving(script(answer([13, 2], version="4"))) as other:
        routes = FixedRoutes(other.url)
        generation = await generate(client, engine.url, routes=routes)
    assert routes.failed == [engine.url]
    assert prompts(other) == [([*PROMPT, *kept], 8 - len(kept))]
    assert generation.output_ids == [*kept, 13, 2]
    assert generation.versions == [*[3] * len(kept), 4, 4]
    assert generation.interruptions == 1


@pytest.mark.parametrize(
    ("at_the_beginning", "at_the_end", "version"),
    [(3, "5", 3), (5, "5", 5), (6, "5", 5), (0, "default", 0)],
    ids=["updated meanwhile", "not updated", "a gserver that is behind", "before the first update"],
)
async def test_tokens_of_a_server_that_tells_no_spans_are_never_said_to_be_younger_than_they_are(
    client: GenerationClient, at_the_beginning: int, at_the_end: str, version: int
) -> None:
    now = at_the_beginning

    async def update_meanwhile(request: GenerateRequest, number: int) -> GenerateReply:
        nonlocal now
        now += 2
        return answer([10, 11, 2], version=at_the_end, spans=[])

    async with serving(update_meanwhile) as engine:
        generation = await generate(client, engine.url, policy_version=lambda: now)
    assert generation.versions == [version] * 3


GONE_BACK = LineageHistory([Lineage(number=1, policy_version=2)])


@pytest.mark.parametrize(
    ("spans", "at_the_end", "requested_in", "kept"),
    [
        ([("1", 0, 1), ("2", 1, 2), ("3", 2, 3)], "3", LineageHistory(), 2),
        ([("2", 0, 1), ("3", 1, 2), ("3.1", 2, 3)], "3.1", LineageHistory(), 1),
        ([("2", 0, 1), ("3", 1, 1), ("3.1", 1, 3)], "3.1", LineageHistory(), 3),
        ([], "3.1", LineageHistory(), 0),
        ([], "3", GONE_BACK, 0),
        ([], "3.1", GONE_BACK, 3),
    ],
)
def test_tokens_are_kept_up_to_the_first_of_weights_that_the_run_has_left(
    spans: Any, at_the_end: str, requested_in: LineageHistory, kept: int
) -> None:
    reply = of_history(answer([10, 11, 2], version=at_the_end, spans=spans), GONE_BACK, requested_in=requested_in)
    assert reply.output_ids == [10, 11, 2][:kept]
    assert (reply.meta_info.finish_reason.type == "abort") == (kept < 3)  # type: ignore[union-attr]


async def test_a_request_names_the_adapter_of_its_version_and_has_it_to_its_end(client: GenerationClient) -> None:
    versions = iter((0, 3, 5))
    answers = [
        answer([10, 11], finish="abort", version="2"),
        answer([12], finish="abort", version="5", spans=[("4", 0, 0), ("5", 0, 1)]),
        answer([2], version="6"),
    ]
    async with serving(script(*answers)) as engine:
        generation = await generate(client, engine.url, policy_version=lambda: next(versions), named_adapters=True)
    assert [request.lora_path for request in engine.requests] == [None, "streamrl-v3", "streamrl-v5"]
    assert generation.versions == [0, 0, 3, 5]


async def test_an_adapter_that_is_not_there_is_asked_for_elsewhere_or_later(client: GenerationClient) -> None:
    def missing() -> Any:
        return failure(400, "Got LoRA adapter that has never been loaded: streamrl-v4")

    versions = iter((4, 5, 6))
    async with serving(script(missing())) as engine, serving(script(missing(), answer([2]))) as other:
        generation = await generate(
            client,
            engine.url,
            routes=FixedRoutes(other.url, ""),
            policy_version=lambda: next(versions),
            named_adapters=True,
        )
    assert generation.versions == [6]
    async with serving(script(missing())) as engine:
        with pytest.raises(PeerError, match="never been loaded"):
            await generate(client, engine.url)  # nobody has named one


@pytest.mark.parametrize("bad", [failure(503), failure(500), None], ids=["503", "500", "connection lost"])
async def test_another_gserver_continues(client: GenerationClient, bad: Any) -> None:
    async with (
        serving(script(answer([10], finish="abort", version="1"), bad)) as first,
        serving(script(answer([11, 2], version="2"))) as second,
    ):
        routes = FixedRoutes(second.url)
        generation = await generate(client, first.url, routes=routes)
    assert routes.failed == [first.url]
    assert prompts(second) == [([*PROMPT, 10], 7)]
    assert (generation.output_ids, generation.versions) == ([10, 11, 2], [1, 2, 2])


async def test_a_gserver_that_does_not_answer_in_time() -> None:
    async def hang(request: GenerateRequest, number: int) -> GenerateReply:
        await asyncio.Event().wait()
        raise AssertionError

    client = GenerationClient(timeout=1.5)
    async with serving(hang) as first, serving(lambda request, number: answer([2])) as second:
        assert (await generate(client, first.url, routes=FixedRoutes(second.url, second.url))).output_ids == [2]
        assert first.cancelled == 1
    await client.close()


async def test_siblings_ask_for_another_gserver_once() -> None:
    routes = FixedRoutes("b", "c")
    route = GroupRoute("a", find_another=routes.find_another)
    await asyncio.gather(*(route.replace("a") for _ in range(5)))
    assert (route.gserver, routes.failed) == ("b", ["a"])


async def test_no_progress_ends(client: GenerationClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "FIRST_PAUSE_SECONDS", 0.001)
    async with serving(lambda request, number: failure(503, "queue is full")) as engine:
        with pytest.raises(DeadlineExceeded, match=r"3\.0\.0: no token for .*queue is full"):
            await generate(client, engine.url, patience=0.3)
    assert len(engine.requests) > 3


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        (failure(400, "input is too long"), PeerError, "answered 400.*input is too long"),
        (answer([], finish="abort", status_code=400), PeerError, "refused the request: scripted"),
        (answer([10, 11], logprobs=[(-0.1, 10, None)]), WireError, "1 log-probabilities for 2 tokens"),
        (answer([10], logprobs=[(-0.1, 11, None)]), WireError, "token 0 is 10, .* belongs to token 11"),
        (answer([10], logprobs=[(None, 10, None)]), WireError, "log-probability None"),
        (answer([10], logprobs=[(0.5, 10, None)]), WireError, "log-probability 0.5"),
        (answer([]), WireError, "without a single token"),
        (answer([10] * 9), WireError, "9 tokens where at most 8"),
        (answer([10], version="main"), WireError, "'main' is not a policy version"),
        (answer([10], version="main", spans=[]), WireError, "'main' is not a policy version"),
        (answer([10], version="-1"), WireError, "not a policy version"),
        (answer([10, 11], spans=[("1", 0, 1)]), WireError, "cover 1 of 2 tokens"),
        (answer([10, 11], spans=[("1", 1, 2)]), WireError, "do not cover"),
        (answer([10], spans=[("1", 0, 2)]), WireError, "do not cover"),
    ],
)
async def test_nonsense_is_refused(
    client: GenerationClient, reply: Any, error: type[StreamRLError], message: str
) -> None:
    async with serving(script(reply)) as engine:
        with pytest.raises(error, match=message):
            await generate(client, engine.url)
    assert len(engine.requests) == 1


async def test_a_long_response_is_asked_for_in_parts(client: GenerationClient) -> None:
    answers = [
        answer([10, 11, 12], version="4", finish="length"),
        answer([13, 14, 15], version="5", finish="length"),
        answer([16, 17], version="5", finish="length"),
    ]
    async with serving(script(*answers)) as engine:
        generation = await generate(client, engine.url, budget=8, part=3)
    assert prompts(engine) == [(PROMPT, 3), ([*PROMPT, 10, 11, 12], 3), ([*PROMPT, 10, 11, 12, 13, 14, 15], 2)]
    assert generation.output_ids == list(range(10, 18))
    assert generation.versions == [4, 4, 4, 5, 5, 5, 5, 5]
    assert (generation.finish_reason, generation.interruptions) == ("length", 0)
    seeds = {request.sampling_params.sampling_seed for request in engine.requests}  # type: ignore[union-attr]
    assert len(seeds) == 3


@pytest.mark.parametrize("finish", ["length", "abort"])
async def test_a_stop_string_that_lies_across_two_parts_ends_the_response(
    client: GenerationClient, finish: str
) -> None:
    answers = [answer([*b"one"], finish=finish), answer([*b"  #"], finish=finish), answer([*b"##."], version="1")]
    async with serving(script(*answers)) as engine:
        generation = await generate(client, engine.url, budget=12, part=3 if finish == "length" else 12, stop=["###"])
    assert bytes(generation.output_ids) == b"one  ###"
    assert (generation.finish_reason, generation.matched) == ("stop", "###")
    assert (generation.versions, len(generation.logprobs)) == ([0] * 6 + [1] * 2, 8)


@pytest.mark.parametrize(
    ("tokens", "sampling", "matched"),
    [([50, 51, 0], {}, 0), ([50, 51], {"stop_token_ids": [51]}, 51), ([50, 51], {"stop": ["23"]}, "23")],
)
async def test_one_that_was_aborted_with_its_last_token_is_done(
    client: GenerationClient, tokens: list[int], sampling: dict[str, Any], matched: int | str
) -> None:
    async with serving(script(answer(tokens, finish="abort"))) as engine:
        generation = await generate(client, engine.url, **sampling)
    assert generation.output_ids == tokens
    assert (generation.finish_reason, generation.matched, generation.interruptions) == ("stop", matched, 0)


async def test_what_a_silent_gserver_was_asked_for_goes_on_at_another_with_what_it_had() -> None:
    client = GenerationClient(timeout=60.0)

    async def then_hang(request: GenerateRequest, number: int) -> GenerateReply:
        if number == 0:
            return answer([10, 11, 12], finish="length")
        client.give_up([hanging.url])  # as the manager tells the worker with a heartbeat
        client.give_up([hanging.url])
        await asyncio.Event().wait()
        raise AssertionError

    async with serving(then_hang) as hanging, serving(script(answer([13, 14]), answer([2]))) as other:
        routes = FixedRoutes(hanging.url, other.url)  # the manager may not know better yet
        began = time.monotonic()
        generation = await generate(client, hanging.url, budget=8, part=3, routes=routes)
        assert time.monotonic() - began < 30.0, "it did not wait for the time limit of the request"
        assert generation.output_ids == [10, 11, 12, 13, 14]
        assert len(hanging.requests) == 2, "nothing is asked of one that is known to be silent"
        client.give_up([])
        await generate(client, other.url)
    await client.close()


async def test_sampling_seeds_are_fixed_for_each_request_and_differ(client: GenerationClient) -> None:
    async with serving(lambda request, number: answer([2])) as engine:
        generator = make_generator(client, patience=1, part=4096)
        route = GroupRoute(engine.url, find_another=FixedRoutes().find_another)
        for rid in ("3.0.0", "3.1.0", "3.0.0"):
            await generator.generate(PROMPT, max_new_tokens=4, rid=rid, route=route)
    first, sibling, again = (request.sampling_params.sampling_seed for request in engine.requests)  # type: ignore[union-attr]
    assert first == again != sibling


async def test_cancellation_disconnects(client: GenerationClient) -> None:
    ended = asyncio.Event()

    async def hang(request: GenerateRequest, number: int) -> GenerateReply:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    async with serving(hang) as engine:
        task = asyncio.create_task(generate(client, engine.url))
        await engine.arrived.wait()
        task.cancel()
        await asyncio.wait_for(ended.wait(), 30)
        assert engine.cancelled == 1


# --- what ends a response ---

VOCABULARY = ("a", "b", "ab", "ba", "aab", "<eos>")
EOS = len(VOCABULARY) - 1

sampled_tokens = st.lists(st.integers(0, EOS), min_size=1, max_size=30)
stop_strings = st.lists(st.text("ab", min_size=1, max_size=6), max_size=2)


def decode_word(token_ids: Sequence[int]) -> str:
    return "".join(VOCABULARY[token] for token in token_ids)


def in_one_request(sampled: list[int], stop: list[str]) -> list[int]:
    """Return `sampled` up to the first token that ends it or completes a stop string: the definition."""
    for end in range(1, len(sampled) + 1):
        if sampled[end - 1] == EOS or any(string in decode_word(sampled[:end]) for string in stop):
            return sampled[:end]
    return sampled


def in_parts(sampled: list[int], cuts: set[int], stop: list[str], *, aborts_say_so: bool) -> list[int]:
    """Return the response as a rollout worker gets it.

    Each request sees only its own tokens, and one that is cut may not say that it had come to its end.
    """
    endings = Endings(tokens={EOS}, strings=StopStrings(stop, decode_word))
    output: list[int] = []
    while len(output) < len(sampled):
        since = len(output)
        cut = min({cut for cut in cuts if cut > since} | {len(sampled)})
        part = in_one_request(sampled[since:cut], stop)
        said = in_one_request([*part, 0], stop) == part and (since + len(part) < cut or aborts_say_so)
        output += part
        if found := endings.overlooked(output, earlier=since, reported=said):
            return output[: found[0]]
        if said:
            return output
    return output


@given(sampled=sampled_tokens, cuts=st.sets(st.integers(1, 29)), stop=stop_strings, aborts_say_so=st.booleans())
@example(sampled=[0, 0, 0, 1], cuts={1, 2, 3}, stop=["aaab"], aborts_say_so=True)
@example(sampled=[0, EOS, 1], cuts={2}, stop=[], aborts_say_so=False)
def test_a_response_ends_where_it_would_have_ended_in_one_request(
    sampled: list[int], cuts: set[int], stop: list[str], aborts_say_so: bool
) -> None:
    assert in_parts(sampled, cuts, stop, aborts_say_so=aborts_say_so) == in_one_request(sampled, stop)


# --- what the manager is told ---


class ListeningManager:
    """Hears what is in flight, and replies while `replies` is set."""

    def __init__(self) -> None:
        self.heard: list[InFlight] = []
        self.more = asyncio.Event()
        self.replies = asyncio.Event()
        self.replies.set()

    async def in_flight(self, message: InFlight) -> InFlightReply:
        self.heard.append(message)
        self.more.set()
        await self.replies.wait()
        return InFlightReply(pause_seconds=0.02)

    async def next(self) -> dict[int, tuple[int, int]]:
        await asyncio.wait_for(self.more.wait(), 10)
        self.more.clear()
        return {group.seq: (group.requests, group.tokens) for group in self.heard[-1].groups}


async def test_the_manager_hears_how_many_requests_of_a_group_are_in_flight() -> None:
    manager = ListeningManager()
    reports = InFlightReports(manager, worker=3)  # type: ignore[arg-type]
    running = asyncio.create_task(reports.run())
    count = RequestCount(7, siblings=3, reports=reports)
    with ExitStack() as both:
        both.enter_context(count.request(10))
        both.enter_context(count.request(20))
        assert await manager.next() == {7: (3, 30)}, "one of three has not begun"
    assert await manager.next() == {7: (1, 0)}
    with count.request(10):
        assert await manager.next() == {7: (1, 10)}
    assert await manager.next() == {7: (0, 0)}
    with count.request(40):
        assert await manager.next() == {7: (1, 40)}, "another turn"
    assert {message.worker for message in manager.heard} == {3}
    running.cancel()


# --- told as it comes ---


async def told_as_it_comes(client: GenerationClient, *streams: Any) -> tuple[list[int], Generation]:
    """What `on_tokens` was told, all in all, and the response."""
    told: list[int] = []
    async with serving(script(*streams)) as engine, serving(script(*streams[1:])) as other:
        generator = make_generator(client, patience=20.0, part=4096)
        route = GroupRoute(engine.url, find_another=FixedRoutes(other.url).find_another)
        generation = await generator.generate(PROMPT, max_new_tokens=8, rid="3.0.0", route=route, on_tokens=told.extend)
    return told, generation


def so_far(*tokens: int, version: str = "0") -> GenerateReply:
    return answer(list(tokens), finish=None, spans=[], version=version)


async def test_tokens_are_told_as_they_come(client: GenerationClient) -> None:
    stream = [so_far(10), so_far(10, 11), answer([10, 11, 12, 2], version="4", matched=2)]
    told, generation = await told_as_it_comes(client, stream)
    assert told == generation.output_ids == [10, 11, 12, 2]
    assert generation.versions == [4] * 4


async def test_tokens_of_a_stream_that_breaks_off_are_kept(client: GenerationClient) -> None:
    first = [so_far(10), so_far(10, 11), None]
    second = [so_far(12, version="1"), answer([12, 2], version="1", matched=2)]
    told, generation = await told_as_it_comes(client, first, second)
    assert told == generation.output_ids == [10, 11, 12, 2]
    assert generation.versions == [0, 0, 1, 1]
    assert generation.logprobs == [-0.10, -0.11, -0.12, -0.02]


async def test_a_gserver_that_takes_tokens_back_is_not_believed(client: GenerationClient) -> None:
    with pytest.raises(WireError, match="takes 1 tokens back"):
        await told_as_it_comes(client, [so_far(10), so_far(11, 12), answer([11, 12, 2], matched=2)])
    with pytest.raises(WireError, match="takes back some of 1 tokens"):
        await told_as_it_comes(client, [so_far(10), answer([11, 12, 2], matched=2)])
