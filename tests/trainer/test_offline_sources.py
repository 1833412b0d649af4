"""Files and other sources of rows, in the forms that people have them in."""

import gzip
import json
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
from chat import QUESTION, attached, chat_trainer, stored
from datasets import Dataset, load_dataset
from pyarrow import parquet
from support import DEAD, LIVE, Rewards, Spy
from teacher import IDS, rows, rows_of

import trl_replay
from trl_replay import ConfigurationError, ReplayError
from trl_replay.testing import make_trainer

ROWS = rows(note="né", group=0)


def in_lines(made):
    return "".join(f"{json.dumps(row)}\n" for row in made).encode()


WRITERS = {
    "rows.jsonl": lambda path, made: path.write_bytes(in_lines(made)),
    "rows.json": lambda path, made: path.write_text(json.dumps(made, indent=1)),
    "lines.json": lambda path, made: path.write_bytes(in_lines(made)),
    "rows.jsonl.gz": lambda path, made: path.write_bytes(gzip.compress(in_lines(made))),
    "rows.csv": lambda path, made: pd.DataFrame(made).to_csv(path, index=False),
    "rows.csv.gz": lambda path, made: pd.DataFrame(made).to_csv(path, index=False),
    "rows.parquet": lambda path, made: pd.DataFrame(made).to_parquet(path),
}
TABLES = [pd.DataFrame, Dataset.from_list, pa.Table.from_pylist, iter]


@pytest.fixture
def session(tmp_path):
    return attached(make_trainer(tmp_path, Rewards([DEAD] * 3), max_steps=2, trainer_class=Spy))


def check_one_group(session):
    (serial,) = session.buffer
    entry = session.entry(serial)
    assert (entry.prompts[0], entry.completions) == ("1=", ["2", "3", "4", "5"])
    assert entry.rewards == {"reward": LIVE}


@pytest.mark.parametrize("name", WRITERS)
def test_174_a_file_of_any_usual_kind_fills_the_buffer(session, tmp_path, name):
    WRITERS[name](tmp_path / name, ROWS)
    assert session.add(tmp_path / name) == 1
    check_one_group(session)


@pytest.mark.parametrize("made", TABLES, ids=["pandas", "datasets", "pyarrow", "a generator"])
def test_174_tables_and_datasets_are_rows(session, made):
    assert session.add(made([*ROWS, {**ROWS[0], "group": 1, "advantage": 1.0}])) == 1
    check_one_group(session)


def test_174_numbers_that_are_texts_stay_so_in_csv_and_lists_are_read(session, tmp_path):
    made = rows_of("1=", ["007", "null", "1e5", ""], [1, 0, 0, 0.5])
    pd.DataFrame([{**row, "masked": number == 3} for number, row in enumerate(made)]).to_csv(tmp_path / "rows.csv")
    assert session.add(tmp_path / "rows.csv") == 1
    entry = session.entry(0)
    assert entry.completions == ["007", "null", "1e5", ""]
    assert (entry.rewards["reward"], entry.masked) == ([1, 0, 0, 0.5], [False] * 3 + [True])
    pd.DataFrame(rows(**IDS)).to_csv(tmp_path / "ids.csv", index=False)
    assert session.add(tmp_path / "ids.csv") == 1
    assert session.buffer.load(1).tensors["old_per_token_logps"].tolist() == [-1.0, -2.0] * 4


@pytest.mark.parametrize("named", ["a list", "a folder", "a pattern", "the name that was exported to"])
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
    source = {"a list": list(map(str, files)), "a folder": folder, "a pattern": str(folder / "*.parquet")}
    trainer = make_trainer(tmp_path, Rewards([DEAD] * 3), max_steps=1)
    session = trl_replay.attach(trainer, replay_warm_start=source.get(named, folder / "out.parquet"))
    trainer.train()
    assert [session.entry(serial).prompts[0] for serial in session.buffer] == ["1=", "0=", "1=", "1="]
    assert session.buffer.table.row_advantage[:, 0].tolist() == [1, 2, 1, 2], "whole groups keep theirs"


def test_174_a_prompt_with_all_its_completions_in_lists(session):
    row = {"prompt": "1=", "completions": list("2345"), "rewards": LIVE, "masked": [False, False, False, True]}
    other = {"prompt": "1=", "completions": list("6789"), "reward/scripted": LIVE, "note": [1]}
    assert session.add([row, other]) == 2
    assert [session.entry(serial).completions for serial in session.buffer] == [list("2345"), list("6789")]
    assert session.entry(0).masked == row["masked"]
    with pytest.raises(ReplayError, match=r"Row 1 of .* has 3 values of rewards for 4 completions"):
        session.add([row, {**row, "rewards": [1, 0, 0]}])


COLUMNS = {"question": "prompt", "answer": "completion", "score": "reward/scripted"}
FOREIGN = [{"question": "1=", "answer": row["completion"], "score": row["reward"]} for row in ROWS]


def test_174_columns_of_other_names_are_named(session):
    assert session.add(FOREIGN, columns=COLUMNS) == 1
    assert session.entry(0).rewards == {"scripted": LIVE}


