"""Repository: a folder of models, each in folders of its versions, as Triton and KServe have it. Built in chapter 23.

    DIR/tinyworld/1/config.json, model.safetensors, tokenizer.json ...
    DIR/tinyworld/2/...           the highest number is the version of a request that names none

A name is looked up in what the folder lists, and is never a part of a path before it was found there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minillm import zoo
from minillm.serving.memory import Memory

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
VERSION = re.compile(r"[1-9][0-9]{0,8}")
MOST_FILES = 10_000  # in one version's folder


class UnknownModel(LookupError):
    """A name or a version that the repository does not list."""


@dataclass(frozen=True)
class Repository:
    """A folder, and how its models are served. Raises ValueError for a folder that is not there.

    Links may lead anywhere inside the folder, and to the bundled models; `follow_links` lets them lead everywhere.
    """

    path: Path
    options: dict[str, Any] = field(default_factory=dict)  # of each LLM: its arguments without the model
    memory: Memory | None = None  # None: half of what is free
    load: tuple[str, ...] | None = None  # names of the models that a server begins with; None: all
    follow_links: bool = False

    def __post_init__(self):
        path = Path(self.path).expanduser()
        if not path.is_dir():
            raise ValueError(
                f"model_repository={str(self.path)!r} is no folder; give one that holds NAME/VERSION folders"
            )
        object.__setattr__(self, "path", path.resolve())

    def names(self) -> list[str]:
        """Of all models, whether they have a version or not."""
        return sorted(one.name for one in self.path.iterdir() if NAME.fullmatch(one.name) and one.is_dir())

    def versions(self, name: str) -> list[str]:
        """The lowest first. Raises UnknownModel."""
        if name not in self.names():
            raise UnknownModel(f"the repository has no model {name!r}; it has {', '.join(self.names()) or 'none'}")
        self._check_inside(self.path / name, name)
        found = [one.name for one in (self.path / name).iterdir() if VERSION.fullmatch(one.name) and one.is_dir()]
        return sorted(found, key=int)

    def folder(self, name: str, version: str) -> Path:
        """The folder of one version. Raises UnknownModel, and ValueError where it or a file in it is a link that leads
        out of the repository."""
        if version not in (versions := self.versions(name)):
            has = f"it has {', '.join(versions)}" if versions else f"it needs a folder of a version, such as {name}/1"
            raise UnknownModel(f"the model {name!r} has no version {version!r}; {has}")
        folder = self.path / name / version
        self._check_inside(folder, f"{name}/{version}")
        for number, file in enumerate(folder.rglob("*")):
            if number >= MOST_FILES:
                raise ValueError(f"{name}/{version} has more than {MOST_FILES} files; a model's folder has a few")
            shown = f"{name}/{version}/{file.relative_to(folder)}"
            self._check_inside(file, shown)
            if not file.is_file() and not file.is_dir():  # a pipe is never read to its end
                raise ValueError(f"{shown} is neither a file nor a folder; remove it")
        return folder

    def _check_inside(self, path: Path, shown: str) -> None:
        roots = (self.path, Path(zoo.__file__).parent.resolve())
        try:
            target = path.resolve(strict=True)
        except (OSError, RuntimeError) as error:
            raise ValueError(
                f"{shown} leads nowhere ({type(error).__name__}); mend the link, or copy the model"
            ) from None
        if not self.follow_links and not any(target.is_relative_to(root) for root in roots):
            raise ValueError(
                f"{shown} is a link that leads out of the repository; copy the model, or use --follow-links"
            )
