// The chat: a conversation that streams, with one answer or two side by side. Built in chapter 23.

import { events, newId, send } from "./api.js";
import { $, count, duration, make } from "./dom.js";

const SUGGESTIONS = ["Tell me a story about a fox.", "What does a cow say?", "What is 12 plus 30?", "Name three fruits."];
const EXAMPLE = { type: "object", properties: { name: { type: "string" }, age: { type: "integer" } },
  required: ["name", "age"], additionalProperties: false };

const turns = []; // {text, answers, chosen, element}: what was asked, and the answers to it
let stopping = null; // AbortController of the answers under way

export function startChat() {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    ask($("message").value.trim());
  });
  $("message").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    ask($("message").value.trim());
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && stop());
  $("stop").addEventListener("click", stop);
  $("clear").addEventListener("click", clear);
  $("suggestions").append(...SUGGESTIONS.map((text) => {
    const button = make("button", { type: "button", textContent: text });
    button.addEventListener("click", () => ask(text));
    return make("li", {}, button);
  }));
  for (const id of ["temperature", "temperature-2"]) {
    $(id).addEventListener("input", () => ($(id).nextElementSibling.textContent = Number($(id).value).toFixed(1)));
  }
  $("schema").addEventListener("input", readSchema);
  $("schema-example").addEventListener("click", () => {
    $("schema").value = JSON.stringify(EXAMPLE, null, 2);
    readSchema();
  });
  $("settings").addEventListener("change", summarize);
  $("answers").addEventListener("change", () => ($("second").hidden = $("answers").value !== "settings"));
  summarize();
}

function summarize() {
  const parts = [`temperature ${$("temperature").value}`, `${$("max-tokens").value} tokens`];
  if ($("answers").value !== "one") parts.push("two answers");
  if ($("schema").value.trim()) parts.push("JSON");
  $("settings-summary").textContent = parts.join(" · ");
}

// The schema, null where there is none; undefined, and the reason below the field, where it is none.
function readSchema() {
  const field = $("schema"), text = field.value.trim();
  let schema = null, problem = "";
  if (text) {
    try {
      schema = JSON.parse(text);
      if (typeof schema !== "object" || schema === null || Array.isArray(schema)) problem = "A schema is a JSON object.";
    } catch (error) {
      problem = `This is not JSON yet: ${error.message}`;
    }
  }
  field.setAttribute("aria-invalid", String(Boolean(problem)));
  $("schema-said").textContent = problem || (text ? "✓ The answer will follow this schema." : "");
  summarize();
  return problem ? undefined : schema;
}

function clear() {
  stop();
  turns.length = 0;
  $("turns").replaceChildren($("welcome"));
  $("welcome").hidden = false;
  $("message").focus();
}

function stop() {
  stopping?.abort();
}

function messages(before) {
  return before.flatMap((turn) => {
    const text = turn.answers[turn.chosen]?.text;
    return [{ role: "user", content: turn.text }, ...(text ? [{ role: "assistant", content: text }] : [])];
  });
}

// The requests that answer the next message: of one answer, of two samples of one request, or of two settings.
function plans(schema) {
  const body = (suffix) => ({
    model: $(`model${suffix}`).value || undefined,
    temperature: Number($(`temperature${suffix}`).value),
    max_tokens: $("max-tokens").valueAsNumber || undefined,
    stream: true,
    return_token_ids: true, // tells how many tokens each answer has
    ...(schema && { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } }),
  });
  const label = (plan) => [plan.model, `temperature ${plan.temperature}`].filter(Boolean).join(" · ");
  const kind = $("answers").value, first = body("");
  if (kind === "samples") {
    return [{ body: { ...first, n: 2 }, labels: [`Sample 1 · ${label(first)}`, `Sample 2 · ${label(first)}`] }];
  }
  const all = kind === "settings" ? [first, body("-2")] : [first];
  return all.map((one) => ({ body: one, labels: [label(one)] }));
}

async function ask(text) {
  if (!text || stopping) return;
  const schema = readSchema();
  if (schema === undefined) {
    $("settings").open = true;
    $("schema").focus();
    return;
  }
  $("message").value = "";
  $("welcome").hidden = true;
  const turn = { text, answers: [], chosen: 0, element: make("section", { className: "turn" }) };
  turn.element.append(make("p", { className: "asked" }, make("span", { className: "unseen", textContent: "You: " }), text));
  $("turns").append(turn.element);
  turns.push(turn);
  await answer(turn, schema);
}

async function retry(turn) {
  if (stopping) return;
  const schema = readSchema();
  if (schema === undefined) return;
  for (const later of turns.splice(turns.indexOf(turn) + 1)) later.element.remove();
  turn.element.querySelector(".answers").remove();
  $("message").focus();
  await answer(turn, schema);
}

