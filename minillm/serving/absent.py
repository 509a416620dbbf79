"""Paths of OpenAI's and vLLM's APIs that are not served, and what there is instead. Built in chapter 23."""

from __future__ import annotations

ABSENT = {
    "/v1/responses": "use /v1/chat/completions",
    "/v1/embeddings": "LLM.embed computes embeddings offline",
    "/pooling": "LLM.encode pools offline",
    "/score": "LLM.score compares offline",
    "/rerank": "LLM.score compares offline",
    "/v1/messages": "use /v1/chat/completions",
    "/v1/images": "the book serves text",
    "/v1/audio": "the book serves text",
    "/v1/moderations": "the book has no model for them",
    "/v1/assistants": "nothing of a request is kept; use /v1/chat/completions",
    "/v1/threads": "nothing of a request is kept; use /v1/chat/completions",
    "/v1/files": "nothing of a request is kept",
    "/v1/batches": "send the requests at once: they share steps",
    "/v1/fine_tuning": "`minillm train --lora` trains adapters",
    "/v2": "/openapi.json lists what a server with --model-repository has of it",
}


def why_absent(path: str) -> str:
    """The message of a 404 for a path that there is not."""
    for prefix, instead in ABSENT.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            return f"{path} is not served: {instead}"
    return f"there is no path {path}; /openapi.json lists those that are"
