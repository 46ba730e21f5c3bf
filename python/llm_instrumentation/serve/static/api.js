// Asks the server. An answer is JSON, or numbers as bytes.

async function answer(path, parameters, signal) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  let response;
  try {
    response = await fetch(`/api/${path}?${query}`, { signal });
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

/** Numbers: {values: Float32Array, shape: [rows, columns], ...}. */
export async function numbers(path, parameters = {}, signal = undefined) {
  const bytes = await (await answer(path, parameters, signal)).arrayBuffer();
  const length = new DataView(bytes).getUint32(0, true);
  const about = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, length)));
  return { ...about, values: new Float32Array(bytes, 4 + length) };
}
