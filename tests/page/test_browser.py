"""Every view in a real browser: drawn, by keyboard, narrow, dark, live; and what a model wrote is text."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from streamrl.page.bundle import write_overview
from streamrl.records.rollouts import FOLDER
from streamrl.records.rollouts_writer import RolloutWriter
from tests.e2e import harness
from tests.page.browser import Tab, browser, chromium
from tests.page.made_up import branching_group, made_up_group, made_up_run
from tests.page.test_server import serving

pytestmark = pytest.mark.skipif(chromium() is None, reason="there is no chromium (apt-get install chromium)")

VIEWS = {
    "overview": "all('.chart:not(.without) canvas').length > 8",
    "pools": "all('.lane-names div').length >= 5 && all('table tbody tr').length >= 3",
    "rollouts": "all('.rollouts tbody tr').length > 20",
    "staleness": "all('.chart:not(.without) canvas').length > 3",
    "configuration": "all('.config tr').length > 40",
    "configuration?part=logs": "all('.log .line').length == 3",
    "configuration?part=graph": "all('.graph svg .node').length > 1",
    "rollouts?group=9/9": "all('.response').length == 4",
}
"""Where → what has to be there; `all`: `document.querySelectorAll`."""
COUNTED = ("configuration?part=logs", "rollouts?group=9/9")
"""Views of which `VIEWS` says exactly what the made-up run has."""
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/\S+/")
NEWEST = "document.querySelector('.rollouts tbody td').innerText"
"""The step of the first row."""
SIDEWAYS = "document.documentElement.scrollWidth > innerWidth"
DRAWN = """(() => {
    const c = document.querySelector('canvas');
    return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((value) => value);
})()"""


@asynccontextmanager
async def shown(*runs: Path, at: str = "") -> AsyncIterator[Tab]:
    """A browser that looks at a page of `runs`; at the end it must have complained of nothing."""
    async with serving(*runs) as page, browser() as tab:
        await tab.open(f"{page.url}{at}")
        yield tab
    assert tab.problems == []


async def until(tab: Tab, wanted: str) -> None:
    """Wait until what a view has to have is there."""
    await tab.until(f"((all) => {wanted})((what) => document.querySelectorAll(what))")


async def says(tab: Tab, text: str) -> None:
    """Wait until `text` is on the page."""
    await tab.until(f"document.body?.innerText.includes({json.dumps(text)})")


async def shows(tab: Tab, view: str) -> None:
    await tab.value(f"location.hash = {json.dumps(f'#/{view}')}")
    await until(tab, VIEWS[view])


async def test_every_view_of_two_runs(tmp_path: Path) -> None:
    runs = [made_up_run(tmp_path / "one"), made_up_run(tmp_path / "two", steps=25)]
    async with shown(*runs) as tab:
        await tab.until("document.querySelectorAll('.run').length == 2")
        for view in VIEWS:
            await shows(tab, view)
        await shows(tab, "overview")
        await tab.until(DRAWN)
        await tab.size(width=390, height=844)
        await tab.prefer(dark=True)
        for view in VIEWS:
            await shows(tab, view)
            assert not await tab.value(SIDEWAYS), f"{view} is wider than a phone"
        assert await tab.value("getComputedStyle(document.body).backgroundColor") == "rgb(14, 18, 23)"
        here = await tab.value("location.origin")
        assert {url for url in tab.asked if not url.startswith(here)} <= {"about:blank"}


async def test_by_keyboard(tmp_path: Path) -> None:
    async with shown(made_up_run(tmp_path / "run")) as tab:
        await until(tab, VIEWS["overview"])
        await tab.press("3")
        await until(tab, VIEWS["rollouts"])
        await tab.value("document.querySelector('.rollouts tbody tr').focus()")
        await tab.press("ArrowDown")
        await tab.press("Enter")
        await until(tab, VIEWS["rollouts?group=9/9"])
        await tab.press("ArrowRight")
        assert "log p, engine" in await tab.until("document.querySelector('.token-info').innerText")
        await tab.press("Escape")
        await until(tab, VIEWS["rollouts"])
        await tab.press("1")
        await until(tab, VIEWS["overview"])
        await tab.value("document.querySelector('.plot').focus()")
        await tab.press("ArrowLeft")
        marked = "[...all('.chart:not(.without) .at')].filter((at) => at.textContent == 'step 39')"
        await until(tab, f"{marked}.length > 8")  # the step is marked in all plots
        await tab.press("+")
        await tab.until("location.hash.includes('from=')")
        await tab.press("0")
        await tab.until("!location.hash.includes('from=')")
        await tab.press("t")
        await tab.until("document.documentElement.dataset.theme == 'dark'")


async def test_what_a_run_says_is_text(tmp_path: Path) -> None:
    async with shown(made_up_run(tmp_path / "run", hostile=True)) as tab:
        await until(tab, VIEWS["overview"])
        for view in VIEWS:
            await shows(tab, view)
            assert await tab.value("window.hacked") is None
            assert await tab.value("document.querySelector('iframe, img, body script, svg[onload]')") is None
        assert "<script>" in await tab.value(
            "document.querySelector('.response .tokens').innerText.replaceAll('\\n', '')"
        )
        assert tab.problems == []
        refused = "try { document.body.innerHTML = '<b>x</b>'; 'done' } catch (error) { error.name }"
        assert await tab.value(refused) == "TypeError"  # the policy lets no text become HTML, whoever tries
        tab.problems.clear()


async def test_runs_compared_and_smoothed(tmp_path: Path) -> None:
    runs = [made_up_run(tmp_path / "one"), made_up_run(tmp_path / "two", steps=25)]
    async with shown(*runs) as tab:
        await until(tab, VIEWS["overview"])
        both = "[...all('.chart .legend')].some((l) => l.innerText.includes('one') && l.innerText.includes('two'))"
        if not await tab.value(f"((all) => {both})((what) => document.querySelectorAll(what))"):
            await tab.value("document.querySelectorAll('.run input')[1].click()")
        await until(tab, both)
        rough = (
            "location.hash = location.hash.replace(/smooth=[^&]*&?/, '') + (location.hash.includes('?') ? '&' : '?')"
        )
        said = "document.querySelector('.chart .legend').innerText"
        before = await tab.value(said)
        await tab.value(f"{rough} + 'smooth=0'")
        await tab.until(f"{said} != {json.dumps(before)}")  # the last value itself, and not its mean with those before


async def test_colours_and_branches(tmp_path: Path) -> None:
    """An agent's episode as a tree, its tokens in every colour that is offered."""
    run = made_up_run(tmp_path / "run", steps=4)
    writer = RolloutWriter(run / FOLDER / "rank-1", most_bytes=2**20, policy_version=0)
    writer.append(branching_group(4, 99))
    writer.write()
    async with shown(run, at="#/rollouts?group=4/99") as tab:
        await says(tab, "begins like response 0, for 2 tokens")
        offered = await tab.value(
            "[...document.querySelectorAll('select[aria-label=colour] option')].map((o) => o.value)"
        )
        assert {"logprob", "version", "advantage", "difference", "mask", "none"} <= set(offered)
        tokens = "[...document.querySelectorAll('.tok')].map((t) => getComputedStyle(t).backgroundColor).join()"
        drawn = {await tab.value(tokens)}
        for colour in offered:
            await tab.value(
                f"(() => {{ const s = document.querySelector('select[aria-label=colour]'); s.value = '{colour}';"
                "s.dispatchEvent(new Event('change')); })()"
            )
            await tab.until(f"document.querySelector('select[aria-label=colour]').value == '{colour}'")
            for _ in range(20):  # until they are drawn anew, unless they look as before
                if (now := await tab.value(tokens)) not in drawn:
                    break
                await asyncio.sleep(0.05)
            drawn.add(now)
        assert len(drawn) >= 5


