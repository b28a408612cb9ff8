// `ai` with `@ai-sdk/openai-compatible`.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, streamText, tool } from "ai";
import { baseURL, maxTokens, modelName, prompt, report, requireCity, requireEqual, schema } from "./checks.mjs";

const provider = createOpenAICompatible({
  name: "paceline", baseURL, apiKey: "any", supportsStructuredOutputs: true, includeUsage: true,
});
const model = provider.chatModel(modelName);
const short = { model, prompt, maxOutputTokens: maxTokens, temperature: 0, maxRetries: 0 };
const tools = { weather: tool({ description: "Of a city.", inputSchema: jsonSchema(schema) }) };
const calling = { model, prompt, tools, toolChoice: "required", maxRetries: 0, temperature: 0 };

async function chat() {
  requireEqual((await generateText(short)).usage.outputTokens, maxTokens);
}

async function stream() {
  const told = streamText(short);
  let text = "";
  for await (const piece of told.textStream) text += piece;
  requireEqual(text, (await generateText(short)).text);
  requireEqual((await told.usage).outputTokens, maxTokens);
}

async function toolCalls() {
  const made = await generateText(calling);
  requireEqual(made.finishReason, "tool-calls");
  requireCity(made.toolCalls[0].input.city);
}

async function toolCallsStreamed() {
  const told = streamText(calling);
  await told.consumeStream();
  requireEqual(await told.finishReason, "tool-calls");
  requireCity((await told.toolCalls)[0].input.city);
}

async function structured() {
  const output = Output.object({ schema: jsonSchema(schema) });
  requireCity((await generateText({ model, prompt, output, maxRetries: 0, temperature: 0 })).output.city);
}

await report("ai", [chat, stream, toolCalls, toolCallsStreamed, structured]);
