// The page: prompts, answers, switches and keys.

import { announce, announceAnswer, announceEnd, announceNow } from "./announce.js";
import { ApiError, models, pause, setToken } from "./api.js";
import { Comparison } from "./compare.js";
import { shown, showMeasures } from "./measures.js";
import { bodyOf, run } from "./requests.js";
import { Sessions } from "./sessions.js";
import { clearFieldErrors, parameters, showFieldError, systemMessage } from "./settings.js";
import { packed, textOf } from "./tokens.js";
import { appendPrompt, showSession, Turn } from "./turns.js";

const at = (id) => document.getElementById(id);
const [composer, prompt, send, stop, compare, speculation] = ["composer", "prompt", "send", "stop", "compare", "speculation"].map(at);
const NARROW = matchMedia("(max-width: 62rem)");
const MAX_BUSY = 10;
const ENDS = { stop: "the model ended it", length: "max tokens reached", abort: "cancelled" };

let running = null;
const sessions = new Sessions((session) => {
  running?.abort();
  showSession(session);
  setMode(session?.mode ?? mode());
});

function mode() {
  return composer.elements.mode.value;
}

function setMode(value) {
  composer.elements.mode.value = value;
  at("prompt-label").textContent = value === "chat" ? "Message" : "Prompt";
  prompt.placeholder =
    value === "chat" ? "Ask something. Enter sends, Shift+Enter breaks the line." : "Begin a text; the model continues it. Enter sends.";
  showSystem();
}

/** A session keeps the system message with which it began. */
function showSystem() {
  const input = at("settings").elements.system;
  if (sessions?.current) input.value = sessions.current.system;
  input.disabled = mode() !== "chat" || Boolean(sessions?.current);
}

/** Runs a task for the prompt, of which there is one at a time; shows its error. */
async function busy(task) {
  const text = prompt.value;
  if (running || !text.trim()) return;
  clearErrors();
  const control = (running = new AbortController());
  setBusy(true);
  try {
    await task(text, parameters(), control.signal);
  } catch (error) {
    if (control.signal.aborted) announce("Stopped");
    else showError(error);
  } finally {
    if (running === control) running = null;
    setBusy(false);
  }
}

function setBusy(isBusy) {
  stop.disabled = !isBusy;
  send.disabled = compare.disabled = isBusy;
  at("status").textContent = isBusy ? "Running…" : "";
  at("transcript").setAttribute("aria-busy", String(isBusy));
}

function answer() {
  return busy(async (text, given, signal) => {
    const session = sessions.begin(mode(), systemMessage());
    showSystem();
    appendPrompt(text, session.mode);
    const turn = new Turn(session.mode);
    prompt.value = "";
    const pieces = [];
    let measures = null;
    const on = {
      pieces(more, current) {
        pieces.push(...more);
        measures = current;
        turn.add(more);
        showMeasures(current);
        announceAnswer(textOf(more));
      },
      notice: (notice) => turn.notice(notice),
    };
    const end = (why) => {
      const footer = [`${measures?.numTokens ?? 0} tokens`, shown(measures?.tokensPerSecond ?? null, 1, " tokens/s"), why].join(" · ");
      turn.end(footer);
      announceEnd(`Answer complete: ${footer}`);
      session.turns.push({ role: "user", text }, { role: "assistant", text: textOf(pieces), pieces: packed(pieces), footer });
      sessions.keep(session);
    };
    try {
      const result = await runInSession(session, text, given, signal, on);
      measures = result.measures;
      showMeasures(measures);
      noteLength(session, result.usage, turn);
      session.isCut = false;
      end(ENDS[result.finishReason] ?? "ended");
    } catch (error) {
      if (pieces.length) {
        // The session may have a token or two more than this page.
        session.isCut = true;
        end(signal.aborted ? "stopped" : "broken off");
      } else {
        turn.end(signal.aborted ? "stopped" : "no answer");
        if (!prompt.value) prompt.value = text;
        // The server may have the prompt already: another attempt begins another session.
        if (!session.turns.length && sessions.current === session) sessions.current = null;
      }
      throw error;
    }
  });
}

