"""Writing and reading back: whole, torn, compressed, resumed, killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from handmade_traces import RECORDS, experiment
from hypothesis import given, settings
from hypothesis import strategies as st
from timed_world import record, small_experiment

from marlaas.commands import AnyCommand, Command
from marlaas.errors import InputError, TraceError
from marlaas.events import AnyEvent, EnvironmentStepped, Event, RunStarted, TrainingFinished, TrainingStats
from marlaas.spec import Fixed, Workload
from traces.reader import cut_torn_tail, find_trace, iter_records, read, read_header
from traces.replay import replay
from traces.schema import Header, Record, World, hash_of, make_header
from traces.writer import TraceWriter

ROOT = Path(__file__).parents[2]


def header_of(world: World = "sim") -> Header:
    """A header of the hand-made experiment."""
    return make_header(experiment(), world=world)


def write(path: Path, records: list[Record], header: Header | None = None) -> Path:
    """Write a trace; its path."""
    with TraceWriter(path, header or header_of()) as writer:
        for event, commands in records:
            writer.write(event, commands)
    return path


@pytest.mark.parametrize("world", ["sim", "executor"])
@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.zst"])
def test_what_is_written_reads_back(tmp_path: Path, name: str, world: World) -> None:
    """Header and records come back equal, compressed or not, from either kind of run."""
    header = header_of(world)
    path = write(tmp_path / name, RECORDS, header)
    trace = read(path)
    assert trace.header == header
    assert trace.records == RECORDS
    assert not trace.torn
    assert list(iter_records(tmp_path)) == RECORDS  # by its run folder
    assert read_header(tmp_path) == header


def test_a_header_keeps_what_the_run_depended_on(tmp_path: Path) -> None:
    """The profile, the host and the experiment come back; the order of its environments too."""
    spec = small_experiment()
    profile = {"replica": {"a_s": 0.01}, "sources": ["assumed"]}
    header = make_header(spec, world="sim", profile=profile)
    found = read_header(write(tmp_path / "trace.jsonl", [], header))
    assert found == header
    assert list(found.experiment.environments) == ["tool", "idle"]
    assert found.experiment_hash == hash_of(spec)


def test_whole_numbers_given_for_floats_do_not_spoil_a_trace(tmp_path: Path) -> None:
    """A workload's default of `turns: 1` is written as it reads back, so the header keeps its seal."""
    spec = small_experiment()
    workload = Workload(prompt_tokens=Fixed(value=8), output_tokens=Fixed(value=3))
    tasks = tuple(msgspec.structs.replace(task, workload=workload) for task in spec.tasks)
    path = write(
        tmp_path / "trace.jsonl", [], make_header(msgspec.structs.replace(spec, tasks=tasks), world="sim")
    )
    assert read_header(path).experiment.tasks[0].workload == workload


def test_a_simulated_trace_names_no_host() -> None:
    """So that it is the same wherever it is made."""
    with pytest.raises(ValueError, match="no host"):
        make_header(experiment(), world="sim", host={"cores": 2})


def test_the_experiment_hash_sees_values_not_spelling() -> None:
    """An int given for a float is the same experiment; another step count is not."""
    spec = small_experiment()
    as_float = msgspec.json.decode(msgspec.json.encode(spec), type=type(spec))
    assert hash_of(spec) == hash_of(as_float)
    assert hash_of(spec) != hash_of(small_experiment(steps=3))


# --- random records --------------------------------------------------------------------------------

_FIELDS = {
    int: st.integers(0, 2**63 - 1),
    str: st.text(max_size=12),
    bool: st.booleans(),
    float: st.floats(allow_nan=False, allow_infinity=False),
}


def _any_of(kind: type) -> st.SearchStrategy[msgspec.Struct]:
    fields = {field.name: _values(field.type) for field in msgspec.structs.fields(kind)}
    return st.builds(kind, **fields)


def _values(annotation: object) -> st.SearchStrategy[object]:
    if annotation in _FIELDS:
        return _FIELDS[annotation]
    if annotation == tuple[int, ...]:
        return st.lists(st.integers(0, 2**31), max_size=4).map(tuple)
    if annotation is TrainingStats:
        return _any_of(TrainingStats)
    if getattr(annotation, "__args__", None):  # a union with None, or the literals of an outcome
        options = [st.none() if arg is type(None) else _values(arg) for arg in annotation.__args__]
        return st.one_of(options)
    return st.just(annotation)


