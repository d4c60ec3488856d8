// The sessions that this browser began, kept in its local storage; the server has their text too, as long as they live.

import { announce } from "./announce.js";
import { deleteSession, randomId } from "./api.js";

const KEY = "outrider.sessions";
const MAX_SESSIONS = 50;

/**
 * A session: `{id, mode, system, title, turns}`, with turns `{role, text, pieces?}`.
 *
 * `numTokens` is the length that the server told last, by which an expired session is noticed.
 */
export class Sessions {
  current = null;
  #all = load();
  #list = document.getElementById("sessions");
  #onOpen;

  /** @param {(session: object|null) => void} onOpen shows a session; null for an empty page */
  constructor(onOpen) {
    this.#onOpen = onOpen;
    this.#show();
  }

  /** Leaves the current session; the next prompt begins another. */
  leave() {
    this.current = null;
    this.#show();
    this.#onOpen(null);
  }

  /** Returns the current session, or begins one. */
  begin(mode, system) {
    this.current ??= { id: `playground-${randomId()}`, mode, system, title: "", turns: [], numTokens: 0 };
    return this.current;
  }

  /** Keeps the current session as it is now. */
  keep(session) {
    session.title ||= session.turns[0]?.text.trim().slice(0, 60) || "Untitled";
    this.#all = [session, ...this.#all.filter((other) => other.id !== session.id)].slice(0, MAX_SESSIONS);
    this.#save();
    this.#show();
  }

  #open(session) {
    this.current = session;
    this.#show();
    this.#onOpen(session);
    this.#list.querySelector("[aria-current]")?.focus();
  }

  #delete(session) {
    const at = this.#all.indexOf(session);
    this.#all = this.#all.filter((other) => other !== session);
    this.#save();
    // Whether or not the server is told: there it expires by itself.
    deleteSession(session.id).then(
      () => announce("Session deleted."),
      (error) => announce(`The server keeps the session until it expires: ${error.message}`),
    );
    if (this.current?.id === session.id) this.leave();
    else this.#show();
    // The focus goes to the next one, not to the top of the page.
    const next = this.#list.children[Math.min(at, this.#all.length - 1)]?.querySelector("button");
    (next ?? document.getElementById("new-session")).focus();
  }

  #save() {
    while (this.#all.length) {
      try {
        localStorage.setItem(KEY, JSON.stringify(this.#all));
        return;
      } catch {
        // Full, or forbidden: the oldest goes.
        if (this.#all.length === 1) return;
        this.#all = this.#all.slice(0, -1);
      }
    }
    try {
      localStorage.removeItem(KEY);
    } catch {
      // Forbidden: then nothing is there.
    }
  }

  #show() {
    this.#list.replaceChildren(...this.#all.map((session) => this.#item(session)));
    document.getElementById("no-sessions").hidden = this.#all.length > 0;
  }

  #item(session) {
    const open = document.createElement("button");
    open.type = "button";
    open.className = "open";
    open.textContent = session.title;
    open.title = session.title;
    if (session.id === this.current?.id) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => this.#open(session));
    const remove = document.createElement("button");
    remove.type = "button";
    remove.className = "remove";
    remove.textContent = "×";
    remove.title = "Delete this session, here and on the server";
    remove.setAttribute("aria-label", `Delete ${session.title}`);
    remove.addEventListener("click", () => this.#delete(session));
    const item = document.createElement("li");
    item.append(open, remove);
    return item;
  }
}

function load() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return Array.isArray(kept) ? kept.filter((item) => item?.id && Array.isArray(item.turns)) : [];
  } catch {
    return [];
  }
}
