from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from simulmt.errors import ConfigError, VocabularyError
from simulmt.model.ctc import Alignments, CTCConfig, CTCModel, alignment_likelihood, ctc_loss
from simulmt.model.layers import Batch, Loss, at_least_float32
from simulmt.text import BLANK, END

from .helpers import Allocations, assert_same, gradients, pad, parameter_count, randomise, sum_gradients

V = 7
LossOfLogits = Callable[[Tensor, Alignments, float], Loss]
# Plain, repeated, repeated apart, empty; the END symbol is a label like any other.
TARGETS = [[], [END], [6], [6, END], [6, 6], [6, 1, 6], [6, 6, 1], [1, 6, 6], [6, 6, 6], [1, 2, 6, END]]


def make_model(mu: int = 2, vocabulary: int = 13, seed: int = 0) -> CTCModel:
    config = CTCConfig(vocabulary, vocabulary, width=8, inner=16, heads=2, layers=2, mu=mu, dropout=0.0)
    return randomise(CTCModel.build(config), seed)


def random_logits(*shape: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class _Likelihood(torch.autograd.Function):
    """`alignment_likelihood` with its gradient by the log-probabilities: minus the posterior."""

    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, alignments: Alignments) -> Tensor:
        negative, posterior = alignment_likelihood(log_probs, alignments)
        ctx.save_for_backward(posterior)
        return negative

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (posterior,) = ctx.saved_tensors
        return -posterior * gradients[0], None


def loss_from_logits(logits: Tensor, alignments: Alignments, smoothing: float) -> Loss:
    """Return the loss by definition: (1 - eps) * CTC + eps / V * sum of -log p."""
    logits = at_least_float32(logits)
    normaliser = logits.logsumexp(-1)
    columns = alignments.columns[:, None, :].expand(-1, logits.shape[1], -1)
    log_probs = logits.gather(-1, columns) - normaliser[:, :, None]
    negative = _Likelihood.apply(log_probs, alignments)  # type: ignore[no-untyped-call]
    uniform = (normaliser - logits.mean(-1)) * alignments.frame_weights(logits.shape[1], logits)
    total = (1 - smoothing) * negative + smoothing * uniform.sum()
    return Loss.of_aligned(total, negative.detach(), alignments.label_lengths, alignments.alignable)


def fused_from_logits(logits: Tensor, alignments: Alignments, smoothing: float, chunk: int = 3) -> Loss:
    """Return the fused loss with the logits as frames."""
    return ctc_loss(logits, torch.eye(logits.shape[-1], dtype=logits.dtype), alignments, smoothing, chunk)


def collapse(path: Sequence[int]) -> list[int]:
    return [label for label, _ in itertools.groupby(path) if label != BLANK]


def likelihood_by_enumeration(log_probs: Tensor, target: list[int]) -> float:
    """Return the negative log of the total probability of all V ** U frame sequences that collapse to the target."""
    total = 0.0
    for path in itertools.product(range(V), repeat=len(log_probs)):
        if collapse(path) == target:
            total += math.exp(sum(float(log_probs[u, symbol]) for u, symbol in enumerate(path)))
    return -math.log(total) if total else math.inf


def posterior_by_enumeration(log_probs: Tensor, target: list[int]) -> Tensor:
    """Return the probability [U V] that frame u is symbol v, given that the frames collapse to the target."""
    mass = torch.zeros_like(log_probs)
    for path in itertools.product(range(V), repeat=len(log_probs)):
        if collapse(path) == target:
            probability = math.exp(sum(float(log_probs[u, symbol]) for u, symbol in enumerate(path)))
            for u, symbol in enumerate(path):
                mass[u, symbol] += probability
    return mass / mass.sum(-1, keepdim=True)


def is_alignable(target: list[int], frames: int) -> bool:
    return len(target) + sum(a == b for a, b in itertools.pairwise(target)) <= frames


def plain_loss(logits: Tensor, targets: list[list[int]], lengths: Sequence[int], smoothing: float) -> Tensor:
    """Return the loss by a full log-softmax and PyTorch's CTC, per sentence, without unalignable sentences."""
    total = logits.sum() * 0
    for row, target, length in zip(logits, targets, lengths, strict=True):
        if is_alignable(target, length):
            log_probs = row[:length].log_softmax(-1)
            labels = torch.tensor(target, dtype=torch.long)
            negative = F.ctc_loss(
                log_probs, labels, torch.tensor(length), torch.tensor(len(target)), BLANK, reduction="sum"
            )
            total = total + (1 - smoothing) * negative - smoothing / logits.shape[-1] * log_probs.sum()
    return total


