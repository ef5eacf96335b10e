"""`streamrl launch kubernetes`: a run as Kubernetes manifests, applied with kubectl or printed.

The manifests are `templates/kubernetes.yaml`, filled in with the values of a configuration.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from streamrl import config as configuration
from streamrl.config import Config
from streamrl.errors import ConfigError
from streamrl.launch.clusters import Needs, filled, needs, on_one_machine, output_of, pools
from streamrl.launch.process import set_up_logging
from streamrl.transport.secret import VARIABLE, Secret

PORT = 7000
"""Port of the controller if `run.port` is not set."""
LEAVE_SECONDS = 30
"""Grace period of a pod in addition to `limits.drain_seconds` and `limits.save_seconds`."""
LONGEST_NAME = 40
APPLY_SECONDS = 120.0
PURPOSES: Mapping[str, str] = {
    "image": "name a container image that has streamrl in it (docs/clusters.md)",
    "claim": "name a PersistentVolumeClaim for the run's folder that several nodes can mount (docs/clusters.md)",
}
"""Settings that are needed, and their purposes."""


def run_on_kubernetes(
    config_file: Path, overrides: Sequence[str], console: Console, *, dry_run: bool, template: Path | None
) -> None:
    """Apply the manifests of a run, and show kubectl's output; `dry_run`: only show the manifests."""
    whole = manifests(configuration.load(config_file, overrides), template=template)
    console.out(whole.rstrip("\n") if dry_run else apply(whole), highlight=False)


def manifests(config: Config, *, template: Path | None = None) -> str:
    """Return all manifests of the run as YAML, with a new secret in them.

    Raises `ConfigError` if [launch.kubernetes] lacks something, or the trainer cannot be spread evenly over its pods.
    """
    settings = config.launch.kubernetes
    for key, purpose in PURPOSES.items():
        if not getattr(settings, key):
            raise ConfigError(f"launch.kubernetes.{key} is not set: {purpose}")
    found, run, port, pods = pools(config), name_of(config), config.run.port or PORT, settings.trainer_pods
    trainer = on_one_machine("trainer", found["trainer"], pods, setting="launch.kubernetes.trainer_pods")
    of_trainer, of_gserver = needs(trainer, config), needs(found["gserver"][:1], config)
    grace = max(config.limits.drain_seconds, config.limits.save_seconds)
    values = {
        "run": run,
        "namespace": settings.namespace,
        "secret": Secret.make().revealed,
        "config": _settings(config, host=f"{run}-controller"),
        "port": port,
        "url": f"http://{run}-controller:{port}",
        "restarts": config.restarts.number,
        "grace": math.ceil(grace) + LEAVE_SECONDS,
        "image": json.dumps(settings.image),
        "claim": json.dumps(settings.claim),
        "memory": json.dumps(settings.memory),
        "controller_cores": needs(found["controller"], config).cores,
        "trainer_restarts": config.restarts.number * pods,
        "trainer_pods": pods,
        "trainer_cores": of_trainer.cores,
        "trainer_limits": _limits(of_trainer, settings.gpu_resource),
        "gserver_count": len(found["gserver"]),
        "gserver_cores": of_gserver.cores,
        "gserver_limits": _limits(of_gserver, settings.gpu_resource),
        "rollout_count": len(found["rollout"]),
        "rollout_cores": needs(found["rollout"][:1], config).cores,
    }
    return filled("kubernetes.yaml", values, template=template)


def _settings(config: Config, *, host: str) -> str:
    """Return the configuration for all pods as TOML; `host`: the name by which they reach the controller."""
    security = msgspec.structs.replace(config.security, host_names=[*config.security.host_names, host])
    return configuration.to_toml(msgspec.structs.replace(config, security=security), only_changed=True)


def _limits(needed: Needs, resource: str) -> str:
    """Return the limits of a container with GPUs; empty if it needs none."""
    return json.dumps({resource: str(needed.gpus)}) if needed.gpus else ""


def name_of(config: Config) -> str:
    """Return the run's name in the characters that Kubernetes allows: lower-case letters, digits and hyphens."""
    name = re.sub(r"[^a-z0-9]+", "-", config.run.name.lower()).strip("-")[:LONGEST_NAME].strip("-")
    if not name or not name[0].isalpha():
        name = f"run-{name}".strip("-")
    return name


def apply(whole: str) -> str:
    """Apply the manifests `whole` (YAML) with `kubectl apply`; return its output. Raises as `output_of` does.

    An existing secret of the run is kept: its pods use that one, and pods with another secret could not join them.
    """
    import yaml

    set_up_logging("kubernetes")
    found = [each for each in yaml.safe_load_all(whole) if each]
    for secret in [each for each in found if VARIABLE in each.get("stringData", {})]:
        metadata = secret["metadata"]
        namespace = ["--namespace", metadata["namespace"]] if "namespace" in metadata else []
        if _kubectl("get", "secret", metadata["name"], *namespace, "--ignore-not-found", "--output=name"):
            found.remove(secret)
    return _kubectl("apply", "-f", "-", given=yaml.safe_dump_all(found, sort_keys=False))


def _kubectl(*words: str, given: str = "") -> str:
    return output_of(
        *("kubectl", *words),
        given=given,
        seconds=APPLY_SECONDS,
        otherwise="show the manifests with --dry-run, and apply them where there is one",
    )
