"""The adapter store: fingerprints, pristine starts, atomic commits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_base import LORA, peft_model, random_weights, shapes, tiny_base

from executor import adapters
from executor.adapters import (
    AdapterProblem,
    TrainingState,
    fingerprint,
    pristine,
    read_adapter,
    read_optimizer,
    read_shape,
    write_adapter,
    write_optimizer,
)
from marlaas.spec import LoraSpec


def state(version: int) -> TrainingState:
    """A state to write."""
    return TrainingState(
        version=version, num_updates=version, seed=9, fingerprint="f", cursor={"step": version}
    )


def test_a_fingerprint_changes_with_any_name_shape_or_bit() -> None:
    """Equal tensors in any order agree; one changed bit, a renamed or reshaped tensor differs."""
    one = {"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(2)}
    assert fingerprint(one) == fingerprint(dict(reversed(one.items())))
    assert fingerprint(one) == fingerprint({"a": one["a"].T.contiguous().T, "b": one["b"]})
    other = [
        {**one, "a": one["a"].clone().index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(1e-45))},
        {"c": one["a"], "b": one["b"]},
        {**one, "a": one["a"].view(3, 2)},
        {**one, "b": -one["b"]},
        {**one, "b": one["b"].to(torch.int32)},
    ]
    assert len({fingerprint(tensors) for tensors in [one, *other]}) == 6


def test_a_pristine_adapter_is_the_same_in_a_fresh_process_whatever_ran_before() -> None:
    """Bitwise: a process with another hash seed and random state draws the same version 0; B is zero."""
    pristine(shapes(), 1)
    torch.manual_seed(123)
    torch.rand(1000)
    here = pristine(shapes(), 77)
    code = (
        "import sys, torch; sys.path.insert(0, sys.argv[1]); torch.rand(7)\n"
        "from executor.adapters import fingerprint, pristine\n"
        f"print(fingerprint(pristine({dict(reversed(shapes().items()))!r}, 77)))"
    )
    root = str(Path(adapters.__file__).parent.parent)
    run = subprocess.run(
        [sys.executable, "-c", code, root],
        env={**os.environ, "PYTHONHASHSEED": "5"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == fingerprint(here)
    assert all(not tensor.any() for name, tensor in here.items() if "lora_B" in name)
    assert fingerprint(here) != fingerprint(pristine(shapes(), 78))


def test_a_folder_is_an_ordinary_peft_adapter(tmp_path: Path) -> None:
    """PEFT itself loads it, with every weight in place; the card and the configuration name the base."""
    weights = random_weights(3)
    write_adapter(tmp_path / "t" / "v3", weights, LORA, tiny_base())
    assert sorted(os.listdir(tmp_path / "t" / "v3")) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    model = peft_model({"default": str(tmp_path / "t" / "v3")})
    held = {name.replace(".default.", "."): p for name, p in model.named_parameters() if "lora_" in name}
    assert fingerprint(held) == fingerprint(weights)
    assert model.peft_config["default"].base_model_name_or_path == tiny_base()
    assert "`t`, version `v3`" in (tmp_path / "t" / "v3" / "README.md").read_text()
    assert os.listdir(tmp_path / "t") == ["v3"]


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    """Weights, shape, moments and state come back as they were."""
    lora = LoraSpec(rank=4, alpha=12, targets=("q_proj", "up_proj"))
    weights = random_weights(3, lora)
    write_adapter(tmp_path / "v3", weights, lora, tiny_base())
    assert read_shape(tmp_path / "v3") == lora
    assert fingerprint(read_adapter(tmp_path / "v3", lora, shapes(lora))) == fingerprint(weights)
    write_optimizer(tmp_path / "o" / "v3", weights, state(3))
    moments, told = read_optimizer(tmp_path / "o" / "v3")
    assert (fingerprint(moments), told) == (fingerprint(weights), state(3))


def test_an_adapter_of_another_shape_is_refused(tmp_path: Path) -> None:
    """Rank and alpha must be those of the experiment."""
    write_adapter(tmp_path / "v0", random_weights(1), LORA, tiny_base())
    with pytest.raises(AdapterProblem, match="wanted"):
        read_adapter(tmp_path / "v0", LoraSpec(rank=4, alpha=4), shapes())


def test_a_leftover_of_an_uncommitted_publish_is_replaced(tmp_path: Path) -> None:
    """A whole folder, and torn temporary ones, left by a crash do not mix with what is written now."""
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "stray").write_text("old")
    for torn in (".v1.new", ".v1.old"):
        (tmp_path / torn).mkdir()
        (tmp_path / torn / "adapter_model.safetensors").write_text("torn")
    write_adapter(tmp_path / "v1", random_weights(1), LORA, tiny_base())
    assert os.listdir(tmp_path) == ["v1"]
    assert "stray" not in os.listdir(tmp_path / "v1")
    assert fingerprint(read_adapter(tmp_path / "v1", LORA, shapes())) == fingerprint(random_weights(1))


@pytest.mark.parametrize("crash_at", ["open", "fsync", "rename"])
def test_a_crash_while_writing_leaves_no_folder_under_the_final_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_at: str
) -> None:
    """Whatever the call that never returns, the target is absent; writing again then succeeds."""

    def crash(*_: object, **__: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as broken:
        if crash_at == "rename":
            broken.setattr(Path, "rename", crash)
        elif crash_at == "fsync":
            broken.setattr(os, "fsync", crash)
        else:
            broken.setattr("builtins.open", crash)
        with pytest.raises(OSError, match="no space"):
            write_adapter(tmp_path / "v1", random_weights(1), LORA, tiny_base())
    assert not (tmp_path / "v1").exists()
    write_adapter(tmp_path / "v1", random_weights(1), LORA, tiny_base())
    assert os.listdir(tmp_path) == ["v1"]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names open files through Linux's /proc")
def test_files_and_folder_are_on_disk_before_the_name_and_the_name_before_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file and the temporary folder are flushed, then renamed, then the parent folder is flushed."""
    happened: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def flush(handle: int) -> None:
        happened.append("flush " + Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def name(path: Path, target: Path) -> Path:
        happened.append(f"rename {path.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(Path, "rename", name)
    write_adapter(tmp_path / "v1", random_weights(1), LORA, tiny_base())
    files = {f"flush {file.name}" for file in (tmp_path / "v1").iterdir()}
    assert set(happened[:3]) == files
    assert happened[3:] == ["flush .v1.new", "rename .v1.new", f"flush {tmp_path.name}"]


def test_only_the_last_two_optimizer_folders_are_kept(tmp_path: Path) -> None:
    """Resuming needs the committed version and the one before it; neighbours' folders are not touched."""
    write_optimizer(tmp_path / "other" / "v0", {}, state(0))
    for version in range(5):
        write_optimizer(tmp_path / "t" / f"v{version}", {}, state(version))
    assert sorted(os.listdir(tmp_path / "t")) == ["v3", "v4"]
    assert os.listdir(tmp_path / "other") == ["v0"]


def test_a_state_file_with_an_unknown_field_is_refused(tmp_path: Path) -> None:
    """A file this version does not understand is not guessed at."""
    write_optimizer(tmp_path / "v0", {}, state(0))
    file = tmp_path / "v0" / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "surprise": 1}))
    with pytest.raises(AdapterProblem, match="surprise"):
        read_optimizer(tmp_path / "v0")
