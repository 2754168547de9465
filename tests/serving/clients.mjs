// Clients for node: `node clients.mjs CLIENT URL`; see client_scripts.py.
import assert from "node:assert";

const [, , client, url] = process.argv;
const made = { baseURL: `${url}/v1`, apiKey: "any" };

// Vercel's `ai`: whole texts, streams, a loop of tools.
async function useModels(models) {
  const { generateText, stepCountIs, streamText, tool } = await import("ai");
  const { z } = await import("zod");
  for (const model of models) {
    const asked = { model, prompt: "Hello", maxRetries: 0, temperature: 0 };
    const whole = await generateText({ ...asked, maxOutputTokens: 8 });
    assert(whole.text.length > 0);
    const stream = streamText({ ...asked, maxOutputTokens: 8 });
    let text = "";
    for await (const piece of stream.textStream) text += piece;
    assert.equal(text, whole.text);
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
}

const clients = {
  // @ai-sdk/openai, whose default is responses; and its chats.
  async vercel() {
    const { createOpenAI } = await import("@ai-sdk/openai");
    const openai = createOpenAI(made);
    await useModels([openai("talker"), openai.chat("talker")]);
  },

  async vercel_compatible() {
    const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
    await useModels([createOpenAICompatible({ ...made, name: "bitnet_ref" })("talker")]);
  },

  // OpenAI's own: chats, streams, a loop of tools that it runs itself, responses.
  async openai() {
    const { default: OpenAI } = await import("openai");
    const openai = new OpenAI({ ...made, maxRetries: 0 });
    const asked = { model: "talker", messages: [{ role: "user", content: "Hello" }], max_tokens: 8, temperature: 0 };
    const whole = (await openai.chat.completions.create(asked)).choices[0].message.content;
    let text = "";
    for await (const chunk of await openai.chat.completions.create({ ...asked, stream: true })) text += chunk.choices[0]?.delta.content ?? "";
    assert.equal(text, whole);
    const zones = [];
    const parameters = { type: "object", properties: { zone: { enum: ["utc", "cet"] } }, required: ["zone"] };
    const clock = { name: "clock", description: "The time.", parameters, parse: JSON.parse, function: ({ zone }) => zones.push(zone) && "Five." };
    const loop = openai.chat.completions.runTools({ ...asked, max_tokens: 60, tools: [{ type: "function", function: clock }], tool_choice: "required" }, { maxChatCompletions: 2 });
    await loop.done();
    assert(["utc", "cet"].includes(zones[0]));
    const response = await openai.responses.create({ model: "talker", input: "Hello", max_output_tokens: 8, temperature: 0 });
    assert.equal(response.output_text, whole);
    const stream = openai.responses.stream({ model: "talker", input: "Hello", max_output_tokens: 8, temperature: 0 });
    assert.equal((await stream.finalResponse()).output_text, whole);
  },
};

await clients[client]();
