// The parameters of requests, and errors beside the field that they are about.

const form = document.getElementById("settings");
const INTEGERS = new Set(["max_tokens", "top_k", "seed", "num_speculative_tokens"]);
const SPECULATION = new Set(["num_speculative_tokens"]);

/** Returns the parameters that are given: those of sampling, and those of speculation. */
export function parameters() {
  const sampling = {};
  const speculation = {};
  for (const input of form.querySelectorAll("input[name]")) {
    if (input.validity.badInput) throw new FieldError(input.name, "must be a number");
    if (input.value === "") continue;
    const value = Number(input.value);
    if (INTEGERS.has(input.name) && !Number.isSafeInteger(value)) throw new FieldError(input.name, "must be an integer below 2^53");
    (SPECULATION.has(input.name) ? speculation : sampling)[input.name] = value;
  }
  const stop = form.elements.stop.value.split("\n").filter((line) => line !== "");
  if (stop.length) sampling.stop = stop;
  return { sampling, speculation };
}

/** Returns the system message; empty for none. */
export function systemMessage() {
  return form.elements.system.value.trim();
}

/** A field whose value this page cannot send. */
export class FieldError extends Error {
  constructor(param, problem) {
    super(`${param} ${problem}`);
    this.param = param;
  }
}

/** Shows an error beside its field; returns whether there is such a field. */
export function showFieldError(param, message) {
  const name = param.replace(/^speculation\./, "").replace(/\[.*/, "");
  const input = name && form.elements[name];
  if (!input) return false;
  document.getElementById("settings-panel").open = true;
  const note = document.createElement("span");
  note.className = "problem";
  note.id = `problem-${name}`;
  note.textContent = message;
  input.setAttribute("aria-invalid", "true");
  input.setAttribute("aria-describedby", note.id);
  input.after(note);
  return true;
}

/** Removes the errors beside fields. */
export function clearFieldErrors() {
  for (const note of form.querySelectorAll(".problem")) note.remove();
  for (const input of form.querySelectorAll("[aria-invalid]")) {
    input.removeAttribute("aria-invalid");
    input.removeAttribute("aria-describedby");
  }
}
