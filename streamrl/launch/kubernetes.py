"""`streamrl launch kubernetes`: a run as Kubernetes manifests, applied with kubectl or printed.

The controller and the trainer, which end, are Jobs; gservers and rollout workers are Deployments, since their pods may
leave and join during the run. Processes find the controller by its Service. All pods mount one claim with the run's
folder. A restarted pod continues from the run's latest checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from streamrl import config as configuration
from streamrl.config import Config
from streamrl.errors import ConfigError
from streamrl.launch.clusters import PoolName, needs, on_one_machine, pools, said_by
from streamrl.launch.processes import ProcessPlan
from streamrl.transport.secret import VARIABLE, Secret

Manifest = dict[str, Any]

PORT = 7000
"""Port of the controller if `run.port` is not set."""
CONFIG_FOLDER = "/etc/streamrl"
RUN_FOLDER = "/streamrl"
"""Mount point of the claim; relative paths of the configuration begin there."""
LEAVE_SECONDS = 30
"""Grace period of a pod in addition to `limits.drain_seconds` and `limits.save_seconds`."""
LONGEST_NAME = 40
APPLY_SECONDS = 120.0


def manifests(config: Config) -> list[Manifest]:
    """Return all manifests of the run, with a new secret in them.

    Raises `ConfigError` if [launch.kubernetes] lacks something, or the trainer cannot be spread evenly over its pods.
    """
    settings = config.launch.kubernetes
    for key in ("image", "claim"):
        if not getattr(settings, key):
            raise ConfigError(f"launch.kubernetes.{key} is not set: {_WHAT_FOR[key]}")
    found = pools(config)
    made = _Made(config)
    return [
        made.object("v1", "Secret", "secret", type="Opaque", stringData={VARIABLE: Secret.make().revealed}),
        made.object("v1", "ConfigMap", "config", data={"config.toml": made.settings()}),
        made.object(
            "v1",
            "Service",
            "controller",
            spec={"selector": made.labels("controller"), "ports": [{"name": "http", "port": made.port}]},
        ),
        made.job("controller", found["controller"], ["--host", "0.0.0.0", "--port", str(made.port), "--resume"]),
        made.trainer(found["trainer"]),
        made.deployment("gserver", found["gserver"]),
        made.deployment("rollout", found["rollout"]),
    ]


_WHAT_FOR: Mapping[str, str] = {
    "image": "name a container image that has streamrl in it (docs/clusters.md)",
    "claim": "name a PersistentVolumeClaim for the run's folder that several nodes can mount (docs/clusters.md)",
}


class _Made:
    """Makes the manifests of one run."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._settings = config.launch.kubernetes
        self._run = name_of(config)
        self.port = config.run.port or PORT

    @property
    def url(self) -> str:
        """URL of the controller."""
        return f"http://{self._run}-controller:{self.port}"

    def settings(self) -> str:
        """Return the configuration for all pods, with the controller's host name in it."""
        security = self._config.security
        known = msgspec.structs.replace(security, host_names=[*security.host_names, f"{self._run}-controller"])
        return configuration.to_toml(msgspec.structs.replace(self._config, security=known), only_changed=True)

    def labels(self, part: str) -> dict[str, str]:
        return {"app.kubernetes.io/name": "streamrl", "app.kubernetes.io/instance": self._run, "streamrl/pool": part}

    def object(self, version: str, kind: str, part: str, **content: Any) -> Manifest:
        metadata: dict[str, Any] = {"name": f"{self._run}-{part}", "labels": self.labels(part)}
        if self._settings.namespace:
            metadata["namespace"] = self._settings.namespace
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}

    def job(self, name: PoolName, processes: Sequence[ProcessPlan], options: Sequence[str], **of_job: Any) -> Manifest:
        """Return the Job of a pool that ends; failed pods are restarted."""
        pods = of_job.get("completions", 1)
        spec = {
            "backoffLimit": self._config.restarts.number * pods,
            **of_job,
            "template": self._pod(name, processes, options, restart="Never"),
        }
        return self.object("batch/v1", "Job", name, spec=spec)

    def trainer(self, processes: Sequence[ProcessPlan]) -> Manifest:
        """Return an indexed Job, in which each pod knows its index."""
        pods = self._settings.trainer_pods
        of_one = on_one_machine("trainer", processes, pods, setting="launch.kubernetes.trainer_pods")
        options = ["--manager", self.url, "--resume"]
        if pods > 1:
            options += ["--nodes", str(pods), "--node", "$(NODE)"]
        return self.job("trainer", of_one, options, completions=pods, parallelism=pods, completionMode="Indexed")

    def deployment(self, name: PoolName, processes: Sequence[ProcessPlan]) -> Manifest:
        """Return the Deployment of a pool: each pod is one process, and can leave and join during the run."""
        spec = {
            "replicas": len(processes),
            "selector": {"matchLabels": self.labels(name)},
            "template": self._pod(name, processes[:1], ["--manager", self.url, "--resume"], restart="Always"),
        }
        return self.object("apps/v1", "Deployment", name, spec=spec)

    def _pod(
        self, name: PoolName, processes: Sequence[ProcessPlan], options: Sequence[str], *, restart: str
    ) -> Manifest:
        needed = needs(processes, self._config)
        resources: dict[str, Any] = {"requests": {"cpu": str(needed.cores)}}
        if any(process.role in ("gserver", "model_worker") for process in processes):
            resources["requests"]["memory"] = self._settings.memory
        if needed.gpus:
            resources["limits"] = {self._settings.gpu_resource: str(needed.gpus)}
        environment: list[dict[str, Any]] = [
            {"name": VARIABLE, "valueFrom": {"secretKeyRef": {"name": f"{self._run}-secret", "key": VARIABLE}}}
        ]
        if name == "trainer":
            index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
            environment.append({"name": "NODE", "valueFrom": index})
        container: dict[str, Any] = {
            "name": name,
            "image": self._settings.image,
            "command": ["streamrl", name, f"{CONFIG_FOLDER}/config.toml", *options],
            "workingDir": RUN_FOLDER,
            "env": environment,
            "resources": resources,
            "volumeMounts": [
                {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
                {"name": "run", "mountPath": RUN_FOLDER},
                {"name": "memory", "mountPath": "/dev/shm"},
            ],
        }
        if name == "controller":
            container["ports"] = [{"name": "http", "containerPort": self.port}]
            container["readinessProbe"] = {"tcpSocket": {"port": "http"}, "periodSeconds": 2}
        spec = {
            "restartPolicy": restart,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": math.ceil(
                max(self._config.limits.drain_seconds, self._config.limits.save_seconds)
            )
            + LEAVE_SECONDS,
            "containers": [container],
            "volumes": [
                {"name": "config", "configMap": {"name": f"{self._run}-config"}},
                {"name": "run", "persistentVolumeClaim": {"claimName": self._settings.claim}},
                {"name": "memory", "emptyDir": {"medium": "Memory"}},
            ],
        }
        return {"metadata": {"labels": self.labels(name)}, "spec": spec}


