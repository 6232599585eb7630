"""Processes that grade: what an answer does to its grader stays there."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from executor.environments.judge import Judges
from marlaas.errors import MarlaasError

T = TypeVar("T")


def with_judges(work: Callable[[Judges], Awaitable[T]], *, count: int = 1, seconds: float = 0.3) -> T:
    """Run `work` with judges that are closed after it."""

    async def main() -> T:
        judges = Judges("scripted_graders:obedient", 0.5, count=count, seconds=seconds)
        try:
            return await work(judges)
        finally:
            await judges.close()

    return asyncio.run(main())


def test_misbehaviour_earns_nothing_and_the_next_answer_is_graded() -> None:
    """Long calls into C, exceptions, prints, and memory without end; endless loops are in the next test."""

    async def work(judges: Judges) -> list[float]:
        return [await judges.grade(each) for each in (1, "compute", "raise", "print", "devour", 0.25)]

    assert with_judges(work) == [1.0, 0.0, 0.0, 0.5, 0.0, 0.25]


def test_answers_belong_to_their_requests() -> None:
    """Many at once over two processes, one of which is busy to its end."""

    async def work(judges: Judges) -> list[float]:
        return await asyncio.gather(judges.grade("spin"), *(judges.grade(i) for i in range(100)))

    assert with_judges(work, count=2) == [0.0, *map(float, range(100))]


def test_a_grader_that_dies_is_told() -> None:
    """It is no fault of the answer, so it must not cost a reward in silence."""

    async def work(judges: Judges) -> float:
        with pytest.raises(MarlaasError, match="ended with status -9"):
            await judges.grade("die")
        return await judges.grade(1)

    assert with_judges(work) == 1.0


def test_a_grader_that_cannot_be_made_says_why() -> None:
    """Each time it is asked, for nothing else can mend it."""

    async def main() -> None:
        unmade = Judges("scripted_graders:unmade", "this", count=1, seconds=1)
        for _ in range(2):
            with pytest.raises(MarlaasError, match=r"cannot be made: RuntimeError: no grader for this"):
                await unmade.grade(1)
        await unmade.close()

    asyncio.run(main())


def test_an_answer_nobody_waits_for_is_not_taken_for_the_next() -> None:
    """A step that was cancelled leaves no reward behind."""

    async def work(judges: Judges) -> float:
        await judges.grade(1)
        late = asyncio.create_task(judges.grade("spin"))
        await asyncio.sleep(0.05)
        late.cancel()
        return await judges.grade(0.75)

    assert with_judges(work, seconds=30) == 0.75


def test_no_process_is_left_behind() -> None:
    """Closing ends them; grading in another loop starts others."""
    pids = list[int]()

    async def work(judges: Judges) -> Any:
        reward = await judges.grade(1)
        pids.extend(process.pid for process in judges._started)
        return reward

    assert with_judges(work) == with_judges(work) == 1.0
    assert len(set(pids)) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
