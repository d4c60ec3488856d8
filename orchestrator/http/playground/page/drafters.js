// Where a draft combines several drafters: who proposed a token, in words, in its look, and in the legend.

const LOOKUPS = new Set(["ngram", "suffix"]);
// The names whose tokens are on the page.
const seen = new Set();
// Accepted tokens of the latest answer by name; null before one came.
let numAccepted = null;

/** Returns the class of a token's look: proposed by a lookup, by several drafters at once, or neither. */
export function lookOf(drafter) {
  if (drafter.includes("+")) return "by-several";
  return LOOKUPS.has(drafter) ? "by-lookup" : "";
}

/** Returns who proposed a token, in words. */
export function proposedBy(drafter) {
  return `proposed by ${drafter.split("+").join(" and ")}`;
}

/** Notes that a token of a drafter is on the page: its name is in the legend from then on. */
export function noteDrafter(drafter) {
  if (seen.has(drafter)) return;
  seen.add(drafter);
  show();
}

/** Empties the legend, as no token is on the page any more. */
export function forgetDrafters() {
  seen.clear();
  show();
}

/** Shows the accepted tokens of the latest answer, a Map by drafter, beside the names of the legend. */
export function showDrafters(counts) {
  numAccepted = counts;
  show();
}

function show() {
  const legend = document.getElementById("drafters");
  legend.hidden = seen.size === 0;
  // Those of several drafters come last.
  const names = [...seen].sort((one, other) => one.includes("+") - other.includes("+") || one.localeCompare(other));
  legend.replaceChildren(...names.map(lineOf));
}

function lineOf(name) {
  const sample = document.createElement("span");
  sample.className = ["token", "accepted", lookOf(name)].filter(Boolean).join(" ");
  sample.textContent = name.split("+").join(" and ");
  const count = document.createElement("span");
  count.className = "muted";
  count.textContent = numAccepted ? String(numAccepted.get(name) ?? 0) : "";
  const item = document.createElement("li");
  item.dataset.drafter = name;
  item.title = `Accepted, ${proposedBy(name)}`;
  item.append(sample, " ", count);
  return item;
}