EVENTS = st.one_of(*(_any_of(kind) for kind in AnyEvent.__args__ if kind is not RunStarted))
COMMANDS = st.one_of(*(_any_of(kind) for kind in AnyCommand.__args__))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.lists(COMMANDS, max_size=3)), max_size=12), st.data())
def test_any_events_and_commands_read_back(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[Event, list[Command]]], data: st.DataObject
) -> None:
    """Whatever a world may report and the core may order survives the trip, in order."""
    records: list[Record] = [(RunStarted(at=0), ())]
    times, number = sorted(event.at for event, _ in drawn), 0
    for at, (event, commands) in zip(times, drawn, strict=True):
        numbered = []
        for command in commands:
            number += 1
            numbered.append(msgspec.structs.replace(command, id=number))
        records.append((msgspec.structs.replace(event, at=at), tuple(numbered)))
    name = data.draw(st.sampled_from(["t.jsonl", "t.jsonl.zst"]))
    path = write(tmp_path_factory.mktemp("random") / name, records)
    assert read(path).records == records


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_json_cannot_hold_are_refused(tmp_path: Path, value: float) -> None:
    """Written as null they would read back as not known; nothing of the record is written."""
    with TraceWriter(tmp_path / "t.jsonl", header_of()) as writer:
        writer.write(RunStarted(at=0), ())
        with pytest.raises(TraceError, match=r"EnvironmentStepped\.reward is"):
            writer.write(EnvironmentStepped(at=1, command=1, done=True, reward=value), ())
        stats = TrainingStats(num_tokens=1, loss=value)
        with pytest.raises(TraceError, match=r"TrainingFinished\.loss is"):
            writer.write(TrainingFinished(at=1, command=1, stats=stats), ())
        writer.write(EnvironmentStepped(at=1, command=1, done=True, reward=1.0), ())
    assert len(read(tmp_path / "t.jsonl").records) == 2


# --- torn tails ------------------------------------------------------------------------------------


def test_a_torn_tail_is_cut_at_every_byte(tmp_path: Path) -> None:
    """Wherever in its last record a trace stops, all records before it are read and the rest is reported."""
    path = write(tmp_path / "trace.jsonl", RECORDS[:9])
    whole = path.read_bytes()
    begin = write(tmp_path / "shorter.jsonl", RECORDS[:8]).stat().st_size
    for length in range(begin, len(whole) + 1):
        path.write_bytes(whole[:length])
        trace = read(path)
        num = 9 if length == len(whole) else 8
        assert (len(trace.records), trace.torn) == (num, length not in (begin, len(whole)))
        tail = cut_torn_tail(path)
        assert tail.num_torn_bytes == (0 if length == len(whole) else length - begin)
        assert path.read_bytes() == (whole if length == len(whole) else whole[:begin])


def test_a_record_cut_between_its_lines_is_torn_as_a_whole(tmp_path: Path) -> None:
    """An event without all its commands was never acted upon: it is left out, and so is a command."""
    path = write(tmp_path / "trace.jsonl", RECORDS)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-3]))  # the last commit's event and UnloadAdapter, not its CloseTask
    trace = read(path)
    assert trace.torn
    assert trace.records == RECORDS[:-2]


def test_a_compressed_trace_that_stops_early(tmp_path: Path) -> None:
    """What was flushed is read and nothing else; cutting the tail leaves a whole trace."""
    path = write(tmp_path / "trace.jsonl.zst", RECORDS, header_of("executor"))
    whole = path.read_bytes()
    found = set()
    first = write(tmp_path / "header.jsonl.zst", [], header_of("executor")).stat().st_size
    for length in range(first, len(whole), 23):
        path.write_bytes(whole[:length])
        records = read(path).records
        assert records == RECORDS[: len(records)]
        found.add(len(records))
        cut_torn_tail(path)
        trace = read(path)
        assert trace.records == records
        assert not trace.torn
    assert max(found) >= len(RECORDS) - 2 > min(found)


def test_a_trace_without_a_whole_header_is_refused(tmp_path: Path) -> None:
    """A run killed before its header was written left no trace."""
    path = write(tmp_path / "trace.jsonl", [])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TraceError, match=r"trace\.jsonl:1: no header"):
        read(path)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.zst"])
