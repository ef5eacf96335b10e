// The policy's responses: a table of all that are kept, and each group with its siblings, token by token.

import { h, fill, empty, number, later } from "../dom.js";
import * as data from "../data.js";
import * as state from "../state.js";
import { ofAge, diverging, sequential } from "../colours.js";

export const title = "Rollouts";
export const news = ["rollouts", "steps"];

const PAGE = 50;
const MOST_TOKENS = 1500;
const COLUMNS = [
  ["step", "step", "the policy version that the step made"], ["seq", "group", "the group's sequence number"], ["index", "#", "of the response in its group"],
  ["reward", "reward"], ["advantage", "advantage", "mean over sampled tokens"], ["length", "length", "sampled tokens"], ["age", "age", "of its oldest token, in versions"],
  ["turns", "turns"], ["special", "special", "sampled special tokens that do not end a response: response.text lacks them"], ["masked", "masked", "sampled tokens that are not in the loss"], ["logprob", "log p", "mean log-probability of its tokens, in nats"],
  ["difference", "|Δ log p|", "mean difference of the engine's and the trainer's log-probabilities"], ["finish", "finish", "why it ended"],
];

const signed = (value) => (value === null || value === undefined ? "–" : `${value < 0 ? "−" : "+"}${number(Math.abs(value))}`);
const COLOURINGS = {
  logprob: { label: "log-probability", low: "certain", high: "unlikely (5 nats or more)", share: (v) => -v / 5, colour: sequential },
  advantage: { label: "advantage", low: "negative", high: "positive", scaled: true, colour: diverging },
  version: { label: "policy version", low: "fresh", high: "old", of: "age", colour: ofAge, own: true },
  difference: { label: "engine − trainer", low: "1e-6 nats", high: "1 nat or more", share: (v) => (Math.log10(Math.abs(v) + 1e-9) + 6) / 6, colour: sequential },
  entropy: { label: "entropy", low: "0", high: "3 nats or more", share: (v) => v / 3, colour: sequential },
  value: { label: "critic's value", low: "low", high: "high", scaled: true, colour: diverging },
  mask: { label: "use in the loss" },
  none: { label: "no colour" },
};
const USES = {
  trained: "in the loss", prompt: "prompt", environment: "not the policy's: a tool, a user, the template",
  elsewhere: "in the loss of the response that branched off before", over_age: "too old for the loss", weight_limit: "behaviour weight outside the limit",
  no_contrast: "siblings scored the same: nothing to learn",
};
const FIGURES = [
  ["logprob", "log p, engine"], ["proximal", "log p, trainer"], ["difference", "trainer − engine"], ["reference", "log p, reference"],
  ["advantage", "advantage"], ["entropy", "entropy"], ["value", "value"], ["version", "version"], ["age", "age"],
];

