"""Files and other sources of rows, in the forms that people have them in."""

import gzip
import json
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
from chat import attached, chat_trainer
from datasets import Dataset, load_dataset
from pyarrow import parquet
from support import DEAD, LIVE, Rewards, Spy
from teacher import rows

import trl_replay
from trl_replay import ReplayError
from trl_replay.testing import make_trainer

ROWS = rows(note="né", group=0)


def in_lines(made):
    return "".join(f"{json.dumps(row)}\n" for row in made).encode()


def written_out(made):
    """Texts that are no numbers."""
    return pd.DataFrame([{**row, "completion": f"{row['completion']}!"} for row in made])


WRITERS = {
    "rows.jsonl": lambda path, made: path.write_bytes(in_lines(made)),
    "rows.json": lambda path, made: path.write_text(json.dumps(made, indent=1)),
    "lines.json": lambda path, made: path.write_bytes(in_lines(made)),
    "rows.jsonl.gz": lambda path, made: path.write_bytes(gzip.compress(in_lines(made))),
    "rows.csv": lambda path, made: written_out(made).to_csv(path, index=False),
    "rows.csv.gz": lambda path, made: written_out(made).to_csv(path, index=False),
    "rows.parquet": lambda path, made: pd.DataFrame(made).to_parquet(path),
}
TABLES = [Dataset.from_list, iter]


@pytest.fixture
def session(tmp_path):
    return attached(make_trainer(tmp_path, Rewards([DEAD] * 3), max_steps=2, trainer_class=Spy))


def check_one_group(session):
    (serial,) = session.buffer
    entry = session.entry(serial)
    assert (entry.prompts[0], [text[0] for text in entry.completions]) == ("1=", ["2", "3", "4", "5"])
    assert entry.rewards == {"scripted": LIVE}


@pytest.mark.parametrize("name", WRITERS)
def test_174_a_file_of_any_usual_kind_fills_the_buffer(session, tmp_path, name):
    WRITERS[name](tmp_path / name, ROWS)
    assert session.add(tmp_path / name) == 1
    check_one_group(session)


