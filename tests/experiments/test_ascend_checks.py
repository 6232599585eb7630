"""What an Ascend machine must have, read from folders that stand for one; what is refused before a run."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from experiments import doctor
from experiments.ascend.capabilities import LIMITS, PINNED, RELEASES
from experiments.ascend.findings import DRIVER, findings, require_capable, require_machine
from experiments.ascend.machine import Machine, cann_version, look
from experiments.load import load_experiment
from experiments.run import simulate
from marlaas.errors import InputError
from marlaas.spec import ClusterSpec, Experiment, LoraSpec, ModelSpec, ReplicasSpec, SumsEnvironment, TaskSpec

ROOT = Path(__file__).parents[2]
QWEN3_0_6B = {"model_type": "qwen3", "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
QWEN3_14B = {"model_type": "qwen3", "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128}
GOOD: dict[str, str | None] = {
    "torch": PINNED.torch,
    "torch_npu": PINNED.torch_npu,
    "vllm": PINNED.vllm,
    "vllm_ascend": PINNED.vllm_ascend,
    "triton_ascend": PINNED.triton_ascend,
    "transformers": PINNED.transformers,
}


def ascend_node(root: Path, cann: str = PINNED.cann, **packages: str | None) -> Machine:
    """A node of 16 NPUs, its CANN where set_env.sh says, with these packages instead of the good ones."""
    folder = root / "cann"
    (folder / "aarch64-linux").mkdir(parents=True)
    info = f"package_name=Ascend-cann-toolkit\nversion={cann}\ninnerversion=V100R001\narch=aarch64\n"
    (folder / "aarch64-linux" / "ascend_toolkit_install.info").write_text(info)
    (root / "dev").mkdir()
    for name in ("davinci_manager", *(f"davinci{i}" for i in range(16))):
        (root / "dev" / name).touch()
    (root / "npu-smi").touch(mode=0o755)
    environ = {"ASCEND_HOME_PATH": str(folder), "PATH": str(root)}
    machine = look(root, environ, {**GOOD, **packages}.get)
    return machine._replace(python=(3, 11))


def on_npus(engine: str = "vllm", rank: int = 16, **replicas: Any) -> Experiment:
    """An experiment that rolls out on NPUs."""
    spec = ReplicasSpec(engine=engine, device="npu", **replicas)
    return Experiment(
        name="ascend",
        model=ModelSpec(lora=LoraSpec(rank=rank)),
        cluster=ClusterSpec(replicas=spec),
        environments={"adding": SumsEnvironment()},
        tasks=(TaskSpec(name="add", environment="adding", steps=1),),
    )


def broken(machine: Machine, *, vllm: bool = True) -> dict[str, str]:
    """What does not hold, with the step that mends it."""
    return {finding.what: finding.mend for finding in findings(machine, vllm=vllm) if not finding.holds}


# --- reading a machine ---------------------------------------------------------------------------------


def test_a_matching_node_has_all_it_needs(tmp_path: Path) -> None:
    """CANN, driver and packages of one release: nothing is missing and a run may start."""
    machine = ascend_node(tmp_path)
    assert (machine.cann, machine.cann_is_set_up, machine.num_devices) == (PINNED.cann, True, 16)
    assert machine.npu_smi == str(tmp_path / "npu-smi")
    assert broken(machine) == {}
    require_machine(on_npus(), machine)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("x86_64-linux/ascend_toolkit_install.info", "package_name=x\nversion=8.5.1\narch=x86_64\n"),
        ("ascend_toolkit_install.info", "version=8.5.1\n"),
        ("compiler/version.info", "Version=8.5.1\nversion_dir=8.5.1\ntimestamp=20260101\n"),
        ("version.info", "version=8.5.1\n"),
        ("version.cfg", "runtime_running_version=[8.5.1.0.220:8.5.1]\ncompiler_running_version=[1:8.5.1]\n"),
    ],
)
def test_cann_tells_its_version_in_several_files(tmp_path: Path, file: str, text: str) -> None:
    """Toolkits of different ages keep it in different places."""
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    assert cann_version(tmp_path) == "8.5.1"


def test_a_toolkit_without_a_version_is_told_apart_from_none(tmp_path: Path) -> None:
    """A folder that does not say its version is found, of unknown version, and not accepted."""
    (tmp_path / "usr/local/Ascend/cann").mkdir(parents=True)
    machine = look(tmp_path, {}, GOOD.get)
    assert machine.cann is None
    assert machine.cann_folder == tmp_path / "usr/local/Ascend/cann"
    assert "CANN in the environment" in broken(machine)


def test_a_machine_without_ascend_is_seen_as_one(tmp_path: Path) -> None:
    """Nothing of it: nothing is listed but where to read on."""
    machine = look(tmp_path, {"PATH": str(tmp_path)}, lambda package: None)
    assert not machine.is_ascend


# --- versions that do not go together ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "what", "step"),
    [
        ({"cann": "9.0.1"}, f"CANN {PINNED.cann}", f"Ascend-cann-toolkit_{PINNED.cann}_linux"),
        ({"torch": "2.13.0"}, "torch 2.10.0 with torch_npu", f"pip install torch=={PINNED.torch} torch-npu"),
        ({"torch_npu": "2.10.0.post2"}, "torch 2.10.0 with torch_npu", f"torch-npu=={PINNED.torch_npu}"),
        ({"torch_npu": None}, "torch 2.10.0 with torch_npu", f"torch-npu=={PINNED.torch_npu}"),
        ({"vllm": "0.24.0"}, f"vllm {PINNED.vllm}", "VLLM_TARGET_DEVICE=empty pip install --no-binary vllm"),
        ({"vllm_ascend": None}, f"vllm_ascend {PINNED.vllm_ascend}", "apt-get install -y gcc g++ cmake"),
        ({"transformers": "5.24.0"}, f"transformers {PINNED.transformers}", "pip install transformers=="),
        ({"triton_ascend": "3.2.0"}, f"triton_ascend {PINNED.triton_ascend}", "from Ascend's own index"),
        ({"vllm_ascend": "0.18.0"}, f"vllm_ascend {PINNED.vllm_ascend}", f"=={PINNED.vllm_ascend}"),
    ],
)
def test_one_version_out_of_step_is_refused_with_the_step_that_mends_it(
    tmp_path: Path, change: dict[str, str], what: str, step: str
) -> None:
    """The message names what was wanted, what was found, and the command."""
    machine = ascend_node(tmp_path, **change)
    ((found, mend),) = broken(machine).items()
    assert found.startswith(what)
    assert step in mend
    with pytest.raises(InputError) as refusal:
        require_machine(on_npus(), machine)
    assert what in refusal.value.problem
    assert "\n" not in str(refusal.value)
    assert refusal.value.wanted == mend


def test_the_embedded_engine_needs_no_vllm_but_a_torch_npu_of_its_torch(tmp_path: Path) -> None:
    """Any release of torch_npu will do if it is that of torch, with the CANN that is known to go with it."""
    machine = ascend_node(tmp_path, vllm=None, vllm_ascend=None, torch="2.13.0", torch_npu="2.13.0")
    require_machine(on_npus("torch"), machine)
    require_machine(on_npus("torch"), machine._replace(cann="9.9.9"))
    known = machine._replace(packages={**machine.packages, "torch": "2.10.0", "torch_npu": "2.10.0.post4"})
    require_machine(on_npus("torch"), known)
    with pytest.raises(InputError, match=f"npu needs CANN {PINNED.cann}"):
        require_machine(on_npus("torch"), known._replace(cann="9.9.9"))
    with pytest.raises(InputError, match="torch_npu"):
        require_machine(on_npus("torch"), ascend_node(tmp_path / "other", torch="2.13.0"))


def test_a_container_without_device_files_is_left_to_torch(tmp_path: Path) -> None:
    """The driver's files may be out of sight; what cannot be known is no reason to refuse."""
    machine = ascend_node(tmp_path)._replace(num_devices=0, npu_smi=None)
    assert list(broken(machine)) == [DRIVER]
    require_machine(on_npus(), machine)


