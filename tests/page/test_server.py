"""The page's server: who may look, what it tells, news, and readers that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from yarl import URL

from streamrl.errors import ConfigError
from streamrl.page import server
from streamrl.records.health import findings
from streamrl.records.rollouts import TOKEN_USES, Rollouts
from streamrl.records.view import read_run
from tests.page.made_up import long_run, made_up_run
from tests.runs import beat, write_lines, write_run

TOKEN = "a-token-of-the-tests"


class Served:
    """A page that is served, and a client of it."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = URL(url)
        self.session = session

    async def get(self, path: str, **headers: str) -> tuple[int, bytes, Any]:
        """Status, body and headers of the answer to `path` behind the token, as it is written."""
        async with self.session.get(URL(f"{self.url}{path}", encoded=True), headers=headers) as answer:
            return answer.status, await answer.read(), answer.headers

    async def json(self, path: str) -> Any:
        status, body, _ = await self.get(path)
        assert status == 200, body
        return json.loads(body)


@contextlib.asynccontextmanager
async def serving(*folders: Path) -> AsyncIterator[Served]:
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        server.serve(folders, host="127.0.0.1", port=0, token=TOKEN, on_ready=ready.set_result), name="page"
    )
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        try:
            yield Served(await ready, session)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def columns(body: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What the answer of `steps` says."""
    (length,) = struct.unpack_from("<I", body)
    header = json.loads(body[4 : 4 + length])
    values = np.frombuffer(body, "<f4", offset=4 + length).reshape(len(header["names"]), header["rows"])
    return header, dict(zip(header["names"], values, strict=True))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "addition", steps=60, gservers=2)


async def until(true: Callable[[], object], what: str) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert true(), what


async def test_what_it_tells_of_a_run(run: Path) -> None:
    async with serving(run) as page:
        (facts,) = await page.json("api/runs")
        assert (facts["name"], facts["state"], facts["steps"], facts["max_staleness"]) == (
            "addition",
            "finished",
            60,
            4,
        )
        header, found = columns((await page.get("api/runs/0/steps"))[1])
        assert header["rows"] == header["of"] == 60
        assert found["step"].tolist() == list(range(1, 61))
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert found["reward_mean"] == pytest.approx([line["metrics"]["reward_mean"] for line in lines])
        assert found["trainer_wait"] == pytest.approx(np.full(60, 0.2))
        assert found["masked_share"] == pytest.approx(np.full(60, 40 / 840))
        assert found["age/1-1"].tolist() == [210.0] * 60
        assert found["token_age_max"].tolist() == [3.0] * 60
        shares = found["generation_busy"] + found["generation_paused"] + found["generation_idle"]
        assert shares[1:] == pytest.approx(np.ones(59), abs=1e-5)
        some, few = columns((await page.get("api/runs/0/steps?names=loss,no_such&first=11&last=30"))[1])
        assert some["names"] == ["step", "loss", "time", "tokens_until"]
        assert few["step"].tolist() == list(range(11, 31))
        fleet = await page.json("api/runs/0/fleet")
        assert [p["name"] for p in fleet["processes"]] == ["gserver/0", "gserver/1", "controller/0"]
        assert fleet["served_version"] == 59
        assert fleet["waits"][0][:2] == ["controller/0", "# groups"]
        graph = await page.json("api/runs/0/graph")
        assert "actor_train" in [box["name"] for box in graph["boxes"]]
        config = await page.json("api/runs/0/config")
        assert config["values"]["run.name"] == '"addition"'


async def test_the_page_itself(run: Path) -> None:
    async with serving(run) as page:
        status, body, headers = await page.get("")
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        policy = headers["Content-Security-Policy"]
        for rule in ("default-src 'none'", "script-src 'self'", "require-trusted-types-for 'script'"):
            assert rule in policy
        assert "unsafe" not in policy
        assert headers["Referrer-Policy"] == "no-referrer"  # the address has the token
        assert "Set-Cookie" not in headers
        assert b"<script" in body
        assert b"onclick" not in body
        for path in server.static_files():
            assert (await page.get(f"static/{path}"))[0] == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("static/../server.py", 404),
        ("static/%2e%2e/server.py", 404),
        ("static/..%2fserver.py", 404),
        ("static/%2fetc%2fpasswd", 404),
        ("static//etc/passwd", 404),
        ("static/vendor/..%5c..%5cserver.py", 404),
        ("static/%00", 404),
        ("api/runs/1/steps", 404),
        ("api/runs/-1/steps", 404),
        ("api/runs/99999999999999999999999/steps", 404),
        ("api/runs/0/steps?points=x", 400),
        ("api/runs/0/steps?points=0", 400),
        ("api/runs/0/timeline?begin=2&end=1", 400),
        ("api/runs/0/logs?level=LOUD", 400),
        ("api/runs/0/logs?processes=../../x", 200),
    ],
)
async def test_hostile_paths(run: Path, path: str, status: int) -> None:
    (run / "secret").write_text("a secret")
    (run / "logs").mkdir()
    (run / "logs" / "controller-0.log").symlink_to(run / "secret")
    async with serving(run) as page:
        found, body, _ = await page.get(path)
        assert found == status, body
        assert b"root:" not in body
        assert b"a secret" not in body
        assert b"Traceback" not in body


async def test_nobody_looks_without_the_token(run: Path) -> None:
    async with serving(run) as page:
        root = page.url.origin()
        for path in (
            "/",
            "/api/runs",
            f"/{TOKEN}x/api/runs",
            f"/{TOKEN[:-1]}/",
            f"/x/{TOKEN}/api/runs",
            "/%00/",
            "/ü/",
        ):
            async with page.session.get(root / "" if path == "/" else URL(f"{root}{path}")) as answer:
                assert answer.status in (403, 404)
                assert "addition" not in await answer.text()
        for method in ("post", "put", "delete", "options"):
            async with page.session.request(method, page.url / "api/runs") as answer:
                assert answer.status == 405


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "localhost:9999"}, 200),  # a tunnel
        ({"Host": "[::1]:80"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 200),
        ({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}, 200),
    ],
)
async def test_other_sites_cannot_look_through_a_visitor(run: Path, headers: dict[str, str], status: int) -> None:
    async with serving(run) as page:
        assert (await page.get("api/runs", **headers))[0] == status


async def test_tokens_are_random() -> None:
    assert len({server.Page([], host="127.0.0.1").token for _ in range(8)}) == 8
    assert len(server.Page([], host="127.0.0.1").token) >= 32


@pytest.mark.parametrize("token", ["kWl3/0bZQm+X9w==", "50%2Fof-a-token-", "a-token?of-a-user", "a-token#of-a-user"])
async def test_a_token_by_which_nobody_could_look_is_refused(token: str) -> None:
    with pytest.raises(ConfigError, match="the page's token is a part of its address"):
        await server.serve([], host="127.0.0.1", port=0, token=token, on_ready=lambda url: pytest.fail(url))


async def test_a_token_in_base64_without_slashes_is_one(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.page.test_server.TOKEN", "kWl30bZQm+X9w==")
    async with serving(run) as page:
        assert (await page.json("api/runs"))[0]["name"] == "addition"


async def test_news_of_a_run_that_is_being_written(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "final.json").unlink()
    (run / "metrics.jsonl").write_bytes(b"".join(lines[:10]))
    async with serving(run) as page, page.session.get(page.url / "api/events") as events:
        assert events.headers["Content-Type"] == "text/event-stream"
        told: list[Any] = []

        async def listen() -> None:
            async for line in events.content:
                if line.startswith(b"data: "):
                    told.append(json.loads(line[6:])[0])

        listener = asyncio.create_task(listen())
        await until(lambda: told, "a first word")
        assert told[-1]["steps"] == 10
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(b"".join(lines[10:12]) + lines[12][:100])  # the last one is torn
        await until(lambda: told[-1]["steps"] > 10, "news")
        assert told[-1]["steps"] == 12
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(lines[12][100:] + b"\xff\xfe no record\n" + lines[13])
        await until(lambda: told[-1]["steps"] == 14, "the line that was torn")
        assert told[-1]["unreadable"] == 1
        shutil.rmtree(run)
        await until(lambda: told[-1]["state"] == "gone", "that the run is gone")
        assert columns((await page.get("api/runs/0/steps"))[1])[0]["rows"] == 14
        listener.cancel()


@pytest.mark.parametrize("missing", ["config.toml", "metrics.jsonl", "timeline.jsonl", "final.json"])
async def test_whatever_is_missing_the_rest_is_shown(run: Path, missing: str) -> None:
    (run / missing).unlink()
    async with serving(run) as page:
        for call in ("steps", "evaluations", "health", "timeline", "fleet", "config", "graph", "logs"):
            status, body, _ = await page.get(f"api/runs/0/{call}")
            assert status == 200, (call, body)
        assert (await page.json("api/runs"))[0]["name"] == "addition"


async def test_a_graph_of_the_users_own_is_not_imported(run: Path, tmp_path: Path) -> None:
    (run / "config.toml").write_text('[trainer]\ngraph = "json:dumps"\n')
    async with serving(run) as page:
        graph = await page.json("api/runs/0/graph")
        assert graph["boxes"] == []
        assert "json:dumps" in graph["problem"]


async def test_configurations_of_other_versions(run: Path) -> None:
    """Keys that this version does not know are shown, and the rest is used."""
    (run / "config.toml").write_text('[trainer]\nlr = 0.5\nof_tomorrow = 7\n\n[unheard_of]\nx = "y"\n')
    async with serving(run) as page:
        config = await page.json("api/runs/0/config")
        assert config["values"] == {"trainer.lr": "0.5", "trainer.of_tomorrow": "7", "unheard_of.x": '"y"'}
        assert (await page.json("api/runs/0/graph"))["boxes"]
        (run / "config.toml").write_text("[trainer]\nlr = 'fast'\n")
    async with serving(run) as page:
        assert "cannot read" in (await page.json("api/runs/0/graph"))["problem"]
        assert (await page.json("api/runs/0/config"))["values"] == {"trainer.lr": '"fast"'}


async def test_those_who_read_slowly_hold_nobody_up(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WRITE_SECONDS", 0.5)
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.5)
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 40)
    wide = {f"figure_{i}": float(i) for i in range(3000)}
    step = {"step": 1, "time": 1.79e9, "metrics": wide}
    (run / "metrics.jsonl").write_text("".join(json.dumps({**step, "step": i}) + "\n" for i in range(1, 300)))
    async with serving(run) as page:
        assert page.url.host is not None
        assert page.url.port is not None
        request = f"GET {page.url.path}api/runs/0/steps HTTP/1.1\r\nHost: {page.url.authority}\r\n\r\n".encode()
        writers = []
        for _ in range(60):
            _, writer = await asyncio.open_connection(page.url.host, page.url.port, limit=1024)
            writer.write(request)
            writers.append(writer)
        await until_answered(page)
        for writer in writers:
            writer.close()


async def until_answered(page: Served) -> None:
    """A new caller is told to come again at first, and then is answered."""
    async with asyncio.timeout(45):
        while (await page.get("api/runs"))[0] != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_watchers_are_counted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_WATCHERS", 2)
    async with serving(run) as page, page.session.get(page.url / "api/events") as one:
        assert await one.content.readline()
        async with page.session.get(page.url / "api/events") as two:
            assert await two.content.readline()
            assert (await page.get("api/events"))[0] == 503


async def test_an_address_that_is_taken(run: Path) -> None:
    async with serving(run) as page:
        assert page.url.port is not None
        with pytest.raises(ConfigError, match="--port 0"):
            await server.serve([run], host="127.0.0.1", port=page.url.port, on_ready=lambda url: None)


async def test_rollouts_and_their_tokens(tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", steps=30)
    kept = Rollouts(run).group(7, 7)
    async with serving(run) as page:
        table = await page.json("api/runs/0/rollouts?sort=reward&descending=false&filter=step<=3&limit=5&offset=3")
        assert table["total"] == 12
        assert [(row["reward"], row["response"]) for row in table["rows"][:1]] == [(0.0, "The answer is 9, I think.")]
        assert len(table["rows"]) == 5
        group = await page.json("api/runs/0/rollouts/7/7")
        assert "".join(group["prompt"]) == "What is 3 + 4? "
        for index, response in enumerate(group["responses"]):
            assert "".join(group["prompt"] + response["pieces"]) == kept.texts[index]
            first, end = kept.bounds(index)
            own = slice(first + len(group["prompt"]), end)
            assert response["ids"] == kept.input_ids[own].tolist()
            assert response["figures"]["logprob"] == pytest.approx(kept.behavior_logprobs[own].tolist(), rel=1e-5)
            assert response["figures"]["age"] == (6 - kept.policy_versions[own]).tolist()
            assert [group["token_uses"][use] for use in response["uses"]] == [
                TOKEN_USES[use] for use in kept.token_uses[own]
            ]
        found = await page.json("api/runs/0/rollouts/search?text=IS%2010,")
        assert {row["response"] for row in found["rows"]} == {"The answer is 10, I think."}
        for wrong in ("?filter=reward", "?sort=nothing", "?limit=0", "/7/8", "/search"):
            status, body, _ = await page.get(f"api/runs/0/rollouts{wrong}")
            assert status == 400, body
        assert (await page.json("api/runs"))[0]["rollouts"] == 120


async def test_health_is_told_as_the_report_tells_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=60)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines[30:]:
        line["metrics"] |= {"tokens_masked": 600.0, "effective_sample_size": 0.3, "wait_seconds": 1.6}
    write_lines(run / "metrics.jsonl", lines)
    async with serving(run) as page:
        told = await page.json("api/runs/0/health")
    expected = findings(read_run(run).figures())
    assert [(finding["severity"], finding["topic"]) for finding in told] == [(f.severity, f.topic) for f in expected]
    assert len(told) >= 2


async def test_what_the_ledger_said_at_each_step(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=10)
    write_lines(run / "timeline.jsonl", [beat(i, "controller", 0, stats={"ledger_room": float(i)}) for i in range(21)])
    async with serving(run) as page:
        _, found = columns((await page.get("api/runs/0/steps?names=ledger_room"))[1])
        assert found["ledger_room"].tolist() == [2.0 * step for step in range(1, 11)]


async def test_a_long_run(tmp_path: Path) -> None:
    """Not as long as one of `benchmarks/bench_page.py`, but with all of its parts."""
    run = long_run(tmp_path / "run", steps=300, responses=6000)
    async with serving(run) as page:
        header, found = columns((await page.get("api/runs/0/steps?points=100&names=figure_0"))[1])
        assert (header["of"], header["rows"]) == (300, 100)
        every = columns((await page.get("api/runs/0/steps?names=figure_0"))[1])[1]
        assert found["figure_0"].max() == every["figure_0"].max()
        assert found["figure_0"].min() == every["figure_0"].min()
        table = await page.json("api/runs/0/rollouts?sort=reward&limit=1")
        assert table["total"] == 6000
        assert table["rows"][0]["reward"] == pytest.approx(0.95)


async def test_tokens_are_those_of_all_steps_where_few_are_drawn(tmp_path: Path) -> None:
    async with serving(write_run(tmp_path / "run", steps=60)) as page:
        _, every = columns((await page.get("api/runs/0/steps?names=tokens_trained"))[1])
        header, few = columns((await page.get("api/runs/0/steps?names=loss&points=20"))[1])
    assert header["rows"] == 20
    until = np.interp(few["step"], every["step"], np.cumsum(every["tokens_trained"]))
    assert few["tokens_until"] == pytest.approx(until)
