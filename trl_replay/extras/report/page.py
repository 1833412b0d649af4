"""`trl-replay report`: a run's log and buffer as one HTML page that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from ...base.files import replacing
from ...base.sizes import counted, format_bytes
from ...checkpoint.save_id import FOLDER
from ...data.counters import DRY_RUN
from ...setup.config import ReplayConfig
from ..advice.logged import (
    DEAD,
    DEAD_EXACT,
    LITTLE_DEAD,
    SCALED_BY_BATCH,
    SUM,
    Log,
    judged_by,
    mean,
    only_counted,
    points,
    steps,
)
from ..advice.outcome import outcome_of
from ..advice.rules import DEAD_AFTER, GENERATIONS, REPLACED, has_replayed, nothing
from .charts import Line, line_chart
from .inspection import SUMMARIZED, SUMMARY, advice_on, inspect
from .log import buffer_in, read_log
from .runs import Measure, Run, evaluations, measure_of

GRAY, BLUE, RED, GREEN = "#868d97", "#2f86d8", "#dd6249", "#3b9d5d"
"""Colors that are seen on a light and on a dark page."""


def write_report(run: str | Path, out: str | Path | None = None, reward: str | None = None) -> Path:
    """Write the page and return its path.

    Args:
        run (`str` or `Path`): The trainer's `output_dir`, one of its checkpoints, or a file of a run's metrics.
        out (`str` or `Path`, *optional*): `report.html` in that folder, or beside that file, if not given.
        reward (`str`, *optional*): The reward function that counts; `replay_reward`, or else the sum, if not given.

    Raises:
        ReplayError: There is no log of a run, it can't be read, or it has no such reward.
    """
    run = Path(run)
    log = read_log(run)
    checkpoint = buffer_in(run)
    buffer = inspect(checkpoint) if (checkpoint / FOLDER).is_dir() else None
    text = page(run.resolve().name, log, buffer, reward)
    folder = run if run.is_dir() else run.parent
    return write_page(text, folder / "report.html" if out is None else Path(out))


def write_page(text: str, path: Path) -> Path:
    """Write a page, and return its path."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8", errors="xmlcharrefreplace")
    return path


def page(name: str, history: Log, buffer: Mapping[str, Any] | None, reward: str | None = None) -> str:
    """The page of a trainer's `log_history`, and of what `inspect` found.

    Both come from files that anybody may have written: what should be a number and is none is left out, and every
    other value is escaped.
    """
    log = steps(history)
    replayed = any("replay/size" in entry for entry in log)
    acted = [entry for entry in log if entry.get(DRY_RUN) != 1]
    told = log if only_counted(log) else acted
    dead = DEAD_EXACT if replayed else DEAD
    settings = {} if buffer is None else buffer["settings"]
    run = Run(name, log, evaluations=evaluations(history), counts=settings.get("replay_reward") or judged_by(log))
    named = reward or run.logs(f"rewards/{run.counts}/mean")
    measure = measure_of([run], reward) if named else Measure(SUM, SUM, given=False)
    charts = _charts_of_log(log, acted, dead, run, measure)
    defaults = ReplayConfig().to_dict()
    size = {} if buffer is None else {GENERATIONS: buffer["num_generations"]}
    about, advice = advice_on(history, {**settings, **size})
    came_to = outcome_of(history, measure.name if measure.given else None)
    changed = {
        name: json.dumps(value) for name, value in settings.items() if name not in defaults or value != defaults[name]
    }
    return render(
        "page.html",
        name=name,
        replayed=replayed,
        steps=len(log),
        last_step=log[-1]["step"] if log else None,
        only_counted=only_counted(log),
        scaled_by_batch=SCALED_BY_BATCH if (mean(log, DEAD) or 0) < LITTLE_DEAD else "",
        means={"dead": mean(log, dead), "replaced": mean(told, REPLACED), "dead_after": mean(told, DEAD_AFTER)},
        charts=charts,
        what=measure.words,
        buffer=buffer,
        summary=SUMMARY,
        columns=SUMMARIZED,
        changed=changed,
        came_to=came_to,
        about=f"By {about}" if advice else f"{nothing(about, came_to, has_replayed(log))}".capitalize(),
        advice=advice,
    )


def render(template: str, **values: Any) -> str:
    """Fill a template of this folder; every value is escaped."""
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    environment.filters |= {
        "bytes": format_bytes,
        "counted": counted,
        "number": "{:.4g}".format,
        "percent": "{:.1%}".format,
    }
    return environment.get_template(template).render(**values)


def _charts_of_log(log: Log, acted: Log, dead: str, run: Run, measure: Measure) -> dict[str, Any]:
    generated = Line("generated", GRAY, points(log, dead))
    trained_on = Line("trained on", BLUE, points(acted, DEAD_AFTER))
    reward = Line("mean of generated completions", GREEN, points(log, measure.key))
    evaluated = Line("mean on evaluation prompts", BLUE, points(run.evaluations, measure.evaluated))
    ratios = Line("mean importance ratio", RED, points(log, "replay/ratio_mean"))
    sizes = Line("effective sample size", GREEN, points(log, "replay/ess"))
    return {
        "dead": line_chart([generated, trained_on], "share of groups", percent=True),
        "reward": line_chart([reward, evaluated], f"mean {measure.words}"),
        "ratios": line_chart([ratios, sizes], "ratio, and share of tokens"),
    }
