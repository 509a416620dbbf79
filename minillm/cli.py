"""The command line: lab, tour, generate, train, bench, check. Built in chapter 00."""
from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

# torch and transformers take seconds to import: every command imports what it needs itself, so that help is instant.

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False,
                  help="A textbook you can run: the engine behind LLM servers, one notebook at a time.\n\n"
                       "**Begin:** `minillm lab` opens the book, `minillm tour` shows in a minute where it leads.")
bench = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown",
                    help="Measure this machine: the limit first, then the figure with its share of it.\n\n"
                         "Results are JSON files with hardware, versions and raw samples; `--save FOLDER` says where.")
app.add_typer(bench, name="bench")
out, log = Console(), Console(stderr=True)
state = {"traceback": False}

Model = Annotated[str, typer.Option(help="A bundled name, a local folder, or a hub id such as Qwen/Qwen3-0.6B.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Save = Annotated[Optional[Path], typer.Option(help="Folder for the JSON result; by default nothing is written.")]


@app.callback()
def options(traceback: Annotated[bool, typer.Option("--traceback", help="Show the whole traceback of an error.")] = False) -> None:
    state["traceback"] = traceback


@app.command()
def lab(browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open a browser window.")] = True,
        port: Annotated[int, typer.Option(help="JupyterLab's port; the next free one is taken if it is in use.")] = 8888) -> None:
    """Open the book: JupyterLab on chapter 00.

    Run it from a clone; the notebooks are in `chapters/` beside the package.
    On a remote machine: `minillm lab --no-browser --port 9000`, then follow the link it prints.
    """
    import os
    import subprocess

    with errors_in_one_line():
        root = clone()
        chapters = sorted((root / "chapters").glob("00_*.ipynb"))
        if not chapters:
            raise FileNotFoundError(f"no chapter 00 in {root / 'chapters'}: the notebooks come with a clone of the "
                                    "repository, not with the installed package; clone it and `pip install -e .` there")
        command = [sys.executable, "-m", "jupyter", "lab", str(chapters[0].relative_to(root)), f"--port={port}"]
        command += [] if browser else ["--no-browser"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:  # Jupyter refuses root unless it is told that this is meant
            command.append("--allow-root")
        raise typer.Exit(subprocess.call(command, cwd=root))


def clone() -> Path:
    """The folder that holds the package: in a clone, the one with the chapters."""
    return Path(__file__).resolve().parent.parent


@app.command()
def tour(model: Model = "tinyworld", device: Device = "auto",
         max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the story.")] = 160,
         seconds: Annotated[float, typer.Option(min=0.1, help="A rung is cut off after this long.")] = 12.0) -> None:
    """The whole ladder in about a minute: one story, told by every stage of the engine.

    Every rung says the same words; the bars show how fast.
    """
    with errors_in_one_line():
        from .bench import tour as ladder_tour

        ladder_tour.watch(model, device, max_tokens, seconds, console=out)


@app.command()
def generate(
        prompt: Annotated[str, typer.Argument(help="The text to continue; with --chat, what you say.")],
        model: Model = "tinyworld", device: Device = "auto",
        dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
        max_tokens: Annotated[int, typer.Option(help="Stop after so many tokens.")] = 200,
        temperature: Annotated[float, typer.Option(help="0 takes the likeliest token every time.")] = 0.8,
        top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that hold this share.")] = 1.0,
        top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0 means all.")] = 0,
        min_p: Annotated[float, typer.Option(help="Leave out tokens less likely than this share of the likeliest.")] = 0.0,
        repetition_penalty: Annotated[float, typer.Option(help="Over 1.0, what was said becomes less likely.")] = 1.0,
        seed: Annotated[Optional[int], typer.Option(help="The same seed says the same.")] = None,
        stop: Annotated[Optional[list[str]], typer.Option(help="Stop before this text; may be given again.")] = None,
        chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False) -> None:
    """Say something, streamed as it is made; speed comes at the end, on stderr.

    `minillm generate "Once upon a time"`

    `minillm generate --chat --temperature 0 "What does a cow say?"`

    `minillm generate --model Qwen/Qwen3-0.6B --seed 1 --top-p 0.9 "The sea"`
    """
    with errors_in_one_line():
        import time

        from minillm import LLM, SamplingParams

        params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, stop=stop or None,
                                repetition_penalty=repetition_penalty, max_tokens=max_tokens)
        llm = LLM(model, device=device, dtype=dtype)
        if chat:
            ids = llm.get_tokenizer().apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True,
                                                          tokenize=True, return_dict=False)
            request = {"prompt_token_ids": ids}
        else:
            request = prompt
            print(prompt, end="", flush=True)
        started, first, count = time.perf_counter(), None, 0
        for delta in llm.stream(request, params):
            first = first or time.perf_counter() - started
            count += len(delta.token_ids)
            print(delta.text, end="", flush=True)
        print()
        log.print(report_speed(count, first, time.perf_counter() - started), style="dim", highlight=False)


def report_speed(count: int, first: float | None, total: float) -> str:
    """"64 tokens, 210.3 tokens/s after the first, first token after 4 ms"."""
    if first is None:
        return "0 tokens"
    rate = f", {(count - 1) / (total - first):,.1f} tokens/s after the first" if count > 1 and total > first else ""
    return f"{count} tokens{rate}, first token after {1e3 * first:,.0f} ms"


@app.command()
def train(preset: Annotated[str, typer.Option(help="tinyworld or tinyworld-draft.")] = "tinyworld",
          out_folder: Annotated[Optional[Path], typer.Option("--out", help="Folder for the model; runs/PRESET by default.")] = None,
          tokens: Annotated[Optional[int], typer.Option(min=1, help="Tokens to train on, instead of the preset's.")] = None,
          seed: Annotated[int, typer.Option(help="Of the first weights and the order of documents.")] = 0,
          device: Device = "auto",
          compile: Annotated[Optional[bool], typer.Option("--compile/--no-compile", help="torch.compile; on by default on a GPU.")] = None,
          learn_tokenizer: Annotated[bool, typer.Option("--learn-tokenizer", help="Learn one first, instead of the bundled one.")] = False,
          overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a finished model in the folder.")] = False) -> None:
    """Train a bundled model from nothing: a few hours on a CPU, minutes on a GPU.

    Stop it whenever you like (Ctrl-C): the same command goes on where it was.

    `minillm train --preset tinyworld-draft --tokens 200000 --out runs/trial`
    """
    with errors_in_one_line():
        from .training import run_preset

        folder = out_folder or Path("runs") / preset
        run_preset(preset, folder, tokens, seed, device, compile, learn_tokenizer, overwrite, out)
        out.print(f'minillm generate --model {folder} "Once upon a time" lets it speak.', highlight=False)


@bench.callback()
def warn_when_busy() -> None:
    import os

    load, cores = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, os.cpu_count() or 1
    if load > cores / 2:
        log.print(f"This machine is busy: {load:.1f} of {cores} cores were at work over the last minute. "
                  "Times will be too long, and unevenly so.", style="yellow", highlight=False)


@bench.command("decode")
def bench_decode(
        shape: Annotated[str, typer.Option(help="smollm2-135m or tinyworld; the weights are random.")] = "smollm2-135m",
        dtype: Annotated[Optional[list[str]], typer.Option(help="May be given again; float32 and bfloat16 by default.")] = None,
        prompt_tokens: Annotated[int, typer.Option(min=1)] = 64, output_tokens: Annotated[int, typer.Option(min=3)] = 64,
        repeats: Annotated[int, typer.Option(help="Of each engine, in turns; at least 5.")] = 5,
        device: Device = "auto", save: Save = None) -> None:
    """Decode at batch 1, minillm against transformers, and where the rest of a step goes."""
    with errors_in_one_line():
        from .bench import decode

        workload = decode.Workload(shape, tuple(dtype or decode.Workload.dtypes), prompt_tokens, output_tokens, repeats)
        rounds = len(workload.dtypes) * (2 * (repeats + 1) + 1) + 1
        with progress("measuring", rounds) as advance:
            measured = decode.run(workload, device, command_line(), on_run=advance)
        show(decode.tables(measured), measured, save)


@bench.command("tasks")
def bench_tasks(model: Model = "tinyworld", documents: Annotated[int, typer.Option(min=1, help="Of each task.")] = 200,
                task: Annotated[Optional[list[str]], typer.Option(help="May be given again; all by default.")] = None,
                seed: Annotated[int, typer.Option(help="Of the held-out text; not 0, which training reads.")] = 1,
                device: Device = "auto", save: Save = None) -> None:
    """How many answers a model gets exactly right, on fresh text of the corpus."""
    with errors_in_one_line():
        from . import LLM
        from .bench import tasks
        from .device import resolve_device
        from .zoo import corpus

        chosen = tuple(task or corpus.WRITERS)
        llm = LLM(model, device=device)
        with progress("asking", documents * len(chosen)) as advance:
            scores = tasks.evaluate(llm, documents, chosen, advance, seed)
        show([tasks.table(scores)], tasks.result(scores, model, documents, seed, command_line(), resolve_device(device)), save)


@bench.command("ladder")
def bench_ladder(model: Model = "tinyworld", max_tokens: Annotated[int, typer.Option(min=2)] = 128,
                 repeats: Annotated[int, typer.Option(help="Of each rung, in turns; at least 5.")] = 5,
                 device: Device = "auto", save: Save = None) -> None:
    """Every rung of `minillm tour`, measured: in turns, outputs checked first."""
    with errors_in_one_line():
        from .bench import tour as ladder_tour
        from .bench.ladder import RUNGS

        with progress("climbing", len(RUNGS) * (repeats + 1)) as advance:
            measured = ladder_tour.bench(model, device, max_tokens, repeats, command_line(), on_run=advance)
        show([ladder_tour.bench_table(measured)], measured, save)


@app.command()
def check(
        notebooks: Annotated[Optional[list[Path]], typer.Argument(help="Notebooks; by default all of the clone.")] = None,
        lint: Annotated[bool, typer.Option("--lint", help="Look at the notebooks as they are (the default).")] = False,
        execute: Annotated[bool, typer.Option("--execute", help="Run them first, and save them in their stable form.")] = False,
        release: Annotated[Optional[str], typer.Option(help="Generate exercises/ from solutions/: self-study or course.")] = None,
        to: Annotated[Optional[Path], typer.Option(help="Folder for --release course, which does not go to exercises/.")] = None,
        badges: Annotated[bool, typer.Option("--badges", help="Point Colab badges and set-up cells at --repository.")] = False,
        repository: Annotated[Optional[str], typer.Option(help="owner/name of the fork, for --badges.")] = None) -> None:
    """Check the notebooks, run them, generate the exercises. For authors and lecturers.

    `minillm check chapters/01_one_token_at_a_time.ipynb --execute`

    `minillm check --release course --to ~/my-course/release`

    `minillm check --badges --repository owner/name`
    """
    with errors_in_one_line():
        if badges != bool(repository):
            raise ValueError("--badges and --repository owner/name go together")
        if badges:
            from .book import colab

            changed = colab.rewrite_badges(repository, clone())
            out.print(f"{len(changed)} files now point at {repository}", highlight=False)
        if release:
            from .book import exercises

            changed = exercises.regenerate(release, out=to, root=clone())
            out.print(f"{len(changed)} exercises changed{''.join(f', {path.name}' for path in changed)}", highlight=False)
        if lint or execute or not (badges or release):
            from .book import notebooks as checker

            problems = checker.check(notebooks, execute_first=execute, root=clone(),
                                     report=lambda line: out.print(line, highlight=False, markup=False))
            for problem in problems:
                out.print(str(problem), highlight=False, markup=False)
            if problems:
                raise typer.Exit(1)


def show(tables: list, measured: dict, save: Path | None) -> None:
    from .bench import measure

    for table in tables:
        out.print(table)
    if save:
        log.print(f"written to {measure.save(measured, save)}", highlight=False)


def command_line() -> str:
    import shlex

    return shlex.join(["minillm", *sys.argv[1:]])


@contextmanager
def progress(title: str, total: int):
    """A progress bar on stderr; gives a function that says what has just been done and moves the bar on by one."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                  console=log, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda what="": bar.update(task, advance=1, description=f"{title}: {what}")


@contextmanager
def errors_in_one_line():
    """A mistake of the user's ends with one clear line and status 1; --traceback shows where it came from."""
    try:
        yield
    except typer.Exit:  # an ordinary end, though it is a RuntimeError by birth
        raise
    except (ValueError, TypeError, OSError, NotImplementedError, RuntimeError, ModuleNotFoundError) as error:
        if state["traceback"]:
            raise
        missing = isinstance(error, ModuleNotFoundError)
        hint = "; what this command needs comes with: pip install 'minillm-book[test]'" if missing else ""
        log.print("error:", " ".join(f"{error}{hint}".split()), style="red", soft_wrap=True, highlight=False, markup=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        log.print("stopped")
        raise typer.Exit(130) from None
