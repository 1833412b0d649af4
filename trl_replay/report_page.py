"""`trl-replay report`: a run's log and buffer as one HTML page that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from . import saved
from .charts import Line, histogram, line_chart
from .errors import ReplayError
from .inspecting import facts, inspect
from .whole import TRAINER_STATE, last_whole_checkpoint

GREY, BLUE, RED, GREEN = "#8a8f98", "#0b6bcb", "#c7452b", "#2a8a4a"
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1c2127;background:#f6f7f9;margin:0}
main{max-width:1120px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;margin:0 0 2px} h2{font-size:17px;margin:0 0 2px} .path{color:#6a717b;margin:0 0 18px}
.lead{background:#fff;border-left:5px solid #0b6bcb;padding:14px 18px;margin:0 0 20px;font-size:17px}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(430px,1fr));gap:16px}
section{background:#fff;border-radius:8px;padding:16px 18px;box-shadow:0 1px 2px #0001}
section>p{color:#4c535d;margin:0 0 8px} svg{width:100%;height:auto;display:block}
svg text{font:12px system-ui,sans-serif;fill:#5b626c} svg .axis{fill:#8a8f98} .grid{stroke:#e6e8ec}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;margin:2px 0 4px!important;font-size:13px}
.legend i{display:inline-block;width:14px;height:4px;border-radius:2px;margin-right:6px;vertical-align:middle}
.none{color:#8a8f98!important;padding:24px 0} h1+*{margin-top:0} .wide{margin-top:16px}
table{border-collapse:collapse;width:100%;font-size:14px} td,th{padding:5px 8px;text-align:left;vertical-align:top}
th{color:#6a717b;font-weight:600} tr+tr td{border-top:1px solid #eceef1} code{font:13px ui-monospace,monospace;
white-space:pre-wrap;overflow-wrap:anywhere} .good{color:#2a8a4a} .bad{color:#c7452b} .num{white-space:nowrap}
"""


def write_report(run: str | Path, out: str | Path | None = None) -> Path:
    """Writes the page and returns its path.

    Args:
        run (`str` or `Path`): The trainer's `output_dir`, or one of its checkpoints.
        out (`str` or `Path`, *optional*): `report.html` in `run` if not given.

    Raises:
        ReplayError: There is no log of a run.
    """
    run = Path(run)
    newest = last_whole_checkpoint(run)
    folder = run if (run / TRAINER_STATE).is_file() else Path(newest) if newest else None
    if folder is None:
        raise ReplayError(f"{run} holds neither {TRAINER_STATE} nor a whole checkpoint: there is no log to report.")
    history = json.loads((folder / TRAINER_STATE).read_text())["log_history"]
    checkpoint = folder if (folder / saved.FOLDER).is_dir() else Path(newest) if newest else folder
    buffer = inspect(checkpoint) if (checkpoint / saved.FOLDER).is_dir() else None
    path = Path(out) if out is not None else run / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(run.resolve().name, history, buffer))
    return path


def page(name: str, history: Sequence[Mapping[str, Any]], buffer: Mapping[str, Any] | None) -> str:
    """The page of a trainer's `log_history`, and of what `inspect` found."""
    log = [entry for entry in history if "frac_reward_zero_std" in entry and entry.get("step") is not None]
    replayed = any("replay/size" in entry for entry in log)
    sections = [_dead(log, replayed), _reward(log, replayed)]
    if replayed:
        sections += [_share(log), _ratios(log)]
    body = [f'<div class="grid2">{"".join(sections)}</div>']
    if buffer is not None:
        body += [_buffer(buffer), _entries(buffer)]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(name)}: replay</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body><main>'
        f"<h1>What replay {'did' if replayed else 'could do'}</h1>"
        f'<p class="path">{escape(name)}, {len(log)} logged steps</p>'
        f'<p class="lead">{_lead(log, replayed)}</p>{"".join(body)}</main></body></html>\n'
    )