@pytest.mark.parametrize("frames", [1, 2, 3, 4])
@pytest.mark.parametrize("loss", [loss_from_logits, fused_from_logits])
def test_likelihood_is_the_sum_over_all_alignments(loss: LossOfLogits, frames: int) -> None:
    logits = random_logits(len(TARGETS), frames + 2, V)  # two frames more, which are padding
    target, lengths = pad(TARGETS)
    alignments = Alignments.of(target, lengths, torch.full((len(TARGETS),), frames))
    found = loss(logits, alignments, 0.0)
    each = [
        likelihood_by_enumeration(row[:frames].log_softmax(-1), labels)
        for row, labels in zip(logits, TARGETS, strict=True)
    ]
    possible = [index for index, value in enumerate(each) if value < math.inf]
    assert found.likelihood.item() == pytest.approx(sum(each[i] for i in possible), rel=1e-12)
    assert found.total.item() == pytest.approx(sum(each[i] for i in possible), rel=1e-12)
    assert found.tokens.item() == sum(len(TARGETS[i]) for i in possible)
    assert found.skipped.item() == len(TARGETS) - len(possible)
    assert alignments.alignable.tolist() == [value < math.inf for value in each]
    assert found.skipped.item() > 0, "the list of targets should hold one that cannot be aligned"


@pytest.mark.parametrize("labels", [[], [6], [6, 6], [6, 1, 6], [1, 6, END]])
def test_the_posterior_is_that_of_all_alignments(labels: list[int]) -> None:
    log_probs = random_logits(4, V, seed=3).log_softmax(-1)
    target, lengths = pad([labels])
    alignments = Alignments.of(target, lengths, torch.tensor([4]))
    _, posterior = alignment_likelihood(log_probs[None][:, :, alignments.columns[0]], alignments)
    by_symbol = torch.zeros_like(log_probs).index_add_(1, alignments.columns[0], posterior[0])
    assert_same(by_symbol, posterior_by_enumeration(log_probs, labels))


@pytest.mark.parametrize("loss", [loss_from_logits, fused_from_logits])
def test_label_smoothing_is_the_formula(loss: LossOfLogits) -> None:
    smoothing, frames = 0.3, torch.tensor([4, 2, 3, 3])
    labels = [[6, 1], [6], [6, 6, 6], []]  # the third cannot be aligned and adds no smoothing either
    logits = random_logits(4, 4, V)
    target, lengths = pad(labels)
    found = loss(logits, Alignments.of(target, lengths, frames), smoothing)
    negative, uniform = 0.0, 0.0
    for b in (0, 1, 3):
        log_probs = logits[b, : frames[b]].log_softmax(-1)
        negative += likelihood_by_enumeration(log_probs, labels[b])
        uniform -= log_probs.sum().item() / V
    assert found.likelihood.item() == pytest.approx(negative, rel=1e-12)
    assert found.total.item() == pytest.approx((1 - smoothing) * negative + smoothing * uniform, rel=1e-12)
    assert (found.tokens.item(), found.skipped.item()) == (3, 1)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int]:
    targets = draw(st.lists(st.lists(st.sampled_from([1, END, 6, 8]), max_size=5), min_size=1, max_size=4))
    lengths = [draw(st.integers(1, 7)) for _ in targets]
    return targets, lengths, draw(st.integers(0, 10_000))


@settings(deadline=None, max_examples=60)
@given(batch=batches(), smoothing=st.sampled_from([0.0, 0.1, 0.6]), chunk=st.sampled_from([1, 2, 3, 8, 1000]))
def test_both_losses_match_the_plain_loss_in_values_and_gradients(
    batch: tuple[list[list[int]], list[int], int], smoothing: float, chunk: int
) -> None:
    targets, lengths, seed = batch
    frames = random_logits(len(targets), max(lengths), 5, seed=seed).requires_grad_()
    table = random_logits(9, 5, seed=seed + 1).requires_grad_()
    target, target_lengths = pad(targets)
    alignments = Alignments.of(target, target_lengths, torch.tensor(lengths))
    expected = plain_loss(frames @ table.T, targets, lengths, smoothing)
    references = torch.autograd.grad(2.5 * expected, (frames, table))
    for found in (
        ctc_loss(frames, table, alignments, smoothing, chunk),
        loss_from_logits(frames @ table.T, alignments, smoothing),
    ):
        assert_same(found.total, expected)
        assert_same(torch.autograd.grad(2.5 * found.total, (frames, table)), references)


def test_gradcheck() -> None:
    target, lengths = pad([[6, 6, END], [1, END], [6, 6, 6], []])
    alignments = Alignments.of(target, lengths, torch.tensor([5, 3, 4, 2]))
    frames, table = random_logits(4, 5, 4).requires_grad_(), random_logits(V, 4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda f, w: ctc_loss(f, w, alignments, 0.1, 3).total, (frames, table))
    logits = random_logits(4, 5, V).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss_from_logits(x, alignments, 0.1).total, (logits,))


