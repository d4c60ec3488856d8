// Tokens with their origins: from the chunks of a stream to spans that can be read one by one.

import { lookOf, noteDrafter, proposedBy } from "./drafters.js";
import { following } from "./scrolling.js";

const ORIGINS = { a: "accepted", r: "recovered", b: "bonus", "": "" };

/**
 * Returns the pieces of a chunk: `{text, origin, drafter, ids, num}`, a piece for each token.
 *
 * What has no report (the rest of a stream that was resumed, text that only the end made certain) is one piece without
 * an origin. A token that leaves a character incomplete has no text. `drafter` is empty, but for accepted tokens of a
 * draft that combines several drafters.
 */
export function piecesOf(chunk, numTokens) {
  const choice = chunk.choices[0];
  const delta = choice?.delta;
  const text = choice?.text ?? (delta?.reasoning_content ?? "") + (delta?.content ?? "");
  const report = chunk.speculation;
  if (!report?.token_ids) return text || numTokens ? [{ text, origin: "", drafter: "", ids: [], num: numTokens }] : [];
  return report.token_ids.map((id, index) => ({
    // A model without a tokenizer has no text.
    text: report.texts.length ? report.texts[index] : ` ${id}`,
    origin: report.origins[index] ?? "",
    drafter: report.drafters?.[index] ?? "",
    ids: [id],
    num: 1,
  }));
}

/** Returns pieces as they are kept in a session: text, the first letter of the origin, the drafter where one is named. */
export function packed(pieces) {
  const kept = [];
  for (const { text, origin, drafter } of pieces) {
    if (text) kept.push([text, origin.slice(0, 1), ...(drafter ? [drafter] : [])]);
  }
  return kept;
}

/** Returns the pieces that were packed; earlier versions of the page kept no drafter. */
export function unpacked(kept) {
  return kept.map(([text, letter, drafter = ""]) => ({ text, origin: ORIGINS[letter] ?? "", drafter, ids: [], num: 1 }));
}

/** Returns the text of pieces. */
export function textOf(pieces) {
  return pieces.map((piece) => piece.text).join("");
}

/** An answer on the page. Arrow keys read its tokens one by one. */
export class AnswerView {
  /** @param {(text: string) => void} say announces a token that the keyboard has chosen */
  constructor(say) {
    this.element = document.createElement("div");
    this.element.className = "answer";
    this.element.tabIndex = 0;
    this.element.setAttribute("role", "group");
    this.element.setAttribute("aria-label", "Answer; arrow keys read its tokens");
    this.element.addEventListener("keydown", (event) => this.#move(event));
    this.element.addEventListener("blur", () => this.#mark(-1));
    this.pieces = [];
    this.#say = say;
  }

  #say;
  #spans = [];
  #at = -1;
  // Tokens whose characters are not complete yet.
  #waiting = [];

  /** Appends pieces. */
  add(pieces) {
    const fragment = document.createDocumentFragment();
    for (const piece of pieces) {
      this.pieces.push(piece);
      if (!piece.text) {
        this.#waiting.push(...piece.ids);
        continue;
      }
      const span = document.createElement("span");
      span.className = `token ${piece.origin}`;
      span.dataset.origin = piece.origin;
      if (piece.drafter) {
        span.dataset.drafter = piece.drafter;
        span.className = `token ${piece.origin} ${lookOf(piece.drafter)}`.trim();
        noteDrafter(piece.drafter);
      }
      span.textContent = piece.text;
      const ids = [...this.#waiting, ...piece.ids];
      this.#waiting = [];
      const origin = [piece.origin || "origin not known", piece.drafter && proposedBy(piece.drafter)].filter(Boolean).join(", ");
      span.dataset.about = [origin, ids.length && `token ${ids.join(", ")}`].filter(Boolean).join(" · ");
      span.title = span.dataset.about;
      this.#spans.push(span);
      fragment.append(span);
    }
    // In a comparison an answer scrolls by itself.
    following(this.element, () => this.element.append(fragment));
  }

  /** Appends something between the tokens, such as a notice. */
  insert(element) {
    this.element.append(element);
  }

  #move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || event.altKey || event.ctrlKey || event.metaKey || !this.#spans.length) return;
    event.preventDefault();
    this.#mark(Math.min(this.#spans.length - 1, Math.max(0, this.#at + step)));
    const span = this.#spans[this.#at];
    span.scrollIntoView({ block: "nearest" });
    this.#say(`${JSON.stringify(span.textContent)}: ${span.dataset.about}, ${this.#at + 1} of ${this.#spans.length}`);
  }

  #mark(at) {
    this.#spans[this.#at]?.classList.remove("chosen");
    this.#at = at;
    this.#spans[at]?.classList.add("chosen");
  }
}
