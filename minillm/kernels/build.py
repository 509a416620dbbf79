"""Compiling a kernel for any GPU, and reading what came out: registers, shared memory, instructions.
Built in chapter 11.

    report = build(kernel, signature={"x": "*fp32", "n": "i32"}, constants={"BLOCK": 1024}, capability=80)
    occupancy(report, GPUS["A100"])

No GPU is needed: Triton's compiler and NVIDIA's assembler (ptxas, which comes with Triton) work ahead of time, about a
second a kernel. They run in a process of their own, since a process that interprets kernels cannot compile them. Counts
of instructions are those of the program text (PTX): one in a loop counts once, however often the loop turns.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from minillm.kernels.gpus import GPU
from minillm.kernels.language import triton
from minillm.kernels.shipping import last_line, literal, pack, plain, run_module, unpack
from minillm.rounding import round_up


@dataclass(frozen=True)
class Job:
    """One kernel to compile, for one kind of GPU.

    signature:  parameter -> type: "*fp16" a pointer, taken to be aligned to 16 bytes as PyTorch's are
                ("*fp16:1" is not); "i32" or "fp32" a number, "i32:16" an integer known to be divisible by 16.
                Both decide what a load may move at once, and a launch finds them out from its arguments.
    constants:  parameter -> value, for the `tl.constexpr` ones; also for an integer that is 1 (a launch compiles it in)
                and for a pointer that is None. Parameters with a default may be left out.
    capability: 75, 80, 89, 90, 100, 120, ... of the GPU. num_warps, num_stages: as in a launch.
    helpers:    functions that a kernel of a notebook needs and does not name.
    """

    kernel: Callable
    signature: Mapping[str, str]
    constants: Mapping[str, object] = field(default_factory=dict)
    capability: int = 80
    num_warps: int = 4
    num_stages: int = 3
    helpers: Sequence[Callable] = ()
    name: str = ""


@dataclass(frozen=True)
class Report:
    """What the compiler made of a kernel. Where it made nothing, `error` says why and the rest is zero."""

    name: str
    capability: int
    num_warps: int
    num_stages: int
    registers: int = 0  # a thread
    shared_bytes: int = 0  # a program
    spill_store_bytes: int = 0  # a thread: registers that did not fit and went through memory
    spill_load_bytes: int = 0
    stack_bytes: int = 0  # a thread
    extra_warps: int = 0  # beside num_warps, with a role of their own: they load, or issue products
    tensor_memory_columns: int = 0  # a program, of the 512 of an SM of sm_100
    ptx: str = field(default="", repr=False)
    error: str = ""

    def count(self, instruction: str) -> int:
        """How many instructions of the text start with `instruction`, whole words: "ld.global", "mma.sync", "fma.rn".

        "wgmma" and "cp.async" count multiplications and copies, without the fences, commits and waits around them.
        """
        opcodes = re.findall(rf"(?<![\w.$%@]){re.escape(instruction)}(?=[.\s;])[\w.:]*", without_comments(self.ptx))
        upkeep = (".fence", ".commit_group", ".wait_group", ".wait_all", ".mbarrier.arrive")
        return sum(1 for opcode in opcodes if not any(word in opcode[len(instruction) :] for word in upkeep))

    @property
    def uses_tensor_cores(self) -> bool:
        """Whether any matrix product of the kernel runs on tensor cores."""
        return any(self.count(name) for name in ("mma.sync", "wgmma", "wmma.mma", "tcgen05.mma"))


@dataclass(frozen=True)
class Occupancy:
    """How many programs of a kernel an SM holds at once, and which of its four limits stops the next one."""

    blocks_per_sm: int
    warps_per_sm: int
    share: float  # of the warps the SM could hold
    limited_by: str  # "registers" | "shared memory" | "threads" | "blocks"


def build(
    kernel: Callable,
    signature: Mapping[str, str],
    constants: Mapping[str, object] | None = None,
    capability: int = 80,
    num_warps: int = 4,
    num_stages: int = 3,
    helpers: Sequence[Callable] = (),
    name: str = "",
) -> Report:
    """Compile one kernel; `Job` explains the arguments. ValueError where a parameter has no type and no value."""
    return build_all([Job(kernel, signature, constants or {}, capability, num_warps, num_stages, helpers, name)])[0]


def build_all(jobs: Sequence[Job]) -> list[Report]:
    """Compile kernels one after another in one process of its own: a report each, in order."""
    packed = [_pack(job) for job in jobs]
    if not packed:
        return []
    done = run_module("minillm.kernels.build", interpret=False, text=json.dumps(packed))
    if done.returncode == 0:
        return [Report(**report) for report in json.loads(done.stdout)]
    if len(jobs) > 1:  # the compiler itself broke down, over one of them
        return [report for job in jobs for report in build_all([job])]
    return [
        Report(**_identity(packed[0]), error=f"the compiler ended with {done.returncode}: {last_line(done.stderr)}")
    ]


def occupancy(report: Report, gpu: GPU) -> Occupancy:
    """Programs of this kernel that one SM of `gpu` holds at once, with all of its cache lent to shared memory.

    The rules are those of NVIDIA's occupancy calculator: a warp's registers come in units of 256, out of a quarter of
    the SM's; shared memory comes in units of 128 bytes (256 before 8.0), and from 8.0 on the system keeps 1 KB of it
    for itself in every program. ValueError for a report with an error. A program that never fits gives 0 blocks.
    """
    if report.error:
        raise ValueError(f"{report.name} did not compile for {report.capability}: {report.error}")
    register_unit, shared_unit, reserved = (
        256,
        128 if gpu.capability >= 80 else 256,
        1024 if gpu.capability >= 80 else 0,
    )
    warps_each = report.num_warps + report.extra_warps
    registers_per_warp = round_up(max(report.registers, 1) * 32, register_unit)
    shared = round_up(report.shared_bytes + reserved, shared_unit)
    limits = {  # in the order in which they are named where two of them are equal
        "threads": gpu.max_warps_per_sm // warps_each,
        "blocks": gpu.max_blocks_per_sm,
        "registers": gpu.registers_per_sm // 4 // registers_per_warp * 4 // warps_each,
        "shared memory": gpu.shared_per_sm // shared if shared else gpu.max_blocks_per_sm,
    }
    limited_by = min(limits, key=limits.get)
    warps = limits[limited_by] * warps_each
    return Occupancy(limits[limited_by], warps, warps / gpu.max_warps_per_sm, limited_by)


def without_comments(ptx: str) -> str:
    """PTX without its comments and without the listing of sections and file names at its end."""
    ptx = re.sub(r"//[^\n]*", "", ptx)
    return re.sub(r"^\s*\.(?:section|file|loc|ascii|b8|b32|b64)\b[^\n]*", "", ptx, flags=re.MULTILINE)


def _pack(job: Job) -> dict:
    """The job as JSON. The parameters are sorted out here, so that a forgotten one is an error at the call."""
    inner = plain(job.kernel)
    parameters = list(job.kernel.arg_names)
    unknown = [name for name in (*job.signature, *job.constants) if name not in parameters]
    if unknown:
        raise ValueError(f"{inner.__name__} has no parameter {unknown[0]!r}; it has {', '.join(parameters)}")
    both = [name for name in job.signature if name in job.constants]
    if both:
        raise ValueError(f"{inner.__name__}: {both[0]!r} is in signature and in constants; keep one of them")
    defaults = {name: p.default for name, p in inspect.signature(inner).parameters.items() if p.default is not p.empty}
    constants, types = {}, {}
    for name in parameters:
        if name in job.signature:
            types[name] = job.signature[name]
        elif name in job.constants or name in defaults:
            value = job.constants.get(name, defaults.get(name))
            constants[name] = literal(value)
            if constants[name] is None:
                raise ValueError(
                    f"{inner.__name__}: {name}={value!r} cannot be compiled in; give a number, string or dtype"
                )
        else:
            raise ValueError(
                f"{inner.__name__}: parameter {name!r} has neither a type in signature nor a value in constants"
            )
    return {
        "kernel": pack(job.kernel, job.helpers), "parameters": parameters, "types": types, "constants": constants,
        "name": job.name or inner.__name__, "capability": job.capability,
        "num_warps": job.num_warps, "num_stages": job.num_stages,
    }  # fmt: skip


def _identity(packed: dict) -> dict:
    return {key: packed[key] for key in ("name", "capability", "num_warps", "num_stages")}


def main() -> None:
    """The process that compiles: jobs as JSON on standard input, reports as JSON on standard output."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the compiler prints is no report
    os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"  # `_compile` reads it
    with tempfile.TemporaryDirectory() as folder:
        reports = [_compile(packed, Path(folder)) for packed in json.load(sys.stdin)]
    json.dump([asdict(report) for report in reports], answer)
    answer.close()


