// The server's API: requests with the key, answers as they come, errors in the server's own words.
// Built in chapter 23.

const KEPT = "minillm-key";
let key = sessionStorage.getItem(KEPT) ?? "";
let asking = null; // the question for the key, one for all requests that need it

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const mine = new Map(); // what this page calls its requests, by the tag that the engine room shows

// A request_id that the engine room recognises.
export function newId(what) {
  const tag = crypto.getRandomValues(new Uint32Array(1))[0].toString(16).padStart(8, "0");
  mine.set(tag, what);
  return `page-${tag}`;
}

// Sends a request; asks for a key where the server wants one. Raises ApiError.
export async function send(path, { body, signal } = {}) {
  for (;;) {
    const used = key;
    const headers = used ? { Authorization: `Bearer ${used}` } : {};
    if (body) headers["Content-Type"] = "application/json";
    let answer;
    try {
      answer = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "The server cannot be reached.");
    }
    if (answer.ok) return answer;
    const said = await answer.json().catch(() => null);
    const message = said?.error?.message ?? `The server answered ${answer.status}.`;
    if (answer.status !== 401) throw new ApiError(answer.status, message);
    if (key === used && !(await askForKey(message))) throw new ApiError(401, message);
  }
}

// The JSON of each server-sent event of an answer, until "[DONE]" or the end.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", isDone = false;
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : new ApiError(0, "The connection was lost.");
      });
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ")) continue; // a comment
        const data = part.slice(6);
        isDone ||= data === "[DONE]"; // the end is read too: then the connection is used again
        if (!isDone) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export function askForKey(why) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog"), field = document.getElementById("key");
    document.getElementById("key-said").textContent = why;
    document.getElementById("key-button").hidden = false;
    field.value = "";
    dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      asking = null;
      const given = dialog.returnValue === "ok" && field.value.trim() !== "";
      if (given) {
        key = field.value.trim();
        sessionStorage.removeItem(KEPT);
        if (document.getElementById("key-keep").checked) sessionStorage.setItem(KEPT, key);
      }
      field.value = "";
      if (given) document.dispatchEvent(new Event("key"));
      resolve(given);
    }, { once: true });
    dialog.showModal();
    field.focus();
  });
  return asking;
}
