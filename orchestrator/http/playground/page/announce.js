// What a screen reader says: at most every few seconds, and never token by token.

const PAUSE_MS = 3000;
const region = document.getElementById("announcer");
let waiting = [];
let timer = 0;
let unfinished = "";

/** Announces a text soon, together with what else waits. */
export function announce(text) {
  if (!text.trim()) return;
  waiting.push(text.trim());
  timer ||= setTimeout(flush, 100);
}

/** Announces a text at once, in place of what waits. */
export function announceNow(text) {
  waiting = [];
  region.textContent = text;
}

/** Announces what has come of an answer, sentence by sentence. */
export function announceAnswer(text) {
  unfinished += text;
  const end = Math.max(...[". ", "! ", "? ", "\n"].map((mark) => unfinished.lastIndexOf(mark)));
  if (end < 0) return;
  waiting.push(unfinished.slice(0, end + 1).trim());
  unfinished = unfinished.slice(end + 1);
  timer ||= setTimeout(flush, PAUSE_MS);
}

/** Announces the rest of an answer, and how it ended. */
export function announceEnd(text) {
  const rest = unfinished;
  unfinished = "";
  announce(`${rest} ${text}`);
}

function flush() {
  region.textContent = waiting.join(" ");
  waiting = [];
  timer = 0;
}
