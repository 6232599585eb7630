"""The library of devices and models, and the arithmetic of shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from marlaas.errors import InputError
from sim.hardware import LIBRARY, Device, library_names, load_device, load_model
from sim.profile import Quantity

KIB = 1024
# KV bytes per token, and megabytes of an adapter of rank 16 in bfloat16 and with its training state.
PUBLISHED_SIZES = {
    "qwen3-0.6b": (112 * KIB, 20, 121),
    "qwen3-4b": (144 * KIB, 66, 396),
    "qwen3-8b": (144 * KIB, 87, 524),
    "qwen3-14b": (160 * KIB, 128, 771),
    "qwen3-32b": (256 * KIB, 268, 1611),
}


@pytest.mark.parametrize("name", library_names("models"))
def test_every_model_has_the_parameters_it_states(name: str) -> None:
    """A shape that was mistyped would not come to within 0.5 % of its makers' number."""
    model = load_model(name)
    assert model.name == name
    assert model.num_parameters == pytest.approx(model.parameters.value, rel=0.005)


@pytest.mark.parametrize("name", PUBLISHED_SIZES)
def test_sizes_are_as_others_state_them(name: str) -> None:
    """KV per token exactly; adapters to the megabyte."""
    model = load_model(name)
    kv_bytes, adapter_mb, training_mb = PUBLISHED_SIZES[name]
    assert model.kv_bytes_per_token == kv_bytes
    assert round(model.lora_bytes(16) / 1e6) == adapter_mb
    assert round(model.lora_training_bytes(16) / 1e6) == training_mb


def test_a_rank_of_a_slot_of_llama_is_worth_40_kv_tokens() -> None:
    """5.24 MB per rank over its seven linear modules, 128 KiB of KV per token."""
    model = load_model("llama-3.1-8b")
    assert model.lora_bytes(1) == 5_242_880
    assert model.lora_bytes(1) / model.kv_bytes_per_token == 40


def test_targets_are_modules_by_name() -> None:
    """Fewer modules make a smaller adapter; one that there is not is refused with the nearest name."""
    model = load_model("qwen3-8b")
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    mlp = ("gate_proj", "up_proj", "down_proj")
    assert model.lora_bytes(8, attention) + model.lora_bytes(8, mlp) == model.lora_bytes(8)
    with pytest.raises(InputError, match="did you mean q_proj"):
        model.lora_bytes(8, "q_prj")


@pytest.mark.parametrize("name", library_names("devices"))
def test_every_figure_of_a_device_has_a_source_and_lies_in_its_interval(name: str) -> None:
    """What is not a datasheet's or published is marked as assumed and has an interval."""
    device = load_device(name)
    figures = {key: getattr(device, key) for key in Device.__struct_fields__}
    quantities = {key: value for key, value in figures.items() if isinstance(value, Quantity)}
    assert len(quantities) >= 15
    for key, quantity in quantities.items():
        if quantity.source == "assumed":
            assert quantity.interval is not None, key
        if quantity.interval is not None:
            low, high = quantity.interval
            assert low <= quantity.value <= high, key


def test_a_package_is_two_dies() -> None:
    """Whatever counts bytes or operations is doubled."""
    die, package = load_device("ascend-910c-die"), load_device("ascend-910c")
    for key in ("flops_per_s", "memory_bytes", "bandwidth_bytes_per_s", "link_bytes_per_s"):
        assert getattr(package, key).value == 2 * getattr(die, key).value
    assert die.devices_per_node == 2 * package.devices_per_node


def test_another_device_or_model_is_a_file(tmp_path: Path) -> None:
    """Named by its path, relative to a folder; a name that is nowhere is refused with the nearest."""
    text = (LIBRARY / "devices" / "h100.yaml").read_text().replace("name: h100", "name: mine")
    (tmp_path / "mine.yaml").write_text(text)
    assert load_device("mine.yaml", tmp_path).name == "mine"
    with pytest.raises(InputError, match="no such device; name a file or a shipped one; did you mean h200"):
        load_device("h20")
    with pytest.raises(InputError, match=r"no such model.*did you mean qwen3-14b"):
        load_model("qwen3-14")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hidden: 4096", "hidden: 4069", "the shape has .* parameters, stated are 8,190,000,000"),
        ("kv_heads: 8", "kv_heads: 7", "32 heads are not shared evenly by 7 KV heads"),
        ("heads: 32", "haeds: 32", "unknown field `haeds`; did you mean heads"),
        ("layers: 36", "layers: 36\nlayers: 36", "'layers' is given twice"),
        ("layers: 36", "layers: 0", "layers: Expected `int` >= 1"),
    ],
)
def test_a_model_that_cannot_be_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    """Mistakes in a custom file are named by what they are."""
    text = (LIBRARY / "models" / "qwen3-8b.yaml").read_text()
    assert old in text
    (tmp_path / "mine.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=message):
        load_model("mine.yaml", tmp_path)
