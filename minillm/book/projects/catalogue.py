"""The projects of chapter 25 by name. Built in chapter 25."""

from __future__ import annotations

from importlib import import_module

from minillm.book.projects.scoring import Project

NAMES = ("scheduler", "kernel", "router")


def find_project(name: str) -> Project:
    """The project of that name. Raises ValueError naming those there are."""
    if name not in NAMES:
        raise ValueError(f"project={name!r} is unknown; choose one of {', '.join(NAMES)}")
    return import_module(f"minillm.book.projects.{name}").PROJECT
