from pathlib import Path

import pytest

from experiments.load import dump_experiment, load_experiment, load_profile, model_folder, profile_file
from experiments.schema import Misfit, convert
from marlaas.errors import InputError
from marlaas.spec import Experiment
from marlaas.systems import SYSTEMS

ROOT = Path(__file__).parents[2]
EXPERIMENTS = sorted((ROOT / "experiments").glob("*.yaml")) + sorted(
    (ROOT / "experiments" / "ascend").glob("*.yaml")
)
LIBRARY = ROOT / "sim" / "library"
PROFILES = sorted((ROOT / "experiments" / "profiles").glob("*.yaml")) + sorted(
    LIBRARY.glob("profiles/*.yaml")
)

# What a user may type, and what the answer must contain: the path, what was wanted, the nearest name.
BAD_SETTINGS = {
    "tasks.0.stpes=3": ["tasks[0].stpes: unknown key", "did you mean steps?"],
    "tasks.0.lr=1": ["tasks[0].lr: unknown key", "did you mean training.lr?"],
    "environments.calc.latncy_s=1": ["environments.calc.latncy_s: unknown key", "did you mean latency_s?"],
    "tasks.0.steps=1.5": ["tasks[0].steps: got 1.5", "a whole number at least 1"],
    "tasks.0.steps=true": ["tasks[0].steps: got true", "a whole number"],
    "tasks.0.steps=": ["tasks[0].steps: got the text ''"],
    "tasks.0.training.lr=fast": ["tasks[0].training.lr: got the text 'fast'", "a number above 0"],
    "tasks.0.training.lr=.inf": ["tasks[0].training.lr: got inf"],
    "tasks.0.training.lr=.nan": ["tasks[0].training.lr: got nan"],
    "tasks=[]": ["tasks: got a list of 0 items", "at least 1 items"],
    "tasks.0.name=a b": ["tasks[0].name", "cannot be a name"],
    "tasks.1.name=adder-1": ["tasks[1].name: duplicate task name 'adder-1'", "given by tasks[0]"],
    "tasks.0.environment=clac": ["tasks[0].environment: unknown environment 'clac'", "did you mean calc?"],
    "tasks.1.max_turns=1": ["tasks[1].max_turns", "wanted at least 2"],
    "tasks.0.samples=1": ["tasks[0].samples: a group of 1", "min_group"],
    "tasks.0.limits.min_group=9": ["tasks[0].limits.min_group: a group of 2", "min_group"],
    "tasks.0.workload={}": ["tasks[0].workload.prompt_tokens: the key is missing"],
    "tasks.9.steps=3": ["tasks has no item '9'", "an index from 0 to 1"],
    "tasks.0.steps.x=3": ["tasks[0].steps has no keys"],
    "environments.calc.kind=sum": ["environments.calc.kind: unknown value 'sum'", "did you mean sums?"],
    "environments.calc.kind=null": ["environments.calc.kind: unknown value None"],
    "environments.calc.operations=x": ["environments.calc.operations: unknown value 'x'", "+-"],
    "environments.calc.latency_s=3": ["environments.calc.latency_s: got 3", "kind: one of fixed, uniform"],
    "environments.calc.latency_s={low: 1}": ["environments.calc.latency_s.kind: the key is missing"],
    "environments.calc.latency_s.low=9": ["environments.calc.latency_s.low: 9 is above high"],
    "environments.calc.timeout_s=0.05": ["environments.calc.latency_s: every answer takes at least 0.1 s"],
    "environments.letters.min_letters=9": ["environments.letters.min_letters: 9 is above max_letters"],
    "environments.calc.latency_s={kind: mixture, weights: [1], parts: []}": ["latency_s.weights: 1 weights"],
    "environments.calc.latency_s={kind: mixture, weights: [], parts: []}": ["latency_s.parts: a mixture of"],
    "environments={}": ["tasks[0].environment: unknown environment 'calc'", "none"],
    "system=marlas": ["system: unknown system 'marlas'", "did you mean marlaas?"],
    "system.barrier=rond": ["system.barrier: unknown value 'rond'", "did you mean round?"],
    "system=3": ["system: got 3", "a text or a mapping"],
    "cluster.replicas.kv_tokens=20": ["tasks[0]: a trajectory can reach 96 tokens", "kv_tokens, 20"],
    "cluster.replicas.slots=0": ["cluster.replicas.slots: got 0", "at least 1"],
    "cluster.replicas.engine=vlm": ["cluster.replicas.engine: unknown value 'vlm'", "did you mean vllm?"],
    "cluster.replicas.engine=openai": ["cluster.replicas.urls: 0 servers for 1 replicas", "one URL for each"],
    "cluster.replicas.urls=[http://a:1]": ["cluster.replicas.urls: torch replicas", "engine: openai"],
    "cluster.replicas={engine: openai, urls: [a:8000]}": ["cluster.replicas.urls[0]: 'a:8000'", "http://"],
    "cluster.replicas.pipeline_parallel=2": ["pipeline_parallel: 2 stages", "a divisor of devices"],
    "cluster.replicas.memory_utilization=1.1": ["memory_utilization: got 1.1", "at most 1"],
    "cluster.replicas={block_tokens: 64, kv_tokens: 60}": ["kv_tokens: 60 are less than one block of 64"],
    "operations=[{do: kill, at_s: 3, worker: replica-1}]": ["operations[0].worker: unknown", "replica-0"],
    "operations=[{do: pause, at_s: 3, task: adder}]": ["operations[0].task: unknown", "adder-0"],
    "operations=[{do: pase, at_s: 3, task: finder}]": [
        "operations[0].do: unknown value",
        "did you mean pause?",
    ],
    "operations=[{do: pause, at: 3, task: finder}]": ["operations[0].at: unknown key", "did you mean at_s?"],
    "model.lora.targets=[q, 3]": ["model.lora.targets[1]: got 3", "a text"],
    "model=null": ["model: got nothing", "a mapping"],
    "seed=-1": ["seed: got -1", "at least 0"],
    "seed": ["not a setting", "KEY.PATH=VALUE"],
    "tasks.1.name=*": ["not YAML"],
}


