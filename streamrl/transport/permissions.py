"""The permissions of each role: calls to the controller, calls to gservers, and messages over ZMQ."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple, get_args

from streamrl.transport.control import Role

OWNER = "the run's owner"
"""The caller that presents the key derived from the run's secret."""
_EVERYONE: Set[Role] = frozenset(get_args(Role))
_NOBODY: Set[Role] = frozenset()


class Permission(NamedTuple):
    """The roles that may make a call, in addition to the owner."""

    roles: Set[Role]
    speaker: str = ""
    """Where the call names its sender: `role` stands for the fields role and index; any other value is the name of the
    field that holds the sender's index, and the sender's role is the caller's."""


ALLOWED: Mapping[str, Permission] = {
    "POST /register": Permission(_NOBODY),
    "GET /resume_point": Permission(_NOBODY),
    "POST /place": Permission(_NOBODY),
    "POST /drain": Permission(_NOBODY),
    "POST /leave": Permission(frozenset({"gserver", "rollout"}), "role"),
    "POST /heartbeat": Permission(_EVERYONE, "role"),
    "GET /silent": Permission(_NOBODY),
    "GET /model": Permission(_EVERYONE),
    "GET /model/part": Permission(_EVERYONE),
    "GET /topology": Permission(frozenset({"rollout", "model_worker"})),
    "POST /admit": Permission(frozenset({"rollout"}), "worker"),
    "POST /keep": Permission(frozenset({"rollout"}), "worker"),
    "POST /route": Permission(frozenset({"rollout"}), "worker"),
    "POST /in_flight": Permission(frozenset({"rollout"}), "worker"),
    "POST /reject": Permission(frozenset({"rollout"}), "worker"),
    "POST /fail_run": Permission(frozenset({"rollout"}), "worker"),
    "POST /evaluation": Permission(frozenset({"rollout"}), "worker"),
    "POST /publish/begin": Permission(frozenset({"model_worker"})),
    "POST /publish/commit": Permission(frozenset({"model_worker"})),
    "GET /publish/places": Permission(frozenset({"model_worker"})),
    "POST /steer": Permission(_NOBODY),
    "POST /finish_run": Permission(_NOBODY),
    "GET /status": Permission(_EVERYONE),
    "GET /metrics": Permission(_EVERYONE),
}
"""Permissions of every call except GET /health, which any caller may make."""
LOOKS = frozenset({"GET /status", "GET /metrics"})
"""Read-only calls that reveal no secret: on a loopback address any caller may make them."""
MAY_SEND_TO: Mapping[Role, frozenset[Role]] = {
    "model_worker": frozenset({"rollout"}),
    "controller": frozenset({"model_worker", "rollout"}),
}
"""Receiver → roles that may send to it over ZMQ: groups to the model workers, replies and notices to the controller."""
GENERATION_CALLS = frozenset(
    (
        "/generate",
        "/health_generate",
        "/model_info",
        "/get_model_info",
        "/server_info",
        "/get_server_info",
        "/v1/models",
    )
)
"""Paths that require only the generation key; /health requires none, and all other paths change the gserver."""
