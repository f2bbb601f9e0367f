// The official JavaScript client against a running gateway: node openai_client.mjs BASE_URL MODEL
// Prints one JSON object with what it saw; any failure is an exit code other than 0.
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const seen = {};

seen.models = [];
for await (const each of client.models.list()) seen.models.push(each.id);

const whole = await client.chat.completions.create({ model, messages, max_tokens: 16, temperature: 0 });
seen.whole = whole.choices[0].message.content;
seen.usage = whole.usage.completion_tokens;

seen.streamed = "";
const options = { model, messages, max_tokens: 16, temperature: 0, stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create(options)) {
  seen.streamed += chunk.choices[0]?.delta?.content ?? "";
  if (chunk.usage) seen.streamedUsage = chunk.usage.completion_tokens;
}

const { data, response } = await client.completions.create({ model, prompt: "The capital of France is", max_tokens: 4, temperature: 0 }).withResponse();
seen.completion = data.choices[0].text;
seen.decision = response.headers.get("x-conductor-decision-id");

const leaving = await client.completions.create({ model, prompt: "Once upon a time", max_tokens: 1000, stream: true });
for await (const chunk of leaving) {
  seen.left = chunk.choices[0].text.length >= 0;
  leaving.controller.abort();
}

try {
  await client.chat.completions.create({ model: "no-such-model", messages });
} catch (problem) {
  seen.refused = [problem.constructor.name, problem.status, problem.code, problem.param];
}
console.log(JSON.stringify(seen));