def name_of(config: Config) -> str:
    """Return the run's name in the characters that Kubernetes allows: lower-case letters, digits and hyphens."""
    name = re.sub(r"[^a-z0-9]+", "-", config.run.name.lower()).strip("-")[:LONGEST_NAME].strip("-")
    if not name or not name[0].isalpha():
        name = f"run-{name}".strip("-")
    return name


def as_yaml(whole: Sequence[Manifest]) -> str:
    """Return the manifests as one YAML file."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Writes a string of several lines as a block."""

    Dumper.add_representer(
        str,
        lambda dumper, text: dumper.represent_scalar(
            "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
        ),
    )
    return "".join(f"---\n{yaml.dump(each, Dumper=Dumper, sort_keys=False, width=120)}" for each in whole)


async def apply(whole: Sequence[Manifest]) -> str:
    """Apply the manifests with `kubectl apply`; return its output. Raises as `said_by` does.

    An existing secret of the run is kept: its pods use that one, and pods with another secret could not join them.
    """
    (secret,) = (each["metadata"] for each in whole if each["kind"] == "Secret")
    namespace = ["--namespace", secret["namespace"]] if "namespace" in secret else []
    kept = await _kubectl("get", "secret", secret["name"], *namespace, "--ignore-not-found", "--output=name")
    text = as_yaml([each for each in whole if not (kept and each["kind"] == "Secret")])
    return await _kubectl("apply", "-f", "-", given=text)


async def _kubectl(*words: str, given: str = "") -> str:
    return await said_by(
        *("kubectl", *words),
        given=given,
        seconds=APPLY_SECONDS,
        otherwise="show the manifests with --dry-run, and apply them where there is one",
    )
