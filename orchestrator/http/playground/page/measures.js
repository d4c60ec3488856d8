// The figures of an answer, as they are while it streams.

import { showDrafters } from "./drafters.js";

const COUNTED = ["num_drafts", "num_draft_tokens", "num_accepted_tokens"];

/** Times and counts of a request. */
export class Measures {
  numTokens = 0;
  origins = { accepted: 0, recovered: 0, bonus: 0 };
  // Accepted tokens by drafter, where a draft combines several.
  drafters = new Map();
  #beganMs = performance.now();
  #firstMs = null;
  #lastMs = null;
  #numFirst = 0;
  #before = {};
  #latest = {};

  /** Records the pieces of a chunk, and its statistics where it has some; returns milliseconds since the start. */
  record(pieces, statistics) {
    const now = performance.now();
    const num = pieces.reduce((sum, piece) => sum + piece.num, 0);
    this.numTokens += num;
    for (const piece of pieces) {
      if (piece.origin) this.origins[piece.origin] += 1;
      if (piece.drafter) this.drafters.set(piece.drafter, (this.drafters.get(piece.drafter) ?? 0) + 1);
    }
    if (num) {
      this.#lastMs = now;
      if (this.#firstMs === null) {
        this.#firstMs = now;
        this.#numFirst = num;
      }
    }
    if (statistics) this.#latest = statistics;
    return now - this.#beganMs;
  }

  /** Carries the statistics over a resumption, after which the server counts from 0. */
  resume() {
    for (const name of COUNTED) this.#before[name] = this.#sum(name);
    this.#latest = {};
  }

  /** Milliseconds until the first token; null before it. */
  get firstTokenMs() {
    return this.#firstMs === null ? null : this.#firstMs - this.#beganMs;
  }

  /** Output tokens per second, from the first ones on; null as long as there are no more. */
  get tokensPerSecond() {
    const seconds = (this.#lastMs - this.#firstMs) / 1000;
    return seconds > 0 ? (this.numTokens - this.#numFirst) / seconds : null;
  }

  /** Share of the drafted tokens that were kept; null without any. */
  get acceptanceRate() {
    const num = this.#sum("num_draft_tokens");
    return num ? this.#sum("num_accepted_tokens") / num : null;
  }

  /** Output tokens per pass that verified a proposal; null without any. */
  get acceptanceLength() {
    const num = this.#sum("num_drafts");
    return num ? 1 + this.#sum("num_accepted_tokens") / num : null;
  }

  #sum(name) {
    return (this.#before[name] ?? 0) + (this.#latest[name] ?? 0);
  }
}

/** Returns a figure as it is shown. */
export function shown(value, digits, unit = "") {
  return value === null || !Number.isFinite(value) ? "–" : `${value.toFixed(digits)}${unit}`;
}

/** Shows the figures on the page. */
export function showMeasures(measures) {
  const rate = measures.acceptanceRate;
  const texts = {
    "acceptance-rate": shown(rate === null ? null : rate * 100, 0, " %"),
    "acceptance-length": shown(measures.acceptanceLength, 2),
    speed: shown(measures.tokensPerSecond, 1),
    "first-token": shown(measures.firstTokenMs, 0, " ms"),
    "num-accepted": String(measures.origins.accepted),
    "num-recovered": String(measures.origins.recovered),
    "num-bonus": String(measures.origins.bonus),
  };
  for (const [id, text] of Object.entries(texts)) document.getElementById(id).textContent = text;
  showDrafters(measures.drafters);
}
