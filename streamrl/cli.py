"""The `streamrl` command: parses first, and imports the modules of a command only when it runs.

One command starts a whole run (`run`); the others start its pools one by one, on one machine or several, which share
only the controller's URL. The launchers start the hidden commands. Exit codes: 0, 1 (error), 2 (configuration), 3
(another process has its number), 130 (Ctrl-C).
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn
from urllib.parse import urlsplit

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from streamrl.config import Config, SecurityConfig
    from streamrl.launch.pool import PoolRole
    from streamrl.launch.processes import PlanRole
    from streamrl.transport.secret import Secret

app = typer.Typer(
    name="streamrl",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="Configuration of the run, a TOML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace those of the file, as trainer.lr=1e-5."),
]


def _url(told: str) -> str:
    """Return the controller's URL unchanged; reject one that cannot be an address."""
    if told and not told.startswith(("http://", "https://")):
        raise typer.BadParameter(f"{told!r} does not begin with http:// or https://, as the controller's URL does")
    try:
        host, _ = (parts := urlsplit(told)).hostname, parts.port
    except ValueError:  # invalid port, for example of an IPv6 address without brackets
        host = None
    if told and not host:
        raise typer.BadParameter(f"{told!r} is no address: write it as http://HOST:PORT, with an IPv6 address in []")
    return told


ManagerUrl = Annotated[
    str, typer.Option("--manager", metavar="URL", callback=_url, help="URL of the controller, which it prints.")
]
Index = Annotated[int, typer.Option("--index", min=0, help="Number of this process within its role.")]
FreeIndex = Annotated[
    int | None,
    typer.Option(
        "--index", min=0, help="Number of this process within its role; else the controller gives it a new one."
    ),
]
Advertise = Annotated[
    str,
    typer.Option(
        "--advertise",
        metavar="ADDRESS",
        help="Address by which others reach this host; else the one from which it reaches the controller.",
    ),
]
Count = Annotated[
    int | None,
    typer.Option(
        "--count", min=1, help="How many to start on this host, each with GPUs of its own, and again when they die."
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the run's latest checkpoint, or begin where there is none.")
]
ManagerAddress = Annotated[str, typer.Argument(metavar="URL", callback=_url, help="URL of the controller.")]
SecretFile = Annotated[
    Path | None,
    typer.Option("--secret-file", metavar="FILE", help="File with the run's secret; without it: STREAMRL_SECRET."),
]
SecurityOf = Annotated[
    Path | None,
    typer.Option("--config", metavar="CONFIG", help="Configuration of the run, if it sets anything in \\[security]."),
]
ModelDir = Annotated[Path | None, typer.Option("--model-dir", hidden=True)]
Component = Annotated[str | None, typer.Option("--component", hidden=True)]
AnswerFd = Annotated[int | None, typer.Option("--answer-fd", hidden=True)]


def _show_version(wanted: bool) -> None:
    if wanted:
        from streamrl import __version__

        typer.echo(f"streamrl {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Asynchronous reinforcement learning for language models."""


POOLS = "Pools, started by hand"
LOOK = "Looking"


@app.command()
def run(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the newest run of CONFIG from its latest checkpoint.")
    ] = False,
    page: Annotated[bool, typer.Option("--page", help="Show the run in a browser, too; its address is told.")] = False,
    answer_fd: AnswerFd = None,
) -> None:
    """Run everything on this machine: controller, gservers, trainer, rollout workers."""
    from streamrl import config as configuration
    from streamrl.launch.display import ReportingDisplay, make_display
    from streamrl.launch.local import run_locally
    from streamrl.launch.process import set_up_logging
    from streamrl.launch.run_folders import resume_words
    from streamrl.records.sinks import check_installed

    set_up_logging("run")
    asked = configuration.load(config, overrides or ())
    check_installed(asked.metrics.sinks)
    resolved = _in_its_folder(asked, overrides or (), resume=resume)
    with _reported(
        resolved.run_dir, again=resume_words(["streamrl", "run"], config, overrides or (), resolved.run_dir)
    ):
        if answer_fd is None:
            display = make_display(_console(), config=resolved)
        else:
            display = ReportingDisplay(_console(), config=resolved, reports=answer_fd)
        code = run_locally(resolved, display=display, page=page)
    raise typer.Exit(code)


@app.command()
def examples(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The example to copy; without it: list all.")
    ] = None,
) -> None:
    """List the examples, or copy one of them into the folder examples of the working directory."""
    from rich.table import Table

    from streamrl import example_files

    console = _console()
    if name is None:
        table = Table("example", "what it trains")
        for example, text in example_files.described().items():
            table.add_row(example, text)
        console.print(table)
        console.print("streamrl examples NAME copies one of them", markup=False)
        return
    files = example_files.copied(name)
    console.print(f"copied to {', '.join(map(str, files))}; run it with", markup=False, soft_wrap=True)
    console.print(f"  streamrl run {files[0]}", markup=False, soft_wrap=True)