def _points(log: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    return [(entry["step"], entry[key]) for entry in log if isinstance(entry.get(key), int | float)]


def _mean(log: Sequence[Mapping[str, Any]], key: str) -> float:
    values = [value for _, value in _points(log, key)]
    return float(np.mean(values)) if values else 0.0


def _lead(log: Sequence[Mapping[str, Any]], replayed: bool) -> str:
    if not log:
        return "The log of this run holds no step of GRPO."
    if not replayed:
        dead = _mean(log, "frac_reward_zero_std")
        return (
            f"This run used no replay. <b>{dead:.0%}</b> of its groups were dead: all completions got the same "
            "reward, so that they were generated at full price and trained on for nothing. That is the share of the "
            "training signal that replay could fill with groups worth learning from."
        )
    before, after = _mean(log, "replay/dead_fraction"), _mean(log, "replay/dead_fraction_after")
    return (
        f"<b>{before:.0%}</b> of the generated groups were dead: all completions got the same reward, and there was "
        f"nothing to learn from them. Replay put stored groups in the place of <b>{_mean(log, _REPLACED):.0%}</b> of "
        f"all groups, so that <b>{after:.0%}</b> of those trained on were dead."
    )


_REPLACED = "replay/replaced_fraction"


def _section(title: str, text: str, chart: str, wide: bool = False) -> str:
    return f'<section class="{"wide" if wide else ""}"><h2>{title}</h2><p>{text}</p>{chart}</section>'


def _dead(log: Sequence[Mapping[str, Any]], replayed: bool) -> str:
    key = "replay/dead_fraction" if replayed else "frac_reward_zero_std"
    lines = [Line("generated", GREY, _points(log, key))]
    if replayed:
        lines.append(Line("trained on", BLUE, _points(log, "replay/dead_fraction_after")))
    text = "Share of groups whose completions all got the same reward: they teach nothing."
    return _section("Dead groups", text, line_chart(lines, "step", percent=True))


def _reward(log: Sequence[Mapping[str, Any]], replayed: bool) -> str:
    lines = [Line("mean reward of what was generated", GREEN, _points(log, "reward"))]
    text = "Replayed completions do not count here." if replayed else "Over the steps of training."
    return _section("Reward", text, line_chart(lines, "step", low=0.0))


def _share(log: Sequence[Mapping[str, Any]]) -> str:
    lines = [Line("replayed groups", BLUE, _points(log, _REPLACED))]
    return _section("Replayed share", "Of the groups trained on.", line_chart(lines, "step", percent=True))


def _ratios(log: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        Line("mean importance ratio", RED, _points(log, "replay/ratio_mean")),
        Line("effective sample size, share of tokens", GREEN, _points(log, "replay/ess")),
    ]
    text = "Replayed tokens against the policy that wrote them: near 1 both, they are as good as fresh."
    return _section("How far the policy has moved", text, line_chart(lines, "step", low=0.0))


def _buffer(buffer: Mapping[str, Any]) -> str:
    columns = buffer["columns"]
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts(buffer))
    charts = [
        _section(
            "Ages", "Updates since each group was generated.", histogram(columns["age"], "age", GREY, whole=True)
        ),
        _section("Uses", "How often each group was replayed.", histogram(columns["uses"], "uses", BLUE, whole=True)),
        _section("Scores", "What the scorer thinks of them.", histogram(columns["score"], "score", GREEN)),
        _section("Mean rewards", "Of each group.", histogram(columns["pass_rate"], "mean reward", RED)),
    ]
    return (
        f'<section class="wide"><h2>In the buffer now</h2><table>{rows}</table></section>'
        f'<div class="grid2 wide">{"".join(charts)}</div>'
    )


def _entries(buffer: Mapping[str, Any]) -> str:
    parts = []
    for name, title in (("top", "Highest scores"), ("bottom", "Lowest scores")):
        rows = "".join(_entry(entry) for entry in buffer[name])
        if rows:
            head = (
                "<tr><th>prompt</th><th>score</th><th>age</th><th>uses</th><th>completions, advantage first</th></tr>"
            )
            parts.append(f'<section class="wide"><h2>{title}</h2><table>{head}{rows}</table></section>')
    return "".join(parts)


def _entry(entry: Mapping[str, Any]) -> str:
    completions = "<br>".join(
        f'<span class="num {"good" if row["advantage"] > 0 else "bad"}">{row["advantage"]:+.2f}</span> '
        f"<code>{escape(row['text'])}</code>"
        for row in entry["completions"]
    )
    numbers = "".join(
        f'<td class="num">{value}</td>' for value in (f"{entry['score']:.4g}", entry["age"], entry["uses"])
    )
    return f"<tr><td><code>{escape(entry['prompt'])}</code></td>{numbers}<td>{completions}</td></tr>"
