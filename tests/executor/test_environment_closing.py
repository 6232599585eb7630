"""What environments hold is let go of when a run or an evaluation ends, however it ends."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace
from scripted_runs import GOOD, Memory, ScriptedEnvironment, small

from executor.backend import Plugins
from executor.driver import execute
from executor.environments import Environment, Observation, Problem, build, close_all
from executor.environments.sums import Sums
from marlaas.spec import EnvironmentSpec, MathEnvironment, SumsEnvironment


class Holding(ScriptedEnvironment):
    """Holds something from its first answer on."""

    held = 0

    async def step(self, problem: Problem, turns: Sequence[str]) -> Observation:
        self.held += 1
        return await super().step(problem, turns)

    async def close(self) -> None:
        self.held = -1


def plugins(environment: Environment) -> Plugins:
    """Scripted engines and one environment for every spec."""

    def made(spec: EnvironmentSpec) -> Environment:
        return environment

    return Plugins(
        replica="scripted_engines:WatermarkReplica", lane="scripted_engines:WatermarkLane", environment=made
    )


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_run_closes_its_environments(tmp_path: Path, is_broken: bool) -> None:
    """Also one that ends by an error."""
    environment = Holding(lambda problem, turns: GOOD)

    def look(event: object, commands: object) -> None:
        if environment.held and is_broken:
            raise RuntimeError("the observer is broken")

    experiment = small(tmp_path, environments=("env",), steps=1)
    if is_broken:
        with pytest.raises(RuntimeError, match="the observer is broken"):
            execute(experiment, tmp_path, Memory(), look, plugins=plugins(environment))
    else:
        execute(experiment, tmp_path, Memory(), look, plugins=plugins(environment))
    assert environment.held == -1


@pytest.mark.slow
def test_a_run_with_graders_leaves_no_process_behind(tmp_path: Path) -> None:
    """Real graders in a real run."""
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    experiment = replace(
        small(tmp_path, environments=("env",), steps=1), environments={"env": MathEnvironment()}
    )
    environment = build(MathEnvironment())
    outcomes = execute(experiment, tmp_path, Memory(), plugins=plugins(environment))
    assert outcomes == {"task-0": "done"}
    children = psutil.Process().children(recursive=True)
    assert not [child for child in children if "executor.environments.judge" in " ".join(child.cmdline())]


def test_environments_that_hold_nothing_need_no_closing() -> None:
    """The two kinds may be mixed."""
    environment = Holding(lambda problem, turns: GOOD)
    asyncio.run(close_all([Sums(SumsEnvironment()), environment]))
    assert environment.held == -1
