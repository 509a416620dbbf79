"""The terms of Part VII in the glossary, in alphabetical order. Built in chapter 91."""

from __future__ import annotations

from minillm.book.glossary_terms import Term

# fmt: off
SERVICE_TERMS = [
    Term("admission control",
         "Refusing a request at once where the work under way has reached a limit; the admitted ones stay fast.",
         "`--max-num-queued-reqs`", "`--max-queued-requests`", "", 23),
    Term("back-pressure", "A slow reader makes its writer wait, and no other request.", "", "", "", 23),
    Term("closed loop", "A load test in which each user sends the next request when the last answer has come.",
         "`--max-concurrency`", "`--max-concurrency`", "closed system model (Schroeder et al., 2006)", 24),
    Term("coordinated omission",
         "A tester that waits for the server leaves out just the requests that would have been slow.",
         "", "", "Tene, 2012", 24),
    Term("drain", "Admit nothing more, finish what is under way, then end.", "", "", "", 23),
    Term("engine thread", "The only thread that steps the engine; all others send it messages.",
         "`EngineCore` process", "scheduler process", "", 23),
    Term("event loop", "One thread that runs many coroutines, each until it has to wait.", "", "", "", 23),
    Term("knee", "The rate from which on latency grows without bound; capacity for a promise lies below it.",
         "", "", "", 24),
    Term("maximum batch weight",
         "The most tokens that may be in a batch: of a step, by a latency (chapter 08); of the cache, by memory.",
         "`max_num_batched_tokens`; GPU KV cache size", "`max_total_num_tokens`", "LLM-Pilot", 8),
    Term("model repository", "A folder of models by name and version, from which a server loads and unloads.",
         "", "", "model repository (Triton Inference Server)", 23),
    Term("open loop", "A load test that sends at times of its own, however slow the answers are.",
         "`--request-rate`", "`--request-rate`", "open system model (Schroeder et al., 2006)", 24),
    Term("Pareto curve", "The operating points that no other point beats in both of two measures.",
         "`vllm bench sweep plot_pareto`", "", "", 24),
    Term("server-sent events", "SSE: an HTTP answer that grows event by event, `data:` lines ended by an empty line.",
         "", "", "", 23),
    Term("utilization",
         "Share of the capacity that is asked for; of a GPU, the share of the time in which a kernel runs.",
         "", "", "", 24),
]
# fmt: on
