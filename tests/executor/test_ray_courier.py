"""Adapters on their way to workers that see no run folder, and back; no Ray needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from executor.protocols import AdapterFolder, NewAdapter, NextVersion, Order, Report, TrainingBatch
from executor.ray_courier import Courier, Delivery, Parcel, Stock, commit, make_root, pack_folder
from marlaas.commands import CreateAdapter, LoadAdapter, Publish, Train, UnloadAdapter
from marlaas.events import (
    AdapterCreated,
    AdapterLoaded,
    AdapterPublished,
    AdapterUnloaded,
    CommandFailed,
    TrainingFinished,
    TrainingStats,
)
from marlaas.spec import LoraSpec, TrainingSpec


def write(folder: Path, content: str) -> str:
    """A folder with one file; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "weights").write_text(content)
    return str(folder)


def folders(run: Path, version: int) -> dict[str, str]:
    """Where a version of task t lives in a run folder."""
    return {
        "adapter_folder": str(run / "adapters" / "t" / f"v{version}"),
        "optimizer_folder": str(run / "optimizer" / "t" / f"v{version}"),
    }


def load(number: int, run: Path, version: int) -> Order:
    """A LoadAdapter order."""
    payload = AdapterFolder(folder=folders(run, version)["adapter_folder"], fingerprint="f")
    command = LoadAdapter(id=number, replica="replica-0", task="t", version=version)
    return Order(command=command, payload=payload)


def publish(number: int, run: Path, version: int) -> Order:
    """A Publish order."""
    payload = NextVersion(**folders(run, version), cursor={"step": version})
    return Order(command=Publish(id=number, lane="lane-0", task="t", version=version), payload=payload)


def train(number: int, run: Path, version: int) -> Order:
    """A Train order; its samples do not travel in folders."""
    payload = TrainingBatch(
        samples=[], **folders(run, version), training=TrainingSpec(), temperature=1.0, seed=1
    )
    command = Train(id=number, lane="lane-0", task="t", step=version, version=version, trajectories=())
    return Order(command=command, payload=payload)


def parcels(order: Order) -> list[Parcel]:
    """What travels with an order, looked up afresh."""
    return Stock(lambda parcel: parcel).refs(order)


def test_what_a_lane_makes_becomes_durable_in_the_run_folder_alone(tmp_path: Path) -> None:
    """Versions arrive whole, the optimizers of the last two stay, and the copies vanish."""
    run, far = tmp_path / "run", tmp_path / "far"
    courier = Courier(far)
    for version in range(4):
        order: Any = publish(version, run, version)
        event: Any = AdapterPublished(at=0, command=version, fingerprint="f")
        if version == 0:
            payload = NewAdapter(**folders(run, 0), lora=LoraSpec(), training=TrainingSpec(), seed=1)
            order = Order(command=CreateAdapter(id=0, lane="lane-0", task="t"), payload=payload)
            event = AdapterCreated(at=0, command=0, fingerprint="f")
        here = courier.unpack(order, []).payload
        assert isinstance(here, NewAdapter | NextVersion)
        assert not Path(here.adapter_folder).is_relative_to(run)
        write(Path(here.adapter_folder), f"adapter {version}")
        write(Path(here.optimizer_folder), f"moments {version}")
        delivery = courier.pack([Report(event=event)])
        assert [Path(parcel.folder).parts[-3] for parcel in delivery.parcels] == ["optimizer", "adapters"]
        assert commit(delivery) == [Report(event=event)]
    assert (run / "adapters" / "t" / "v3" / "weights").read_text() == "adapter 3"
    assert sorted(p.name for p in (run / "adapters" / "t").iterdir()) == ["v0", "v1", "v2", "v3"]
    assert sorted(p.name for p in (run / "optimizer" / "t").iterdir()) == ["v2", "v3"]
    assert not [path for path in far.rglob("*") if path.is_file()]


