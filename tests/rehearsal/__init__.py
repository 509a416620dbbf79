"""A rehearsal of minillm on a GPU that is not there.

    python -m tests.rehearsal [scenario ...] [--gpu H200] [--verbose]

Real is all of minillm's Python (loading, engine, scheduler, runner, graphs, sampler), every tensor in host memory, and
Triton's argument binder with its specialisation keys. Pretended are `torch.cuda`, the tensors on "cuda" (they
have shape, strides and dtype, and no memory), and the launch itself.

    device         the GPU's streams, events and graphs; stands in for torch.cuda
    memory         what is allocated on the device, and what that leaves
    host           pinned memory, and copies that are on their way
    tensors        sees every torch operation
    values         what the host reads from the device
    triton_stub    sees every launch and every kernel that would be compiled
    notes          what was seen
    scenarios      an LLM and requests for it, one for each way through the engine
    shapes         a model of Qwen3-0.6B's shape: launches of a recorded step, and memory
    toys           small wrongs that it must see
    expected       what is allowed today, scenario by scenario
"""