@app.command(rich_help_panel=POOLS)
def controller(
    config: ConfigFile,
    overrides: Overrides = None,
    host: Annotated[str | None, typer.Option(help="Address to listen at, instead of run.host.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port, instead of run.port; 0: any free one.")
    ] = None,
    advertise: Advertise = "",
    resume: Resume = False,
    died: Annotated[str, typer.Option(hidden=True, help="How the controller before this one has died.")] = "",
    component: Component = None,
    answer_fd: AnswerFd = None,
) -> None:
    """Start the controller, which all others join. Prints its URL, and at the end a report of the run."""

    from streamrl.launch.role import from_latest, run_controller

    settings = [*(overrides or ()), *(["--resume"] if resume else [])]
    if resume:
        overrides = from_latest(config, overrides or (), on_one_host=bool(died))

    def tell(url: str) -> None:
        console = _console()
        console.print(f"the controller listens at {url}; join it with", markup=False, soft_wrap=True)
        for role in ("gserver", "trainer", "rollout"):
            words = shlex.join(["streamrl", role, str(config), *settings, "--manager", url])
            console.print(f"  {words}", markup=False, soft_wrap=True)

    def report(run_dir: Path) -> None:
        again = "the command that started the run, or those of all its pools, with --resume"
        _console().print(_show_report(run_dir, again=again), markup=False, soft_wrap=True)

    code = run_controller(
        config,
        overrides or (),
        host=host,
        port=port,
        advertise=advertise,
        resume=resume,
        died=died,
        on_ready=_teller(answer_fd, tell),
        on_end=report if answer_fd is None else None,
        component=component,
    )
    raise typer.Exit(code)


def _refuse(name: str, *, why: str) -> None:
    """Add the hidden command `name` of earlier versions, which fails with the reason `why`."""

    def refuse() -> None:
        from streamrl.errors import ConfigError

        raise ConfigError(f"there is no `streamrl {name}` any more: {why}")

    anything = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(name, hidden=True, context_settings=anything)(refuse)


ONE_CONTROLLER = "manager and master are one process, which `streamrl controller CONFIG` starts"
_refuse("manager", why=ONE_CONTROLLER)
_refuse("master", why=ONE_CONTROLLER)
_refuse("evaluator", why="rollout workers make evaluations, and `streamrl rollout CONFIG` starts these")


@app.command(rich_help_panel=POOLS)
def gserver(
    config: ConfigFile,
    overrides: Overrides = None,
    *,
    manager: ManagerUrl,
    count: Count = None,
    resume: Resume = False,
    index: FreeIndex = None,
    advertise: Advertise = "",
    model_dir: ModelDir = None,
    component: Component = None,
) -> None:
    """Start inference servers, also in the middle of a run."""
    if count is not None:
        _pool("gserver", count, index, config, overrides, manager, resume, advertise)
    overrides = _from_where(config, overrides, resume, manager=manager)
    _member("gserver", index, config, overrides, manager, model_dir, component, advertise)


@app.command(rich_help_panel=POOLS)
def rollout(
    config: ConfigFile,
    overrides: Overrides = None,
    *,
    manager: ManagerUrl,
    count: Count = None,
    resume: Resume = False,
    index: FreeIndex = None,
    advertise: Advertise = "",
    model_dir: ModelDir = None,
    component: Component = None,
) -> None:
    """Start rollout workers, also in the middle of a run."""
    if count is not None:
        _pool("rollout", count, index, config, overrides, manager, resume, advertise)
    overrides = _from_where(config, overrides, resume, manager=manager)
    _member("rollout", index, config, overrides, manager, model_dir, component, advertise)


