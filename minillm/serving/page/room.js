// The engine room: the records of the server, as numbers, a tape, a table and a map. Built in chapter 23.

import { ApiError, events, send } from "./api.js";
import { $, count, make } from "./dom.js";
import { LETTERS, colours, drawBlock, drawBlocks, drawEnd, drawRun, drawTape, sized } from "./draw.js";
import { showRows } from "./rows.js";
import { Tape } from "./tape.js";
import { showTiles, startTiles } from "./tiles.js";

const ZOOM = [2, 3, 4, 6, 9, 14, 22]; // pixels a step
const SLOW = 160; // ms a step, in slow motion
const still = matchMedia("(prefers-reduced-motion: reduce)");

const tape = new Tape();
let record = null; // the newest
let ink = null;
let zoom = 2;
let right = 0; // the step at the right edge, on its way to the newest
let selected = null; // the step that is looked at; null: the newest
let picked = null; // the number of the request whose blocks are marked
let playing = null;
let drawing = false;

export function startRoom() {
  startTiles();
  const repaint = () => {
    ink = colours();
    legends();
    draw();
    if (record) showBlocks();
  };
  document.addEventListener("colours", repaint);
  new ResizeObserver(repaint).observe($("tape"));
  $("zoom-in").addEventListener("click", () => setZoom(zoom + 1));
  $("zoom-out").addEventListener("click", () => setZoom(zoom - 1));
  $("live").addEventListener("click", () => look(null));
  $("play").addEventListener("click", () => (playing ? pause() : play()));
  $("step").addEventListener("input", () => {
    pause();
    look($("step").valueAsNumber);
  });
  $("tape").addEventListener("click", (event) => {
    pause();
    const step = Math.floor(right - ($("tape").clientWidth - event.offsetX) / ZOOM[zoom]);
    look(Math.min(tape.last, Math.max(tape.first, step)));
  });
  connect();
}

// Reads records for as long as the page is looked at.
async function connect() {
  for (let wait = 500; ; wait = Math.min(8000, wait * 2)) {
    while (document.hidden) await next(document, "visibilitychange");
    const leaving = new AbortController();
    const leave = () => document.hidden && leaving.abort();
    document.addEventListener("visibilitychange", leave);
    const move = () => leaving.abort();
    document.addEventListener("model", move);
    let said = "Not connected";
    try {
      const model = $("model").value; // of a repository each model has an engine of its own
      const answer = await send(`/engine_room${model && `?model=${encodeURIComponent(model)}`}`, { signal: leaving.signal });
      tape.clear();
      record = null;
      look(null);
      for await (const told of events(answer)) {
        if (told.closed) {
          said = told.closed === "draining" ? "The server is shutting down" : "The engine room has closed";
          break;
        }
        if (!record) opened(told);
        wait = 500;
        take(told);
      }
    } catch (error) {
      if (error.name === "AbortError") continue;
      said = error.message;
      if (error instanceof ApiError && error.status === 401) {
        state(said, false);
        await next(document, "key");
        continue;
      }
    } finally {
      document.removeEventListener("visibilitychange", leave);
      document.removeEventListener("model", move);
    }
    state(said, false);
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

const next = (target, name) => new Promise((resolve) => target.addEventListener(name, resolve, { once: true }));

function state(text, isLive) {
  $("room-state").textContent = `${isLive ? "●" : "○"} ${text}`;
  $("room-state").classList.toggle("live", isLive);
  if (!isLive) showTiles(null);
}

function opened(told) {
  document.dispatchEvent(new Event("opened"));
  state("Live", true);
  $("tape-limits").textContent = "A row is a place in the batch, a column is one step of the engine: " +
    `up to ${count(told.max_num_seqs, "request")} and ${count(told.max_num_batched_tokens, "token")}.`;
}

function take(told) {
  record = told;
  tape.add(told);
  showTiles(told);
  $("step").min = tape.first;
  $("step").max = tape.last;
  if (selected == null) $("step").value = tape.last;
  else if (selected < tape.first) look(tape.first);
  showTable();
  showBlocks();
  draw();
  announce();
}

function look(step) {
  selected = step;
  if (step == null) pause();
  $("live").setAttribute("aria-pressed", String(step == null));
  $("step").value = step ?? tape.last;
  showTable();
  draw();
}

function pick(number) {
  picked = picked === number ? null : number;
  showTable();
  showBlocks();
  draw();
}

function play() {
  if (!tape.last) return;
  if (selected == null || selected >= tape.last) look(begin());
  $("play").setAttribute("aria-pressed", "true");
  playing = setInterval(() => (selected < tape.last ? look(selected + 1) : pause()), SLOW);
}

// Where the newest stretch of work began: the first step of the oldest request that is in sight.
function begin() {
  const sight = tape.last - $("tape").clientWidth / ZOOM[zoom];
  return Math.max(tape.first, Math.round(sight));
}

function pause() {
  clearInterval(playing);
  playing = null;
  $("play").setAttribute("aria-pressed", "false");
}

function setZoom(level) {
  zoom = Math.min(ZOOM.length - 1, Math.max(0, level));
  $("zoom-in").disabled = zoom === ZOOM.length - 1;
  $("zoom-out").disabled = zoom === 0;
  draw();
}

// Draws in the next frame, and goes on until the newest step has come into sight.
function draw() {
  if (drawing || !ink) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    const width = $("tape").clientWidth / ZOOM[zoom];
    let goal = Math.max(tape.last + 1, width);
    if (selected != null) goal = Math.min(goal, Math.max(width, Math.round(selected + width / 3)));
    const far = goal - right;
    right = still.matches || Math.abs(far) < 0.5 || Math.abs(far) > 3 * width ? goal : right + far * 0.25;
    drawTape($("tape"), ink, tape, { right, perStep: ZOOM[zoom], selected, picked });
    if (right !== goal) draw();
  });
}

