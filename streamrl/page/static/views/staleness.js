// The age of the tokens trained on, the treatment of tokens that were too old, and the waits between the pools.

import { h, fill, empty, counted, number } from "../dom.js";
import * as data from "../data.js";
import * as state from "../state.js";
import { Chart, smoothed } from "../charts.js";
import { ofSeries, ofAge } from "../colours.js";
import { ageLines, xOf } from "./overview.js";

export const title = "Staleness";
export const plots = true;
export const news = ["steps", "state"];

const PLOTS = [
  { title: "Age of tokens", unit: "versions", zero: true, lines: [["token_age_max", "oldest in a loss"], ["token_age_mean", "mean"]] },
  { title: "What became of sampled tokens", unit: "share of the batch's tokens", percent: true, zero: true, lines: [["masked_share", "masked: too old"], ["behavior_weight_limited_share", "masked: weight limit"]] },
  { title: "The ledger", unit: "groups", zero: true, note: "How many more groups may start now, and where those are that did.",
    lines: [["ledger_room", "room"], ["groups_running", "being generated"], ["groups_untrained", "finished, not trained"], ["admissions_waiting", "calls that wait for room"]] },
  { title: "Waits for it", unit: "share of time", percent: true, zero: true, most: 1, lines: [["trainer_wait", "trainer: for groups"], ["generation_idle", "gservers: idle"]] },
  { title: "How far the policy moves from its data", unit: "|importance ratio − 1|", log: true, lines: [["importance_ratio_deviation", "mean of the tokens"]] },
  { title: "Effective sample size", unit: "share of the sample", lines: [["effective_sample_size", "of tokens"], ["sequence_effective_sample_size", "of sequences"]] },
];
const BY_AGE = [["policy_shift_mean", "shift of log p"], ["importance_ratio_deviation", "|ratio − 1|"], ["effective_sample_size", "sample size"], ["clip_share", "clipped", "%"], ["behavior_weight_limited_share", "weight limited", "%"]];
const LATELY = 20;

export function mount(root) {
  let one = null;
  let asked = 0;
  const told = h("p", { class: "lead" });
  const grid = h("div", { class: "grid" });
  const byAge = h("section", { class: "card" });
  const ages = new Chart({ title: "Age of the tokens trained on", unit: "share of tokens, by age in policy versions", percent: true, zero: true, most: 1, wide: true });
  const masked = new Chart({ title: "Age of the masked tokens", unit: "share of them, by age in policy versions", percent: true, zero: true, most: 1, wide: true });
  const charts = PLOTS.map((plot) => new Chart(plot));
  fill(grid, ages.element, masked.element, charts.map((chart) => chart.element));
  fill(root, told, grid, byAge);

  async function update() {
    const mine = ++asked;
    const run = state.run();
    const steps = await data.steps(run.id, {});
    if (mine !== asked) return;
    one = { run, steps };
    draw();
  }

  function draw() {
    if (!one) return;
    const { run, steps } = one;
    grid.hidden = !steps.rows;
    byAge.hidden = !steps.rows;
    if (!steps.rows) {
      fill(told, empty("No training step yet", "Ages are known once tokens enter a loss."));
      return;
    }
    const rule = { mask: "older tokens stay as context and are left out of the loss", wait: "the trainer waits for groups in the order of their admission", drop: "groups with an older token are discarded" }[run.over_age];
    fill(told, run.max_staleness === null ? `${run.name}: its configuration cannot be read.` : [
      h("b", { text: run.name }), ` trains on no token older than `, h("b", { text: counted(run.max_staleness, "version") }), " (", h("code", { text: `staleness.max_staleness = ${run.max_staleness}` }), "); ",
      h("code", { text: `over_age = "${run.over_age}"` }), rule ? `: ${rule}.` : "."]);
    ages.show(ageLines([one]));
    masked.show(ageLines([one], "masked"));
    const weight = Number(state.get("smooth"));
    const x = xOf(one);
    PLOTS.forEach((plot, place) => charts[place].show(plot.lines.map(([name, label], i) => {
      const y = steps.columns[name];
      const smooth = y && smoothed(y, weight);
      return { label, colour: ofSeries(i), dash: [], x, y: smooth ?? y, faint: smooth ? y : undefined };
    })));
    drawByAge(steps);
  }

  function drawByAge(steps) {
    const found = steps.known.filter((name) => /^policy_shift_mean\/age_\d+$/.test(name)).map((name) => Number(name.split("_").pop())).sort((a, b) => a - b);
    if (!found.length) {
      byAge.hidden = true;
      return;
    }
    const lately = (name) => {
      const column = steps.columns[name];
      const values = column ? Array.from(column.slice(-LATELY)).filter((value) => !Number.isNaN(value)) : [];
      return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
    };
    const oldest = Math.max(...found, 1);
    fill(byAge, h("header", {}, h("h3", { text: "What age costs" }), h("span", { class: "unit", text: `mean of the last ${Math.min(LATELY, steps.rows)} steps` })),
      h("div", { class: "scroll" }, h("table", {},
        h("thead", {}, h("tr", {}, h("th", { text: "age in versions" }), BY_AGE.map(([, label]) => h("th", { class: "n", text: label })))),
        h("tbody", {}, found.map((age) => {
          const dot = h("i", { class: "dot square" });
          dot.style.background = ofAge(age / oldest);
          return h("tr", {}, h("th", {}, dot, String(age)), BY_AGE.map(([name, , unit]) => h("td", { class: "n", text: number(lately(`${name}/age_${age}`), unit ?? "") })));
        })))));
  }

  return { update, redraw: draw, needsData: (names) => names.includes("run"), remove: () => [ages, masked, ...charts].forEach((chart) => chart.remove()) };
}
