// Load: stories through the API, to see the batch fill. Built in chapter 23.
//
// A browser opens six connections to a server, so each of them carries several prompts.

import { events, newId, send } from "./api.js";
import { $, count } from "./dom.js";

const OPENING = "Once upon a time, in a faraway valley, there lived a ";
const HEROES = ["gentle fox", "clever girl", "brave mouse", "kind boy", "shy owl", "curious cat", "careful badger", "quiet frog"];
const NAMES = ["Lily", "Omar", "Ida", "Max", "Zoe", "Emil", "Tilda", "Paul"];
const CONNECTIONS = 2;

let stopping = null;
let keeps = false;
let sent = 0, done = 0;

export function startLoad() {
  const label = () => {
    const stories = count(Number($("load-count").value), "story", "stories");
    $("load-send").textContent = `Send ${stories}`;
    if (!keeps) $("load-keep").textContent = `Keep ${$("load-count").value} running`;
  };
  $("load-count").addEventListener("change", label);
  $("load-send").addEventListener("click", () => run(false));
  $("load-keep").addEventListener("click", () => (keeps ? (keeps = false, show()) : run(true)));
  $("load-stop").addEventListener("click", () => {
    keeps = false;
    stopping?.abort();
  });
  label();
}

async function run(keep) {
  if (stopping) return;
  stopping = new AbortController();
  keeps = keep;
  sent = done = 0;
  const number = Number($("load-count").value), { signal } = stopping;
  const shares = Array.from({ length: CONNECTIONS }, (_, place) => Math.floor((number + place) / CONNECTIONS));
  const problems = new Set();
  show();
  await Promise.all(shares.filter(Boolean).map(async (share, place) => {
    do {
      try {
        await stories(share, place, signal);
      } catch (error) {
        if (error.name !== "AbortError") problems.add(error.message);
        return;
      }
    } while (keeps && !signal.aborted);
  }));
  const wasStopped = signal.aborted;
  stopping = null;
  keeps = false;
  show([...problems].map((problem) => `⚠ ${problem}`).join(" ") || (wasStopped ? "Stopped." : ""));
}

// One request with several prompts; the engine treats each as a request of its own.
async function stories(number, place, signal) {
  const prompt = Array.from({ length: number }, () => {
    const pick = (words) => words[Math.floor(Math.random() * words.length)];
    return `${OPENING}${pick(HEROES)} named ${pick(NAMES)}.`;
  });
  const body = { model: $("model").value || undefined, prompt, temperature: 0.8, max_tokens: 160 + 80 * place,
    stream: true, request_id: newId("load") };
  sent += number;
  show();
  for await (const chunk of events(await send("/v1/completions", { body, signal }))) {
    if (chunk.error) throw new Error(chunk.error.message);
    const ended = chunk.choices.filter((choice) => choice.finish_reason).length;
    if (ended) {
      done += ended;
      show();
    }
  }
}

function show(last = "") {
  $("load-send").disabled = Boolean(stopping);
  $("load-stop").disabled = !stopping;
  $("load-keep").disabled = Boolean(stopping) && !keeps;
  $("load-keep").setAttribute("aria-pressed", String(keeps));
  if (!stopping) $("load-keep").textContent = `Keep ${$("load-count").value} running`;
  $("load-said").textContent = last || (sent ? `${done} of ${count(sent, "story", "stories")} told.` : "");
}
