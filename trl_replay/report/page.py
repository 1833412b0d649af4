"""`trl-replay report`: a run's log and buffer as one HTML page that needs nothing else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from ..checkpoint.discovery import last_complete_checkpoint
from ..checkpoint.save_id import FOLDER, TRAINER_STATE
from ..config import ReplayConfig
from ..errors import ReplayError
from ..sizes import counted, format_bytes
from .charts import Line, histogram, line_chart
from .inspection import inspect

Log: TypeAlias = Sequence[Mapping[str, Any]]
"""Entries of a trainer's log: metrics by name."""
GRAY = "var(--gray)"
BLUE = "var(--blue)"
RED = "var(--red)"
GREEN = "var(--green)"
STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#1c2127;--soft:#4c535d;--faint:#6a717b;--rule:#e6e8ec;
--gray:#767c86;--blue:#0b6bcb;--red:#c7452b;--green:#2a8a4a}
@media (prefers-color-scheme:dark){:root{--page:#14171b;--card:#1e2329;--ink:#e8eaed;--soft:#b9c0c9;--faint:#98a0aa;
--rule:#343b44;--gray:#a3aab4;--blue:#5aa9f5;--red:#f08a72;--green:#63c583}}
*{box-sizing:border-box} body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);margin:0}
main{max-width:1120px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;margin:0 0 2px} h2{font-size:17px;margin:0 0 2px} .path{color:var(--faint);margin:0 0 18px}
.lead{background:var(--card);border-left:5px solid var(--blue);padding:14px 18px;margin:0 0 20px;font-size:17px}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(430px,100%),1fr));gap:16px}
section{background:var(--card);border-radius:8px;padding:16px 18px;box-shadow:0 1px 2px #0002;min-width:0}
section>p{color:var(--soft);margin:0 0 8px} svg{width:100%;height:auto;display:block}
svg text{font:12px system-ui,sans-serif;fill:var(--soft)} svg .axis{fill:var(--faint)} .grid{stroke:var(--rule)}
polyline{fill:none;stroke-linejoin:round} .mean{stroke-width:2.2} .raw{stroke-width:1;opacity:.28}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;margin:2px 0 4px!important;font-size:13px}
.legend i{display:inline-block;width:14px;height:4px;border-radius:2px;margin-right:6px;vertical-align:middle}
.none{color:var(--faint)!important;padding:24px 0} .wide{margin-top:16px} .scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px} td,th{padding:5px 8px;text-align:left;vertical-align:top}
th{color:var(--faint);font-weight:600} tr+tr td,tr+tr th{border-top:1px solid var(--rule)}
code{font:13px ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere;display:block;max-height:9em;
overflow-y:auto} .answer{display:flex;gap:10px;min-width:12em} .num{white-space:nowrap;
font-variant-numeric:tabular-nums}
.good{color:var(--green)} .bad{color:var(--red)}
@media (max-width:620px){main{padding:18px 10px 40px} section{padding:14px 12px} svg text{font-size:17px}
.lead{font-size:16px;padding:12px 14px} table{font-size:13px} td,th{padding:5px 3px}}
"""
POLICY = "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
"""Should some text come through as markup after all, then a browser runs and loads nothing of it."""
LARGEST = 1e300
LAST_STEP = 2**53
"""Numbers beyond them have no place on an axis."""
WORDS = {
    "age": "age in updates",
    "uses": "times replayed",
    "score": "score",
    "mean_reward": "mean reward",
    "completion_tokens": "tokens",
}
SUMMARY = ("least", "median", "mean", "greatest")
DEAD = "frac_reward_zero_std"
DEAD_BEFORE = "replay/dead_fraction"
DEAD_AFTER = "replay/dead_fraction_after"
REPLACED = "replay/replaced_fraction"
"""Keys of the log: TRL's share of dead groups, and ours."""