async function answer(turn, schema) {
  stopping = new AbortController();
  const { signal } = stopping, all = plans(schema);
  $("send").disabled = true;
  $("stop").disabled = false;
  const history = [...messages(turns.slice(0, turns.indexOf(turn))), { role: "user", content: turn.text }];
  turn.chosen = 0;
  turn.answers = all.flatMap((plan) => plan.labels.map((label) => newAnswer(turn, label, Boolean(schema))));
  turn.element.append(make("div", { className: "answers" }, ...turn.answers.map((one) => one.element)));
  scrollDown(true);
  let place = 0;
  await Promise.all(all.map((plan) => {
    const own = turn.answers.slice(place, (place += plan.labels.length));
    return stream({ ...plan.body, messages: history, request_id: newId("chat") }, own, signal);
  }));
  stopping = null;
  $("send").disabled = false;
  $("stop").disabled = true;
  for (const one of turn.answers) finish(turn, one);
  $("chat-status").textContent = turn.answers.map((one) => `${one.outcome}: ${one.text}`).join(" Other answer: ");
}

// Streams one request into its answers.
async function stream(body, own, signal) {
  const began = performance.now();
  try {
    for await (const chunk of events(await send("/v1/chat/completions", { body, signal }))) {
      if (chunk.error) throw new Error(chunk.error.message);
      for (const choice of chunk.choices) take(own[choice.index], choice, began);
    }
  } catch (error) {
    for (const one of own.filter((one) => !one.reason)) {
      if (error.name === "AbortError") one.reason = "stopped";
      else {
        one.reason = "error";
        one.element.append(make("p", { className: "error", textContent: `⚠ ${error.message}` }));
      }
    }
  }
  for (const one of own) one.reason ||= "abort";
}

function take(one, choice, began) {
  const now = performance.now();
  const text = choice.delta?.content ?? "";
  one.tokens += choice.token_ids?.length ?? 0;
  if (one.tokens && !one.first) one.first = now - began;
  one.took = now - began;
  if (text) {
    one.text += text;
    one.node.appendData(text);
    scrollDown(false);
  }
  if (choice.finish_reason) one.reason = choice.finish_reason;
}

function newAnswer(turn, label, isJson) {
  const node = document.createTextNode("");
  const text = make("p", { className: "text" }, node);
  const element = make("article", { className: "answer working", ariaLabel: `Answer, ${label}` },
    make("p", { className: "label quiet", textContent: label }), text);
  return { text: "", node, element, tokens: 0, first: 0, took: 0, reason: "", isJson, outcome: "" };
}

const OUTCOMES = { stop: "complete", length: "cut at max tokens", stopped: "stopped", abort: "ended by the server",
  error: "failed", tool_calls: "calls a tool" };

// What was measured, and what can be done with an answer.
function finish(turn, one) {
  one.outcome = OUTCOMES[one.reason] ?? one.reason;
  const parts = [one.outcome, count(one.tokens, "token")];
  if (one.first) parts.push(`first after ${duration(one.first / 1000)}`);
  if (one.tokens > 1 && one.took > one.first) {
    parts.push(`${Math.round((1000 * (one.tokens - 1)) / (one.took - one.first)).toLocaleString("en")} tokens/s`);
  }
  if (one.isJson && one.text) parts.push(parses(one.text) ? "✓ valid JSON" : "✗ no complete JSON");
  const button = (name, act) => {
    const made = make("button", { type: "button", className: "plain", textContent: name });
    made.addEventListener("click", () => act(made));
    return made;
  };
  const actions = make("div", { className: "actions start" },
    button("Retry", () => retry(turn)),
    button("Copy", async (made) => {
      await navigator.clipboard?.writeText(one.text).catch(() => {});
      made.textContent = "Copied";
    }));
  if (turn.answers.length > 1) {
    const choose = button(turn.answers[turn.chosen] === one ? "Continues here" : "Continue with this", () => {
      turn.chosen = turn.answers.indexOf(one);
      for (const other of turn.answers) mark(other, other === one);
    });
    one.choose = choose;
    actions.append(choose);
    mark(one, turn.answers[turn.chosen] === one);
  }
  one.element.classList.remove("working");
  one.element.append(make("footer", {}, make("p", { className: "quiet small", textContent: parts.join(" · ") }), actions));
  scrollDown(false);
}

function mark(one, isChosen) {
  one.choose.setAttribute("aria-pressed", String(isChosen));
  one.choose.textContent = isChosen ? "✓ Continues here" : "Continue with this";
  one.element.classList.toggle("chosen", isChosen);
}

function parses(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

// Keeps the end in sight, unless the reader has scrolled up.
function scrollDown(always) {
  const box = $("turns");
  if (always || box.scrollHeight - box.scrollTop - box.clientHeight < 120) box.scrollTop = box.scrollHeight;
}
