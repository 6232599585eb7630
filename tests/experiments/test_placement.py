"""Where workers are to be, as a user writes it: what is refused, where, and with what advice."""

from pathlib import Path

import pytest

from experiments.load import load_experiment
from marlaas.errors import InputError

YAML = """
name: placed
cluster: {cluster}
environments: {{sums: {{kind: sums}}}}
tasks: [{{name: a, environment: sums, steps: 1}}]
"""


def load(tmp_path: Path, cluster: str) -> object:
    """The cluster of an experiment that says so."""
    file = tmp_path / "placed.yaml"
    file.write_text(YAML.format(cluster=cluster))
    return load_experiment(file).cluster


@pytest.mark.parametrize("address", ["auto", "10.0.0.1:6379", "head:6379"])
def test_addresses_of_clusters_are_taken(tmp_path: Path, address: str) -> None:
    """A host and a port, or the cluster this machine belongs to."""
    load(tmp_path, f"{{placement: ray, ray_address: '{address}', shared_folder: true}}")


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ("{placement: rays}", "cluster.placement: unknown value 'rays'"),
        (
            "{placement: ray, ray_address: 'ray://head:10001'}",
            "cluster.ray_address: 'ray://head:10001'",
        ),
        ("{placement: ray, ray_address: head}", "cluster.ray_address: 'head' is not"),
        ("{ray_address: 'head:6379'}", "cluster.ray_address: ray_address means nothing"),
        ("{shared_folder: true}", "cluster.shared_folder: shared_folder means nothing"),
        ("{placement: ray, lanes: {device: auto}}", "cluster.lanes.device: Ray must be told"),
        ("{placement: ray, replicas: {device: auto}}", "cluster.replicas.device: Ray must be told"),
    ],
)
def test_contradictions_are_refused_with_their_place(tmp_path: Path, cluster: str, said: str) -> None:
    """Before anything is written or started."""
    with pytest.raises(InputError) as error:
        load(tmp_path, cluster)
    assert said in str(error.value)
