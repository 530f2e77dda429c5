"""The transducer's loss against brute force, its gradients against automatic differentiation, and its writing."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from simulmt.model.transducer import (
    LabelContext,
    Lattice,
    TransducerConfig,
    TransducerModel,
    forward_backward,
    transducer_loss,
)
from simulmt.text import BLANK, START

V, D, R = 11, 6, 4

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # frames, table, contexts, context table


def _inputs(seed: int, frames: list[int], labels: list[int]) -> tuple[Inputs, Lattice]:
    generator = torch.Generator().manual_seed(seed)
    B, U, T = len(frames), max(frames), max(labels)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    target = torch.randint(6, V, (B, T), generator=generator)
    lattice = Lattice.of(target, torch.tensor(labels), torch.tensor(frames))
    return (draw(B, U, D), draw(V, D), draw(B, T + 1, R), draw(V, R)), lattice


def _log_probabilities(inputs: Inputs) -> Tensor:
    frames, table, contexts, context_table = inputs
    scores = (frames @ table.T)[:, :, None] + (contexts @ context_table.T)[:, None]  # [B U C V]
    return scores.log_softmax(-1)


def _brute_force(log_p: Tensor, labels: list[int], frames: int) -> Tensor:
    """Sum over all choices of frames that write."""
    paths = []
    for writing in itertools.combinations(range(frames), len(labels)):
        score, u = log_p.new_zeros(()), 0
        for t in range(frames):
            symbol = labels[u] if t in writing else BLANK
            score = score + log_p[t, u, symbol]
            u += t in writing
        paths.append(score)
    return torch.stack(paths).logsumexp(0)


@pytest.mark.parametrize(("frames", "labels"), [([5, 3, 4], [2, 3, 0]), ([1], [1]), ([4, 2], [1, 1])])
def test_the_loss_sums_over_all_alignments(frames: list[int], labels: list[int]) -> None:
    inputs, lattice = _inputs(0, frames, labels)
    log_p = _log_probabilities(inputs)
    expected = [-_brute_force(log_p[i], lattice.labels[i, : labels[i]].tolist(), frames[i]) for i in range(len(frames))]
    found = transducer_loss(*inputs, lattice, smoothing=0.0)
    torch.testing.assert_close(found.total, torch.stack(expected).sum())
    assert found.tokens == sum(labels)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [1, 1000])
def test_gradients_are_those_of_the_plain_loss(smoothing: float, chunk: int) -> None:
    frames, labels = [6, 4, 5], [3, 4, 1]
    inputs, lattice = _inputs(1, frames, labels)
    lattice.labels[0, 1] = lattice.labels[0, 0]  # a label that a sentence has twice
    log_p = _log_probabilities(inputs)
    negative = sum(
        -_brute_force(log_p[i], lattice.labels[i, : labels[i]].tolist(), frames[i]) for i in range(len(frames))
    )
    visits = _visits(log_p.detach(), lattice)
    uniform = -(visits * log_p.mean(-1)).sum()
    plain = torch.autograd.grad((1 - smoothing) * negative + smoothing * uniform, inputs)
    loss = transducer_loss(*inputs, lattice, smoothing, chunk)
    torch.testing.assert_close(loss.total, (1 - smoothing) * negative + smoothing * uniform)
    for found, expected in zip(torch.autograd.grad(loss.total, inputs), plain, strict=True):
        torch.testing.assert_close(found, expected)


def _visits(log_p: Tensor, lattice: Lattice) -> Tensor:
    B, U, C, _ = log_p.shape
    label = torch.zeros(B, U, C, dtype=log_p.dtype)
    for u in range(C - 1):
        label[:, :, u] = log_p[:, :, u].gather(-1, lattice.labels[:, u][:, None, None].expand(-1, U, 1))[:, :, 0]
    _, posteriors = forward_backward(log_p[..., BLANK].contiguous(), label, lattice)
    return posteriors.blank + posteriors.label


def test_cell_posteriors_sum_to_one_in_every_frame() -> None:
    inputs, lattice = _inputs(2, [6, 4], [3, 2])
    visits = _visits(_log_probabilities(inputs).detach(), lattice)
    inside = torch.arange(6) < torch.tensor([[6], [4]])
    torch.testing.assert_close(visits.sum(-1), inside.double())


def test_more_labels_than_frames_count_as_skipped() -> None:
    inputs, lattice = _inputs(3, [2, 4], [3, 3])
    loss = transducer_loss(*inputs, lattice, 0.1)
    assert (int(loss.skipped), int(loss.tokens)) == (1, 3)
    (by_frames,) = torch.autograd.grad(loss.total, inputs[:1])
    assert by_frames[0].abs().max() == 0
    assert by_frames[1].abs().max() > 0


def test_histories_hold_the_last_symbols_newest_first() -> None:
    context = LabelContext(V, D, symbols=2, inner=8, rank=R, dropout=0.0)
    found = context.histories(torch.tensor([[7, 8, 9]]))
    assert found.tolist() == [[[START, START], [7, START], [8, 7], [9, 8]]]


def _model(seed: int = 0) -> TransducerModel:
    torch.manual_seed(seed)
    sizes = {"width": 8, "inner": 16, "heads": 2, "layers": 2}
    sizes |= {"context_symbols": 2, "context_inner": 8, "context_rank": R}
    config = TransducerConfig(20, V, dropout=0.0, **sizes)  # type: ignore[arg-type]
    model = TransducerModel.build(config).eval()
    with torch.no_grad():
        model.context.table.normal_()
        model.target_embedding.weight.mul_(3)
    return model


def test_writing_follows_the_best_symbol_given_what_was_written() -> None:
    model = _model()
    frames = torch.randn(3, 12, 8, generator=torch.Generator().manual_seed(4))
    written = model.write(frames, chunk=12)[:, 0]
    embedding = model.target_embedding.weight
    for row, symbols in zip(frames, written.tolist(), strict=True):
        history = [START, START]
        for frame, symbol in zip(row, symbols, strict=True):
            added = model.context(torch.tensor(history), embedding) @ model.context.table.T
            scores = frame @ embedding.T + added
            assert symbol == int(scores.argmax())
            history = history if symbol == BLANK else [symbol, history[0]]
    assert len(set(written.flatten().tolist())) > 3


def test_a_blank_penalty_writes_more() -> None:
    model = _model()
    frames = torch.randn(8, 12, 8, generator=torch.Generator().manual_seed(4))
    plain, penalised = ((model.write(frames, blank_penalty=p) == BLANK).sum() for p in (-2.0, 2.0))
    assert penalised < plain


def test_samples_follow_the_model() -> None:
    model = _model()
    frames = torch.randn(1, 2, 8, generator=torch.Generator().manual_seed(4))
    torch.manual_seed(0)
    drawn = model.write(frames, samples=20_000)[0]  # [N U]
    lattice = Lattice.of(torch.tensor([[7]]), torch.tensor([1]), torch.tensor([2]))
    contexts = model.context(model.context.histories(lattice.labels), model.target_embedding.weight)
    loss = transducer_loss(frames, model.target_embedding.weight, contexts, model.context.table, lattice, 0.0)
    wrote_it = ((drawn == 7).sum(1) == 1) & ((drawn == BLANK).sum(1) == 1)
    assert float(wrote_it.double().mean()) == pytest.approx(math.exp(-float(loss.total.detach())), abs=0.01)
