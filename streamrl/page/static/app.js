// The frame: the choice of runs and view, and updates as they arrive.

import { h, fill, empty, duration } from "./dom.js";
import * as data from "./data.js";
import * as state from "./state.js";
import { ofRun } from "./colours.js";
import { AXES } from "./charts.js";
import * as overview from "./views/overview.js";
import * as pools from "./views/pools.js";
import * as rollouts from "./views/rollouts.js";
import * as staleness from "./views/staleness.js";
import * as configuration from "./views/run.js";

const VIEWS = { overview, pools, rollouts, staleness, configuration };
const STATES = {
  running: ["●", "running"], finished: ["✓", "finished"], failed: ["✕", "failed"], stopped: ["■", "stopped"],
  silent: ["?", "no last word"], empty: ["○", "nothing written yet"], gone: ["∅", "gone"],
};
const SPARE_MILLISECONDS = 5;

const root = h("main", { id: "view", tabIndex: -1 });
const strip = h("div", { class: "runs", role: "group", "aria-label": "runs" });
const controls = h("div", { class: "controls" });
const tabs = h("nav", { "aria-label": "views" });
const notice = h("p", { class: "notice", role: "status", hidden: true });
const help = h("dialog", { class: "help" });
let view = null;
let shownView = "";
let busy = false;
let waiting = null;

function frame() {
  document.body.replaceChildren(
    h("a", { class: "skip", href: "#view", onclick: (event) => { event.preventDefault(); root.focus(); }, text: "to the content" }),
    h("header", { class: "top" },
      h("span", { class: "brand" }, "streamrl"),
      tabs,
      h("span", { class: "space" }),
      data.isFile ? null : h("button", { class: "quiet", title: "keys (?)", "aria-label": "keys", onclick: () => help.showModal(), text: "?" }),
      h("button", { class: "quiet", title: "light or dark (t)", "aria-label": "light or dark", onclick: turnTheme, text: "◐" })),
    h("div", { class: "bar" }, strip, controls),
    notice,
    root,
    help,
  );
  fill(help, h("h2", { text: "Keys" }), h("dl", {}, [
    ["1 – 5", "views"], ["[ ]", "the run before, the run after"], ["t", "light or dark"],
    ["← →", "in a plot: from step to step (with Shift by ten)"], ["+ − 0", "in a plot or the timeline: zoom, and back"],
    ["drag, double click", "in a plot: zoom, and back"], ["Esc", "close, go back"],
  ].map(([key, text]) => h("div", {}, h("dt", {}, h("kbd", { text: key })), h("dd", { text })))), h("form", { method: "dialog" }, h("button", { text: "close" })));
}

function drawTabs() {
  fill(tabs, Object.entries(VIEWS).map(([name, one], place) =>
    h("button", { class: "tab", title: `${one.title} (${place + 1})`, "aria-current": state.get("view") === name ? "page" : null, onclick: () => state.set({ view: name, group: "" }), text: one.title })));
  tabs.hidden = data.isFile;
  const current = tabs.querySelector("[aria-current]");
  if (current) tabs.scrollLeft = Math.max(0, current.offsetLeft - tabs.offsetLeft - (tabs.clientWidth - current.offsetWidth) / 2);
}

function drawRuns() {
  if (strip.contains(document.activeElement) && document.activeElement.type === "checkbox") document.activeElement.blur();
  const shown = new Set(state.shown().map((run) => run.id));
  const several = state.runs.length > 1;
  fill(strip, state.runs.map((run) => {
    const [mark, words] = STATES[run.state] ?? ["?", run.state];
    const toggle = () => {
      const next = new Set(shown);
      if (next.has(run.id)) next.delete(run.id);
      else next.add(run.id);
      state.set({ shown: next.size === state.runs.length ? "" : [...next].sort((a, b) => a - b).join(",") });
    };
    return h("div", { class: "run", "aria-current": run.id === state.run()?.id ? "true" : null },
      several ? h("input", { type: "checkbox", checked: shown.has(run.id), "aria-label": `compare ${run.name}`, title: "shown in Overview and Staleness", onchange: toggle }) : null,
      h("button", { class: "name", title: `${run.folder}\n${run.message || words}`, onclick: () => state.set({ run: run.id, group: "" }) },
        h("i", { class: "dot", style: { background: ofRun(run.id) } }),
        h("b", { text: run.name }),
        h("span", { class: `state ${run.state}` }, h("span", { "aria-hidden": "true", text: `${mark} ` }), words),
        h("span", { class: "muted", text: `step ${run.steps}${run.most_steps ? `/${run.most_steps}` : ""} · ${duration(run.seconds)}` })));
  }));
}

