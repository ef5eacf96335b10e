"""What a cluster is asked for: how pools are spread, what their processes need, and the manifests for Kubernetes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import Config, from_dict, load
from streamrl.errors import ConfigError, DeadlineExceeded, StreamRLError
from streamrl.launch.clusters import filled, needs, on_one_machine, output_of, pools
from streamrl.launch.kubernetes import manifests, name_of
from streamrl.launch.processes import plan
from streamrl.transport.http import Hosts

ROOT = Path(__file__).parents[2]
KUBERNETES = {"image": "registry.example/streamrl:1", "claim": "runs"}
VERSIONS = ("1.28", "1.37")


def config(**sections: Any) -> Config:
    return from_dict(sections)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_pools_hold_every_process_once(gservers: int, model_workers: int, workers: int, evaluated: bool) -> None:
    made = config(
        gserver={"count": gservers, "threads": 3},
        trainer={"data_parallel": model_workers, "batch_groups": 16, "threads": 2},
        rollout={"workers": workers, "reward": {"processes": 2}},
        evaluation={"at_end": evaluated},
    )
    found = pools(made)
    names = [process.name for members in found.values() for process in members]
    assert sorted(names) == sorted(process.name for process in plan(made))
    assert needs(found["gserver"], made).cores == 3 * gservers
    assert needs(found["trainer"], made).cores == 2 * model_workers
    assert needs(found["controller"], made).cores == 1
    assert needs(found["rollout"], made).cores == (1 + 2) * workers
    assert all(needs(members, made).gpus == 0 for members in found.values())


@given(st.integers(1, 12), st.integers(1, 6))
def test_pools_are_spread_evenly_or_not_at_all(count: int, machines: int) -> None:
    members = pools(config(gserver={"count": count}))["gserver"]
    if count % machines:
        with pytest.raises(
            ConfigError, match=rf"nodes = {machines}: the {count} processes of gserver .* gserver\.count"
        ):
            on_one_machine("gserver", members, machines, setting="nodes")
    else:
        assert len(on_one_machine("gserver", members, machines, setting="nodes")) * machines == count


def test_gpus_are_asked_for_where_models_are_computed() -> None:
    made = config(
        run={"device": "cuda"},
        gserver={"engine": "sglang", "count": 2, "sglang": {"tensor_parallel": 4}},
        trainer={"data_parallel": 2},
    )
    assert {name: needs(members, made).gpus for name, members in pools(made).items()} == {
        "controller": 0,
        "trainer": 2,
        "gserver": 8,
        "rollout": 0,
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_what_kubernetes_publishes(version: str, tmp_path: Path) -> None:
    made = config(
        run={"name": "My_run.7", "device": "cuda"},
        gserver={"count": 3},
        trainer={"data_parallel": 4},
        evaluation={"at_end": True},
        launch={"kubernetes": {**KUBERNETES, "namespace": "rl", "trainer_pods": 2}},
    )
    read = objects(manifests(made))
    for manifest in read:
        kubernetes_validate.validate(manifest, version, strict=True)
    kinds = {f"{each['kind']}/{each['metadata']['name']}" for each in read}
    assert kinds == {
        "Secret/my-run-7-secret",
        "ConfigMap/my-run-7-config",
        "Service/my-run-7-controller",
        *(f"Job/my-run-7-{name}" for name in ("controller", "trainer")),
        # ends well when the run has failed, too: a Job would not begin it again with the run
        *(f"Deployment/my-run-7-{name}" for name in ("gserver", "rollout")),
    }
    by_name = {f"{each['kind']} {each['metadata']['labels']['streamrl/pool']}": each for each in read}
    trainer = by_name["Job trainer"]["spec"]
    assert trainer["completions"] == trainer["parallelism"] == 2
    assert trainer["template"]["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert by_name["Deployment gserver"]["spec"]["replicas"] == 3
    asked = urlsplit(argument(by_name["Deployment rollout"], "--manager"))
    assert (asked.hostname, asked.port) == (by_name["Service controller"]["metadata"]["name"], 7000)
    (tmp_path / "config.toml").write_text(by_name["ConfigMap config"]["data"]["config.toml"])
    names = load(tmp_path / "config.toml").security.host_names
    assert not Hosts(names).forged(asked.netloc, None), "the controller would refuse all who ask for it by its Service"
    service = by_name["Service controller"]["spec"]["selector"]
    assert service.items() <= by_name["Job controller"]["spec"]["template"]["metadata"]["labels"].items()


def argument(manifest: dict[str, Any], option: str) -> str:
    """What follows `option` in the command of its pods."""
    command = manifest["spec"]["template"]["spec"]["containers"][0]["command"]
    return str(command[command.index(option) + 1])


def objects(text: str) -> list[dict[str, Any]]:
    """The manifests in a text, which starts with a comment."""
    return [each for each in yaml.safe_load_all(text) if each is not None]


def manifests_with(made: Config, *, secret: dict[str, str]) -> list[dict[str, Any]]:
    """What was made, with another secret: each time there is a new one."""
    whole = objects(manifests(made))
    assert whole[0]["stringData"] != secret
    return [{**whole[0], "stringData": secret}, *whole[1:]]


def test_the_commands_of_pods_are_commands_of_streamrl(tmp_path: Path) -> None:
    """Every pod's command is parsed, up to the configuration, which is not in its place here."""
    made = config(
        trainer={"data_parallel": 2},
        evaluation={"at_end": True},
        launch={"kubernetes": {**KUBERNETES, "trainer_pods": 2}},
    )
    commands = [
        each["spec"]["template"]["spec"]["containers"][0]["command"]
        for each in objects(manifests(made))
        if each["kind"] in ("Job", "Deployment")
    ]
    assert [command[:2] for command in commands] == [
        ["streamrl", name] for name in ("controller", "trainer", "gserver", "rollout")
    ]
    script = (
        "import sys\nfrom streamrl import cli\n"
        f"for command in {commands!r}:\n"
        "    sys.argv = ['streamrl', *(word.replace('$(NODE)', '1') for word in command[1:])]\n"
        "    try:\n        cli.main()\n"
        "    except SystemExit as end:\n        assert end.code == 2, (command, end.code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stderr.count("/etc/streamrl/config.toml: cannot be read") == len(commands), done.stderr


@given(st.text(min_size=1, max_size=80))
def test_names_are_what_kubernetes_allows(name: str) -> None:
    found = name_of(config(run={"name": name}))
    assert len(found) <= 45
    assert found[0].isalpha()
    assert found[-1].isalnum()
    assert all(letter.isascii() and (letter.isdigit() or letter.islower() or letter == "-") for letter in found)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    for key in KUBERNETES:
        lacking = {name: value for name, value in KUBERNETES.items() if name != key}
        with pytest.raises(ConfigError, match=rf"launch\.kubernetes\.{key} is not set"):
            manifests(config(launch={"kubernetes": lacking}))


def test_manifests_go_to_kubectl(tmp_path: Path) -> None:
    """A stand-in for kubectl, which keeps what it is given."""
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        f"#!/bin/sh\ncd {tmp_path}\ncase $1 in\n"
        'get) [ "$2 $4 $5" = "secret --ignore-not-found --output=name" ] && ! [ -e applied ] || echo "secret/$3";;\n'
        'apply) [ "$*" = "apply -f -" ] && cat > applied && echo job.batch/x created;;\nesac\n'
    )
    kubectl.chmod(0o755)
    words = ["examples/copy_scratch.toml", *(f"launch.kubernetes.{key}={value}" for key, value in KUBERNETES.items())]

    def launch(*options: str, path: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "streamrl", "launch", "kubernetes", *words, *options],
            cwd=ROOT,
            env={**os.environ, "PATH": path, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    done = launch(path=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    assert "job.batch/x created" in done.stdout
    applied = list(yaml.safe_load_all((tmp_path / "applied").read_text()))
    assert applied == manifests_with(load(ROOT / words[0], words[1:]), secret=applied[0]["stringData"])
    assert applied[0]["stringData"]["STREAMRL_SECRET"] not in done.stdout + done.stderr
    assert launch(path=f"{tmp_path}:{os.environ['PATH']}").returncode == 0
    again = list(yaml.safe_load_all((tmp_path / "applied").read_text()))
    assert again == applied[1:], "the pods that run know the first secret"
    shown = launch("--dry-run", path=str(tmp_path))
    assert [each["kind"] for each in objects(shown.stdout)] == [each["kind"] for each in applied]
    kubectl.unlink()
    nowhere = launch(path=str(tmp_path))
    assert nowhere.returncode == 2
    assert "there is no kubectl on this machine" in nowhere.stderr


def ask(*words: str, given: str = "", seconds: float = 60.0) -> str:
    return output_of(*words, given=given, seconds=seconds, otherwise="install it")


def test_a_command_of_a_cluster_is_asked() -> None:
    much = "some more than a pipe holds " * 10_000
    assert ask("cat", given=much) == much.strip()
    assert ask("sh", "-c", "exec 0<&-; echo done", given=much) == "done", "it need not read what it is given"
    assert ask("sh", "-c", "cat; echo done") == "done"
    with pytest.raises(StreamRLError, match="it is on fire"):
        ask("sh", "-c", "echo it is on fire >&2; exit 3")
    with pytest.raises(StreamRLError, match="exit code 3"):
        ask("sh", "-c", "exit 3")
    with pytest.raises(ConfigError, match="there is no no-such-command on this machine: install it"):
        ask("no-such-command")
    with pytest.raises(DeadlineExceeded, match="waited 0 s for an answer to `sleep 600`"):
        ask("sleep", "600", seconds=0.2)


def test_a_template_of_the_user_is_filled_in(tmp_path: Path) -> None:
    file = tmp_path / "own.sh"
    file.write_text("#!/bin/sh\n  {{a}}\nnot {{b}} here\n$(({{c}}))\n")
    assert filled("slurm.sh", {"a": "1\n2\n", "b": "", "c": 3}, template=file) == "#!/bin/sh\n  1\n  2\n$((3))\n"
    with pytest.raises(ConfigError, match=r"own\.sh: there is no value for b; there are a"):
        filled("slurm.sh", {"a": ""}, template=file)
    with pytest.raises(ConfigError, match=r"--template .*nowhere: cannot be read"):
        filled("slurm.sh", {}, template=tmp_path / "nowhere")