def _compile(packed: dict, folder: Path) -> Report:
    from triton.backends.compiler import GPUTarget

    options = {"num_warps": packed["num_warps"], "num_stages": packed["num_stages"]}
    log = folder / "log.txt"
    try:
        # Where a pass of the compiler complains, only the log says about what.
        with diverted(2, log), contextlib.redirect_stdout(io.StringIO()) as printed:
            source = _source(unpack(packed["kernel"], folder), packed)
            compiled = triton.compile(source, target=GPUTarget("cuda", packed["capability"], 32), options=options)
            ptx = compiled.asm["ptx"]
            # Where Triton's cache had the kernel, or where it is too old to print it, ptxas has to say it again.
            sizes = _sizes(printed.getvalue()) or _sizes(_assemble(ptx, packed["capability"], folder))
    except Exception as error:  # whatever the compiler objects to is the report
        return Report(**_identity(packed), error=_reason(error, log.read_text(errors="replace")))
    facts = compiled.metadata
    return Report(
        **_identity(packed), shared_bytes=facts.shared, ptx=ptx, extra_warps=facts.num_warps - packed["num_warps"],
        tensor_memory_columns=getattr(facts, "tmem_size", 0) or 0, **sizes
    )  # fmt: skip


@contextlib.contextmanager
def diverted(descriptor: int, file: Path) -> Iterator[None]:
    """What is written to an open file descriptor, by compiled code too, goes to `file` meanwhile."""
    kept = os.dup(descriptor)
    with file.open("wb") as target:
        os.dup2(target.fileno(), descriptor)
        try:
            yield
        finally:
            os.dup2(kept, descriptor)
            os.close(kept)


