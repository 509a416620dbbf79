"""`minillm bench serve`. Built in chapter 24."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .console import Save, command_line, errors_in_one_line, log, progress, show


def add_to(bench: typer.Typer) -> None:
    bench.command("serve")(bench_serve)


def bench_serve(
    model: Annotated[
        str | None,
        typer.Option(help="What to serve, or the name of what --url serves; tinyworld, or the only one there."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="A server with OpenAI's API; by default `minillm serve` is started for the run.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="The key that --url wants.", show_default=False)] = None,
    server_options: Annotated[
        str, typer.Option(metavar="OPTIONS", help="Of the server that is started: '--dtype float32 --max-num-seqs 32'.")
    ] = "",
    concurrency: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Closed loop: so many clients. May be given again: a sweep. 1, 4, 16 by default."),
    ] = None,
    request_rate: Annotated[
        list[float] | None,
        typer.Option(help="Open loop: requests a second, or inf. May be given again: a sweep."),
    ] = None,
    max_concurrency: Annotated[
        int | None, typer.Option(min=1, help="Open loop: requests wait while so many are under way.")
    ] = None,
    burstiness: Annotated[
        float, typer.Option(help="Of the arrivals: 1 is Poisson, below 1 bursts, inf constant gaps.")
    ] = 1.0,
    trace: Annotated[
        Path | None, typer.Option(help="Open loop: a recorded trace, a JSON object a line.", exists=True)
    ] = None,
    speed: Annotated[float, typer.Option(help="Of the trace: 2 sends it twice as fast.")] = 1.0,
    find_rate: Annotated[
        bool,
        typer.Option(
            "--find-rate", help="Search for the largest Poisson rate that holds --slo, 10 s or more at each rate."
        ),
    ] = False,
    slo: Annotated[
        str | None, typer.Option(help="Seconds, such as ttft:0.5,itl:0.05 (itl: a request's longest gap); tpot, e2e.")
    ] = None,
    attainment: Annotated[float, typer.Option(help="Share of the requests that must keep --slo to hold it.")] = 0.9,
    profile: Annotated[str, typer.Option(help="chat, summarize, generate or fixed.")] = "fixed",
    input_len: Annotated[
        str | None, typer.Option(help="Instead of the profile's: N, uniform:LOW-HIGH or lognormal:MEDIAN,SPREAD.")
    ] = None,
    output_len: Annotated[str | None, typer.Option(help="The same for answers.")] = None,
    prefix_len: Annotated[int | None, typer.Option(min=0, help="Tokens of a shared prefix, in whole blocks.")] = None,
    num_prefixes: Annotated[int | None, typer.Option(min=1, help="Different prefixes.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests at each point.")] = 64,
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests before each point, not measured.")] = 4,
    chat: Annotated[bool, typer.Option("--chat", help="/v1/chat/completions instead of /v1/completions.")] = False,
    text: Annotated[bool, typer.Option("--text", help="Prompts as text instead of token ids.")] = False,
    tokenizer: Annotated[
        str | None, typer.Option(help="The model's: a bundled name, a folder or a hub id; as the server tells.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Answers of the planned length; not all servers know.")
    ] = True,
    extra_body: Annotated[str | None, typer.Option(help="JSON, for every request: '{\"temperature\": 1}'.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds until an answer must be complete.")] = 600.0,
    seed: int = 0,
    name: Annotated[str, typer.Option(help="Of the result's file.")] = "serve",
    save: Save = None,
) -> None:
    """Load on a server: latencies, throughput and goodput as its clients see them.

    `minillm bench serve`

    `minillm bench serve --url http://localhost:8000 --request-rate 8 --profile chat --slo ttft:0.5,itl:0.05`

    The client is a process of its own; latencies count from the time at which a request was due.
    """
    with errors_in_one_line():
        import json
        import shlex
        from contextlib import ExitStack
        from dataclasses import asdict

        from ..engine.workload import read_trace
        from .load import report, target as targets
        from .load.lengths import Lengths, profile_of
        from .load.plan import Prompts, load_vocabulary
        from .load.run import Generator, Point, Workload
        from .load.summary import parse_targets

        changed: dict[str, Any] = {
            "input": input_len and Lengths.parse(input_len),
            "output": output_len and Lengths.parse(output_len),
            "prefix_length": prefix_len,
            "num_prefixes": num_prefixes,
        }
        workload = Workload(profile_of(profile, **changed), num_prompts, num_warmups, timeout, seed)
        slo_targets = parse_targets(slo) if slo else None
        kinds = [bool(concurrency), bool(request_rate), trace is not None, find_rate]
        if sum(kinds) > 1:
            raise ValueError("choose one of --concurrency, --request-rate, --trace and --find-rate")
        if find_rate and slo_targets is None:
            raise ValueError("--find-rate needs what has to hold: --slo ttft:0.5,itl:0.05")
        if not 0 < attainment <= 1:
            raise ValueError(f"attainment={attainment} is not allowed; allowed: above 0, up to 1")
        if url and server_options:
            raise ValueError("--server-options are for the server that is started; --url names one that runs")
        recorded = read_trace(trace) if trace else None
        if request_rate:
            points = [Point(rate, max_concurrency, burstiness) for rate in request_rate]
        else:
            points = [Point(concurrency=clients) for clients in concurrency or (1, 4, 16)]

        with ExitStack() as stack:
            if url:
                target = targets.find(url, model, api_key)
            else:
                log.print("starting a server ...", style="dim")
                target = stack.enter_context(targets.own_server(model or "tinyworld", shlex.split(server_options)))
            vocabulary = load_vocabulary(tokenizer or target.root or target.model)
            prompts = Prompts(
                target.model, vocabulary[1], vocabulary[0], text, chat, ignore_eos, json.loads(extra_body or "{}")
            )
            generator = Generator(target, prompts, workload, slo_targets)
            runs, found = [], None
            if find_rate:
                with progress("closed loop, for a first rate", num_prompts) as advance:
                    first = generator.run(Point(concurrency=min(16, num_prompts)), _counting(advance))
                start = max(1e-3, first.figures["request_throughput"] / 2)
                with progress("searching", 12) as advance:
                    found, runs = generator.find(start, attainment, on_run=lambda run: advance(str(run.point)))
            elif recorded:
                with progress(f"replaying {trace}", len(recorded)) as advance:
                    runs.append(generator.replay(recorded, speed, _counting(advance)))
            else:
                for point in points:
                    with progress(str(point), num_prompts) as advance:
                        runs.append(generator.run(point, _counting(advance)))
        described = {
            "title": f"{target.model}, {trace.name if trace else _title(workload.profile)}",
            "model": target.model,
            "server": "any URL"
            if url
            else shlex.join(["minillm", "serve", target.model, *shlex.split(server_options)]),
            "endpoint": target.endpoint(chat).removeprefix(target.url),
            "profile": {field: str(value) for field, value in vars(workload.profile).items()},
            "trace": trace and trace.name,
            "slo": slo and asdict(slo_targets),
            "attainment": attainment,
            "num_prompts": len(recorded) if recorded else num_prompts,
            "num_warmups": num_warmups,
            "seed": seed,
        }
        measured = report.result(name, command_line(), described, runs, found)
        for key, warnings in measured["figures"]["warnings"].items():
            for warning in warnings:
                log.print(f"{key.partition(': ')[2]}: {warning}", style="yellow", soft_wrap=True, highlight=False)
        show(report.tables, measured, save)
        if save:
            from .measure import path_of

            drawn = report.plot(measured, path_of(measured, save).with_suffix(".png"))
            log.print(f"drawn into {drawn}", highlight=False)
        if runs and not any(run.figures["num_complete"] for run in runs):
            raise RuntimeError("no request was answered to its end; the warnings above say why")


def _title(profile: Any) -> str:
    prefix = f" after a shared prefix of {profile.prefix_length}" if profile.prefix_length else ""
    return f"prompts of {profile.input}{prefix}, answers of {profile.output} tokens"


def _counting(advance: Any) -> Any:
    """`progress` moves one on at a time; a client tells how many it has."""
    told = 0

    def to(count: int) -> None:
        nonlocal told
        for _ in range(count - told):
            advance()
        told = max(told, count)

    return to
