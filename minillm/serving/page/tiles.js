// The numbers above the tape. Built in chapter 23.

import { $, duration, make } from "./dom.js";

const WINDOW = 1.0; // seconds, of which a rate is the mean
const TILES = [
  ["speed", "Tokens/s"],
  ["running", "Running"],
  ["waiting", "Waiting"],
  ["step", "Step"],
  ["ttft", "TTFT"],
  ["blocks", "Blocks"],
  ["hits", "Prefix hits"],
  ["drafts", "Drafts"],
];

let past = []; // {time, totals}, the newest last
let peak = 0; // tokens a second
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
    peak = 0;
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
  const each = steps && ((totals.tokens - first.totals.tokens) / steps).toFixed(1);
  if (record.step_seconds) set("step", duration(record.step_seconds), `${each} tokens`);
  set("running", number(record.running), `of ${number(record.max_num_seqs)}`);
  set("waiting", number(record.waiting), `${number(totals.preempted)} preempted`);
  set("ttft", record.ttft ? duration(record.ttft.p50) : "–", record.ttft ? `p90 ${duration(record.ttft.p90)}` : "no request yet");
  const owned = record.blocks.owned + record.blocks.shared;
  set("blocks", share(owned, record.blocks.total), `${number(owned)} owned`);
  set("hits", totals.prompt ? share(totals.cached, totals.prompt) : "–", `${number(totals.cached)} tokens`);
  set("drafts", totals.drafted ? share(totals.accepted, totals.drafted) : "–", totals.drafted ? "accepted" : "none made");
}

function speed(value) {
  peak = Math.max(peak, value);
  set("speed", number(Math.round(value)), `peak ${number(Math.round(peak))}`);
}

const number = (value) => value.toLocaleString("en");

function share(part, whole) {
  const percent = (100 * part) / whole;
  return `${percent && percent < 10 ? percent.toFixed(1) : Math.round(percent)}%`;
}

function set(name, value, more = "") {
  const tile = $(`tile-${name}`);
  tile.replaceChildren(String(value));
  if (more) tile.append(" ", make("small", { textContent: more }));
}