@app.command(rich_help_panel=POOLS)
def trainer(
    config: ConfigFile,
    overrides: Overrides = None,
    *,
    manager: ManagerUrl,
    node: Annotated[
        int | None,
        typer.Option(min=0, help="Number of this host among those of the trainer, from 0; or torchrun's RANK."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Hosts over which the model workers are spread; or torchrun's WORLD_SIZE.")
    ] = None,
    resume: Resume = False,
    advertise: Advertise = "",
) -> None:
    """Start the trainer, or this host's part of it: its model workers."""
    import os

    from streamrl import config as configuration
    from streamrl.launch.pool import run_trainer
    from streamrl.launch.process import run_until_stopped, set_up_logging
    from streamrl.launch.processes import share_of
    from streamrl.launch.supervise import save_and_end

    overrides = _from_where(config, overrides, resume, manager=manager, trains=True)
    resolved = configuration.load(config, overrides or ())
    share = share_of(resolved, node=node, nodes=nodes, environment=os.environ)
    set_up_logging("trainer" if share.nodes == 1 else f"trainer {share.node}")
    code = run_until_stopped(
        lambda: run_trainer(
            resolved,
            config_file=config,
            overrides=overrides or (),
            manager_url=manager,
            share=share,
            advertise=advertise,
        ),
        on_first_signal=save_and_end(resolved, lambda: manager),
    )
    raise typer.Exit(code)


@app.command(hidden=True)
def model_worker(
    config: ConfigFile,
    overrides: Overrides = None,
    *,
    manager: ManagerUrl,
    index: Index = 0,
    resume: Resume = False,
    advertise: Advertise = "",
    model_dir: ModelDir = None,
    component: Component = None,
) -> None:
    """Start one model worker."""
    overrides = _from_where(config, overrides, resume, manager=manager, trains=True)
    _member("model_worker", index, config, overrides, manager, model_dir, component, advertise)


@app.command(hidden=True)
def checkpoint(
    config: ConfigFile,
    overrides: Overrides = None,
    manager: Annotated[str, typer.Option("--manager", metavar="URL")] = "",
    component: Component = None,
    answer_fd: AnswerFd = None,
) -> None:
    """Make the folder with the run's initial weights and tokenizer, and tell where it is."""
    from streamrl.launch.role import run_checkpoint

    tell = _teller(answer_fd, lambda folder: _console().print(folder, soft_wrap=True, markup=False))
    code = run_checkpoint(config, overrides or (), on_ready=tell, component=component, manager_url=manager)
    raise typer.Exit(code)


@app.command(rich_help_panel=LOOK)
def check(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="Configuration of the run.")] = None,
    overrides: Overrides = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Show all settings, also those that are as they are by default.")
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="PATH", help="Compare trainer and engine with transformers on this model."),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="With --model: use its weights, and not a small copy with random ones.")
    ] = False,
) -> None:
    """Try what a run would need: data, model, reward function, ports, folders; show what it would start."""
    if (config is None) == (model is None):
        raise typer.BadParameter("give either a CONFIG or --model PATH")
    if config is None:
        _check_model(model or Path(), full=full)
        return
    from rich.syntax import Syntax
    from rich.text import Text

    from streamrl import config as configuration
    from streamrl.launch.dashboard import plan_table
    from streamrl.launch.process import set_up_logging
    from streamrl.launch.processes import plan, visible_gpus

    set_up_logging("check")
    resolved = configuration.load(config, overrides or ())
    console, gpus = _console(), visible_gpus()
    toml = configuration.to_toml(resolved, only_changed=not everything)
    if not everything:
        toml = f"# what differs from the defaults (--all shows all settings)\n{toml}"
    coloured = Syntax(toml, "toml", background_color="default")
    console.print(coloured if console.is_terminal else Text(toml), soft_wrap=True)
    console.print(plan_table(plan(resolved, gpus=gpus)))

    from streamrl.launch.check import rehearse  # imports torch, which takes seconds: the results without it come first

    found = rehearse(resolved, gpus=gpus)
    for mark, style, lines in (
        ("✓", "green", found.tried),
        ("? not tried:", "yellow", found.untried),
        ("! warning:", "yellow", found.warnings),
    ):
        for line in lines:
            console.print(Text.assemble((f"{mark} ", style), line), soft_wrap=True)
    for line in found.wrong:
        _console(stderr=True).print(Text(f"error: {line}", style="red"), soft_wrap=True)
    if found.wrong:
        raise typer.Exit(1)
    told = f"{config} is valid; its run folder is {resolved.run_dir}, its fingerprint {resolved.digest()}"
    console.print(Text(told, style="green"), soft_wrap=True)


def _check_model(folder: Path, *, full: bool) -> None:
    """Print how trainer and embedded engine compute the model in `folder`; exit with 1 if a part fails."""
    from rich.table import Table

    from streamrl.launch.model_check import check_model
    from streamrl.launch.process import set_up_logging

    set_up_logging("check")
    table = Table("part", "result", "why")
    results = check_model(folder.expanduser(), full=full)
    for result in results:
        table.add_row(*result)
    _console().print(table)
    if any(result.verdict == "fails" for result in results):
        raise typer.Exit(1)


