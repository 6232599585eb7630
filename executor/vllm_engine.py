"""A replica that runs vLLM: its own processes inside our worker's process group, one event loop between them.

    worker ──► ServedRolloutEngine ──► VllmServer ──► AsyncLLM ··· vLLM's engine process ··· device processes

Owns the start: surroundings, engine, watch over its processes, probe.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import threading
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from executor import devices
from executor.base_facts import read_facts
from executor.probe import probe
from executor.reaper import contain
from executor.served_engine import ServedRolloutEngine, ServerLost
from executor.vllm_counters import IterationCounters
from executor.vllm_settings import engine_arguments, set_surroundings
from executor.wire import WorkerSpec
from marlaas.errors import InputError


def start_vllm(spec: WorkerSpec) -> ServedRolloutEngine:
    """Start vLLM in this worker and prove that it serves adapters; takes half a minute or more."""
    model, replicas = spec.experiment.model, spec.experiment.cluster.replicas
    base = read_facts(model.path, model.lora)
    device = devices.kind_of(replicas.device)
    dtype = devices.precision(model.dtype, device)
    contain()
    set_surroundings(replicas, base, device, dtype, spec.cores)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    counters = IterationCounters(spec.name, replicas.kv_tokens)
    arguments = engine_arguments(model, replicas, base, device, dtype)
    server = loop.run_until_complete(_start(arguments, device, base.eos_token_ids, counters))
    _watch(multiprocessing.active_children())
    loop.run_until_complete(probe(server, base, model.path))
    counters.window(is_idle=True)  # the probe is nobody's work
    return ServedRolloutEngine(loop, server, base, replicas, counters)


async def _start(
    arguments: dict[str, Any], device: str, eos_token_ids: tuple[int, ...], counters: IterationCounters
) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    from executor.vllm_server import VllmServer

    if current_platform.device_type != device:
        problem = f"the vLLM installed here computes on {current_platform.device_type}"
        raise InputError("cluster.replicas.device", problem, f"wanted a vLLM for {device}")
    engine_args = AsyncEngineArgs(**arguments)
    llm = AsyncLLM.from_engine_args(engine_args, stat_loggers=[lambda config, index=0: counters])
    return VllmServer(llm, eos_token_ids)


def _watch(processes: list[BaseProcess]) -> None:
    """Let the worker end with a reason when one of vLLM's processes does, even while it has no orders."""
    ended: list[str] = []

    def wait() -> None:
        connection.wait([process.sentinel for process in processes])
        dead = next((process for process in processes if not process.is_alive()), processes[0])
        ended.append(f"vLLM's engine process ended with status {dead.exitcode}")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    def tell(number: int, frame: FrameType | None) -> None:
        raise ServerLost(ended[0] if ended else "told to end by SIGUSR1")

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, tell)
        threading.Thread(target=wait, daemon=True, name="vllm-watch").start()