@pytest.mark.parametrize("name", ["runs/lr[1e-6]/g.jsonl", "a*.jsonl", "x::y.jsonl", "what?.json", "{a,b}.jsonl"])
def test_a_files_path_is_a_path_and_never_a_pattern(session, tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(in_lines(ROWS))
    (tmp_path / "a1.jsonl").write_bytes(in_lines(rows(note="another", group=1)))
    assert session.add(path) == 1
    check_one_group(session)


def test_a_file_with_more_groups_than_the_buffer_has_room_for_says_how_many_are_left(tmp_path):
    trainer = make_trainer(tmp_path, Rewards([DEAD] * 3), max_steps=2)
    session = trl_replay.attach(trainer, replay_buffer_size=3)
    made = [{**row, "group": group} for group in range(5) for row in rows()]
    with pytest.warns(UserWarning, match=r"has 5 groups, and 3 of them are in the buffer: raise replay_buffer_size=3"):
        assert session.add(made) == 3


@pytest.mark.parametrize("made", TABLES, ids=["datasets", "a generator"])
def test_174_datasets_and_mappings_are_rows(session, made):
    assert session.add(made([*ROWS, {**ROWS[0], "group": 1, "advantage": 1.0}])) == 1
    check_one_group(session)


def test_174_a_table_of_pandas_is_refused_with_the_remedy(session):
    with pytest.raises(ReplayError, match=r"'prompt', not a mapping: .* datasets\.Dataset\.from_pandas\(table\)"):
        session.add(pd.DataFrame(ROWS))


@pytest.mark.parametrize("named", ["a list", "a folder", "the name that was exported to"])
def test_174_groups_of_several_files_are_told_apart(tmp_path, named):
    """Numbers of groups begin at 0 in each, also where both have groups of one prompt."""
    folder = tmp_path / "out"
    folder.mkdir()
    files = [folder / f"out-0000{number}-of-00002.parquet" for number in range(2)]
    for number, file in enumerate(files):
        made = [
            {
                **row,
                "group": group,
                "prompt": f"{number}=" if group else "1=",
                "advantage": (1 + group) * row["reward"],
            }
            for group in range(2)
            for row in rows()
        ]
        pd.DataFrame(made).to_parquet(file)
    (folder / "notes.txt").write_text("not a file of rows")
    source = {"a list": list(map(str, files)), "a folder": folder}
    trainer = make_trainer(tmp_path, Rewards([DEAD] * 3), max_steps=1)
    session = trl_replay.attach(trainer, replay_warm_start=source.get(named, folder / "out.parquet"))
    trainer.train()
    assert [session.entry(serial).prompts[0] for serial in session.buffer] == ["1=", "0=", "1=", "1="]
    assert session.buffer.table.row_advantage[:, 0].tolist() == [1, 2, 1, 2], "whole groups keep theirs"


LISTS = [{"prompt": "1=", "completions": list("2345"), "rewards": LIVE, "is_truncated": [False] * 4}]
FOREIGN = [{"question": "1=", "answer": row["completion"], "score": row["reward"]} for row in ROWS]


def test_174_rows_of_lists_and_columns_of_other_names_are_refused_and_converted_by_datasets(session):
    with pytest.raises(ReplayError, match=r"^Row 0 .* lacks completion: it has prompt, completions, .* docs/files"):
        session.add(LISTS)
    frame = pd.DataFrame(LISTS).explode(["completions", "rewards", "is_truncated"], ignore_index=True)
    names = {"completions": "completion", "rewards": "reward"}
    assert session.add(Dataset.from_pandas(frame).rename_columns(names)) == 1
    with pytest.raises(ReplayError, match=r"^Row 0 .* lacks prompt: it has question, answer, score\."):
        session.add(FOREIGN)
    names = {"question": "prompt", "answer": "completion", "score": "reward"}
    assert session.add(Dataset.from_list(FOREIGN).rename_columns(names)) == 1
    assert session.entry(0).rewards == session.entry(1).rewards == {"scripted": LIVE}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nothing/*.parquet", "nor a folder of such"),
        ("rows.txt", r"give a \.parquet, \.jsonl, .*, not rows\.txt"),
        (["rows.txt", "none.csv"], "not rows.txt"),
        ({"train": []}, "give a path, a Dataset, or rows"),
    ],
)
def test_174_what_holds_no_rows_is_named(session, tmp_path, source, words, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.txt").write_text("1=")
    with pytest.raises(ReplayError, match=f"can't be read: .*{words}"):
        session.add(source)


@pytest.mark.parametrize("name", ["missing.parquet", "missing.jsonl", "rows.csv"])
def test_a_file_that_cannot_be_read_is_named(session, tmp_path, name):
    with pytest.raises(ReplayError, match=f"{name} can't be read"):
        session.add(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text", "remedy"),
    [("empty.jsonl", "", "with a row or more"), ("broken.jsonl", '{"prompt": ', r"load_dataset\('json'")],
)
def test_an_error_of_a_file_says_what_to_give(session, tmp_path, name, text, remedy):
    (tmp_path / name).write_text(text)
    with pytest.raises(ReplayError, match=f"{name}.*{remedy}"):
        session.add(tmp_path / name)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_73_and_174_a_file_that_has_a_column_twice_is_named(session, tmp_path, name):
    path, names = tmp_path / name, ["prompt", "completion", "reward", "reward"]
    if name == "rows.jsonl":
        path.write_text('{"prompt": "1=", "completion": "1", "reward": 0, "reward": 1}\n')
    else:
        parquet.write_table(pa.table([["1="], ["1"], [0.0], [1.0]], names=names), path)
    with pytest.raises(ReplayError, match=f"{name} can't be read: .*reward"):
        session.add(path)


# the tables of completions that TRL logs


def graded(completions, **_):
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [float(len(set(text))) for text in texts]


def logged_run(folder, make, **settings):
    """A run that logs its completions, each batch twice, and where."""
    trainer = make(folder, log_completions=True, max_steps=4, steps_per_generation=2,
                   per_device_train_batch_size=6, **settings)  # fmt: skip
    trainer.reward_funcs, trainer.reward_func_names = [graded], ["graded"]
    trainer.train()
    return trainer, folder / "completions"


def of_texts(folder, **settings):
    return make_trainer(folder, graded, trainer_class=Spy, **settings)


@pytest.mark.parametrize("make", [of_texts, chat_trainer], ids=["texts", "messages"])
def test_174_what_trl_logged_is_a_warm_start_once_its_columns_are_named(tmp_path, make):
    trainer, folder = logged_run(tmp_path / "first", make)
    files = sorted(map(str, folder.iterdir()))
    assert len(files) == 4
    again = make(tmp_path / "second", max_steps=1, per_device_train_batch_size=12)
    again.reward_funcs, again.reward_func_names = [graded], ["graded"]
    session = attached(again, replay_scorer=lambda groups, context: 1.0 + groups.reward_std)
    with pytest.raises(ReplayError, match=r"lacks rewards .*rename_columns\(\{'graded': 'reward/graded'\}\)"):
        session.add(files)
    for file in files[::2]:  # every batch was logged twice
        table = load_dataset("parquet", data_files=file, split="train", cache_dir=str(tmp_path))
        table = table.rename_columns({"graded": "reward/graded"})
        assert session.add(table) == 3, session.totals.reasons
    made = [session.entry(serial) for serial in session.buffer]
    advantages = [value for entry in made for value in entry.advantages]
    trained = [value for batch in trainer.scored for value in batch["advantages"].tolist()]
    assert sorted(advantages) == pytest.approx(sorted(trained), abs=1e-5)
    assert all(list(entry.rewards) == ["graded"] for entry in made)


def test_180_prompts_that_lost_their_special_tokens_are_refused(tmp_path):
    """As verl writes them, and TRL before 1.15."""
    session = attached(chat_trainer(tmp_path))
    rows = [{**row, "prompt": "user 1=\nassistant: "} for row in ROWS]
    with pytest.warns(UserWarning, match="its prompt is text, and the dataset's are messages"):
        assert session.add([{**row, "prompt": row["prompt"] + "x"} for row in rows]) == 0
