"""Every error a user or a world can meet: what happened, where, what was wanted, how to mend it."""


class MarlaasError(Exception):
    """Any error this project raises on purpose."""


class InputError(MarlaasError, ValueError):
    """The user's input is wrong; nothing was written (exit code 2).

    `where` is the path inside the YAML (`tasks[2].steps`), a file or a command-line option;
    `wanted` says what would be valid and how to mend it.
    """

    def __init__(self, where: str, problem: str, wanted: str) -> None:
        super().__init__(where, problem, wanted)
        self.where, self.problem, self.wanted = where, problem, wanted

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}; {self.wanted}"


class IllegalEvent(MarlaasError):
    """A world reported something that cannot have happened; the scheduler is unchanged."""


class IllegalTransition(MarlaasError):
    """A lifecycle was asked for a pair that is not in its table; the entity is unchanged."""


class InvariantViolation(MarlaasError):
    """The scheduler's books do not balance: a defect of the core, never of the input."""


class LawBroken(MarlaasError):
    """A run did what no run can do, such as losing a trajectory: a defect of its world or of the core."""


class TraceError(MarlaasError):
    """A trace cannot be read as one: unknown version or type, out of order, or damaged in the middle."""
