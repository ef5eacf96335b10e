// The activities of every process as a lane of time, and the state of each process.

import { h, s, fill, empty, number, duration, counted, later } from "../dom.js";
import * as data from "../data.js";
import * as state from "../state.js";
import { ofKind, variable } from "../colours.js";

export const title = "Pools";
export const news = ["beats", "steps", "state"];

const ROW = 26;
const GAP = 5;
const LEAST_SECONDS = 0.2;
const WORDS = {
  generate: "generating", pause: "paused for new weights", wait: "waiting", work: "at work", away: "not heard of", restart: "started again", failed: "update failed",
  publish: "weight update",
};
const STANDING = { live: "● live", silent: "? silent", evicted: "✕ evicted", draining: "↓ draining", left: "■ left" };

export function mount(root) {
  let lanes = [];
  let window_ = null;
  let asked = 0;
  let under = null;
  let drag = null;
  const names = h("div", { class: "lane-names" });
  const canvas = h("canvas", { tabIndex: 0, role: "img", "aria-label": "timeline of all processes" });
  const info = h("p", { class: "lane-info", role: "status" });
  const legend = h("div", { class: "legend" });
  const zoomed = h("span", { class: "at" });
  const card = h("section", { class: "card timeline" },
    h("header", {}, h("h3", { text: "Work of each process" }), h("span", { class: "unit", text: "time since the begin" }), zoomed),
    legend,
    h("div", { class: "lanes" }, names, h("div", { class: "lane-plot" }, canvas)),
    info,
    h("p", { class: "tools inner" },
      h("button", { class: "chip", onclick: () => zoomTo(null), text: "whole run" }),
      [3600, 600, 60, 10, 1].map((seconds) => h("button", { class: "chip", "data-seconds": seconds, onclick: () => zoomAround(seconds), text: seconds >= 3600 ? "1 h" : seconds >= 60 ? `${seconds / 60} min` : `${seconds} s` })),
      h("span", { class: "muted hint", text: "wheel or + −: zoom · drag or ← →: move · double click or 0: whole run" })));
  const fleet = h("section", { class: "card" });
  const waits = h("section", { class: "card" });
  fill(root, card, fleet, waits);

  const whole = () => [0, Math.max(1, state.run()?.seconds ?? 1)];
  const shown = () => window_ ?? whole();
  const seen = new ResizeObserver(() => { draw(); fetchSoon(); });
  seen.observe(canvas.parentElement);
  const width = () => Math.max(120, canvas.parentElement.clientWidth);

  async function fetchLanes() {
    const mine = ++asked;
    const [from, to] = shown();
    const margin = window_ ? (to - from) * 0.5 : 0;
    const found = await data.get(`runs/${state.run().id}/timeline`, { begin: from - margin, end: to + margin, columns: Math.round(Math.min(2000, (width() / 1.5) * (window_ ? 2 : 1))) });
    if (mine !== asked) return;
    lanes = found.filter((lane) => lane.pieces.length || !["trainer", "weight updates"].includes(lane.name));
    draw();
  }
  const fetchSoon = later(() => fetchLanes().catch((error) => fill(info, error.message)), 90);

  async function update() {
    const run = state.run();
    const [, standing] = await Promise.all([fetchLanes(), data.get(`runs/${run.id}/fleet`)]);
    drawFleet(standing);
    drawWaits(standing);
  }

  function zoomTo(next) {
    if (next) {
      const [least, most] = whole();
      const span = Math.min(most - least, Math.max(LEAST_SECONDS, next[1] - next[0]));
      const middle = (next[0] + next[1]) / 2;
      const from = Math.min(Math.max(least, middle - span / 2), Math.max(least, most - span));
      window_ = span >= (most - least) * 0.999 ? null : [from, from + span];
    } else window_ = null;
    draw();
    fetchSoon();
  }

  function zoomAround(seconds) {
    const [from, to] = shown();
    const middle = window_ ? (from + to) / 2 : to - seconds / 2;
    zoomTo([middle - seconds / 2, middle + seconds / 2]);
  }

  function draw() {
    const ratio = devicePixelRatio || 1;
    const [w, tall] = [width(), lanes.length * (ROW + GAP) + 24];
    canvas.width = w * ratio;
    canvas.height = tall * ratio;
    canvas.style.width = `${w}px`;
    canvas.style.height = `${tall}px`;
    fill(names, lanes.map((lane) => h("div", { text: lane.name, title: lane.name })));
    for (const button of card.querySelectorAll("[data-seconds]")) button.hidden = Number(button.dataset.seconds) > whole()[1];
    const c = canvas.getContext("2d");
    c.scale(ratio, ratio);
    const [from, to] = shown();
    const x = (time) => ((time - from) / (to - from)) * w;
    drawAxis(c, from, to, w, tall, x);
    const kinds = new Set();
    lanes.forEach((lane, row) => {
      const top = row * (ROW + GAP);
      c.fillStyle = variable("--grid");
      c.fillRect(0, top, w, ROW);
      const filled = new Map();
      for (const [begin, end, kind, share] of lane.pieces) {
        if (end < from || begin > to) continue;
        kinds.add(kind);
        const [left, right] = [Math.max(-1, x(begin)), Math.min(w + 1, x(end))];
        const before = share < 1 ? filled.get(begin) ?? 0 : 0;
        if (share < 1) filled.set(begin, before + share);
        c.fillStyle = ofKind(kind);
        const wide = Math.max(share < 1 ? 0.3 : 0.6, right - left - (share === 1 && right - left > 4 ? 1 : 0));
        if (kind === "restart") c.fillRect(left, top - 2, 2.5, ROW + 4);
        else if (kind === "failed") {
          c.fillRect(left, top, Math.max(3, wide), ROW);
          c.fillStyle = variable("--card");
          c.font = `bold 12px ${variable("--sans")}`;
          if (wide > 12) c.fillText("✕", left + 3, top + 17);
        } else {
          c.fillRect(left, top + ROW * (1 - Math.min(1, before + share)), wide, ROW * share);
          if (share === 1 && wide > 56 && !["work", "wait"].includes(kind)) label(c, WORDS[kind] ?? kind, left, top, wide, ofKind(kind));
        }
      }
      if (lane === under?.lane && under.piece) {
        c.strokeStyle = variable("--text");
        c.lineWidth = 1.5;
        const [left, right] = [Math.max(0, x(under.piece[0])), Math.min(w, x(under.piece[1]))];
        c.strokeRect(left, top + 0.75, Math.max(2, right - left), ROW - 1.5);
      }
    });
    fill(legend, [...kinds].sort().map((kind) => {
      const mark = h("i", { class: "swatch area" });
      mark.style.background = ofKind(kind);
      return h("span", { class: "key" }, mark, WORDS[kind] ?? kind);
    }));
    zoomed.textContent = window_ ? `${duration(from)} – ${duration(to)} (${number(to - from)} s)` : "";
  }

  function label(c, text, left, top, wide, colour) {
    const [r, g, b] = colour.match(/\w\w/g).map((part) => parseInt(part, 16));
    c.fillStyle = 0.299 * r + 0.587 * g + 0.114 * b > 150 ? "#10151b" : "#ffffff";
    c.font = `11px ${variable("--sans")}`;
    const at = Math.max(0, left) + 5;
    if (c.measureText(text).width < wide - 10 + Math.min(0, left)) c.fillText(text, at, top + 17);
  }

  function drawAxis(c, from, to, w, tall, x) {
    const steps = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400, 604800];
    const step = steps.find((one) => ((to - from) / one) * 80 <= w) ?? steps.at(-1);
    c.font = `11px ${variable("--sans")}`;
    c.fillStyle = variable("--muted");
    c.strokeStyle = variable("--line");
    c.textAlign = "center";
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
      const place = x(at);
      c.beginPath();
      c.moveTo(place, tall - 22);
      c.lineTo(place, tall - 17);
      c.stroke();
      const text = step < 1 ? `${duration(at)}.${String(Math.round((at % 1) * 100)).padStart(2, "0")}` : duration(at);
      c.fillText(text, Math.min(w - 18, Math.max(14, place)), tall - 5);
    }
    c.textAlign = "left";
  }

  function pieceAt(event) {
    const box = canvas.getBoundingClientRect();
    const [from, to] = shown();
    const time = from + ((event.clientX - box.left) / box.width) * (to - from);
    const lane = lanes[Math.floor((event.clientY - box.top) / (ROW + GAP))];
    if (!lane) return null;
    const slack = ((to - from) / box.width) * 2;
    const all = lane.pieces.filter(([begin, end]) => begin - slack <= time && time <= end + slack);
    const rank = ([begin, end, kind]) => (["restart", "failed"].includes(kind) ? 0 : end - begin);
    return { lane, time, all, piece: all.sort((a, b) => rank(a) - rank(b))[0] };
  }

  function tell() {
    if (!under) return fill(info, h("span", { class: "muted", text: "Point at a lane to see its figures." }));
    const { lane, time, piece, all } = under;
    if (!piece) return fill(info, h("b", { text: lane.name }), ` at ${duration(time)}: nothing known`);
    const [begin, end, kind, share, text] = piece;
    const shares = share < 1 ? all.filter((one) => one[0] === begin).map((one) => `${WORDS[one[2]] ?? one[2]} ${number(one[3], "%")}`).join(", ") : null;
    return fill(info, h("b", { text: lane.name }), ` ${shares ?? WORDS[kind] ?? kind}${text ? ` for ${text}`.replace("for version", "of version") : ""} `,
      h("span", { class: "muted", text: `${duration(begin)} + ${number(end - begin)} s` }));
  }

  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const [from, to] = drag.window;
      const moved = ((event.clientX - drag.x) / canvas.clientWidth) * (to - from);
      if (Math.abs(event.clientX - drag.x) > 3) zoomTo([from - moved, to - moved]);
      return;
    }
    under = pieceAt(event);
    tell();
    draw();
  });
  canvas.addEventListener("pointerdown", (event) => {
    if (!window_) return;
    drag = { x: event.clientX, window: shown() };
    canvas.setPointerCapture(event.pointerId);
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { drag = null; });
  canvas.addEventListener("pointerleave", () => { under = null; tell(); draw(); });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = canvas.getBoundingClientRect();
    const [from, to] = shown();
    const at = from + ((event.clientX - box.left) / box.width) * (to - from);
    const factor = Math.exp(Math.max(-1, Math.min(1, event.deltaY / 200)));
    zoomTo([at - (at - from) * factor, at + (to - at) * factor]);
  }, { passive: false });
  canvas.addEventListener("dblclick", () => zoomTo(null));
  canvas.addEventListener("keydown", (event) => {
    const [from, to] = shown();
    const [span, middle] = [to - from, (from + to) / 2];
    if (event.key === "ArrowLeft") zoomTo([from - span / 5, to - span / 5]);
    else if (event.key === "ArrowRight") zoomTo([from + span / 5, to + span / 5]);
    else if (event.key === "+" || event.key === "=") zoomTo([middle - span / 4, middle + span / 4]);
    else if (event.key === "-") zoomTo([middle - span, middle + span]);
    else if (event.key === "0" || event.key === "Escape") zoomTo(null);
    else return;
    event.preventDefault();
  });
  tell();

  function drawFleet(standing) {
    if (!standing.processes.length) {
      fill(fleet, empty("No process was heard of", "The controller writes the heartbeats of each process to timeline.jsonl, from the run's begin on."));
      return;
    }
    const versions = standing.served_version === null ? "no weight update yet" : `weights of version ${standing.served_version} are served`;
    fill(fleet,
      h("header", {}, h("h3", { text: "Fleet" }), h("span", { class: "unit", text: `${versions} · ${counted(standing.updates, "update")}${standing.updates_failed ? `, ${standing.updates_failed} failed` : ""}` })),
      h("div", { class: "scroll" }, h("table", {},
        h("thead", {}, h("tr", {}, ["process", ["running", "silent"].includes(state.run()?.state) ? "standing" : "standing at the end", "version", "load", "speed", "busy", "restarts", "waits for"].map((name) => h("th", { class: ["restarts", "version"].includes(name) ? "n" : "", text: name })))),
        h("tbody", {}, standing.processes.map((one) => h("tr", {},
          h("th", { text: one.name }),
          h("td", { class: `state ${one.standing === "live" ? "" : "silent"}`, text: STANDING[one.standing] ?? one.standing }),
          h("td", { class: "n", text: String(one.version ?? "–") }),
          h("td", { class: "wraps", text: load(one) }),
          h("td", { class: "wraps", text: speed(one) }),
          h("td", {}, one.busy.length ? sparkline(one.busy) : null),
          h("td", { class: "n", text: String(one.restarts) }),
          h("td", { class: "wraps muted", text: one.waiting_for || "–" })))))));
  }

  function drawWaits(standing) {
    if (!standing.waits.length) {
      fill(waits);
      waits.hidden = true;
      return;
    }
    waits.hidden = false;
    fill(waits, h("header", {}, h("h3", { text: "Waits of each process" }), h("span", { class: "unit", text: "from their heartbeats; # stands for a number" })),
      h("div", { class: "scroll" }, h("table", {},
        h("tbody", {}, standing.waits.map(([who, what, seconds, share]) => h("tr", {},
          h("th", { text: who }), h("td", { text: what }), h("td", { class: "n", text: duration(seconds) }),
          h("td", { class: "n" }, h("span", { class: "level", "aria-hidden": "true" }, h("i", { style: { width: `${Math.round(100 * share)}%` } })), number(share, "%"))))))));
  }

  return {
    update,
    redraw: draw,
    needsData: (names_) => {
      if (names_.includes("run")) window_ = null;
      return names_.includes("run");
    },
    remove: () => seen.disconnect(),
  };
}

