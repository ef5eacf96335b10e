"""The permissions of each role: calls to the controller, calls to gservers, and messages over ZMQ."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import get_args

from streamrl.transport.control import Role

OWNER = "the run's owner"
"""The caller that presents the key derived from the run's secret."""
_ALL: Set[Role] = frozenset(get_args(Role))
_OWNER_ALONE: Set[Role] = frozenset()
_ROLLOUT: Set[Role] = frozenset({"rollout"})
_MODEL_WORKER: Set[Role] = frozenset({"model_worker"})

ALLOWED: Mapping[str, Set[Role]] = {
    # a process joins; rejected if its configuration differs
    "POST /register": _OWNER_ALONE,
    # the checkpoint that the run resumes from
    "GET /resume_point": _OWNER_ALONE,
    # a number for a process that joins a running run
    "POST /place": _OWNER_ALONE,
    # a gserver or rollout worker finishes and leaves; the controller saves and ends the run
    "POST /drain": _OWNER_ALONE,
    # the process has left
    "POST /leave": frozenset({"gserver", "rollout"}),
    # a sign of life, with figures; the reply contains whether to stop
    "POST /heartbeat": _ALL,
    # the silent processes, once their set has changed more than n times
    "GET /silent": _OWNER_ALONE,
    # the files of the model, for a host that does not have it, and bytes of one of these files
    "GET /model": _ALL,
    "GET /model/part": _ALL,
    # waits until the named processes are registered; their addresses
    "GET /topology": frozenset({"rollout", "model_worker"}),
    # after the run went back to a checkpoint: the groups in hand that the worker may finish
    "POST /keep": _ROLLOUT,
    # waits for room in the ledger, or for a held-out prompt; sequence numbers and gservers
    "POST /admit": _ROLLOUT,
    # another gserver for a group whose gserver failed
    "POST /route": _ROLLOUT,
    # how many requests of the worker's groups still run
    "POST /in_flight": _ROLLOUT,
    # a group is given up
    "POST /reject": _ROLLOUT,
    # the result of a held-out prompt
    "POST /evaluation": _ROLLOUT,
    # stops the run because of an error in the worker
    "POST /fail_run": _ROLLOUT,
    # the two ends of a weight update
    "POST /publish/begin": _MODEL_WORKER,
    "POST /publish/commit": _MODEL_WORKER,
    # on which machines and GPUs the gservers are
    "GET /publish/places": _MODEL_WORKER,
    # changes the staleness, pauses admission, requests a checkpoint
    "POST /steer": _OWNER_ALONE,
    # the run is over; every process receives `stop` with its next heartbeat
    "POST /finish_run": _OWNER_ALONE,
    # the run's state as JSON, and figures for Prometheus
    "GET /status": _ALL,
    "GET /metrics": _ALL,
}
"""The controller's calls, and the roles that may make them in addition to the owner. Any caller may make GET /health:
it returns 200 while the controller lives."""
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
