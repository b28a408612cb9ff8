// `openai` of npm.
import OpenAI from "openai";
import { baseURL, maxTokens, modelName as model, prompt, report, requireCity, requireEqual, schema } from "./checks.mjs";

const client = new OpenAI({ baseURL, apiKey: "any", maxRetries: 0 });
const messages = [{ role: "user", content: prompt }];
const tools = [{ type: "function", function: { name: "weather", parameters: schema, strict: true } }];
const short = { model, messages, max_tokens: maxTokens, temperature: 0 };

async function chat() {
  requireEqual((await client.chat.completions.create(short)).usage.completion_tokens, maxTokens);
}

async function stream() {
  let text = "";
  for await (const chunk of await client.chat.completions.create({ ...short, stream: true }))
    text += chunk.choices[0].delta.content ?? "";
  requireEqual(text, (await client.chat.completions.create(short)).choices[0].message.content);
}

async function toolCalls() {
  const made = await client.chat.completions.create({ model, messages, tools, tool_choice: "required" });
  requireEqual(made.choices[0].finish_reason, "tool_calls");
  requireCity(JSON.parse(made.choices[0].message.tool_calls[0].function.arguments).city);
}

async function toolCallsStreamed() {
  const runner = client.chat.completions.stream({ model, messages, tools, tool_choice: "required" });
  const made = (await runner.finalChatCompletion()).choices[0];
  requireEqual(made.finish_reason, "tool_calls");
  requireCity(JSON.parse(made.message.tool_calls[0].function.arguments).city);
}

async function structured() {
  const response_format = { type: "json_schema", json_schema: { name: "weather", schema, strict: true } };
  const made = await client.chat.completions.create({ model, messages, response_format });
  requireCity(JSON.parse(made.choices[0].message.content).city);
}

async function responses() {
  const flat = [{ type: "function", name: "weather", parameters: schema, strict: true }];
  const asked = { model, input: prompt, tools: flat, tool_choice: "required" };
  const final = await client.responses.stream(asked).finalResponse();
  requireCity(JSON.parse(final.output.find((item) => item.type === "function_call").arguments).city);
}

await report("openai", [chat, stream, toolCalls, toolCallsStreamed, structured, responses]);
