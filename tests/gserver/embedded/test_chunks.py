"""Plans of prompt chunks: bounded, in order, and never without progress."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from streamrl.gserver.embedded.scheduler import CHUNK_TOKENS, Need, prefill_budget, prefill_chunks

needs_of = st.lists(st.builds(Need, st.integers(0, 3 * CHUNK_TOKENS), st.booleans()), max_size=12)


@given(needs_of, st.integers(CHUNK_TOKENS, 5 * CHUNK_TOKENS))
def test_chunks(needs: list[Need], tokens: int) -> None:
    given_ = prefill_chunks(needs, budget=tokens)
    assert bool(given_) == bool(needs)
    for need, share in zip(needs, given_[:-1], strict=False):
        assert share == need.tokens  # only the last one is cut
    if given_:
        last, share = needs[len(given_) - 1], given_[-1]
        assert share == last.tokens or 0 < share < last.tokens
        assert share == last.tokens or not (last.whole or last.tokens <= CHUNK_TOKENS)
        alone = len(given_) == 1 and last.whole
        assert sum(given_) <= (max(tokens, last.tokens) if alone else tokens)


@given(needs_of.filter(lambda needs: any(need.tokens for need in needs)))
def test_all_prompts_are_computed_step_by_step(needs: list[Need]) -> None:
    left = list(needs)
    computed = steps = 0
    while left:
        given_ = prefill_chunks(left, budget=CHUNK_TOKENS)
        computed += sum(given_)
        steps += 1
        rest = left[len(given_) - 1].tokens - given_[-1]
        left = ([Need(rest, left[len(given_) - 1].whole)] if rest else []) + left[len(given_) :]
        assert steps <= sum(need.tokens for need in needs) + len(needs)
    assert computed == sum(need.tokens for need in needs)


def test_needs_are_read_no_further_than_necessary() -> None:
    read = []

    def needs() -> Iterator[Need]:
        for number in range(10):
            read.append(number)
            yield Need(CHUNK_TOKENS)

    assert prefill_chunks(needs(), budget=2 * CHUNK_TOKENS) == [CHUNK_TOKENS] * 2
    assert read == [0, 1]


@given(st.integers(1, 64), st.integers(0, 64), st.integers(1, 10_000))
def test_the_budget_grows_with_free_slots(slots: int, occupied: int, most: int) -> None:
    free = max(1, slots - occupied)
    found = prefill_budget(free=free, slots=slots, most=most)
    assert CHUNK_TOKENS <= found <= max(CHUNK_TOKENS, most)
    assert found <= prefill_budget(free=min(slots, free + 1), slots=slots, most=most)
    assert prefill_budget(free=slots, slots=slots, most=most) == max(CHUNK_TOKENS, most)