def test_a_lane_trains_from_copies_that_are_removed_when_it_has(tmp_path: Path) -> None:
    """Adapter and optimizer are laid out for the order and for no longer."""
    run, courier = tmp_path / "run", Courier(tmp_path / "far")
    for folder in folders(run, 1).values():
        write(Path(folder), folder)
    order = train(1, run, 1)
    here = courier.unpack(order, parcels(order)).payload
    assert isinstance(here, TrainingBatch)
    for name, folder in folders(run, 1).items():
        copy = Path(getattr(here, name))
        assert (copy / "weights").read_text() == folder
        assert not copy.is_relative_to(run)
    courier.pack([Report(event=TrainingFinished(at=0, command=1, stats=TrainingStats(num_tokens=1)))])
    assert not Path(here.adapter_folder).exists()
    assert not Path(here.optimizer_folder).exists()


def test_a_replica_keeps_its_copy_until_it_has_unloaded_the_adapter(tmp_path: Path) -> None:
    """An engine may swap an adapter out and read it again."""
    run, courier = tmp_path / "run", Courier(tmp_path / "far")
    write(run / "adapters" / "t" / "v1", "one")
    order = load(1, run, 1)
    here = courier.unpack(order, parcels(order)).payload
    assert isinstance(here, AdapterFolder)
    courier.pack([Report(event=AdapterLoaded(at=0, command=1, fingerprint="f"))])
    assert (Path(here.folder) / "weights").read_text() == "one"
    unload = Order(command=UnloadAdapter(id=2, replica="replica-0", task="t", version=1))
    assert courier.unpack(unload, []) == unload
    courier.pack([Report(event=AdapterUnloaded(at=0, command=2))])
    assert not Path(here.folder).exists()


def test_a_version_is_put_away_once_and_only_the_present_one_is_held(tmp_path: Path) -> None:
    """Two replicas share what was put away; a newer version, or the same made again, replaces it."""
    put: list[Parcel] = []

    def keep(parcel: Parcel) -> int:
        put.append(parcel)
        return len(put)

    stock = Stock(keep)
    assert stock.refs(load(1, tmp_path, 0)) == []
    write(tmp_path / "adapters" / "t" / "v0", "zero")
    assert [stock.refs(load(i, tmp_path, 0)) for i in (1, 2)] == [[1], [1]]
    folder = write(tmp_path / "adapters" / "t" / "v1", "one")
    assert stock.refs(load(3, tmp_path, 1)) == [2]
    write(tmp_path / "adapters" / "t" / "v1", "made again")
    stock.renew(folder)
    assert stock.refs(load(4, tmp_path, 1)) == [3]
    assert put[-1].files == {"weights": b"made again"}


def test_a_version_that_cannot_be_kept_was_not_published(tmp_path: Path) -> None:
    """A full or forbidden disk of the driver's fails the order, with the reason."""
    (tmp_path / "adapters").write_text("in the way")
    parcel = Parcel(folder=str(tmp_path / "adapters" / "t" / "v1"), files={"weights": b""})
    event = AdapterPublished(at=0, command=5, fingerprint="f")
    (report,) = commit(Delivery(reports=[Report(event=event)], parcels=[parcel]))
    assert isinstance(report.event, CommandFailed)
    assert report.event.command == 5
    assert "adapters" in report.event.reason


def test_folders_of_dead_workers_are_removed_and_those_of_live_ones_are_not(tmp_path: Path) -> None:
    """Whoever holds the lock is alive; a worker that was killed could not tidy up."""
    mine = make_root(tmp_path)
    dead = tmp_path / "marlaas-worker-dead"
    dead.mkdir()
    (dead / ".lock").write_text("")
    other = make_root(tmp_path)
    assert mine != other
    assert mine.is_dir()
    assert not dead.exists()


def test_a_folder_that_is_not_there_makes_no_parcel(tmp_path: Path) -> None:
    """The engine then says what it misses."""
    assert pack_folder(str(tmp_path / "nowhere")) is None