def test_174_missing_columns_are_told_with_the_remedy(session):
    words = r"Row 0 .* lacks prompt, completion: it has question, answer, score\. .*columns=\{'its name': 'prompt'\}"
    with pytest.raises(ReplayError, match=words):
        session.add(FOREIGN)
    with pytest.raises(ReplayError, match=r"Row 0 of the rows given lacks points, which .*columns=.* names"):
        session.add(FOREIGN, columns={"points": "reward"})
    with pytest.raises(ReplayError, match=r"Row 0 .* 'completion' twice"):
        session.add(ROWS, columns={"prompt": "completion"})
    with pytest.raises(ConfigurationError, match=r"columns=\['question'\] can't be used: .*\{'question': 'prompt'\}"):
        session.add(FOREIGN, columns=["question"])


@pytest.mark.parametrize("name", ["prompt", "completion"])
@pytest.mark.parametrize("write", [json.dumps, str])
def test_174_messages_that_were_written_as_text_are_named(session, name, write):
    text = write([{"role": "user", "content": "1="}])
    with pytest.raises(ReplayError, match=f"Row 0 of .* has {name}=.* is messages written as text"):
        session.add([{**row, name: text} for row in ROWS])


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nothing/*.parquet", "nor a folder or a pattern"),
        ("rows.txt", r"give a \.parquet, \.jsonl, .*, not rows\.txt"),
        (["rows.txt", "none.csv"], "not rows.txt"),
        ({"train": []}, "give a path, or rows"),
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


NAMES = ["prompt", "completion", "reward", "reward"]
TWICE = {
    "pandas": lambda path: pd.DataFrame([["1=", "1", 0.0, 1.0]], columns=NAMES),
    "rows.csv": lambda path: path.write_text(f"{','.join(NAMES)}\n1=,1,0,1\n"),
    "rows.jsonl": lambda path: path.write_text('{"prompt": "1=", "completion": "1", "reward": 0, "reward": 1}\n'),
    "rows.parquet": lambda path: parquet.write_table(pa.table([["1="], ["1"], [0.0], [1.0]], names=NAMES), path),
}


@pytest.mark.parametrize("kind", TWICE)
def test_73_and_174_a_column_that_a_table_or_a_file_has_twice_is_named(session, tmp_path, kind):
    made, name = TWICE[kind](tmp_path / kind), "" if kind == "pandas" else kind
    with pytest.raises(ReplayError, match=f"{name} can't be read: .*'reward' twice"):
        session.add(made if kind == "pandas" else tmp_path / kind)


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
def test_174_what_trl_logged_is_a_warm_start(tmp_path, make):
    trainer, folder = logged_run(tmp_path / "first", make)
    assert len(list(folder.iterdir())) == 4
    again = make(tmp_path / "second", max_steps=1, per_device_train_batch_size=12)
    again.reward_funcs, again.reward_func_names = [graded], ["graded"]
    session = attached(again, replay_scorer=lambda groups, context: 1.0 + groups.reward_std)
    assert session.add(folder) == 6, f"of two batches: {session.totals.reasons}"
    made = [session.entry(serial) for serial in session.buffer]
    advantages = [value for entry in made for value in entry.advantages]
    trained = [value for batch in trainer.scored for value in batch["advantages"].tolist()]
    assert sorted(advantages) == pytest.approx(sorted(trained), abs=1e-5)
    assert all(list(entry.rewards) == ["graded"] for entry in made)


def test_174_texts_that_trl_logged_without_special_tokens_get_the_datasets_prompts(tmp_path):
    """As all releases before 1.15 log messages."""
    session = attached(chat_trainer(tmp_path))
    table = [
        {"step": 1, "prompt": prompt, "completion": row["completion"], "scripted": row["reward"], "advantage": -1.0}
        for prompt in ("user 1=\nassistant ", "user 2=\nassistant ")
        for row in ROWS
    ]
    table[0]["advantage"] = 3.0
    assert session.add(table) == 1
    assert session.buffer.table.row_advantage.tolist() == [[3.0, -1.0, -1.0, -1.0]]
    assert stored(session, key="prompt_ids") == ["<bos><turn>user 1=<end>\n<turn>assistant "]
    reason = "a row was refused: TRL logged its prompt without special tokens, and none of the dataset is logged so"
    assert session.totals.reasons[reason] == 4


VERL = {"input": "prompt", "output": "completion", "score": "reward"}


def of_verl(prompt):
    """What its `rollout_data_dir` holds: texts without special tokens."""
    return [{"input": prompt, "output": row["completion"], "score": row["reward"], "step": 1} for row in ROWS]


@pytest.mark.parametrize("dataset", [QUESTION, "<bos><turn>user 1=<end>\n<turn>assistant "], ids=["messages", "texts"])
def test_180_texts_that_others_logged_without_special_tokens_get_the_datasets_prompts(tmp_path, dataset):
    (tmp_path / "1.jsonl").write_bytes(in_lines(of_verl("user 1=\nassistant ")))
    session = attached(chat_trainer(tmp_path, prompt=dataset))
    assert session.add(tmp_path / "1.jsonl", columns=VERL) == 1
    assert stored(session, key="prompt_ids") == ["<bos><turn>user 1=<end>\n<turn>assistant "]
    assert stored(session) == ["2<end>", "3<end>", "4<end>", "5<end>"]
    with pytest.warns(UserWarning, match="texts without a chat template"):
        session.add(of_verl("user 2=\nassistant "), columns=VERL)


def test_174_files_are_read_as_datasets_reads_them(session, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(in_lines(ROWS))
    dataset = load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), split="train", cache_dir=str(tmp_path))
    assert session.add(dataset) == 1
    check_one_group(session)
