"""However a driver ends, no process of its run outlives it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

PROGRAM = """
import sys, threading
from pathlib import Path
sys.path[:0] = {paths!r}
from scripted_runs import Memory, scripted, small
from executor.driver import execute
from marlaas import commands

class Loud(Memory):
    def write(self, event, given):
        super().write(event, given)
        if any(isinstance(command, moment) for command in given):
            print("there", flush=True)
            if {raises!r}:
                raise RuntimeError("the driver's own failure")

moment = getattr(commands, {moment!r})
out = Path(sys.argv[1])
loud = Loud()
plugins = scripted(replica={replica!r}, lane={lane!r})
outcomes = execute(small(out, environments=["env"]), out, loud, plugins=plugins)
print(type(loud.events[-1]).__name__, *outcomes.values(), flush=True)
"""


def start_driver(
    out: Path,
    *,
    replica: str = "SpinningReplica",
    lane: str = "WatermarkLane",
    moment: str = "Generate",
    raises: bool = False,
) -> subprocess.Popen[bytes]:
    """A driver in the middle of a run: it has just given the first command of the kind `moment`."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    program = PROGRAM.format(paths=paths, replica=replica, lane=lane, moment=moment, raises=raises)
    command = [sys.executable, "-c", program, str(out)]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert driver.stdout is not None
    assert driver.stdout.readline() == b"there\n"
    time.sleep(0.2)  # into the computation
    return driver


def workers_of(driver: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The processes a driver has started, and theirs."""
    return psutil.Process(driver.pid).children(recursive=True)


def assert_all_gone(workers: list[psutil.Process], within_s: float = 5.0) -> None:
    """Every process ends in time; a zombie nobody of ours can reap counts as ended."""
    deadline = time.monotonic() + within_s
    left = workers
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = [w for w in left if w.is_running() and w.status() != psutil.STATUS_ZOMBIE]
    assert left == []


@pytest.mark.parametrize("replica", ["SpinningReplica", "StallingReplica", "StoppedReplica"])
def test_a_killed_driver_leaves_no_worker(tmp_path: Path, replica: str) -> None:
    """SIGKILL in the middle of a run, with a replica that computes, waits or is stopped."""
    with start_driver(tmp_path, replica=replica) as driver:
        workers = workers_of(driver)
        assert len(workers) == 2
        driver.kill()
        driver.wait(10)
        assert_all_gone(workers)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, -signal.SIGINT)])
def test_a_driver_told_to_stop_stops_its_workers_first(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """It exits as programs do that were told so; asked by SIGTERM, as one that has done what it was asked."""
    with start_driver(tmp_path) as driver:
        workers = workers_of(driver)
        driver.send_signal(number)
        assert driver.wait(10) == status
        assert len(workers) == 2
        assert_all_gone(workers, within_s=0.5)


def test_a_job_told_to_stop_commits_the_update_under_way(tmp_path: Path) -> None:
    """SIGTERM to the driver and all its workers in mid-training: the next version is there, then all end."""
    with start_driver(tmp_path, replica="WatermarkReplica", lane="SlowLane", moment="Train") as driver:
        workers = workers_of(driver)
        for process in [driver, *workers]:
            process.send_signal(signal.SIGTERM)
        out, _ = driver.communicate(timeout=10)
        assert driver.returncode == 0
        assert out.decode().split() == ["AdapterPublished", "stopped"]
        assert_all_gone(workers, within_s=0.5)


def test_a_second_sigterm_stops_at_once(tmp_path: Path) -> None:
    """The update under way is given up, the exit status says why."""
    with start_driver(tmp_path, replica="WatermarkReplica", lane="SlowLane", moment="Train") as driver:
        driver.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        driver.send_signal(signal.SIGTERM)
        out, _ = driver.communicate(timeout=10)
        assert driver.returncode == 128 + signal.SIGTERM
        assert out == b""


def test_a_driver_that_fails_leaves_no_worker(tmp_path: Path) -> None:
    """An exception of the main thread ends the run and its processes."""
    with start_driver(tmp_path, raises=True) as driver:
        assert driver.wait(10) == 1
    left = [p for p in psutil.process_iter(["cmdline"]) if _belongs_to(p, driver.pid)]
    assert left == []


def _belongs_to(process: psutil.Process, driver_pid: int) -> bool:
    line = process.info["cmdline"] or []
    return "executor.worker" in line and line[-1] == str(driver_pid)
