"""`minillm train`: a bundled model from nothing, a draft head or a LoRA adapter for one.
Built in chapters 00, 18 and 23."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..bench.console import Device, errors_in_one_line, out


def train(
    preset: Annotated[
        str, typer.Option(help="tinyworld, tinyworld-draft, tinyworld-moe or tinyworld-active.")
    ] = "tinyworld",
    lora: Annotated[
        str | None, typer.Option(help="Train an adapter for tinyworld instead: a voice, pirate or news.")
    ] = None,
    drafter: Annotated[
        bool,
        typer.Option("--drafter", help="Train a draft head for tinyworld instead, and measure it on held-out text."),
    ] = False,
    rank: Annotated[int | None, typer.Option(min=1, max=64, help="Of the adapter; by default the voice's.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Of the adapter's training, instead of 300.")] = None,
    out_folder: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Folder for the model; runs/PRESET by default, runs/tinyworld-VOICE or runs/tinyworld-eagle."
        ),
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to train on, instead of the preset's.")] = None,
    seed: Annotated[int, typer.Option(help="Of the first weights and the order of documents.")] = 0,
    device: Device = "auto",
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="torch.compile; on by default on a GPU.")
    ] = None,
    learn_tokenizer: Annotated[
        bool, typer.Option("--learn-tokenizer", help="Learn one first, instead of the bundled one.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a finished model in the folder.")] = False,
) -> None:
    """Train a bundled model from nothing: a few hours on a CPU, minutes on a GPU; or an adapter or a draft head,
    minutes anywhere.

    Stop it whenever you like (Ctrl-C): the same command goes on where it was.

    `minillm train --preset tinyworld-draft --tokens 200000 --out runs/trial`

    `minillm train --lora pirate --rank 4 --out runs/pirate`

    `minillm train --drafter --seed 1 --out runs/eagle`
    """
    with errors_in_one_line():
        if drafter:
            _refuse("--lora", lora=lora, rank=rank, steps=steps)
            _refuse("a whole model, without --drafter", compile=compile, learn_tokenizer=learn_tokenizer)
            if preset != "tinyworld":
                raise ValueError(f"--preset={preset!r} has no draft head; --drafter trains one for tinyworld")
            from ..training import acceptance
            from ..training.eagle import run_drafter

            folder = out_folder or Path("runs") / "tinyworld-eagle"
            run_drafter(folder, tokens, seed, device, overwrite, out)
            for line in acceptance.lines(acceptance.measure(folder, device)):
                out.print(line, highlight=False)
            return
        if lora is None:
            _refuse("--lora", rank=rank, steps=steps)
            from ..training import run_preset

            folder = out_folder or Path("runs") / preset
            run_preset(preset, folder, tokens, seed, device, compile, learn_tokenizer, overwrite, out)
            out.print(f'minillm generate --model {folder} "Once upon a time" lets it speak.', highlight=False)
            return
        _refuse("a whole model, without --lora", tokens=tokens, compile=compile, learn_tokenizer=learn_tokenizer)
        if preset != "tinyworld":
            raise ValueError(f"--preset={preset!r} has no voices; --lora trains an adapter for tinyworld")
        from ..training.lora import run_voice

        folder = out_folder or Path("runs") / f"tinyworld-{lora}"
        run_voice(lora, folder, rank, steps, seed, device, overwrite, out)
        out.print(f'LoRARequest("{lora}", 1, "{folder}") lets LLM("tinyworld") speak so.', highlight=False)


def _refuse(belongs_to: str, **options) -> None:
    for name, value in options.items():
        if value not in (None, False):
            raise ValueError(f"--{name.replace('_', '-')}={value} belongs to {belongs_to}")
