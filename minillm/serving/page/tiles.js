// The numbers above the tape. Built in chapter 23.

import { $, duration, make } from "./dom.js";

const WINDOW = 1.0; // seconds, of which a rate is the mean
const TILES = [
  ["speed", "Tokens a second"],
  ["running", "Running"],
  ["waiting", "Waiting"],
  ["each", "Tokens a step"],
  ["step", "A step takes"],
  ["ttft", "TTFT, median"],
  ["blocks", "Blocks owned"],
  ["hits", "Prefix hits"],
  ["drafts", "Drafts accepted"],
  ["preempted", "Preemptions"],
];

let past = []; // {time, totals}, the newest last
let timer = null;

export function startTiles() {
  $("tiles").append(...TILES.map(([name, title]) =>
    make("div", { className: `tile ${name}` }, make("dt", { textContent: title }), make("dd", { id: `tile-${name}`, textContent: "–" }))));
}

// The numbers of a record; null: there is no connection.
export function showTiles(record) {
  clearTimeout(timer);
  if (!record) {
    past = [];
    for (const [name] of TILES) set(name, "–");
    return;
  }
  if (past.length && record.totals.steps < past.at(-1).totals.steps) past = [];
  past.push({ time: record.time, totals: record.totals });
  while (past.length > 2 && past.at(-2).time < record.time - WINDOW) past.shift();
  show(record);
  timer = setTimeout(() => speed(0), 1000 * WINDOW); // nothing more came: nothing happens
}

function show(record) {
  const first = past[0], { totals } = record;
  const seconds = record.time - first.time, steps = totals.steps - first.totals.steps;
  if (seconds > 0) speed((totals.generated - first.totals.generated) / seconds);
  if (steps) set("each", ((totals.tokens - first.totals.tokens) / steps).toFixed(1));
  if (record.step_seconds) set("step", duration(record.step_seconds), `${Math.round(1 / record.step_seconds).toLocaleString("en")} a second`);
  set("running", record.running, `of ${record.max_num_seqs}`);
  set("waiting", record.waiting);
  set("ttft", record.ttft ? duration(record.ttft.p50) : "–", record.ttft && `last ${duration(record.ttft.last)}`);
  const owned = record.blocks.owned + record.blocks.shared;
  set("blocks", share(owned, record.blocks.total), `${owned.toLocaleString("en")} of ${record.blocks.total.toLocaleString("en")}`);
  set("hits", totals.prompt ? share(totals.cached, totals.prompt) : "–", totals.prompt && `${totals.cached.toLocaleString("en")} tokens`);
  set("drafts", totals.drafted ? share(totals.accepted, totals.drafted) : "none", totals.drafted && `${totals.accepted.toLocaleString("en")} of ${totals.drafted.toLocaleString("en")}`);
  set("preempted", totals.preempted);
}

const speed = (value) => set("speed", Math.round(value).toLocaleString("en"), "generated");

function share(part, whole) {
  const percent = (100 * part) / whole;
  return `${percent && percent < 10 ? percent.toFixed(1) : Math.round(percent)}%`;
}

function set(name, value, more = "") {
  const tile = $(`tile-${name}`);
  tile.replaceChildren(String(value));
  if (more) tile.append(" ", make("small", { textContent: more }));
}
