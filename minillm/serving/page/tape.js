// Tape: what each request did in each step, as far back as it is remembered. Built in chapter 23.

import { mine } from "./api.js";

const REMEMBERED = 3000; // steps

export class Tape {
  constructor() {
    this.clear();
  }

  clear() {
    this.requests = new Map(); // number -> {name, row, runs, arrived, ended, isCut, told}
    this.first = this.last = 0; // steps
    this.rows = []; // the request that has, or last had, a row
  }

  add(record) {
    if (record.first_step != null) {
      if (!this.first || record.first_step > this.last + 1) this.first = record.first_step; // some were missed
      this.last = record.step;
      this.first = Math.max(this.first, this.last - REMEMBERED);
    }
    for (const told of record.requests) {
      const one = this.requests.get(told.number) ?? { row: null, runs: [], ended: null, isCut: false };
      this.requests.set(told.number, Object.assign(one, { told, arrived: told.arrived, name: nameOf(told) }));
      if (told.ended != null) Object.assign(one, { ended: told.ended, isCut: ["abort", "error"].includes(told.reason) });
    }
    for (const [number, kind, first, steps, tokens, drafted, accepted] of record.runs) {
      const one = this.requests.get(number), last = one.runs.at(-1);
      if (last && last.kind === kind && last.first + last.steps === first) {
        last.steps += steps;
        last.tokens += tokens;
        last.drafted += drafted;
        last.accepted += accepted;
      } else one.runs.push({ kind, first, steps, tokens, drafted, accepted });
    }
    this._place();
    for (const [number, one] of this.requests) {
      if (one.ended != null && one.ended < this.first) this.requests.delete(number);
    }
  }

  // Each request gets the first row that is free when it joins the batch, and leaves it when it ends.
  _place() {
    const joined = [...this.requests.values()].filter((one) => one.row == null && one.runs.length);
    joined.sort((one, other) => one.runs[0].first - other.runs[0].first);
    for (const one of joined) {
      let row = this.rows.findIndex((had) => had.ended != null && had.ended < one.runs[0].first);
      if (row < 0) row = this.rows.length;
      this.rows[row] = one;
      one.row = row;
    }
  }

  between(left, right) {
    return [...this.requests.values()].filter((one) => {
      return one.row != null && one.runs[0].first <= right && (one.ended ?? Infinity) >= left;
    });
  }

  // How many requests run and wait in each of these steps.
  counts(from, to) {
    from = Math.max(from, this.first, 1);
    to = Math.min(to, this.last);
    const found = Array.from({ length: Math.max(0, to - from + 1) }, (_, place) => ({ step: from + place, running: 0, waiting: 0 }));
    const fill = (first, end, what) => {
      for (let step = Math.max(first, from); step < Math.min(end, to + 1); step++) found[step - from][what]++;
    };
    for (const one of this.requests.values()) {
      for (const run of one.runs) if (run.kind !== "x") fill(run.first, run.first + run.steps, "running");
      fill(one.arrived, one.runs[0]?.first ?? (one.ended ?? Infinity), "waiting");
    }
    return found;
  }

  // What a request did in a step: a run, with its tokens in this one; null where it had none.
  at(one, step) {
    const run = one.runs.findLast((run) => run.kind !== "x" && run.first <= step && step < run.first + run.steps);
    return run ? { kind: run.kind, tokens: run.tokens / run.steps, drafted: run.drafted / run.steps, accepted: run.accepted / run.steps } : null;
  }

  // How many tokens its answer had after a step: those of now, less what came later.
  outputAt(one, step) {
    let later = 0;
    for (const run of one.runs) {
      if (run.kind !== "d") continue;
      const steps = Math.min(run.steps, Math.max(0, run.first + run.steps - 1 - step));
      later += (steps * (run.steps + run.accepted)) / run.steps;
    }
    return Math.max(0, one.told.output - Math.round(later));
  }

  // Those that were there in a step, the ones in the batch first.
  present(step) {
    const found = [];
    for (const [number, one] of this.requests) {
      if (one.arrived <= step && (one.ended == null || one.ended >= step)) found.push({ number, one, did: this.at(one, step) });
    }
    return found.sort((a, b) => (a.did ? 0 : 1) - (b.did ? 0 : 1) || (a.one.row ?? 1e9) - (b.one.row ?? 1e9) || a.number - b.number);
  }
}

function nameOf(told) {
  const own = told.tag && mine.get(told.tag);
  return `#${told.number}${own ? ` ${own}` : ""}`;
}
