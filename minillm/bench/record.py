"""A measurement as it grows: kept after every case, so that a cut-off loses nothing. Built in chapter 14.

    record = Record(name, command, device, workload, keep)
    with record.case("rms_norm"):           the file says now: cut off during "rms_norm"
        record.figures["rms_norm"] = ...
    return record.finish()                  and now that it is complete

While it is kept somewhere, a case that fails costs only itself: its error is recorded and the others go on.
Where nothing is kept, as in a library call, the error is raised. What has not ended well has `"complete": false`,
the reason and the errors; a complete result has none of the three.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from . import measure

SECONDS_BETWEEN = 1.0  # at least, from one file of samples to the next


class Record:
    """What `measure.result` returns, filled bit by bit: `ceilings`, `figures` and `samples` are its owner's to set."""

    def __init__(
        self,
        name: str,
        command: str,
        device: torch.device,
        workload: dict,
        keep: Callable[[dict], object] | None = None,
    ):
        self.device, self.keep = device, keep
        self.ceilings: measure.Ceilings | None = None
        self.figures: dict = {}
        self.samples: dict[str, measure.Samples] = {}
        self.errors: dict[str, str] = {}
        self._head = measure.result(name, command, device, workload, None, {}, {})
        self._kept = float("-inf")
        self._case = "the first case"

    def measured(self, reason: str = "") -> dict:
        """As it stands; with a reason it is not complete."""
        filled = measure.filled(self._head, self.ceilings, self.figures, self.samples)
        return filled | {"complete": False, "reason": reason, "errors": dict(self.errors)} if reason else filled

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """One case of the measurement. Raises RuntimeError where its failure has cost the whole GPU context."""
        outer, self._case = self._case, name
        self._write(f"cut off during {name!r}")
        try:
            yield
        except Exception as error:
            if self.keep is None:
                raise
            self.errors[name] = " ".join(f"{type(error).__name__}: {error}".split())
            self._check_device(name)
        except BaseException:  # Ctrl-C
            self._write(f"interrupted during {name!r}")
            raise
        self._case = outer
        release(self.device)
        self._write(f"cut off after {name!r}")

    def interleave(
        self,
        candidates: dict[str, Callable[[], object]],
        repeats: int,
        prefix: str = "",
        on_run: Callable[[str], None] = lambda name: None,
    ) -> dict[str, measure.Samples]:
        """`measure.interleave` of these candidates; every sample is in `samples`, under prefix + name,
        as soon as it is taken."""

        def heard(name: str, taken: tuple[float, ...]) -> None:
            self.samples.pop(prefix + name, None)
            self.take(prefix + name, taken)
            on_run(name)

        return measure.interleave(candidates, repeats, device=self.device, on_samples=heard)

    def take(self, name: str, seconds: Sequence[float]) -> None:
        """Add these samples to those of `name`; they are kept as soon as they are taken."""
        before = self.samples[name].seconds if name in self.samples else ()
        if seconds:
            self.samples[name] = measure.Samples((*before, *seconds))
        if time.monotonic() - self._kept > SECONDS_BETWEEN:
            self._write(f"cut off during {self._case!r}")

    def finish(self) -> dict:
        """The result, kept for the last time: complete if every case ended well."""
        reason = f"{len(self.errors)} failed: {', '.join(self.errors)}" if self.errors else ""
        return self._write(reason)

    def _write(self, reason: str) -> dict:
        measured = self.measured(reason)
        if self.keep is not None:
            self.keep(measured)
            self._kept = time.monotonic()
        return measured

    def _check_device(self, name: str) -> None:
        """An illegal address ends the context: everything after it in this process would fail with the same words."""
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            self._write(f"the GPU's context was lost in {name!r}; the cases after it were not run")
            raise RuntimeError(
                f"{name!r} has lost the GPU's context ({error}); the cases after it were not run"
            ) from None


def release(device: torch.device) -> None:
    """Give back what the last case or engine held, so that the next one measures a GPU with all its memory."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
