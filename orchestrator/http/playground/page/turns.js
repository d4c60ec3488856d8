// The conversation on the page. Texts of the model and of users are only ever set as text.

import { announce, announceNow } from "./announce.js";
import { forgetDrafters } from "./drafters.js";
import { following } from "./scrolling.js";
import { AnswerView, unpacked } from "./tokens.js";

const transcript = document.getElementById("transcript");
const welcome = document.getElementById("welcome");

/** Returns a new element. */
export function make(tag, className, text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

/** Appends to the conversation, and keeps its end in view where it was. */
export function append(element) {
  welcome.remove();
  changing(() => transcript.append(element));
}

/** Changes the conversation, and keeps its end in view where it was. */
export function changing(change) {
  following(transcript, change);
}

/** Shows a session from its beginning; null for none. */
export function showSession(session) {
  transcript.replaceChildren(...(session ? [] : [welcome]));
  forgetDrafters();
  for (const turn of session?.turns ?? []) {
    if (turn.role === "user") appendPrompt(turn.text, session.mode);
    else new Turn(session.mode).restore(turn);
  }
  transcript.scrollTop = transcript.scrollHeight;
}

/** Appends what the user wrote. */
export function appendPrompt(text, mode) {
  const element = make("article", "turn prompt");
  element.setAttribute("aria-label", mode === "chat" ? "Your message" : "Your prompt");
  element.append(make("p", "who", mode === "chat" ? "You" : "Prompt"), make("div", "text", text));
  append(element);
}

/** An answer with what happened while it came. */
export class Turn {
  view = new AnswerView(announceNow);
  element = make("article", "turn");
  #footer = make("p", "footer muted");
  #prefill = null;

  constructor(mode) {
    this.element.setAttribute("aria-label", "Answer");
    this.element.append(make("p", "who", mode === "chat" ? "Model" : "Completion"), this.view.element, this.#footer);
    append(this.element);
  }

  /** Shows an answer that was kept. */
  restore(turn) {
    this.view.add(turn.pieces ? unpacked(turn.pieces) : [{ text: turn.text, origin: "", drafter: "", ids: [], num: 1 }]);
    this.#footer.textContent = turn.footer ?? "";
  }

  add(pieces) {
    changing(() => this.view.add(pieces));
  }

  /** Shows a notice where the text has come to; the progress of a prompt has one place. */
  notice({ kind, text }) {
    if (kind === "prefill" && this.#prefill) {
      this.#prefill.textContent = text;
      return;
    }
    const note = make("span", `notice ${kind}`, text);
    note.dataset.kind = kind;
    if (kind === "prefill") this.#prefill = note;
    changing(() => this.view.insert(note));
    announce(text);
  }

  end(text) {
    changing(() => (this.#footer.textContent = text));
  }

  remove() {
    this.element.remove();
  }
}
