// Anthropic's official Node client: one plain turn that calls a tool, one streamed turn that answers.
import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ maxRetries: 0 });
const options = { model: process.env.ANTHROPIC_MODEL, max_tokens: 200, temperature: 0 };
const input_schema = { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } } };
const tools = [{ name: "add", description: "Add two numbers.", input_schema }];
const messages = [{ role: "user", content: "What is 2 plus 3?" }];

const { input_tokens } = await client.messages.countTokens({ model: options.model, messages, tools });
const first = await client.messages.create({ ...options, messages, tools });
if (first.usage.input_tokens !== input_tokens) throw new Error(`${first.usage.input_tokens} is not ${input_tokens}`);
const calls = first.content.filter((block) => block.type === "tool_use");
const results = calls.map(({ id, input }) => ({ type: "tool_result", tool_use_id: id, content: String(input.a + input.b) }));
messages.push({ role: "assistant", content: first.content }, { role: "user", content: results });

let text = "";
const stream = client.messages.stream({ ...options, messages, tools }).on("text", (piece) => (text += piece));
const last = await stream.finalMessage();
if (last.content[0].text !== text) throw new Error("the pieces are not the message");

let refused = 0;
try {
  await new Anthropic({ apiKey: "wrong", maxRetries: 0 }).models.list();
} catch (error) {
  if (!(error instanceof Anthropic.AuthenticationError)) throw error;
  refused = error.status;
}
const called = calls.map((call) => [call.name, call.input]);
const description = new URL("../node_modules/@anthropic-ai/sdk/package.json", import.meta.url);
const { version } = JSON.parse(readFileSync(description));
console.log(JSON.stringify({ version, calls: called, text, refused }));
