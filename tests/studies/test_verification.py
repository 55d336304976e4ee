"""`lab.check` compares an own training with one process, and says why it differs."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from labkit.lab.config import ParameterError
from labkit.lab.user_checks import check_alternative
from labkit.nn.attention import naive_attention
from labkit.parallel.context import ring_attention
from labkit.parallel.sharding import FSDP
from labkit.studies import load_lab
from tests.parallel.shared_ranks import on_ranks


class _Averaged(torch.nn.Module):
    """Averages gradients, or only divides them."""

    def __init__(self, model, is_summed):
        super().__init__()
        self.module = model
        self.is_summed = is_summed

    def forward(self, tokens):
        return self.module(tokens)

    def finish_gradient_synchronization(self):
        grads = [parameter.grad for parameter in self.module.parameters()]
        flat = torch.cat([grad.flatten() for grad in grads]) / dist.get_world_size()
        if self.is_summed:
            dist.all_reduce(flat)
        for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(mean.view(grad.shape))


def _local_attention(q, k, v, *, is_causal, **options):
    return naive_attention(q, k, v, is_causal)


def _unsharded(parameters, optimizer, **settings):
    return optimizer(parameters, **settings)


def _other_decay(parameters, optimizer, **settings):
    """Right without weight decay, as in the lab's measured check."""
    return optimizer(parameters, **{**settings, "weight_decay": 0.0})


ALTERNATIVES = {
    "data_parallel": (
        partial(_Averaged, is_summed=True),
        partial(_Averaged, is_summed=False),
        "gradient of embedding.weight",
    ),
    "sharding": (_unsharded, _other_decay, "the update is not"),
    "model_parallel": (FSDP, torch.nn.Sequential, "not averaged"),
    "context_parallel": (ring_attention, _local_attention, "stale"),
}


@on_ranks(2)
@pytest.mark.parametrize("lab", ALTERNATIVES)
def test_an_own_training_is_compared_with_one_process(lab):
    right, wrong, where = ALTERNATIVES[lab]
    verify = load_lab(lab).verify
    assert verify(right)() == (True, "equal")
    is_right, text = verify(wrong)()
    assert not is_right
    assert where in text


def test_a_lab_that_measures_no_alternatives_checks_one(monkeypatch):
    monkeypatch.setattr("labkit.lab.user_checks.RANKS", (2,))
    monkeypatch.setattr("labkit.lab.user_checks.DEADLINE_S", 60.0)
    lab = load_lab("model_parallel")
    assert check_alternative(lab, FSDP).verdict == "right"
    assert check_alternative(lab, torch.nn.Sequential).verdict == "wrong"
    assert check_alternative(lab, _unsharded).verdict == "fails"


@pytest.mark.parametrize("lab", ["model_parallel", "context_parallel"])
def test_only_a_function_is_compared(lab):
    with pytest.raises(ParameterError, match="expected a function"):
        check_alternative(load_lab(lab), 3)
