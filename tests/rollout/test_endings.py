"""Where a response ends that was made in several requests: where it would have ended in one."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from streamrl.rollout.endings import Endings
from streamrl.stop_strings import StopStrings

VOCABULARY = ("a", "b", "ab", "ba", "aab", "<eos>")
EOS = len(VOCABULARY) - 1

tokens = st.lists(st.integers(0, EOS), min_size=1, max_size=30)
stops = st.lists(st.text("ab", min_size=1, max_size=6), max_size=2)


def decode(token_ids: Sequence[int]) -> str:
    return "".join(VOCABULARY[token] for token in token_ids)


def in_one_request(sampled: list[int], stop: list[str]) -> list[int]:
    """What is left of `sampled`, by the definition: up to the first token that ends it or completes a stop string."""
    for end in range(1, len(sampled) + 1):
        if sampled[end - 1] == EOS or any(string in decode(sampled[:end]) for string in stop):
            return sampled[:end]
    return sampled


def in_parts(sampled: list[int], cuts: set[int], stop: list[str], *, aborts_say_so: bool) -> list[int]:
    """As a rollout worker gets it: each request sees what it makes itself, and those that are cut may not say that
    they had come to their end."""
    endings = Endings(tokens={EOS}, strings=StopStrings(stop, decode))
    output: list[int] = []
    while len(output) < len(sampled):
        since = len(output)
        cut = min({cut for cut in cuts if cut > since} | {len(sampled)})
        part = in_one_request(sampled[since:cut], stop)
        said = in_one_request([*part, 0], stop) == part and (since + len(part) < cut or aborts_say_so)
        output += part
        if found := endings.overlooked(output, since=since, said=said):
            return output[: found[0]]
        if said:
            return output
    return output


@given(sampled=tokens, cuts=st.sets(st.integers(1, 29)), stop=stops, aborts_say_so=st.booleans())
@example(sampled=[0, 0, 0, 1], cuts={1, 2, 3}, stop=["aaab"], aborts_say_so=True)
@example(sampled=[0, EOS, 1], cuts={2}, stop=[], aborts_say_so=False)
def test_a_response_ends_where_it_would_have_ended_in_one_request(
    sampled: list[int], cuts: set[int], stop: list[str], aborts_say_so: bool
) -> None:
    assert in_parts(sampled, cuts, stop, aborts_say_so=aborts_say_so) == in_one_request(sampled, stop)


def test_what_ends_it_is_told() -> None:
    endings = Endings(tokens={EOS}, strings=StopStrings(["bb"], decode))
    assert endings.overlooked([0, 1, 1, 0], since=2, said=False) == (3, "bb")
    assert endings.overlooked([0, 1, 1, 0], since=2, said=True) == (3, "bb")
    assert endings.overlooked([0, EOS], since=0, said=False) == (2, EOS)
    assert endings.overlooked([0, EOS], since=0, said=True) is None
    assert endings.overlooked([], since=0, said=False) is None


def test_strings_are_looked_for_in_few_tokens() -> None:
    asked: list[int] = []

    def count(token_ids: list[int]) -> str:
        asked.append(len(token_ids))
        return decode(token_ids)

    strings = StopStrings(["ab"], count)
    assert strings.at_the_end([0] * 1000) is None
    assert asked == [strings.reach]
    assert StopStrings([], count).at_the_end([0]) is None
    assert asked == [strings.reach]