def write_report(run: str | Path, out: str | Path | None = None) -> Path:
    """Writes the page and returns its path.

    Args:
        run (`str` or `Path`): The trainer's `output_dir`, or one of its checkpoints.
        out (`str` or `Path`, *optional*): `report.html` in `run` if not given.

    Raises:
        ReplayError: There is no log of a run, or it can't be read.
    """
    run = Path(run)
    newest = last_complete_checkpoint(run)
    if (run / TRAINER_STATE).is_file():
        folder = run
    elif newest is not None:
        folder = Path(newest)
    else:
        raise ReplayError(f"{run} holds neither {TRAINER_STATE} nor a whole checkpoint: there is no log to report.")
    history = _history(folder / TRAINER_STATE)
    buffer = None
    checkpoint = folder if _has_buffer(folder) else Path(newest or folder)
    if _has_buffer(checkpoint):
        buffer = inspect(checkpoint)
    path = run / "report.html" if out is None else Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = page(run.resolve().name, history, buffer)
    path.write_text(text, encoding="utf-8", errors="xmlcharrefreplace")
    return path


def _history(path: Path) -> list[Mapping[str, Any]]:
    """The entries of a trainer's log."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["log_history"]
        return [entry for entry in entries if isinstance(entry, Mapping)]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ReplayError(f"{path} holds no log of a trainer: {type(error).__name__}: {error}") from error


def _has_buffer(checkpoint: Path) -> bool:
    return (checkpoint / FOLDER).is_dir()


def page(name: str, history: Log, buffer: Mapping[str, Any] | None) -> str:
    """The page of a trainer's `log_history`, and of what `inspect` found.

    Both come from files that anybody may have written: what should be a number and is none is left out, and every
    other value is escaped.
    """
    log = [entry for entry in history if DEAD in entry and _is_step(entry.get("step"))]
    replayed = any("replay/size" in entry for entry in log)
    sections = [_dead(log, replayed), _reward(log, replayed)]
    if replayed:
        sections += [_share(log), _ratios(log)]
    body = f'<div class="grid2">{"".join(sections)}</div>'
    if buffer is not None:
        body += _buffer(buffer) + _entries(buffer) + _settings(buffer["settings"])
    did = "did" if replayed else "could do"
    steps = f", up to step {_text(log[-1]['step'])}" if log else ""
    title = _text(name)
    content = (
        f"<h1>What replay {did}</h1>"
        f'<p class="path">{title}, {counted(len(log), "logged step")}{steps}</p>'
        f'<p class="lead">{_lead(log, replayed)}</p>{body}'
    )
    return document(f"{title}: replay", content)


def document(title: str, content: str) -> str:
    """A whole page that needs nothing else; title and content are markup."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{POLICY}<title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>'
        f"<body><main>{content}</main></body></html>\n"
    )


def _points(log: Log, key: str) -> list[tuple[float, float]]:
    """`(step, value)` wherever the log holds a number."""
    points = []
    for entry in log:
        value = entry.get(key)
        if _is_number(value):
            points.append((entry["step"], value))
    return points


def _is_step(value: Any) -> bool:
    return _is_number(value) and abs(value) < LAST_STEP


def _is_number(value: Any) -> TypeGuard[float]:
    """Whether it can be drawn: neither a text nor NaN or infinite."""
    return isinstance(value, int | float) and abs(value) < LARGEST


def _numbers(values: Sequence[Any]) -> list[float]:
    return [value for value in values if _is_number(value)]


def _text(value: object) -> str:
    """Whatever it is, as text of the page."""
    return escape(str(value))


def _mean(log: Log, key: str) -> float:
    values = [value for _, value in _points(log, key)]
    return float(np.mean(values)) if values else 0.0


