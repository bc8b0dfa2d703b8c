// Uses everything of the protocol that the official client offers for chat, and prints what it saw as one JSON object.
import OpenAI from "openai";

const client = new OpenAI({ maxRetries: 0 });
const model = process.env.OPENAI_MODEL;
const messages = [{ role: "user", content: "hi" }];
const tools = [{ type: "function", function: { name: "add", parameters: { type: "object" } } }];

const models = [];
for await (const card of client.models.list()) models.push(card.id);

const plain = await client.chat.completions.create({ model, messages, logprobs: true, n: 2, seed: 1, stop: ["#"] });
const streamed = await client.chat.completions.stream({ model, messages, tools }).finalChatCompletion();
const text = await client.completions.create({ model, prompt: "hi" });

const errors = {};
for (const [name, call] of Object.entries({
  key: () => new OpenAI({ apiKey: "wrong", maxRetries: 0 }).models.list(),
  model: () => client.chat.completions.create({ model: "other", messages }),
  temperature: () => client.chat.completions.create({ model, messages, temperature: -1 }),
})) {
  try {
    await call();
  } catch (error) {
    errors[name] = [error.constructor.name, error.status];
  }
}

console.log(
  JSON.stringify({
    models,
    contents: plain.choices.map((choice) => choice.message.content),
    logprobs: plain.choices[0].logprobs.content.map((token) => token.logprob),
    call: streamed.choices[0].message.tool_calls[0].function,
    finish: streamed.choices[0].finish_reason,
    text: text.choices[0].text,
    errors,
  }),
);
