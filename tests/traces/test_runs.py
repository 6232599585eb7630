"""Metrics, timelines and exports of recorded runs of the real scheduler, checked against each other."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from handmade_traces import RECORDS, L, R, by_hand, s, trace_of
from hypothesis import given
from hypothesis import strategies as st
from timed_world import record, small_experiment

from marlaas import commands as c
from marlaas import events as e
from marlaas.errors import InputError
from marlaas.systems import SYSTEMS
from traces.compare import check_same_experiment, compare, compare_runs
from traces.export import export_parquet, export_perfetto
from traces.metrics import CAUSES, Run, compute, intervals, series
from traces.metrics.occupancy import NS, Cover, Flow, Level
from traces.metrics.spans import Joiner, Span
from traces.reader import read


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three tasks with faults."""
    path = tmp_path_factory.mktemp("run")
    record(path / "trace.jsonl", small_experiment(tasks=3, replicas=2, lanes=2), faults=True)
    return path


@pytest.mark.parametrize("faults", [False, True], ids=["calm", "faults"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_books_balance_whatever_happens(tmp_path: Path, system: str, faults: bool) -> None:
    """Causes sum to each step's latency to the ns, busy and idle to 1, and nothing is outside its bounds."""
    record(tmp_path / "trace.jsonl", small_experiment(system, tasks=3, slots=2), faults=faults)
    run, values = Run(tmp_path), compute(tmp_path)
    rows = [row for task in run.tasks.values() for row in task.rows]
    assert len(rows) == values["steps"] == 6
    for row in rows:
        assert sum(row.causes_ns) == row.latency_ns
        assert min(row.causes_ns) >= 0
        assert row.begin_ns <= row.generate_ns <= row.complete_ns <= row.end_ns
    assert sum(values[f"step_latency_s.{cause}"] for cause in CAUSES) == pytest.approx(
        values["step_latency_s.mean"], abs=1e-8
    )
    assert values["busy"] + values["idle"] == pytest.approx(1, abs=1e-15)
    shares = ("rollout_busy", "train_busy", "rollout_effective", "train_effective", "fairness_jain")
    assert all(0 < values[name] <= 1 for name in shares)
    assert values["trajectories"] + values["dropped"] == 12
    assert values["tokens_per_s"] * values["makespan_s"] >= 12 * 2 * 12


def test_a_file_and_its_records_in_memory_give_the_same_numbers(folder: Path) -> None:
    """Streaming changes nothing, nor does compression."""
    assert compute(folder) == compute(read(folder)) == compute(folder / "trace.jsonl")


# --- joining ---------------------------------------------------------------------------------------


def _spans(records: list[Any]) -> list[Span]:
    found: list[Span] = []
    Joiner(found.append, lambda at, fact: None).feed(records)
    return found


def _turn(at: float, command: int, trajectory: int) -> e.Event:
    return e.TurnGenerated(
        at=s(at),
        command=command,
        trajectory=trajectory,
        task="a",
        version=0,
        prompt_tokens=1,
        output_tokens=1,
    )


def _generate(number: int, *trajectories: int) -> c.Command:
    return c.Generate(id=number, replica=R, task="a", version=0, step=0, turn=0, trajectories=trajectories)


def _step(number: int, trajectory: int) -> c.Command:
    return c.StepEnvironment(id=number, environment="e", task="a", step=0, turn=0, trajectory=trajectory)


def _seen(records: list[Any]) -> list[tuple[int, int, float, float, str]]:
    return [
        (span.command.id, span.trajectory, span.start / NS, span.end / NS, span.ending)
        for span in _spans(records)
    ]


def test_a_late_or_duplicate_answer_ends_nothing() -> None:
    """The first answer counts."""
    records = [
        (e.RunStarted(at=0), (_generate(1, 0, 1),)),
        (_turn(1, 1, 0), ()),
        (_turn(2, 1, 0), ()),
        (_turn(3, 1, 1), ()),
        (_turn(4, 1, 1), ()),
        (e.AdapterLoaded(at=s(5), command=9, fingerprint="x"), ()),
    ]
    assert _seen(records) == [(1, 0, 0, 1, "ok"), (1, 1, 0, 3, "ok")]


def test_aborted_turns_end_when_the_replica_lets_go() -> None:
    """Only those named, not when the abort is ordered."""
    records = [
        (e.RunStarted(at=0), (_generate(1, 0, 1, 2),)),
        (e.TimerFired(at=s(1), command=1), (c.AbortTurns(id=2, replica=R, generate=1, trajectories=(0, 1)),)),
        (_turn(2, 1, 1), ()),
        (e.TurnsAborted(at=s(3), command=2), ()),
        (_turn(4, 1, 2), ()),
    ]
    assert _seen(records) == [(1, 1, 0, 2, "ok"), (1, 0, 0, 3, "aborted"), (1, 2, 0, 4, "ok")]


def test_failed_turns_end_one_by_one_or_together() -> None:
    """A CommandFailed with a trajectory ends that turn, one without ends all that are left."""
    records = [
        (e.RunStarted(at=0), (_generate(1, 0, 1, 2),)),
        (e.CommandFailed(at=s(1), command=1, reason="x", trajectory=1), ()),
        (e.CommandFailed(at=s(2), command=1, reason="x"), ()),
    ]
    assert _seen(records) == [(1, 1, 0, 1, "failed"), (1, 0, 0, 2, "failed"), (1, 2, 0, 2, "failed")]


@pytest.mark.parametrize("by", ["loss", "restart"])
def test_a_lost_or_restarted_worker_ends_what_it_did(by: str) -> None:
    """And nothing else: the environment goes on."""
    end: Any = (
        (e.WorkerLost(at=s(2), worker=R, reason="x"), ())
        if by == "loss"
        else (e.TimerFired(at=s(2), command=1), (c.StartWorker(id=5, worker=R),))
    )
    records = [
        (
            e.RunStarted(at=0),
            (
                _generate(1, 0),
                c.LoadAdapter(id=2, replica=R, task="b", version=0),
                c.Train(id=3, lane=L, task="b", step=0, version=0, trajectories=(0,)),
                _step(4, 1),
            ),
        ),
        end,
        (e.EnvironmentStepped(at=s(3), command=4, done=True), ()),
        (e.TrainingFinished(at=s(4), command=3, stats=e.TrainingStats(num_tokens=1)), ()),
        (_turn(5, 1, 0), ()),
    ]
    found = _seen(records)
    assert found[:4] == [(1, 0, 0, 2, "lost"), (2, -1, 0, 2, "lost"), (4, 1, 0, 3, "ok"), (3, -1, 0, 4, "ok")]
    assert [(number, ending) for number, *_, ending in found[4:]] == (
        [(5, "open")] if by == "restart" else []
    )


def test_an_environment_step_tried_again_ends_with_the_next_try() -> None:
    """The silent first try ends when the second begins; one of a dropped trajectory when it is dropped."""
    drop = c.DropTrajectories(id=4, task="a", step=0, trajectories=(0, 1), reason="x")
    records = [
        (e.RunStarted(at=0), (_step(1, 0), _step(2, 1))),
        (e.TimerFired(at=s(2), command=9), (_step(3, 0),)),
        (e.EnvironmentStepped(at=s(3), command=1, done=True), ()),
        (e.TimerFired(at=s(4), command=9), (drop,)),
        (e.EnvironmentStepped(at=s(5), command=3, done=True), ()),
    ]
    assert _seen(records) == [
        (1, 0, 0, 2, "retried"),
        (3, 0, 2, 4, "dropped"),
        (2, 1, 0, 4, "dropped"),
    ]


def test_a_turn_tried_again_elsewhere_ends_the_first_try() -> None:
    """As when a replica is given up without a word from it."""
    records = [
        (e.RunStarted(at=0), (_generate(1, 0),)),
        (e.TimerFired(at=s(2), command=9), (_generate(2, 0),)),
    ]
    assert _seen(records) == [(1, 0, 0, 2, "retried"), (2, 0, 2, 2, "open")]


def test_a_late_answer_taken_for_the_end_is_taken_back() -> None:
    """An environment answers after the scheduler gave the step up, before its next try: the step goes on."""
    again = c.StepEnvironment(id=15, environment="e", task="a", step=0, turn=0, trajectory=0)
    records: list[Any] = [
        *RECORDS[:16],
        (e.EnvironmentStepped(at=s(13), command=14, done=True, reward=0.75), ()),
        (e.TimerFired(at=s(13), command=1), (again,)),
        (
            e.EnvironmentStepped(at=s(15), command=15, done=True, reward=0.25),
            (c.Train(id=16, lane=L, task="a", step=0, version=0, trajectories=(0, 1)),),
        ),
        (
            e.TrainingFinished(at=s(16), command=16, stats=e.TrainingStats(num_tokens=1)),
            (c.Publish(id=17, lane=L, task="a", version=1),),
        ),
        (e.AdapterPublished(at=s(17), command=17, fingerprint="a1"), ()),
    ]
    row = Run(trace_of(records)).tasks["a"].rows[0]
    # In the order of CAUSES, until the batch is complete at 15:
    #   a/0: queue [2, 3] and [8, 13], load [3, 5], generate [5, 7], environment [7, 8] and [13, 15]
    #   a/1: queue [2, 3], load [3, 5], generate [5, 9] and [10, 12], environment [9, 10] and [12, 13]
    seconds = ((6 + 1) / 2, 2, (2 + 6) / 2, (3 + 2) / 2, (0 + 2) / 2, 0, 1, 1)
    assert row.causes_ns == tuple(s(x) for x in seconds)
    assert row.reward == (0.25 + 0.75) / 2


# --- accumulators against the obvious --------------------------------------------------------------

PIECES = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 9)).map(
        lambda x: (min(x[:2]), max(x[:2]), x[2])
    ),
    max_size=12,
).map(lambda pieces: sorted(pieces, key=lambda piece: piece[1]))