export function mount(root) {
  let asked = 0;
  let rows = [];
  let searched = null; // the results of a text search so far, and the number of its parts
  let controller = null;
  const filter = h("input", { type: "search", placeholder: "reward>=0.5 finish=length step>100", "aria-label": "filter", spellcheck: "false", class: "mono wide-input" });
  const search = h("input", { type: "search", placeholder: "text in prompt or response", "aria-label": "search in text", spellcheck: "false" });
  const bar = h("div", { class: "tools" });
  const told = h("span", { class: "muted", role: "status" });
  const body = h("div", {});
  fill(root, bar, body);

  const change = () => state.set({ filter: filter.value.trim(), search: search.value.trim(), offset: "" });
  const changed = later(change, 300);
  for (const input of [filter, search]) {
    input.addEventListener("input", changed);
    input.addEventListener("change", change); // when it loses the focus: else an update would restore the former text
    input.addEventListener("keydown", (event) => event.key === "Escape" && input.blur());
  }
  fill(bar, h("label", {}, "filter ", filter), h("label", {}, "search ", search), told);

  async function update() {
    const mine = ++asked;
    controller?.abort();
    controller = new AbortController();
    const run = state.run();
    const { signal } = controller;
    if (state.get("group")) {
      const [step, seq] = state.get("group").split("/");
      bar.hidden = true;
      if (group?.key === `${run.id}/${step}/${seq}`) return group.redraw();
      const found = await data.get(`runs/${run.id}/rollouts/${Number(step)}/${Number(seq)}`, {}, { signal });
      if (mine === asked) {
        group = groupView(found, { key: `${run.id}/${step}/${seq}`, close, next });
        fill(body, group.element);
        group.focus();
      }
      return undefined;
    }
    group = null;
    bar.hidden = false;
    if (document.activeElement !== filter) filter.value = state.get("filter");
    if (document.activeElement !== search) search.value = state.get("search");
    try {
      await list(run, mine, signal);
    } catch (error) {
      if (error.name === "AbortError" || mine !== asked) return undefined;
      told.textContent = "";
      fill(body, empty("That cannot be shown", error.message));
    }
    return undefined;
  }

  let group = null;

  async function list(run, mine, signal) {
    const offset = Number(state.get("offset") || 0);
    const sort = state.get("sort") || "step";
    const descending = state.get("order") !== "up";
    if (state.get("search")) return searching(run, mine, signal, sort, descending);
    searched = null;
    const found = await data.get(`runs/${run.id}/rollouts`, { sort, descending, filter: state.get("filter"), offset, limit: PAGE }, { signal });
    if (mine !== asked) return;
    rows = found.rows;
    told.textContent = `${found.total.toLocaleString("en-US")} responses`;
    if (!rows.length) {
      fill(body, state.get("filter")
        ? empty("Nothing lets through", "No response that is kept passes the filter.")
        : empty("No rollouts are kept", "A run keeps some groups of each step when metrics.rollouts_per_step is above 0; they are here a few seconds after their step, in a long run up to a minute."));
      return;
    }
    const focused = body.contains(document.activeElement) ? document.activeElement.dataset.row : null;
    fill(body, table(rows, sort, descending, false), pager(offset, found.total));
    if (focused) body.querySelector(`[data-row="${CSS.escape(focused)}"]`)?.focus();
  }

  /** Show the results of the text search. A continued search is not repeated: that would take it back to its start. */
  async function searching(run, mine, signal, sort, descending) {
    const of = JSON.stringify([run.id, state.get("search"), state.get("filter")]);
    if (searched?.of !== of) searched = { of, parts: 0, wanted: 1, rows: [], goOn: null };
    const { parts, wanted } = searched;
    if (wanted > parts || parts === 1) {
      const on = wanted > parts && parts > 0;
      const [step, seq] = on ? searched.goOn : [];
      const found = await data.get(`runs/${run.id}/rollouts/search`, { text: state.get("search"), filter: state.get("filter"), step, seq }, { signal });
      if (mine !== asked) return;
      searched = { of, parts: wanted, wanted, rows: on ? [...searched.rows, ...found.rows] : found.rows, goOn: found.resume_at };
    }
    const { goOn } = searched;
    rows = searched.rows;
    told.textContent = `${rows.length} found${goOn ? `, down to step ${goOn[0]}` : ""}`;
    fill(body, rows.length ? table(rows, sort, descending, true) : empty("Nothing found", "No response that is kept has this text."),
      goOn ? h("p", { class: "pager" }, h("button", { class: "chip", onclick: () => { searched.wanted = searched.parts + 1; update(); }, text: "search on" })) : null);
  }

  function table(found, sort, descending, fixed) {
    const lacks = (name) => found.every((row) => row[name] === null || row[name] === undefined || (name === "turns" && row[name] === 1) || (["masked", "special"].includes(name) && row[name] === 0));
    const shown = COLUMNS.filter(([name]) => !lacks(name) || name === sort);
    const heading = ([name, label, note]) => {
      const here = name === sort && !fixed;
      return h("th", { class: `of-${name}${name === "finish" ? "" : " n"}`, "aria-sort": here ? (descending ? "descending" : "ascending") : null },
        fixed ? label : h("button", { class: "sort", title: note ?? null, onclick: () => state.set({ sort: name, order: here && descending ? "up" : "", offset: "" }) }, label, here ? (descending ? " ↓" : " ↑") : ""));
    };
    let last = "";
    return h("div", { class: "scroll card" }, h("table", { class: "rollouts" },
      h("thead", {}, h("tr", {}, shown.map(heading), h("th", { class: "of-prompt", text: "prompt" }), h("th", { text: "response" }))),
      h("tbody", { onkeydown: walked }, found.map((row) => {
        const key = `${row.step}/${row.seq}`;
        const open = () => state.set({ group: key, response: row.index });
        const first = key !== last;
        last = key;
        return h("tr", { tabIndex: 0, "data-row": `${key}/${row.index}`, class: first ? "first" : "", onclick: open, onkeydown: (event) => event.key === "Enter" && open() },
          shown.map(([name]) => cell(name, row[name])),
          h("td", { class: "of-prompt text from-end", title: row.prompt }, h("bdi", { text: flat(row.prompt) })),
          h("td", { class: "text", title: row.response, text: flat(row.response) }));
      }))));
  }

  function walked(event) {
    const way = { ArrowDown: "nextElementSibling", j: "nextElementSibling", ArrowUp: "previousElementSibling", k: "previousElementSibling" }[event.key];
    if (!way) return;
    document.activeElement.closest("tr")?.[way]?.focus();
    event.preventDefault();
  }

  function pager(offset, total) {
    const go = (to) => state.set({ offset: to || "" });
    return h("p", { class: "pager" },
      h("button", { class: "chip", disabled: offset === 0, onclick: () => go(Math.max(0, offset - PAGE)), text: "← before" }),
      h("span", { text: `${offset + 1} – ${Math.min(total, offset + PAGE)} of ${total.toLocaleString("en-US")}` }),
      h("button", { class: "chip", disabled: offset + PAGE >= total, onclick: () => go(offset + PAGE), text: "after →" }));
  }

  function close() {
    state.set({ group: "", response: "" });
  }

  /** Show the group before or after this one in the table. */
  function next(way) {
    const groups = [...new Set(rows.map((row) => `${row.step}/${row.seq}`))];
    const place = groups.indexOf(state.get("group"));
    const to = groups[place + way];
    if (place >= 0 && to) state.set({ group: to, response: "" });
  }

  return {
    update,
    redraw: () => group?.redraw(),
    needsData: (names) => ["group", "filter", "search", "sort", "order", "offset", "run"].some((name) => names.includes(name)),
    key: (event) => {
      if (event.key === "Escape" && state.get("group")) close();
      else if (event.key === "j" && state.get("group")) next(1);
      else if (event.key === "k" && state.get("group")) next(-1);
      else if (event.key === "/" && !state.get("group")) search.focus();
      else return false;
      return true;
    },
    remove: () => {
      controller?.abort();
      state.set({ group: "", response: "" }, { silent: true });
    },
  };
}

