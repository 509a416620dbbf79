"""The tokenizer of a model folder or a GGUF file, as its file describes it. Built in chapter 02."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from minillm.model.errors import CheckpointError
from minillm.model.gguf_file import Container
from minillm.model.gguf_tokenizer import gguf_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or GGUF file; never runs code from it.
    Raises CheckpointError where there is none, or one that cannot be read."""
    path = Path(path)
    return _of_gguf(path) if path.suffix == ".gguf" else _of_folder(path)


def _of_gguf(path: Path) -> PreTrainedTokenizerBase:
    try:
        return gguf_tokenizer(Container(path).metadata)
    except ValueError as error:
        raise CheckpointError(f"no tokenizer could be loaded from the metadata of {path}: {error}") from error


def _of_folder(path: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:
        present = "has" if (path / "tokenizer.json").exists() else "has no"
        raise CheckpointError(
            f"{path} {present} tokenizer.json, and no tokenizer could be loaded from it "
            f"({str(error).splitlines()[0]}); a model folder is what `save_pretrained` of model and tokenizer write"
        ) from error
