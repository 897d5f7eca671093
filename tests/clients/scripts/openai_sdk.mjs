// The OpenAI SDK for JavaScript: a chat, a stream, a tool call, Responses.
import assert from "node:assert";
import OpenAI from "openai";

const model = process.env.FORETOKEN_MODEL;
const client = new OpenAI({ baseURL: `${process.env.FORETOKEN_URL}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Write a function that adds two numbers." }];
const limits = { max_tokens: 40, temperature: 0 };
const answer = await client.chat.completions.create({ model, messages, ...limits });
const expected = answer.choices[0].message.content;
assert(expected.length > 0);

let streamed = "";
for await (const chunk of await client.chat.completions.create({ model, messages, stream: true, ...limits })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(streamed, expected);

const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Berlin", "Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "get_weather", parameters, strict: true } }];
const call = await client.chat.completions.create({ model, messages, tools, tool_choice: "required", max_tokens: 200 });
const { city } = JSON.parse(call.choices[0].message.tool_calls[0].function.arguments);
assert(["Berlin", "Paris", "Rome"].includes(city));

const response = await client.responses.create({ model, input: messages[0].content, max_output_tokens: 40, temperature: 0 });
assert.equal(response.output_text, expected);
await assert.rejects(client.chat.completions.create({ model: "no-such-model", messages }), OpenAI.NotFoundError);