/** A text for one line of a table, without the marks of a chat template. */
function flat(text) {
  return text.replace(/<\|[^|<>]{1,40}\|>(assistant\s*$)?/g, " ").trim().replaceAll("\n", "⏎");
}

function cell(name, value) {
  const kind = `of-${name} n`;
  if (name === "finish") return h("td", { class: "of-finish", text: value || "–" });
  if (["step", "seq", "index", "length", "age", "turns", "special", "masked"].includes(name)) return h("td", { class: kind, text: String(value) });
  if (name === "reward") {
    return h("td", { class: `${kind} scored` }, h("span", { class: "level", "aria-hidden": "true" }, h("i", { style: { width: `${Math.round(100 * Math.min(1, Math.max(0, value)))}%` } })), h("b", { text: number(value) }));
  }
  return h("td", { class: kind, text: name === "advantage" ? signed(value) : number(value) });
}

/** A group: the common beginning of its siblings once, and the siblings side by side. */
function groupView(found, { key, close, next }) {
  const has = new Set(found.responses.flatMap((response) => Object.entries(response.figures).filter(([, values]) => values.some((v) => v !== null)).map(([name]) => name)));
  const offered = Object.entries(COLOURINGS).filter(([name, one]) => ["mask", "none"].includes(name) || has.has(one.of ?? name));
  const legend = h("span", { class: "ramp" });
  const info = h("aside", { class: "token-info", "aria-live": "polite" });
  const choice = h("select", { "aria-label": "colour", onchange: (event) => state.set({ colour: event.target.value }) }, offered.map(([name, one]) => h("option", { value: name, text: one.label })));
  const cards = found.responses.map((response) => responseCard(response, found, (token) => tell(token)));
  const episodes = new Set(found.responses.map((response) => response.episode)).size;
  const rewards = found.responses.map((response) => response.reward);
  const mean = rewards.reduce((sum, value) => sum + value, 0) / rewards.length;
  const element = h("div", { class: "group" },
    h("div", { class: "tools" },
      h("button", { class: "chip", onclick: close, title: "Esc", text: "← table" }),
      h("button", { class: "chip", onclick: () => next(-1), title: "k", "aria-label": "the group before", text: "↑" }),
      h("button", { class: "chip", onclick: () => next(1), title: "j", "aria-label": "the group after", text: "↓" }),
      h("h2", { text: `Group ${found.seq} of step ${found.step}` }),
      h("span", { class: "muted", text: [`${found.responses.length} responses${episodes < found.responses.length ? ` of ${episodes} episodes` : ""}`, `mean reward ${number(mean)}`, found.worker, found.gserver].filter(Boolean).join(" · ") }),
      h("span", { class: "space" }),
      h("label", {}, "colour ", choice), legend),
    h("section", { class: "card prompt" }, h("header", {}, h("h3", { text: "Prompt" }), h("span", { class: "unit", text: `${count(found.prompt.length, "token")}, shared by all` })),
      h("div", { class: "tokens plain" }, found.prompt.map((piece) => h("span", { class: "tok", text: shownText(piece) })))),
    h("div", { class: "siblings" }, episodes < found.responses.length ? trees(found.responses, cards) : cards.map((card) => card.element)),
    info);

  function tell(token) {
    if (!token) {
      fill(info, h("span", { class: "muted", text: "Point at a token, or walk with ← → in a response." }));
      return;
    }
    const { response, place } = token;
    const use = found.token_uses[response.uses[place]];
    fill(info,
      h("code", { class: "piece", text: JSON.stringify(response.pieces[place]) }),
      h("span", {}, h("i", { text: "token " }), h("b", { text: String(response.ids[place]) }), h("i", { text: ` at ${found.prompt.length + place}` })),
      FIGURES.filter(([name]) => response.figures[name]?.[place] !== null && response.figures[name] !== undefined).map(([name, label]) => {
        const value = response.figures[name][place];
        const text = name === "advantage" ? signed(value) : name === "version" || name === "age" ? String(value) : name === "difference" ? value.toExponential(1) : value.toFixed(3);
        return h("span", {}, h("i", { text: `${label} ` }), h("b", { text }), name === "logprob" ? h("i", { text: ` (p ${number(Math.exp(value))})` }) : null);
      }),
      h("span", {}, h("i", { text: "use: " }), h("b", { text: USES[use] ?? use })));
  }

  function redraw() {
    const name = offered.some(([one]) => one === state.get("colour")) ? state.get("colour") : "logprob";
    choice.value = name;
    const colouring = COLOURINGS[name];
    const of = colouring.of ?? name;
    const values = found.responses.flatMap((response) => response.figures[of] ?? []).filter((value) => value !== null);
    // not Math.max(...values): a function takes some ten thousand arguments, and a group may have more tokens
    const most = values.reduce((greatest, value) => Math.max(greatest, Math.abs(value)), 1e-9);
    const least = values.reduce((smallest, value) => Math.min(smallest, value), Infinity);
    const share = colouring.share ?? (colouring.scaled ? (v) => 0.5 + v / most / 2 : (v) => (most > least ? (v - least) / (most - least) : 0));
    for (const card of cards) card.colour(name, (value) => (value === null ? "" : colouring.colour(share(value))), of, colouring.own);
    if (name === "mask") {
      const used = new Set(found.responses.flatMap((response) => response.uses));
      fill(legend, [...used].sort().map((use) => h("span", { class: "key" }, h("span", { class: `tok use-${found.token_uses[use]}`, text: "abc" }), USES[found.token_uses[use]] ?? found.token_uses[use])));
    } else if (name === "none") fill(legend);
    else {
      const ends = colouring.scaled ? [signed(-most), signed(most)] : name === "version" ? [`age ${least}`, `age ${most}`] : [colouring.low, colouring.high];
      const bar = h("i", { class: "bar-ramp" });
      bar.style.background = `linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map((at) => colouring.colour(at)).join(", ")})`;
      fill(legend, ends[0], bar, ends[1]);
    }
  }
  tell(null);
  redraw();
  return {
    key,
    element,
    redraw,
    focus: () => {
      const wanted = cards[Number(state.get("response") || 0)];
      if (wanted && wanted !== cards[0]) wanted.element.scrollIntoView({ block: "nearest", inline: "start" });
      wanted?.tokens.focus({ preventScroll: true });
    },
  };
}

