"""Which keys of environments name files, so that a YAML may name them relative to itself. Reads no file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from marlaas.spec import EnvironmentSpec, LocalCorpus, MathEnvironment, SearchEnvironment

SAMPLES = Path(__file__).parent.parent / "executor" / "environments" / "samples"


def is_sample(name: str) -> bool:
    """Whether this is the name of a sample that is shipped."""
    return (SAMPLES / f"{name}.jsonl").is_file()


def map_files(spec: EnvironmentSpec, change: Callable[[str], str]) -> EnvironmentSpec:
    """The same environment with every name of a file changed."""
    match spec:
        case MathEnvironment(problems=problems, held_out=held_out):
            held_out = None if held_out is None else change(held_out)
            return replace(spec, problems=change(problems), held_out=held_out)
        case SearchEnvironment(questions=questions, source=LocalCorpus(pages=pages)):
            source = LocalCorpus(pages=change(pages))
            return replace(spec, questions=change(questions), source=source)
        case SearchEnvironment(questions=questions):
            return replace(spec, questions=change(questions))
        case _:
            return spec
