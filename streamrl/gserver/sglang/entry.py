"""Entry point of SGLang's interpreter: installs a lifeline, a time limit for weight groups, checksums of received
weights and support for machines without a GPU, then runs SGLang.

It runs as a file, because SGLang may be installed in an environment without streamrl; it imports only the modules of
streamrl that need no other packages than SGLang's (`received.py`, `server/lifeline.py`). Processes that SGLang spawns
import it again, and so get the same changes. It takes the arguments of SGLang's server.

Changes for a machine without a GPU (sglang 0.5.23, PyPI's wheels):

- SGLang imports `sgl_kernel` for its CUDA operators. If it is not installed, a module takes its place: its
  operators can be imported and raise an error when called, which the torch backends never do.
- The wheel of torchvision is built for CUDA and expects two operators that only its own library defines. If that
  library cannot be loaded, their schemas are declared, which suffices to import torchvision.
- SGLang's adapters request memory that is pinned for copies to a GPU, which torch cannot provide without a GPU. They
  get ordinary memory.
- To report the experts of each token, SGLang keeps their numbers in memory that CUDA pins. Here it is not pinned.
- SGLang spawns its scheduler and its detokenizer, as CUDA requires. Here they are forked: nothing is imported again, so
  a server starts with a third of the CPU time and takes less memory.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import inspect
import multiprocessing
import os
import runpy
import socket
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

API_KEY = "STREAMRL_SGLANG_API_KEY"
"""Environment variable: the key that callers of the server must present, if there is one."""
ADMIN_API_KEY = "STREAMRL_SGLANG_ADMIN_API_KEY"
"""Environment variable: the key that callers must present to change the server."""
CALLS = frozenset(
    (
        *("/generate", "/health", "/model_info", "/server_info"),
        *("/pause_generation", "/continue_generation", "/abort_request"),
        *("/init_weights_update_group", "/destroy_weights_update_group", "/begin_weight_update", "/end_weight_update"),
        *("/update_weights_from_distributed", "/update_weights_from_disk", "/update_weight_version"),
        *("/weights_checker", "/load_lora_adapter", "/unload_lora_adapter", "/v1/models"),
    )
)
"""Calls of SGLang's API that a run makes, in addition to `/metrics`, which SGLang adds when it starts."""
GROUP_SECONDS = "STREAMRL_SGLANG_GROUP_SECONDS"
"""Environment variable: seconds to wait for the other members to form a weight group or to send announced tensors."""
ON_CPU = "SGLANG_USE_CPU_ENGINE"
"""SGLang's own variable for machines without a GPU."""
KERNELS = "sgl_kernel"
KERNELS_VERSION = "0.4.10"
PINNING = ("sglang.srt.lora.layers", "sglang.srt.lora.backend.torch_backend")
"""Modules that request pinned memory."""
ROUTED_EXPERTS = "--enable-return-routed-experts"
DETECTION_OPERATORS = ("nms", "qnms")


def limit_group_waits(seconds: float) -> None:
    """Limit the wait for the other members of a weight group to `seconds`.

    SGLang waits half an hour for them and replies to no request in that time. It has no setting for that, so the
    default argument of its function is replaced.
    """
    from sglang.srt.utils.common import init_custom_process_group as form

    ours = {"timeout": timedelta(seconds=seconds)}
    defaults = [p for p in inspect.signature(form).parameters.values() if p.default is not p.empty]
    form.__defaults__ = tuple(ours.get(p.name, p.default) for p in defaults)


def listen_where_told() -> None:
    """Have the store at which SGLang's ranks meet listen only at its configured address.

    By default it listens at every address of the machine and requires no key; given a socket, it listens there.
    """
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # a function has this name, too
    open_store = rendezvous.TCPStore

    def open_at(*, host_name: str, port: int, is_master: bool, **options: Any) -> Any:
        if is_master:
            family, *_, address = socket.getaddrinfo(host_name, port, type=socket.SOCK_STREAM)[0]
            options["master_listen_fd"] = socket.create_server(address[:2], family=family).detach()
        return open_store(host_name=host_name, port=port, is_master=is_master, **options)

    rendezvous.TCPStore = open_at


def show_keys_to_sglang_alone() -> None:
    """Pass SGLang its keys as flags, without exposing them to `ps` or to the environment of its child processes."""
    for variable, flag in ((API_KEY, "--api-key"), (ADMIN_API_KEY, "--admin-api-key")):
        if key := os.environ.pop(variable, ""):
            sys.argv.append(f"{flag}={key}")


