"""The NPU path, from the command line to the adapters on disk, on a stand-in device registered as `npu`.

What it proves: every tensor that the embedded engines make or move is where it should be, and every operator
they use is one that torch_npu implements; the ranks of a lane ask for HCCL, whose place gloo takes. What it
cannot prove: torch_npu's kernels, HCCL itself, speed. What ran is in `FELL_BACK` and `RAN`, and in the notes
that a run leaves.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from pinned_wheels import pinned_version
from safetensors.torch import load_file
from standin_npu import build, install, surroundings
from torch_npu_operators import OPERATORS

from marlaas.commands import AbortTurns, CreateAdapter, Generate, LoadAdapter, Publish, Train, UnloadAdapter
from traces.reader import read

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="the stand-in is C++ and needs a compiler"),
]

TASKS = ("add", "find")
EXPERIMENT = """
name: standin
cluster: {replicas: {slots: 1, max_num_seqs: 32, batch_invariant: false}}
environments:
  adding: {kind: sums}
  library: {kind: lookup}
tasks:
  - {name: add, environment: adding, steps: 2, prompts: 4, samples: 4, max_new_tokens: 8,
     training: {micro_batch_tokens: 2048}}
  - {name: find, environment: library, steps: 2, prompts: 2, samples: 4, max_new_tokens: 10, max_turns: 2,
     training: {micro_batch_tokens: 2048}}
"""
# Products, attention, sampling, the loss and the optimizer, among what the stand-in left to the CPU.
FELL_BACK = {
    "mm.out", "bmm.out", "addmm.out", "_softmax.out", "_log_softmax.out", "_log_softmax_backward_data.out",
    "index_select", "index.Tensor_out", "_index_put_impl_", "gather.out", "cumsum.out", "searchsorted.Tensor",
    "argmax.out", "masked_fill_.Scalar", "sqrt.out", "exp.out",
}  # fmt: skip
# What must have run in workers on the device, of the modules that touch tensors.
RAN = {
    "torch_engine.TorchRolloutEngine.start", "torch_engine.TorchRolloutEngine.step",
    "torch_batch.Batch.join", "torch_batch.Batch.decode", "torch_cache.RowCache.attend",
    "torch_cache._Prefill.attend",
    "torch_cache._Decode.attend", "torch_lora.LoraSlots.load", "torch_lora.LoraSlots.use",
    "torch_sampling.sample", "torch_sampling.uniform", "base_model.load_base", "engines._set_up_torch",
    "trainer.PeftTrainingEngine.run", "trainer.PeftTrainingEngine._train", "trainer._stepped",
    "trainer._clip", "policy.LoraPolicy.load", "policy.LoraPolicy.logits", "policy.LoraPolicy.weights",
    "grpo.loss_sum", "grpo.padded", "adapters.write_adapter", "adapters.read_adapter",
    "devices.precision",
}  # fmt: skip
IN_FULL = {"index.Tensor_out": "index.Tensor", "repeat_interleave.Tensor": "repeat_interleave.self_Tensor"}


class Runner(NamedTuple):
    """Runs the command line where torch finds the stand-in, or on the CPU with the same formulas."""

    folder: Path
    site: Path
    library: Path

    def execute(self, name: str, device: str, dtype: str | None, lane_devices: int = 1) -> Path:
        """One run of the experiment; its folder, with notes in `<name>-seen`."""
        experiment, cann = self.folder / "standin.yaml", self.folder / "cann"
        experiment.write_text(EXPERIMENT)
        cann.mkdir(exist_ok=True)
        (cann / "version.cfg").write_text("runtime_running_version=[9.9.0:9.9.0]\n")
        seen = self.folder / f"{name}-seen"
        seen.mkdir()
        settings = [f"cluster.replicas.device={device}", f"cluster.lanes.device={device}"]
        settings.append(f"cluster.lanes.devices={lane_devices}")
        settings += [] if dtype is None else [f"model.dtype={dtype}"]
        environment = surroundings(self.site, self.library if device == "npu" else None, seen)
        environment |= {"ASCEND_HOME_PATH": str(cann), "ASCEND_RT_VISIBLE_DEVICES": "4,5,6"}
        command = [sys.executable, "-m", "experiments", "execute", str(experiment)]
        options = [word for setting in settings for word in ("--set", setting)]
        out = self.folder / name
        run = subprocess.run(
            [*command, "--out", str(out), *options],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert run.returncode == 0, run.stderr
        return out

    def noted(self, name: str, kind: str) -> dict[str, set[str]]:
        """What each process of a run noted, by process."""
        notes = (self.folder / f"{name}-seen").glob(f"*.{kind}")
        return {note.stem: set(note.read_text().split("\n")) - {""} for note in notes}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """The device, compiled once."""
    folder = tmp_path_factory.mktemp("standin")
    return Runner(folder, install(folder / "site"), build(folder))


@pytest.fixture(scope="module")
def on_npu(runner: Runner) -> Path:
    """The experiment in float32 on the device."""
    return runner.execute("npu", "npu", "float32")


@pytest.fixture(scope="module")
def on_cpu(runner: Runner) -> Path:
    """The same on the CPU."""
    return runner.execute("cpu", "cpu", "float32")


def samples(run: Path) -> dict[str, str]:
    """Everything that was said in a run, turn by turn, with its reward."""
    return {
        str(file.relative_to(run)): file.read_text() for file in sorted((run / "samples").rglob("*.jsonl"))
    }


def updates(run: Path, task: str) -> torch.Tensor:
    """How training changed a task's adapter, as one vector."""
    first, last = (load_file(run / "adapters" / task / f"v{v}" / "adapter_model.safetensors") for v in (0, 2))
    return torch.cat([(last[name] - first[name]).flatten() for name in sorted(first)])


