"""Decode steps that are launched before the tokens of the step before are read change no bit of any state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.gserver.embedded import graphs, model
from streamrl.gserver.embedded.graphs import DecodeStep, GraphedModel
from streamrl.gserver.embedded.model import KVCache, Model, read_architecture
from streamrl.gserver.embedded.request import Request
from streamrl.gserver.embedded.scheduler import Scheduler
from streamrl.gserver.embedded.weights import Parameters
from streamrl.gserver.server.engine import Output, Ticket
from tests.gserver.recorder import LateModel, Recorder
from tests.gserver.tiny import CHARACTERS, EOS, job, make_model, prompt, save

SLOTS, LONGEST = 4, 64
STOPS = list(range(0, EOS, 7))
"""Tokens that end some requests soon."""


@pytest.fixture(scope="module", autouse=True)
def small_sizes() -> Iterator[None]:
    """Short responses make the cache grow and need several graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "FIRST_SLOTS", 2)
        patch.setattr(model, "FIRST_LENGTH", 16)
        patch.setattr(graphs, "ROWS", (1, 2, 4, 8))
        patch.setattr(graphs, "LENGTHS", ((LONGEST, 8),))
        yield


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[Parameters]:
    """Two good sets and a broken one."""
    found = []
    for seed in (0, 1, 2):
        folder = save(make_model("llama", seed=seed, num_hidden_layers=1), tmp_path_factory.mktemp("model"))
        found.append(Parameters(read_architecture(folder), dtype=torch.float32, device=torch.device("cpu")))
        found[-1].load(folder)
    found[-1].norm.fill_(float("nan"))
    return found


class Unoverlapped(Scheduler):
    """Admits no prompts when it `holds`: at a step that the other scheduler has launched before they came."""

    holds = False

    def _next_batch(self) -> tuple[list[Request], int]:
        return ([], 0) if self.holds else super()._next_batch()


def scheduler(kind: type[Scheduler], weights: Parameters, computes: type[Model], **settings: Any) -> Scheduler:
    cache = KVCache(
        weights.architecture,
        max_slots=SLOTS + 1,
        max_length=LONGEST,
        dtype=torch.float32,
        device=torch.device("cpu"),
        spare=1,
    )
    return kind(
        model=computes(weights, cache=cache, max_length=LONGEST, **settings),
        cache=cache,
        max_running=SLOTS,
        version="0",
        prefill_tokens=24,
        prefix_cache_bytes=20 * cache.token_bytes,
        overlap=kind is Scheduler,
    )


def request(rid: str, length: int, **settings: Any) -> Request:
    params = {"max_new_tokens": settings.pop("new", 10), **settings.pop("params", {})}
    one = job(rid, prompt(length), params=params, **settings)
    return Request(Ticket(one), eos_token_ids=frozenset({EOS}), seed=len(rid) + length, decode=text)


def text(tokens: Sequence[int]) -> str:
    return "".join(CHARACTERS[token] if token < EOS else "" for token in tokens)


class Pair:
    """Both schedulers, which get the same commands."""

    def __init__(self, weights: Sequence[Parameters]) -> None:
        self.weights = weights
        self.device = Recorder()
        self.overlapped = scheduler(Scheduler, weights[0], LateModel, record=self.device)
        self.reference = scheduler(Unoverlapped, weights[0], GraphedModel, record=Recorder())
        self.submitted = 0
        self.updates = 0

    @property
    def both(self) -> tuple[Scheduler, Scheduler]:
        return self.overlapped, self.reference

    def do(self, command: Callable[[Scheduler], object]) -> object:
        results = [command(scheduler) for scheduler in self.both]
        self.compare()
        assert results[0] == results[1]
        return results[0]

    def submit(self, length: int, **settings: Any) -> None:
        self.do(lambda scheduler: scheduler.submit(request(f"{self.submitted}", length, **settings)))
        self.submitted += 1

    def step(self) -> None:
        assert isinstance(self.reference, Unoverlapped)
        ahead = self.overlapped._ahead is not None and self.overlapped.occupied > 0
        self.reference.holds = ahead
        self.do(lambda scheduler: None if scheduler.idle else scheduler.step())

    def finish(self) -> None:
        for _ in range(400):
            if self.reference.idle:
                break
            self.step()
        assert self.reference.idle
        assert self.overlapped.idle

    def update(self, mode: Any, number: int) -> None:
        self.updates += 1

        def update(scheduler: Scheduler) -> None:
            scheduler.pause(mode)
            scheduler.new_weights(self.weights[number], str(self.updates))
            scheduler.resume()

        self.do(update)

    def compare(self) -> None:
        found, expected = map(described, self.both)
        for name, value in expected.items():
            if found[name] != value:
                raise AssertionError(f"{name} differ: {str(found[name])[:2000]}\ninstead of {str(value)[:2000]}")
        for scheduler in self.both:
            scheduler.events.clear()


def described(scheduler: Scheduler) -> dict[str, object]:
    counts = ("tokens_generated", "decode_steps", "prompt_tokens", "prompt_tokens_cached", "cache_bytes")
    return {
        "running": [state(request) for request in scheduler.running],
        "waiting": [state(request) for request in scheduler.waiting],
        "events": [(ticket.job.rid, news) for ticket, news in scheduler.events],
        **{count: getattr(scheduler, count) for count in counts},
    }


