"""The engine room as a picture: the records that the page receives, drawn once for reading. Built in chapter 23."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from matplotlib.colors import ListedColormap

from minillm.book.colab import on_colab
from minillm.book.style import Picture, canvas, colour, picture

Record = Mapping[str, Any]
KINDS = {"p": ("other", "prompt"), "d": ("ours", "decode"), "r": ("wasted", "computed again")}
STATES = {"f": ("background", "free"), "c": ("sky", "cached"), "o": ("ours", "owned"), "s": ("good", "shared")}


def engine_room(records: Sequence[Record], most_rows: int = 48) -> Picture:
    """The batch step by step, the block map at its fullest, and the queue over time, from an engine room's records."""
    if not records:
        raise ValueError("records is empty: watch the engine room while requests are under way")
    fig, axes = canvas(width=10, height=4.6, rows=2, cols=2, width_ratios=(2.6, 1), height_ratios=(2.4, 1))
    runs = [run for record in records for run in record["runs"]]
    fullest = max(records, key=lambda record: record["blocks"]["owned"] + record["blocks"]["shared"])
    _draw_batch(axes[0][0], runs, most_rows)
    _draw_blocks(axes[0][1], fullest["blocks"])
    _draw_queue(axes[1][0], records)
    _draw_speed(axes[1][1], records)
    totals, blocks = records[-1]["totals"], fullest["blocks"]
    return picture(
        fig,
        f"The engine room over {totals['steps']} steps. The batch step by step: {totals['prefill']} prompt tokens and "
        f"{totals['decoded']} decoded tokens of {len({run[0] for run in runs})} requests; {totals['cached']} prompt "
        f"tokens came from the prefix cache. At the fullest moment {blocks['owned']} blocks are owned, "
        f"{blocks['shared']} shared and {blocks['cached']} cached, of {blocks['total']}. "
        f"At most {max(record['waiting'] for record in records)} requests wait.",
    )


def block_states(run_lengths: str) -> str:
    """ "o3f" is "ooof"."""
    return "".join(letter * int(count or 1) for letter, count in re.findall(r"([a-z])(\d*)", run_lengths))


def _draw_batch(ax, runs: Sequence[Sequence[Any]], most_rows: int) -> None:
    numbers = {number: row for row, number in enumerate(dict.fromkeys(run[0] for run in runs))}
    for number, kind, first, steps, *_ in runs:
        if kind in KINDS and numbers[number] < most_rows:
            ax.barh(numbers[number], steps, left=first, height=0.8, color=colour(KINDS[kind][0]))
        elif kind == "x" and numbers[number] < most_rows:
            ax.plot(first, numbers[number], "x", color=colour("wasted"), ms=5)
    for kind in dict.fromkeys(run[1] for run in runs if run[1] in KINDS):
        role, label = KINDS[kind]
        ax.barh(0, 0, color=colour(role), label=label)
    rows = list(numbers)[:most_rows]
    ax.set_yticks(range(0, len(rows), max(1, len(rows) // 8)), rows[:: max(1, len(rows) // 8)])
    ax.set(xlabel="step", ylabel="request", title="The batch, step by step", ylim=(len(rows) - 0.4, -0.6))
    ax.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3)


def _draw_blocks(ax, blocks: Mapping[str, Any]) -> None:
    letters = block_states(blocks["map"])
    total = -(-blocks["total"] // blocks["blocks_each"])
    columns = max(1, round(total**0.5))
    codes = [list(STATES).index(letter) for letter in letters.ljust(total, "f")]
    grid = np.full(-(-total // columns) * columns, np.nan)
    grid[:total] = codes
    colours = ListedColormap([colour(role) for role, _ in STATES.values()])
    ax.pcolormesh(
        grid.reshape(-1, columns), cmap=colours, vmin=-0.5, vmax=3.5, edgecolors=colour("paper"), linewidth=0.6
    )
    ax.set(title="The blocks, at their fullest", xticks=[], yticks=[], aspect="equal")
    ax.invert_yaxis()
    ax.grid(visible=False)
    for spine in ax.spines.values():
        spine.set_visible(False)
    for role, label in STATES.values():
        ax.plot([], [], "s", color=colour(role), label=f"{blocks[label]} {label}")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=2, columnspacing=1, handletextpad=0.2)


def _draw_queue(ax, records: Sequence[Record]) -> None:
    steps = [record["step"] for record in records]
    ax.fill_between(steps, [record["running"] for record in records], step="post", color=colour("ours"), alpha=0.35)
    ax.step(steps, [r["running"] for r in records], where="post", color=colour("ours"), label="in the batch")
    ax.step(steps, [r["waiting"] for r in records], where="post", color=colour("other"), label="in the queue")
    ax.set(xlabel="step", ylabel="requests", ylim=(0, None)), ax.legend()


def _draw_speed(ax, records: Sequence[Record]) -> None:
    moments = [record["time"] - records[0]["time"] for record in records]
    made = [record["totals"]["generated"] for record in records]
    gaps = [
        (later, (after - before) / (later - sooner))
        for sooner, later, before, after in zip(moments, moments[1:], made, made[1:])
        if later > sooner
    ]
    ax.plot([moment for moment, _ in gaps], [rate for _, rate in gaps], "-", color=colour("ours"))
    ax.set(xlabel="time (s)", ylabel="tokens/s", ylim=(0, None))


@asynccontextmanager
async def watched(url: str) -> AsyncIterator[list[dict[str, Any]]]:
    """Collects the records of a server's engine room while the block runs: `async with watched(server.url) as records`.

    Raises OSError where the server does not answer, ValueError where it has no page.
    """
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=2**22)
    writer.write(f"GET /engine_room HTTP/1.1\r\nHost: {address.netloc}\r\n\r\n".encode())
    status = (await reader.readline()).split(maxsplit=2)[1]
    if status != b"200":
        writer.close()
        raise ValueError(f"{url}/engine_room answers {status.decode()}; is the server started with its page?")
    records: list[dict[str, Any]] = []

    async def listen() -> None:
        async for line in reader:
            if line.startswith(b"data: {"):
                record = json.loads(line[6:])
                if "step" in record:
                    records.append(record)

    listening = asyncio.ensure_future(listen())
    try:
        while not records and not listening.done():
            await asyncio.sleep(0.01)
        yield records
        await asyncio.sleep(0.3)  # the last record
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        writer.close()


def open_page(server: Any) -> None:
    """The link to a server's page; on Colab through Colab's proxy."""
    from IPython.display import HTML, display

    url = f"{server.url}/"
    if on_colab():
        from google.colab.output import eval_js

        url = eval_js(f"google.colab.kernel.proxyPort({urlsplit(server.url).port})")
    display(HTML(f'The page, as long as this notebook runs: <a href="{url}" target="_blank">{url}</a>'))
