"""The `streamrl` command: parses first, and imports the modules of a command only when it runs.

One command starts a whole run (`run`); the others start its pools one by one, on one machine or several, which share
only the controller's URL. The launchers start the hidden commands. Exit codes: 0, 1 (error), 2 (configuration), 3
(another process has its number), 130 (Ctrl-C).

Parameters are described by name in `cli_options.py`.
"""

from __future__ import annotations

import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from streamrl.cli_options import SIZES, add_removed, command, described, load_help_renderer

if TYPE_CHECKING:
    from rich.console import Console

    from streamrl.launch.processes import MemberRole

app = typer.Typer(
    name="streamrl",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
launch = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
app.add_typer(launch, name="launch", help="Start a whole run on a cluster, as \\[launch] in CONFIG describes.")

add_removed(app)

POOLS, LOOK = "Pools, started by hand", "Looking"
"""Panels of the help text."""


@app.callback()
@described
def options(version: bool = False) -> None:
    """Asynchronous reinforcement learning for language models."""


@command(app)
def run(
    config: Path,
    overrides: list[str] | None = None,
    resume_newest: bool = False,
    page: bool = False,
    answer_fd: int | None = None,
) -> None:
    """Run everything on this machine: controller, gservers, trainer, rollout workers."""
    from streamrl.launch.local import run_here

    settings = overrides or ()
    raise typer.Exit(run_here(config, settings, _console(), resume=resume_newest, page=page, reports=answer_fd))


@command(app)
def examples(name: str | None = None) -> None:
    """List the examples, or copy one of them into the folder examples of the working directory."""
    from rich.table import Table

    from streamrl import example_files

    if name is None:
        table = Table("example", "task")
        for row in example_files.described().items():
            table.add_row(*row)
        _console().print(table)
        _show("streamrl examples NAME copies one of them")
    else:
        files = example_files.copied(name)
        _show(f"copied to {', '.join(map(str, files))}; run it with\n  streamrl run {files[0]}")


@command(app, POOLS)
def controller(
    config: Path,
    overrides: list[str] | None = None,
    host: str | None = None,
    port: int | None = None,
    advertise: str = "",
    resume: bool = False,
    died: str = "",
    answer_fd: int | None = None,
) -> None:
    """Start the controller, which all others join. Prints its URL, and at the end a report of the run."""
    from streamrl.launch.ending import report_end
    from streamrl.launch.role import answering, run_controller

    settings = [*(overrides or ()), *(["--resume"] if resume else [])]

    def show_url(url: str) -> None:
        _show(f"the controller listens at {url}; join it with")
        for role in ("gserver", "trainer", "rollout"):
            _show("  " + shlex.join(["streamrl", role, str(config), *settings, "--manager", url]))

    code = run_controller(
        config,
        overrides or (),
        host=host,
        port=port,
        advertise=advertise,
        resume=resume,
        died=died,
        on_ready=answering(answer_fd, show_url),
        on_end=partial(report_end, console=_console()) if answer_fd is None else None,
    )
    raise typer.Exit(code)


def _add_members(role: MemberRole, text: str, *, hidden: bool = False) -> None:
    """Add the command that starts processes of a role; `hidden`: they do not join in the middle of a run."""

    @command(app, POOLS, name=role.replace("_", "-"), help=text, hidden=hidden)
    def start(
        config: Path,
        overrides: list[str] | None = None,
        *,
        manager: str,
        count: int | None = None,
        resume: bool = False,
        index: int | None = None,
        advertise: str = "",
    ) -> None:
        from streamrl.errors import ConfigError
        from streamrl.launch.processes import ProcessCommands

        commands = ProcessCommands(config, overrides or (), manager, advertise, resume)
        if count is None:
            from streamrl.launch.role import run_member

            raise typer.Exit(run_member(role, commands, index=index))
        if index is not None:
            raise ConfigError(f"--index {index} is of one process; with --count {count} the controller assigns them")
        from streamrl.launch.pool import run_pool

        raise typer.Exit(run_pool(role, count, commands))


_add_members("gserver", "Start inference servers, also in the middle of a run.")
_add_members("rollout", "Start rollout workers, also in the middle of a run.")
_add_members("model_worker", "Start one model worker.", hidden=True)


@command(app, POOLS)
def trainer(
    config: Path,
    overrides: list[str] | None = None,
    *,
    manager: str,
    node: int | None = None,
    nodes: int | None = None,
    resume: bool = False,
    advertise: str = "",
) -> None:
    """Start the trainer, or this host's part of it: its model workers."""
    from streamrl.launch.pool import run_trainer
    from streamrl.launch.processes import ProcessCommands

    commands = ProcessCommands(config, overrides or (), manager, advertise, resume)
    raise typer.Exit(run_trainer(commands, node=node, nodes=nodes))


@command(app, hidden=True)
def checkpoint(config: Path, overrides: list[str] | None = None, answer_fd: int | None = None) -> None:
    """Make the folder with the run's initial weights and tokenizer, and print its path."""
    from streamrl.launch.role import answering, run_checkpoint

    raise typer.Exit(run_checkpoint(config, overrides or (), on_ready=answering(answer_fd, _show)))


@command(app, hidden=True)
def replay_rank(config: Path, run_dir: Path, *, index: int = 0, last_step: int, meeting_place: Path) -> None:
    """Be one model worker of a replay."""
    from streamrl.launch.role import run_replay_rank

    code = run_replay_rank(config, run_dir=run_dir, index=index, last_step=last_step, meeting_place=meeting_place)
    raise typer.Exit(code)


@command(app, POOLS)
def gateway(
    config: Path,
    overrides: list[str] | None = None,
    *,
    server: list[str],
    engine: Literal["sglang", "vllm"] = "sglang",
    episodes: Path = Path("episodes"),
    parquet_every: int = 0,
    host: str = "127.0.0.1",
    port: int = 0,
    advertise: str = "",
    token_env: str = "",
) -> None:
    """Serve agents alone, in front of inference servers, and hand finished episodes to any trainer; without a run."""
    from streamrl import config as configuration
    from streamrl.launch.process import run_until_stopped, set_up_logging
    from streamrl.rollout.agents.standalone import serve
    from streamrl.transport.addresses import reach_of_manager
    from streamrl.transport.credentials import read_key

    set_up_logging("gateway")

    def show_url(url: str, key: str) -> None:
        _show(f"agents open episodes with POST {url}/episodes; finished episodes: POST {url}/finished")
        if key and not token_env:
            _show(f"both need the header Authorization: Bearer {key}")

    served = partial(
        serve,
        configuration.load(config, overrides or ()),
        servers=[url.rstrip("/") for url in server],
        engine=engine,
        folder=episodes,
        parquet_every=parquet_every,
        reach=reach_of_manager(host, advertise=advertise),
        port=port,
        key=read_key(token_env, setting="--token-env"),
        on_ready=show_url,
    )
    raise typer.Exit(run_until_stopped(served))


@command(app, POOLS)
def vllm(config: Path, socket: Path, overrides: list[str] | None = None, *, index: int = 0) -> None:
    """Start the vLLM server that gserver INDEX joins, with the run's flags; runs may come and go while it stays."""
    from streamrl import config as configuration
    from streamrl.gserver.vllm.joined import become_server

    become_server(configuration.load(config, overrides or ()), socket, index=index)


@command(app, POOLS)
def drain(url: str, process: str, secret_file: Path | None = None, security_of: Path | None = None) -> None:
    """Make a gserver or a rollout worker finish its work and leave; the run continues."""
    from streamrl.launch import remote

    remote.drain(url, process, secret_file=secret_file, config_file=security_of)
    _show(f"{process} has received the request to leave")


@command(app, LOOK)
def check(
    checked_config: Path | None = None,
    overrides: list[str] | None = None,
    everything: bool = False,
    model: Path | None = None,
    full: bool = False,
) -> None:
    """Try the parts that a run would need: data, model, reward function, ports, folders; show its processes."""
    if (checked_config is None) == (model is None):
        raise typer.BadParameter("give either a CONFIG or --model PATH")
    from streamrl.launch import check as checks

    if checked_config is None:
        raise typer.Exit(checks.check_model(model or Path(), _console(), full=full))
    errors = _console(stderr=True)
    code = checks.check_config(checked_config, overrides or (), _console(), errors, everything=everything)
    raise typer.Exit(code)


@command(app, LOOK)
def plan(
    given: typer.Context,
    maybe_config: Path | None = None,
    overrides: list[str] | None = None,
    costs_of: Path | None = None,
    model_shape: str | None = None,
    gpus: int = 8,
    gpu_memory: float = 80.0,
    gpus_per_host: int = 8,
    peak_tflops: float = 989.0,
    memory_tb_s: float = 3.35,
    host_gbit_s: float = 3200.0,
    context: int = 16384,
    mean_context: int | None = None,
    microbatch_tokens: int = 8192,
    lora_rank: int = 0,
    critic: bool = False,
    reference: bool = False,
    data_parallel: int | None = None,
    tensor_parallel: int | None = None,
    pipeline_parallel: int | None = None,
    context_parallel: int | None = None,
    expert_parallel: int | None = None,
    gservers: int | None = None,
    gserver_tensor: int | None = None,
    as_json: bool = False,
) -> None:
    """Predict a run at these settings and others; or compute how to divide a large model over many GPUs."""
    from streamrl import config as configuration
    from streamrl.errors import ConfigError

    if (maybe_config is None) == (model_shape is None):
        raise ConfigError("streamrl plan takes a CONFIG, or --model-shape with --gpus")
    if maybe_config is None:
        if costs_of is not None:
            raise ConfigError("--from: only with a CONFIG; with --model-shape nothing is measured")
        from streamrl.planner import capacity

        divided = capacity.plan_of_options(**{name: given.params[name] for name in SIZES})
        _show_result(capacity, divided, as_json=as_json)
        return
    options_of_sizes = [option for option in given.command.params if option.name in SIZES]
    if idle := [option.opts[0] for option in options_of_sizes if given.params[option.name or ""] != option.default]:
        raise ConfigError(f"{', '.join(idle)}: only with --model-shape; a plan of CONFIG uses its settings alone")
    from streamrl.planner import advice

    loaded = configuration.load(maybe_config, overrides or ())
    _show_result(advice, advice.plan_run(loaded, run_dir=costs_of, console=_console(stderr=True)), as_json=as_json)


@command(app, LOOK)
def doctor(as_json: bool = False) -> None:
    """Show the parts of this machine that runs can use: CPUs, GPUs, memory, compilers, packages, network, disk."""
    from streamrl.launch import doctor as examination

    found = examination.examine()
    _show_result(examination, found, as_json=as_json)
    raise typer.Exit(int(any(one.needed and not one.ok for one in found)))


@command(app, LOOK)
def graph(config: Path, overrides: list[str] | None = None) -> None:
    """Show the model function calls of a configuration, and the data that they take from each other."""
    from streamrl import config as configuration
    from streamrl.launch.graph_picture import graph_text
    from streamrl.trainer.graph import graph_of

    _console().print(graph_text(graph_of(configuration.load(config, overrides or ()))))


@command(app, LOOK)
def status(*, manager: str, secret_file: Path | None = None, security_of: Path | None = None) -> None:
    """Show the state of a run."""
    from streamrl.launch import remote

    _console().print(remote.status(manager, secret_file=secret_file, config_file=security_of))


@command(app, LOOK)
def page(
    run_dirs: list[Path],
    host: str = "127.0.0.1",
    port: int = 0,
    token_env: str = "",
    answer_fd: int | None = None,
) -> None:
    """Show runs in a browser, during a run or after its end: figures, pools, every token of their rollouts."""
    from streamrl.children import Lifeline
    from streamrl.launch.process import run_until_stopped, set_up_logging
    from streamrl.launch.role import answering
    from streamrl.page.server import serve
    from streamrl.records.view import found_in
    from streamrl.transport.credentials import read_key

    set_up_logging("page")
    if answer_fd is not None:
        os.nice(10)  # a run on the same machine has priority
    folders, token = found_in(run_dirs), read_key(token_env, setting="--token-env")

    def show_url(url: str) -> None:
        _show(url)
        _console(stderr=True).print("this address gives access to the runs; Ctrl-C ends the page", style="dim")

    on_ready, lifeline = answering(answer_fd, show_url), Lifeline.from_environment()
    served = partial(serve, folders, host=host, port=port, token=token, on_ready=on_ready)
    raise typer.Exit(run_until_stopped(served, lifeline=lifeline))


@command(app, LOOK)
def export(run_dir: Path, step: int | None = None, to: Path | None = None, dtype: str = "float32") -> None:
    """Convert a checkpoint to a Hugging Face model, which other programs load."""
    from streamrl.export import export_run

    _show(f"{export_run(run_dir, step=step, to=to, dtype=dtype)} is a Hugging Face model in {dtype}")


@command(app, LOOK)
def report(run_dir: Path, trace: bool = False) -> None:
    """Make summary, plots and the overview as one HTML file again from the records of a run."""
    from streamrl.launch.ending import report_again

    report_again(run_dir, _console(), trace=trace)


@command(app, LOOK)
def replay(
    recorded: Path, overrides: list[str] | None = None, to: Path | None = None, steps: int | None = None
) -> None:
    """Train again on the record of a run, without generation: the same bit for bit, or under another objective."""
    from streamrl.launch.replay import replay_run

    raise typer.Exit(replay_run(recorded, _console(), to=to, steps=steps, overrides=overrides or ()))


# --- clusters ---


@command(launch)
def slurm(
    config: Path,
    overrides: list[str] | None = None,
    dry_run: bool = False,
    resume_newest: bool = False,
    wait: bool = False,
    template: Path | None = None,
) -> None:
    """Submit the run as one Slurm job: controller and trainer, gservers and rollout workers on nodes of their own."""
    from streamrl.launch.slurm import run_on_slurm

    options: dict[str, Any] = {"dry_run": dry_run, "resume": resume_newest, "wait": wait, "template": template}
    raise typer.Exit(run_on_slurm(config, overrides or (), _console(), **options))


@command(launch)
def ray(
    config: Path,
    overrides: list[str] | None = None,
    dry_run: bool = False,
    resume_newest: bool = False,
    address: str = "auto",
) -> None:
    """Start the run on a Ray cluster and stay until its end; Ctrl-C ends it. Needs the extra streamrl\\[ray]."""
    from importlib.util import find_spec

    from streamrl.errors import ConfigError

    if find_spec("ray") is None:
        raise ConfigError("Ray is not installed: pip install 'streamrl[ray]'")
    from streamrl.launch.ray import run_there

    options: dict[str, Any] = {"dry_run": dry_run, "resume": resume_newest, "address": address}
    raise typer.Exit(run_there(config, overrides or (), _console(), **options))


@command(launch)
def kubernetes(
    config: Path, overrides: list[str] | None = None, dry_run: bool = False, template: Path | None = None
) -> None:
    """Start the run on Kubernetes (kubectl apply), or show its manifests. It continues a run of the same name."""
    from streamrl.launch.kubernetes import run_on_kubernetes

    run_on_kubernetes(config, overrides or (), _console(), dry_run=dry_run, template=template)


# --- the program ---


def main() -> None:
    """Entry point: errors that streamrl raises on purpose become one message and an exit code."""
    if not {"-h", "--help"}.isdisjoint(sys.argv) or len(sys.argv) == 1:
        load_help_renderer()
    try:
        app()
    except Exception as error:  # any but streamrl's own is raised again; their classes are imported only now, for speed
        from rich.text import Text

        from streamrl.errors import ConfigError, StreamRLError

        if not isinstance(error, StreamRLError):
            raise
        console = _console(stderr=True)
        console.print(Text(f"error: {error}", style="red"), soft_wrap=True)
        for note in getattr(error, "__notes__", ()):
            console.print(note, markup=False, soft_wrap=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr)


def _show(text: str) -> None:
    """Print a text for the user, without markup."""
    _console().print(text, markup=False, soft_wrap=True)


def _show_result(module: Any, result: Any, *, as_json: bool) -> None:
    """Print a result of `module` by its function `as_json` or `shown`."""
    if as_json:
        typer.echo(module.as_json(result))
    else:
        _console().print(module.shown(result))
