"""Pipeline schedules and their bubbles: GPipe, 1F1B, interleaved, and decoding; formulas, and a simulation that
counts. Built in chapter 20.

A pipeline of p stages works on m micro-batches. A stage is idle while the pipeline fills and drains: its bubble.

    forward only, p = 3, m = 4          each row is a stage, each column a slot of time
        0 1 2 3 . .
        . 0 1 2 3 .                     a third of all slots is bubble: (p - 1) / (m + p - 1)
        . . 0 1 2 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FORWARD, BACKWARD = "F", "B"
POLICIES = ("forward", "gpipe", "1f1b", "interleaved")


@dataclass(frozen=True, order=True)
class Task:
    """One micro-batch in one stage. `stage` counts over all chunks: device d holds the stages d, d + p, d + 2p ..."""

    kind: str
    micro_batch: int
    stage: int


@dataclass(frozen=True)
class Timeline:
    """When each task ran on which device. Times in the unit of the durations."""

    num_devices: int
    runs: tuple[tuple[int, Task, float, float], ...]  # device, task, start, end

    @property
    def length(self) -> float:
        return max((end for *_, end in self.runs), default=0.0)

    @property
    def busy(self) -> float:
        """The time in which a device works, summed over all devices."""
        return sum(end - start for _, _, start, end in self.runs)

    @property
    def bubble(self) -> float:
        """The share of all devices' time in which they are idle."""
        return 1 - self.busy / (self.num_devices * self.length)

    @property
    def most_in_flight(self) -> int:
        """The most micro-batches that a device holds at once between a forward and its backward pass, per chunk."""
        most = 0
        for device in range(self.num_devices):
            held = 0
            for _, task, *_ in sorted((run for run in self.runs if run[0] == device), key=lambda run: run[2]):
                held += 1 if task.kind == FORWARD else -1
                most = max(most, held)
        return most


def bubble_fraction(num_stages: int, num_micro_batches: int, policy: str = "forward", num_chunks: int = 1) -> float:
    """The share of time that is bubble, by formula.

    GPipe (Huang et al., 2019) and 1F1B (Narayanan et al., 2019) have the same bubble and differ in memory; with v
    chunks on each device (Narayanan et al., 2021) a slot of filling and draining is v times as short.
    """
    _check(num_stages, num_micro_batches, policy, num_chunks)
    idle = (num_stages - 1) / num_chunks
    return idle / (num_micro_batches + idle)


def decode_busy(num_stages: int, num_micro_batches: int) -> float:
    """The share of time in which a stage works while decoding: a micro-batch's next token enters the pipeline only
    when its last one has left."""
    return min(1.0, num_micro_batches / num_stages)


def orders(num_stages: int, num_micro_batches: int, policy: str, num_chunks: int = 1) -> list[list[Task]]:
    """What each device does, in order. Raises ValueError for sizes that the policy does not serve."""
    _check(num_stages, num_micro_batches, policy, num_chunks)
    everything = []
    for device in range(num_stages):
        steps = range(num_micro_batches * num_chunks)
        forwards = [_chunked(FORWARD, step, device, num_stages, num_chunks) for step in steps]
        backwards = [_chunked(BACKWARD, step, device, num_stages, num_chunks) for step in steps]
        if policy == "forward":
            everything.append(forwards)
            continue
        ahead = {
            "gpipe": len(forwards),
            "1f1b": num_stages - 1 - device,
            "interleaved": 2 * (num_stages - 1 - device) + (num_chunks - 1) * num_stages,
        }[policy]
        ahead = min(ahead, len(forwards))
        # Some forwards first, then one forward and one backward in turns, then the backwards that are left.
        pairs = [task for pair in zip(forwards[ahead:], backwards) for task in pair]
        everything.append(forwards[:ahead] + pairs + backwards[len(forwards) - ahead :])
    return everything