SIZE = "With --model-shape"


def _size(*, what: str, minimum: int = 1) -> Any:
    return typer.Option(min=minimum, rich_help_panel=SIZE, help=what)


@app.command(rich_help_panel=LOOK)
def plan(
    asked: typer.Context,
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="Configuration of the run; not with --model-shape.")
    ] = None,
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN_DIR", help="Take what things cost from this run, and make no short one."),
    ] = None,
    model_shape: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=SIZE,
            metavar="NAME",
            help="Work out memory and traffic of such a model: 70B, Qwen3-32B, ..., or a folder with a config.json.",
        ),
    ] = None,
    gpus: Annotated[int, _size(what="GPUs for trainer and gservers together.", minimum=2)] = 8,
    gpu_memory: Annotated[float, typer.Option(rich_help_panel=SIZE, min=1.0, help="GiB of one GPU.")] = 80.0,
    gpus_per_host: Annotated[int, _size(what="GPUs of one host.")] = 8,
    peak_tflops: Annotated[float, typer.Option(rich_help_panel=SIZE, min=1.0, help="Of one GPU, in bfloat16.")] = 989.0,
    memory_tb_s: Annotated[
        float, typer.Option("--memory-tb-s", rich_help_panel=SIZE, min=0.01, help="Memory bandwidth of one GPU.")
    ] = 3.35,
    host_gbit_s: Annotated[
        float, typer.Option("--host-gbit-s", rich_help_panel=SIZE, min=0.1, help="Network of one host, all cards.")
    ] = 3200.0,
    context: Annotated[int, _size(what="Longest prompt and response together, in tokens.")] = 16384,
    mean_context: Annotated[int | None, _size(what="What it is on average; else a quarter of --context.")] = None,
    microbatch_tokens: Annotated[int, _size(what="trainer.max_tokens_per_microbatch")] = 8192,
    lora_rank: Annotated[int, _size(what="Train adapters of this rank, not the weights.", minimum=0)] = 0,
    critic: Annotated[bool, typer.Option("--critic", rich_help_panel=SIZE, help="Train a critic, too.")] = False,
    reference: Annotated[
        bool, typer.Option("--reference", rich_help_panel=SIZE, help="Have a reference model, too.")
    ] = False,
    data_parallel: Annotated[int | None, _size(what="Only with this size in the trainer.")] = None,
    tensor_parallel: Annotated[int | None, _size(what="The same.")] = None,
    pipeline_parallel: Annotated[int | None, _size(what="The same.")] = None,
    context_parallel: Annotated[int | None, _size(what="The same.")] = None,
    expert_parallel: Annotated[int | None, _size(what="The same.")] = None,
    gservers: Annotated[int | None, _size(what="Only with so many gservers.")] = None,
    gserver_tensor: Annotated[int | None, _size(what="Only with so many GPUs for each gserver.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything that was found as JSON.")] = False,
) -> None:
    """Tell what a run would do, at these settings and others; or how a large model is best divided over many GPUs."""
    from streamrl import config as configuration
    from streamrl.errors import ConfigError

    if (config is None) == (model_shape is None):
        raise ConfigError("streamrl plan takes a CONFIG, or --model-shape with --gpus")
    if config is not None and (idle := _given_for_sizes(asked)):
        raise ConfigError(f"{', '.join(idle)}: only with --model-shape; a plan of CONFIG goes by its settings alone")
    if model_shape is not None and run_dir is not None:
        raise ConfigError("--from: only with a CONFIG; with --model-shape nothing is measured")
    if model_shape is not None:
        from streamrl.planner import capacity
        from streamrl.planner.shapes import shape_of

        found = capacity.capacity_plan(
            shape_of(model_shape),
            capacity.Machine(
                gpus=gpus,
                gpu_memory_gib=gpu_memory,
                gpus_per_host=gpus_per_host,
                peak_tflops=peak_tflops,
                memory_tb_s=memory_tb_s,
                host_gbit_s=host_gbit_s,
            ),
            capacity.Workload(
                context=context,
                mean_context=mean_context or max(1, context // 4),
                microbatch_tokens=microbatch_tokens,
                roles=capacity.Roles(lora_rank=lora_rank, critic=critic, reference=reference),
            ),
            data=data_parallel,
            tensor=tensor_parallel,
            pipeline=pipeline_parallel,
            context=context_parallel,
            expert=expert_parallel,
            gservers=gservers,
            server_tensor=gserver_tensor,
        )
        if as_json:
            typer.echo(capacity.as_json(found))
        else:
            _console().print(capacity.shown(found))
        return
    assert config is not None
    from streamrl.planner import advice

    advised = advice.plan_run(
        configuration.load(config, overrides or ()), run_dir=run_dir, console=_console(stderr=True)
    )
    if as_json:
        typer.echo(advice.as_json(advised))
    else:
        _console().print(advice.shown(advised))


def _given_for_sizes(asked: typer.Context) -> list[str]:
    """Return the given options that apply only with --model-shape."""
    of_sizes = [option for option in asked.command.params if getattr(option, "rich_help_panel", None) == SIZE]
    return [option.opts[0] for option in of_sizes if asked.params[option.name or ""] != option.default]


@app.command(rich_help_panel=LOOK)
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything that was found as JSON.")] = False,
) -> None:
    """Tell what this machine has of what runs can use: CPUs, GPUs, memory, compilers, packages, network, disk."""
    from streamrl.launch import doctor as looking

    found = looking.examine()
    if as_json:
        typer.echo(looking.as_json(found))
    else:
        _console().print(looking.shown(found))
    if any(one.needed and not one.ok for one in found):
        raise typer.Exit(1)


