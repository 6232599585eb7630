"""An experiment whose rollout engine cannot be had here is refused before anything is started."""

import importlib.util
import socket
from pathlib import Path

import pytest

from experiments.load import load_experiment
from experiments.preflight import require_executable
from marlaas.errors import InputError

QUICKSTART = Path(__file__).parents[2] / "experiments" / "quickstart.yaml"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_vllm_that_is_not_installed_is_refused_with_the_way_to_get_it() -> None:
    """The message names the key and the command that mends it."""
    experiment = load_experiment(QUICKSTART, ["cluster.replicas.engine=vllm"])
    with pytest.raises(InputError, match=r"cluster\.replicas\.engine: vllm needs vllm.*make install-vllm"):
        require_executable(experiment)


@pytest.mark.skipif(importlib.util.find_spec("aiohttp") is None, reason="aiohttp is not installed here")
def test_a_server_that_does_not_answer_is_refused_with_how_to_start_one() -> None:
    """The message names the URL that nobody listens at."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and never listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        experiment = load_experiment(QUICKSTART, [f"cluster.replicas={{engine: openai, urls: [{url}]}}"])
        with pytest.raises(InputError, match=r"cluster\.replicas\.urls\[0\]: .*does not answer.*vllm serve"):
            require_executable(experiment)