def test_a_batch_of_empty_targets() -> None:
    target, lengths = pad([[], []])
    frames = torch.tensor([3, 2])
    logits = random_logits(2, 3, V)
    for loss in (loss_from_logits, fused_from_logits):
        found = loss(logits, Alignments.of(target, lengths, frames), 0.0)
        blanks = logits.log_softmax(-1)[:, :, BLANK]
        assert_same(found.total, -(blanks[0].sum() + blanks[1, :2].sum()))
        assert (found.tokens.item(), found.skipped.item()) == (0, 0)


def test_a_batch_without_alignable_sentences_has_zero_loss() -> None:
    target, lengths = pad([[6, 6, 6], [1, 2]])
    alignments = Alignments.of(target, lengths, torch.tensor([4, 1]))
    frames, table = random_logits(2, 4, 3).requires_grad_(), random_logits(V, 3).requires_grad_()
    found = ctc_loss(frames, table, alignments, 0.1)
    assert [value.item() for value in found] == [0, 0, 0, 2]
    assert not any(gradient.any() for gradient in torch.autograd.grad(found.total, (frames, table)))


def test_padding_of_a_target_does_not_matter() -> None:
    logits = random_logits(2, 6, V)
    losses = []
    for filler in (0, 6, BLANK):
        target, lengths = pad([[1, 6], [2, 1, 6, 6]], filler)
        losses.append(loss_from_logits(logits, Alignments.of(target, lengths, torch.tensor([2, 6])), 0.1))
    assert all(loss == losses[0] for loss in losses)
    assert losses[0].skipped.item() == 0


def test_single_precision_agrees_with_double() -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(6, 50, (3, 20), generator=generator)
    alignments = Alignments.of(targets, torch.tensor([20, 12, 5]), torch.tensor([60, 40, 33]))
    frames, table = torch.randn(3, 60, 16, generator=generator), torch.randn(50, 16, generator=generator)
    results = []
    for dtype in (torch.float32, torch.float64):
        inputs = [x.to(dtype).requires_grad_() for x in (frames, table)]
        loss = ctc_loss(inputs[0], inputs[1], alignments, 0.1, 32)
        assert loss.total.dtype == loss.likelihood.dtype == dtype
        results.append((loss.total, *torch.autograd.grad(loss.total, inputs)))
    for single, double in zip(*results, strict=True):
        assert (single - double).norm() < 1e-3 * double.norm()


def test_logits_are_softmaxed_once_and_never_copied() -> None:
    logits = torch.randn(2, 10, 300, requires_grad=True)
    target, lengths = pad([[6, 7], [8, 8, 9]])
    alignments = Alignments.of(target, lengths, torch.tensor([10, 8]))
    with Allocations(logits.numel()) as forward:
        total = loss_from_logits(logits, alignments, 0.1).total
    assert forward.operations == []
    with Allocations(logits.numel()) as backward:
        total.backward()
    assert backward.operations.count("aten.exp.default") == 1
    assert not any("log_softmax" in operation for operation in backward.operations)