@app.command(rich_help_panel=LOOK)
def graph(
    config: ConfigFile,
    overrides: Overrides = None,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Draw it into this file, too.")] = None,
) -> None:
    """Show the model function calls that a configuration asks for, and what they need from each other."""
    from streamrl import config as configuration
    from streamrl.errors import ConfigError
    from streamrl.launch.graph_picture import graph_text, write_svg
    from streamrl.trainer.graph import graph_of

    found = graph_of(configuration.load(config, overrides or ()))
    console = _console()
    console.print(graph_text(found))
    if svg is not None:
        try:
            write_svg(found, svg)
        except OSError as error:
            raise ConfigError(f"--svg {svg}: cannot be written ({error.strerror})") from error
        console.print(f"drawn into {svg}", markup=False, soft_wrap=True)


@app.command(rich_help_panel=POOLS)
def drain(
    manager: ManagerAddress,
    process: Annotated[str, typer.Argument(metavar="ROLE/INDEX", help="For example gserver/2 or rollout/0.")],
    secret_file: SecretFile = None,
    config: SecurityOf = None,
) -> None:
    """Have a gserver or a rollout worker finish what it has and leave, while the run goes on."""
    from streamrl.launch.role import drain_by_name

    secret, security = _security_of(manager, secret_file, config)
    drain_by_name(manager, process, secret=secret, security=security)
    _console().print(f"{process} is asked to leave", markup=False)


@app.command(rich_help_panel=LOOK)
def status(manager: ManagerUrl, secret_file: SecretFile = None, config: SecurityOf = None) -> None:
    """Show the state of a run."""
    import asyncio

    from streamrl.launch.display import picture_of

    secret, security = _security_of(manager, secret_file, config)
    _console().print(asyncio.run(picture_of(manager, secret=secret, security=security)))


@app.command(rich_help_panel=LOOK)
def page(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders of runs, or folders that have runs in them.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen at; only this machine can reach the default.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 0,
    token_env: Annotated[
        str,
        typer.Option("--token-env", metavar="NAME", help="Environment variable with the token; else a random one."),
    ] = "",
    answer_fd: AnswerFd = None,
) -> None:
    """Show runs in a browser, while they go on or after their end: figures, pools, every token of their rollouts."""
    from streamrl.children import Lifeline
    from streamrl.launch.process import run_until_stopped, set_up_logging
    from streamrl.page.server import serve
    from streamrl.records.view import found_in
    from streamrl.transport.keys import read_key

    set_up_logging("page")
    if answer_fd is not None:
        os.nice(10)  # a run on the same machine has priority
    folders, token = found_in(run_dirs), read_key(token_env, setting="--token-env")

    def tell(url: str) -> None:
        _console().print(f"{url}", markup=False, soft_wrap=True)
        _console(stderr=True).print("who has this address may look; Ctrl-C ends the page", style="dim")

    teller = _teller(answer_fd, tell)
    code = run_until_stopped(
        lambda: serve(folders, host=host, port=port, token=token, on_ready=teller),
        lifeline=Lifeline.from_environment(),
    )
    raise typer.Exit(code)


