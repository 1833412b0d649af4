"""One copy to the device: what arrives is what was sent."""

import torch
import waits

from trl_replay.base.progress import send

SENT = {
    "whole": torch.arange(7),
    "bytes": torch.tensor([[1, 0, 1]], dtype=torch.int8),
    "half": torch.tensor([[0.5], [-2.0], [float("nan")]], dtype=torch.bfloat16),
    "none": torch.empty(0, 3),
    "strided": torch.arange(6.0).view(2, 3).t(),
    "one": torch.tensor(3.0, dtype=torch.float64),
    "flags": torch.tensor([True, False, True]),
}


def test_tensors_of_all_kinds_arrive_in_one_copy_that_nobody_waits_for(monkeypatch):
    waits.Device().install(monkeypatch.setattr)
    waits.OURS.clear()
    with waits.Watched():
        arrived = send(SENT, waits.CUDA)
    assert waits.ours(waits.PINNED) == 1
    assert waits.ours(waits.UP) == waits.ours(waits.WAIT) == 0
    assert list(arrived) == list(SENT)
    for key, tensor in arrived.items():
        assert isinstance(tensor, waits.Marked)
        plain = tensor.as_subclass(torch.Tensor)
        assert (plain.dtype, plain.shape) == (SENT[key].dtype, SENT[key].shape)
        assert (
            torch.equal(plain.nan_to_num(9), SENT[key].nan_to_num(9))
            if plain.is_floating_point()
            else torch.equal(plain, SENT[key])
        )


def test_on_the_cpu_nothing_is_copied():
    assert send({0: SENT["whole"]}, torch.device("cpu"))[0] is SENT["whole"]
