// A prompt with and without speculation: both runs one after the other, then replayed side by side at their real speeds.

import { announce, announceNow } from "./announce.js";
import { pause } from "./api.js";
import { shown, showMeasures } from "./measures.js";
import { bodyOf, run } from "./requests.js";
import { AnswerView, textOf } from "./tokens.js";
import { append, changing, make } from "./turns.js";

const SIDES = [
  { name: "With speculation", isSpeculating: true },
  { name: "Without speculation", isSpeculating: false },
];
const MAX_SEED = 2 ** 31;

/** A comparison on the page. */
export class Comparison {
  #element = make("article", "turn comparison");
  #verdict = make("p", "verdict");
  #again = make("button", "", "Replay");
  #columns = SIDES.map(({ name }) => new Column(name));
  #recordings = [];
  #replay = null;

  /** @param {string} text the prompt */
  constructor(text) {
    this.#element.setAttribute("aria-label", "Comparison");
    const columns = make("div", "columns");
    columns.append(...this.#columns.map((column) => column.element));
    this.#again.type = "button";
    this.#again.hidden = true;
    this.#again.addEventListener("click", () => this.play());
    this.#element.addEventListener("keydown", (event) => event.key === "Escape" && this.#replay?.abort());
    this.#element.append(make("p", "who", "Comparison"), make("div", "text", text), columns, this.#verdict, this.#again);
    append(this.#element);
  }

  /** Runs both sides and replays them; an abort or an error removes the comparison. */
  async run(session, text, parameters, signal) {
    const drawn = crypto.getRandomValues(new Uint32Array(1))[0] % MAX_SEED;
    const sampling = { seed: drawn, ...parameters.sampling };
    const given = { sampling, speculation: parameters.speculation };
    try {
      // The prompt is in the KV cache for both sides then; else the first one would run it, and the second find it.
      const warm = { ...given, sampling: { ...sampling, max_tokens: 1 } };
      this.#tell("Running the prompt once, so that both sides find it in the KV cache");
      await run(session.mode, bodyOf(session, text, warm, SIDES[1]), signal, { pieces() {}, notice() {} });
      for (const side of SIDES) {
        const body = bodyOf(session, text, given, side);
        const recording = { parts: [], pieces: [] };
        const { measures } = await run(session.mode, body, signal, {
          pieces: (pieces, progress, atMs) => {
            recording.parts.push({ pieces, atMs });
            recording.pieces.push(...pieces);
            if (side.isSpeculating) showMeasures(progress);
            this.#tell(`Running ${side.name.toLowerCase()}: ${progress.numTokens} tokens`);
          },
          notice() {},
        });
        this.#recordings.push({ ...recording, measures });
      }
    } catch (error) {
      this.#element.remove();
      throw error;
    }
    this.#again.hidden = false;
    announce(`Both runs are complete. ${this.#conclusion()}`);
    await this.play(signal);
  }

  /** Replays both sides at once, at the speeds at which they came. */
  async play(signal) {
    this.#replay?.abort();
    const replay = (this.#replay = new AbortController());
    signal?.addEventListener("abort", () => replay.abort(), { once: true });
    this.#tell(this.#conclusion());
    await Promise.all(this.#columns.map((column, index) => column.play(this.#recordings[index], replay.signal)));
  }

  #conclusion() {
    const [fast, plain] = this.#recordings;
    const isSame = textOf(fast.pieces) === textOf(plain.pieces);
    const ratio = fast.measures.tokensPerSecond / plain.measures.tokensPerSecond;
    const speed = Number.isFinite(ratio) && ratio > 0 ? ` · With speculation: ${ratio.toFixed(2)} times the speed` : "";
    return `Same text: ${isSame ? "yes" : "no"}${speed}`;
  }

  #tell(text) {
    changing(() => (this.#verdict.textContent = text));
  }
}

/** One side of a comparison. */
class Column {
  element = make("section", "column");
  #speed = make("p", "speed", "–");
  #detail = make("p", "muted", "–");
  #view = new AnswerView(announceNow);

  constructor(name) {
    this.element.setAttribute("aria-label", name);
    this.element.append(make("h3", "", name), this.#speed, this.#detail, this.#view.element);
  }

  async play(recording, signal) {
    const { measures } = recording;
    const fresh = new AnswerView(announceNow);
    changing(() => this.#view.element.replaceWith(fresh.element));
    this.#view = fresh;
    this.#speed.textContent = shown(measures.tokensPerSecond, 1, " tokens/s");
    const length = measures.acceptanceLength;
    const drafted = length === null ? "" : ` · mean acceptance length ${shown(length, 2)}`;
    this.#detail.textContent = `first token after ${shown(measures.firstTokenMs, 0, " ms")}${drafted}`;
    const beganMs = performance.now();
    let at = 0;
    while (at < recording.parts.length) {
      // Who stops a replay wants its end.
      const elapsedMs = signal.aborted ? Infinity : performance.now() - beganMs;
      const due = [];
      for (; at < recording.parts.length && recording.parts[at].atMs <= elapsedMs; at++) due.push(...recording.parts[at].pieces);
      if (due.length) changing(() => fresh.add(due));
      const next = recording.parts[at];
      if (next) await pause(Math.max(0, next.atMs - (performance.now() - beganMs)), signal).catch(() => {});
    }
  }
}
