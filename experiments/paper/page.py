"""The page of the study: claims, tables and figures in one HTML file, pictures beside it.

Owns the order of the page and the words under each picture; numbers come from `results` and `claims`.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import jinja2
import matplotlib.style as mpl_style
import msgspec
import pandas as pd
from markupsafe import escape
from matplotlib.figure import Figure

from experiments.paper import figures
from experiments.paper.bounds import Alone
from experiments.paper.claim import THROUGHPUT, Claim, mixed_bound
from experiments.paper.results import MARLAAS, SINGLE, SYNC, SYSTEMS, Results, workload_of
from experiments.report import style
from experiments.sweep.axes import NUM_TASKS
from experiments.sweep.work import PROFILE
from experiments.words import figure, percent
from marlaas import __version__
from sim.profile import Profile, Quantity
from sim.profile_files import load_profile

PAGE = "index.html"


class Picture(msgspec.Struct, frozen=True):
    """A figure of the page and what it says."""

    file: str
    title: str
    caption: str
    draw: Callable[[Results], Figure]


PICTURES = (
    Picture(
        "reached.png",
        "Where a gain is reached",
        f"Every cell of the main grid; ✓ marks {THROUGHPUT}× and more. Steps are equal for all tasks, so a"
        " gain in steps per hour is the inverse of that in makespan.",
        figures.reached,
    ),
    Picture(
        "scaling.png",
        "Scaling from 1 to 32 tasks",
        "Aggregate, normalised and makespan side by side, and the gain over single with its bound"
        " (dashed) for that mix. Tasks are in turn GSM8K, AMC12 and search, so the first is the"
        " quickest kind: what falls from 1 to 2 tasks is the mix. Normalised: 1 is a task alone; single's"
        " falls as tasks wait for those before them.",
        figures.scaling,
    ),
    Picture(
        "utilisation.png",
        "Utilisation",
        "Busy: work was in flight. Effective: tokens over what the profile allows at its best batch, the"
        " same peak for every system. To the end of the last task, so tails of slow tasks count as idle.",
        figures.utilisation,
    ),
    Picture(
        "ablation.png",
        "Ablation",
        "Left: a service under way, the sum of all tasks' rates; fast tasks lap slow ones only without a"
        " barrier. Middle: every task's rate over its rate alone, so that slow tasks count as much. Right:"
        " equal steps for all.",
        figures.ablation,
    ),
    Picture(
        "waiting.png",
        "Time to first step, and step latency",
        "All tasks are submitted at once. Step latency is the mean over tasks of the time per step while"
        " served, over that of the same task alone.",
        figures.waiting,
    ),
    Picture(
        "causes.png",
        "Where a step's time goes under marlaas",
        "Mean seconds from one commit of a task to its next. Buffer wait is the price of one lane.",
        figures.causes,
    ),
    Picture(
        "ratio.png",
        "R/T from 1 to 100",
        "GSM8K on Qwen3-14B for every task, training made to take a fixed time. Below the bound lies what"
        " shared replicas and the end of the run cost. Where R/T is small the lane limits everyone, where"
        " it is large the number of tasks does, and no scheduler can change either.",
        figures.ratio,
    ),
    Picture(
        "tornado.png",
        "Sensitivity of the headline",
        "Each assumption at the low and the high end of its interval, all others as documented, two steps a"
        " task. Ends on the same side share a place.",
        figures.tornado,
    ),
    Picture(
        "split.png",
        "Splitting 64 NPUs between rollout and training",
        "Replicas of four NPUs for every model, 32 tasks.",
        figures.split,
    ),
    Picture(
        "limits.png",
        "Adapter loads, slots and KV",
        "32 tasks on Qwen3-14B.",
        figures.limits,
    ),
)


def write_page(results: Results, claims: Sequence[Claim], folder: Path) -> Path:
    """Write the page and its pictures; the page."""
    folder.mkdir(parents=True, exist_ok=True)
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["figure"] = figure
    page = environment.get_template("page.html.j2").render(
        claims=claims,
        headline=headline(results, claims),
        pictures=[_picture(picture, results, folder) for picture in PICTURES],
        grid=_html(grid_table(results)),
        alone=_html(alone_table(results)),
        service=_html(service_table(results)),
        ratio=_html(ratio_table(results)),
        sensitivity=_html(sensitivity_table(results)),
        steady=steadiness(results),
        profiles=[(model, _html(parameter_table(results, model))) for model in results.models],
        sets=parameter_sets(results),
        spell=spell,
        version=__version__,
    )
    (folder / PAGE).write_text(page, encoding="utf-8")
    return folder / PAGE


def headline(results: Results, claims: Sequence[Claim]) -> str:
    """What came out, in a sentence."""
    num = sum(claim.verdict == "reached" for claim in claims)
    open_ones = [claim.name for claim in claims if claim.verdict != "reached"]
    rest = f" Not reached: {', '.join(open_ones)}." if open_ones else ""
    return (
        f"{num} of {len(claims)} claims are reached in simulation with one documented parameter set per model"
        f" ({', '.join(results.models)}) on 64 NPUs.{rest}"
    )


def spell(unit: str, value: float) -> str:
    """A number of a claim or a bound, as its unit wants it."""
    if unit.startswith("share"):
        return percent(value) + unit.removeprefix("share") if unit == "share of makespan" else percent(value)
    if unit.startswith("of "):
        return f"{value:.0f} {unit}"
    if unit.startswith("×"):
        return f"{value:.2f}×"
    return f"{figure(float(value))}{' ' + unit if unit == 'steps/hour' else ''}"


# --- tables ----------------------------------------------------------------------------------------


def grid_table(results: Results) -> pd.DataFrame:
    """With the most tasks: every system and model, aggregate, normalised and makespan side by side."""
    rows = []
    for model in results.models:
        for system in SYSTEMS:
            at = results.at(model, results.largest, system)
            rows.append(
                {
                    "model": model,
                    "system": system,
                    "steps/hour": at["steps_per_hour"],
                    "normalised": at["steps_per_hour_normalised"],
                    "makespan (s)": at["makespan_s"],
                    "gain over single": results.gain(model, results.largest, system, SINGLE),
                    "bound": mixed_bound(results, model, results.largest).value
                    if system == MARLAAS
                    else None,
                    "TTFS mean (s)": at["ttfs_s.mean"],
                    "step latency (s)": at["step_latency_s.mean"],
                    "rollout busy": percent(at["rollout_busy"]),
                    "lane busy": percent(at["train_busy"]),
                    "effective": percent(at["effective"]),
                    "run": str(results.headline_folder(model, system)),
                }
            )
    return pd.DataFrame(rows)


def alone_table(results: Results) -> pd.DataFrame:
    """R, T and R/T of every workload alone."""
    rows = []
    for model in results.models:
        groups: dict[str, list[Alone]] = {}
        for name, task in results.alone(model).items():
            groups.setdefault(workload_of(name), []).append(task)
        for workload, group in groups.items():
            rollout, training = (sum(task[i] for task in group) / len(group) for i in (0, 1))
            rows.append(
                {
                    "model": model,
                    "workload": workload,
                    "R (s)": rollout,
                    "T (s)": training,
                    "R/T": rollout / training,
                    "min(N, 1 + R/T), 32 equal tasks": min(32.0, 1 + rollout / training),
                }
            )
    return pd.DataFrame(rows)


def service_table(results: Results) -> pd.DataFrame:
    """The service under way: aggregate, normalised, and each workload's steps per hour and task."""
    rows = [{"model": model, "system": system, **row} for (model, system), row in results.service.items()]
    table = pd.DataFrame(rows)
    for column in ("busy", "rollout_busy", "train_busy", "effective"):
        table[column] = [percent(value) for value in table[column]]
    table["run"] = [
        str(results.run_folder("sustained", model=model, system=system))
        for model, system in zip(table["model"], table["system"], strict=True)
    ]
    return table


