"""The Transformer against a plain reference in float64, its norm, and every attention inside it."""

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from labkit.costs.transformer import (
    SIZES,
    TransformerShape,
    backward_flops,
    forward_flops,
    n_parameters,
)
from labkit.nn.training import TrainingStep, adamw, gradients, random_tokens
from labkit.nn.transformer import RMSNorm, Transformer, language_model_loss

TINY = TransformerShape(d_model=24, d_ff=40, n_layers=3, n_heads=2, vocabulary=50)


@pytest.fixture
def float64_default():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def _model(shape=TINY, *, seed=0, **options):
    torch.manual_seed(seed)
    model = Transformer(shape, context_length=16, **options)
    # gains of one would hide a gain that is not applied
    for name, parameter in model.named_parameters():
        if name.endswith("gain"):
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def _batch(shape=TINY, sequence=12):
    tokens = torch.randint(
        shape.vocabulary, (2, sequence + 1), generator=torch.Generator().manual_seed(1)
    )
    return tokens[:, :-1], tokens[:, 1:]


def _reference_loss(weights, shape, tokens, targets):
    """The same model head by head, on nothing but a dictionary of matrices; positions turn complex
    numbers."""

    def norm(x, name):
        return (
            x / ((x**2).sum(-1, keepdim=True) / x.shape[-1] + 1e-5) ** 0.5 * weights[f"{name}.gain"]
        )

    def times(x, name):
        return x @ weights[f"{name}.weight"].T

    def rotate(x):
        angles = torch.arange(x.shape[1])[:, None] / 10_000 ** (
            torch.arange(0, x.shape[2], 2) / x.shape[2]
        )
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.exp(1j * angles)
        return torch.view_as_real(turned).flatten(-2)

    def attend(x, name):
        parts = [
            times(x, f"{name}.{one}").chunk(shape.n_heads, -1)
            for one in ("queries", "keys", "values")
        ]
        future = torch.full((x.shape[1], x.shape[1]), -math.inf).triu(1)
        heads = []
        for q, k, v in zip(*parts, strict=True):
            scores = rotate(q) @ rotate(k).mT / math.sqrt(shape.head_dim)
            heads.append(torch.softmax(scores + future, -1) @ v)
        return times(torch.cat(heads, -1), f"{name}.output")

    def feed_forward(x, name):
        gate = times(x, f"{name}.gate")
        up = times(x, f"{name}.up")
        return times(gate / (1 + torch.exp(-gate)) * up, f"{name}.down")

    x = weights["embedding.weight"][tokens]
    for i in range(shape.n_layers):
        x = x + attend(norm(x, f"layers.{i}.attention_norm"), f"layers.{i}.attention")
        x = x + feed_forward(norm(x, f"layers.{i}.feed_forward_norm"), f"layers.{i}.feed_forward")
    logits = times(norm(x, "norm"), "output")
    return -torch.log_softmax(logits, -1).gather(-1, targets[..., None]).mean()


@pytest.mark.parametrize("checkpoint_segment", [0, 1, 2, 5])
def test_loss_and_gradients_equal_a_plain_reference(float64_default, checkpoint_segment):
    model = _model(checkpoint_segment=checkpoint_segment)
    tokens, targets = _batch()
    loss = language_model_loss(model(tokens), targets)
    loss.backward()
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = _reference_loss(weights, TINY, tokens, targets)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, weights[name].grad, rtol=0, atol=1e-10, msg=name)
    assert len(gradients(model)) == len(weights)


@pytest.mark.parametrize("name", list(SIZES))
def test_parameters_of_every_named_size_equal_the_closed_formula(name):
    with torch.device("meta"):
        model = Transformer(SIZES[name], context_length=128)
    assert sum(p.numel() for p in model.parameters()) == n_parameters(SIZES[name])


@pytest.mark.parametrize("shape", [SIZES["nano"], TINY])
@pytest.mark.parametrize("sequence", [1, 16])
def test_predicted_flops_equal_torchs_count_exactly(shape, sequence):
    model = _model(shape)
    tokens, targets = _batch(shape, sequence)
    with FlopCounterMode(display=False) as forward:
        loss = language_model_loss(model(tokens), targets)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    assert sum(forward_flops(shape, 2, sequence).values()) == forward.get_total_flops()
    assert sum(backward_flops(shape, 2, sequence).values()) == backward.get_total_flops()


def test_rms_norm_of_float16_does_not_overflow_and_keeps_its_dtype():
    x = torch.full((2, 64), 300.0, dtype=torch.float16)  # 300^2 is beyond float16's 65504
    y = RMSNorm(64).half()(x)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y, torch.ones_like(x))


def _of_tokens(*size, dtype=torch.int64):
    return lambda: _model()(torch.zeros(*size, dtype=dtype))


REFUSED = [
    (_of_tokens(2, 17), "1 to 16 positions"),
    (_of_tokens(2, 0), "1 to 16 positions"),
    (_of_tokens(16), "got \\(16,\\)"),
    (_of_tokens(2, 4, dtype=torch.float32), "expected int64 tokens"),
    (lambda: TransformerShape(d_model=15, d_ff=8, n_layers=1, n_heads=5), "even head dimension"),
    (lambda: TransformerShape(d_model=16, d_ff=8, n_layers=0, n_heads=2), "positive sizes"),
    (lambda: Transformer(TINY, context_length=0), "context_length >= 1"),
    (
        lambda: TrainingStep(TINY, batch=2, context_length=8, precision="int8"),
        "among float32, bfloat16, float16",
    ),
    (lambda: TrainingStep(TINY, batch=0, context_length=8), "batch >= 1"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_does_not_exist_or_fit_together_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_steps_learn_the_batch(precision):
    step = TrainingStep(TINY, batch=2, context_length=8, precision=precision)
    step.optimizer.param_groups[0]["lr"] = 1e-2
    first = float(step.infer())
    for _ in range(20):
        step.run()
    assert float(step.infer()) < first / 2
    assert all(p.dtype == torch.float32 and p.grad is None for p in step.model.parameters())


def test_a_target_is_the_input_that_follows():
    inputs, targets = random_tokens(TINY, 3, 16, generator=torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (3, 16)
    assert torch.equal(targets[:, :-1], inputs[:, 1:])
    assert not torch.equal(targets, inputs)
    assert 0 <= int(inputs.min()) < int(inputs.max()) < TINY.vocabulary


def test_adamw_is_chosen_by_the_device_and_not_by_the_tensors():
    step = TrainingStep(TINY, batch=2, context_length=8)
    assert step.optimizer.defaults["foreach"] is False
    assert adamw(step.model.parameters(), torch.device("cuda")).defaults["foreach"] is True
