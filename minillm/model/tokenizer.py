"""The tokenizer of a model folder or a GGUF file, as the file describes it. Built in chapter 02.

    tokenizer.json              how text becomes tokens and tokens become text
    tokenizer_config.json       which tokens begin and end a text, the chat template
    tokenizer.model, vocab.json, merges.txt      instead of tokenizer.json in older folders

tokenizer.json is read as written. The classes of transformers that tokenizer_config.json names would take little more
than the vocabulary and the merges from it, and write the rest as it is in most models of their family.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from minillm.model.errors import CheckpointError
from minillm.model.files import check_file, read_json, read_text
from minillm.model.gguf_file import Container
from minillm.model.gguf_tokenizer import gguf_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WRITTEN, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
SETTINGS = (CONFIG, "special_tokens_map.json", "added_tokens.json", "config.json")
PROBE = "a"
WRITE = "or write it with `tokenizer.save_pretrained(folder)`"
WAY_OUT = f"fetch the file again, {WRITE}"


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or GGUF file; never runs code from it.
    Raises CheckpointError where there is none, or one that cannot be read."""
    path = Path(path)
    return _of_gguf(path) if path.suffix == ".gguf" else _of_folder(path)


def _of_gguf(path: Path) -> PreTrainedTokenizerBase:
    try:
        tokenizer = gguf_tokenizer(Container(path).metadata)
        tokenizer.decode(tokenizer.encode(PROBE))
        return tokenizer
    except CheckpointError:
        raise
    except BaseException as error:
        _raise_unless_of_file(error)
        raise CheckpointError(
            f"no tokenizer could be loaded from the metadata of {path}: {_first_line(error)}"
        ) from error


def _of_folder(path: Path) -> PreTrainedTokenizerBase:
    try:
        tokenizer = _as_written(path) if (path / WRITTEN).exists() else _by_class(path)
        if not isinstance(tokenizer.chat_template, str | dict | None):
            raise TypeError(f"{CONFIG}: chat_template={tokenizer.chat_template!r:.80} is not a text")
        tokenizer.decode(tokenizer.encode(PROBE))  # some files are found damaged by their first use
        return tokenizer
    except BaseException as error:
        _raise_unless_of_file(error)
        raise CheckpointError(_what_is_wrong(path, error)) from error


def _as_written(path: Path) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast

    # The tokens that tokenizer_config.json adds are those of tokenizer.json again, in some folders with other rules.
    settings = read_json(path / CONFIG) if (path / CONFIG).exists() else {}
    again: dict[str, Any] = {"added_tokens_decoder": {}} if "added_tokens_decoder" in settings else {}
    return PreTrainedTokenizerFast.from_pretrained(path, **again)


def _by_class(path: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def _raise_unless_of_file(error: BaseException) -> None:
    """Raise what no file is to blame for: an interrupt, or a lack of memory."""
    is_panic = type(error).__name__ == "PanicException"  # of the Rust core of tokenizers, and no Exception
    if isinstance(error, MemoryError) or not (isinstance(error, Exception) or is_panic):
        raise error


def _what_is_wrong(path: Path, error: BaseException) -> str:
    """The file that cannot be read, or else what the library said."""
    readers = dict.fromkeys(SETTINGS, read_json) | {TEMPLATE: read_text, WRITTEN: _read_written}
    for name, read in readers.items():
        file = path / name
        try:
            if os.path.lexists(file):
                read(file)
        except CheckpointError as found:
            return f"{found}, {WRITE}"
        except BaseException as found:
            _raise_unless_of_file(found)
            return f"{file} cannot be read ({_first_line(found)}); {WAY_OUT}"
    if (path / WRITTEN).exists():
        return f"no tokenizer could be loaded from {path / WRITTEN} and {CONFIG} ({_first_line(error)}); {WAY_OUT}"
    return (
        f"{path} has no {WRITTEN}, and no tokenizer could be loaded from it ({_first_line(error)}); "
        "a model folder is what `save_pretrained` of model and tokenizer write"
    )


def _read_written(file: Path) -> None:
    check_file(file)
    Tokenizer.from_file(str(file))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
