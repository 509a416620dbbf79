"""The GPUs the book speaks of: what one multiprocessor holds, and the two rooflines. Built in chapter 11.

A kernel's programs are placed on streaming multiprocessors (SMs). Registers, shared memory, threads and blocks of an SM
are fixed numbers, given by the compute capability: CUDA C++ Programming Guide, "Compute Capabilities", table "Technical
Specifications per Compute Capability". The number of SMs, the bandwidth and the rates are those of NVIDIA's data
sheets, as named in `source`: peaks at boost clock, tensor cores with fp32 sums and without sparsity.
"""

from __future__ import annotations

from dataclasses import dataclass

KB = 1024


@dataclass(frozen=True)
class GPU:
    """One GPU by the numbers that decide how a kernel runs on it. Sizes in bytes, rates a second."""

    name: str
    capability: int  # 80 is 8.0
    num_sms: int
    shared_per_sm: int
    max_shared_per_block: int  # what one program can be given
    max_threads_per_sm: int
    max_blocks_per_sm: int
    memory_bandwidth: float  # bytes/s
    fp16_tensor_flops: float  # FLOP/s
    fp32_flops: float  # FLOP/s, without tensor cores
    source: str
    registers_per_sm: int = 65_536  # of 32 bits, on every one of these
    max_registers_per_thread: int = 255
    fp8_tensor_flops: float | None = None  # FLOP/s; None: its tensor cores do not multiply in this format
    fp4_tensor_flops: float | None = None

    @property
    def max_warps_per_sm(self) -> int:
        """Warps of 32 threads that an SM keeps in flight at most."""
        return self.max_threads_per_sm // 32


GPUS: dict[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        GPU("T4", 75, 40, 64 * KB, 64 * KB, 1024, 16, 320e9, 65e12, 8.1e12, "NVIDIA T4 data sheet; Turing whitepaper"),
        GPU("A100", 80, 108, 164 * KB, 163 * KB, 2048, 32, 2039e9, 312e12, 19.5e12,
            "NVIDIA A100 80 GB SXM data sheet; A100 whitepaper"),
        GPU("L4", 89, 58, 100 * KB, 99 * KB, 1536, 24, 300e9, 121e12, 30.3e12,
            "NVIDIA L4 data sheet; Ada whitepaper", fp8_tensor_flops=242e12),
        GPU("H100", 90, 132, 228 * KB, 227 * KB, 2048, 32, 3350e9, 989e12, 67e12,
            "NVIDIA H100 SXM data sheet; H100 whitepaper", fp8_tensor_flops=1979e12),
        GPU("H200", 90, 132, 228 * KB, 227 * KB, 2048, 32, 4800e9, 989e12, 67e12,
            "NVIDIA H200 SXM data sheet; H100 whitepaper", fp8_tensor_flops=1979e12),
        GPU("B200", 100, 148, 228 * KB, 227 * KB, 2048, 32, 7700e9, 2250e12, 75e12,
            "NVIDIA HGX B200 data sheet", fp8_tensor_flops=4500e12, fp4_tensor_flops=9000e12),
        GPU("RTX 5090", 120, 170, 100 * KB, 99 * KB, 1536, 24, 1792e9, 209.5e12, 104.8e12,
            "NVIDIA RTX Blackwell GPU Architecture whitepaper", fp8_tensor_flops=419e12, fp4_tensor_flops=1676e12),
    )
}  # fmt: skip