/** Runs a request; the whole chat is sent, so that a session that has expired begins again with its text. */
async function runInSession(session, text, given, signal, on) {
  let onlyNew = Boolean(session.isCut);
  for (let attempt = 0; ; attempt++) {
    const options = { isSpeculating: speculation.checked, sessionId: session.id, onlyNew };
    try {
      return await run(session.mode, bodyOf(session, text, given, options), signal, on);
    } catch (error) {
      if (error.code === "session_conflict" && !onlyNew && session.turns.length) {
        onlyNew = true;
      } else if (error.code !== "session_busy" || attempt >= MAX_BUSY) {
        throw error;
      } else {
        // An answer that was stopped ends at its next token.
        await pause(300, signal);
      }
    }
  }
}

function noteLength(session, usage, turn) {
  if (!usage) return;
  if (usage.prompt_tokens < session.numTokens) {
    turn.notice({ kind: "expired", text: "The server had forgotten this session: the answer follows from this prompt alone" });
  }
  session.numTokens = usage.total_tokens;
}

function compareSides() {
  return busy(async (text, given, signal) => {
    const session = { mode: mode(), system: systemMessage(), turns: [] };
    await new Comparison(text).run(session, text, given, signal);
  });
}

function clearErrors() {
  clearFieldErrors();
  at("error").hidden = true;
  prompt.removeAttribute("aria-invalid");
}

function showError(error) {
  const { param = "", status = 0, retryAfterS = 0 } = error;
  if (status === 401) {
    at("token-row").hidden = false;
    at("token").focus();
  }
  const retry = retryAfterS ? ` Try again in ${retryAfterS} s.` : "";
  const named = param && !error.message.includes(param) ? `${param}: ` : "";
  if (["prompt", "messages"].includes(param)) prompt.setAttribute("aria-invalid", "true");
  showFieldError(param, error.message);
  at("error").textContent = `${named}${error.message}.${retry}`.replace("..", ".");
  at("error").hidden = false;
  // What is no refusal by the server or of a field may be a fault of this page.
  if (!(error instanceof ApiError)) console.warn(error);
}

async function showModel() {
  try {
    const [model] = await models();
    at("model").textContent = model.id;
    clearErrors();
  } catch (error) {
    showError(error);
  }
}

function switchSpeculation() {
  speculation.checked = !speculation.checked;
  announceNow(`Speculation ${speculation.checked ? "on" : "off"}`);
}

function newSession() {
  sessions.leave();
  prompt.focus();
}

const ALT_KEYS = { KeyS: switchSpeculation, KeyC: compareSides, KeyN: newSession };

document.addEventListener("keydown", (event) => {
  const isWriting = event.target.matches("input:not([type=radio], [type=checkbox]), textarea");
  if (event.altKey && !event.ctrlKey && !event.metaKey && ALT_KEYS[event.code]) {
    event.preventDefault();
    ALT_KEYS[event.code]();
  } else if (event.key === "Escape" && running && !at("help").open) {
    running.abort();
  } else if (event.key === "/" && !isWriting) {
    event.preventDefault();
    prompt.focus();
  } else if (event.key === "?" && !isWriting) {
    at("help").showModal();
  }
});
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.altKey || event.isComposing) return;
  event.preventDefault();
  answer();
});
composer.addEventListener("submit", (event) => {
  event.preventDefault();
  answer();
});
composer.addEventListener("change", (event) => {
  if (event.target.name !== "mode") return;
  if (sessions.current && sessions.current.mode !== mode()) sessions.leave();
  else setMode(mode());
});
at("settings").addEventListener("submit", (event) => event.preventDefault());
at("settings").addEventListener("reset", () => {
  clearErrors();
  // The fields have their values behind this event.
  setTimeout(showSystem);
});
stop.addEventListener("click", () => running?.abort());
compare.addEventListener("click", compareSides);
at("new-session").addEventListener("click", newSession);
at("help-open").addEventListener("click", () => at("help").showModal());
at("token-save").addEventListener("click", () => {
  setToken(at("token").value.trim());
  at("token").value = "";
  at("token-row").hidden = true;
  prompt.focus();
  showModel();
});

function fold() {
  for (const id of ["sessions-panel", "settings-panel"]) at(id).open = !NARROW.matches;
}
NARROW.addEventListener("change", fold);
fold();
setMode("chat");
prompt.focus();
showModel();
