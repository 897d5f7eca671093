// Calls the server: JSON, and answers as streams of events. Keys stay in this tab.

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// sessionStorage ends with the tab.
export class KeyHolder {
  constructor(name) {
    this.name = name;
  }

  get value() {
    return sessionStorage.getItem(this.name) ?? "";
  }

  set value(key) {
    if (key) sessionStorage.setItem(this.name, key);
    else sessionStorage.removeItem(this.name);
  }
}

export const clientKey = new KeyHolder("foretoken-key");
export const operatorKey = new KeyHolder("foretoken-operator-key");

// Returns an answer with a good status; paths are relative to the page, which
// may be served below a prefix.
async function call(path, {method = "GET", body, key = clientKey, signal} = {}) {
  const headers = {};
  if (key.value) headers.authorization = `Bearer ${key.value}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, {
      method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body), cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer.");
  }
  if (!answer.ok) throw new ApiError(answer.status, await messageOf(answer));
  return answer;
}

async function messageOf(answer) {
  const text = await answer.text();
  let message = text;
  try {
    const parsed = JSON.parse(text);
    message = parsed.error?.message ?? text;
    // After the colon it says in which headers a program shows a key; people have a field for it.
    if (answer.status === 401) message = sentence(message.split(":")[0]);
  } catch {
    // A proxy's page, for one.
    message = text.slice(0, 300);
  }
  const wait = answer.headers.get("retry-after");
  return `${message || answer.statusText}${answer.status === 429 && wait ? ` Try again in ${wait} s.` : ""}`;
}

const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;

export async function getJson(path, options) {
  return (await call(path, options)).json();
}

// Yields the JSON events of a streamed answer; throws an ApiError for an error event.
export async function* streamEvents(path, body, signal) {
  const answer = await call(path, {method: "POST", body, signal});
  const decoder = new TextDecoder();
  const reader = answer.body.getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "The connection broke before the text was complete.");
    }
    rest += decoder.decode(part.value ?? new Uint8Array(), {stream: !part.done});
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      // A comment keeps the connection alive.
      if (!event.startsWith("data: ")) continue;
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      const parsed = JSON.parse(data);
      if (parsed.error) throw new ApiError(answer.status, parsed.error.message);
      yield parsed;
    }
    if (part.done) throw new ApiError(0, "The connection broke before the text was complete.");
  }
}