@app.command(rich_help_panel=LOOK)
def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run, or of one of its checkpoints.")],
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="Training step of the checkpoint; else the last one.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="A new folder for it; else one in RUN_DIR/exports.")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Of the weights: float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Make a Hugging Face model, which other programs load, of a checkpoint."""
    from streamrl.launch.export import export_run

    folder = export_run(run_dir, step=step, to=to, dtype=dtype)
    _console().print(f"{folder} is a Hugging Face model in {dtype}", markup=False, soft_wrap=True)


@app.command(rich_help_panel=LOOK)
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run.")],
    trace: Annotated[
        bool, typer.Option("--trace", help="Also write the timeline as trace.json.gz, for https://ui.perfetto.dev.")
    ] = False,
) -> None:
    """Make summary, plots and the overview as one HTML file anew from the records of a run."""
    from streamrl.errors import ConfigError

    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such folder; give the folder of a run, for example runs/addition")
    from streamrl.records.view import is_run

    if not is_run(run_dir):
        raise ConfigError(f"{run_dir} is no run: nothing of one is in it; give the folder of one, as runs/addition")
    _console().print(_show_report(run_dir), markup=False, soft_wrap=True)
    if trace:
        from streamrl.records.view import read_run
        from streamrl.report.trace import TRACE_FILE, write_trace

        file = run_dir / TRACE_FILE
        try:
            count = write_trace(read_run(run_dir), file)
        except OSError as error:
            raise ConfigError(f"--trace: {file} cannot be written ({error.strerror})") from error
        _console().print(f"{count} events in {file}: open it at https://ui.perfetto.dev", markup=False, soft_wrap=True)


@app.command(rich_help_panel=LOOK)
def replay(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run that had run.record = true.")],
    overrides: Overrides = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="New folder for the replay; else one beside RUN_DIR.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, metavar="N", help="Replay the first N recorded steps only.")
    ] = None,
) -> None:
    """Train again on what a run recorded, without generation: the same bit for bit, or under another objective."""
    from rich.text import Text

    from streamrl.launch import replay as replaying
    from streamrl.launch.process import set_up_logging
    from streamrl.report.summary import write_report

    set_up_logging("replay")
    prepared = replaying.prepare(run_dir, to=to, steps=steps, overrides=overrides or ())
    console, folder, found = _console(), prepared.config.run_dir, prepared.steps
    console.print(Text(f"steps {found.first} to {found.last} of {run_dir} into {folder}"), soft_wrap=True)
    if found.ends_because:
        console.print(Text(f"step {found.last} is the last one: {found.ends_because}"), soft_wrap=True)
    if code := replaying.replay(prepared):
        raise typer.Exit(code)
    outcome = replaying.outcome_of(folder)
    write_report(folder)
    if outcome.changed or outcome.difference:
        console.print(replaying.comparison_table(outcome, folder))
    console.print(Text(replaying.verdict(outcome), style="red" if outcome.difference else ""), soft_wrap=True)
    raise typer.Exit(1 if outcome.difference else 0)


@app.command(hidden=True)
def replay_rank(
    config: ConfigFile,
    run_dir: Path,
    *,
    index: Index = 0,
    last_step: Annotated[int, typer.Option("--last-step")],
    meeting_place: Annotated[Path, typer.Option("--meeting-place")],
) -> None:
    """Be one model worker of a replay."""
    from streamrl.launch.role import run_replay_rank

    code = run_replay_rank(config, run_dir=run_dir, index=index, last_step=last_step, meeting_place=meeting_place)
    raise typer.Exit(code)


