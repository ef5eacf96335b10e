"""TLS between a run's processes: certificates that its secret makes, and ones that were given."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography import x509

from streamrl.config import SecurityConfig, from_dict
from streamrl.errors import ConfigError, NotOfRun, PeerLost
from streamrl.gserver.manager.http import managing
from streamrl.transport import tls
from streamrl.transport.credentials import GserverKeys
from streamrl.transport.generation import GenerateRequest, GenerationClient
from streamrl.transport.manager_client import ControlClient
from streamrl.transport.secret import Secret, of_run_at
from streamrl.transport.tls import certificate_files, client_context, server_context
from tests.gserver.harness import small_config
from tests.gserver.serving import running
from tests.gserver.tiny import make_model, save

OURS = SecurityConfig()
"""Nothing is given."""


@asynccontextmanager
async def listening(context: ssl.SSLContext) -> AsyncIterator[int]:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def connects(port: int, context: ssl.SSLContext) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    except ssl.SSLError:
        return False
    writer.close()
    return True


async def test_a_server_of_the_run_is_believed_by_those_who_know_its_secret_alone() -> None:
    secret = Secret.make()
    async with listening(server_context(secret, OURS)) as port:
        assert await connects(port, client_context(secret, OURS))
        assert not await connects(port, client_context(Secret.make(), OURS)), "another run"
        assert not await connects(port, client_context(None, OURS))
        assert not await connects(port, ssl.create_default_context())
    async with listening(server_context(Secret.make(), OURS)) as port:
        assert not await connects(port, client_context(secret, OURS)), "somebody in between"


def give_certificate(secret: Secret, folder: Path) -> None:
    with certificate_files(secret, OURS) as files:
        for name, file in (("tls.crt", files.certificate), ("tls.key", files.key)):
            (folder / name).write_text(Path(file).read_text())


async def test_given_certificates_are_checked_by_their_authority_and_names(tmp_path: Path) -> None:
    secret = Secret.make()
    given, crt, key = SecurityConfig(tls_dir=str(tmp_path)), tmp_path / "tls.crt", tmp_path / "tls.key"
    give_certificate(secret, tmp_path)
    async with listening(server_context(Secret.make(), given)) as port:
        assert await connects(port, client_context(secret, OURS))
        assert not await connects(port, client_context(secret, given)), "no authority that the machine knows"
    crt.write_text(key.read_text())
    with pytest.raises(ConfigError, match="no certificate with its key"):
        server_context(secret, given)
    (tmp_path / "ca.crt").write_text("no authority")
    with pytest.raises(ConfigError, match=r"ca\.crt cannot be read"):
        client_context(secret, given)
    with pytest.raises(ConfigError, match=r"security\.tls_dir: there is no folder"):
        client_context(secret, SecurityConfig(tls_dir=str(tmp_path / "none")))


def test_the_authority_is_the_same_everywhere_and_no_certificate_has_the_secret(tmp_path: Path) -> None:
    secret = Secret("a-secret-that-tests-know", origin="here")
    with certificate_files(secret, OURS) as first, certificate_files(secret, OURS) as second:
        one, two = (x509.load_pem_x509_certificate(Path(f.certificate).read_bytes()) for f in (first, second))
        assert Path(first.key).parent.stat().st_mode & 0o077 == 0
        assert Path(first.key).read_text() != Path(second.key).read_text()
    assert not Path(first.key).exists()
    assert one.issuer == two.issuer
    assert one.public_key() != two.public_key()


async def test_a_manager_and_a_gserver_beyond_the_loopback_address_speak_tls_unless_told_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path / "cache"))
    for encryption, host, scheme in (
        ("auto", "127.0.0.1", "http"),
        ("on", "127.0.0.1", "https"),
        ("off", "0.0.0.0", "http"),
    ):
        config = small_config(tmp_path, security={"encryption": encryption})
        async with managing(config, host=host, port=0) as found:
            assert found.url.startswith(f"{scheme}://")
    async with managing(small_config(tmp_path), host="0.0.0.0", port=0) as found:
        url = found.url
        assert url.startswith("https://")
        port = url.rpartition(":")[2]
        secret = of_run_at(url)
        for known, fails in ((secret, False), (Secret.make(), True)):
            async with ControlClient(f"https://127.0.0.1:{port}", secret=known, timeout=5.0) as client:
                if fails:
                    with pytest.raises(NotOfRun, match=r"certificate .* this process has another secret, or none"):
                        await client.resume_point(patience=1000.0)
                else:
                    assert (await client.status()).state == "joining"


async def test_what_is_wrong_with_a_connection_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = Secret.make()
    client = ControlClient("https://127.0.0.1", secret=secret)
    plain = await asyncio.start_server(lambda _, writer: writer.write(b"HTTP/1.1 400 no\r\n\r\n"), "127.0.0.1", 0)
    async with plain:
        client.url = f"https://127.0.0.1:{plain.sockets[0].getsockname()[1]}"
        with pytest.raises(PeerLost, match=r"speaks no TLS .* is security\.encryption the same there"):
            await client.status()
    monkeypatch.setattr(tls, "_BEGIN", datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC))
    async with listening(server_context(secret, OURS)) as port:
        client.url = f"https://127.0.0.1:{port}"
        with pytest.raises(NotOfRun, match=r"not yet valid, by this machine's clock, which is at 20\d\d-"):
            await client.status()
    await client.close()


async def test_a_gserver_speaks_tls_to_those_who_know_it(tmp_path: Path) -> None:
    secret = Secret.make()
    config = from_dict({"gserver": {"engine": "simulated"}, "security": {"encryption": "on"}})
    keys = GserverKeys.of(config, secret, 0)
    folder = save(make_model(), tmp_path / "model")
    async with running(config, index=0, model_dir=folder, keys=keys, secret=secret) as (_, url):
        assert url.startswith("https://")
        for context, fails in ((client_context(secret, OURS), False), (client_context(Secret.make(), OURS), True)):
            async with GenerationClient(timeout=10, key=keys.generation, tls=context) as client:
                if fails:
                    with pytest.raises(NotOfRun, match="certificate"):
                        await client.generate(url, GenerateRequest(input_ids=[1, 2]))
                else:
                    assert (await client.generate(url, GenerateRequest(input_ids=[1, 2]))).output_ids
