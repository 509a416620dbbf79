"""`python -m tests.rehearsal --help`."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import traceback
from dataclasses import asdict
from functools import partial

os.environ |= {"TRITON_INTERPRET": "0", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

from . import device, expected  # the environment comes first

AT_ONCE = 2  # processes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.rehearsal", description="minillm on a GPU that is not there")
    parser.add_argument("scenarios", nargs="*", help="all, unless some are named")
    parser.add_argument("--gpu", nargs="+", default=["H200"], choices=device.GPUS)
    parser.add_argument("--list", action="store_true", help="the scenarios' names")
    parser.add_argument("--verbose", action="store_true", help="every wait, with the line that asked")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N scenarios drawn by chance instead")
    parser.add_argument("--seed", type=int, default=0, help="of the first of them")
    parser.add_argument("--toys", action="store_true", help="small wrongs first, which the rehearsal must see")
    parser.add_argument("--json", action="store_true", help="a report of each scenario, one a line")
    given = parser.parse_args()
    if reason := device.missing():
        sys.exit(reason)
    if given.list:
        print(*expected.EVERYWHERE, sep="\n")
        return
    device.register_guard()
    load()
    if given.random:
        given.scenarios = [f"random {given.seed + index}" for index in range(given.random)]
    parts = [("H200", None)] if given.toys else []
    parts += [
        (gpu, part)
        for gpu in given.gpu
        for part in halves(given.scenarios or expected.played(gpu) + expected.drawn(gpu))
    ]
    running: set[int] = set()
    for gpu, names in parts:
        if len(running) == AT_ONCE:
            running.discard(os.wait()[0])
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            play(gpu, names, given)
        running.add(child)
    while running:
        running.discard(os.wait()[0])


def halves(names: list[str]) -> list[list[str]]:
    """For two processes, where it is worth it."""
    return [names] if len(names) < 8 else [names[::2], names[1::2]]


def load() -> None:
    """What every GPU's process needs, once, and kept out of the garbage collections that each start of an engine asks
    for."""
    import minillm
    import minillm.engine.llm
    from minillm.kernels import language
    from minillm.model.checkpoint import load_tokenizer, resolve_model

    from .scenarios import scenarios

    scenarios()
    load_tokenizer(resolve_model("tinyworld"))
    assert language.MODE == "compiled", f"kernels are {language.MODE}, not compiled; is Triton installed?"
    print(f"minillm from {os.path.dirname(minillm.__file__)}", file=sys.stderr)
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None  # recording a graph would undo it


def play(gpu_name: str, names: list[str] | None, given: argparse.Namespace) -> None:
    """In a process of its own, since a GPU is pretended once. Toys, if there are no names."""
    try:
        for report in reports(set_stage(gpu_name), names, given.verbose):
            sys.stdout.write((json.dumps(asdict(report)) if given.json else report.text(given.verbose)) + "\n")
            sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(0)


def reports(gpu: device.Device, names: list[str] | None, verbose: bool):
    from .drawn import drawn
    from .scenarios import performed, rehearse, scenarios
    from .toys import TOYS, seen

    known = scenarios()
    for name in names or ():
        scenario = drawn(int(name.split()[1])) if name.startswith("random ") else known[name]
        yield rehearse(name, scenario, gpu, verbose)
    for toy, what in TOYS.items() if names is None else ():
        report = performed(f"toy: {toy.__name__}", gpu, partial(toy, gpu))
        report.facts = {"seen": any(what in line for line in seen(report)), "said": seen(report)}
        yield report


def set_stage(name: str) -> device.Device:
    from . import tensors, triton_stub

    gpu = device.pretend(name)
    tensors.pretend_tensors()
    triton_stub.pretend_triton(gpu)
    return gpu


if __name__ == "__main__":
    main()