def assert_learned_the_same(run: Path, on_cpu: Path) -> None:
    """Every token and reward is the same; adapters differ by what the order of sums allows."""
    assert len(samples(on_cpu)) == 4
    assert samples(run) == samples(on_cpu)
    for task in TASKS:
        here, there = updates(on_cpu, task), updates(run, task)
        assert here.norm() > 0
        assert (here - there).norm() < 0.01 * here.norm()


def test_a_run_on_npus_says_and_learns_what_it_does_on_cpus(on_npu: Path, on_cpu: Path) -> None:
    """One NPU rolls out, one trains."""
    assert_learned_the_same(on_npu, on_cpu)


def test_a_lane_of_two_npus_learns_what_one_cpu_does(runner: Runner, on_cpu: Path) -> None:
    """The base model is sharded over both; each rank sees its own NPU, and HCCL is what they asked for."""
    assert_learned_the_same(runner.execute("npu-lane", "npu", "float32", lane_devices=2), on_cpu)
    functions = runner.noted("npu-lane", "functions").values()
    assert {"devices 4", "devices 5", "devices 6"} <= set().union(*functions)
    assert sum("standin_hccl.CopyingGroup._allgather_base" in notes for notes in functions) == 2


def test_npus_compute_in_bf16_unless_told_otherwise(runner: Runner, on_npu: Path) -> None:
    """Without a dtype in the experiment the base model's products are of bf16; told float32, none is."""
    runner.execute("npu-default", "npu", None)
    told, default = (operators(runner, run) for run in ("npu", "npu-default"))
    assert "mm.out BFloat16" in default
    assert not [name for name in told if name.endswith("BFloat16")]


def operators(runner: Runner, run: str) -> set[str]:
    """What the stand-in left to the CPU's kernels in a run: `name.overload dtype`."""
    notes = runner.noted(run, "operators").values()
    return {name.removeprefix("aten::") for names in notes for name in names}


def test_each_worker_sees_its_own_device(runner: Runner, on_npu: Path) -> None:
    """Of devices 4 and 5 that the run was given, the replica sees one and the lane the other."""
    seen = [
        next(n for n in notes if n.startswith("devices "))
        for notes in runner.noted("npu", "functions").values()
    ]
    assert {"devices 4", "devices 5"} <= set(seen)


def test_the_engines_ran_on_the_device(runner: Runner, on_npu: Path) -> None:
    """The functions that touch tensors, and every kind of order but aborting turns."""
    functions = set().union(*runner.noted("npu", "functions").values())
    assert functions >= RAN, sorted(RAN - functions)
    orders = {type(command) for _, commands in read(on_npu).records for command in commands}
    assert {CreateAdapter, LoadAdapter, UnloadAdapter, Generate, Train, Publish} <= orders
    assert AbortTurns not in orders


def test_torch_npu_implements_every_operator_that_ran(runner: Runner, on_npu: Path) -> None:
    """None of what the stand-in left to the CPU is missing in the torch_npu that is pinned."""
    fell_back = {name.partition(" ")[0] for name in operators(runner, "npu")}
    have = json.loads(OPERATORS.read_text())
    assert have["torch_npu"] == pinned_version("torch-npu")
    assert fell_back >= FELL_BACK, sorted(FELL_BACK - fell_back)
    # What torch_npu has in full, PyTorch does not take apart into the form that the stand-in sees.
    whole = {name: IN_FULL.get(name, name) for name in fell_back}
    assert set(whole.values()) <= set(have["operators"]), sorted(set(whole.values()) - set(have["operators"]))


def test_device_memory_is_out_of_the_hosts_reach(runner: Runner) -> None:
    """The check bites: code that takes a device tensor for a host tensor dies."""
    program = (
        "import torch, ctypes; x = torch.ones(3, device='npu'); print(ctypes.string_at(x.data_ptr(), 4))"
    )
    environment = surroundings(runner.site, runner.library, runner.folder)
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=False)
    assert run.returncode == -11
    assert run.stdout == b""