@pytest.mark.parametrize(("setting", "parts"), BAD_SETTINGS.items(), ids=BAD_SETTINGS.keys())
def test_a_bad_setting_is_refused_with_path_wanted_and_nearest(
    small: Path, setting: str, parts: list[str]
) -> None:
    """One message says where, what is wrong, what was wanted, and the nearest valid name."""
    with pytest.raises(InputError) as caught:
        load_experiment(small, [setting])
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert message.startswith(("--set", str(small)))
    assert "\n" not in message


def test_a_mistake_in_the_file_names_its_line(small: Path) -> None:
    """Without an override to blame, the message begins with file and line."""
    small.write_text(small.read_text().replace("prompts: 2\n", "promts: 2\n"))
    with pytest.raises(
        InputError, match=r"small\.yaml:11: tasks\[1\]\.promts: unknown key; did you mean prompts"
    ):
        load_experiment(small)


def test_a_missing_file_names_its_neighbours(small: Path) -> None:
    """A misspelt file name is answered with the nearest file of the folder."""
    with pytest.raises(InputError, match=r"no such file.*did you mean small\.yaml"):
        load_experiment(small.parent / "smal.yaml")
    with pytest.raises(InputError, match=r"the folder .*nowhere does not exist"):
        load_experiment(small.parent / "nowhere" / "small.yaml")
    with pytest.raises(InputError, match="this is a folder"):
        load_experiment(small.parent)


def test_count_writes_a_task_several_times(small: Path) -> None:
    """`count: 2` gives adder-0 and adder-1, each counted once."""
    experiment = load_experiment(small)
    assert [(task.name, task.count) for task in experiment.tasks] == [
        ("adder-0", 1),
        ("adder-1", 1),
        ("finder", 1),
    ]


@pytest.mark.parametrize("system", SYSTEMS)
def test_resolved_dumps_and_parses_to_the_same(small: Path, system: str) -> None:
    """The experiment.yaml of a run folder is the experiment, wherever it lies."""
    experiment = load_experiment(small, ["tasks.0.training.lr=1e-5", 'tasks.1.name="1e5"'], system)
    copy = small.parent / "elsewhere" / "experiment.yaml"
    copy.parent.mkdir()
    copy.write_text(dump_experiment(experiment))
    assert load_experiment(copy) == experiment
    assert experiment.system == system
    assert experiment.tasks[0].training.lr == 1e-5
    assert experiment.tasks[-1].name == "1e5"


