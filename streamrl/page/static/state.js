// The viewer's choices, shared by all views and kept in the URL, so that a link shows the same.

const DEFAULTS = { view: "overview", run: "0", shown: "", x: "step", smooth: "0.6", from: "", to: "", theme: "" };

const chosen = { ...DEFAULTS };
const listeners = new Set();

/** The latest facts of all runs from the server. */
export const runs = [];

export function read() {
  for (const name of Object.keys(chosen)) if (!(name in DEFAULTS)) delete chosen[name];
  Object.assign(chosen, DEFAULTS);
  const [view, query] = location.hash.replace(/^#\/?/, "").split("?");
  if (view) chosen.view = view;
  for (const [name, value] of new URLSearchParams(query ?? "")) chosen[name] = value;
}

export function get(name) {
  return chosen[name] ?? "";
}

/** Change the choices, and call the listeners unless `silent`. */
export function set(changes, { silent = false } = {}) {
  let changed = false;
  for (const [name, value] of Object.entries(changes)) {
    const text = String(value ?? "");
    if ((chosen[name] ?? "") === text) continue;
    chosen[name] = text;
    changed = true;
  }
  if (!changed) return;
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(chosen)) {
    if (name !== "view" && value !== "" && value !== DEFAULTS[name]) query.set(name, value);
  }
  history.replaceState(null, "", `#/${chosen.view}${query.size ? `?${query}` : ""}`);
  if (!silent) for (const listener of listeners) listener(Object.keys(changes));
}

/** Call `listener` with the names of changed choices; returns a function that ends this. */
export function listen(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** The run that views of a single run show. */
export function run() {
  return runs.find((one) => one.id === Number(chosen.run)) ?? runs[0];
}

/** The runs that are compared. */
export function shown() {
  const wanted = chosen.shown === "" ? null : new Set(chosen.shown.split(",").map(Number));
  const found = wanted === null ? runs : runs.filter((one) => wanted.has(one.id));
  return found.length ? found : runs.slice(0, 1);
}

/** The part of the x axis that is shown: [from, to], or null for all of it. */
export function zoom() {
  return chosen.from !== "" && chosen.to !== "" ? [Number(chosen.from), Number(chosen.to)] : null;
}