async def test_a_search_that_went_on_is_there_again(tmp_path: Path) -> None:
    rows = "document.querySelectorAll('.rollouts tbody tr')"
    async with shown(made_up_run(tmp_path / "run"), at="#/rollouts?search=answer") as tab:
        first = await tab.until(f"{rows}.length")
        await tab.value("document.querySelector('.pager button').click()")
        both = await tab.until(f"{rows}.length > {first} && {rows}.length")
        await tab.value(f"{rows}[{first}].click()")
        await tab.until("document.querySelectorAll('.response').length == 4")
        await tab.press("Escape")
        assert await tab.until(f"{rows}.length") == both
        typed = """(() => {
            const search = document.querySelector('input[aria-label="search in text"]');
            search.value = 'is 8';
            search.dispatchEvent(new Event('input'));
            search.dispatchEvent(new Event('change'));
            return location.hash;
        })()"""
        assert "search=is+8" in await tab.value(typed)
        await tab.until(f"{rows}.length == 40")  # from the beginning


async def test_a_run_that_goes_on(tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", steps=30)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"")
    (run / "final.json").unlink()
    async with shown(run) as tab:
        await says(tab, "No training step yet")
        (run / "metrics.jsonl").write_bytes(b"".join(lines[:20]))
        await says(tab, "step 20")
        await until(tab, VIEWS["overview"])
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(b"".join(lines[20:]))
        await says(tab, "step 30")


async def test_a_real_run_while_it_goes_on(tmp_path: Path) -> None:
    """Every view of a run under way, and the tokens of a step that it has just made; its figures go to TensorBoard."""
    settings = harness.QUICK | {"run__total_train_steps": 10_000, "metrics__sinks": '["tensorboard"]'}
    arguments = harness.overrides(tmp_path, "live", **settings)
    run = harness.start(harness.COPY_SCRATCH, [*arguments, "--page"])
    try:
        await asyncio.to_thread(harness.until, lambda: ADDRESS.search(run.said), "the page's address", seconds=120)
        address = ADDRESS.search(run.said)
        assert address is not None
        async with browser() as tab:
            await tab.open(address[0])
            await says(tab, "running")
            for view in VIEWS:
                if view not in COUNTED:
                    await shows(tab, view)
            await tab.value("location.hash = '#/configuration?part=logs'")
            await until(tab, "all('.log .line').length > 5")
            await shows(tab, "rollouts")
            shown = int(await tab.value(NEWEST))
            await tab.until(f"Number({NEWEST}) > {shown + 2}")  # by itself
            await tab.value("document.querySelector('.rollouts tbody tr').click()")
            await until(tab, f"all('.response').length == {harness.QUICK['rollout__group_size']}")
            await tab.until("document.querySelector('.response .tokens').innerText.length > 2")
            assert tab.problems == []
    finally:
        run.signal(signal.SIGINT)
        run.exit_code(seconds=60)
    assert harness.processes_of(tmp_path) == []
    events = EventAccumulator(str(tmp_path / "live" / "tensorboard"))
    events.Reload()
    assert len(events.Scalars("reward_mean")) > shown + 2


async def test_a_figure_that_hardly_changes_can_be_drawn(tmp_path: Path) -> None:
    """The axis of a range that is narrower than its numbers are exact would have no end."""
    ranged = (
        "(await import('./static/charts.js')).Chart.prototype.rangeOfY.call({ kind: { zero: false, most: null } }, "
    )
    async with shown(made_up_run(tmp_path / "run")) as tab:
        for figures in ("0.3, 0.1 + 0.2", "0, 0", "null, null", "1, Infinity"):
            least, most = await tab.value(f"(async () => {ranged}{figures}))()")
            assert least + (most - least) / 100 > least, figures


async def test_a_logarithmic_axis_has_an_end_wherever_it_begins(tmp_path: Path) -> None:
    drawn = """(async () => {
        const { Chart } = await import("./static/charts.js");
        const chart = new Chart({ title: "gradient", log: true });
        document.body.append(chart.element);
        const counts = [];
        for (const most of [FIRST, FIRST * 1.01, FIRST * 1000]) {
            chart.show([{ label: "one", colour: "red", dash: [], x: [1, 2], y: [FIRST, most] }]);
            await new Promise((done) => setTimeout(done));  // drawn
            counts.push(chart.u.axes[1]._splits.length);
        }
        return counts;
    })()"""
    async with shown(made_up_run(tmp_path / "run")) as tab:
        await tab.until("typeof uPlot === 'function'")
        for first in (1.15 * 9.6e-4, 1.15 * 9.95e-9, 3e-17, 0.5, 1e-3, 1e6):
            counts = await tab.value(drawn.replace("FIRST", repr(first)))
            assert all(count <= 30 for count in counts), (first, counts)
            assert counts[2] >= 27, (first, counts)


async def test_the_overview_as_a_file_of_its_own(tmp_path: Path) -> None:
    file = write_overview(made_up_run(tmp_path / "run", hostile=True))
    async with browser() as tab:
        await tab.open(file.as_uri())
        await until(tab, VIEWS["overview"])
        await tab.until(DRAWN)
        await tab.value("document.querySelector('.plot').focus()")
        await tab.press("+")
        await until(tab, VIEWS["overview"])
        assert await tab.value("window.hacked") is None
        assert tab.problems == []
        assert set(tab.asked) == {file.as_uri()}


async def test_a_group_of_very_many_tokens(tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", steps=1)
    writer = RolloutWriter(run / FOLDER / "rank-1", most_bytes=2**28, policy_version=0)
    writer.append(made_up_group(1, 99, ["abc" * 50_000] * 4, rewards=[1.0, 0.0, 0.0, 1.0]))
    writer.write()
    async with shown(run, at="#/rollouts?group=1/99") as tab:
        await until(tab, "all('.response').length == 4")
