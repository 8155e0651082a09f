// Talks to the server that delivered this page, and to nothing else.

export class ApiError extends Error {}

async function problem(response) {
  try {
    return (await response.json()).error || response.statusText;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

export function query(values) {
  const params = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    if (value !== null && value !== undefined && value !== "") params.set(name, value);
  }
  const text = params.toString();
  return text ? `?${text}` : "";
}

export async function get(path, values = {}, signal) {
  let response;
  try {
    response = await fetch(`api/${path}${query(values)}`, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The viewer does not answer: is chatmill view still running?");
  }
  if (!response.ok) throw new ApiError(await problem(response));
  return response.json();
}

// One JSON object per line, handed over as they come; ends when `signal` is aborted.
export async function stream(path, values, onLine, signal) {
  const response = await fetch(`api/${path}${query(values)}`, { signal });
  if (!response.ok) throw new ApiError(await problem(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    rest += value || "";
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) if (line) onLine(JSON.parse(line));
    if (done) return;
  }
}
