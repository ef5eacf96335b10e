"""The gserver manager behind its address, the run's one URL.

`managing` opens the `Manager` (`core.py`, the decisions) with its HTTP server (`http.py`); the controller
(`streamrl/controller.py`) also runs the trainer's master.
"""

from __future__ import annotations

import errno
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

from streamrl import essential
from streamrl.config import Config
from streamrl.errors import StreamRLError
from streamrl.gserver.manager.core import Manager
from streamrl.gserver.manager.http import server
from streamrl.local_cache import cache_home
from streamrl.records.timeline import Timeline
from streamrl.transport.addresses import Reach, everywhere, is_loopback, is_wildcard, reach_of_manager, url_of
from streamrl.transport.credentials import generation_key
from streamrl.transport.generation import GenerationClient
from streamrl.transport.http import Hosts, HttpServer
from streamrl.transport.secret import encrypts, left_for, of_new_run
from streamrl.transport.tls import client_context, server_context
from streamrl.waits import CLOSE_SECONDS, cancel

log = logging.getLogger(__name__)


class ManagerService(NamedTuple):
    """A listening manager."""

    manager: Manager
    url: str
    reach: Reach
    """The addresses by which others reach this process."""


@asynccontextmanager
async def managing(config: Config, *, host: str, port: int, advertise: str = "") -> AsyncIterator[ManagerService]:
    """Manage a run until the context ends.

    `advertise`: the address by which others reach the manager; if empty, `host`, or if `host` stands for all addresses
    of this machine, the address from which this machine reaches others. Raises `StreamRLError` if the manager cannot
    listen at the address, `ConfigError` for a secret that cannot be used.
    """
    secret = of_new_run(config)
    reach = reach_of_manager(host, advertise=advertise)
    async with AsyncExitStack() as stack:
        client = GenerationClient(
            timeout=config.limits.update_seconds,
            key=generation_key(config, secret),
            tls=client_context(secret, config.security),
        )
        stack.push_async_callback(client.close)
        timeline = Timeline(config.run_dir)
        stack.callback(timeline.close)
        manager = Manager(config, client=client, timeline=timeline, secret=secret, open_to_others=not reach.loopback)
        hosts = Hosts([host, advertise, *config.security.host_names])
        listener = server(manager, hosts=hosts, on_loopback=is_loopback(host))
        stack.push_async_callback(listener.close, patience=CLOSE_SECONDS)
        stack.push_async_callback(manager.close)
        tls = server_context(secret, config.security) if encrypts(config, host) else None
        url = await _listen(listener, host, port, reach, advertised=bool(advertise), tls=tls)
        if stack.enter_context(left_for(url, secret)) is None:
            log.warning("the run's secret cannot be left in %s: processes that join by hand need it", cache_home())
        log.info("the controller of run %r listens at %s", config.run.name, url)
        watching = essential.begin(manager.watch(), name="the watch over leases and silences")
        try:
            yield ManagerService(manager, url, reach)
        finally:
            await cancel(watching)


async def _listen(
    server: HttpServer, host: str, port: int, reach: Reach, *, advertised: bool, tls: ssl.SSLContext | None
) -> str:
    """Listen, and return the URL, with `reach.announced` if that was given (`advertised`)."""
    try:
        address, bound = await server.listen(everywhere(reach.local) if is_wildcard(host) else host, port, tls=tls)
    except OSError as error:
        advice = (
            "is another one running there? choose another run.port, or 0 for any"
            if error.errno == errno.EADDRINUSE
            else "run.host is an address of this machine (::1 if it has none of IPv4), or 0.0.0.0 or :: for all of them"
        )
        raise StreamRLError(
            f"the controller cannot listen at {host}:{port} ({error.strerror or error}); {advice}"
        ) from error
    if is_loopback(address) and not is_loopback(host):
        log.warning("run.host = %r stands for %s here, which no other machine reaches: give an address", host, address)
    announced = reach.announced if advertised or is_wildcard(host) else address
    return url_of(announced, bound, scheme="http" if tls is None else "https")
