"""One rank of a launch: one prompt with several tasks, by scope and layout, resumed, and with environments."""

from functools import partial

from datasets import Dataset
from following import crossed, follow
from methods import INJECTED
from mixing_ranks import Credit
from one_rank import rank
from replaying import build as build_with
from scripted import Script, build, mixed
from support import Spy, weights_hash
from tools import tool_tokenizer

from trl_replay.testing import make_model

LAYOUTS = {"whole": (8, 4), "straddling": (6, 4)}
ROWS = [{"prompt": "1=", "label": label} for label in "abcde"]
REPLAY = {**INJECTED, "replay_buffer_size": 12, "replay_scope": "gathered"}


def shown(trainer, session, followed):
    """The record of a run on this rank."""
    table = session.buffer.table
    return {
        "pairs": len(followed.pairs),
        "crossed": crossed(followed),
        "tasks": table.prompt.tolist(),
        "labels": [followed.born[serial] for serial in table.serial.tolist()],
        "metric": session.metrics["replay/tasks"],
        "weights": weights_hash(trainer),
    }


def trained(folder, layout, born, resume=False, credit=False):
    """Eight updates, or the last four of them; `born` tells the label of every group stored so far."""
    settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, "rank": rank()}
    replay = {**REPLAY}
    if credit:
        settings["trainer_class"] = Credit
        replay["replay_advantages"] = "stored"
    trainer = build(folder, *LAYOUTS[layout], mixed, **settings)
    trainer.train_dataset = Dataset.from_list(ROWS * 32)
    checkpoint = None
    if resume:
        trainer.reward_funcs[0].update = 3  # as if the script had been read so far
        checkpoint = str(folder / "checkpoint-4")
    session, followed = follow(trainer, checkpoint, born, **replay)
    born.update(followed.born)
    return shown(trainer, session, followed)


class Riddle:
    """One riddle a group, wherever its rows lie."""

    resets = 0
    first = 0

    def reset(self, **columns):
        self.secret = (Riddle.first + Riddle.resets % 6) // 4 + 3 * (Riddle.resets // 6 % 2)
        Riddle.resets += 1
        return f" {self.secret}"


def riddled(folder):
    """Environments of groups that straddle the ranks."""
    rows, size = LAYOUTS["straddling"]
    Riddle.first = rank() * rows
    tokenizer = tool_tokenizer()
    script = Script(mixed, rows, size, rank())

    def rewards(completions, **columns):
        script.update += 1
        return script([str(completion) for completion in completions])

    trainer = build_with(
        folder, rewards, (), tokenizer, make_model(tokenizer, max_position_embeddings=256), Spy, max_steps=8,
        per_device_train_batch_size=rows, num_generations=size,
        arguments={"environment_factory": Riddle, "train_dataset": None},
    )  # fmt: skip
    return shown(trainer, *follow(trainer, **REPLAY))


def cases(folder):
    for name, layout in (*((layout, layout) for layout in LAYOUTS), ("credit", "straddling")):
        chosen = partial(trained, folder / name, layout, {}, credit=name == "credit")
        yield name, chosen
        yield f"{name} resumed", partial(chosen, resume=True)
    yield "environments", partial(riddled, folder / "environments")
