import { readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

const scenario = JSON.parse(readFileSync(0, "utf8"));
const add = tool({
  description: "Add two numbers.",
  inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
  execute: ({ a, b }) => a + b,
});
const model = createOpenAI()(process.env.OPENAI_MODEL); // .chat(...) for chat completions
const done = await generateText({ model, tools: { add }, stopWhen: stepCountIs(4), prompt: scenario.question });
console.log(JSON.stringify({ reward: done.text.includes(scenario.answer) ? 1 : 0 }));
