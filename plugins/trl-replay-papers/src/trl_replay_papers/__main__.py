"""Make the documentation's page about all methods from their cards: `python -m trl_replay_papers` prints it."""

from __future__ import annotations

import re

from . import METHODS, card, text_of
from .cards import Card

INTRODUCTION = """# Methods of papers, by name

```bash
pip install trl-replay-papers
```

```python
session = trl_replay.attach(trainer, replay_preset="popo")
```

Each method is a preset: settings, and where it needs them strategies and hooks of a plugin of the same name. What you
set yourself keeps your value. Every method has a card: what it does, when to use it, what of the paper is faithful and
what is adapted, with what it composes, what was measured here, and what was read for it. `trl-replay list popo` prints
it, too.

Most papers append replayed rows to a batch. Here they take the places of others, since the shape of the batch is the
trainer's: dead groups first. Their learning rates, losses and clipping are settings of the trainer, which a preset
does not touch; the cards name them. What was measured was measured with tiny models on four small tasks
([the tables](evidence-methods.md#methods-of-papers)): it tells what works and what breaks, not what a large model
gains.
"""


def page() -> str:
    """The page, as Markdown."""
    cards = [card(name) for name in METHODS]
    lines = [INTRODUCTION, "| preset | what it is | replays or changes | measured here |", "|---|---|---|---|"]
    lines += [_row(each) for each in cards]
    lines.append("")
    for name in METHODS:
        deeper = re.sub(r"^#", "##", text_of(name), flags=re.MULTILINE)
        lines.append(deeper)
    return "\n".join(lines).rstrip() + "\n"


def _row(method: Card) -> str:
    measured = method.sections["Measured here"].partition("\n\n")[0].replace("\n", " ")
    title = method.title
    anchor = f"{method.name}-{re.sub(r'[^a-z0-9 _-]', '', title.lower()).replace(' ', '-')}"
    cells = [f"[`{method.name}`](#{anchor})", title, method.level, measured]
    escaped = [cell.replace("|", r"\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


if __name__ == "__main__":
    print(page(), end="")
