// Asks the server. An answer is JSON, or numbers as bytes.

const token = secret();

/**
 * The server's secret, of the address that strap serve prints. It leaves the address bar, and stays
 * with this origin for reloads and further tabs. No other port of this machine is this origin.
 */
function secret() {
  const query = new URLSearchParams(location.search);
  const given = query.get("token");
  if (given !== null) {
    query.delete("token");
    history.replaceState(null, "", query.size ? `?${query}` : "/");
  }
  try {
    if (given !== null) localStorage.setItem("token", given);
    return localStorage.getItem("token") ?? "";
  } catch {
    return given ?? ""; // the browser stores nothing
  }
}

async function answer(path, parameters, signal) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  let response;
  try {
    response = await fetch(`/api/${path}?${query}`, { signal, headers: { "X-Strap-Token": token } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Has strap serve ended?");
  }
  if (response.ok) return response;
  const text = await response.text();
  let message = text;
  try {
    message = JSON.parse(text).error;
  } catch {
    // A text without JSON is the message.
  }
  throw new Error(message || `The server answered ${response.status}.`);
}

export async function ask(path, parameters = {}, signal = undefined) {
  return (await answer(path, parameters, signal)).json();
}

/**
 * An answer that may take long. `told` is called with the rows that are done and all rows. The server
 * stops when the request is given up by its signal.
 */
export async function scan(path, parameters, signal, told) {
  const response = await answer(path, parameters, signal);
  if (response.headers.get("content-type").startsWith("application/json")) return response.json();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let begun = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("The server has ended before the answer was complete.");
    const lines = (begun + value).split("\n");
    begun = lines.pop();
    for (const line of lines.map((one) => JSON.parse(one))) {
      if (line.error !== undefined) throw new Error(line.error);
      if (line.found !== undefined) return line.found;
      told(line.done, line.of);
    }
  }
}

/** Numbers: {values: Float32Array, shape: [rows, columns], ...}. */
export async function numbers(path, parameters = {}, signal = undefined) {
  const bytes = await (await answer(path, parameters, signal)).arrayBuffer();
  const length = new DataView(bytes).getUint32(0, true);
  const about = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, length)));
  return { ...about, values: new Float32Array(bytes, 4 + length) };
}
