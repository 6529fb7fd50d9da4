// Sessions of OpenAI's and Vercel's JavaScript clients with a server: `node client_session.mjs URL`. Answers to plain chats
// are those of `client_sessions.py`.
import assert from "node:assert";

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const baseURL = process.argv[2];
const model = "tiny";
const hello = "Hello, wörld!";
const Corner = z.object({ side: z.enum(["left", "right"]) });
const Shape = z.object({ corner: Corner, other: Corner.nullable(), width: z.number().int() });

const client = new OpenAI({ baseURL, apiKey: "any", maxRetries: 0 });
const messages = [{ role: "user", content: "Hello" }];
const options = { model, temperature: 1, max_tokens: 300 };
assert.equal((await client.chat.completions.create({ ...options, messages })).choices[0].message.content, hello);
let text = "";
for await (const chunk of await client.chat.completions.create({ ...options, messages, stream: true })) {
  text += chunk.choices[0]?.delta.content ?? "";
}
assert.equal(text, hello);
const chat = await client.chat.completions.parse({
  ...options,
  messages,
  response_format: zodResponseFormat(Shape, "shape"),
});
Shape.parse(chat.choices[0].message.parsed);
const response = await client.responses.parse({
  model,
  input: "x",
  max_output_tokens: 300,
  text: { format: zodTextFormat(Shape, "shape") },
});
Shape.parse(response.output_parsed);

const tools = {
  area: tool({
    description: "Return the area of a square.",
    inputSchema: z.object({ width: z.number(), unit: z.string() }),
    execute: async ({ width, unit }) => `${width * width} ${unit}²`,
  }),
};
const openai = createOpenAI({ baseURL, apiKey: "any" });
const compatible = createOpenAICompatible({ baseURL, apiKey: "any", name: "server", supportsStructuredOutputs: true });
for (const languageModel of [openai(model), openai.chat(model), compatible(model)]) {
  const given = { model: languageModel, prompt: "Hello", temperature: 1, maxOutputTokens: 300, maxRetries: 0 };
  const called = await generateText({ ...given, tools, stopWhen: stepCountIs(3) });
  assert.equal(called.text, hello);
  assert.deepEqual(called.steps[0].toolResults.map((one) => one.output), ["9 m²"]);
  let streamed = "";
  for await (const part of streamText(given).textStream) streamed += part;
  assert.equal(streamed, hello);
  const { output } = await generateText({ ...given, output: Output.object({ schema: Shape }) });
  Shape.parse(output);
}
