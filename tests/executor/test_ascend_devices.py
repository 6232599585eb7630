"""What `device: npu` chooses, and which devices a worker sees."""

import ast
from pathlib import Path

import pytest

from executor.devices import DEVICES, claim, precision

EXECUTOR = Path(__file__).parents[2] / "executor"


@pytest.mark.parametrize(
    ("device", "collectives", "dtype", "platform"),
    [
        ("cpu", "gloo", "float32", "cpu"),
        ("cuda", "nccl", "bfloat16", "cuda"),
        ("npu", "hccl", "bfloat16", "ascend"),
    ],
)
def test_a_device_chooses_what_goes_with_it(device: str, collectives: str, dtype: str, platform: str) -> None:
    """NPUs speak HCCL, compute in bf16 and are served by vllm-ascend's plugin."""
    kind = DEVICES[device]
    assert (kind.collectives, kind.vllm_platform) == (collectives, platform)
    assert precision("auto", device) == dtype
    assert precision("float16", device) == "float16"


def test_a_replica_of_four_sees_its_own_four(tmp_path: Path) -> None:
    """The second replica of four NPUs sees 4 to 7 of the sixteen of a node."""
    for number in range(16):
        (tmp_path / f"davinci{number}").touch()
    (tmp_path / "davinci_manager").touch()
    environ: dict[str, str] = {}
    claim("npu", first=4, num_devices=4, environ=environ, nodes=tmp_path)
    assert environ == {"ASCEND_RT_VISIBLE_DEVICES": "4,5,6,7"}


@pytest.mark.parametrize(
    ("first", "num_devices", "shown"), [(0, 1, "8"), (1, 1, "9"), (2, 1, "8"), (0, 2, "8,9"), (1, 4, "9,8")]
)
def test_devices_are_counted_within_those_a_scheduler_gave(
    first: int, num_devices: int, shown: str, tmp_path: Path
) -> None:
    """Given devices 8 and 9, workers share those two, round and round, and touch no other."""
    environ = {"CUDA_VISIBLE_DEVICES": "8, 9"}
    claim("cuda", first, num_devices, environ, tmp_path)
    assert environ["CUDA_VISIBLE_DEVICES"] == shown


@pytest.mark.parametrize("device", ["cpu", "auto", "npu"])
def test_nothing_is_claimed_where_nothing_is_known(device: str, tmp_path: Path) -> None:
    """No device files and no list: torch has to choose."""
    environ: dict[str, str] = {}
    claim(device, 0, 1, environ, tmp_path / "absent")
    assert environ == {}


def test_device_code_goes_through_torch_accelerator() -> None:
    """No module of the executor but the table says `torch.cuda`, `torch.npu`, `nccl` or `hccl`."""
    found = [
        f"{path.relative_to(EXECUTOR)}:{line}: {what}"
        for path in sorted(EXECUTOR.rglob("*.py"))
        if path.name != "devices.py"
        for line, what in _bound_to_a_device(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    ["torch.cuda.synchronize()", "import torch_npu", "init('nccl')", "x.cuda()", "from torch.npu import a"],
)
def test_code_bound_to_a_device_is_caught(line: str) -> None:
    """The check bites."""
    assert _bound_to_a_device(ast.parse(line))


def _bound_to_a_device(tree: ast.AST) -> list[tuple[int, str]]:
    """Uses of a device's own API, by line: attributes, imports, names of collective backends."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="cuda" | "npu" as name, lineno=line):
                found.append((line, f".{name}"))
            case ast.Import(names=names, lineno=line):
                found += [(line, a.name) for a in names if a.name.startswith(("torch_npu", "torch.cuda"))]
            case ast.ImportFrom(module=str(module), lineno=line):
                if module.startswith(("torch_npu", "torch.cuda", "torch.npu")):
                    found.append((line, module))
            case ast.Constant(value="nccl" | "hccl" as backend, lineno=line):
                found.append((line, backend))
    return found