function drawControls() {
  if (controls.contains(document.activeElement)) return;
  const { plots } = VIEWS[shownView] ?? {};
  const smooth = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.get("smooth"), oninput: (event) => state.set({ smooth: event.target.value }) });
  const axis = h("select", { onchange: (event) => state.set({ x: event.target.value, from: "", to: "" }) },
    Object.entries(AXES).map(([name, one]) => h("option", { value: name, text: one.label })));
  axis.value = state.get("x");
  fill(controls, plots ? [
    h("label", {}, "over ", axis),
    h("label", {}, "smooth ", smooth),
    state.zoom() ? h("button", { class: "chip", onclick: () => state.set({ from: "", to: "" }), text: "zoom ×" }) : null,
  ] : null);
}

function say(text) {
  notice.hidden = !text;
  notice.textContent = text;
}

/** Update the view; the latest request waits until the current update is done. */
async function update(wish) {
  if (busy) {
    waiting = waiting === "data" ? "data" : wish;
    return;
  }
  busy = true;
  const begin = performance.now();
  try {
    if (state.get("view") !== shownView) {
      view?.remove?.();
      shownView = state.get("view") in VIEWS ? state.get("view") : "overview";
      fill(root);
      view = VIEWS[shownView].mount(root);
      document.title = `${VIEWS[shownView].title} · ${state.run()?.name ?? ""} · streamrl`;
      wish = "data";
    }
    drawTabs();
    drawRuns();
    drawControls();
    if (!state.runs.length) fill(root, empty("No run", "There is nothing to show."));
    else if (wish === "data") await view.update();
    else view.redraw?.();
    if (notice.dataset.of === "view") say("");
  } catch (error) {
    if (error.name !== "AbortError") {
      say(error.message);
      notice.dataset.of = "view";
      if (!(error instanceof TypeError) && !(error instanceof ReferenceError)) console.info(error.message);
      else console.error(error);
    }
  } finally {
    const took = performance.now() - begin;
    await new Promise((done) => setTimeout(done, Math.max(SPARE_MILLISECONDS, wish === "data" ? took : 0)));
    busy = false;
    if (waiting) {
      const next = waiting;
      waiting = null;
      update(next);
    }
  }
}

function turnTheme() {
  const dark = document.documentElement.dataset.theme === "dark" || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  state.set({ theme: dark ? "light" : "dark" });
}

function applyTheme() {
  const theme = state.get("theme");
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, select, textarea, dialog")) return;
  const names = Object.keys(VIEWS);
  const place = Number(event.key) - 1;
  if (names[place] && !data.isFile) state.set({ view: names[place], group: "" });
  else if (event.key === "t") turnTheme();
  else if (event.key === "?" && !data.isFile) help.showModal();
  else if ((event.key === "[" || event.key === "]") && state.runs.length > 1) {
    const now = state.runs.findIndex((run) => run.id === state.run().id);
    const next = (now + (event.key === "[" ? -1 : 1) + state.runs.length) % state.runs.length;
    state.set({ run: state.runs[next].id, group: "" });
  } else if (view?.key?.(event)) event.preventDefault();
}

/** Store the facts of all runs; return whether the view shows any that changed. */
function told(runs) {
  const before = new Map(state.runs.map((run) => [run.id, run]));
  const { news } = VIEWS[shownView] ?? overview;
  const changed = runs.some((run) => news.some((name) => before.get(run.id)?.[name] !== run[name]));
  state.runs.splice(0, state.runs.length, ...runs);
  if (notice.dataset.of === "connection") say("");
  return changed;
}

async function begin() {
  state.read();
  applyTheme();
  frame();
  state.listen((names) => {
    if (names.includes("theme")) applyTheme();
    update(names.includes("view") || view?.needsData?.(names) ? "data" : "draw");
  });
  addEventListener("hashchange", () => {
    state.read();
    applyTheme();
    update("data");
  });
  addEventListener("keydown", pressed);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => update("draw"));
  try {
    told(await data.get("runs"));
  } catch (error) {
    say(error.message);
    return;
  }
  await update("data");
  data.follow((runs) => {
    if (told(runs)) update("data");
    else drawRuns();
  }, () => {
    notice.dataset.of = "connection";
    say("No news from the page's server; the page shows its last state and tries again.");
  });
}

begin();
