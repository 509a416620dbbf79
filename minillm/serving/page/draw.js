// What is drawn: the batch as a tape of steps, and the map of the blocks. Built in chapter 23.
//
// Every kind has a colour and a shape of its own: the colours are those of the book, told apart under every common kind
// of colour blindness, and the shapes without any colour.

const NAMES = ["ink", "quiet", "line", "edge", "paper", "decode", "on-decode", "prefill", "recompute", "accepted", "shared", "cached", "owned"];
export const KINDS = {
  p: "prefill",
  d: "decode",
  r: "recompute",
};
export const LETTERS = { o: "owned", s: "shared", c: "cached", f: "free" };

// The colours of the page as they are now.
export function colours() {
  const probe = document.createElement("span");
  document.body.append(probe);
  const found = {};
  for (const name of NAMES) {
    probe.style.color = `var(--${name})`;
    found[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  return found;
}

// A canvas of this size in CSS pixels, sharp on dense screens; returns its context.
export function sized(canvas, width, height) {
  const scale = devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

// Diagonal lines inside a rectangle; both ways where it is crossed.
function hatch(context, x, y, w, h, colour, crossed) {
  context.save();
  context.beginPath();
  context.rect(x, y, w, h);
  context.clip();
  context.strokeStyle = colour;
  context.lineWidth = 1.4;
  context.beginPath();
  for (let at = -h; at < w + h; at += 4) {
    context.moveTo(x + at, y + h);
    context.lineTo(x + at + h, y);
    if (crossed) {
      context.moveTo(x + at, y);
      context.lineTo(x + at + h, y + h);
    }
  }
  context.stroke();
  context.restore();
}

// A stretch of steps of one kind: prefill hatched and high, recomputed crossed, decode solid and lower.
export function drawRun(context, ink, kind, x, y, w, h) {
  if (kind === "d") {
    context.fillStyle = ink.decode;
    context.fillRect(x, y + h * 0.18, w, h * 0.64);
    return;
  }
  const colour = kind === "r" ? ink.recompute : ink.prefill;
  context.globalAlpha = 0.3;
  context.fillStyle = colour;
  context.fillRect(x, y, w, h);
  context.globalAlpha = 1;
  hatch(context, x, y, w, h, colour, kind === "r");
  context.strokeStyle = colour;
  context.lineWidth = 1;
  if (w > 2) context.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1);
}

// How a stretch ends: a bar where the text was complete, a cross where it was preempted or aborted.
export function drawEnd(context, colour, isCross, x, y, h) {
  if (!isCross) {
    context.fillStyle = colour;
    context.fillRect(x - 3, y, 3, h);
    return;
  }
  const r = Math.min(5, h / 2 - 0.5), cx = x - r, cy = y + h / 2;
  context.strokeStyle = colour;
  context.lineWidth = 2;
  context.beginPath();
  context.moveTo(cx - r, cy - r);
  context.lineTo(cx + r, cy + r);
  context.moveTo(cx + r, cy - r);
  context.lineTo(cx - r, cy + r);
  context.stroke();
}

// One block: owned solid, shared solid with a hole, cached a diagonal, free an outline.
export function drawBlock(context, ink, letter, x, y, size) {
  const inner = size - 1;
  if (letter === "o" || letter === "s") {
    context.fillStyle = letter === "o" ? ink.owned : ink.shared;
    context.fillRect(x, y, inner, inner);
    if (letter === "s") {
      context.fillStyle = ink.paper;
      const hole = Math.max(1.5, inner * 0.36);
      context.fillRect(x + (inner - hole) / 2, y + (inner - hole) / 2, hole, hole);
    }
    return;
  }
  context.lineWidth = 1;
  context.strokeStyle = letter === "c" ? ink.cached : ink.edge;
  if (letter === "c") context.globalAlpha = 0.7;
  context.strokeRect(x + 0.5, y + 0.5, inner - 1, inner - 1);
  if (letter === "c") {
    context.globalAlpha = 0.22;
    context.fillStyle = ink.cached;
    context.fillRect(x, y, inner, inner);
    context.globalAlpha = 0.7;
    context.beginPath();
    context.moveTo(x, y + inner);
    context.lineTo(x + inner, y);
    context.stroke();
    context.globalAlpha = 1;
  }
}

// "o3f" is ["o", "o", "o", "f"].
export function statesOf(map) {
  return [...map.matchAll(/([a-z])(\d*)/g)].flatMap(([, letter, times]) => Array(Number(times || 1)).fill(letter));
}

// "3-5,9" is the numbers 3, 4, 5 and 9.
function numbersOf(ranges) {
  return ranges.split(",").flatMap((range) => {
    const [first, last] = range.split("-").map(Number);
    return Array.from({ length: (last ?? first) - first + 1 }, (_, place) => first + place);
  });
}

// The map, with the blocks of one request framed; returns how many are left out behind it, all of them free.
export function drawBlocks(canvas, ink, blocks, table) {
  const width = canvas.clientWidth, states = statesOf(blocks.map);
  const least = Math.min(256, Math.ceil(blocks.total / blocks.blocks_each));
  const number = Math.max(states.length, least);
  const size = number <= 320 ? 14 : number <= 800 ? 10 : number <= 2000 ? 8 : 6;
  const columns = Math.max(1, Math.floor(width / size)), rows = Math.ceil(number / columns);
  const drawn = Math.min(rows * columns, Math.max(number, Math.ceil(blocks.total / blocks.blocks_each)));
  const context = sized(canvas, width, rows * size);
  for (let place = 0; place < drawn; place++) {
    drawBlock(context, ink, states[place] ?? "f", (place % columns) * size, Math.floor(place / columns) * size, size);
  }
  context.strokeStyle = ink.ink;
  context.lineWidth = 2;
  for (const block of table ? numbersOf(table) : []) {
    const place = Math.floor((block - 1) / blocks.blocks_each);
    context.strokeRect((place % columns) * size, Math.floor(place / columns) * size, size - 1, size - 1);
  }
  return Math.max(0, blocks.total - drawn * blocks.blocks_each);
}

// The tape: above, how many run and wait in each step; below, one row for each place in the batch.
export function drawTape(canvas, ink, tape, { right, perStep, selected, picked }) {
  const width = canvas.clientWidth, chart = 46;
  const left = right - width / perStep, x = (step) => (step - left) * perStep;
  const visible = tape.between(left, right);
  const rows = Math.max(8, ...visible.map((one) => one.row + 1));
  const pitch = rows <= 8 ? 22 : rows <= 16 ? 15 : rows <= 32 ? 9 : 5, h = pitch - (pitch > 8 ? 3 : 1);
  const height = Math.max(chart + 10 + rows * pitch, Math.min(canvas.clientHeight, 340)); // it grows, and stays
  const context = sized(canvas, width, height);
  drawChart(context, ink, tape.counts(Math.floor(left), Math.ceil(right)), x, perStep, chart, width);
  context.strokeStyle = ink.line;
  context.lineWidth = 1;
  for (let row = 0; row < rows; row++) {
    const y = chart + 10 + row * pitch + h / 2;
    context.beginPath();
    context.moveTo(0, Math.round(y) + 0.5);
    context.lineTo(width, Math.round(y) + 0.5);
    context.stroke();
  }
  for (const one of visible) {
    const y = chart + 10 + one.row * pitch;
    for (const run of one.runs) {
      const [from, to] = [x(run.first), x(run.first + run.steps)];
      if (to < 0 || from > width) continue;
      if (run.kind === "x") {
        drawEnd(context, ink.recompute, true, to, y, h);
        continue;
      }
      drawRun(context, ink, run.kind, from, y, Math.max(1, to - from - (run.kind === "d" ? 0 : 1)), h);
      if (run.kind === "d") detail(context, ink, run, x, y, h, perStep);
    }
    if (one.ended != null) drawEnd(context, ink.ink, one.isCut, x(one.ended + 1), y, h);
    label(context, ink, one, x, y, h);
    if (one.told.number === picked) {
      context.strokeStyle = ink.ink;
      context.lineWidth = 1.5;
      const from = x(one.runs[0].first);
      context.strokeRect(from, y - 1, x((one.ended ?? tape.last) + 1) - from, h + 2);
    }
  }
  if (!tape.last) {
    context.fillStyle = ink.quiet;
    context.font = "13px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillText("No step yet: send a message, or some load.", 8, chart + 10 + 1.5 * pitch);
  }
  if (selected != null) {
    context.strokeStyle = ink.ink;
    context.lineWidth = 1.5;
    context.strokeRect(x(selected) - 1, 1, Math.max(perStep, 3) + 1, height - 2);
  }
}

// Steps are told apart where there is room; accepted draft tokens stand on top.
function detail(context, ink, run, x, y, h, perStep) {
  if (run.accepted) {
    context.fillStyle = ink.accepted;
    context.fillRect(x(run.first), y, run.steps * perStep, Math.max(2, h * 0.18));
  }
  if (perStep < 4) return;
  context.fillStyle = ink.paper;
  for (let step = run.first + 1; step <= run.first + run.steps; step++) context.fillRect(x(step) - 1, y, 1, h);
}

function label(context, ink, one, x, y, h) {
  if (h < 9) return;
  const run = one.runs.findLast((run) => run.kind === "d");
  if (!run) return;
  const text = one.name;
  const size = Math.min(11, h - 2);
  context.font = `600 ${size}px system-ui, sans-serif`;
  const from = Math.max(4, x(run.first) + 4), room = x(run.first + run.steps) - from;
  const wide = context.measureText(text).width;
  if (room < wide + 8) return;
  context.fillStyle = ink.decode;
  const tall = Math.max(h * 0.64, Math.min(h, size + 2));
  context.fillRect(from - 2, y + (h - tall) / 2, wide + 6, tall);
  context.fillStyle = ink["on-decode"];
  context.textBaseline = "middle";
  context.fillText(text, from + 1, y + h / 2 + 0.5);
}

function drawChart(context, ink, counts, x, perStep, height, width) {
  const most = Math.max(4, ...counts.map((one) => one.running + one.waiting)), unit = (height - 12) / most;
  context.strokeStyle = ink.line;
  context.beginPath();
  context.moveTo(0, height + 0.5);
  context.lineTo(width, height + 0.5);
  context.stroke();
  for (const { step, running, waiting } of counts) {
    const w = Math.max(1, perStep - (perStep >= 4 ? 1 : 0));
    if (running) {
      context.fillStyle = ink.decode;
      context.fillRect(x(step), height - running * unit, w, running * unit);
    }
    if (waiting) hatch(context, x(step), height - (running + waiting) * unit, w, waiting * unit, ink.quiet, false);
  }
  context.fillStyle = ink.quiet;
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "top";
  context.fillText(`requests in a step, up to ${most}`, 2, 0);
}
