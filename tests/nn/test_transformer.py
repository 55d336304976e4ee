"""The Transformer against a plain reference in float64, its norm, and every attention inside it."""

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from labkit.costs.transformer import SIZES, TransformerShape, backward_flops, forward_flops, n_parameters
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
    for name, parameter in model.named_parameters():  # gains of one would hide a gain that is not applied
        if name.endswith("gain"):
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def _batch(shape=TINY, sequence=12):
    tokens = torch.randint(shape.vocabulary, (2, sequence + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def _reference_loss(weights, shape, tokens, targets):
    """The same model written out token by token and head by head, on nothing but a dictionary of matrices."""

    def norm(x, gain):
        return x / ((x**2).sum(-1, keepdim=True) / x.shape[-1] + 1e-5) ** 0.5 * gain

    def rotate(row, position):
        pairs = []
        for i in range(len(row) // 2):
            angle = position / 10_000 ** (2 * i / len(row))
            a, b = row[2 * i], row[2 * i + 1]
            pairs += [a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)]
        return torch.stack(pairs)

    def attend(x, prefix):
        q, k, v = (x @ weights[f"{prefix}.{name}.weight"].T for name in ("queries", "keys", "values"))
        size, heads = shape.d_model // shape.n_heads, []
        for head in range(shape.n_heads):
            part = slice(head * size, (head + 1) * size)
            rotated_q = [rotate(row, i) for i, row in enumerate(q[:, part])]
            rotated_k = [rotate(row, i) for i, row in enumerate(k[:, part])]
            rows = []
            for i, query in enumerate(rotated_q):
                scores = torch.stack([query @ key for key in rotated_k[: i + 1]]) / math.sqrt(size)
                weight = torch.exp(scores - scores.max())
                rows.append((weight / weight.sum()) @ v[: i + 1, part])
            heads.append(torch.stack(rows))
        return torch.cat(heads, dim=1) @ weights[f"{prefix}.output.weight"].T

    def feed_forward(x, prefix):
        gate, up = (x @ weights[f"{prefix}.{name}.weight"].T for name in ("gate", "up"))
        return (gate / (1 + torch.exp(-gate)) * up) @ weights[f"{prefix}.down.weight"].T

    losses = []
    for sequence, target_row in zip(tokens, targets, strict=True):
        x = weights["embedding.weight"][sequence]
        for i in range(shape.n_layers):
            x = x + attend(norm(x, weights[f"layers.{i}.attention_norm.gain"]), f"layers.{i}.attention")
            x = x + feed_forward(norm(x, weights[f"layers.{i}.feed_forward_norm.gain"]), f"layers.{i}.feed_forward")
        logits = norm(x, weights["norm.gain"]) @ weights["output.weight"].T
        losses += [-(row[token] - torch.logsumexp(row, 0)) for row, token in zip(logits, target_row, strict=True)]
    return torch.stack(losses).mean()


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
    model, (tokens, targets) = _model(shape), _batch(shape, sequence)
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
    (lambda: TrainingStep(TINY, batch=2, context_length=8, precision="int8"), "among float32, bfloat16, float16"),
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
