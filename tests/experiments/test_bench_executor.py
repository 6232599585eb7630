"""The table of `make bench-executor`: how a comparison is made of rounds."""

from experiments.bench_executor import compare


def test_sides_are_measured_in_turn_and_a_ratio_is_of_one_round() -> None:
    """A machine that slows down between rounds changes rates, not the ratio."""
    order = []
    speeds = iter([1.0, 0.25, 0.5])
    speed = 0.0

    def ours() -> float:
        nonlocal speed
        speed = next(speeds)
        order.append("ours")
        return 30 * speed

    def theirs() -> float:
        order.append("theirs")
        return 10 * speed

    found = compare("speed", ours, theirs, rounds=3, wanted=4.0)
    assert order == ["ours", "theirs"] * 3
    assert (found.ours, found.theirs, found.ratio, found.wanted) == (30.0, 10.0, 3.0, 4.0)