def ratio_table(results: Results) -> pd.DataFrame:
    """Measured R/T, gains and bound."""
    numbers = sorted(int(num) for num in results.ratio[NUM_TASKS].unique())
    tables = [figures.ratio_rows(results, num).assign(tasks=num) for num in numbers]
    table = pd.concat(tables)[["tasks", "ratio", SYNC, MARLAAS, "bound"]]
    table["marlaas / bound"] = [percent(a / b) for a, b in zip(table[MARLAAS], table["bound"], strict=True)]
    return table.rename(columns={"ratio": "R/T alone", SYNC: "gain of sync", MARLAAS: "gain of marlaas"})


def sensitivity_table(results: Results) -> pd.DataFrame:
    """Several claims at every end of every assumption."""
    table = figures.tornado_rows(results)
    shown = table.rename(
        columns={
            "gain": "steps/hour gain",
            "normalised": "normalised, ratio",
            "makespan": "makespan, ratio",
            "effective": "effective, ratio",
            "ttfs": "TTFS lower by",
            "ratio": "R/T alone",
        }
    )
    shown["TTFS lower by"] = [percent(value) for value in table["ttfs"]]
    return shown


def steadiness(results: Results) -> str:
    """What the ends of all intervals do to several claims, in words."""
    table = figures.tornado_rows(results)
    documented, ends = table.iloc[0], table.iloc[1:]
    reach = int((ends["gain"] >= THROUGHPUT).sum())
    far = ends.loc[(ends["gain"] - documented["gain"]).abs().sort_values(ascending=False).index]
    most = list(dict.fromkeys(far["assumption"]))[:3]
    return (
        f"The documented set gives {documented['gain']:.2f}×. Over {len(ends)} ends of"
        f" {ends['assumption'].nunique()} assumptions the gain lies between {ends['gain'].min():.2f}× and"
        f" {ends['gain'].max():.2f}×, and {reach} of them reach {THROUGHPUT}×; it moves most with"
        f" {', '.join(most)}. At the same ends effective utilisation rises {ends['effective'].min():.2f} to"
        f" {ends['effective'].max():.2f} times and the time to first step falls by"
        f" {percent(ends['ttfs'].min())} to {percent(ends['ttfs'].max())}: what serves one claim serves or"
        f" harms the others with it. {int((ends['gain'] > documented['gain']).sum())} ends would have given"
        " a larger gain than the documented values, so those were not chosen for it."
    )