function showTable() {
  const step = selected ?? tape.last, present = tape.present(step);
  const running = present.filter(({ did }) => did).length;
  const tokens = present.reduce((sum, { did }) => sum + (did?.tokens ?? 0), 0);
  $("step-said").textContent = tape.last ? `step ${step.toLocaleString("en")}` : "";
  const said = tape.last
    ? `Step ${step.toLocaleString("en")}: ${count(running, "request")} in the batch, ${count(Math.round(tokens), "token")}`
    : "No step yet. Send a message, or some load.";
  $("table-said").textContent = said;
  $("tape-said").textContent = said;
  showRows($("rows"), present, tape, selected, picked, pick);
}

function showBlocks() {
  const { blocks } = record;
  const left = drawBlocks($("blocks"), ink, blocks, record.requests.find((one) => one.number === picked)?.table);
  for (const name of Object.values(LETTERS)) {
    $("blocks-legend").querySelector(`.${name} b`).textContent = blocks[name].toLocaleString("en");
  }
  const parts = [`${count(blocks.total, "block")} of ${record.block_size} tokens`];
  if (picked != null) parts.push(`those of request ${picked} are framed`);
  if (blocks.blocks_each > 1) parts.push(`each square stands for ${blocks.blocks_each} of them and shows the busiest`);
  if (left) parts.push(`${count(left, "free one")} at the end not drawn`);
  $("blocks-said").textContent = `${parts.join("; ")}.`;
}

function legends() {
  const item = (name, paint, ...more) => {
    const canvas = make("canvas", { ariaHidden: "true" });
    canvas.style.width = "22px";
    paint(sized(canvas, 22, 14));
    return make("li", { className: name }, canvas, `${name} `, ...more);
  };
  $("tape-legend").replaceChildren(
    item("prefill", (c) => drawRun(c, ink, "p", 2, 0, 18, 14)),
    item("decode", (c) => drawRun(c, ink, "d", 0, 0, 22, 14)),
    item("recomputed", (c) => drawRun(c, ink, "r", 2, 0, 18, 14)),
    item("accepted drafts", (c) => (drawRun(c, ink, "d", 0, 0, 22, 14), (c.fillStyle = ink.accepted), c.fillRect(0, 0, 22, 3))),
    item("preempted", (c) => drawEnd(c, ink.recompute, true, 17, 0, 14)),
    item("finished", (c) => drawEnd(c, ink.ink, false, 13, 0, 14)),
    item("aborted", (c) => drawEnd(c, ink.ink, true, 17, 0, 14)));
  $("blocks-legend").replaceChildren(...Object.entries(LETTERS).map(([letter, name]) =>
    item(name, (c) => drawBlock(c, ink, letter, 4, 0, 14), make("b", { className: "number" }))));
}

let announced = 0, before = -1;

// For screen readers: how many run, when that has changed, at most every five seconds.
function announce() {
  const now = performance.now();
  if (record.running === before || now - announced < 5000) return;
  announced = now;
  before = record.running;
  $("room-status").textContent = `${count(record.running, "request")} running, ${record.waiting} waiting.`;
}
