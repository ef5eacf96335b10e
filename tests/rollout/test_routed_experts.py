"""Which experts computed a token, from the engine's reply to the trajectory."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from streamrl.errors import WireError
from streamrl.rollout.generation import GroupRoute, first_known
from streamrl.transport.generation import FinishReason, GenerationClient, MetaInfo, decoded_routes, encoded_routes
from streamrl.types import NO_EXPERT, Generation
from tests.gserver.serving import serving
from tests.gserver.tiny import make_model, prompt, save
from tests.rollout.sessions import no_other
from tests.rollout.test_generation import make_generator

WIDTH = 6
"""Three layers, two experts of each."""


def routes(*experts: int) -> NDArray[np.uint8]:
    """One number for each token."""
    return np.repeat(np.array(experts, np.uint8)[:, None], WIDTH, 1)


def meta(routed_experts: str | None) -> MetaInfo:
    return MetaInfo(id="a", finish_reason=FinishReason(type="stop"), routed_experts=routed_experts)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_the_wire_keeps_every_expert(tokens: int, layers: int, seed: int) -> None:
    experts = np.random.default_rng(seed).integers(0, 256, (tokens, layers, 2)).astype(np.uint8)
    found = decoded_routes(meta(encoded_routes(experts)), tokens=tokens)
    assert found is not None
    np.testing.assert_array_equal(found, experts.reshape(tokens, -1))


def changed(experts: NDArray[np.uint8], value: int) -> str:
    numbers = np.frombuffer(base64.b64decode(encoded_routes(experts)), "<i4").copy()
    numbers[4] = value
    return base64.b64encode(numbers.tobytes()).decode()


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ("?", "is not base64"),
        ("", "has 0 bytes"),
        (encoded_routes(routes(1, 2, 3, 4)[:, :1]), "has 16 bytes: not as many numbers for each of 3 tokens"),
        (changed(routes(1, 2, 3), -2), "experts from -2 to 3"),
        (changed(routes(1, 2, 3), 255), "experts from 1 to 255; at most 254"),
        (changed(routes(1, 2, 3), 10**6), "experts from 1 to 1000000"),
    ],
)
def test_what_cannot_be_experts_is_refused(said: str, says: str) -> None:
    with pytest.raises(WireError, match=says):
        decoded_routes(meta(said), tokens=3)


def test_the_experts_of_the_request_that_sampled_the_next_token_stay() -> None:
    known = routes(1, NO_EXPERT, 2)
    np.testing.assert_array_equal(first_known(known, routes(7, 8, 9, 4)), routes(1, 8, 2, 4))
    np.testing.assert_array_equal(first_known(known, routes(7)), known)
    np.testing.assert_array_equal(first_known(None, known), known)
    np.testing.assert_array_equal(first_known(known, None), known)
    assert first_known(None, None) is None
    with pytest.raises(WireError, match="8 experts for a token, and had 6 before"):
        first_known(known, np.zeros((3, 8), np.uint8))


async def test_a_response_in_parts_has_the_experts_of_one_in_a_piece(tmp_path: Path) -> None:
    """Over HTTP, from the engine; without asking there are none."""
    client = GenerationClient(timeout=20.0)
    found: list[Generation] = []
    async with serving(save(make_model("qwen3-moe"), tmp_path)) as server:
        for part in (64, 5):
            generator = make_generator(client, patience=20.0, part=part, temperature=0.0)
            for asks in (True, False):
                generator.return_routed_experts = asks
                route = GroupRoute(server.url, find_another=no_other)
                found.append(await generator.generate(prompt(9), max_new_tokens=14, rid="0.0.0", route=route))
    await client.close()
    whole, unasked, parts, _ = found
    assert whole.output_ids == parts.output_ids
    assert whole.routed_experts is not None
    assert len(whole.routed_experts) == 9 + len(whole.output_ids) - 1
    np.testing.assert_array_equal(parts.routed_experts, whole.routed_experts)
    assert unasked.routed_experts is None
