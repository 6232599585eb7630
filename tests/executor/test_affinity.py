import pytest

from executor.affinity import split_cores


@pytest.mark.parametrize(
    ("replicas", "lanes", "num_cores", "plan"),
    [
        (1, 1, 2, {"r0": (0,), "l0": (1,)}),
        (1, 1, 5, {"r0": (0, 1, 2), "l0": (3, 4)}),
        (2, 1, 8, {"r0": (0, 1, 2), "r1": (3, 4, 5), "l0": (6, 7)}),
        (3, 1, 3, {"r0": (0,), "r1": (1,), "r2": (0,), "l0": (2,)}),
        (1, 3, 2, {"r0": (0,), "l0": (1,), "l1": (1,), "l2": (1,)}),
        (3, 1, 2, {"r0": (0,), "r1": (0,), "r2": (0,), "l0": (1,)}),
        (3, 2, 4, {"r0": (0,), "r1": (1,), "r2": (0,), "l0": (2,), "l1": (3,)}),
        (1, 1, 1, {"r0": (0,), "l0": (0,)}),
    ],
)
def test_cores_are_split_evenly_and_kinds_stay_apart(
    replicas: int, lanes: int, num_cores: int, plan: dict[str, tuple[int, ...]]
) -> None:
    """Workers get their own cores while there are enough; replicas and lanes share none but the only one."""
    names = [f"r{i}" for i in range(replicas)], [f"l{i}" for i in range(lanes)]
    assert split_cores(*names, range(num_cores)) == plan