/** The conversations of each episode as a tree: one that branches off another one is placed below it. */
function trees(responses, cards) {
  const below = (parent, episode, depth) => responses.filter((one) => one.parent === parent && one.episode === episode).flatMap((one) => {
    cards[one.index].element.style.setProperty("--depth", depth);
    return [cards[one.index].element, ...below(one.index, episode, depth + 1)];
  });
  return [...new Set(responses.map((one) => one.episode))].map((episode) => {
    const own = responses.filter((one) => one.episode === episode);
    return h("section", { class: "episode" },
      h("h3", { text: `Episode ${episode}` }),
      h("span", { class: "unit", text: own.length === 1 ? "one conversation" : `${own.length} conversations` }),
      below(-1, episode, 0));
  });
}

function responseCard(response, found, tell) {
  const tokens = h("div", { class: "tokens", tabIndex: 0, role: "textbox", "aria-readonly": "true", "aria-label": `response ${response.index}` });
  const card = h("section", { class: "card response" });
  let spans = [];
  let colouring = null;
  let cursor = -1;
  const own = response.parent >= 0 ? Math.max(0, response.shared - found.prompt.length) : 0;
  const sampled = response.uses.filter((use) => !["prompt", "environment"].includes(found.token_uses[use])).length;
  const mean = (name) => {
    const values = (response.figures[name] ?? []).filter((value) => value !== null);
    return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
  };

  function draw(all) {
    const end = all ? response.pieces.length : Math.min(response.pieces.length, own + MOST_TOKENS);
    spans = [];
    const parts = [];
    if (own) parts.push(h("p", { class: "branch" }, `begins like response ${response.parent}, for ${own} tokens; then:`));
    let use = -1;
    for (let place = own; place < end; place++) {
      const kind = found.token_uses[response.uses[place]];
      const span = h("span", { class: `tok use-${kind}`, text: shownText(response.pieces[place]) });
      span.dataset.place = place;
      if (place > own && (kind === "environment") !== (use === "environment")) parts.push(h("span", { class: "turn-edge", "aria-hidden": "true" }));
      use = kind;
      spans.push(span);
      parts.push(span);
    }
    if (!response.pieces.length) parts.push(h("span", { class: "muted", text: "(no token)" }));
    fill(tokens, parts);
    if (end < response.pieces.length) tokens.append(h("button", { class: "chip", onclick: () => draw(true), text: `${response.pieces.length - end} tokens more` }));
    if (colouring) paint();
  }

  function paint() {
    const [name, colour, of, contrast] = colouring;
    tokens.className = `tokens by-${name}`;
    const values = response.figures[of];
    for (const span of spans) {
      const value = values?.[Number(span.dataset.place)] ?? null;
      span.style.background = values && name !== "mask" && name !== "none" ? colour(value) : "";
      span.style.color = contrast && value !== null && span.style.background ? readable(span.style.background) : "";
    }
  }

  function point(place) {
    spans[cursor]?.classList.remove("here");
    cursor = place;
    const span = spans[cursor];
    span?.classList.add("here");
    tell(span ? { response, place: Number(span.dataset.place) } : null);
  }

  tokens.addEventListener("pointermove", (event) => {
    const span = event.target.closest(".tok");
    if (span) point(spans.indexOf(span));
  });
  tokens.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: cursor - 1, ArrowRight: cursor + 1, Home: 0, End: spans.length - 1 }[event.key];
    if (to === undefined) return;
    point(Math.min(spans.length - 1, Math.max(0, to)));
    spans[cursor]?.scrollIntoView({ block: "nearest" });
    event.preventDefault();
  });
  const parts = Object.entries(response.reward_parts);
  fill(card,
    h("header", {},
      h("h3", { text: `${response.index}` }),
      h("span", { class: "score" }, h("b", { text: number(response.reward) }), " reward"),
      h("span", { class: "unit", text: [`advantage ${signed(mean("advantage"))}`, count(sampled, "token"), response.finish].filter(Boolean).join(" · ") })),
    parts.length ? h("p", { class: "parts unit", text: parts.map(([name, value]) => `${name} ${number(value)}`).join(" · ") }) : null,
    tokens);
  draw(false);
  return {
    element: card,
    tokens,
    colour: (...words) => {
      colouring = words;
      paint();
    },
  };
}

function shownText(piece) {
  if (piece === "") return "▯";
  return piece.replaceAll("\n", "⏎\n");
}

function count(many, what) {
  return `${many} ${what}${many === 1 ? "" : "s"}`;
}

/** Black or white: the one that is readable on `colour`. */
function readable(colour) {
  const [r, g, b] = colour.match(/[\d.]+/g).map(Number);
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#10151b" : "#ffffff";
}