def parameter_sets(results: Results) -> list[str]:
    """For every model, how many different profiles the kept runs of all claims used; one is wanted."""
    found: dict[str, set[str]] = {}
    num_runs = dict.fromkeys(results.models, 0)
    for study in ("scaling", "sustained"):
        for path in sorted((results.out / study / "runs").glob(f"*/{PROFILE}")):
            profile = load_profile(path)
            digest = sha256(msgspec.json.encode(profile, order="sorted")).hexdigest()[:12]
            model = _model_of(profile, results.models)
            found.setdefault(model, set()).add(digest)
            num_runs[model] = num_runs.get(model, 0) + 1
    return [
        f"{model}: {num_runs[model]} kept runs, {len(digests)} parameter set ({', '.join(sorted(digests))})"
        for model, digests in found.items()
    ]


def _model_of(profile: Profile, models: Sequence[str]) -> str:
    return next((model for model in models if profile.name.endswith(model.lower())), profile.name)


def parameter_table(results: Results, model: str) -> pd.DataFrame:
    """Every cost of a model's profile with its source, from the run folder of the headline."""
    folder = results.out / results.headline_folder(model, MARLAAS)
    profile = load_profile(folder / PROFILE)
    rows = []
    for part, costs in (("replica", profile.replica), ("lane", profile.lane)):
        for name in costs.__struct_fields__:
            quantity = getattr(costs, name)
            if isinstance(quantity, Quantity) and (quantity.value or quantity.interval):
                low, high = quantity.interval or (None, None)
                rows.append(
                    {
                        "cost": f"{part}.{name}",
                        "value": quantity.value,
                        "low": low,
                        "high": high,
                        "source": quantity.source,
                        "note": quantity.note,
                    }
                )
    return pd.DataFrame(rows)


# --- pieces ----------------------------------------------------------------------------------------


def _picture(picture: Picture, results: Results, folder: Path) -> dict[str, str]:
    buffer = io.BytesIO()
    with mpl_style.context(style.RC):
        picture.draw(results).savefig(buffer, format="png", dpi=style.DPI)
    (folder / picture.file).write_bytes(buffer.getvalue())
    encoded = base64.b64encode(buffer.getvalue()).decode("ascii")
    return {"file": picture.file, "title": picture.title, "caption": picture.caption, "base64": encoded}


def _html(table: pd.DataFrame) -> str:
    def cell(value: Any) -> str:
        if isinstance(value, str):
            return str(escape(value))
        return figure(None if pd.isna(value) else value if isinstance(value, int) else float(value))

    shown = table.map(cell).astype(str)
    return shown.to_html(index=False, escape=False, border=0)
