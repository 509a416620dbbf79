"""The tokenizer of a model folder or a GGUF file, as the file describes it. Built in chapter 02.

    tokenizer.json              how text becomes tokens and tokens become text
    tokenizer_config.json       which tokens begin and end a text, the chat template
    tokenizer.model, vocab.json, merges.txt      instead of tokenizer.json in older folders

tokenizer.json is read as written. The classes of transformers that tokenizer_config.json names would take little more
than the vocabulary and the merges from it, and write the rest as it is in most models of their family.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from minillm.model.errors import CheckpointError
from minillm.model.gguf_file import Container
from minillm.model.gguf_tokenizer import gguf_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WRITTEN, CONFIG = "tokenizer.json", "tokenizer_config.json"
SETTINGS = (CONFIG, "special_tokens_map.json", "added_tokens.json", "config.json")
PROBE = "a"
WAY_OUT = "fetch the file again, or write it with `tokenizer.save_pretrained(folder)`"


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
    try:
        tokenizer = _as_written(path) if (path / WRITTEN).exists() else _by_class(path)
        if not isinstance(tokenizer.chat_template, str | dict | None):
            raise TypeError(f"{CONFIG}: chat_template={tokenizer.chat_template!r:.80} is not a text")
        tokenizer.decode(tokenizer.encode(PROBE))  # some files are found damaged by their first use
        return tokenizer
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # tokenizers' Rust core
            raise
        raise CheckpointError(_what_is_wrong(path, error)) from error


def _as_written(path: Path) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast

    # The tokens that tokenizer_config.json adds are those of tokenizer.json again, in some folders with other rules.
    settings = _settings(path / CONFIG) if (path / CONFIG).exists() else {}
    again: dict[str, Any] = {"added_tokens_decoder": {}} if "added_tokens_decoder" in settings else {}
    return PreTrainedTokenizerFast.from_pretrained(path, **again)


def _by_class(path: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def _what_is_wrong(path: Path, error: BaseException) -> str:
    """The file that cannot be read, or else what the library said."""
    for name, read in ((WRITTEN, Tokenizer.from_file), *((name, _settings) for name in SETTINGS)):
        file = path / name
        try:
            if file.exists():
                read(str(file))
        except Exception as found:
            return f"{file} cannot be read ({_first_line(found)}); {WAY_OUT}"
    if (path / WRITTEN).exists():
        return f"no tokenizer could be loaded from {path / WRITTEN} and {CONFIG} ({_first_line(error)}); {WAY_OUT}"
    return (
        f"{path} has no {WRITTEN}, and no tokenizer could be loaded from it ({_first_line(error)}); "
        "a model folder is what `save_pretrained` of model and tokenizer write"
    )


def _settings(file: str | Path) -> dict[str, Any]:
    settings = json.loads(Path(file).read_text(encoding="utf-8"))
    if not isinstance(settings, dict):
        raise TypeError(f"it holds {settings!r:.80}, not an object")
    return settings


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