function load({ role, gauges: g }) {
  const parts = {
    gserver: [["running", "running"], ["queued", "queued"]],
    rollout: [["groups_running", "groups"], ["requests_in_flight", "requests in flight"], ["groups_pushing", "on their way"]],
    model_worker: [["groups_held", "groups held"]],
    controller: [["groups_held", "groups held"]],
  }[role] ?? [];
  const said = parts.filter(([name]) => g[name] !== undefined).map(([name, word]) => `${number(g[name])} ${word}`);
  if (g.bytes_held) said.push(`${number(g.bytes_held / 2 ** 20)} MiB`);
  return said.join(", ") || "–";
}

function speed({ rates }) {
  const said = [["tokens_generated", "tokens/s"], ["groups_done", "groups/s"], ["groups_trained", "groups/s"], ["groups_stored", "groups/s"]]
    .filter(([name]) => rates[name] !== undefined).slice(0, 2).map(([name, unit]) => `${number(rates[name])} ${unit}`);
  if (rates.processor_seconds !== undefined) said.push(`${number(rates.processor_seconds + (rates.children_processor_seconds ?? 0))} cores`);
  return said.join(", ") || "–";
}

function sparkline(values) {
  const [w, tall] = [120, 18];
  const at = (i) => (i / Math.max(1, values.length - 1)) * w;
  const points = values.map((value, i) => `${at(i).toFixed(1)},${(tall - value * (tall - 1)).toFixed(1)}`);
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  return s("svg", { viewBox: `0 0 ${w} ${tall}`, width: w, height: tall, role: "img", "aria-label": `busy ${number(mean, "%")} on average` },
    s("polygon", { points: `0,${tall} ${points.join(" ")} ${w},${tall}`, fill: ofKind("generate"), opacity: "0.75" }));
}
