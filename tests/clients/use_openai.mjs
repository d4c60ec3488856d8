// npm's `openai` package.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import process from "node:process";

const require = createRequire(process.env.NODE_FOLDER + "/");
const OpenAI = require("openai");
const { MODEL: model, KEY, URL: url } = process.env;
const options = { baseURL: `${url}/v1`, maxRetries: 0, timeout: 60000 };
const client = new OpenAI({ ...options, apiKey: KEY });
const stranger = new OpenAI({ ...options, apiKey: "wrong" });
const messages = [{ role: "user", content: "hello" }];
const base = { model, messages, max_tokens: 24, seed: 7 };
const chat = (more = {}) => client.chat.completions.create({ ...base, ...more });

function expect(holds, what) {
  if (!holds) throw new Error(`expected otherwise: ${JSON.stringify(what)}`);
}

async function refused(kind, run) {
  try {
    await run();
  } catch (error) {
    if (error instanceof kind) return error;
    throw error;
  }
  throw new Error(`no ${kind.name}`);
}

async function call(name, check) {
  let problem = null;
  try {
    await check();
  } catch (error) {
    problem = String(error.stack ?? error).slice(0, 1500);
  }
  console.log(JSON.stringify({ call: name, passed: problem === null, problem }));
}

const manifest = readFileSync(`${process.env.NODE_FOLDER}/node_modules/openai/package.json`);
console.log(JSON.parse(manifest).version);
await call("chat", async () => {
  const answer = await chat();
  expect(answer.choices[0].message.content && answer.usage.completion_tokens > 0, answer);
});
await call("chat, streamed, with usage", async () => {
  let said = "", usage = null;
  for await (const chunk of await chat({ stream: true, stream_options: { include_usage: true } })) {
    said += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  expect(said === (await chat()).choices[0].message.content && usage.completion_tokens > 0, said);
});
await call("n=2, logprobs, stop", async () => {
  const answer = await chat({ n: 2, logprobs: true, top_logprobs: 2 });
  expect(answer.choices.length === 2 && answer.choices[1].logprobs.content.length > 0, answer);
  const letter = answer.choices[0].message.content[6];
  expect((await chat({ stop: letter })).choices[0].finish_reason === "stop");
});
await call("completions, whole and streamed", async () => {
  const asked = { model, prompt: "a", max_tokens: 8, seed: 3 };
  let said = "";
  for await (const chunk of await client.completions.create({ ...asked, stream: true })) said += chunk.choices[0]?.text ?? "";
  expect((await client.completions.create(asked)).choices[0].text === said, said);
});
await call("models", async () => expect((await client.models.list()).data[0].id === model));
await call("404 wrong model", () => refused(OpenAI.NotFoundError, () => chat({ model: "another" })));
await call("400 wrong parameter", async () => {
  const error = await refused(OpenAI.BadRequestError, () => chat({ temperature: -1 }));
  expect(error.param === "temperature", error);
});
await call("400 too long a prompt", () =>
  refused(OpenAI.BadRequestError, () => chat({ messages: [{ role: "user", content: "word ".repeat(200000) }] })));
await call("401 wrong key", () => refused(OpenAI.AuthenticationError, () => stranger.models.list()));
await call("responses, whole and streamed", async () => {
  const asked = { model, input: "hello", max_output_tokens: 16 };
  expect((await client.responses.create(asked)).output_text);
  let said = "";
  for await (const event of await client.responses.create({ ...asked, stream: true })) said += event.delta ?? "";
  expect(said);
});
await call("tools, streamed, and JSON of a schema", async () => {
  const schema = { type: "object", properties: { sky: { enum: ["clear", "cloudy"] } }, required: ["sky"], additionalProperties: false };
  const tools = [{ type: "function", function: { name: "weather", parameters: schema } }];
  let name = "", said = "";
  for await (const chunk of await chat({ tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 400, stream: true })) {
    for (const piece of chunk.choices[0]?.delta.tool_calls ?? []) {
      name += piece.function.name ?? "";
      said += piece.function.arguments;
    }
  }
  expect(name === "weather" && ["clear", "cloudy"].includes(JSON.parse(said).sky), said);
  const response_format = { type: "json_schema", json_schema: { name: "weather", schema } };
  const answer = await chat({ response_format, max_tokens: 200 });
  expect("sky" in JSON.parse(answer.choices[0].message.content), answer);
});
