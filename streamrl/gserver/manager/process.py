"""The gserver manager as a process: the run's one address.

It owns the `Manager` (`core.py`: what is decided), the HTTP server in front of it (`http.py`), the watch over leases
and silences, and its end: it leaves once the run is over and everyone alive was told.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack

from streamrl.config import Config
from streamrl.errors import StreamRLError
from streamrl.gserver.manager.core import Manager
from streamrl.gserver.manager.http import server
from streamrl.local_cache import cache_home
from streamrl.records.timeline import Timeline
from streamrl.transport.addresses import Reach, everywhere, is_loopback, is_wildcard, reach_of_manager, url_of
from streamrl.transport.generation import GenerationClient
from streamrl.transport.http import Hosts, HttpServer
from streamrl.transport.keys import generation_key
from streamrl.transport.secret import encrypts, left_for, of_new_run
from streamrl.transport.tls import client_context, server_context

log = logging.getLogger(__name__)

TELL_SECONDS = 10.0
"""How long the manager stays after the end of the run for those who have not heard of it."""
SHUTDOWN_SECONDS = 1.0
"""For calls that run when the manager leaves."""
LINGER_SECONDS = 1.0
"""After the last was told: who leaves may still ask for the run's final figures."""


async def serve(
    config: Config,
    *,
    host: str,
    port: int,
    advertise: str = "",
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Manage a run until it is over and everyone was told, or until cancelled.

    `advertise`: the address by which others reach the manager; empty: `host`, or where that stands for all addresses of
    this machine, the one from which it reaches others. `on_ready` is called with the URL. Raises `StreamRLError` when
    the address cannot be had, and with the reason when the run ended before its last step, so that a cluster starts
    the run again; `ConfigError` for a secret that cannot be used.
    """
    secret = of_new_run(config)
    reach = reach_of_manager(host, advertise=advertise)
    async with AsyncExitStack() as stack:
        client = GenerationClient(
            timeout=config.weights.timeout_seconds,
            key=generation_key(config, secret),
            tls=client_context(secret, config.security),
        )
        stack.push_async_callback(client.close)
        timeline = Timeline(config.run_dir)
        stack.callback(timeline.close)
        manager = Manager(config, client=client, timeline=timeline, secret=secret, open_to_others=not reach.loopback)
        hosts = Hosts([host, advertise, *config.security.host_names])
        listener = server(manager, hosts=hosts, on_loopback=is_loopback(host))
        stack.push_async_callback(listener.close, patience=SHUTDOWN_SECONDS)
        stack.push_async_callback(manager.close)
        tls = server_context(secret, config.security) if encrypts(config, host) else None
        url = await _listen(listener, host, port, reach, tls=tls)
        left = stack.enter_context(left_for(url, secret))
        if left is None:
            log.warning("the run's secret cannot be left in %s: processes that join by hand need it", cache_home())
        log.info("the manager of run %r listens at %s", config.run.name, url)
        if on_ready is not None:
            on_ready(url)
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(manager.watch(), name="leases and silences")
            await manager.wait_until_told(timeout=TELL_SECONDS)
            await asyncio.sleep(LINGER_SECONDS)
            watching.cancel()
    manager.raise_early_end()


async def _listen(server: HttpServer, host: str, port: int, reach: Reach, *, tls: ssl.SSLContext | None) -> str:
    """Listen, and return the URL."""
    try:
        address, bound = await server.listen(everywhere(reach.local) if is_wildcard(host) else host, port, tls=tls)
    except OSError as error:
        advice = (
            "is another one running there? choose another manager.port, or 0 for any"
            if error.errno == errno.EADDRINUSE
            else "manager.host is an address of this machine (::1 where it has none of IPv4), or 0.0.0.0 or :: for all "
            "that it has"
        )
        raise StreamRLError(
            f"the manager cannot listen at {host}:{port} ({error.strerror or error}); {advice}"
        ) from error
    if is_loopback(address) and not is_loopback(host):
        log.warning(
            "manager.host = %r stands for %s here, which no other machine reaches: give an address", host, address
        )
    told = reach.announced if reach.told or is_wildcard(host) else address
    return url_of(told, bound, scheme="http" if tls is None else "https")