def test_settings_take_indexes_in_brackets_and_create_what_is_missing(small: Path) -> None:
    """Paths can be typed as messages print them; a section left out can still be set."""
    experiment = load_experiment(small, ["tasks[1].steps=7", "cluster.replicas.slots=3"])
    assert experiment.tasks[-1].steps == 7
    assert experiment.cluster.replicas.slots == 3


def test_an_ablation_is_a_one_word_edit_of_a_named_system(small: Path) -> None:
    """Setting one policy of a named system keeps its others."""
    experiment = load_experiment(small, ["system=sync", "system.batching=single-lora"])
    assert experiment.system == SYSTEMS["sync-single-lora"]


def test_the_named_system_is_what_settings_edit(small: Path) -> None:
    """`--system` comes before `--set`, whatever their order on the command line; two systems are refused."""
    experiment = load_experiment(small, ["system.batching=single-lora"], "sync")
    assert experiment.system == SYSTEMS["sync-single-lora"]
    with pytest.raises(InputError, match="--set names a system too"):
        load_experiment(small, ["system=sync"], "single")


def test_a_tasks_limits_override_the_experiments_key_by_key(small: Path) -> None:
    """A task that changes one deadline keeps the experiment's others."""
    experiment = load_experiment(small, ["limits.trajectory_s=77", "tasks.1.limits.turn_s=3"])
    limits = experiment.limits_of(experiment.tasks[-1])
    assert (limits.turn_s, limits.trajectory_s) == (3, 77)


def test_paths_are_relative_to_the_yaml(small: Path) -> None:
    """A model folder or profile beside the YAML is found from anywhere."""
    folder = small.parent / "models" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (small.parent / "costs.yaml").write_text("{}")
    experiment = load_experiment(small, ["model.path=models/mine", "profile=costs.yaml"])
    assert model_folder(experiment) == folder
    assert profile_file(experiment) == small.parent / "costs.yaml"


def test_a_missing_model_or_profile_is_an_input_error(small: Path) -> None:
    """Each says what it looked for and what is shipped."""
    experiment = load_experiment(small, ["model.path=tiny-bas", "profile=nowhere.yaml"])
    with pytest.raises(InputError, match=r"model\.path: no model .*tiny-bas"):
        model_folder(experiment)
    with pytest.raises(InputError, match=r"profile: no such file .*nowhere"):
        profile_file(experiment)
    with pytest.raises(InputError, match="needs a profile of costs"):
        profile_file(load_experiment(small))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=[path.stem for path in EXPERIMENTS])
def test_every_experiment_of_the_repository_loads_under_every_system(path: Path) -> None:
    """No shipped experiment is broken, nor the profile that it names."""
    for system in SYSTEMS:
        experiment = load_experiment(path, system=system)
        assert experiment.tasks
    if experiment.profile is not None:
        assert load_profile(experiment)


@pytest.mark.parametrize("path", PROFILES, ids=[path.stem for path in PROFILES])
def test_every_profile_of_the_repository_loads(path: Path, small: Path) -> None:
    """A shipped profile is found by its name."""
    large = ["cluster.replicas.devices=4", "cluster.lanes.devices=4"]
    needed = large if "32b" in path.stem else []
    assert load_profile(load_experiment(small, [f"profile={path.stem}", *needed]))


def test_every_yaml_of_the_repository_is_of_a_kind_that_is_tested() -> None:
    """A YAML in a new place would be parsed by no test."""
    packages = ("marlaas", "traces", "sim", "executor", "experiments", "tests")
    found = {
        path.parent.relative_to(ROOT).as_posix()
        for name in packages
        for path in (ROOT / name).rglob("*.y*ml")
    }
    library = {f"sim/library/{kind}" for kind in ("devices", "models", "profiles")}
    ours = {"experiments", "experiments/ascend", "experiments/profiles", "experiments/studies"}
    elsewhere = {"experiments/paper", "experiments/bench"}  # by test_paper.py and test_bench.py
    assert found <= ours | library | elsewhere


def test_the_schema_agrees_with_msgspec() -> None:
    """What the schema lets through, msgspec converts; a missing key is named."""
    with pytest.raises(Misfit) as caught:
        convert({"name": "x"}, Experiment)
    assert caught.value.path == ("tasks",)
