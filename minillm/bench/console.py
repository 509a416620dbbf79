"""What every command shares: two consoles, a progress bar, errors in one line. Built in chapter 00."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

out, log = Console(), Console(stderr=True)
state = {"traceback": False}

Model = Annotated[str, typer.Option(help="A bundled name, a local folder, or a hub id such as Qwen/Qwen3-0.6B.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
TensorParallel = Annotated[int, typer.Option(min=1, help="Processes that each matrix is cut over.")]
PipelineParallel = Annotated[int, typer.Option(min=1, help="Processes that the layers are cut over.")]
Backend = Annotated[str, typer.Option(help="Starts these processes: mp on this machine, or ray.")]
Save = Annotated[Path | None, typer.Option(help="Folder for the JSON result; by default nothing is written.")]


def show(tables: Callable[[dict], list], measured: dict, save: Path | None) -> None:
    """Print what was measured, written to `save` where it is given; ends with status 1 where cases have failed."""
    from . import measure

    if save:
        log.print(f"written to {measure.save(measured, save)}", highlight=False)
    if measured.get("complete", True):
        for table in tables(measured):
            out.print(table)
        return
    for case, error in measured["errors"].items():
        log.print(f"{case}: {error}", style="red", soft_wrap=True, highlight=False, markup=False)
    log.print(f"not complete: {measured['reason']}", style="red", soft_wrap=True, highlight=False, markup=False)
    raise typer.Exit(1)


def keep_in(save: Path | None) -> Callable[[dict], object] | None:
    """What writes a result after every case, where there is a folder for it."""
    if save is None:
        return None
    from . import measure

    return lambda measured: measure.save(measured, save)


def command_line() -> str:
    import shlex

    return shlex.join(["minillm", *sys.argv[1:]])


@contextmanager
def progress(title: str, total: int):
    """A progress bar on stderr; gives a function that says what has just been done and moves the bar on by one."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=log,
        transient=True,
    ) as bar:
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
        log.print(
            "error:", " ".join(f"{error}{hint}".split()), style="red", soft_wrap=True, highlight=False, markup=False
        )
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        log.print("stopped")
        raise typer.Exit(130) from None
