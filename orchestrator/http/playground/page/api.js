// Calls of the server: errors with the field that they are about, and streams that continue after a broken connection.

const TOKEN_KEY = "outrider.token";
const MAX_ATTEMPTS = 12;
const MAX_PAUSE_MS = 3000;
const PREFIXES = { "v1/chat/completions": "chatcmpl-", "v1/completions": "cmpl-" };
let heldToken = "";

/** A refusal by the server. */
export class ApiError extends Error {
  /**
   * @param {number} status of HTTP; 0 for an error within a stream
   * @param {{message?: string, param?: string, code?: string|number}} error as the server tells it
   * @param {number} retryAfterS seconds until another attempt may succeed
   */
  constructor(status, error, retryAfterS = 0) {
    super(error.message ?? `HTTP status ${status}`);
    this.status = status;
    this.param = error.param ?? "";
    this.code = error.code ?? "";
    this.retryAfterS = retryAfterS;
  }
}

/** The connection ended before the stream did. */
class Broken extends Error {}

/** Keeps a tenant's token for this tab. */
export function setToken(token) {
  heldToken = token;
  try {
    sessionStorage.setItem(TOKEN_KEY, token);
  } catch {
    // It lasts as long as the page.
  }
}

function token() {
  try {
    return heldToken || (sessionStorage.getItem(TOKEN_KEY) ?? "");
  } catch {
    return heldToken;
  }
}

/** Returns a random id; `crypto.randomUUID` exists in secure contexts only. */
export function randomId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Returns the models that the server serves. */
export async function models() {
  return (await (await call("v1/models", {})).json()).data;
}

/** Deletes a session of the server, unless it has expired. */
export async function deleteSession(id) {
  try {
    await call(`v1/sessions/${encodeURIComponent(id)}`, { method: "DELETE" });
  } catch (error) {
    if (error.status !== 404) throw error;
  }
}

async function call(path, options) {
  const headers = { ...options.headers };
  if (token()) headers.Authorization = `Bearer ${token()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Broken("the server cannot be reached");
  }
  if (response.ok) return response;
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // A proxy's page: its status says enough.
  }
  throw new ApiError(response.status, error, Number(response.headers.get("retry-after") ?? 0));
}

/**
 * Yields the chunks of a streamed completion, each with the number of output tokens up to its end.
 *
 * A connection that breaks is opened again at the token where it broke; `onResume(offset)` is called before.
 */
export async function* stream(path, body, { signal, onResume }) {
  const requestId = randomId();
  const content = JSON.stringify({ ...body, stream: true, request_id: requestId });
  let last = "";
  let offset = 0;
  let isFinished = false;
  for (let attempt = 0; ; ) {
    try {
      for await (const event of read(path, content, last, signal)) {
        if (event.data === "[DONE]") return;
        const chunk = JSON.parse(event.data);
        if (chunk.error) throw new ApiError(0, chunk.error);
        if (event.id) last = event.id;
        offset = Number(last.slice(last.lastIndexOf(":") + 1));
        attempt = 0;
        isFinished ||= Boolean(chunk.choices[0]?.finish_reason);
        yield { chunk, offset };
      }
      if (isFinished) return;
      throw new Broken("the connection ended before the answer did");
    } catch (error) {
      if (isFinished && error instanceof Broken) return;
      if (signal.aborted || !mayContinue(error, last) || ++attempt > MAX_ATTEMPTS) throw error;
      // At 0 the server begins what has not begun.
      last ||= `${PREFIXES[path]}${requestId}:0`;
      if (attempt === 1) onResume(offset);
      await pause(Math.min(MAX_PAUSE_MS, 250 * 2 ** (attempt - 1)), signal);
    }
  }
}

function mayContinue(error, last) {
  if (error instanceof Broken) return true;
  const isUnavailable = error instanceof ApiError && (error.status === 503 || error.code === "unavailable" || error.code === "draining");
  return isUnavailable && Boolean(last);
}

async function* read(path, content, last, signal) {
  const headers = { "Content-Type": "application/json" };
  if (last) headers["Last-Event-ID"] = last;
  const response = await call(path, { method: "POST", headers, body: content, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (signal.aborted) throw error;
        throw new Broken("the connection broke");
      }
      if (part.done) return;
      const events = (held + part.value).split("\n\n");
      held = events.pop();
      for (const text of events) {
        const event = parsed(text);
        if (event.data) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parsed(text) {
  const event = { id: "", data: "" };
  for (const line of text.split("\n")) {
    // Lines that begin with a colon keep the connection alive.
    const [, name, value] = /^(id|data): ?(.*)$/s.exec(line) ?? [];
    if (name) event[name] += value;
  }
  return event;
}

/** Waits; an abort ends the wait with its error. */
export function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    }, { once: true });
  });
}
