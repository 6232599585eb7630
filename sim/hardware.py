"""What machines and models are: figures of a device, the shape of a model, and what follows from a shape.

    library/devices/*.yaml ──► Device       library/models/*.yaml ──► Model
                                                    │
                                    parameters, weight and KV bytes, adapter bytes by rank

Owns the library and the arithmetic of shapes; how long anything takes is `roofline`'s. Another device or
model is another YAML file, named by its path.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

from marlaas.errors import InputError
from marlaas.spec import Count, Name, Spec
from sim.derived import guessed, published
from sim.profile import Quantity, Source
from sim.strict_yaml import converted, nearest, read_file

T = TypeVar("T")
LIBRARY = Path(__file__).parent / "library"

Mode = Literal["eager", "graph"]


class Device(Spec, frozen=True, kw_only=True):
    """One accelerator, as tools count them, with the software that usually runs on it.

    `flops_per_s` is of dense matrix products in the models' data type. Bandwidths are of one device in one
    direction: `link` to others of its node, `network` beyond, `host` to the machine's memory. An iteration
    of an engine takes `iteration_s` on the host that nothing hides and `layer_s` for the gaps within a layer;
    in eager mode kernels are launched one by one, `eager_layer_s` a layer, while the device works.
    `all_reduce_s` is the latency of one all-reduce. Adapters cost `adapters_layer_s` a layer, or a share of
    the iteration in graph mode, and each further one `adapter_layer_s` a layer. `train_layer_s` is what a
    micro-batch takes a layer, forward and back, however few its tokens.
    """

    name: Name
    description: str = ""
    devices_per_node: Count
    flops_per_s: Quantity
    memory_bytes: Quantity
    bandwidth_bytes_per_s: Quantity
    link_bytes_per_s: Quantity
    network_bytes_per_s: Quantity
    host_bytes_per_s: Quantity
    disk_bytes_per_s: Quantity = guessed(
        1.5e9, 0.3e9, 3.0e9, "1.5 GB/s of adapter files in the page cache and 0.3 GB/s cold were published"
    )
    iteration_s: Quantity
    layer_s: Quantity = published(32e-6, 20e-6, 45e-6, "fitted over vLLM runs on H100")
    eager_layer_s: Quantity
    all_reduce_s: Quantity
    adapter_layer_s: Quantity
    adapters_layer_s: Quantity
    train_layer_s: Quantity
    weights_efficiency: Quantity = published(
        0.73, 0.6, 0.9, "share of the bandwidth at which weights are read: fitted over vLLM runs on H100"
    )
    kv_efficiency: Quantity = published(
        0.72, 0.5, 0.94, "share of the bandwidth at which KV is read: middle of what fits of public runs gave"
    )
    flops_efficiency: Quantity = published(
        0.65, 0.43, 0.9, "share of the peak in prefills and large batches: middle of an H100 and an H200 fit"
    )
    mfu: Quantity = published(
        0.23, 0.11, 0.4, "share of the peak in LoRA training with large micro-batches: 4B on 8 H200"
    )


class Model(Spec, frozen=True, kw_only=True):
    """The shape of a dense decoder with grouped-query attention and a gated MLP.

    `parameters` is what its makers state; a shape that does not come to within 0.5 % of it is refused.
    `adapts_embeddings`: whether engines reserve room in adapter slots for the embedding and the LM head too,
    as vLLM does for Llama and not for Qwen. `dtype_bytes` are of weights and activations.
    """

    name: Name
    description: str = ""
    hidden: Count
    layers: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    intermediate: Count
    vocabulary: Count
    tied_embeddings: bool
    adapts_embeddings: bool = False
    dtype_bytes: Count = 2
    kv_dtype_bytes: Count = 2
    parameters: Quantity
    source: Source
    note: str = ""

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of all layers: what every token is multiplied with, the LM head apart."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.intermediate + 2 * self.hidden)

    @property
    def num_embedding_parameters(self) -> int:
        """Parameters of the embedding, which is also that of the LM head."""
        return self.vocabulary * self.hidden

    @property
    def num_parameters(self) -> int:
        """All parameters; a tied LM head is counted once."""
        tables = 1 if self.tied_embeddings else 2
        return self.num_layer_parameters + tables * self.num_embedding_parameters

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.dtype_bytes * self.num_parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache per token, on all devices of a replica together."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_dtype_bytes

    @property
    def attention_flops_per_squared_token(self) -> int:
        """Operations of causal attention, forward, per squared token of a sequence."""
        return 2 * self.layers * self.heads * self.head_dim

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """The linear modules of a layer that adapters may target: inputs and outputs by name."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, queries),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (queries, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    def adapted_shapes(self, targets: str | tuple[str, ...] = "all-linear") -> dict[str, tuple[int, int]]:
        """The linear modules of a layer that are adapted; raises `InputError` for an unknown target."""
        shapes = self.linear_shapes()
        if targets == "all-linear":
            return shapes
        wanted = (targets,) if isinstance(targets, str) else targets
        for target in wanted:
            if target not in shapes:
                raise InputError(
                    "model.lora.targets", f"unknown module {target!r}", nearest(target, list(shapes))
                )
        return {name: shapes[name] for name in wanted}

    def num_lora_parameters(self, rank: int, targets: str | tuple[str, ...] = "all-linear") -> int:
        """Parameters of an adapter: `rank · layers · Σ (inputs + outputs)`."""
        return rank * self.layers * sum(i + o for i, o in self.adapted_shapes(targets).values())

    def lora_bytes(self, rank: int, targets: str | tuple[str, ...] = "all-linear") -> int:
        """Bytes of an adapter in two-byte numbers, as engines hold it."""
        return 2 * self.num_lora_parameters(rank, targets)

    def lora_training_bytes(self, rank: int, targets: str | tuple[str, ...] = "all-linear") -> int:
        """Bytes of what training keeps of an adapter: a float32 master copy and Adam's two moments."""
        return 12 * self.num_lora_parameters(rank, targets)


def load_device(name: str, beside: Path | None = None) -> Device:
    """A device of the library by name, or of a file by its path, relative to the folder `beside`."""
    return _load(name, Device, "devices", beside)


def load_model(name: str, beside: Path | None = None) -> Model:
    """A model of the library by name, or of a file by its path, relative to the folder `beside`."""
    model = _load(name, Model, "models", beside)
    stated = model.parameters.value
    if abs(model.num_parameters / stated - 1) > 0.005:
        problem = f"the shape has {model.num_parameters:,} parameters, stated are {stated:,.0f}"
        raise InputError(f"{name}: parameters", problem, "mend the shape or the number; 0.5 % are allowed")
    if model.heads % model.kv_heads:
        problem = f"{model.heads} heads are not shared evenly by {model.kv_heads} KV heads"
        raise InputError(f"{name}: kv_heads", problem, "wanted a divisor of heads")
    return model


def library_names(folder: str) -> list[str]:
    """The names in a folder of the library: `devices`, `models` or `profiles`."""
    return sorted(path.stem for path in (LIBRARY / folder).glob("*.yaml"))


def _load(name: str, kind: type[T], folder: str, beside: Path | None) -> T:
    shipped = LIBRARY / folder / f"{name}.yaml"
    path = shipped if shipped.is_file() else (beside or Path()) / name
    if not path.is_file():
        wanted = f"name a file or a shipped one; {nearest(name, library_names(folder))}"
        raise InputError(name, f"no such {folder.removesuffix('s')}", wanted)
    data: Any = read_file(path, f"a YAML of {folder}")
    return converted(data, kind, str(path))
