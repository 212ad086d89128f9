// The official Node client against the server at argv[2]. Prints one JSON object; the Python test judges it.

import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0, timeout: 20_000 });
const model = process.argv[3];
const messages = [{ role: "user", content: "Hi" }];
const tools = [
  { type: "function", function: { name: "get_time", parameters: { type: "object", properties: {} } } },
];

async function streamed(options) {
  const stream = client.chat.completions.stream({ model, messages, ...options });
  let reasoning = "";
  for await (const chunk of stream) {
    reasoning += chunk.choices[0]?.delta?.reasoning_content ?? "";
  }
  return { completion: await stream.finalChatCompletion(), reasoning };
}

async function failure(action) {
  try {
    await action();
    return null;
  } catch (error) {
    return { name: error.constructor.name, status: error.status ?? null, code: error.code ?? null };
  }
}

async function aborted() {
  const stream = await client.chat.completions.create({ model, messages, stream: true });
  for await (const _ of stream) {
    stream.controller.abort();
    break;
  }
  return true;
}

const result = {
  models: (await client.models.list()).data.map((entry) => entry.id),
  whole: await client.chat.completions.create({ model, messages }),
  streamed: await streamed({ stream_options: { include_usage: true } }),
  progress: await streamed({ return_progress: true }),
  tools: await streamed({ tools }),
  notFound: await failure(() => client.chat.completions.create({ model: "other", messages })),
  invalid: await failure(() => client.chat.completions.create({ model, messages, temperature: 9 })),
  tooLong: await failure(() =>
    client.chat.completions.create({ model, messages: [{ role: "user", content: "x ".repeat(6000) }], stream: true }),
  ),
  aborted: await aborted(),
};
console.log(JSON.stringify(result));
