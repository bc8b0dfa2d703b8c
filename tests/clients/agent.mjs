// An agent in another language: plays the scenario on standard input with the official client and answers with one line.
// The client finds OPENAI_BASE_URL and OPENAI_API_KEY by itself.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const scenario = JSON.parse(readFileSync(0, "utf8"));
const client = new OpenAI({ maxRetries: 0 });
const model = process.env.OPENAI_MODEL;
const tools = [{ type: "function", function: { name: "add", parameters: { type: "object" } } }];
const messages = [{ role: "user", content: scenario.question }];

const first = await client.chat.completions.create({ model, messages, tools });
const asked = first.choices[0].message;
const call = asked.tool_calls[0];
const { a, b } = JSON.parse(call.function.arguments);
messages.push(asked, { role: "tool", tool_call_id: call.id, content: String(a + b) });

let text = "";
const stream = await client.chat.completions.create({ model, messages, tools, stream: true });
for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";

console.error("a line on standard error is no answer");
console.log("a line before the last is no answer either");
console.log(JSON.stringify({ reward: text === scenario.answer ? 1 : 0, metrics: { sum: a + b }, metadata: { text } }));
