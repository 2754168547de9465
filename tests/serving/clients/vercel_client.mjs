// Vercel's `ai` with @ai-sdk/openai, whose default is responses; and its chats.
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const openai = createOpenAI({ baseURL: `${process.env.SERVER}/v1`, apiKey: "any" });
for (const model of [openai("talker"), openai.chat("talker")]) {
  const asked = { model, prompt: "Hello", maxRetries: 0 };
  const whole = await generateText({ ...asked, maxOutputTokens: 8 });
  assert(whole.text.length > 0);
  const stream = streamText({ ...asked, maxOutputTokens: 8 });
  let text = "";
  for await (const piece of stream.textStream) text += piece;
  assert(text.length > 0);
  const zones = [];
  const clock = tool({
    description: "The time in a zone.",
    inputSchema: z.object({ zone: z.enum(["utc", "cet"]) }),
    execute: async ({ zone }) => zones.push(zone) && "Five.",
  });
  const loop = await generateText({
    ...asked,
    maxOutputTokens: 60,
    tools: { clock },
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
    stopWhen: stepCountIs(2),
  });
  assert.equal(zones.length, 1);
  assert.equal(loop.steps.length, 2);
}
