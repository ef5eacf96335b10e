// The resolved configuration and how runs differ in it, the logs, and the graph of calls.

import { h, s, fill, empty, later } from "../dom.js";
import * as data from "../data.js";
import * as state from "../state.js";
import { ofRun } from "../colours.js";

export const title = "Configuration & logs";
export const news = ["beats", "state"];

const PARTS = { config: "Configuration", logs: "Logs", graph: "Graph" };
const LEVELS = ["DEBUG", "INFO", "WARNING", "ERROR"];

export function mount(root) {
  const tabs = h("div", { class: "tools", role: "group", "aria-label": "parts" });
  const tools = h("div", { class: "tools" });
  const body = h("div", {});
  let asked = 0;
  let part = null;
  fill(root, tabs, tools, body);

  const search = h("input", { type: "search", placeholder: "key or value", "aria-label": "search the configuration", oninput: later(() => state.set({ key: search.value.trim() }), 150) });
  const only = h("input", { type: "checkbox", onchange: () => state.set({ differ: only.checked ? "1" : "" }) });
  const process = h("select", { "aria-label": "process", onchange: () => state.set({ process: process.value }) });
  const level = h("select", { "aria-label": "least level", onchange: () => state.set({ level: level.value }) }, LEVELS.map((name) => h("option", { value: name, text: name === "DEBUG" ? "all levels" : `${name} and above` })));
  const text = h("input", { type: "search", placeholder: "text", "aria-label": "search the logs", oninput: later(() => state.set({ said: text.value.trim() }), 250) });

  async function update() {
    const mine = ++asked;
    const wanted = state.get("part") in PARTS ? state.get("part") : "config";
    fill(tabs, Object.entries(PARTS).map(([name, label]) => h("button", { class: "chip", "aria-pressed": String(name === wanted), onclick: () => state.set({ part: name }), text: label })));
    const found = await { config: getConfigs, logs: getLogs, graph: getGraph }[wanted]();
    if (mine !== asked) return;
    if (part !== wanted) {
      part = wanted;
      fill(tools, { config: [h("label", {}, "find ", search), h("label", {}, only, " only what differs")], logs: [h("label", {}, "process ", process), level, text], graph: [] }[part]);
    }
    ({ config: drawConfigs, logs: drawLogs, graph: drawGraph })[part](found);
  }

  const compared = () => {
    const run = state.run();
    const others = state.shown().filter((other) => other.id !== run.id);
    return [run, ...others].sort((a, b) => a.id - b.id);
  };

  async function getConfigs() {
    return Promise.all(compared().map(async (run) => ({ run, ...(await data.get(`runs/${run.id}/config`)) })));
  }

  function drawConfigs(found) {
    only.parentElement.hidden = found.length < 2;
    const wanted = state.get("key").toLowerCase();
    const problems = found.filter((one) => one.problem);
    const keys = [...new Set(found.flatMap((one) => Object.keys(one.values)))];
    const differs = (key) => new Set(found.map((one) => one.values[key])).size > 1;
    const shown = keys.filter((key) => (!state.get("differ") || differs(key)) && (!wanted || `${key} ${found.map((one) => one.values[key] ?? "").join(" ")}`.toLowerCase().includes(wanted)));
    let section = "";
    const rows = shown.flatMap((key) => {
      const at = key.lastIndexOf(".");
      const here = key.slice(0, at);
      const heading = here !== section ? [h("tr", { class: "section" }, h("th", { colspan: found.length + 1, text: here }))] : [];
      section = here;
      return [...heading, h("tr", { class: differs(key) && found.length > 1 ? "differs" : "" }, h("th", { title: key, text: key.slice(at + 1) }), found.map((one) => h("td", {}, h("code", { text: one.values[key] ?? "–" }))))];
    });
    fill(body, problems.map((one) => h("p", { class: "finding warning" }, h("span", { class: "mark", text: "!" }), `${one.run.name}: ${one.problem}`)),
      shown.length ? h("div", { class: "scroll card" }, h("table", { class: "config" },
        found.length > 1 ? h("thead", {}, h("tr", {}, h("th", {}), found.map((one) => h("th", {}, dot(one.run), one.run.name)))) : null,
        h("tbody", {}, rows))) : problems.length ? null : empty("Nothing to show", state.get("differ") ? "The runs that are shown have the same configuration." : "No key or value has this text."));
  }

  async function getLogs() {
    return data.get(`runs/${state.run().id}/logs`, { processes: state.get("process"), level: state.get("level") || "DEBUG", text: state.get("said") });
  }

  function drawLogs(found) {
    if (document.activeElement !== process) {
      fill(process, h("option", { value: "", text: "all" }), found.processes.map((name) => h("option", { value: name, text: name })));
      process.value = state.get("process");
    }
    level.value = state.get("level") || "DEBUG";
    if (document.activeElement !== text) text.value = state.get("said");
    if (!found.lines.length) {
      fill(body, found.processes.length ? empty("No line", "The logs' ends have no line of this process, level and text.") : empty("No logs", "The processes of a run that was started as a whole write logs to its folder; pools that were started by hand write to their terminals."));
      return;
    }
    const old = body.querySelector(".log");
    const atEnd = !old || old.scrollTop + old.clientHeight >= old.scrollHeight - 30;
    const kept = old?.scrollTop ?? 0;
    const log = h("div", { class: "log card", tabIndex: 0, "aria-label": "log lines" }, found.lines.map((line) => h("div", { class: `line ${line.level}` },
      h("time", { text: line.time ? new Date(line.time * 1000).toLocaleTimeString("en-GB") : "" }),
      h("span", { class: "who", text: line.process.replace(/-(\d+)$/, "/$1") }),
      h("span", { class: "level-name", text: line.level === "INFO" ? "" : line.level }),
      h("span", { class: "said", text: line.text }))));
    fill(body, log);
    log.scrollTop = atEnd ? log.scrollHeight : kept;
  }

  async function getGraph() {
    return data.get(`runs/${state.run().id}/graph`);
  }

  function drawGraph({ boxes, arrows, problem }) {
    if (problem) {
      fill(body, empty("The graph is not drawn", problem));
      return;
    }
    const [W, H, GX, GY] = [264, 52, 104, 46];
    const columns = Math.max(...boxes.map((box) => box.column)) + 1;
    const rows = Math.max(...boxes.map((box) => box.row)) + 1;
    const place = Object.fromEntries(boxes.map((box) => [box.name, [box.column * (W + GX) + 1, box.row * (H + GY) + 40]]));
    const lines = arrows.map((arrow) => {
      const [x1, y1] = place[arrow.giver];
      const [x2, y2] = place[arrow.taker];
      const [from, to] = [[x1 + W, y1 + H / 2], [x2 - 3, y2 + H / 2]];
      const skipped = Math.round((x2 - x1) / (W + GX)) - 1;
      const lift = skipped > 0 ? -34 - 8 * skipped : 0;
      const middle = (from[0] + to[0]) / 2;
      const path = lift
        ? `M${x1 + W - 20},${y1} C${x1 + W + 20},${y1 + lift * 1.2} ${x2 - 20},${y2 + lift * 1.2} ${x2 + 20},${y2 - 3}`
        : `M${from} C${middle},${from[1]} ${middle},${to[1]} ${to}`;
      const text = arrow.keys.length > 2 ? `${arrow.keys.length} keys` : arrow.keys.join(", ");
      const at = lift ? [(x1 + x2 + W) / 2, Math.min(y1, y2) + lift * 0.9 - 2] : [middle, (from[1] + to[1]) / 2 - 6];
      return s("g", {}, s("path", { d: path, class: "edge", "marker-end": "url(#arrow)" }), s("text", { x: at[0], y: at[1], class: "keys" }, s("title", { text: arrow.keys.join("\n") }), text.length > 24 ? `${text.slice(0, 22)}…` : text));
    });
    const nodes = boxes.map((box) => {
      const [x, y] = place[box.name];
      return s("g", {}, s("rect", { x, y, width: W, height: H, rx: 8, class: "node" }), s("text", { x: x + W / 2, y: y + 21, class: "name", text: box.name }), s("text", { x: x + W / 2, y: y + 38, class: "note", text: box.note.length > 48 ? `${box.note.slice(0, 47)}…` : box.note }, s("title", { text: box.note })));
    });
    const [w, tall] = [columns * (W + GX) - GX + 4, rows * (H + GY) + 44];
    fill(body, h("div", { class: "card scroll graph" }, s("svg", { viewBox: `0 0 ${w} ${tall}`, width: w, height: tall, role: "img", "aria-label": "graph of model function calls" },
      s("defs", {}, s("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" }, s("path", { d: "M0,0 L8,4 L0,8 z", class: "head" }))),
      lines, nodes)),
    h("div", { class: "scroll card" }, h("table", {}, h("thead", {}, h("tr", {}, ["from", "to", "keys"].map((name) => h("th", { text: name })))),
      h("tbody", {}, arrows.map((arrow) => h("tr", {}, h("td", { text: arrow.giver }), h("td", { text: arrow.taker }), h("td", {}, h("code", { text: arrow.keys.join(", ") }))))))));
  }

  return { update, redraw: update, needsData: () => true };
}

function dot(run) {
  const mark = h("i", { class: "dot" });
  mark.style.background = ofRun(run.id);
  return mark;
}
