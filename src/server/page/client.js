// client.js - asks the server: the name of its model, and answers as they are written.

function headers(settings) {
  const h = { "Content-Type": "application/json" };
  if (settings.key) h.Authorization = `Bearer ${settings.key}`;
  return h;
}

// An error that the server explains. status 401: it wants a key.
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function refused(response) {
  let message = `The server answered ${response.status}.`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch { /* not JSON */ }
  const wait = response.headers.get("Retry-After");
  if (response.status === 429 && wait) message += ` Try again in ${wait} s.`;
  return new Refused(response.status, message);
}

// {id, ...} of the model that the server runs.
export async function askModel(settings) {
  const response = await fetch("/v1/models", { headers: headers(settings) });
  if (!response.ok) throw await refused(response);
  return (await response.json()).data[0];
}

function body(settings, messages) {
  const system = settings.system.trim();
  const all = messages.map(({ role, content }) => ({ role, content }));
  if (system) all.unshift({ role: "system", content: system });
  const b = { messages: all, stream: true, stream_options: { include_usage: true } };
  if (settings.temperature !== null) b.temperature = settings.temperature;
  if (settings.topP !== null) b.top_p = settings.topP;
  if (settings.maxTokens !== null) b.max_tokens = settings.maxTokens;
  if (settings.kept) b.still = { kept: true };
  return b;
}

// The data of server-sent events, one after the other.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines)
      if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}

// Calls say.text(part) as text comes. Returns {finish, usage, still}. signal stops it.
export async function askAnswer(settings, messages, say, signal) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST", headers: headers(settings), signal,
    body: JSON.stringify(body(settings, messages)),
  });
  if (!response.ok) throw await refused(response);
  const result = { finish: null, usage: null, still: null };
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return result;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(500, chunk.error.message);
    const choice = chunk.choices?.[0];
    if (choice?.delta?.content) say.text(choice.delta.content);
    if (choice?.finish_reason) result.finish = choice.finish_reason;
    if (chunk.usage) result.usage = chunk.usage;
    if (choice?.still) result.still = choice.still;
  }
  throw new Refused(0, "The connection ended before the answer did.");
}