def serve_only_what_a_run_needs() -> None:
    """Remove all other calls from SGLang's HTTP server, so that no caller can make them, with any key.

    Some unpickle their input (`/update_weights_from_tensor`, `/load_lora_adapter_from_tensors`) or data that they then
    fetch (`/update_weights_from_ipc`), which runs code in it; some write files at a path in the request
    (`/start_profile`). For some SGLang requires no key: paths that begin like `/health`, and WebSockets
    (`/v1/realtime`).
    """
    from sglang.srt.entrypoints import http_server

    routes = http_server.app.router.routes
    routes[:] = [route for route in routes if getattr(route, "path", "") in CALLS]


def refuse_keys_that_are_no_ascii() -> None:
    """Have SGLang refuse keys that are not ASCII as wrong keys; by itself it fails (500), with a traceback."""
    compare_as_bytes(importlib.import_module("sglang.srt.utils.auth"))


def compare_as_bytes(auth: Any) -> None:
    """Have SGLang's module `auth` compare keys as bytes."""
    compare = auth.secrets.compare_digest
    auth.secrets = types.SimpleNamespace(compare_digest=lambda shown, key: compare(shown.encode(), key.encode()))


def find_streamrl() -> None:
    """Make modules of streamrl importable from this file's folder, even if streamrl is not installed."""
    package = types.ModuleType("streamrl")
    package.__path__ = [str(Path(__file__).resolve().parents[2])]
    sys.modules["streamrl"] = package


def take_checksums_of_updates() -> None:
    """Install `received.py`."""
    from streamrl.gserver.sglang import received

    received.install()


def support_cpu() -> None:
    """Let SGLang be imported and serve without CUDA operators."""
    if importlib.util.find_spec(KERNELS) is None:
        sys.modules[KERNELS] = Kernels(KERNELS)
    declare_detection_operators()
    pin_no_memory()
    fork_processes()
    if ROUTED_EXPERTS in sys.argv:
        leave_memory_unpinned()


def leave_memory_unpinned() -> None:
    """Have SGLang allocate host memory without registering it with CUDA."""
    from sglang.srt.mem_cache.pool_host import common

    common._cuda_host_register = lambda *_, **__: None


def pin_no_memory() -> None:
    """Give the modules of SGLang's adapters ordinary memory when they request pinned memory."""
    import torch

    from streamrl.gserver.sglang.received import AfterImport

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *values, pin_memory=False, **options: make(*values, **options)

    class Unpinned(types.ModuleType):
        """Takes the place of `torch` in these modules."""

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    instead = Unpinned(torch.__name__)
    for name in ("empty", "tensor", "zeros"):
        setattr(instead, name, unpinned(getattr(torch, name)))
    sys.meta_path[:0] = [AfterImport(name, lambda module: setattr(module, "torch", instead)) for name in PINNING]
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor.clone()  # type: ignore[method-assign, assignment]


def fork_processes() -> None:
    """Fork the processes that SGLang starts, regardless of the start method that it sets."""
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda method, force=False: None


class Kernels(types.ModuleType):
    """Takes the place of `sgl_kernel`: has every operator, but each raises an error when called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__version__ = KERNELS_VERSION
        self.__spec__ = ModuleSpec(name, loader=None)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def operator(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(
                f"{KERNELS}.{name} needs CUDA; on this machine choose an SGLang backend that does without it"
            )

        setattr(self, name, operator)
        return operator


def declare_detection_operators() -> None:
    """Declare the operators that torchvision expects of its own library, unless that can be loaded."""
    import torch

    found = importlib.util.find_spec("torchvision")
    for folder in (found and found.submodule_search_locations) or ():
        for library in Path(folder).glob("_C*.so"):
            with suppress(OSError):  # it was built for CUDA, or for another torch
                torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    for name in DETECTION_OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


if __name__ in ("__main__", "__mp_main__"):
    find_streamrl()
    from streamrl.gserver.server.lifeline import STACKS_SIGNAL, hold_lifeline

    faulthandler.register(STACKS_SIGNAL)
if __name__ == "__main__":
    hold_lifeline()
    gc.disable()  # while permanent modules are imported: repeated scans of them take a third of the import time
if __name__ in ("__main__", "__mp_main__") and os.environ.get(ON_CPU) == "1":
    support_cpu()
if __name__ in ("__main__", "__mp_main__") and GROUP_SECONDS in os.environ:
    limit_group_waits(float(os.environ[GROUP_SECONDS]))
if __name__ in ("__main__", "__mp_main__"):
    listen_where_told()
    take_checksums_of_updates()

if __name__ == "__main__":
    show_keys_to_sglang_alone()
    refuse_keys_that_are_no_ascii()
    serve_only_what_a_run_needs()
    gc.freeze()
    gc.enable()
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