def test_the_fused_loss_never_stores_frames_times_vocabulary() -> None:
    frames, table = torch.randn(2, 10, 4, requires_grad=True), torch.randn(300, 4, requires_grad=True)
    target, lengths = pad([[6, 7], [8, 8, 9]])
    alignments = Alignments.of(target, lengths, torch.tensor([10, 8]))
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with (
        Allocations(2 * 10 * 300) as allocations,
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        ctc_loss(frames, table, alignments, 0.1, chunk=6).total.backward()
    assert allocations.operations == []
    assert allocations.largest == 6 * 300
    assert max(kept) == table.numel()


def test_parameter_count_of_the_paper() -> None:
    with torch.device("meta"):
        model = CTCModel.build(CTCConfig(32_000, 32_000))
    tables = 2 * 32_000 * 512
    attention = 4 * (512 * 512 + 512)
    feed_forward = 512 * 2048 + 2048 + 2048 * 512 + 512
    layer = attention + feed_forward + 2 * (2 * 512)
    projection = 512 * (2 * 512) + 2 * 512
    assert parameter_count(model) == tables + 6 * layer + 2 * 512 + projection == 52_208_640
    assert sum(value.numel() for value in model.state_dict().values()) == 52_208_640


@pytest.mark.parametrize("mu", [1, 2, 3])
def test_each_state_becomes_mu_consecutive_frames(mu: int) -> None:
    model = make_model(mu)
    H = random_logits(2, 4, 8)
    frames = model.frames(H)
    assert frames.shape == (2, 4 * mu, 8)
    weight, bias = model.length_projection.weight, model.length_projection.bias
    for t, part in itertools.product(range(4), range(mu)):
        rows = slice(part * 8, (part + 1) * 8)
        assert_same(frames[:, t * mu + part], H[:, t] @ weight[rows].T + bias[rows])


@pytest.mark.parametrize("mu", [1, 2, 3])
@pytest.mark.parametrize("delay", [1, 2, 4])
def test_loss_and_gradients_are_those_of_the_logits(mu: int, delay: int) -> None:
    model = make_model(mu)
    source, source_lengths = pad([[7, 8, 9, 10], [11, 12], [6, 7, 8]])
    targets = [[6, 7, 7, END], [8, END], [9, 9, 9, 9, 10, END]]  # the first fits from mu = 2, the last from mu = 3
    target, target_lengths = pad(targets)
    loss = model.loss(Batch(source, source_lengths, target, target_lengths), delay, smoothing=0.1)
    logits = model(source, source_lengths, delay)
    expected = plain_loss(logits, targets, (source_lengths * mu).tolist(), 0.1)
    assert_same(loss.total, expected)
    assert loss.skipped.item() == 3 - mu
    assert_same(gradients(model, loss.total), gradients(model, expected))


@pytest.mark.parametrize("delay", [1, 2, 3, 5])
def test_a_padded_batch_is_the_sum_of_its_sentences(delay: int) -> None:
    model = make_model()
    pairs = [([7, 8, 9, 10, 6], [6, 7, 7, END]), ([11], [8, END]), ([6, 7], [6, 6, 6, 6, END]), ([6, 12, 8], [END])]
    (source, source_lengths), (target, target_lengths) = (pad(side) for side in zip(*pairs, strict=True))
    together = model.loss(Batch(source, source_lengths, target, target_lengths), delay)
    alone = [model.loss(Batch(*pad([x]), *pad([y])), delay) for x, y in pairs]
    for field, parts in zip(together, zip(*alone, strict=True), strict=True):
        assert_same(field, torch.stack(parts).sum(0))
    assert together.skipped.item() == 1
    summed = sum_gradients([gradients(model, loss.total) for loss in alone])
    assert_same(gradients(model, together.total), summed)


def test_dropout_is_the_only_chance_in_training() -> None:
    model = make_model().train()
    batch = Batch(*pad([[7, 8, 9]]), *pad([[6, END]]))
    assert model.loss(batch).total == model.loss(batch).total


def test_inference_never_loads_the_sorting_network() -> None:
    program = """
import sys, torch
from simulmt.model.ctc import CTCConfig, CTCModel
model = CTCModel.build(CTCConfig(9, 9, width=4, inner=4, heads=1, layers=1)).eval()
logits = model(torch.tensor([[6, 7]]), torch.tensor([2]), delay=2)
assert logits.shape == (1, 4, 9), logits.shape
loaded = [name for name in sys.modules if name.startswith("simulmt.") and ("asn" in name or "train" in name)]
sys.exit(f"loaded: {loaded}" if loaded else 0)
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("bad", [-1, 13])
def test_tokens_outside_the_vocabularies_are_named(bad: int) -> None:
    model = make_model()
    good, wrong, one = torch.tensor([[6]]), torch.tensor([[bad]]), torch.tensor([1])
    with pytest.raises(VocabularyError, match=f"source token id {bad} "):
        model(wrong, one)
    with pytest.raises(VocabularyError, match=f"source token id {bad} "):
        model.loss(Batch(wrong, one, good, one))
    with pytest.raises(VocabularyError, match=f"target token id {bad} "):
        model.loss(Batch(good, one, wrong, one))


@pytest.mark.parametrize("delay", [0, -1])
def test_a_delay_below_one_is_refused(delay: int) -> None:
    model, token, one = make_model(), torch.tensor([[6]]), torch.tensor([1])
    with pytest.raises(ConfigError, match=f"got {delay}"):
        model(token, one, delay)
    with pytest.raises(ConfigError, match=f"got {delay}"):
        model.loss(Batch(token, one, token, one), delay)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("mu", 0, "mu must be at least 1, got 0"),
        ("mu", -2, "mu must be at least 1, got -2"),
        ("layers", 0, "layers must be at least 1, got 0"),
        ("dropout", 1.0, "dropout .* got 1.0"),
        ("dropout", -0.1, "dropout .* got -0.1"),
        ("heads", 7, r"multiple of heads \(7\)"),
        ("heads", 0, r"multiple of heads \(0\)"),
        ("width", 9, "width .*9"),
    ],
)
def test_bad_settings_are_named(setting: str, value: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CTCConfig(10, 10, **{setting: value})  # type: ignore[arg-type]


def test_an_odd_width_is_refused() -> None:
    with pytest.raises(ConfigError, match="width must be even, got 9"):
        CTCConfig(10, 10, width=9, heads=3)
