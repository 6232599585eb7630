"""All claims of the original, judged: results in, `claims.json` out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from experiments.paper.claim import Claim
from experiments.paper.claims_pace import end_to_end, idle, scaling, throughput, utilisation
from experiments.paper.claims_parts import no_asynchrony, no_multi_lora
from experiments.paper.claims_tenants import asymmetry, first_step, memory, serialised, step_latency
from experiments.paper.results import Results

CLAIMS: tuple[Callable[[Results], Claim], ...] = (
    throughput,
    utilisation,
    idle,
    end_to_end,
    scaling,
    no_asynchrony,
    no_multi_lora,
    first_step,
    step_latency,
    asymmetry,
    serialised,
    memory,
)


def all_claims(results: Results) -> list[Claim]:
    """Every claim of the original, judged."""
    return [claim(results) for claim in CLAIMS]


def write_claims(results: Results, path: Path) -> list[Claim]:
    """Judge all claims and write them as JSON."""
    claims = all_claims(results)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(claims), indent=2) + b"\n")
    return claims
