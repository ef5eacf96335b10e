"""A network of four hosts, where one may be made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.cluster import Cluster
from tests.hosts.network import Hosts, why_not

COUNT = 4


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    problem = why_not(tmp_path)
    if problem:
        pytest.skip(f"no network namespaces can be made here: {problem}")
    with Hosts(COUNT, folder=tmp_path) as made:
        yield made


@pytest.fixture
def cluster(hosts: Hosts, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(hosts, tmp_path)
    yield made
    for command in made.commands:
        command.end()
