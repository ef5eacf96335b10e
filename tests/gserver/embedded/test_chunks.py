"""Plans of prompt chunks: bounded, in order, and never without progress."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamrl.gserver.embedded.scheduler import CHUNK_TOKENS, Need, prefill_chunks

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