def test_other_devices_are_none_of_its_business(tmp_path: Path) -> None:
    """An experiment on CPUs runs on any machine."""
    nothing = look(tmp_path, {"PATH": str(tmp_path)}, lambda package: None)
    cpu = on_npus()
    require_machine(replace(cpu, cluster=ClusterSpec(replicas=ReplicasSpec())), nothing)


# --- what vllm-ascend can do with adapters -------------------------------------------------------------


@pytest.mark.parametrize(
    ("experiment", "model"),
    [
        (on_npus(slots=32, devices=4), QWEN3_14B),
        (on_npus(slots=32, eager=False), QWEN3_14B),
        (on_npus(devices=2, pipeline_parallel=2), {"model_type": "qwen3_5"}),
        (on_npus("torch", slots=100), QWEN3_14B),
        (on_npus(rank=33, devices=2), QWEN3_14B),
    ],
)
def test_what_the_tables_allow_is_let_through(experiment: Experiment, model: dict[str, Any]) -> None:
    """32 slots, tensor parallel without graphs, graphs on one device, stages for linear attention."""
    require_capable(experiment, model)


@pytest.mark.parametrize(
    ("experiment", "model", "where"),
    [
        (on_npus(slots=33), QWEN3_14B, "cluster.replicas.slots"),
        (on_npus(rank=65), QWEN3_14B, "model.lora.rank"),
        (on_npus(rank=17, devices=8), {**QWEN3_14B, "head_dim": 16}, "model.lora.rank"),
        (on_npus(devices=4, eager=False), QWEN3_14B, "cluster.replicas.eager"),
        (on_npus(devices=4), {"model_type": "qwen3_5_text"}, "cluster.replicas.devices"),
    ],
)
def test_what_is_known_to_fail_is_refused_before_a_run(
    experiment: Experiment, model: dict[str, Any], where: str
) -> None:
    """Too many slots, too wide an adapter, graphs or linear attention with tensor parallelism."""
    with pytest.raises(InputError) as refusal:
        require_capable(experiment, model)
    assert refusal.value.where == where
    assert refusal.value.wanted.startswith("use ")


