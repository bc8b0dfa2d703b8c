// An agent on Anthropic's official client, which finds ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY by itself: asks, answers
// each call of a tool, and sends back what it got, half of the turns streamed. Prints what it saw as its outcome.
import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";

const scenario = JSON.parse(readFileSync(0, "utf8"));
const client = new Anthropic({ maxRetries: 0 });
const model = process.env.ANTHROPIC_MODEL;
const tools = [{ name: "add", input_schema: { type: "object" } }];
const messages = [{ role: "user", content: scenario.question ?? "hi" }];
const inputs = [];

let reply;
for (let turn = 0; turn < 4; turn++) {
  const asked = { model, max_tokens: 300, messages, tools };
  reply = turn % 2 ? await client.messages.stream(asked).finalMessage() : await client.messages.create(asked);
  const calls = reply.content.filter((block) => block.type === "tool_use");
  inputs.push(...calls.map((call) => call.input));
  const results = calls.map((call) => ({ type: "tool_result", tool_use_id: call.id, content: "3" }));
  messages.push({ role: "assistant", content: reply.content }, { role: "user", content: calls.length ? results : "thanks" });
}

const errors = {};
for (const [name, call] of Object.entries({
  key: () => new Anthropic({ apiKey: "wrong", maxRetries: 0 }).messages.create({ model, max_tokens: 1, messages }),
  model: () => client.messages.create({ model: "other", max_tokens: 1, messages: messages.slice(0, 1) }),
  image: () =>
    client.messages.create({
      model,
      max_tokens: 1,
      messages: [{ role: "user", content: [{ type: "image", source: { type: "url", url: "http://127.0.0.1/x.png" } }] }],
    }),
})) {
  try {
    await call();
  } catch (error) {
    errors[name] = [error.constructor.name, error.status, error.error?.error?.type];
  }
}
const text = reply.content.find((block) => block.type === "text").text;
console.log(JSON.stringify({ reward: 1, metadata: { text, inputs, errors } }));