def _lead(log: Log, replayed: bool) -> str:
    if not log:
        return "The log of this run holds no step of GRPO."
    course = _course(log)
    if not replayed:
        dead = _percent(_mean(log, DEAD))
        return (
            f"This run used no replay. <b>{dead}</b> of its groups were dead: all completions got the same "
            "reward, so that they were generated at full price and trained on for nothing. That is the share of the "
            f"training signal that replay could fill with groups worth learning from.{course}"
        )
    before = _percent(_mean(log, DEAD_BEFORE))
    replaced = _percent(_mean(log, REPLACED))
    after = ""
    if _points(log, DEAD_AFTER):  # it is not with replay_log="brief"
        after = f", so that <b>{_percent(_mean(log, DEAD_AFTER))}</b> of those trained on were dead"
    return (
        f"<b>{before}</b> of the generated groups were dead: all completions got the same reward, right or wrong, and "
        f"there was nothing to learn from them. Replay put stored groups in the place of <b>{replaced}</b> of all "
        f"groups{after}.{course}"
    )


def _course(log: Log) -> str:
    """From where to where the reward went; nothing of a run that is too short to say."""
    tenth = len(log) // 10
    if tenth < 2:
        return ""
    first = _mean(log[:tenth], "reward")
    last = _mean(log[-tenth:], "reward")
    return (
        f" The mean reward of generated completions went from <b>{first:.3g}</b> in the first tenth of the run to "
        f"<b>{last:.3g}</b> in the last."
    )


def _percent(share: float) -> str:
    """Rounded, but never to all or nothing."""
    if share in (0, 1) or 0.005 <= share < 0.995:
        return f"{share:.0%}"
    return f"{share:.2%}"


def _section(title: str, text: str, chart: str) -> str:
    return f"<section><h2>{title}</h2><p>{text}</p>{chart}</section>"


def _dead(log: Log, replayed: bool) -> str:
    key = DEAD_BEFORE if replayed else DEAD
    lines = [Line("generated", GRAY, _points(log, key))]
    if replayed:
        lines.append(Line("trained on", BLUE, _points(log, DEAD_AFTER)))
    text = "Share of groups whose completions all got the same reward: they teach nothing."
    return _section("Dead groups", text, line_chart(lines, "step", "share of groups", percent=True))


def _reward(log: Log, replayed: bool) -> str:
    points = _points(log, "reward")
    line = Line("mean reward of generated completions", GREEN, points)
    text = "What the policy earns."
    if replayed:
        text = "What the policy itself earns; replayed completions do not count."
    return _section("Reward", text, line_chart([line], "step", "mean reward", low=0.0))


def _share(log: Log) -> str:
    line = Line("replayed groups", BLUE, _points(log, REPLACED))
    return _section(
        "Replayed share",
        "Of all groups that were trained on.",
        line_chart([line], "step", "share of groups", percent=True),
    )


def _ratios(log: Log) -> str:
    lines = [
        Line("mean importance ratio", RED, _points(log, "replay/ratio_mean")),
        Line("effective sample size", GREEN, _points(log, "replay/ess")),
    ]
    text = (
        "Replayed tokens under the policy of the step, against the policy that wrote them. Both are 1 where nothing "
        "has changed; the effective sample size is the share of them that still counts."
    )
    return _section(
        "How far the policy has moved", text, line_chart(lines, "step", "ratio, and share of tokens", low=0.0)
    )


def _buffer(buffer: Mapping[str, Any]) -> str:
    size = format_bytes(buffer["bytes"])
    groups = counted(buffer["groups"], "group")
    completions = counted(buffer["num_generations"], "completion")
    updates = counted(buffer["update"], "update")
    waiting = counted(buffer["waiting"], "more group")
    verb = "waits" if buffer["waiting"] == 1 else "wait"
    processes = counted(buffer["processes"], "process", "processes")
    text = (
        f"{groups} of {completions}, {size} of payload, after {updates}; {waiting} {verb} for the next batch. "
        f"Scope “{buffer['scope']}”, {processes}."
    )
    return (
        f'<section class="wide"><h2>In the buffer now</h2><p>{_text(text)}</p>{_summary(buffer)}</section>'
        f'<div class="grid2 wide">{_histograms(buffer["columns"])}</div>'
    )


