// Is it learning, and is it healthy? Figures of all chosen runs, over steps, time or tokens.

import { h, fill, empty, number, counted, duration } from "../dom.js";
import * as data from "../data.js";
import * as state from "../state.js";
import { Chart, smoothed, dash, AXES } from "../charts.js";
import { ofRun, ofSeries, ofAge } from "../colours.js";

export const title = "Overview";
export const plots = true;
/** Facts of a run that make the view request its figures again when they change. */
export const news = ["steps", "evaluations", "state"];

const PLOTS = [
  { title: "Reward", unit: "mean of the batch", task: "reward_mean", lines: [["reward_mean", "training"], ["@reward_mean", "held-out"]] },
  { title: "Response length", unit: "tokens", task: "response_length_mean", lines: [["response_length_mean", "training"], ["@response_length_mean", "held-out"]] },
  { title: "Groups of each task", unit: "groups of the batch", zero: true, task: "groups", lines: [] },
  { title: "Age by task", unit: "versions, mean of the sampled tokens", zero: true, task: "token_age_mean", lines: [] },
  { title: "Throughput", unit: "tokens/s", zero: true, lines: [["generated_per_second", "generated"], ["tokens_per_second", "trained on"]] },
  { title: "Waits of the pools", unit: "share of time", percent: true, zero: true, most: 1,
    note: "The trainer waits for groups; a gserver is idle when it has no request, and paused in a weight update.",
    lines: [["trainer_wait", "trainer: for groups"], ["generation_idle", "gservers: idle"], ["generation_paused", "gservers: paused"]] },
  { title: "Age of the tokens trained on", unit: "share, by age in versions", percent: true, zero: true, most: 1, ages: true },
  { title: "Effective sample size", unit: "share of the sample", note: "Kish's: 1 where all importance ratios are the same.",
    lines: [["effective_sample_size", "of tokens"], ["sequence_effective_sample_size", "of sequences"]] },
  { title: "Gradient norm", unit: "before clipping", log: true, lines: [["grad_norm", "policy"], ["critic/grad_norm", "critic"]] },
  { title: "KL divergence", unit: "nats per token", lines: [["kl", "to the reference"], ["behavior_kl", "to the policies that sampled"]] },
  { title: "Entropy", unit: "nats per token", lines: [["entropy", "policy"]] },
  { title: "Engine against trainer", unit: "nats, |Δ log-probability|", log: true,
    note: "The same tokens under the same version, once by a gserver, once by the trainer.",
    lines: [["logprob_diff_max", "largest"], ["logprob_diff_mean", "mean"]] },
  { title: "Weight updates", unit: "seconds", zero: true, lines: [["publish_seconds", "update"], ["pause_seconds", "pause of generation"]] },
  { title: "Step time", unit: "seconds", zero: true, lines: [["step_seconds", "step"], ["train_seconds", "computing"], ["wait_seconds", "waiting"]] },
  { title: "Loss", unit: "of the policy", lines: [["loss", "loss"]] },
  { title: "Clipped and masked", unit: "share of tokens", percent: true, zero: true,
    lines: [["clip_share", "clipped"], ["behavior_weight_limited_share", "weight limited"], ["masked_share", "masked as too old"]] },
];
const FIGURES = [
  ["reward", "reward_mean"], ["held-out", "@reward_mean"], ["length", "response_length_mean"], ["generated", "generated_per_second", "tok/s"],
  ["trained on", "tokens_per_second", "tok/s"], ["trainer waits", "trainer_wait", "%"], ["oldest token", "token_age_max", "versions"],
  ["masked", "masked_share", "%"], ["sample size", "effective_sample_size"], ["engine − trainer", "logprob_diff_mean", "nats"],
];
const NAMES = [...new Set([...PLOTS.flatMap((plot) => (plot.lines ?? []).map(([name]) => name)), ...FIGURES.map(([, name]) => name)])]
  .filter((name) => !name.startsWith("@"));

