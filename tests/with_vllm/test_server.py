"""TRL's server mode: generation over HTTP is vLLM's own, weights cannot be synced.

TRL sends weights to a server over NCCL, which needs CUDA. The two methods that do so are replaced here: the server
samples from the first policy to the end, and TRL's ratio is that of each policy to the first one.
"""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from generating import PROMPTS, Coins, watched
from real_vllm import ENVIRONMENT, Followed, rows_of, tiny_model
from replaying import build, replay
from support import DEAD, HALF, LIVE, Rewards

SCRIPT = ([LIVE, DEAD, HALF], [DEAD, LIVE, DEAD])
OPTIONS = {
    "--host": "127.0.0.1",
    "--dtype": "float32",
    "--max-model-len": "64",
    "--logprobs-mode": "processed_logprobs",
    "--max-logprobs": "-1",
}


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def listens(port):
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Its address, and the folder of its model. `vllm serve` looks for a distribution that is called vllm."""
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    tiny_model(folder / "model")
    options = {**OPTIONS, "--model": str(folder / "model"), "--port": str(port)}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [word for option in options.items() for word in option]
    environment = {**os.environ, **ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"}
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        for _ in range(600):
            assert process.poll() is None, (folder / "log").read_text()[-3000:]
            if listens(port):
                break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}", folder / "model"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def syncs(monkeypatch):
    """In the place of NCCL: the names of the tensors that TRL would have sent, sync by sync."""
    from trl.generation.vllm_client import VLLMClient

    sent = []
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda self, device: None)
    monkeypatch.setattr(
        VLLMClient, "update_named_params", lambda self, about, tensors: sent.append([name for name, _ in tensors])
    )
    return sent


def trainer_of(server, output_dir, rewards, *rows, **settings):
    address, model = server
    served = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": address, "trainer_class": Followed}
    settings = {"learning_rate": 1e-2, "vllm_server_timeout": 60.0, **served, **settings}
    return build(output_dir, rewards, *rows, model=tiny_model(model), **settings)


def test_groups_of_a_server_are_replayed_with_their_ratios(tmp_path, server, syncs):
    """In one mode; the others are in test_ratios.py."""
    trainer = trainer_of(server, tmp_path, Rewards(*SCRIPT), vllm_importance_sampling_mode="token_truncate")
    _, watch = replay(trainer)
    assert len(syncs) == len(watch.steps)
    assert {name for names in syncs for name in names} == {name for name, _ in trainer.model.named_parameters()}
    assert max(trainer.far) < 1e-4, "the server sampled from other weights than its own"
    assert trainer.near[-1] > 1e-2, "the policy hardly changed: the test says little"
    for after in [after for _, after in watch.steps]:
        for row in rows_of(after):
            ratio = (row["old_per_token_logps"] - row["sampling_per_token_logps"]).exp()
            torch.testing.assert_close(row["importance_sampling_ratio"], ratio.clamp(max=3.0))


def test_further_rounds_are_generated_by_the_server_too(tmp_path, server, syncs):
    coins = Coins(0.5)
    trainer = trainer_of(server, tmp_path, coins, [{"prompt": prompt} for prompt in PROMPTS])
    _, session, watch = watched(trainer, coins, 2)
    assert session.totals.counters["refilled"] > 0
    assert len(syncs) == len(watch.steps) < len(trainer.far)
