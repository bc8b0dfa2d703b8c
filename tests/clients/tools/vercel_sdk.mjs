// The Vercel AI SDK with a tool: a whole run, plain and then streamed; with the argument "chat" on chat completions.
import { readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const isChat = process.argv[2] === "chat";
const model = (options) => {
  const openai = createOpenAI(options);
  return isChat ? openai.chat(process.env.OPENAI_MODEL) : openai(process.env.OPENAI_MODEL);
};
const called = [];
const add = tool({
  description: "Add two numbers.",
  inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
  execute: ({ a, b }) => {
    called.push(["add", { a, b }]);
    return a + b;
  },
});
const options = { tools: { add }, stopWhen: stepCountIs(3), prompt: "What is 2 plus 3?", temperature: 0, maxRetries: 0 };

const plain = await generateText({ model: model(), ...options });
const calls = [...called];
const text = await streamText({ model: model(), ...options }).text;
if (text !== plain.text || called.length !== 2 * calls.length) throw new Error(`${text} is not ${plain.text}`);
let refused = 0;
try {
  await generateText({ model: model({ apiKey: "wrong" }), ...options });
} catch (error) {
  refused = error.statusCode;
}
const { version } = JSON.parse(readFileSync(new URL("../node_modules/ai/package.json", import.meta.url), "utf8"));
console.log(JSON.stringify({ version, calls, text, refused }));
