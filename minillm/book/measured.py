"""What has been measured, from the results that the package carries: tables, with the command that repeats each.
Built in chapter 92."""

from __future__ import annotations

import html
import json
from importlib import import_module
from pathlib import Path

from minillm.book.chips import Html, table

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"
# What shows the results of a benchmark as tables, by the beginning of a file's name.
TABLES = {
    "bits": "few_bits.tables", "compare": "compare.report.tables", "decode": "decode.tables",
    "fleet": "replicas_report.tables", "fleet-sim": "fleet.run.tables", "host": "host.tables",
    "kernels": "kernels.tables",
    "kv": "kv_cache.tables", "ladder": "tour.bench_table", "lora": "lora.tables", "moe": "moe.tables",
    "predictions": "predictions.table", "prefix": "serving.prefix_table", "quality": "quality.tables",
    "scheduler": "serving.scheduler_table", "server": "server.report.tables", "simulator": "serving.simulator_table",
    "speculation": "speculation.tables", "step": "step.tables", "structured": "structured.tables",
    "tasks": "tasks.tables", "throughput": "throughput.tables",
}  # fmt: skip


def result(name: str) -> dict:
    """The result called `name`, or the only one whose name begins with it, such as "decode"; LookupError otherwise."""
    found = sorted({*RESULTS.glob(f"{name}.json"), *RESULTS.glob(f"{name}-*.json")})
    if len(found) != 1:
        names = ", ".join(path.stem for path in found) or "none"
        raise LookupError(f"{name!r}: {len(found)} results begin like this ({names}); name one of them")
    return json.loads(found[0].read_text(encoding="utf-8"))


def report(name: str, *, folded: bool = False) -> Html:
    """Where, when and with which command a result was measured, and the tables that its benchmark prints.

    folded: hide the tables, of a result that has many, behind a line to click on.
    """
    measured = result(name)
    tables = tables_of(name, measured)
    source, shown = _source(measured), []
    for one in tables:
        title = f"{one.title}" if one.title else ""
        rows = list(zip(*(list(column.cells) for column in one.columns), strict=True))
        body = table([[f"{cell}" for cell in row] for row in rows], [f"{column.header}" for column in one.columns])
        head = f'<div style="font:600 13px sans-serif;margin:10px 0 2px">{html.escape(title)}</div>' if title else ""
        shown.append(Html(f"{head}{body.html}", f"{title}\n{body.text}".lstrip()))
    body = "".join(one.html for one in shown)
    if folded:
        body = f"<details><summary>{len(shown)} tables</summary>{body}</details>"
    return Html(source.html + body, "\n\n".join(one.text for one in (source, *shown)))


def tables_of(name: str, measured: dict) -> list:
    """The tables that the benchmark of the result `name` prints (rich)."""
    prefix = max((key for key in TABLES if name.startswith(key)), key=len, default=None)
    if prefix is None:
        raise LookupError(f"{name!r}: no benchmark shows it as tables; there are {', '.join(TABLES)}")
    module, _, function = TABLES[prefix].rpartition(".")
    made = getattr(import_module(f"minillm.bench.{module}"), function)(measured)
    return made if isinstance(made, list) else [made]


def _source(measured: dict) -> Html:
    versions = measured["versions"]
    told = (
        f"{measured['command']}\n{measured['hardware']['name']} · {measured['date'][:10]} · "
        f"torch {versions['torch']}, transformers {versions['transformers']}"
    )
    command, where = told.split("\n")
    style = "font:13px sans-serif;color:#57606a;margin:4px 0"
    return Html(f'<div style="{style}"><code>{html.escape(command)}</code><br>{html.escape(where)}</div>', told)
