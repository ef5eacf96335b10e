// One colour for one thing, everywhere, in light and dark. People with red-green blindness can distinguish them: hues
// are from blue to orange, neighbours differ in lightness, and no meaning depends on colour alone.

const RUNS = {
  light: ["#0b6fb8", "#d9730d", "#0d8f86", "#a5479a", "#5a5fd0", "#86671c", "#3d4a5c", "#c2417a"],
  dark: ["#61b3f2", "#f5a65b", "#45cdc0", "#e293d6", "#a3a8ff", "#d3b56b", "#b3c0d1", "#ff92bd"],
};
const KINDS = {
  light: {
    wait: "#d3d9e0", generate: "#0d8f86", pause: "#d9730d", publish: "#d9730d", work: "#8fb8dc", away: "#f0e0c0",
    restart: "#1b2430", failed: "#a1127c", actor_train: "#0b6fb8", critic_train: "#083f6b", actor_inf: "#62b0dd",
    ref_inf: "#a5479a", critic_inf: "#86671c", rew_inf: "#5a5fd0", actor_gen: "#0d8f86", save: "#3d4a5c", other: "#e4b363",
  },
  dark: {
    wait: "#3a444f", generate: "#35b5a9", pause: "#f5a65b", publish: "#f5a65b", work: "#4f7ea8", away: "#5c4d2c",
    restart: "#ffffff", failed: "#ff8ad8", actor_train: "#4ea3e6", critic_train: "#9cc9ef", actor_inf: "#93cdef",
    ref_inf: "#d285c6", critic_inf: "#cdb068", rew_inf: "#979dfa", actor_gen: "#35b5a9", save: "#a7b4c4", other: "#c99a4e",
  },
};

/** The present theme: `light` or `dark`. */
export function theme() {
  const chosen = document.documentElement.dataset.theme;
  if (chosen === "light" || chosen === "dark") return chosen;
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

/** The colour of run number `number`. */
export function ofRun(number) {
  const colours = RUNS[theme()];
  return colours[number % colours.length];
}

/** The colour of a kind of activity. */
export function ofKind(kind) {
  const colours = KINDS[theme()];
  return colours[kind] ?? colours.other;
}

/** The colour of the `place`th of several series of one run. */
export function ofSeries(place) {
  return RUNS[theme()][[0, 1, 2, 3][place % 4]];
}

/** The colour of an age: from fresh to old; `share` from 0 to 1. */
export function ofAge(share) {
  const [fresh, middle, old] = theme() === "light"
    ? [[214, 231, 245], [76, 146, 205], [16, 42, 82]]
    : [[38, 62, 90], [78, 150, 214], [214, 236, 255]];
  return mixed(share, fresh, middle, old);
}

/** A background colour for text, from blue (0) through neutral (0.5) to orange (1). */
export function diverging(share) {
  const [low, middle, high] = theme() === "light"
    ? [[122, 178, 226], [250, 250, 250], [246, 176, 100]]
    : [[26, 92, 150], [24, 29, 36], [158, 88, 20]];
  return mixed(share, low, middle, high);
}

/** A background colour for text, from none (0) to strong (1). */
export function sequential(share) {
  const [low, middle, high] = theme() === "light"
    ? [[255, 255, 255], [252, 224, 187], [240, 158, 72]]
    : [[24, 29, 36], [86, 58, 24], [176, 100, 24]];
  return mixed(share, low, middle, high);
}

/** The value of a variable of style.css. */
export function variable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function mixed(share, low, middle, high) {
  const at = Math.min(1, Math.max(0, share)) * 2;
  const [from, to, part] = at < 1 ? [low, middle, at] : [middle, high, at - 1];
  return `rgb(${from.map((value, i) => Math.round(value + (to[i] - value) * part)).join(" ")})`;
}
