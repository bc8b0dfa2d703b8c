// The official Node client: one plain turn that calls a tool, one streamed turn that answers.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const client = new OpenAI({ maxRetries: 0 });
const model = process.env.OPENAI_MODEL;
const parameters = { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } } };
const tools = [{ type: "function", function: { name: "add", description: "Add two numbers.", parameters } }];
const messages = [{ role: "user", content: "What is 2 plus 3?" }];

const first = await client.chat.completions.create({ model, messages, tools, temperature: 0 });
const calls = first.choices[0].message.tool_calls ?? [];
messages.push(first.choices[0].message);
for (const call of calls) {
  const { a, b } = JSON.parse(call.function.arguments);
  messages.push({ role: "tool", tool_call_id: call.id, content: String(a + b) });
}
let text = "";
const stream = await client.chat.completions.create({ model, messages, tools, temperature: 0, stream: true });
for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";

let refused = 0;
try {
  await new OpenAI({ apiKey: "wrong", maxRetries: 0 }).models.list();
} catch (error) {
  if (!(error instanceof OpenAI.AuthenticationError)) throw error;
  refused = error.status;
}
const { version } = JSON.parse(readFileSync(new URL("../node_modules/openai/package.json", import.meta.url)));
const called = calls.map((call) => [call.function.name, JSON.parse(call.function.arguments)]);
console.log(JSON.stringify({ version, calls: called, text, refused }));
