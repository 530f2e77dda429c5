"""The decoder over frames: what it sees, the alignments it is trained on, and its writing."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from simulmt.model.frame_decoder import FrameDecoder, last_written, quantile_alignment
from simulmt.model.layers import Batch
from simulmt.model.risk import SampledTranslations, risk_loss
from simulmt.model.transducer import Lattice, TransducerConfig, TransducerModel, forward_backward, transducer_loss
from simulmt.text import BLANK, MASK, START

from .helpers import assert_same, randomise

V, D = 11, 8
SIZES = {"width": D, "inner": 16, "heads": 2, "layers": 2, "decoder_layers": 2, "context_symbols": 2}


def _model(seed: int = 0, **changes: object) -> TransducerModel:
    config = TransducerConfig(20, V, **{"dropout": 0.0, **SIZES, **changes})  # type: ignore[arg-type]
    return randomise(TransducerModel.build(config), seed)


def _decoder(model: TransducerModel) -> FrameDecoder:
    assert model.decoder is not None
    return model.decoder


def _frames(*shape: int, seed: int = 4) -> Tensor:
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _symbols(*shape: int, seed: int = 5) -> Tensor:
    """Draw symbols, a third of them blank."""
    generator = torch.Generator().manual_seed(seed)
    symbols = torch.randint(6, V, shape, generator=generator)
    return symbols.masked_fill(torch.rand(shape, generator=generator) < 1 / 3, BLANK)


def _forced(model: TransducerModel, frames: Tensor, symbols: Tensor) -> Tensor:
    """Return the logits [B U V] of frames, given what they write."""
    return model.logits(_decoder(model)(frames, symbols, model.target_embedding.weight))


# --- What a frame sees -------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [0, 3, 8])
def test_a_frame_sees_earlier_frames_and_what_they_wrote_only(t: int) -> None:
    model, frames, symbols = _model(), _frames(2, 9), _symbols(2, 9)
    before = _forced(model, frames, symbols)
    later_frames = torch.cat([frames[:, : t + 1], _frames(2, 8 - t, seed=6)], 1)
    later_symbols = torch.cat([symbols[:, :t], _symbols(2, 9 - t, seed=7)], 1)
    assert not torch.equal(later_symbols, symbols)
    assert_same(_forced(model, later_frames, later_symbols)[:, : t + 1], before[:, : t + 1])


def test_a_frame_sees_all_that_was_written_before() -> None:
    model, frames, symbols = _model(), _frames(1, 9), torch.full((1, 9), 7)
    before = _forced(model, frames, symbols)
    for t in range(8):
        changed = symbols.clone()
        changed[0, t] = 8
        assert (_forced(model, frames, changed)[0, -1] - before[0, -1]).abs().max() > 1e-3


def test_a_frame_after_a_blank_differs_from_one_after_a_symbol() -> None:
    """The last symbol written is 7 in both."""
    model, frames = _model(), _frames(1, 3)
    waiting, writing = (_forced(model, frames, torch.tensor([each])) for each in ([7, BLANK, 8], [7, 7, 8]))
    assert_same(waiting[0, :2], writing[0, :2])
    assert (waiting[0, 2] - writing[0, 2]).abs().max() > 1e-3


@torch.no_grad()
def test_steps_compute_what_all_frames_at_once_do() -> None:
    model, frames, symbols = _model(), _frames(3, 7), _symbols(3, 7)
    decoder, embedding = _decoder(model), model.target_embedding.weight
    caches = decoder.start(frames)
    last, waited = last_written(symbols), torch.zeros(3, dtype=torch.bool)
    steps = []
    for t in range(7):
        steps.append(decoder.step(frames[:, t], last[:, t], waited, embedding, caches))
        waited = symbols[:, t] == BLANK
    assert_same(torch.stack(steps, 1), decoder(frames, symbols, embedding))


def test_a_new_decoder_changes_nothing() -> None:
    config = TransducerConfig(20, V, **SIZES)  # type: ignore[arg-type]
    model = TransducerModel.build(config).double().eval()
    frames = _frames(2, 5)
    assert torch.equal(_decoder(model)(frames, _symbols(2, 5), model.target_embedding.weight), frames)


def test_training_hides_some_of_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = _model(dropout=0.3), list[Tensor]()
    decoder, embed = _decoder(model), FrameDecoder._embed

    def spy(self: FrameDecoder, frames: Tensor, last: Tensor, *rest: Tensor) -> Tensor:
        seen.append(last)
        return embed(self, frames, last, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(FrameDecoder, "_embed", spy)
    for is_training in (False, True):
        decoder.train(is_training)
        decoder(_frames(20, 30), _symbols(20, 30), model.target_embedding.weight)
    shares = [float((each == MASK).double().mean()) for each in seen]
    assert shares == [0, pytest.approx(0.3, abs=0.08)]


# --- Alignments --------------------------------------------------------------------------------------------


def test_the_last_symbol_written() -> None:
    for symbols in itertools.product([BLANK, 7, 8], repeat=5):
        expected, last = [], START
        for symbol in symbols:
            expected.append(last)
            last = last if symbol == BLANK else symbol
        assert last_written(torch.tensor([symbols]))[0].tolist() == expected


def _posteriors(seed: int, frames: list[int], labels: list[int]) -> tuple[Tensor, Lattice, Tensor, Tensor]:
    """Return label posteriors [B U T] of a random lattice, the lattice, and its log-probabilities [B U C]."""
    generator = torch.Generator().manual_seed(seed)
    B, U, T = len(frames), max(frames), max(labels)
    log_p = torch.randn(B, U, T + 1, 2, generator=generator, dtype=torch.float64).mul(3).log_softmax(-1)
    lattice = Lattice.of(torch.randint(6, V, (B, T), generator=generator), torch.tensor(labels), torch.tensor(frames))
    blank, label = log_p.unbind(-1)
    _, posteriors = forward_backward(blank.contiguous(), label.contiguous(), lattice)
    return posteriors.label[:, :, :-1], lattice, blank, label


def _aligned_by_brute_force(blank: Tensor, label: Tensor, labels: list[int], frames: int, quantile: float) -> list[int]:
    """Sum over all alignments the probability that each label has been written by each frame."""
    probabilities = {}
    for writing in itertools.combinations(range(frames), len(labels)):
        score, u = 0.0, 0
        for t in range(frames):
            score += float(label[t, u] if t in writing else blank[t, u])
            u += t in writing
        probabilities[writing] = score
    total = torch.tensor(list(probabilities.values())).double().logsumexp(0)
    symbols = [BLANK] * frames
    for u, symbol in enumerate(labels):
        written = torch.zeros(frames, dtype=torch.float64)
        for writing, score in probabilities.items():
            written[writing[u] :] += (score - total).exp()
        symbols[int((written >= quantile).nonzero()[0])] = symbol
    return symbols


@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("seed", range(5))
def test_labels_are_written_where_their_probability_reaches_the_quantile(quantile: float, seed: int) -> None:
    frames, labels = [6, 4, 5, 3], [3, 4, 1, 0]
    posteriors, lattice, blank, label = _posteriors(seed, frames, labels)
    found = quantile_alignment(posteriors, lattice.labels, quantile)
    for i, (U, T) in enumerate(zip(frames, labels, strict=True)):
        own = lattice.labels[i, :T].tolist()
        assert found[i, :U].tolist() == _aligned_by_brute_force(blank[i], label[i], own, U, quantile)
        assert found[i, U:].tolist() == [BLANK] * (6 - U)
        assert [symbol for symbol in found[i].tolist() if symbol != BLANK] == own  # in order, none lost


def test_a_lower_quantile_writes_earlier() -> None:
    posteriors, lattice, _, _ = _posteriors(0, [40], [10])
    early, late = (quantile_alignment(posteriors, lattice.labels, q)[0] != BLANK for q in (0.1, 0.9))
    assert bool((early.cumsum(0) >= late.cumsum(0)).all())
    assert not torch.equal(early, late)


# --- Training ----------------------------------------------------------------------------------------------


def _batch(seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    source, target = (torch.randint(6, V, (3, length), generator=generator) for length in (5, 4))
    return Batch(source, torch.tensor([5, 3, 1]), target, torch.tensor([4, 3, 3]))  # the last cannot be aligned


def test_the_loss_is_that_of_the_aligned_symbols_and_of_the_transducer() -> None:
    model, batch = _model(alignment_weight=0.25, alignment_quantile=0.3), _batch()
    frames = model.frames(model.encode(batch.source, batch.source_lengths, 2))
    embedding, lattice = model.target_embedding.weight, Lattice.of(batch.target, batch.target_lengths, 2 * batch[1])
    contexts = model.context(model.context.histories(batch.target), embedding)
    plain = transducer_loss(frames, embedding, contexts, model.context.table, lattice, smoothing=0.0)
    scores = (frames @ embedding.T)[:, :, None] + (contexts @ model.context.table.T)[:, None]
    log_p = scores.log_softmax(-1).detach()  # [B U C V]
    expected = torch.zeros((), dtype=torch.float64)
    for i, (U, T) in enumerate([(10, 4), (6, 3)]):
        labels = batch.target[i, :T].tolist()
        label = torch.stack([log_p[i, :, u, symbol] for u, symbol in enumerate(labels)], 1)
        symbols = torch.tensor([_aligned_by_brute_force(log_p[i, :, :, BLANK], label, labels, U, 0.3)])
        chosen = _forced(model, frames[i : i + 1, :U], symbols).log_softmax(-1)
        expected = expected - chosen.gather(-1, symbols[..., None]).sum()
    found = model.loss(batch, delay=2, smoothing=0.0)
    assert_same(found.likelihood, expected.detach())
    assert_same(found.total, expected + 0.25 * plain.total)
    assert (int(found.tokens), int(found.skipped)) == (7, 1)


def test_the_loss_falls() -> None:
    torch.manual_seed(0)
    model = TransducerModel.build(TransducerConfig(20, V, **{**SIZES, "dropout": 0.0}))  # type: ignore[arg-type]
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(60):
        loss = model.loss(_batch())
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
        losses.append(float(loss.likelihood))
    assert losses[-1] < 0.3 * losses[0]
    assert _decoder(model).output.weight.abs().max() > 0
    assert _decoder(model).waited.abs().max() > 0


# --- Writing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [-2.0, -3.0])
def test_writing_follows_the_best_symbol_given_what_was_written(penalty: float) -> None:
    model, frames = _model(), _frames(4, 12)
    written = model.write(frames, penalty, chunk=12)[:, 0]
    logits = _forced(model, frames, written)
    logits[..., BLANK] -= penalty
    assert torch.equal(logits.argmax(-1), written)
    assert len(set(written.flatten().tolist())) > 3
    assert (written == BLANK).any()


def test_a_blank_penalty_writes_more() -> None:
    model, frames = _model(), _frames(8, 12)
    plain, penalised = ((model.write(frames, blank_penalty=p) == BLANK).sum() for p in (-2.0, 2.0))
    assert penalised < plain


def test_samples_follow_the_model() -> None:
    model, frames = _model(), _frames(1, 2)
    torch.manual_seed(0)
    drawn = model.write(frames, samples=20_000)[0]  # [N U]
    every = torch.cartesian_prod(torch.arange(V), torch.arange(V))
    log_p = _forced(model, frames.expand(V * V, -1, -1), every).log_softmax(-1)
    expected = log_p.gather(-1, every[..., None])[..., 0].sum(-1).exp()
    found = torch.bincount(drawn[:, 0] * V + drawn[:, 1], minlength=V * V) / len(drawn)
    assert expected.max() > 0.05
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.01)


def test_the_gradient_of_minimum_risk_is_that_of_the_sampled_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (source, source_lengths, target, target_lengths) = _model().train(), _batch()
    frames = model.frames(model.encode(source, source_lengths, 1))
    symbols = model.write(frames, samples=3)
    inside = torch.arange(frames.shape[1]) < 2 * source_lengths[:, None]
    symbols = symbols.masked_fill(~inside[:, None], BLANK)
    monkeypatch.setattr(TransducerModel, "write", lambda *_, **__: symbols)
    rewards = torch.randn(symbols.shape, dtype=torch.float64)
    monkeypatch.setattr("simulmt.model.risk.compute_advantages", lambda *_: rewards)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss = risk_loss(model, Batch(source, source_lengths, target, target_lengths))
    found = torch.autograd.grad(loss.total, trained, materialize_grads=True)
    plain = torch.zeros((), dtype=torch.float64)
    for n in range(3):
        log_p = _forced(model, frames, symbols[:, n]).log_softmax(-1)
        chosen = log_p.gather(-1, symbols[:, n, :, None])[..., 0]
        plain = plain - (rewards[:, n] * chosen * inside).sum()
    expected = torch.autograd.grad(plain, trained, materialize_grads=True)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert SampledTranslations.of(symbols).counts.max() > 0


def test_samples_of_minimum_risk_are_drawn_without_dropout() -> None:
    """Else they would come from another distribution than the one whose gradient is computed."""
    model = _model(dropout=0.5).train()
    torch.manual_seed(0)
    risk_loss(model, _batch())
    assert not _decoder(model).training