def _summary(buffer: Mapping[str, Any]) -> str:
    """A table of the columns that have values; nothing if none has."""
    head = "".join(f'<th class="num">{name}</th>' for name in SUMMARY)
    rows = []
    for key, words in WORDS.items():
        numbers = buffer[key]
        if numbers is not None:
            cells = [f"<td class=num>{numbers[name]:.4g}</td>" for name in SUMMARY]
            rows.append(f"<tr><th>{words}</th>{''.join(cells)}</tr>")
    if not rows:
        return ""
    return _table(f"<tr><th></th>{head}</tr>", rows)


def _table(head: str, rows: Sequence[str]) -> str:
    return f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>'


def _histograms(columns: Mapping[str, Any]) -> str:
    ages = _section(
        "Ages",
        "Updates since each group was generated: the older, the more the policy has changed since.",
        histogram(_numbers(columns["age"]), "age in updates", GRAY, whole=True),
    )
    uses = _section(
        "Uses", "How often each group was replayed.", histogram(_numbers(columns["uses"]), "uses", BLUE, whole=True)
    )
    scores = _section(
        "Scores", "What each group is worth to the scorer.", histogram(_numbers(columns["score"]), "score", GREEN)
    )
    rewards = _section(
        "Mean rewards",
        "Of each group's completions: how hard its prompt was when they were generated.",
        histogram(_numbers(columns["mean_reward"]), "mean reward", RED),
    )
    return ages + uses + scores + rewards


def _settings(settings: Mapping[str, Any]) -> str:
    """What the run was set to: first what is not the default, and folded away what is."""
    if not settings:
        return ""  # of a release that did not keep them
    defaults = ReplayConfig().to_dict()
    others = [_setting(name, value) for name, value in settings.items() if value != defaults.get(name)]
    usual = [_setting(name, value) for name, value in settings.items() if value == defaults.get(name)]
    text = "All settings are the defaults."
    if others:
        text = "Those that are not the defaults:"
    changed = _table("", others) if others else ""
    rest = f"<details><summary>{counted(len(usual), 'default')}</summary>{_table('', usual)}</details>"
    return f'<section class="wide"><h2>Settings in force</h2><p>{text}</p>{changed}{rest}</section>'


def _setting(name: str, value: Any) -> str:
    return f"<tr><th>{_text(name)}</th><td><code>{_text(json.dumps(value))}</code></td></tr>"


def _entries(buffer: Mapping[str, Any]) -> str:
    top = _entries_table("Highest scores", buffer["top"])
    return top + _entries_table("Lowest scores", buffer["bottom"])


def _entries_table(title: str, entries: Sequence[Mapping[str, Any]]) -> str:
    if not entries:
        return ""
    head = "<tr><th>prompt</th><th>score</th><th>age</th><th>uses</th><th>completions, best advantage first</th></tr>"
    table = _table(head, [_entry(entry) for entry in entries])
    return f'<section class="wide"><h2>{title}</h2>{table}</section>'


def _entry(entry: Mapping[str, Any]) -> str:
    """A row of the table; equal completions are told once, the best come first."""
    counts = Counter((row["advantage"], row["text"]) for row in entry["completions"])
    best_first = sorted(counts.items(), key=lambda item: -item[0][0])
    completions = [_completion(*answer, count) for answer, count in best_first]
    return (
        f"<tr><td><code>{_text(entry['prompt'])}</code></td>"
        f'<td class="num">{entry["score"]:.4g}</td>'
        f'<td class="num">{_text(entry["age"])}</td>'
        f'<td class="num">{_text(entry["uses"])}</td>'
        f"<td>{''.join(completions)}</td></tr>"
    )


def _completion(advantage: float, text: str, count: int) -> str:
    kind = "good" if advantage > 0 else "bad"
    times = f"<span class=num>× {count}</span>" if count > 1 else ""
    return (
        f'<div class="answer"><span class="num {kind}">{advantage:+.2f}</span><code>{_text(text)}</code>{times}</div>'
    )