def state(request: Request | None) -> object:
    if request is None:
        return None
    known = vars(request).copy()
    for name in ("ticket", "_stop_strings", "routed_experts"):
        known.pop(name)
    return known


plain = st.fixed_dictionaries(
    {"new": st.integers(1, 24)},
    optional={
        "stream": st.booleans(),
        "stop": st.sampled_from([("a",), ("e", "bc")]),
        "params": st.just({"stop_token_ids": STOPS}),
    },
)
OTHERS: list[dict[str, Any]] = [
    {"params": {"top_k": 3}},
    {"params": {"temperature": 0.0}},
    {"params": {"stop_token_ids": STOPS, "min_new_tokens": 3}},
    {"top_logprobs_num": 2},
    {"new": 0, "logprob_start_len": 0},
]
"""Requests whose tokens are not plain draws."""
lengths = st.integers(1, 40)
bursts = st.tuples(st.just("submit"), st.lists(st.tuples(lengths, plain), min_size=1, max_size=6))
modes = st.sampled_from(["in_place", "retract", "abort"])
changes = st.one_of(
    bursts,
    st.tuples(st.just("submit"), st.lists(st.tuples(lengths, st.sampled_from(OTHERS)), min_size=1, max_size=1)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("update"), st.just("in_place") | modes, st.sampled_from([0, 1, 0, 1, 2])),
    st.tuples(st.just("pause"), modes),
    st.just(("version",)),
)
"""Each is followed by a number of steps."""


@given(first=bursts, script=st.lists(st.tuples(st.integers(1, 8), changes), min_size=3, max_size=12))
@torch.inference_mode()
def test_every_state_is_that_without_overlap(first: Any, script: Any, weights: list[Parameters]) -> None:
    pair = Pair(weights)
    for steps, (change, *arguments) in [(0, first), *script]:
        for _ in range(steps):
            pair.step()
        pair.do(Scheduler.resume)
        match change, arguments:
            case "submit", [requests]:
                for length, settings in requests:
                    pair.submit(length, **settings)
            case "abort", [number]:
                pair.do(partial(Scheduler.abort, rid=str(number)))
            case "update", [mode, number]:
                pair.update(mode, number)
            case "pause", [mode]:
                pair.do(partial(Scheduler.pause, mode=mode))
            case "version", _:
                pair.do(partial(Scheduler.set_version, version="renamed"))
    pair.do(Scheduler.resume)
    pair.finish()


def test_the_next_step_is_launched_before_the_present_one_is_read(weights: list[Parameters]) -> None:
    pair = Pair(weights)
    late = pair.device.late
    pair.submit(5, new=9)
    pair.submit(3, new=3)
    for _ in range(7):
        pair.step()
        assert len(late) == 1, "a step that is not computed yet"
    assert pair.overlapped.occupied == 1
    pair.step()
    assert not pair.overlapped.occupied
    assert pair.overlapped._ahead is None, "the host knew that the last request would end"


def test_a_prompt_waits_for_one_step(weights: list[Parameters]) -> None:
    pair = Pair(weights)
    pair.submit(5, new=20)
    pair.step()
    pair.submit(3, new=20)
    pair.step()
    assert pair.overlapped.waiting
    pair.step()
    assert [one.produced for one in pair.overlapped.running if one is not None] == [4, 2]


@pytest.mark.parametrize("settings", OTHERS)
def test_tokens_that_are_no_plain_draws_are_chosen_eagerly(settings: Any, weights: list[Parameters]) -> None:
    found = []
    for computes, extra in ((LateModel, {"record": Recorder()}), (Model, {"native": False})):
        one = scheduler(Scheduler, weights[0], computes, **extra)
        for i, more in enumerate([settings, {}, settings]):
            one.submit(request(str(i), 4 + i, **more))
        while not one.idle:
            one.step()
        found.append({ticket.job.rid: news for ticket, news in one.events})
    for rid, expected in found[1].items():
        output = found[0][rid]
        assert isinstance(output, Output)
        assert isinstance(expected, Output)
        assert output.output_ids == expected.output_ids
        assert list(map(len, output.top_logprobs)) == list(map(len, expected.top_logprobs))


def test_a_step_that_was_launched_for_ended_requests_is_not_read(weights: list[Parameters]) -> None:
    pair = Pair(weights)
    pair.submit(1, new=8)
    for _ in range(4):
        pair.step()
    [running] = pair.reference.running
    assert running is not None
    pair.submit(1, new=8, params={"stop_token_ids": running.tokens[3:4]})
    pair.do(partial(Scheduler.abort, rid="0"))
    pair.finish()
    assert pair.device.late
    pair.submit(2, new=5)
    pair.finish()


def test_a_failed_step_fails_its_requests_only(weights: list[Parameters], monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(weights)
    overlapped = pair.overlapped
    pair.submit(5)
    for _ in range(2):
        pair.step()

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(DecodeStep, "read", broken)
        overlapped.step()
    [(_, news)] = overlapped.events
    assert "a token could not be computed: RuntimeError: out of memory" in str(news)
    overlapped.events.clear()
    pair.reference.abort("0")
    pair.reference.events.clear()
    overlapped.submit(request("again", 5))
    for _ in range(10):
        overlapped.step()
    assert [output.finish_reason.type for _, output in overlapped.events] == ["length"]
