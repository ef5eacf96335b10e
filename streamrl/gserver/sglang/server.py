"""A real SGLang server behind the entry of a gserver: start, readiness, supervision and end.

The run's other processes call SGLang's own HTTP API at the registered address, so no token passes through this process;
it only reports SGLang's figures in heartbeats. SGLang also carries out weight updates by itself: it joins the weight
group and writes buckets directly into its weights, so generation pauses for the whole transfer
(`gserver/updates/update.py`).

Owns the child process (`server/child.py`). Invariant: an address is registered only once the server replies there.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from streamrl.config import GserverConfig, LimitsConfig, LoraConfig, SecurityConfig
from streamrl.gserver.server.child import ChildServer, ServerProcess
from streamrl.gserver.server.monitor import monitoring
from streamrl.gserver.sglang.command import SGLANG, Launch, command, environment
from streamrl.transport.addresses import LOOPBACK, Reach, url_of
from streamrl.transport.credentials import GserverKeys
from streamrl.transport.secret import Secret
from streamrl.transport.tls import certificate_files, client_context

log = logging.getLogger(__name__)


@asynccontextmanager
async def sglang_server(
    settings: GserverConfig,
    limits: LimitsConfig,
    *,
    reach: Reach = LOOPBACK,
    index: int,
    model_dir: Path,
    device: str,
    dtype: str,
    seed: int,
    weight_version: str,
    prompt_cache: bool,
    keys: GserverKeys,
    routed_experts: bool = False,
    encryption: tuple[Secret, SecurityConfig] | None = None,
    lora: LoraConfig | None = None,
    adapter: Path | None = None,
) -> AsyncIterator[ChildServer]:
    """Start a server, wait until it replies, and end it when the context ends.

    Arguments as in `Launch`; `reach`: the address at which it listens, and the one announced to others; `index`:
    the gserver's; `keys`: the keys that callers must present; `encryption`: for TLS, the material of its certificate.
    Raises the errors of `until_ready`, and `ModelError` if SGLang cannot be started.
    """
    stack = ExitStack()
    certificate = tls = None
    if encryption is not None:
        certificate, tls = stack.enter_context(certificate_files(*encryption)), client_context(*encryption)
    reserved = stack.enter_context(reserved_port(reach.local))
    launch = Launch(
        certificate=certificate,
        model_dir=model_dir,
        host=reach.local,
        port=reserved.getsockname()[1],
        device=device,
        dtype=dtype,
        seed=seed % 2**31,
        weight_version=weight_version,
        prompt_cache=prompt_cache,
        lora=lora,
        adapter=adapter,
        routed_experts=routed_experts,
    )
    words = command(settings, launch)
    log.info("starting SGLang: %s", " ".join(words))
    variables = environment(
        device=device,
        threads=settings.threads,
        index=index,
        ranks=settings.sglang.tensor_parallel,
        group_seconds=limits.update_seconds,
        keys=keys,
    )
    scheme = "http" if tls is None else "https"
    try:
        process = await ServerProcess.start("SGLang", words, variables)
    except BaseException:
        stack.close()
        raise
    try:
        async with monitoring(
            SGLANG,
            url_of(reach.local, launch.port, scheme=scheme),
            key=keys.generation,
            tls=tls,
            stuck_seconds=limits.stuck_seconds,
            update_seconds=limits.update_seconds,
        ) as monitor:
            server = ChildServer(process, monitor, url=url_of(reach.announced, launch.port, scheme=scheme))
            began = time.monotonic()
            await server.until_ready(timeout=limits.start_seconds)
            log.info("SGLang (pid %d) is ready after %.0f s", process.pid, time.monotonic() - began)
            async with monitor.polling():
                yield server
    finally:
        await asyncio.shield(process.stop())
        stack.close()


def reserved_port(host: str) -> socket.socket:
    """Return a socket bound to a free port of `host`, which the system gives to no process that requests any port.

    A process that requests this port by its number and may reuse addresses, as HTTP servers may, can listen there: the
    socket itself does not listen. (SGLang opens its port only after it has loaded its model and opened many others.)
    """
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    reserved = socket.socket(family)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(address)
    except OSError:
        reserved.close()
        raise
    return reserved
