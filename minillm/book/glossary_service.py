"""The terms of Part VII in the glossary, in alphabetical order. Built in chapter 91."""

from __future__ import annotations

from minillm.book.glossary_terms import Term

# fmt: off
SERVICE_TERMS = [
    Term("admission control",
         "Refusing a request at once where the work under way has reached a limit; the admitted ones stay fast.",
         "`--max-num-queued-reqs`", "`--max-queued-requests`", "", 23),
    Term("back-pressure", "A slow reader makes its writer wait, and no other request.", "", "", "", 23),
    Term("drain", "Admit nothing more, finish what is under way, then end.", "", "", "", 23),
    Term("engine thread", "The only thread that steps the engine; all others send it messages.",
         "`EngineCore` process", "scheduler process", "", 23),
    Term("event loop", "One thread that runs many coroutines, each until it has to wait.", "", "", "", 23),
    Term("model repository", "A folder of models by name and version, from which a server loads and unloads.",
         "", "", "model repository (Triton Inference Server)", 23),
    Term("server-sent events", "SSE: an HTTP answer that grows event by event, `data:` lines ended by an empty line.",
         "", "", "", 23),
]
# fmt: on
