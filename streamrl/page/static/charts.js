// A plot in a card: lines over the shared x axis, with a legend that shows the figures under the pointer.
//
// All plots zoom together (`state.zoom`), and a step under the pointer in one is marked in all.

import { h, fill, number, duration } from "./dom.js";
import * as state from "./state.js";
import { variable, theme } from "./colours.js";

const HEIGHT = 190;
/** Distances between ticks of an axis with whole numbers only. */
const WHOLE = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((figure) => figure * 10 ** power)).flat();
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];

/** The possible x axes. */
export const AXES = {
  step: { label: "step", whole: true, format: (value) => `step ${Math.round(value).toLocaleString("en-US")}`, tick: (value) => compact(value) },
  time: { label: "time since the begin", format: (value) => duration(value), tick: (value) => duration(value) },
  tokens: { label: "tokens trained on", format: (value) => `${compact(value)} tokens`, tick: (value) => compact(value) },
};

/** The dash of the `place`th line of one colour. */
export function dash(place) {
  return DASHES[place % DASHES.length];
}

function compact(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${+(value / 1e9).toPrecision(3)}G`;
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  return String(+value.toPrecision(6));
}

function tickOf(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return size >= 1e6 ? compact(value) : value.toExponential(0).replace("e-", "e−");
  return compact(value);
}

/** Whether a range is too narrow to divide: uPlot would add a step that changes nothing, for ever. */
const narrow = (from, to) => !(to - from > 1e-9 * Math.max(Math.abs(from), Math.abs(to)));

export class Chart {
  /**
   * `title`, `unit` (of the y axis), `note` (an explanation in a sentence); `percent`: y is a share; `zero`: the y axis
   * begins at 0; `log`: it is logarithmic; `most`: its end.
   */
  constructor({ title, unit = "", note = "", percent = false, zero = false, log = false, most = null, wide = false }) {
    this.kind = { title, unit, percent, zero, log, most };
    this.legend = h("div", { class: "legend" });
    this.at = h("span", { class: "at" });
    this.plot = h("div", { class: "plot", tabIndex: 0, role: "img", onkeydown: (event) => this.key(event) });
    this.element = h(
      "section",
      { class: wide ? "card chart wide" : "card chart" },
      h("header", {}, h("h3", { text: title, title: note || null }), h("span", { class: "unit", text: unit }), this.at),
      this.legend,
      this.plot,
    );
    this.lines = [];
    this.signature = "";
    this.u = null;
    this.seen = new ResizeObserver(() => this.u?.setSize({ width: this.width(), height: HEIGHT }));
    this.seen.observe(this.plot);
    this.forget = state.listen((names) => {
      if (names.includes("from") || names.includes("to")) this.rezoom();
    });
  }

  remove() {
    this.forget();
    this.seen.disconnect();
    this.u?.destroy();
    this.u = null;
  }

  width() {
    return Math.max(200, this.plot.clientWidth);
  }

  /**
   * Show `lines`: `{label, colour, dash, x, y, faint, dots, fill, tell}`. `faint`: values drawn behind, such as the
   * unsmoothed ones; `tell`: the legend's text for an index instead of y; `fill`: the colour below the line.
   */
  show(lines) {
    this.lines = lines.filter((line) => line.y && line.y.some((value) => value !== null && !Number.isNaN(value)));
    this.element.classList.toggle("without", !this.lines.length);
    if (!this.lines.length) {
      this.u?.destroy();
      this.u = null;
      this.signature = "";
      fill(this.legend);
      fill(this.plot, h("p", { class: "nothing", text: "This run has no such figure." }));
      return;
    }
    const data = this.data();
    const signature = JSON.stringify([state.get("x"), theme(), this.lines.map((l) => [l.label, l.colour, l.dash, l.fill, Boolean(l.faint), l.dots])]);
    if (!this.u || signature !== this.signature) {
      this.signature = signature;
      this.u?.destroy();
      fill(this.plot);
      this.u = new uPlot(this.options(), data, this.plot);
    } else {
      this.u.setData(data, false);
      this.rezoom();
    }
    this.tell();
  }

  /** Columns on one x axis for uPlot: first the faint ones, then the lines. */
  data() {
    const positive = (value) => (value === null || Number.isNaN(value) || (this.kind.log && value <= 0) ? null : value);
    const same = this.lines.every((line) => line.x === this.lines[0].x);
    const rows = [...this.lines.filter((line) => line.faint).map((line) => [line, line.faint]), ...this.lines.map((line) => [line, line.y])];
    if (same) return [Array.from(this.lines[0].x), ...rows.map(([, y]) => Array.from(y, positive))];
    const all = Float64Array.from(new Set(this.lines.flatMap((line) => Array.from(line.x)))).sort();
    const place = new Map(Array.from(all, (value, i) => [value, i]));
    const columns = rows.map(([line, y]) => {
      const column = new Array(all.length).fill(null);
      for (let i = 0; i < line.x.length; i++) column[place.get(line.x[i])] = positive(y[i]);
      return column;
    });
    return [Array.from(all), ...columns];
  }

  options() {
    const axis = AXES[state.get("x")] ?? AXES.step;
    const text = variable("--muted");
    const grid = { stroke: variable("--grid"), width: 1 };
    const font = `11px ${variable("--sans")}`;
    const faint = this.lines.filter((line) => line.faint);
    const share = (value) => `${+(value * 100).toPrecision(3)}%`;
    return {
      width: this.width(),
      height: HEIGHT,
      legend: { show: false },
      padding: [8, 16, 0, 0],
      cursor: {
        y: false,
        sync: { key: "x", setSeries: false },
        drag: { x: true, y: false, setScale: false },
        points: { size: 6, width: 1.5 },
      },
      scales: {
        x: { time: false, range: (u, least, most) => this.range(least, most) },
        y: this.kind.log
          ? { distr: 3, range: (u, least, most) => this.rangeOfLog(least, most) }
          : { range: (u, least, most) => this.rangeOfY(least, most) },
      },
      axes: [
        { stroke: text, grid: { show: false }, ticks: { stroke: variable("--grid"), size: 4 }, font, size: 26, space: 60, ...(axis.whole ? { incrs: WHOLE } : {}), values: (u, at) => at.map(axis.tick) },
        {
          stroke: text, grid: this.kind.log ? { ...grid, filter: decades } : grid, ticks: { show: false }, font, size: 48, space: 28,
          values: (u, at) => at.map((v) => (v === null ? "" : this.kind.percent ? share(v) : tickOf(v))),
          ...(this.kind.log ? { filter: decades, splits: ticksOfLog } : {}),
        },
      ],
      series: [
        {},
        ...faint.map((line) => ({ stroke: line.colour, alpha: 0.28, width: 1, points: { show: false }, spanGaps: true })),
        ...this.lines.map((line) => ({
          stroke: line.fill ? undefined : line.colour,
          fill: line.fill,
          width: line.fill ? 0 : 1.75,
          dash: line.dash,
          spanGaps: true,
          points: { show: Boolean(line.dots), size: 5, fill: line.colour },
        })),
      ],
      hooks: {
        setCursor: [() => this.tell()],
        setSelect: [(u) => this.select(u)],
        ready: [(u) => u.over.addEventListener("dblclick", () => state.set({ from: "", to: "" }))],
      },
    };
  }

  range(least, most) {
    const zoomed = state.zoom();
    if (zoomed && !narrow(...zoomed)) return zoomed;
    if (!Number.isFinite(least) || !Number.isFinite(most)) return [0, 1];
    return narrow(least, most) ? [least - 0.5, most + 0.5] : [least, most];
  }

  rangeOfY(least, most) {
    if (!Number.isFinite(least) || !Number.isFinite(most)) return [0, 1];
    let [from, to] = [this.kind.zero ? Math.min(0, least) : least, this.kind.most ?? most];
    if (narrow(from, to)) [from, to] = [from - (Math.abs(from) * 0.1 || 0.5), to + (Math.abs(to) * 0.1 || 0.5)];
    const room = (to - from) * 0.06;
    return [this.kind.zero && from === 0 ? 0 : from - room, this.kind.most !== null ? to : to + room];
  }

  rangeOfLog(least, most) {
    if (!(least > 0) || !Number.isFinite(most)) return [0.1, 10];
    return [least / 1.15, Math.max(most * 1.15, least * 1.5)];
  }

  rezoom() {
    if (!this.u) return;
    const x = this.u.data[0];
    const [min, max] = this.range(x[0] ?? null, x[x.length - 1] ?? null);
    this.u.batch(() => this.u.setScale("x", { min, max }));
  }

  select(u) {
    if (u.select.width < 4) return;
    const [from, to] = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    if (to > from) state.set({ from: +from.toPrecision(8), to: +to.toPrecision(8) });
  }

  /** Draw the legend: figures under the pointer, or the last ones. */
  tell() {
    const u = this.u;
    if (!u) return;
    const under = u.cursor.left >= 0 ? u.cursor.idx : null;
    const axis = AXES[state.get("x")] ?? AXES.step;
    this.at.textContent = under === null || under === undefined ? "" : axis.format(u.data[0][under]);
    const faint = this.lines.filter((line) => line.faint).length;
    const said = this.lines.map((line, place) => {
      const column = u.data[1 + faint + place];
      let i = under ?? column.length - 1;
      while (i > 0 && column[i] === null) i--;
      const value = line.tell ? line.tell(i) : column[i];
      return this.kind.percent ? number(value, "%") : number(value);
    });
    fill(
      this.legend,
      this.lines.map((line, place) =>
        h("span", { class: "key" }, swatch(line), h("span", { text: line.label }), h("b", { text: said[place] }))),
    );
    this.plot.setAttribute("aria-label", `${this.kind.title}, ${this.kind.unit}: ${this.lines.map((line, i) => `${line.label} ${said[i]}`).join(", ")}`);
  }

  key(event) {
    const u = this.u;
    if (!u || event.ctrlKey || event.metaKey || event.altKey) return;
    const [left, right] = [u.scales.x.min, u.scales.x.max];
    const middle = u.cursor.left >= 0 ? u.posToVal(u.cursor.left, "x") : (left + right) / 2;
    const scaled = (factor) => state.set({ from: middle - (middle - left) * factor, to: middle + (right - middle) * factor });
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const visible = u.data[0];
      const width = Math.max(1, Math.round(visible.filter((v) => v >= left && v <= right).length / 200));
      const now = u.cursor.left >= 0 && u.cursor.idx !== null ? u.cursor.idx : visible.length - 1;
      const next = Math.min(visible.length - 1, Math.max(0, now + (event.key === "ArrowLeft" ? -1 : 1) * (event.shiftKey ? 10 : 1) * width));
      u.setCursor({ left: u.valToPos(visible[next], "x"), top: 10 }, true, true);
    } else if (event.key === "+" || event.key === "=") scaled(0.5);
    else if (event.key === "-") scaled(2);
    else if (event.key === "0" || event.key === "Escape") state.set({ from: "", to: "" });
    else return;
    event.preventDefault();
  }
}

/** All places on a logarithmic axis. Those that uPlot finds have no end where the range begins at 9.5e-4, for example. */
export function ticksOfLog(u, axis, least, most) {
  const found = [];
  for (let power = Math.floor(Math.log10(least)); power <= Math.log10(most); power++) {
    for (let figure = 1; figure < 10; figure++) {
      const value = Number(`${figure}e${power}`);
      if (value >= least && value <= most) found.push(value);
    }
  }
  return found;
}

/** The labelled places on a logarithmic axis: powers of ten, on shorter ranges also 2 and 5 times these, or all. */
function decades(u, at) {
  const wide = Math.log10(u.scales.y.max / u.scales.y.min);
  const leading = wide > 2.2 ? [1] : wide > 0.7 ? [1, 2, 5] : [1, 2, 3, 4, 5, 6, 7, 8, 9];
  return at.map((value) => {
    const figure = value / 10 ** Math.floor(Math.log10(value) + 1e-9);
    return leading.some((one) => Math.abs(one - figure) < 1e-6) ? value : null;
  });
}

function swatch(line) {
  const mark = h("i", { class: line.fill ? "swatch area" : "swatch" });
  if (line.fill) mark.style.background = line.fill;
  else {
    const [on, off] = line.dash?.length ? line.dash : [1, 0];
    mark.style.background = off ? `repeating-linear-gradient(90deg, ${line.colour} 0 ${on}px, transparent ${on}px ${on + off}px)` : line.colour;
  }
  return mark;
}

/** `values` smoothed by an exponential mean, corrected for its initial bias; `weight` of the past, from 0 to 1. */
export function smoothed(values, weight) {
  if (!(weight > 0)) return null;
  const found = new Array(values.length).fill(null);
  let mean = 0;
  let sum = 0;
  for (let i = 0; i < values.length; i++) {
    if (values[i] === null || Number.isNaN(values[i])) continue;
    mean = weight * mean + (1 - weight) * values[i];
    sum = weight * sum + (1 - weight);
    found[i] = mean / sum;
  }
  return found;
}
