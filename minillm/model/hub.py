"""Models of the Hugging Face hub: fetched once, weights and tokenizer, never code. Built in chapter 02."""

from __future__ import annotations

from pathlib import Path

from minillm import zoo
from minillm.model.errors import CheckpointError

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
HUB_EXTRAS = ["original/*", "consolidated*"]  # the same weights once more, in another layout


def download(hub_id: str, file: str | None = None) -> Path:
    """The folder of a model of the hub, or one file of it, from the Hugging Face cache, or fetched into it.

    Raises CheckpointError where the model is unknown, wants its licence accepted, or the hub is out of reach.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        if file is not None:
            return Path(hf_hub_download(hub_id, file))
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES, ignore_patterns=HUB_EXTRAS))
    except GatedRepoError as error:
        raise CheckpointError(
            f"model={hub_id!r} asks for its licence to be accepted: do so on its page, then run `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"model={hub_id!r} is not on the hub, or is private: check the name") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"model={hub_id!r} is not in the local cache and the hub is out of reach ({type(error).__name__}). Where "
            f"there is a network run `hf download {hub_id} --local-dir FOLDER` and pass that folder, "
            f"or use a bundled model: {', '.join(zoo.bundled()) or 'none here'}"
        ) from error
