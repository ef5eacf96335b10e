// The source of figures: the server, or this page's own file (written by `streamrl report`).

const embedded = document.getElementById("embedded");
const KEPT = embedded ? JSON.parse(embedded.textContent) : null;

/** Whether this page is a self-contained file with one run's figures in it. */
export const isFile = KEPT !== null;

/** The reply of the call `path` (below `api/`), decoded from JSON. Throws an `Error` with the reason of a failure. */
export async function get(path, words = {}, { signal } = {}) {
  if (KEPT) return kept(path);
  return (await answer(path, words, signal)).json();
}

/** Figures of steps as columns: `{rows, of, known, begin, columns: {name: Float32Array}}`. */
export async function steps(run, words, { signal } = {}) {
  if (KEPT) return decoded(bytesOf(kept(`runs/${run}/steps`)));
  return decoded(await (await answer(`runs/${run}/steps`, words, signal)).arrayBuffer());
}

/** Call `told` with the facts of all runs whenever they change, and `lost` when the server does not respond. */
export function follow(told, lost) {
  if (KEPT) return;
  let source = null;
  const open = () => {
    if (source || document.hidden) return;
    source = new EventSource("api/events");
    source.onmessage = (event) => told(JSON.parse(event.data));
    source.onerror = () => lost();
  };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      source?.close();
      source = null;
    } else open();
  });
  open();
}

async function answer(path, words, signal) {
  const query = new URLSearchParams(Object.entries(words).filter(([, value]) => value !== undefined && value !== ""));
  let response;
  try {
    response = await fetch(`api/${path}${query.size ? `?${query}` : ""}`, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the page's server does not answer; was `streamrl page` stopped?");
  }
  if (!response.ok) throw new Error(await response.text());
  return response;
}

function kept(path) {
  if (!(path in KEPT)) throw new Error(`this file has no ${path}`);
  return KEPT[path];
}

function bytesOf(base64) {
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0)).buffer;
}

function decoded(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const columns = {};
  header.names.forEach((name, place) => {
    columns[name] = new Float32Array(buffer, 4 + length + 4 * header.rows * place, header.rows);
  });
  return { ...header, columns };
}
