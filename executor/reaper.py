"""Ends what a dead worker leaves behind: an engine's own processes do not notice the death of their parent.

`contain` makes the calling process the head of a process group and starts a watcher outside of that group,
which kills the group once the head is gone. Knows no engine: what the worker starts later is in the group.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import resource_tracker

_POLL_S = 0.05


def contain() -> None:
    """Let no process that this one starts from now on outlive it by more than a moment."""
    # The tracker of shared memory stays outside: it tidies up when its users are dead, and then ends.
    resource_tracker.ensure_running()
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    watcher = [sys.executable, "-S", "-P", __file__, str(os.getpid())]
    subprocess.Popen(watcher, start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def watch(head: int) -> None:
    """Wait until the parent, process `head`, is gone, then kill what is left of its group."""
    while os.getppid() == head:
        time.sleep(_POLL_S)
    try:
        os.killpg(head, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watch(int(sys.argv[1]))
