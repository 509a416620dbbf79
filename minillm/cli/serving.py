"""`minillm serve`: a model behind OpenAI's API. Built in chapter 23."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ..bench.console import Backend, Device, PipelineParallel, TensorParallel, errors_in_one_line, log
from . import fleet

KEY_VARIABLE = "MINILLM_API_KEY"


def serve(
    model: Annotated[
        str | None, typer.Argument(help="A bundled name, a local folder, or a hub id.", show_default="tinyworld")
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 listens on every network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="The model's name in requests and answers.")] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A key that lets a client in; may be given again. ${KEY_VARIABLE} holds one too.", show_default=False
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A TOML file of keys with their users, priorities and limits a minute.")
    ] = None,
    model_repository: Annotated[
        Path | None, typer.Option(help="A folder of NAME/VERSION folders, loaded and unloaded at /v2/repository.")
    ] = None,
    load_model: Annotated[
        list[str] | None,
        typer.Option(help="A model to begin with; may be given again. By default all of them; none: no model."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="For all models of the repository, such as 8GiB; by default half of what is free."),
    ] = None,
    model_share: Annotated[
        float, typer.Option(help="Of --memory for one model and its KV cache, unless it needs more.")
    ] = 0.25,
    follow_links: Annotated[
        bool, typer.Option("--follow-links", help="Links of the repository may lead out of it.")
    ] = False,
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    quantization: Annotated[str | None, typer.Option(help="int8, int4, fp8 ...: low-bit weights.")] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, int8, fp8 or int4.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of a prompt and its answer together.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Requests in one step.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens in one step.")] = 8192,
    num_kv_blocks: Annotated[int | None, typer.Option(help="Blocks of the KV cache; by default what fits.")] = None,
    scheduling_policy: Annotated[
        str, typer.Option(help="fcfs, priority, preemptive_priority, sjf, fair or lpm.")
    ] = "fcfs",
    tensor_parallel_size: TensorParallel = 1,
    pipeline_parallel_size: PipelineParallel = 1,
    distributed_executor_backend: Backend = "mp",
    speculative_config: Annotated[
        str | None, typer.Option(help='JSON, as in \'{"method": "ngram", "num_speculative_tokens": 4}\'.')
    ] = None,
    disk_kv_path: Annotated[
        Path | None,
        typer.Option(help="A folder that keeps prefixes over a restart; needs --disk-kv-bytes and --host-kv-bytes."),
    ] = None,
    disk_kv_bytes: Annotated[int, typer.Option(help="What that folder may hold.")] = 0,
    host_kv_bytes: Annotated[int, typer.Option(help="Host memory for blocks that the device has no room for.")] = 0,
    enable_lora: Annotated[
        bool, typer.Option("--enable-lora", help="Let clients load adapters from folders of this machine.")
    ] = False,
    lora: Annotated[
        list[str] | None, typer.Option(help="NAME=FOLDER of an adapter to serve; may be given again.")
    ] = None,
    max_loras: Annotated[int, typer.Option(help="Different adapters in one step.")] = 8,
    max_lora_rank: Annotated[int, typer.Option(help="Of an adapter; 64 at most.")] = 16,
    max_cpu_loras: Annotated[
        int | None, typer.Option(help="Adapters in host memory; by default 4 x max-loras.")
    ] = None,
    max_queued_requests: Annotated[
        int, typer.Option(help="Prompts under way and waiting; beyond that 429. 0: no limit.")
    ] = 1024,
    max_queued_tokens: Annotated[
        int, typer.Option(help="Tokens that these may still come to; beyond that 429. 0: no limit.")
    ] = 0,
    max_body_bytes: Annotated[int, typer.Option(help="Of one request.")] = 4 * 2**20,
    request_seconds: Annotated[float | None, typer.Option(help="A request that takes longer is ended.")] = None,
    drain_seconds: Annotated[float, typer.Option(help="After SIGTERM, for requests under way.")] = 30.0,
    replicas: fleet.Replicas = 1,
    router_policy: fleet.RouterPolicy = "prefix_aware",
    prefill_replicas: fleet.PrefillReplicas = 0,
    autoscaler: fleet.Autoscaler = None,
    min_replicas: fleet.MinReplicas = None,
    max_replicas: fleet.MaxReplicas = None,
    ray: fleet.Ray = False,
    ray_address: fleet.RayAddress = None,
    kv_transport: fleet.KVTransport = "auto",
    tool_call_parser: Annotated[
        str, typer.Option(help="How the model writes tool calls: hermes, llama3_json, mistral or pythonic.")
    ] = "hermes",
    page: Annotated[bool, typer.Option("--page/--no-page", help="The chat and the engine room at /.")] = True,
    access_log: Annotated[bool, typer.Option("--access-log/--no-access-log", help="A line for each request.")] = True,
) -> None:
    """Serve a model over OpenAI's API, until Ctrl-C or SIGTERM.

    `minillm serve tinyworld`

    `curl localhost:8000/v1/completions --json '{"prompt": "Once upon a time"}'`

    `minillm serve --model-repository models/` serves `models/NAME/VERSION`, and changes what is loaded while it runs:

    `curl -X POST localhost:8000/v2/repository/models/NAME/load`
    """
    with errors_in_one_line():
        import json

        try:
            from ..serving.config import ServerConfig
            from ..serving.keys import Key, read_key_file
            from ..serving.run import run
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("minillm"):
                raise
            raise ModuleNotFoundError(
                f"`minillm serve` needs {error.name}; pip install 'minillm-book[serve]'", name=error.name
            ) from None

        secrets = [*(api_key or ()), *filter(None, [os.environ.get(KEY_VARIABLE)])]
        keys = tuple(Key(secret) for secret in dict.fromkeys(secrets))
        if api_key_file is not None:
            keys += read_key_file(api_key_file)
        config = ServerConfig(
            host=host,
            port=port,
            served_model_name=served_model_name,
            keys=keys,
            max_body_bytes=max_body_bytes,
            max_queued_requests=max_queued_requests or None,
            max_queued_tokens=max_queued_tokens or None,
            request_seconds=request_seconds,
            drain_seconds=drain_seconds,
            page=page,
            tool_call_parser=tool_call_parser,
            load_adapters=enable_lora,
            adapters=tuple(map(named_folder, lora or ())),
        )
        if host not in ("127.0.0.1", "localhost", "::1") and not keys:
            log.print(
                f"anyone who reaches {host} may use this server; --api-key lets in those who have it", style="yellow"
            )
        options: dict[str, Any] = {
            "device": device,
            "dtype": dtype,
            "quantization": quantization,
            "kv_cache_dtype": kv_cache_dtype,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "num_kv_blocks": num_kv_blocks,
            "scheduling_policy": scheduling_policy,
            "tensor_parallel_size": tensor_parallel_size,
            "pipeline_parallel_size": pipeline_parallel_size,
            "distributed_executor_backend": distributed_executor_backend,
            "disk_kv_path": disk_kv_path,
            "disk_kv_bytes": disk_kv_bytes,
            "host_kv_bytes": host_kv_bytes,
            "enable_lora": enable_lora or bool(lora),
            "max_loras": max_loras,
            "max_lora_rank": max_lora_rank,
            "max_cpu_loras": max_cpu_loras,
            "speculative_config": speculative_config and json.loads(speculative_config),
        }
        if model_repository is not None:
            from ..serving.memory import Memory, default_memory, parse_bytes
            from ..serving.repository import Repository

            of_one = {"MODEL": model, "--served-model-name": served_model_name, "--lora": lora or None}
            of_one |= {"--replicas": replicas if replicas > 1 else None, "--autoscaler": autoscaler}
            for name, value in of_one.items():
                if value is not None:
                    raise ValueError(f"{name} {value!r} and --model-repository exclude each other; leave one out")
            total = default_memory(device) if memory is None else parse_bytes(memory)
            first = None if load_model is None else tuple(name for name in load_model if name != "none")
            repository = Repository(model_repository, options, Memory(total, model_share), first, follow_links)
            told = f"serving the models of {model_repository} at"
            run(None, config, access_log, lambda url: log.print(f"{told} {url}", highlight=False), repository)
            return
        model = model or "tinyworld"
        log.print(f"loading {model} ...", style="dim", highlight=False)
        of_fleet = dict(
            replicas=replicas, router_policy=router_policy, prefill_replicas=prefill_replicas, autoscaler=autoscaler,
            min_replicas=min_replicas, max_replicas=max_replicas, ray=ray, ray_address=ray_address,
            kv_transport=kv_transport,
        )  # fmt: skip
        with fleet.serving_engine(model, options, of_fleet) as engine:
            run(engine, config, access_log, lambda url: log.print(f"serving {model} at {url}", highlight=False))


def named_folder(given: str) -> tuple[str, str]:
    """NAME=FOLDER, apart."""
    name, equals, folder = given.partition("=")
    if not (name and equals and folder):
        raise ValueError(f"--lora {given!r} is not allowed; allowed: NAME=FOLDER, as in pirate=adapters/pirate")
    return name, folder