def _source(kernel, packed: dict):
    """Triton's name for a kernel with its types. Before 3.3 it knew no "constexpr" types, and hints were an object."""
    from triton.compiler import ASTSource

    if hasattr(kernel, "is_gluon") and kernel.is_gluon():
        from triton.experimental.gluon import GluonASTSource as ASTSource

    constants = {name: eval(text) for name, text in packed["constants"].items()}  # text that `literal` wrote
    types, aligned = {}, []
    for position, name in enumerate(packed["parameters"]):
        kind, _, hint = packed["types"].get(name, "constexpr").partition(":")
        types[name] = kind
        if hint == "16" or (kind.startswith("*") and hint == ""):
            aligned.append(position)
    try:
        from triton.backends.compiler import AttrsDescriptor
    except ImportError:
        hints = {(position,): [["tt.divisibility", 16]] for position in aligned}
        return ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=hints)
    types = {name: kind for name, kind in types.items() if kind != "constexpr"}
    hints = AttrsDescriptor.from_hints(dict.fromkeys(aligned, 16))
    return ASTSource(fn=kernel, signature=types, constants=constants, attrs=hints)


def _assemble(ptx: str, capability: int, folder: Path) -> str:
    """What ptxas says of the text when it is asked to be verbose."""
    file = folder / "kernel.ptx"
    file.write_text(ptx)
    architecture = re.search(r"^\s*\.target\s+(\w+)", ptx, re.MULTILINE)[1]
    tool, options = _assembler(capability)
    command = [tool, "-v", *options, f"--gpu-name={architecture}", str(file), "-o", str(folder / "kernel.cubin")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            next((line for line in done.stderr.splitlines() if "fatal" in line or "error" in line), done.stderr)
        )
    return done.stderr


def _sizes(said: str) -> dict[str, int] | None:
    """Registers, stack and spills, where ptxas said them."""
    spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    registers = re.search(r"Used (\d+) registers", said)
    names = ("registers", "stack_bytes", "spill_store_bytes", "spill_load_bytes")
    return (
        dict(zip(names, map(int, (*registers.groups(), *spills.groups())), strict=True))
        if spills and registers
        else None
    )


def _assembler(capability: int) -> tuple[str, list[str]]:
    """The ptxas that Triton itself uses for this GPU, one of those that come with it,
    and its way of using registers."""
    from triton.backends.nvidia import compiler

    options = re.findall(r"'(--regAllocOptLevel=\d)'", inspect.getsource(compiler.CUDABackend.make_cubin))
    choose = getattr(compiler, "get_ptxas", None)  # 3.2 and 3.3 had one ptxas and no such function
    if choose is None:
        return str(Path(compiler.__file__).parent / "bin" / "ptxas"), options
    tool = choose(capability) if inspect.signature(choose).parameters else choose()
    return tool.path, options


def _reason(error: BaseException, log: str) -> str:
    """One line: the innermost of a chain of errors, or, when a pass of the compiler failed, what the pass said."""
    while error.__cause__ is not None:
        error = error.__cause__
    said = [line.split("error:", 1)[1].strip() for line in log.splitlines() if "error:" in line]
    message = said[0] if said and isinstance(error, RuntimeError) else last_line(str(error))
    message = re.sub(r", #[^']*'", ">'", message)  # a tensor's type without how it lies in the threads
    return f"{type(error).__name__}: {message}"


if __name__ == "__main__":
    main()
