"""The parameters of the `streamrl` commands: one table of texts and limits by name, for all commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Annotated, Any, TypeVar, get_type_hints
from urllib.parse import urlsplit

import typer


def _url(text: str) -> str:
    """Return the controller's URL unchanged; reject one that cannot be an address. A launcher may give
    `processes.URL_FROM_INPUT`."""
    if text == "-":
        return text
    if text and not text.startswith(("http://", "https://")):
        raise typer.BadParameter(f"{text!r} does not begin with http:// or https://, as the controller's URL does")
    try:
        host, _ = (parts := urlsplit(text)).hostname, parts.port
    except ValueError:  # invalid port, for example of an IPv6 address without brackets
        host = None
    if text and not host:
        raise typer.BadParameter(f"{text!r} is no address: write it as http://HOST:PORT, with an IPv6 address in []")
    return text


def _show_version(wanted: bool) -> None:
    if wanted:
        from streamrl import __version__

        typer.echo(f"streamrl {__version__}")
        raise typer.Exit


Row = tuple[str, dict[str, Any]]
"""Help text of a parameter, and further arguments of `typer.Option` or `typer.Argument`."""


def _row(text: str, **more: Any) -> Row:
    return text, more


ARGUMENTS: dict[str, Row] = {
    "config": _row("Configuration of the run, a TOML file; or the folder of a run.", metavar="CONFIG"),
    "maybe_config": _row("Configuration of the run; not with --model-shape.", metavar="[CONFIG]"),
    "checked_config": _row("Configuration of the run.", metavar="[CONFIG]"),
    "socket": _row("Unix socket at which it will listen, as gserver.vllm.addresses names it.", metavar="SOCKET"),
    "overrides": _row(
        "Settings that replace values of the file, for example trainer.lr=1e-5.", metavar="[KEY=VALUE]..."
    ),
    "name": _row("The example to copy; without it: list all.", metavar="[NAME]"),
    "url": _row("URL of the controller.", metavar="URL", callback=_url),
    "process": _row("For example gserver/2 or rollout/0.", metavar="ROLE/INDEX"),
    "run_dir": _row("Folder of a run; to export, also of one of its checkpoints.", metavar="RUN_DIR"),
    "recorded": _row("Folder of a run that had run.record = true.", metavar="RUN_DIR"),
    "run_dirs": _row("Folders of runs, or folders that have runs in them.", metavar="RUN_DIR..."),
}
OPTIONS: dict[str, Row] = {
    "version": _row("Show the version and exit.", callback=_show_version, is_eager=True),
    "manager": _row("URL of the controller, which it prints.", metavar="URL", callback=_url),
    "index": _row("Number of this process within its role; else the controller assigns one.", min=0),
    "count": _row("Number of processes on this host, each with its own GPUs; dead ones are restarted.", min=1),
    "node": _row("Number of this host among the hosts of the trainer, from 0; or torchrun's RANK.", min=0),
    "nodes": _row("Hosts over which the model workers are spread; or torchrun's WORLD_SIZE.", min=1),
    "advertise": _row(
        "Address by which others reach this host; else its address on the route to the controller.", metavar="ADDRESS"
    ),
    "resume": _row("Continue from the run's latest checkpoint, or begin if there is none."),
    "resume_newest": _row("Resume the newest run of CONFIG from its latest checkpoint.", flag="--resume"),
    "host": _row("Address to listen at; else only this machine can connect, or as run.host sets."),
    "port": _row("Port; 0: any free one.", min=0, max=65535),
    "server": _row("URL of an inference server; several times for several.", metavar="URL"),
    "engine": _row("API of the servers; gservers of streamrl have SGLang's."),
    "episodes": _row("Folder for finished episodes; those in it are kept.", metavar="DIR"),
    "parquet_every": _row("Also write a Parquet file for each N finished episodes; 0: none.", min=0, metavar="N"),
    "secret_file": _row("File with the run's secret; without it: STREAMRL_SECRET.", metavar="FILE"),
    "security_of": _row(
        "Configuration of the run, if it has settings in \\[security].", metavar="CONFIG", flag="--config"
    ),
    "token_env": _row("Environment variable with the token; else a random one.", metavar="NAME"),
    "page": _row("Also show the run in a browser, and print the address."),
    "everything": _row("Show all settings, also those with their default values.", flag="--all"),
    "model": _row("Compare trainer and engine with transformers on this model.", metavar="PATH"),
    "full": _row("With --model: use its weights, and not a small copy with random ones."),
    "step": _row("Training step of the checkpoint; else the last one.", metavar="N"),
    "steps": _row("Replay the first N recorded steps only.", min=1, metavar="N"),
    "to": _row("A new folder for the result; else one in RUN_DIR or next to it.", metavar="DIR"),
    "dtype": _row("Of the weights: float32, bfloat16 or float16."),
    "trace": _row("Also write the timeline as trace.json.gz, for https://ui.perfetto.dev."),
    "as_json": _row("Print all results as JSON.", flag="--json"),
    "costs_of": _row("Take the costs from this run, and make no short one.", metavar="RUN_DIR", flag="--from"),
    "dry_run": _row("Only show the job that the cluster would get."),
    "wait": _row("Stay until the job has ended; Ctrl-C cancels it."),
    "template": _row("Your copy of the template; the original is in streamrl/launch/templates.", metavar="FILE"),
    "address": _row("Of the Ray cluster; else RAY_ADDRESS.", metavar="ADDRESS"),
    **{name: _row("", hidden=True) for name in ("answer_fd", "died", "last_step", "meeting_place")},
}
SIZES: dict[str, Row] = {
    "model_shape": _row(
        "Compute memory and traffic of such a model: 70B, Qwen3-32B, ..., or a folder with a config.json.",
        metavar="NAME",
    ),
    "gpus": _row("GPUs for trainer and gservers together.", min=2),
    "gpu_memory": _row("GiB of one GPU.", min=1.0),
    "gpus_per_host": _row("GPUs of one host.", min=1),
    "peak_tflops": _row("Of one GPU, in bfloat16.", min=1.0),
    "memory_tb_s": _row("Memory bandwidth of one GPU.", min=0.01),
    "host_gbit_s": _row("Network of one host, all cards.", min=0.1),
    "context": _row("Longest prompt and response together, in tokens.", min=1),
    "mean_context": _row("Their mean length; else a quarter of --context.", min=1),
    "microbatch_tokens": _row("trainer.max_tokens_per_microbatch", min=1),
    "lora_rank": _row("Train adapters of this rank, not the weights.", min=0),
    "critic": _row("Also train a critic."),
    "reference": _row("Also keep a reference model."),
    "data_parallel": _row("Only with this size in the trainer.", min=1),
    "tensor_parallel": _row("The same.", min=1),
    "pipeline_parallel": _row("The same.", min=1),
    "context_parallel": _row("The same.", min=1),
    "expert_parallel": _row("The same.", min=1),
    "gservers": _row("Only with this number of gservers.", min=1),
    "gserver_tensor": _row("Only with this number of GPUs for each gserver.", min=1),
}
"""Options of `streamrl plan`."""
SIZE = "With --model-shape"
"""Their panel in the help text."""
REMOVED = {
    **dict.fromkeys(("manager", "master"), "`streamrl controller CONFIG` starts the process of both"),
    "evaluator": "rollout workers make evaluations, and `streamrl rollout CONFIG` starts these",
}
"""Commands of earlier versions, and their replacements."""

Function = TypeVar("Function", bound=Callable[..., None])


def described(function: Function) -> Function:
    """Give the parameters of a command their texts and flags."""
    for name, kind in get_type_hints(function).items():
        if name in ARGUMENTS:
            text, more = ARGUMENTS[name]
            function.__annotations__[name] = Annotated[kind, typer.Argument(help=text, **more)]
        elif name in OPTIONS or name in SIZES:
            text, more = OPTIONS.get(name) or SIZES[name]
            panel: dict[str, Any] = {"rich_help_panel": SIZE} if name in SIZES else {}
            flag = more.get("flag", f"--{name.replace('_', '-')}")
            rest = {key: value for key, value in more.items() if key != "flag"}
            function.__annotations__[name] = Annotated[kind, typer.Option(flag, help=text, **panel, **rest)]
    return function


def command(of: typer.Typer, panel: str | None = None, **more: Any) -> Callable[[Function], Function]:
    """Return the decorator that adds a command to `of`, in the help panel `panel`."""

    def add(function: Function) -> Function:
        return of.command(rich_help_panel=panel, **more)(described(function))

    return add


def add_removed(app: typer.Typer) -> None:
    """Add hidden commands with the names of `REMOVED`, which name the replacement."""

    def refuse(given: typer.Context) -> None:
        from streamrl.errors import ConfigError

        raise ConfigError(f"there is no `streamrl {given.info_name}` any more: {REMOVED[given.info_name or '']}")

    for name in REMOVED:
        any_words = {"ignore_unknown_options": True, "allow_extra_args": True}
        app.command(name, hidden=True, context_settings=any_words)(refuse)


def load_help_renderer() -> None:
    """Import typer's help renderer without rich's Markdown and traceback modules.

    The renderer imports both, and streamrl's help texts use neither; they take half the time of `--help`.
    """
    absent = {"rich.markdown": "Markdown", "rich.traceback": "Traceback"}
    for module, name in absent.items():
        sys.modules[module] = ModuleType(module)
        setattr(sys.modules[module], name, type(name, (), {}))
    try:
        import_module("typer.rich_utils")
    finally:
        for module in absent:
            del sys.modules[module]