@given(PIECES, st.integers(0, 40), st.integers(0, 40))
def test_a_cover_is_the_union(pieces: list[tuple[int, int, int]], a: int, b: int) -> None:
    """Every instant that some interval covers, once, in disjoint intervals in order."""
    cover = Cover()
    for start, end, _ in pieces:
        cover.add(start, end)
    covered = {t for start, end, _ in pieces for t in range(start, end)}
    since, until = min(a, b), max(a, b)
    assert cover.covered_ns(since, until) == len(covered & set(range(since, until)))
    edges = [x for pair in zip(cover.starts, cover.ends, strict=True) for x in pair]
    assert all(one < other for one, other in pairwise(edges))


@given(PIECES, st.integers(0, 40), st.integers(0, 40))
def test_a_level_counts_what_lasts(pieces: list[tuple[int, int, int]], a: int, b: int) -> None:
    """At every instant the sum of the amounts of the intervals that cover it."""
    level = Level()
    for start, end, amount in pieces:
        level.add(start, end, amount)
    at = [sum(n for start, end, n in pieces if start <= t < end) for t in range(41)]
    since, until = min(a, b), max(a, b)
    assert level.peak() == max(at)
    assert level.sum_ns(since, until) == sum(at[since:until])


@given(PIECES, st.integers(1, 40))
def test_a_flow_peaks_at_its_fullest_second(pieces: list[tuple[int, int, int]], tenths: int) -> None:
    """Tokens spread evenly over tenths of a second, summed by whole seconds, the rest joined to the last."""
    pieces = [(start, min(end, tenths), n) for start, end, n in pieces if start < min(end, tenths)]
    flow = Flow(0)
    for start, end, tokens in pieces:
        flow.add(start * NS // 10, end * NS // 10, tokens)
    made = [sum(n / (end - start) for start, end, n in pieces if start <= t < end) for t in range(tenths)]
    num = max(1, tenths // 10)
    windows = [made[10 * i : 10 * i + 10] for i in range(num - 1)] + [made[10 * (num - 1) :]]
    rates = [sum(window) / (len(window) / 10) for window in windows]
    assert flow.peak_per_s(tenths * NS // 10) == pytest.approx(max(rates))
    assert sum(made) / (tenths / 10) <= flow.peak_per_s(tenths * NS // 10) * (1 + 1e-9)


# --- timelines -------------------------------------------------------------------------------------


def test_intervals_of_the_hand_made_run() -> None:
    """Each piece of work twice, on its device or environment and on its task, neighbours joined."""
    found: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for track, kind, task, start, end in intervals(by_hand()):
        found.setdefault((track, kind, task), []).append((start / NS, end / NS))
    on_devices = {key: value for key, value in found.items() if not key[0].startswith("task:")}
    assert on_devices == {
        (f"device:{L}", "create", "a"): [(2, 3)],
        (f"device:{L}", "create", "b"): [(3, 4)],
        (f"device:{R}", "load", "a"): [(3, 5), (19, 20)],
        (f"device:{R}", "load", "b"): [(4, 5)],
        (f"device:{R}", "rollout", "a"): [(5, 9), (10, 12), (20, 24)],
        (f"device:{R}", "rollout", "b"): [(5, 15)],
        ("environment:e", "environment", "a"): [(7, 8), (9, 10), (12, 14), (24, 26)],
        ("environment:e", "environment", "b"): [(10, 11), (15, 16)],
        (f"device:{L}", "training", "a"): [(14, 18), (26, 28), (29, 31)],
        (f"device:{L}", "training", "b"): [(19, 21)],
        (f"device:{L}", "publish", "a"): [(18, 19), (31, 32)],
        (f"device:{L}", "publish", "b"): [(21, 22)],
    }
    by_task = {(f"task:{task}", kind, task): value for (_, kind, task), value in on_devices.items()}
    assert {key: value for key, value in found.items() if key[0].startswith("task:")} == by_task


def test_series_of_the_hand_made_run() -> None:
    """Levels at every change."""
    found = {name: [(at / NS, n) for at, n in steps] for name, steps in series(by_hand()).items()}
    assert found == {
        "in_flight": [(5, 4), (7, 3), (9, 2), (12, 1), (15, 0), (20, 2), (24, 0)],
        "queue_depth": [(16, 1), (19, 0), (28, 1), (29, 0)],
        "tasks.a.turns": [(5, 2), (7, 1), (9, 0), (10, 1), (12, 0), (20, 2), (24, 0)],
        "tasks.b.turns": [(5, 2), (10, 1), (15, 0)],
        "tasks.a.environment_steps": [
            *[(7, 1), (8, 0), (9, 1), (10, 0), (12, 1), (14, 0), (24, 2), (25, 1), (26, 0)]
        ],
        "tasks.b.environment_steps": [(10, 1), (11, 0), (15, 1), (16, 0)],
        "environments.e": [
            *[(7, 1), (8, 0), (9, 1), (11, 0), (12, 1), (14, 0), (15, 1), (16, 0)],
            *[(24, 2), (25, 1), (26, 0)],
        ],
    }


# --- exports ---------------------------------------------------------------------------------------


def test_a_perfetto_export_is_json_with_every_interval(folder: Path, tmp_path: Path) -> None:
    """Complete events are the intervals; on one track they never overlap; counters and alarms are there."""
    path = tmp_path / "perfetto.json"
    num = export_perfetto(folder, path)
    entries = msgspec.json.decode(path.read_bytes())["traceEvents"]
    assert len(entries) == num
    pieces = [entry for entry in entries if entry["ph"] == "X"]
    assert len(pieces) == len(intervals(folder))
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for entry in pieces:
        tracks.setdefault((entry["pid"], entry["tid"]), []).append((entry["ts"], entry["ts"] + entry["dur"]))
    for spans in tracks.values():
        assert all(one[1] <= other[0] + 1e-6 for one, other in pairwise(sorted(spans)))
    named = {(entry["pid"], entry["tid"]) for entry in entries if entry["name"] == "thread_name"}
    assert named == set(tracks)
    levels = {name for name, steps in series(folder).items() if steps}
    assert {entry["name"] for entry in entries if entry["ph"] == "C"} == levels
    assert any("replica-0 lost: killed" in entry["name"] for entry in entries if entry["ph"] == "i")


def test_parquet_tables_hold_the_run(folder: Path, tmp_path: Path) -> None:
    """One row per event and command, turn, environment step and committed step, with their values."""
    pandas = pytest.importorskip("pandas")
    tables = {name: pandas.read_parquet(path) for name, path in export_parquet(folder, tmp_path).items()}
    records = read(folder).records
    events = tables["events"]
    assert len(events) == sum(1 + len(commands) for _, commands in records)
    assert (~events.is_command).sum() == len(records)
    assert events.at_ns.is_monotonic_increasing
    assert set(events[events.type == "Generate"].worker) == {"replica-0", "replica-1"}
    turns = tables["turns"]
    made = [event for event, _ in records if isinstance(event, e.TurnGenerated)]
    assert turns[turns.ending == "ok"].output_tokens.sum() == sum(turn.output_tokens for turn in made)
    assert {"ok", "aborted"} <= set(turns.ending) <= {"ok", "aborted", "lost"}
    assert (turns.end_ns > turns.start_ns).all()
    steps = tables["steps"].set_index(["task", "step"])
    assert len(steps) == compute(folder)["steps"]
    latency = steps.end_ns - steps.begin_ns
    assert (steps[[f"{cause}_ns" for cause in CAUSES]].sum(axis=1) == latency).all()
    assert steps.loss.tolist() == [0.25] * len(steps)
    environment_steps = tables["environment_steps"]
    assert "retried" in set(environment_steps.ending)
    assert environment_steps[environment_steps.done.eq(True)].reward.notna().all()


# --- comparing -------------------------------------------------------------------------------------


def test_two_systems_are_compared_metric_by_metric(tmp_path: Path) -> None:
    """Numbers only; the relative error is of b against a."""
    for system in ("single", "marlaas"):
        (tmp_path / system).mkdir()
        record(tmp_path / system / "trace.jsonl", small_experiment(system))
    rows = {row.metric: row for row in compare_runs(tmp_path / "single", tmp_path / "marlaas")}
    pace = rows["steps_per_hour"]
    assert pace.a is not None
    assert pace.b is not None
    assert pace.b > pace.a
    assert pace.relative_error == pytest.approx(pace.b / pace.a - 1)
    assert rows["dropped"].relative_error is None  # 0 of 0
    assert "tasks.t0.outcome" not in rows
    assert "preemptions" not in rows


def test_what_only_one_run_has_is_shown() -> None:
    """At its place in a, at the end for b."""
    rows = compare({"x": 2, "only_a": 1.0, "text": "t"}, {"only_b": 3, "x": 3, "text": "t"})
    assert [(row.metric, row.a, row.b, row.relative_error) for row in rows] == [
        ("x", 2, 3, 0.5),
        ("only_a", 1.0, None, None),
        ("only_b", None, 3, None),
    ]


def test_runs_of_different_experiments_are_not_compared(tmp_path: Path) -> None:
    """The message names what differs; system, world and profile may."""
    record(tmp_path / "a.jsonl", small_experiment("single"))
    record(tmp_path / "b.jsonl", small_experiment("marlaas"), world="executor")
    record(tmp_path / "c.jsonl", small_experiment("marlaas", steps=1))
    check_same_experiment(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    with pytest.raises(InputError, match="tasks differ"):
        check_same_experiment(tmp_path / "a.jsonl", tmp_path / "c.jsonl")