# --- the tables and the pins ---------------------------------------------------------------------------


def test_the_pins_are_one_release_of_the_table() -> None:
    """`marlaas[ascend]` asks for exactly the versions whose fit is checked, vLLM's included."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = pyproject["project"]["optional-dependencies"]["ascend"]
    exact = dict(pin.split(";")[0].strip().split("==") for pin in pins if "==" in pin)
    assert exact == {
        "torch": PINNED.torch,
        "torch-npu": PINNED.torch_npu,
        "transformers": PINNED.transformers,
        "vllm": PINNED.vllm,
        "vllm-ascend": PINNED.vllm_ascend,
    }


def test_the_pins_lie_within_what_the_executor_takes() -> None:
    """Or pip could not install both extras at once."""
    from packaging.requirements import Requirement

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    ranges = {wanted.name: wanted.specifier for wanted in map(Requirement, extras["executor"])}
    assert ranges["torch"].contains(PINNED.torch)
    assert ranges["transformers"].contains(PINNED.transformers)


def test_every_row_of_the_tables_has_its_source() -> None:
    """And each release keeps torch_npu to its torch, as the package itself demands."""
    assert all(row.source for row in (*RELEASES, *LIMITS))
    assert all(row.torch_npu.partition(".post")[0] == row.torch for row in RELEASES)
    assert all(row.vllm_ascend.partition(".post")[0] == row.vllm for row in RELEASES)


# --- the doctor ----------------------------------------------------------------------------------------


def abilities(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> dict[str, doctor.Ability]:
    """What the doctor says of this machine, without asking torch."""
    monkeypatch.setattr(doctor, "look", lambda: machine)
    monkeypatch.setattr(doctor, "_PROBE", "print()")
    return {ability.what: ability for ability in doctor.diagnose().abilities}


def test_the_doctor_lists_each_step_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half an installation: what is there is a yes, the rest names its command."""
    half = abilities(monkeypatch, ascend_node(tmp_path, vllm=None, vllm_ascend=None))
    assert not half["execute with vLLM on Ascend"].can
    assert half[f"Ascend: CANN {PINNED.cann}"].can
    missing = half[f"Ascend: vllm {PINNED.vllm}"]
    assert (missing.can, "pip install --no-binary vllm" in missing.why) == (False, True)


def test_the_doctor_shows_what_is_known_of_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a whole installation the limits are there to read; elsewhere nothing of Ascend fills the page."""
    whole = abilities(monkeypatch, ascend_node(tmp_path))
    assert whole["execute with vLLM on Ascend"].can
    assert not whole["Ascend: tensor parallel with LoRA in graph mode"].can
    nothing = look(tmp_path / "empty", {"PATH": "/nowhere"}, lambda package: None)
    elsewhere = abilities(monkeypatch, nothing)
    assert [what for what in elsewhere if what.startswith("Ascend")] == []


# --- the experiments for such machines -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "num_npus", "model"), [("node16.yaml", 16, QWEN3_0_6B), ("cluster64.yaml", 64, QWEN3_14B)]
)
def test_the_shipped_experiments_fit_their_machines(
    tmp_path: Path, file: str, num_npus: int, model: dict[str, Any]
) -> None:
    """Half of the NPUs roll out and half train, the tables have nothing against it, it can be simulated."""
    experiment = load_experiment(ROOT / "experiments" / "ascend" / file)
    cluster = experiment.cluster
    for pool in (cluster.replicas, cluster.lanes):
        assert pool.count * pool.devices == num_npus // 2
    require_machine(experiment, ascend_node(tmp_path))
    require_capable(experiment, model)
    short = replace(experiment, tasks=tuple(replace(task, steps=1) for task in experiment.tasks[:2]))
    outcomes = simulate(short, tmp_path / "run", Console(quiet=True))
    assert set(outcomes.values()) == {"done"}
