// The table of requests. Its rows stay while their numbers change, so that focus and reading place stay too.
// Built in chapter 23.

import { make } from "./dom.js";
import { KINDS } from "./draw.js";

const MOST_ROWS = 40;
const REASONS = { stop: "finished", length: "finished at its limit", abort: "aborted", error: "failed" };
const rows = new Map(); // by number

// `present` as Tape.present tells; `selected` is the step that is looked at, null the newest.
export function showRows(body, present, tape, selected, picked, onPick) {
  const wanted = present.slice(0, MOST_ROWS).map(({ number, one, did }) => {
    if (!rows.has(number)) rows.set(number, newRow(number, one, onPick));
    const row = rows.get(number), step = selected ?? tape.last;
    update(row, one, did, step, selected == null ? one.told.output : tape.outputAt(one, step));
    row.button.setAttribute("aria-pressed", String(number === picked));
    return row.element;
  });
  const more = present.length - wanted.length;
  if (more > 0) wanted.push(make("tr", {}, make("td", { colSpan: 6, textContent: `and ${more} more` })));
  for (const old of [...body.children]) if (!wanted.includes(old)) old.remove();
  let at = body.firstElementChild;
  for (const row of wanted) {
    if (row === at) at = at.nextElementSibling;
    else body.insertBefore(row, at);
  }
  for (const number of rows.keys()) if (!tape.requests.has(number)) rows.delete(number);
}

function newRow(number, one, onPick) {
  const { told } = one;
  const button = make("button", { type: "button", className: "plain", textContent: one.name, title: "Frame its blocks" });
  button.addEventListener("click", () => onPick(number));
  const more = [told.sample && `sample ${told.sample + 1}`, told.adapter].filter(Boolean).join(" · ");
  const cells = ["", "", "number", "number", "number"].map((className) => make("td", { className }));
  const output = document.createTextNode(""), bar = make("progress", { max: told.max_tokens, ariaLabel: "tokens of the answer" });
  cells[3].append(output, " ", bar);
  const head = make("th", { scope: "row" }, button, make("span", { className: "quiet", textContent: more }));
  return { button, cells, output, bar, element: make("tr", {}, head, ...cells) };
}

function update({ cells, output, bar, element }, one, did, step, tokens) {
  const { told } = one, state = stateOf(one, did, step);
  element.className = `is-${state.split(" ")[0]}`;
  set(cells[0], state);
  set(cells[1], did ? stepText(did) : "–");
  cells[1].className = did ? `did-${KINDS[did.kind]}` : "";
  set(cells[2], promptText(told));
  if (output.data !== String(tokens)) output.data = tokens;
  bar.value = tokens;
  set(cells[4], told.state === "running" ? String(told.blocks) : "–");
}

function set(cell, text) {
  if (cell.textContent !== text) cell.textContent = text;
}

function stateOf(one, did, step) {
  if (one.ended != null && one.ended <= step) return REASONS[one.told.reason] ?? one.told.reason;
  return did ? "running" : one.runs.length && one.runs[0].first <= step ? "preempted" : "waiting";
}

function promptText({ prompt, cached, computed, state }) {
  const done = state === "running" && computed < prompt ? `${computed} of ${prompt}` : `${prompt}`;
  return cached ? `${done} (${cached} cached)` : done;
}

function stepText({ kind, tokens, drafted, accepted }) {
  const number = (value) => (Number.isInteger(value) ? value : value.toFixed(1));
  if (kind !== "d") return `${KINDS[kind]} ${number(tokens)}`;
  return drafted ? `decode 1 + ${number(drafted)} drafts, ${number(accepted)} accepted` : `decode ${number(tokens)}`;
}
