"""The bundled models and the program that writes their corpus. Built in chapter 00."""

from __future__ import annotations

from pathlib import Path


def bundled() -> dict[str, Path]:
    """Every bundled model by name, with its folder in Hugging Face layout; the default, `tinyworld`, comes first."""
    folders = sorted(Path(__file__).parent.glob("*/config.json"), key=lambda config: len(config.parent.name))
    return {config.parent.name: config.parent for config in folders}


def bundled_drafters() -> dict[str, Path]:
    """Every bundled draft head by name, with its folder: `tinyworld-eagle`."""
    folders = sorted(Path(__file__).parent.glob("*/drafter_config.json"))
    return {config.parent.name: config.parent for config in folders}


def bundled_adapters() -> dict[str, Path]:
    """Every bundled LoRA adapter of `tinyworld` by name, with its PEFT folder: `tinyworld-news`, `tinyworld-pirate`."""
    folders = sorted(Path(__file__).parent.glob("*/adapter_config.json"))
    return {config.parent.name: config.parent for config in folders}
