// Bodies of requests, and the notices of their streams in words.

import { stream } from "./api.js";
import { Measures } from "./measures.js";
import { piecesOf } from "./tokens.js";

const PATHS = { chat: "v1/chat/completions", completion: "v1/completions" };

/**
 * Returns the body of a request.
 *
 * @param {object} session its `mode`, `system`, `turns`
 * @param {string} text the new prompt
 * @param {{sampling: object, speculation: object}} parameters
 * @param {{isSpeculating: boolean, onlyNew?: boolean, sessionId?: string}} options `onlyNew` where a chat is not sent
 *     whole because its session has more text than this page
 */
export function bodyOf(session, text, parameters, { isSpeculating, onlyNew = false, sessionId = "" }) {
  const body = {
    ...parameters.sampling,
    speculation: { ...parameters.speculation, report: true, ...(isSpeculating ? {} : { disabled: true }) },
    stream_options: { include_usage: true },
  };
  if (sessionId) body.session_id = sessionId;
  if (session.mode === "completion") return { ...body, prompt: text };
  const system = session.system ? [{ role: "system", content: session.system }] : [];
  const earlier = onlyNew ? [] : [...system, ...session.turns.map(({ role, text: content }) => ({ role, content }))];
  return { ...body, messages: [...earlier, { role: "user", content: text }] };
}

/**
 * Runs a request to its end; returns `{measures, finishReason, usage}`.
 *
 * @param {string} mode "chat" or "completion"
 * @param {object} body see `bodyOf`
 * @param {AbortSignal} signal
 * @param {object} on what to call: `pieces(pieces, measures, atMs)`, `notice({kind, text})`
 */
export async function run(mode, body, signal, on) {
  const measures = new Measures();
  let [before, finishReason, usage] = [0, null, null];
  const onResume = (offset) => {
    measures.resume();
    on.notice({ kind: "connection", text: `Connection lost behind token ${offset}: connecting again` });
  };
  for await (const { chunk, offset } of stream(PATHS[mode], body, { signal, onResume })) {
    usage = chunk.usage ?? usage;
    finishReason = chunk.choices[0]?.finish_reason ?? finishReason;
    const notice = chunk.speculation?.notice;
    if (notice) {
      on.notice({ kind: notice.kind, text: wordsOf(notice) });
      continue;
    }
    const pieces = piecesOf(chunk, offset - before);
    before = offset;
    const atMs = measures.record(pieces, chunk.speculation?.statistics);
    if (pieces.length) on.pieces(pieces, measures, atMs);
  }
  return { measures, finishReason, usage };
}

function wordsOf({ kind, reason, num_tokens: num = 0 }) {
  const why = reason ? ` (${reason.toLowerCase().replaceAll("_", " ")})` : "";
  const tokens = num === 1 ? "1 token" : `${num} tokens`;
  switch (kind) {
    case "target_replaced":
      return `Target replaced${why}: another one continues`;
    case "draft_lost":
      return `Draft lost${why}: decoding goes on without it`;
    case "tokens_recomputed":
      return `${tokens} recomputed`;
    case "prefill":
      return `Prompt: ${tokens} processed`;
    default:
      return kind.replaceAll("_", " ") + why;
  }
}
