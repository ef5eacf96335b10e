"""The contenders of `bench_engine.py`, each in processes of its own.

`Served` is a gserver (embedded or SGLang), called over HTTP; `Script` is `engine_script.py`, with other libraries.
Invariant: all compute with the same number of threads, and `close` leaves none of a contender's processes.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import select
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from streamrl.config import Config
from streamrl.errors import StreamRLError
from streamrl.transport.generation import GenerateReply, GenerateRequest, GenerationClient, SamplingParams

HERE = Path(__file__).parent
START_SECONDS = 300.0
ANSWER_SECONDS = 600.0

Prompts = list[list[int]]


class ContenderFailed(Exception):
    """A contender did not start, or did not reply."""


class Contender(Protocol):
    """One way to make tokens."""

    name: str
    pid: int
    """The process that does the work, with the processes that it started."""

    def generate(self, prompts: Prompts, new_tokens: int) -> int:
        """Make `new_tokens` for each of `prompts`, all at once; return the number of tokens in all."""

    def close(self) -> None: ...


class Served:
    """A gserver of `config` in a process of its own; its client is this process."""

    def __init__(self, name: str, config: Config, folder: Path, *, without: str = "") -> None:
        """`without`: a part of `NATIVE_PARTS`, or "all", that torch computes in this gserver."""
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._server = context.Process(target=_serve, args=(config, folder, there, without))
        self._server.start()
        self.pid = self._server.pid or 0
        self._runner = asyncio.Runner()
        self._client = GenerationClient(timeout=ANSWER_SECONDS)  # keeps its connections from round to round
        there.close()
        try:
            if not self._here.poll(START_SECONDS):
                raise ContenderFailed(f"{name} was not ready within {START_SECONDS:.0f} s")
            self.url: str = self._here.recv()
        except (EOFError, ContenderFailed) as error:
            self.close()
            raise ContenderFailed(f"{name} did not start: {str(error) or 'see its output'}") from error

    def generate(self, prompts: Prompts, new_tokens: int) -> int:
        try:
            return self._runner.run(_over_http(self._client, self.url, prompts, new_tokens))
        except StreamRLError as error:
            raise ContenderFailed(f"{self.name}: {error}") from error

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()
        self._here.close()  # at which the server stops
        self._server.join(30)
        if self._server.is_alive():
            self._server.kill()
            self._server.join()


class Script:
    """A running `engine_script.py`; several contenders may share it, each with a method of its own."""

    def __init__(self, python: str, library: str, folder: Path, dtype: str, threads: int) -> None:
        self._library = library
        self._process = subprocess.Popen(
            [python, "-P", str(HERE / "engine_script.py"), library, str(folder), dtype, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if "STREAMRL_LOG" not in os.environ else None,
            env=os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
            text=True,
            bufsize=1,
        )
        self.pid = self._process.pid
        try:
            self._read(START_SECONDS)
        except ContenderFailed:
            self.close()
            raise

    def generate(self, method: str, prompts: Prompts, new_tokens: int) -> int:
        assert self._process.stdin is not None
        request = {"method": method, "prompts": prompts, "new_tokens": new_tokens}
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
        except OSError as error:
            raise ContenderFailed(f"{self._library} has ended: {error}") from error
        reply = self._read(ANSWER_SECONDS)
        if "error" in reply:
            raise ContenderFailed(f"{self._library}: {reply['error']}")
        return int(reply["tokens"])

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # a request to a script that has ended
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self, seconds: float) -> dict[str, Any]:
        """Read the next line, which is the only one until the next request."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            self._process.kill()
            raise ContenderFailed(f"{self._library} did not reply within {seconds:.0f} s and was ended")
        line = self._process.stdout.readline()
        if not line:
            raise ContenderFailed(f"{self._library} has ended; run with STREAMRL_LOG=DEBUG to see its output")
        reply: dict[str, Any] = json.loads(line)
        return reply


class Scripted:
    """One method of a script."""

    def __init__(self, name: str, script: Script) -> None:
        self.name = name
        self.pid = script.pid
        self._script = script

    def generate(self, prompts: Prompts, new_tokens: int) -> int:
        return self._script.generate(self.name, prompts, new_tokens)

    def close(self) -> None:
        self._script.close()


NATIVE_PARTS = ("layers", "products")
"""Parts of the embedded engine that are C on processors with AVX-512."""


def leave_out(part: str) -> None:
    """Let torch compute `part` of `NATIVE_PARTS` in this process, or all of them ("all")."""
    from streamrl.gserver.embedded import model
    from streamrl.native import operations

    if part == "all":
        os.environ["STREAMRL_NATIVE"] = "0"
    elif part == "layers":
        model.operations_for = operations.TorchOperations  # type: ignore[assignment]
    else:
        operations.has_native_products = lambda dtype: False


def _serve(config: Config, folder: Path, pipe: Connection, without: str) -> None:
    """The gserver's process: it sends its URL and lives until the pipe is closed."""
    if without:
        leave_out(without)
    from streamrl.gserver.server.process import running

    def wait() -> None:
        try:
            pipe.recv()
        except EOFError:
            return

    async def live() -> None:
        async with running(config, index=0, model_dir=folder) as (_, url):
            pipe.send(url)
            await asyncio.to_thread(wait)

    asyncio.run(live())


async def _over_http(client: GenerationClient, url: str, prompts: Sequence[list[int]], new_tokens: int) -> int:
    """All prompts at once, one request each."""
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    requests = [GenerateRequest(input_ids=prompt, sampling_params=params, return_logprob=True) for prompt in prompts]
    replies: list[GenerateReply] = await asyncio.gather(*(client.generate(url, r) for r in requests))
    return sum(len(reply.output_ids) for reply in replies)