def simulate(plan: Sequence[Sequence[Task]], durations: dict[str, float], *, hop: float = 0.0) -> Timeline:
    """Run a plan: each device does its tasks in order, each as soon as what it needs is there.

    durations: of a task of each kind; hop: the time that a result takes to another device.
    Raises ValueError where the plan can never go on.
    """
    num_devices, ends, free = len(plan), {}, [0.0] * len(plan)
    last_stage = max((task.stage for tasks in plan for task in tasks), default=0)
    waiting, runs = [list(reversed(tasks)) for tasks in plan], []
    while any(waiting):
        progress = False
        for device, tasks in enumerate(waiting):
            while tasks and all(need in ends for need in _needs(tasks[-1], last_stage)):
                task = tasks.pop()
                ready = [ends[need] + hop * (need.stage != task.stage) for need in _needs(task, last_stage)]
                start = max([free[device], *ready])
                ends[task] = free[device] = start + durations[task.kind]
                runs.append((device, task, start, free[device]))
                progress = True
        if not progress:
            stuck = ", ".join(f"device {device} at {tasks[-1]}" for device, tasks in enumerate(waiting) if tasks)
            raise ValueError(f"the plan can never go on: {stuck} waits for a task that comes later, or never")
    return Timeline(num_devices, tuple(runs))


def timeline(
    num_stages: int,
    num_micro_batches: int,
    policy: str = "forward",
    *,
    num_chunks: int = 1,
    backward: float = 2.0,
    hop: float = 0.0,
) -> Timeline:
    """A policy, simulated; a forward pass through a whole stage takes 1, a backward pass `backward`."""
    durations = {FORWARD: 1.0 / num_chunks, BACKWARD: backward / num_chunks}
    return simulate(orders(num_stages, num_micro_batches, policy, num_chunks), durations, hop=hop)


def decode_timeline(num_stages: int, num_micro_batches: int, num_tokens: int) -> Timeline:
    """Decoding: every micro-batch makes `num_tokens` tokens, one after the other; a stage and a token take 1."""
    ready, free, runs = [0.0] * num_micro_batches, [0.0] * num_stages, []
    for token in range(num_tokens):
        for micro_batch in range(num_micro_batches):
            moment = ready[micro_batch]
            for stage in range(num_stages):
                start = max(moment, free[stage])
                moment = free[stage] = start + 1.0
                runs.append((stage, Task(FORWARD, micro_batch + token * num_micro_batches, stage), start, moment))
            ready[micro_batch] = moment
    return Timeline(num_stages, tuple(runs))


def _needs(task: Task, last_stage: int) -> list[Task]:
    if task.kind == FORWARD:
        return [Task(FORWARD, task.micro_batch, task.stage - 1)] if task.stage else []
    own = Task(FORWARD, task.micro_batch, task.stage)
    return [own] if task.stage == last_stage else [own, Task(BACKWARD, task.micro_batch, task.stage + 1)]


def _chunked(kind: str, step: int, device: int, num_stages: int, num_chunks: int) -> Task:
    """Task number `step` of a device: p micro-batches through its first chunk, then the same through the next one."""
    group, place = divmod(step, num_stages * num_chunks)
    chunk, micro_batch = divmod(place, num_stages)
    if num_chunks == 1:
        return Task(kind, step, device)
    chunk = chunk if kind == FORWARD else num_chunks - 1 - chunk
    return Task(kind, group * num_stages + micro_batch, chunk * num_stages + device)


def _check(num_stages: int, num_micro_batches: int, policy: str, num_chunks: int) -> None:
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: one of {', '.join(POLICIES)}")
    if min(num_stages, num_micro_batches, num_chunks) < 1:
        raise ValueError(
            f"num_stages={num_stages}, num_micro_batches={num_micro_batches}, num_chunks={num_chunks}: "
            "each must be at least 1"
        )
    if num_chunks > 1 and policy != "interleaved":
        raise ValueError(f"num_chunks={num_chunks}: only the policy 'interleaved' has more than one chunk a device")
    if num_chunks > 1 and num_micro_batches % num_stages:
        raise ValueError(
            f"num_micro_batches={num_micro_batches} is no multiple of num_stages={num_stages}, which the interleaved "
            "schedule needs"
        )