launch = typer.Typer(
    help="Start a whole run on a cluster, as \\[launch] in CONFIG says where.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(launch, name="launch")
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be handed to the cluster.")]
GoOn = Annotated[bool, typer.Option("--resume", help="Resume the newest run of CONFIG from its latest checkpoint.")]


@launch.command()
def slurm(
    config: ConfigFile,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    resume: GoOn = False,
    wait: Annotated[bool, typer.Option("--wait", help="Stay until the job has ended; Ctrl-C cancels it.")] = False,
) -> None:
    """Submit the run as one Slurm job: controller and trainer, gservers and rollout workers on nodes of their own."""
    import msgspec

    from streamrl import config as configuration
    from streamrl.errors import StreamRLError
    from streamrl.launch.process import run_until_stopped, set_up_logging
    from streamrl.launch.slurm import (
        SCRIPT,
        SETTINGS,
        discard,
        refuse_second_job,
        script,
        submit,
        until_ended,
        write,
    )
    from streamrl.records import progress

    set_up_logging("slurm")
    asked = configuration.load(config, overrides or ())
    if dry_run:
        typer.echo(script(asked, config_file=asked.run_dir / SETTINGS, folder=Path.cwd()), nl=False)
        return
    script(asked, config_file=Path(), folder=Path.cwd())  # rejects an impossible job before the folder is made
    resolved = _in_its_folder(asked, overrides or (), resume=resume)
    asked = msgspec.structs.replace(asked, run=msgspec.structs.replace(asked.run, name=resolved.run.name))

    async def begin() -> None:
        if resume:
            await refuse_second_job(resolved.run_dir / SCRIPT)
            progress.begin_lineage(resolved)  # the job resumes from the latest checkpoint each time that it starts
        try:
            file = write(asked if resume else resolved, folder=Path.cwd())
            job = await submit(file)
        except StreamRLError:
            if not resume:
                discard(resolved)
            raise
        _console().print(
            f"job {job} was submitted with {file}; its logs are in {resolved.run_dir / 'logs'}", markup=False
        )
        if wait:
            await until_ended(job)

    raise typer.Exit(run_until_stopped(begin))


@launch.command()
def ray(
    config: ConfigFile,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    resume: GoOn = False,
    address: Annotated[
        str, typer.Option("--address", metavar="ADDRESS", help="Of the Ray cluster; else that of RAY_ADDRESS.")
    ] = "auto",
) -> None:
    """Start the run on a Ray cluster and stay until its end; Ctrl-C ends it. Needs the extra streamrl\\[ray]."""
    from importlib.util import find_spec

    from streamrl import config as configuration
    from streamrl.errors import ConfigError
    from streamrl.launch.display import make_display
    from streamrl.launch.process import set_up_logging
    from streamrl.launch.run_folders import resume_words

    if find_spec("ray") is None:
        raise ConfigError("Ray is not installed: pip install 'streamrl[ray]'")
    from streamrl.launch.ray import run_on_ray, table

    set_up_logging("ray")
    asked = configuration.load(config, overrides or ())
    if dry_run:
        _console().print(table(asked))
        return
    resolved = _in_its_folder(asked, overrides or (), resume=resume)
    again = resume_words(["streamrl", "launch", "ray"], config, overrides or (), resolved.run_dir)
    with _reported(resolved.run_dir, again=again):
        code = run_on_ray(resolved, address=address, display=lambda made: make_display(_console(), config=made))
    raise typer.Exit(code)


@launch.command()
def kubernetes(config: ConfigFile, overrides: Overrides = None, dry_run: DryRun = False) -> None:
    """Hand the run to Kubernetes (kubectl apply), or show its manifests. It goes on where a run of its name was."""
    import asyncio

    from streamrl import config as configuration
    from streamrl.launch.kubernetes import apply, as_yaml, manifests
    from streamrl.launch.process import set_up_logging

    set_up_logging("kubernetes")
    made = manifests(configuration.load(config, overrides or ()))
    if dry_run:
        typer.echo(as_yaml(made), nl=False)
    else:
        _console().print(asyncio.run(apply(made)), markup=False, soft_wrap=True)


def main() -> None:
    """Entry point: errors that streamrl raises on purpose become one message and an exit code."""
    from streamrl.errors import ConfigError, StreamRLError

    try:
        app()
    except StreamRLError as error:
        from rich.console import Console
        from rich.text import Text

        Console(stderr=True).print(Text(f"error: {error}", style="red"), soft_wrap=True)
        for note in getattr(error, "__notes__", ()):
            Console(stderr=True).print(note, markup=False, soft_wrap=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def _from_where(
    config: Path, overrides: list[str] | None, resume: bool, *, manager: str, trains: bool = False
) -> list[str]:
    """Return the overrides, with `resume` also the checkpoint from which the controller continues."""
    if not resume:
        return list(overrides or ())
    from streamrl.launch.role import from_controllers

    return from_controllers(config, overrides or (), manager_url=manager, needed=trains)


def _member(
    role: PlanRole,
    index: int | None,
    config: Path,
    overrides: list[str] | None,
    manager: str,
    model_dir: Path | None,
    component: str | None,
    advertise: str,
) -> None:
    from streamrl.launch.role import run_member

    code = run_member(
        role,
        index,
        config,
        overrides or (),
        manager_url=manager,
        model_dir=model_dir,
        component=component,
        advertise=advertise,
    )
    raise typer.Exit(code)


def _pool(
    role: PoolRole,
    count: int,
    index: int | None,
    config: Path,
    overrides: list[str] | None,
    manager: str,
    resume: bool,
    advertise: str,
) -> NoReturn:
    """Run the pool, and exit with its code."""
    from streamrl import config as configuration
    from streamrl.errors import ConfigError
    from streamrl.launch.pool import Pool
    from streamrl.launch.process import Departure, run_until_stopped, set_up_logging

    if index is not None:
        raise ConfigError(f"--index {index} is of one process; with --count {count} the controller gives them numbers")
    set_up_logging(f"{role}s")
    pool = Pool(
        configuration.load(config, overrides or ()),
        role=role,
        count=count,
        config_file=config,
        overrides=overrides or (),
        manager_url=manager,
        resume=resume,
        advertise=advertise,
    )
    raise typer.Exit(run_until_stopped(pool.run, on_first_signal=[Departure(pool.leave, "leaving the run")]))


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr)


def _security_of(
    manager_url: str, secret_file: Path | None, config_file: Path | None
) -> tuple[Secret | None, SecurityConfig]:
    """Return the secret of the run with the controller at `manager_url`, or None if it is not known here, and the
    settings of its connections."""
    from streamrl import config as configuration
    from streamrl.transport.secret import of_run_at, read_file

    config = None if config_file is None else configuration.load(config_file)
    security = configuration.SecurityConfig() if config is None else config.security
    if secret_file is not None:
        return read_file(secret_file, setting="--secret-file"), security
    return of_run_at(manager_url, config), security


def _teller(answer_fd: int | None, tell_user: Callable[[str], None]) -> Callable[[str], None]:
    """Return the function with which a process reports that it is ready: to its launcher, or to the user."""
    from streamrl.launch.role import answer

    return tell_user if answer_fd is None else partial(answer, answer_fd)


def _in_its_folder(asked: Config, overrides: Sequence[str], *, resume: bool) -> Config:
    """Return the configuration with the folder of a new run, or of the run to resume and its checkpoint; print both."""
    from streamrl.launch.run_folders import chosen_run, claim_run_dir, other_runs, resumed

    def show(text: str) -> None:
        _console().print(text, markup=False, soft_wrap=True)

    if not resume:
        resolved = claim_run_dir(asked)
        if resolved.run.name != asked.run.name:
            show(f"{asked.run_dir} exists already: this run's folder is {resolved.run_dir}")
        return resolved
    chosen = chosen_run(asked, overrides)
    if others := other_runs(chosen, asked):
        show(f"{chosen.run_dir} is the run to resume; {others}")
    resolved = resumed(chosen, overrides)
    show(f"resuming {resolved.run_dir} from {resolved.run.resume_from}")
    return resolved


@contextmanager
def _reported(run_dir: Path, *, again: str) -> Iterator[None]:
    """Show the run's report at its end, and `again`, the command that resumes it, unless it is finished.

    A run that cannot begin has no report, and its folder is removed if it is empty: the next try keeps the name.
    """
    from streamrl.errors import ConfigError

    try:
        yield
    except ConfigError:
        with suppress(OSError):  # not empty: the folder of a resumed run
            run_dir.rmdir()
        raise
    except BaseException as error:
        error.add_note(_show_report(run_dir, again=again))  # shown after the error
        raise
    _console().print(_show_report(run_dir, again=again), markup=False, soft_wrap=True)


def _show_report(run_dir: Path, *, again: str = "") -> str:
    """Write and show the report of a run; return the closing lines: the places of its files, and how to resume it.

    `again`: the command that resumes it; empty if there is none.
    """
    from streamrl.records import progress
    from streamrl.report.summary import evaluation_table, summary_table, write_report

    console = _console()
    try:
        summary = write_report(run_dir)
        if summary.steps:
            from streamrl.page.bundle import write_overview

            write_overview(run_dir)
    except OSError as error:
        return f"the report of {run_dir} cannot be written: {error}"
    if summary.steps:
        console.print(summary_table(summary))
        if summary.evaluations:
            console.print(evaluation_table(summary.evaluations))
        files = [name for name in ("summary.json", "overview.html", "plots") if (run_dir / name).exists()]
        closing = f"more in {run_dir}: {', '.join(files)}"
    else:
        closing = f"run {summary.run}: no training step was finished"
    found = progress.checkpoints(run_dir)
    if found:
        closing += f"; checkpoint: {found[-1]}"
    if not again or summary.state == "finished":
        return closing
    if not found:
        return f"{closing}; there is no checkpoint in {run_dir}, so nothing to resume"
    return f"{closing}; resume with\n  {again}"
