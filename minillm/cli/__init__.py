"""The command line: lab, tour, generate, serve, train, quantize, bench, check, progress, course.
Built in chapter 00."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..bench.commands import bench
from ..bench.console import Device, Model, errors_in_one_line, log, out, progress, state
from .course_pages import changes, site
from .generating import generate
from .grading import course
from .self_study import progress as show_progress
from .serving import serve
from .training import train

# torch and transformers take seconds to import: every command imports what it needs itself, so that help is instant.

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="A textbook you can run: the engine behind LLM servers, one notebook at a time.\n\n"
    "**Begin:** `minillm lab` opens the book, `minillm tour` shows in a minute where it leads.",
)
app.add_typer(bench, name="bench")
app.add_typer(course, name="course")
course.command()(site)
course.command()(changes)


@app.callback()
def options(
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the whole traceback of an error.")] = False,
) -> None:
    state["traceback"] = traceback


@app.command()
def lab(
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open a browser window.")] = True,
    port: Annotated[int, typer.Option(help="JupyterLab's port; the next free one is taken if it is in use.")] = 8888,
) -> None:
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
            raise FileNotFoundError(
                f"no chapter 00 in {root / 'chapters'}: the notebooks come with a clone of the "
                "repository, not with the installed package; clone it and `pip install -e .` there"
            )
        # Given as an argument, the notebook's folder would be the server's root, and exercises/ out of its reach.
        first_page = f"/lab/tree/chapters/{chapters[0].name}"
        command = [sys.executable, "-m", "jupyter", "lab", f"--ServerApp.root_dir={root}"]
        command += [f"--LabApp.default_url={first_page}", f"--port={port}"] + ([] if browser else ["--no-browser"])
        if hasattr(os, "geteuid") and os.geteuid() == 0:  # Jupyter refuses root unless it is told that this is meant
            command.append("--allow-root")
        raise typer.Exit(subprocess.call(command, cwd=root))


def clone() -> Path:
    """The folder that holds the package: in a clone, the one with the chapters."""
    return Path(__file__).resolve().parents[2]


@app.command()
def tour(
    model: Model = "tinyworld",
    device: Device = "auto",
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the story.")] = 160,
    seconds: Annotated[float, typer.Option(min=0.1, help="A rung is cut off after this long.")] = 12.0,
    gif: Annotated[Path | None, typer.Option(help="Also keep what is shown as a moving picture in this file.")] = None,
) -> None:
    """The whole ladder in about a minute: one story, told by every stage of the engine.

    Every rung generates the same words; the bars show how fast.
    """
    with errors_in_one_line():
        from ..bench import film, tour as ladder_tour

        kept = film.Film()
        ladder_tour.watch(
            model, device, max_tokens, seconds, console=out, on_frame=kept.keep if gif else lambda _: None
        )
        if gif:
            log.print(f"written to {kept.save(gif)}", highlight=False)


app.command()(generate)
app.command()(serve)
app.command()(train)


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="A bundled name, a local folder, or a hub id such as Qwen/Qwen3-0.6B.")],
    out_folder: Annotated[Path, typer.Option("--out", help="Folder for the result; new, or empty.")],
    method: Annotated[str, typer.Option(help="rtn, gptq, awq, smoothquant or llm_int8.")] = "gptq",
    bits: Annotated[
        int | None, typer.Option(min=2, max=8, help="Of a weight; 4 by default, 8 for smoothquant and llm_int8.")
    ] = None,
    group_size: Annotated[
        int, typer.Option(min=0, help="Inputs that share a scale; 0 is a whole row, as W8A8 always has it.")
    ] = 64,
    format: Annotated[str | None, typer.Option(help="fp8 or fp4, instead of --bits.")] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option(
            "--symmetric/--asymmetric", help="Without or with zero points; by default with, for gptq and awq."
        ),
    ] = None,
    act_order: Annotated[
        bool, typer.Option("--act-order", help="GPTQ: the columns with the largest inputs first.")
    ] = False,
    calibration: Annotated[
        Path | None, typer.Option(help="A text file to calibrate with, instead of the corpus.")
    ] = None,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Rotate the model's coordinates first (QuaRot): fewer outliers.")
    ] = False,
    documents: Annotated[int, typer.Option(min=1, help="Of the corpus, or pieces of 512 tokens of the file.")] = 64,
    seed: Annotated[
        int, typer.Option(help="Which documents, and the rotation's signs; not 1, which quality is measured on.")
    ] = 0,
    dtype: Annotated[str, typer.Option(help="To calibrate in: auto, float32, bfloat16 or float16.")] = "auto",
    device: Device = "auto",
) -> None:
    """Write a model in fewer bits, as a folder that loads like any other.

    `minillm quantize tinyworld --method gptq --bits 3 --out runs/tinyworld-3`

    `minillm quantize Qwen/Qwen3-0.6B --method awq --calibration my.txt --out runs/qwen3-awq`
    """
    with errors_in_one_line():
        from .. import quantizing

        config = quantizing.config_of(
            method, bits, group_size or None, format, symmetric, act_order, documents, seed, calibration, rotate
        )
        with progress("quantizing", quantizing.num_steps(model)) as advance:
            result = quantizing.quantize_model(model, config, out_folder, dtype, device, advance)
        out.print(quantizing.report(result), highlight=False)


@app.command()
def check(
    notebooks: Annotated[list[Path] | None, typer.Argument(help="Notebooks; by default all of the clone.")] = None,
    lint: Annotated[bool, typer.Option("--lint", help="Look at the notebooks as they are (the default).")] = False,
    execute: Annotated[
        bool, typer.Option("--execute", help="Run them first, and save them in their stable form.")
    ] = False,
    like_a_gpu: Annotated[
        bool, typer.Option("--like-a-gpu", help="Run them with a GPU's defaults; compare, save nothing.")
    ] = False,
    release: Annotated[
        str | None, typer.Option(help="Generate exercises/ from solutions/: self-study or course.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="Folder for --release course, which does not go to exercises/.")
    ] = None,
    badges: Annotated[
        bool, typer.Option("--badges", help="Point Colab badges and set-up cells at --repository.")
    ] = False,
    repository: Annotated[str | None, typer.Option(help="owner/name of the fork, for --badges.")] = None,
    roads: Annotated[
        int | None, typer.Option(min=1, help="Serve so many random combinations of the engine's settings.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the first of --roads; the next has the next seed.")] = 0,
    road: Annotated[str | None, typer.Option(help="Serve one combination, as --roads printed it.")] = None,
    parallel: Annotated[
        bool, typer.Option("--parallel", help="Each of --roads in several processes: tensor and pipeline parallel.")
    ] = False,
) -> None:
    """Check the notebooks, run them, generate the exercises; check the engine. For authors and lecturers.

    `minillm check chapters/01_one_token_at_a_time.ipynb --execute`

    `minillm check --like-a-gpu` runs all chapters (or the notebooks you name) on a CPU with the defaults of a GPU:
    steps scheduled ahead, attention in Triton, decode steps recorded. `MINILLM_LIKE_A_GPU=ahead,triton` in the
    environment gives them to any engine on a CPU.

    `minillm check --release course --to ~/my-course/release`

    `minillm check --badges --repository owner/name`

    `minillm check --roads 1000 --seed 0` compares random combinations of the engine's settings with the plain engine,
    about five in a second, and prints each that fails with the fewest settings and requests that still fail; with
    `--parallel` each is cut over two to four processes.
    """
    with errors_in_one_line():
        if roads or road:
            check_roads(roads or 0, seed, road, parallel)
            return
        if badges != bool(repository):
            raise ValueError("--badges and --repository owner/name go together")
        if badges:
            from ..book import colab

            changed = colab.rewrite_badges(repository, clone())
            out.print(f"{len(changed)} files now point at {repository}", highlight=False)
        if release:
            from ..book import exercises

            changed = exercises.regenerate(release, out=to, root=clone())
            out.print(
                f"{len(changed)} exercises changed{''.join(f', {path.name}' for path in changed)}", highlight=False
            )
        problems, write_line = [], partial(out.print, highlight=False, markup=False)
        if lint or execute or not (badges or release or like_a_gpu):
            from ..book import notebooks as checker

            problems += checker.check(notebooks, execute_first=execute, root=clone(), report=write_line)
        if like_a_gpu:
            from ..book import like_a_gpu as rehearsal
            from ..book.paths import notebooks as chapters

            paths = notebooks or chapters("chapters", clone())
            with progress("running", sum(map(rehearsal.num_code_cells, paths))) as advance:
                problems += rehearsal.check(paths, report=write_line, advance=advance)
        for problem in problems:
            write_line(str(problem))
        if problems:
            raise typer.Exit(1)


app.command("progress")(show_progress)


def check_roads(count: int, seed: int, line: str | None, parallel: bool = False) -> None:
    """Serve random roads, or the one of a line; ends with status 1 where one fails."""
    from ..book.roads.check import RoadCheck
    from ..book.roads.road import Road

    def write_line(text: object) -> None:
        out.print(str(text), highlight=False, markup=False, soft_wrap=True)

    road = line and Road.parse(line)
    with RoadCheck() as check, progress("serving", count) as advance:
        report = check.run(count, seed, write_line, advance, parallel=parallel)
        if road:
            check.run_one(road, write_line)
    for text in report.lines():
        write_line(text)
    if report.faults:
        raise typer.Exit(1)
