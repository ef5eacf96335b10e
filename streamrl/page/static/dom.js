// Elements made of text: no content of a run is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element. `attributes`: `class`, `text`, `on<event>` functions, properties such as `value`, or plain attributes. */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** An element of a drawing (SVG). */
export function s(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name === "text") element.textContent = value;
    else if (name in element && ["value", "checked", "disabled", "hidden", "tabIndex"].includes(name)) element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Replace all children of `element` by `children`. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** A message for a place with nothing to show, and the reason. */
export function empty(title, text) {
  return h("div", { class: "empty" }, h("strong", { text: title }), h("p", { text }));
}

/** Return a function that runs `work` when it has not been called for `milliseconds`. */
export function later(work, milliseconds) {
  let timer = 0;
  return (...words) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...words), milliseconds);
  };
}

/** A number for people: at most four significant figures. */
export function number(value, unit = "") {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  let text;
  if (unit === "%") return `${(value * 100).toFixed(size < 0.1 && size > 0 ? 1 : 0)}%`;
  if (size !== 0 && (size < 0.001 || size >= 1e7)) text = value.toExponential(1);
  else if (size >= 1000) text = Math.round(value).toLocaleString("en-US");
  else if (Number.isInteger(value)) text = String(value);
  else if (size >= 100) text = value.toFixed(0);
  else if (size >= 10) text = value.toFixed(1);
  else text = size >= 1 ? value.toFixed(2) : value.toFixed(3);
  return unit ? `${text} ${unit}` : text;
}

/** A count in words, for example `1 version`. */
export function counted(count, thing) {
  return `${count.toLocaleString("en-US")} ${thing}${count === 1 ? "" : "s"}`;
}

/** Seconds as `3:07`, `1:02:03` or `2 d 03:10`. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  const whole = Math.max(0, Math.floor(seconds));
  const [d, hour, minute, second] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60, whole % 60];
  const two = (value) => String(value).padStart(2, "0");
  if (d) return `${d} d ${two(hour)}:${two(minute)}`;
  return hour ? `${hour}:${two(minute)}:${two(second)}` : `${minute}:${two(second)}`;
}
