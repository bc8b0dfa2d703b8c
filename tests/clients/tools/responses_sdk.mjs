// The official Node client on the Responses: a plain turn that calls a tool, a streamed turn that answers.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const client = new OpenAI({ maxRetries: 0 });
const model = process.env.OPENAI_MODEL;
const parameters = { type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } } };
const tools = [{ type: "function", name: "add", description: "Add two numbers.", parameters }];
const conversation = [{ role: "user", content: "What is 2 plus 3?" }];

const first = await client.responses.create({ model, input: conversation, tools, temperature: 0 });
const calls = first.output.filter((item) => item.type === "function_call");
conversation.push(...first.output);
for (const call of calls) {
  const { a, b } = JSON.parse(call.arguments);
  conversation.push({ type: "function_call_output", call_id: call.call_id, output: String(a + b) });
}
let text = "";
const stream = client.responses.stream({ model, input: conversation, tools, temperature: 0 });
for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
const { output_text } = await stream.finalResponse();
if (output_text !== text) throw new Error(`${output_text} is not ${text}`);

let refused = 0;
try {
  await new OpenAI({ apiKey: "wrong", maxRetries: 0 }).responses.create({ model, input: "hi" });
} catch (error) {
  if (!(error instanceof OpenAI.AuthenticationError)) throw error;
  refused = error.status;
}
const { version } = JSON.parse(readFileSync(new URL("../node_modules/openai/package.json", import.meta.url)));
const called = calls.map((call) => [call.name, JSON.parse(call.arguments)]);
console.log(JSON.stringify({ version, calls: called, text, refused }));
