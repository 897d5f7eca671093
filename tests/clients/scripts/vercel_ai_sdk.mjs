// Vercel's AI SDK: text, a stream, a forced tool call, and a typed object.
import assert from "node:assert";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "foretoken",
  baseURL: `${process.env.FORETOKEN_URL}/v1`,
  supportsStructuredOutputs: true,
});
const model = provider(process.env.FORETOKEN_MODEL);
const prompt = "Write a function that adds two numbers.";
const { text } = await generateText({ model, prompt, maxOutputTokens: 40, temperature: 0 });
assert(text.length > 0);

let streamed = "";
for await (const part of streamText({ model, prompt, maxOutputTokens: 40, temperature: 0 }).textStream) {
  streamed += part;
}
assert.equal(streamed, text);

const city = z.enum(["Berlin", "Paris", "Rome"]);
const called = await generateText({
  model,
  prompt,
  maxOutputTokens: 200,
  toolChoice: "required",
  tools: { weather: tool({ description: "Get a forecast.", inputSchema: z.object({ city }) }) },
});
assert(city.safeParse(called.toolCalls[0].input.city).success);

const { object } = await generateObject({ model, prompt, maxOutputTokens: 100, schema: z.object({ city }) });
assert(city.safeParse(object.city).success);
