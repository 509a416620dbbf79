"""The ladder as something to watch (`minillm tour`) and as a measurement (`minillm bench ladder`).
Built in chapter 00."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..device import resolve_device
from ..model.checkpoint import load_config, resolve_model
from . import measure
from .ladder import RUNGS, Recording, Rung, TimedText, prompt_ids, record

PROMPT = "Once upon a time"
BAR_WIDTH = 18
PER_SECOND = 12  # frames


def weight_bytes(model: str) -> int:
    return load_config(resolve_model(model)).num_parameters() * 4  # float32


def watch(
    model: str = "tinyworld",
    device: str = "auto",
    max_tokens: int = 160,
    seconds: float = 12.0,
    rungs: list[Rung] | None = None,
    console=None,
    on_frame: Callable[[object], None] = lambda shown: None,
) -> list[Recording]:
    """Climb the ladder once, live: a bar for each rung and the text as it is generated. Returns what was recorded.

    A rung that needs longer than `seconds` is cut off there; its rate is that of the tokens it had generated.
    `on_frame` gets everything that is shown (rich renderables). Raises RuntimeError if two rungs generate
    different tokens.
    """
    from rich.console import Console
    from rich.live import Live

    console, rungs, where = console or Console(), rungs or RUNGS, resolve_device(device)
    bandwidth = measure.measure_read_bandwidth(where, measure.megabytes_to_read(weight_bytes(model), where))
    tokens_per_second = bandwidth / weight_bytes(model)
    console.print(
        f"{measure.hardware(where)['name']}: memory delivers {bandwidth / 1e9:.1f} GB/s, "
        f"so at most {tokens_per_second:,.0f} tokens/s, one sequence, float32.\n"
    )
    prompt, done = prompt_ids(model, PROMPT), []
    with Live(console=console, refresh_per_second=PER_SECOND) as live:
        drawn = 0.0  # seconds, of the clock: drawing takes longer than a token, so not every token is drawn

        def update(said: list[TimedText] | tuple[TimedText, ...] = ()) -> None:
            nonlocal drawn
            if said and time.monotonic() - drawn < 1 / PER_SECOND:
                return
            drawn = time.monotonic()
            shown = table(rungs, done, said, tokens_per_second)
            live.update(shown)
            on_frame(shown)

        for rung in rungs:
            update()
            stream = rung.open(model, device)
            record("warm-up", stream, prompt, 2)  # kernels are chosen and memory is taken on the first call
            said: list[TimedText] = []

            def show(piece: TimedText, said: list[TimedText] = said) -> None:
                said.append(piece)
                update(said)

            done.append(
                record(
                    rung.name, stream, prompt, max_tokens, seconds=seconds, on_text=show, num_streams=rung.num_streams
                )
            )
        update()
    check_same([run for run, rung in zip(done, rungs) if rung.exact])
    return done


def table(rungs: list[Rung], done: list[Recording], said, limit_tokens_per_second: float):
    """The ladder so far; `said` is what the rung now running has said. A rich renderable."""
    from rich import box
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    running = Recording(rungs[len(done)].name, tuple(said), False, rungs[len(done)].num_streams) if said else None
    climbed = [*done, running] if running else done
    fastest = max((r.tokens_per_second for r in climbed), default=1.0)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading, justify in (
        ("rung", "left"),
        ("ch.", "left"),
        ("tokens/s", "right"),
        ("", "left"),
        ("× first", "right"),
        ("of limit", "right"),
    ):
        table.add_column(heading, justify=justify, no_wrap=True, min_width=0 if heading else BAR_WIDTH)
    for rung, run in zip(rungs, [*climbed, *[None] * len(rungs)]):
        if run is None:
            table.add_row(rung.name, rung.chapter, *[""] * 4, style="dim")
            continue
        rate = run.tokens_per_second
        table.add_row(
            rung.name,
            rung.chapter,
            f"{rate:,.0f}",
            "█" * max(1, round(BAR_WIDTH * rate / fastest)),
            f"{rate / climbed[0].tokens_per_second:.1f}",
            f"{rate / limit_tokens_per_second:.1%}",
        )
    text = climbed[-1].text if climbed else ""
    return Group(table, f"[bold]{PROMPT}[/bold]{escape(text)}")


def check_same(recordings: list[Recording]) -> None:
    """Every rung that computes with the same weights says the same tokens, as far as it got."""
    longest = max(recordings, key=lambda r: len(r.token_ids))
    for run in recordings:
        if run.token_ids != longest.token_ids[: len(run.token_ids)]:
            raise RuntimeError(f"rungs disagree: {run.rung!r} said {run.text!r}, {longest.rung!r} {longest.text!r}")


def bench(
    model: str = "tinyworld",
    device: str = "auto",
    max_tokens: int = 128,
    repeats: int = measure.MIN_REPEATS,
    command: str = "minillm bench ladder",
    rungs: list[Rung] | None = None,
    on_run: Callable[[str], None] = lambda name: None,
) -> dict:
    """The ladder measured: rungs in turns, `repeats` times, outputs checked first; a result for `measure.save`."""
    where, rungs = resolve_device(device), rungs or RUNGS
    ceilings = measure.measure_ceilings(where, megabytes=measure.megabytes_to_read(weight_bytes(model), where))
    tokens_per_second = ceilings.bandwidth / weight_bytes(model)
    prompt, streams = prompt_ids(model, PROMPT), {rung.name: rung.open(model, device) for rung in rungs}

    def run(name: str) -> Recording:
        return record(name, streams[name], prompt, max_tokens, ignore_eos=True)

    told = {rung.name: rung.num_streams * max_tokens for rung in rungs}

    check_same([run(rung.name) for rung in rungs if rung.exact])
    samples = measure.interleave(
        {name: lambda name=name: run(name).said[-1].seconds for name in streams}, repeats, device=where, on_run=on_run
    )
    first = samples[rungs[0].name].median
    figures = {
        name: {
            "tokens_per_second": told[name] / taken.median,
            "spread": taken.spread,
            "times_first": told[name] / max_tokens * first / taken.median,
            "share_of_limit": told[name] / taken.median / tokens_per_second,
        }
        for name, taken in samples.items()
    }
    workload = {
        "model": model,
        "prompt": PROMPT,
        "output_tokens": max_tokens,
        "dtype": "float32",
        "repeats": repeats,
        "limit_tokens_per_second": tokens_per_second,
        "outputs_checked": True,
    }
    return measure.result("ladder", command, where, workload, ceilings, figures, samples)


def bench_table(measured: dict):
    """The limit in the title, then each rung with its share of it (a rich table)."""
    from rich.table import Table

    limit_rate = measured["workload"]["limit_tokens_per_second"]
    table = Table(
        "rung",
        "tokens/s",
        "± half range",
        "× first",
        "of limit",
        title=f"{measured['hardware']['name']}: at most {limit_rate:,.0f} tokens/s",
    )
    for name, f in measured["figures"].items():
        table.add_row(
            name,
            f"{f['tokens_per_second']:,.1f}",
            f"{f['spread'] / 2:.0%}",
            f"{f['times_first']:.1f}",
            f"{f['share_of_limit']:.0%}",
        )
    return table