def test_a_resumed_trace_is_as_if_never_stopped(tmp_path: Path, name: str) -> None:
    """The torn record is gone, the new ones continue the seals, and the whole reads as one run."""
    header = header_of("executor")
    path = tmp_path / name
    write(path, RECORDS[:20], header)
    if path.suffix == ".jsonl":
        path.write_bytes(path.read_bytes()[:-5])  # tears the 20th record
    kept = len(read(path).records)
    with TraceWriter(path, header, resume=True) as writer:
        for event, commands in RECORDS[kept:]:
            writer.write(event, commands)
    assert read(path).records == RECORDS
    if path.suffix == ".jsonl":
        assert path.read_bytes() == write(tmp_path / "at-once.jsonl", RECORDS, header).read_bytes()


def test_another_experiment_is_not_resumed(tmp_path: Path) -> None:
    """The trace is left as it was."""
    path = write(tmp_path / "trace.jsonl", RECORDS, header_of("executor"))
    before = path.read_bytes()
    with pytest.raises(InputError, match="another experiment"):
        TraceWriter(path, make_header(small_experiment(), world="executor"), resume=True)
    assert path.read_bytes() == before


def test_a_trace_is_never_overwritten(tmp_path: Path) -> None:
    """A second writer on the same path is refused."""
    path = write(tmp_path / "trace.jsonl", RECORDS)
    with pytest.raises(InputError, match="there is a trace already"):
        TraceWriter(path, header_of())
    assert read(path).records == RECORDS


def test_a_folder_without_a_trace_is_the_users_mistake(tmp_path: Path) -> None:
    """Not a damaged trace but none."""
    with pytest.raises(InputError, match="no trace here"):
        find_trace(tmp_path)
    with pytest.raises(InputError, match="no trace here"):
        read(tmp_path / "missing.jsonl")


# --- processes -------------------------------------------------------------------------------------

KILLED = """
import sys
sys.path.insert(0, {tests!r})
from handmade_traces import experiment
from marlaas.events import RunStarted, TimerFired
from traces.schema import make_header
from traces.writer import TraceWriter
writer = TraceWriter({path!r}, make_header(experiment(), world="executor"))
writer.write(RunStarted(at=0), ())
for i in range(1, 10**9):
    writer.write(TimerFired(at=i, command=i), ())
    print(i, flush=True)
"""


def _python(code: str, **environ: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)


def test_what_an_executor_wrote_survives_its_death(tmp_path: Path) -> None:
    """After SIGKILL every record whose `write` had returned is there."""
    path = tmp_path / "trace.jsonl"
    with _python(KILLED.format(path=str(path), tests=str(Path(__file__).parent))) as child:
        assert child.stdout is not None
        said = [child.stdout.readline() for _ in range(200)]
        child.send_signal(signal.SIGKILL)
        last = int([*said, *child.stdout.read().splitlines()][-1])
    times = [event.at for event, _ in iter_records(path)]
    assert times[-1] >= last >= 200
    assert times == list(range(len(times)))


HASHED = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from timed_world import record, small_experiment
record(Path({path!r}), small_experiment(tasks=3), faults=True)
"""


def test_a_simulated_trace_does_not_depend_on_hash_seeds(tmp_path: Path) -> None:
    """Byte for byte the same with PYTHONHASHSEED 0, 1 and 2."""
    paths = [tmp_path / f"{seed}.jsonl" for seed in range(3)]
    children = [
        _python(HASHED.format(path=str(path), tests=str(Path(__file__).parent)), PYTHONHASHSEED=str(seed))
        for seed, path in enumerate(paths)
    ]
    for child in children:
        with child:
            assert child.wait() == 0
    traces = [path.read_bytes() for path in paths]
    assert traces[0] == traces[1] == traces[2]
    assert len(traces[0].splitlines()) > 150


def test_a_trace_cut_anywhere_still_replays(tmp_path: Path) -> None:
    """A run killed at any point leaves a trace whose records replay."""
    path = tmp_path / "trace.jsonl"
    record(path, small_experiment(), world="executor", faults=True)
    whole = path.read_bytes()
    first = len(whole.splitlines(keepends=True)[0])
    for length in range(first, len(whole), 997):
        path.write_bytes(whole[:length])
        assert replay(path).ok