/** Puts the view into `root`. Returns `update` (for new data, or another choice) and `remove`. */
export function mount(root) {
  const known = new Map();
  const health = h("div", { class: "findings" });
  const figures = h("div", { class: "figures" });
  const grid = h("div", { class: "grid" });
  const more = h("div", { class: "more" });
  fill(root, health, figures, grid, more);
  const charts = new Map();
  let asked = 0;

  function chartOf(plot) {
    if (!charts.has(plot.title)) {
      const chart = new Chart(plot);
      charts.set(plot.title, chart);
      grid.append(chart.element);
    }
    return charts.get(plot.title);
  }

  const extra = () => state.get("more").split(",").filter(Boolean);

  async function update({ fetched = true } = {}) {
    const mine = ++asked;
    const runs = state.shown();
    if (fetched) {
      const found = await Promise.all(runs.map(async (run) => ({
        run,
        steps: await data.steps(run.id, { names: [...NAMES, "age", "task", ...extra()].join(",") }),
        evaluations: await data.get(`runs/${run.id}/evaluations`),
        findings: await data.get(`runs/${run.id}/health`),
      })));
      if (mine !== asked) return;
      known.clear();
      for (const one of found) known.set(one.run.id, one);
    }
    const shown = runs.map((run) => known.get(run.id)).filter(Boolean);
    for (const one of shown) one.run = runs.find((run) => run.id === one.run.id);
    draw(shown);
  }

  function draw(shown) {
    drawFindings(shown);
    drawFigures(shown);
    const any = shown.some((one) => one.steps.rows);
    grid.hidden = !any;
    if (!any) {
      fill(more, empty("No training step yet", "The first figures come with the end of the first step. Until then, Pools lists the processes and their waits."));
      return;
    }
    const tasks = [...new Set(shown.flatMap((one) => Object.keys(one.steps.columns)).map((name) => name.split("/")).filter(([prefix]) => prefix === "task").map(([, name]) => name))];
    const ofTasks = (plot) => (plot.task ? tasks.map((name) => [`task/${name}/${plot.task}`, name]) : []);
    const drawn = PLOTS.filter((plot) => plot.ages || plot.lines.length || tasks.length);
    for (const plot of drawn) chartOf(plot).show(plot.ages ? ageLines(shown) : linesOf([...plot.lines, ...ofTasks(plot)], shown));
    for (const name of extra()) chartOf({ title: name, unit: "", extra: true }).show(linesOf([[name, name]], shown));
    for (const [name, chart] of charts) {
      if (!drawn.some((plot) => plot.title === name) && !extra().includes(name)) {
        chart.remove();
        chart.element.remove();
        charts.delete(name);
      }
    }
    drawMore(shown);
  }

  function linesOf(wanted, shown) {
    const weight = Number(state.get("smooth"));
    const several = shown.length > 1;
    return shown.flatMap((one) => wanted.map(([name, label], place) => {
      const colour = several ? ofRun(one.run.id) : ofSeries(place);
      const line = { label: several ? `${one.run.name}${wanted.length > 1 ? ` · ${label}` : ""}` : label, colour, dash: several ? dash(place) : [] };
      if (name.startsWith("@")) return { ...line, dots: true, ...evaluated(one, name.slice(1)) };
      const y = one.steps.columns[name];
      const x = xOf(one);
      const smooth = y ? smoothed(y, weight) : null;
      return smooth && y.length > 2 ? { ...line, x, y: smooth, faint: y } : { ...line, x, y };
    }));
  }

  function drawFindings(shown) {
    const said = shown.flatMap((one) => one.findings.map((finding) => ({ ...finding, run: one.run })));
    const marks = { bad: "✕", warning: "!", note: "i" };
    fill(health, said.map((finding) =>
      h("p", { class: `finding ${finding.severity}` },
        h("span", { class: "mark", "aria-hidden": "true", text: marks[finding.severity] ?? "i" }),
        h("span", {},
          shown.length > 1 ? h("b", { text: `${finding.run.name}: ` }) : null,
          `${finding.text[0].toUpperCase()}${finding.text.slice(1)}. `,
          finding.turn.length ? h("span", { class: "turn" }, "Try ", finding.turn.flatMap((key, i) => [i ? " or " : "", h("code", { text: key })])) : null))));
  }

  function drawFigures(shown) {
    if (shown.length > 1) {
      fill(figures, h("div", { class: "scroll" }, h("table", { class: "compare" },
        h("thead", {}, h("tr", {}, h("th", { text: "run" }), h("th", { text: "state" }), h("th", { text: "step", class: "n" }), FIGURES.map(([label]) => h("th", { text: label, class: "n" })))),
        h("tbody", {}, shown.map((one) => h("tr", {},
          h("th", {}, h("i", { class: "dot", style: { background: ofRun(one.run.id) } }), one.run.name),
          h("td", { text: one.run.state }),
          h("td", { class: "n", text: String(one.run.steps) }),
          FIGURES.map(([, name, unit]) => h("td", { class: "n", text: number(lastOf(one, name), unit === "%" ? "%" : "") }))))))));
      return;
    }
    const [one] = shown;
    if (!one || !one.steps.rows) return fill(figures);
    const left = remaining(one);
    fill(figures, h("dl", { class: "tiles" },
      tile("step", String(one.run.steps), one.run.most_steps ? `of ${one.run.most_steps}` : ""),
      tile(one.run.state === "running" ? "left" : "took", duration(one.run.state === "running" && left !== null ? left : one.run.seconds), ""),
      FIGURES.filter(([, name]) => lastOf(one, name) !== null).map(([label, name, unit]) => {
        const [value, ...rest] = number(lastOf(one, name), unit ?? "").split(" ");
        const limit = name === "token_age_max" && one.run.max_staleness !== null ? `of ${counted(one.run.max_staleness, "version")}` : rest.join(" ");
        return tile(label, value, limit);
      })));
  }

  function drawMore(shown) {
    if (data.isFile) return fill(more);
    const drawn = new Set(NAMES);
    const others = [...new Set(shown.flatMap((one) => one.steps.known))].filter((name) => !drawn.has(name) && !/^(age|masked|task)\//.test(name) && name !== "step").sort();
    const picked = extra();
    const choice = h("select", { "aria-label": "another figure", onchange: (event) => {
      if (event.target.value) state.set({ more: [...picked, event.target.value].join(",") });
    } }, h("option", { value: "", text: `${others.length - picked.length} figures more …` }), others.filter((name) => !picked.includes(name)).map((name) => h("option", { value: name, text: name })));
    if (more.contains(document.activeElement)) return undefined;
    return fill(more, h("label", {}, "Show ", choice), picked.map((name) =>
      h("button", { class: "chip", title: `no longer show ${name}`, onclick: () => state.set({ more: picked.filter((other) => other !== name).join(",") }) }, name, " ×")));
  }

  return {
    update,
    redraw: () => update({ fetched: false }),
    needsData: (names) => names.includes("shown") || names.includes("more") || names.includes("run"),
    remove: () => charts.forEach((chart) => chart.remove()),
  };
}

function tile(label, value, unit) {
  return h("div", {}, h("dt", { text: label }), h("dd", {}, value, unit ? h("small", { text: ` ${unit}` }) : null));
}

/** The x value of each row of a run's steps. */
export function xOf(one) {
  const axis = state.get("x") in AXES ? state.get("x") : "step";
  if (axis === "step") return one.steps.columns.step;
  if (axis === "time") return one.steps.columns.time;
  return one.steps.columns.tokens_until ?? [];
}

function evaluated(one, name) {
  const points = one.evaluations.filter((point) => point.report[name] !== null);
  const axis = state.get("x");
  const tokens = axis === "tokens" ? xOf(one) : null;
  const at = (point) => {
    if (axis === "time") return point.seconds_since_begin;
    if (!tokens) return point.report.policy_version;
    const row = one.steps.columns.step.findIndex((step) => step >= point.report.policy_version);
    return tokens[row < 0 ? tokens.length - 1 : row] ?? 0;
  };
  return { x: points.map(at), y: points.map((point) => point.report[name]) };
}

/** Areas: the share of each age, the oldest on top; `prefix`: `age`, of tokens in a loss, or `masked`. */
export function ageLines(shown, prefix = "age") {
  const one = shown.find((candidate) => candidate.run.id === state.run()?.id) ?? shown[0];
  const names = Object.keys(one.steps.columns).filter((name) => name.startsWith(`${prefix}/`)).sort((a, b) => parseInt(a.slice(prefix.length + 1)) - parseInt(b.slice(prefix.length + 1)));
  if (!names.length) return [];
  const x = xOf(one);
  const weight = Number(state.get("smooth"));
  const counts = names.map((name) => smoothed(one.steps.columns[name], weight) ?? Array.from(one.steps.columns[name]));
  const total = Array.from(x, (_, row) => counts.reduce((sum, column) => sum + (column[row] || 0), 0));
  const below = new Array(x.length).fill(0);
  const areas = names.map((name, place) => {
    const share = Array.from(total, (all, row) => (all ? (counts[place][row] || 0) / all : 0));
    const y = share.map((value, row) => (below[row] += value));
    const [low, high] = name.slice(prefix.length + 1).split("-");
    return { label: low === high ? low : `${low}–${high}`, colour: ofAge(place / Math.max(1, names.length - 1)), fill: ofAge(place / Math.max(1, names.length - 1)), x, y, tell: (row) => share[row] };
  });
  return areas.reverse();
}

function lastOf(one, name) {
  if (name.startsWith("@")) {
    const points = evaluated(one, name.slice(1)).y;
    return points.length ? points[points.length - 1] : null;
  }
  const column = one.steps.columns[name];
  if (!column) return null;
  const last = Array.from(column.subarray(Math.max(0, column.length - 5))).filter((value) => !Number.isNaN(value));
  if (!last.length) return null;
  return name.endsWith("_max") ? Math.max(...last) : last.reduce((sum, value) => sum + value, 0) / last.length;
}

/** Seconds to the last step at the pace of the last ones; null if unknown. */
function remaining(one) {
  const { time, step, run_seconds: ran = time } = one.steps.columns; // run_seconds do not include down times
  if (!one.run.most_steps || step.length < 2) return null;
  const first = Math.max(0, step.length - 21);
  const pace = (ran[ran.length - 1] - ran[first]) / Math.max(1, step[step.length - 1] - step[first]);
  return pace * Math.max(0, one.run.most_steps - one.run.steps);
}
