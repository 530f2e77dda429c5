"""Minimum-risk training: rewards by hand, gradients against automatic differentiation, and that it learns."""

from __future__ import annotations

import pytest
import torch

from simulmt.model.layers import Batch
from simulmt.model.risk import (
    RiskConfig,
    SampledTranslations,
    compute_advantages,
    ngram_rewards,
    policy_gradient,
    risk_loss,
    sample_tokens,
    wait_k_risk_loss,
)
from simulmt.model.seq2seq import Seq2SeqConfig, Seq2SeqModel
from simulmt.model.transducer import TransducerConfig, TransducerModel
from simulmt.text import BLANK, END, PAD, SPECIAL_SYMBOLS


def test_sampled_symbols_are_gathered_from_their_frames() -> None:
    symbols = torch.tensor([[[BLANK, 7, 8, BLANK, 9], [BLANK, BLANK, BLANK, 6, BLANK]]])
    drawn = SampledTranslations.of(symbols)
    assert drawn.tokens.tolist() == [[[7, 8, 9], [6, PAD, PAD]]]
    assert drawn.counts.tolist() == [[3, 1]]
    assert drawn.before.tolist() == [[[0, 0, 1, 2, 2], [0, 0, 0, 0, 1]]]
    values = torch.tensor([[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]])
    assert drawn.at_frames(values).tolist() == [[[0, 1, 2, 0, 3], [0, 0, 0, 4, 0]]]


def test_ngram_f1_by_hand() -> None:
    # Reference 6 7 8, written 6 7 7: unigrams 6, 7 match (the second 7 does not), bigrams (begin 6), (6 7) match.
    tokens, target = torch.tensor([[[6, 7, 7]]]), torch.tensor([[6, 7, 8]])
    rewards, f1 = ngram_rewards(tokens, torch.tensor([[3]]), target, torch.tensor([3]), order_weights=(1.0, 1.0))
    assert f1.tolist() == [[pytest.approx(2 / 3)]]
    matched, missed = (2 - 2 / 3) / 6 * 3, -(2 / 3) / 6 * 3
    assert rewards[0, 0].tolist() == pytest.approx([matched, matched, missed])


def test_repeating_a_word_in_better_order_is_not_rewarded() -> None:
    # Reference 6 7 8, written 7 6 7 8: the second 7 is one too many, so "6 7" does not count; "7 8" does.
    tokens, target = torch.tensor([[[7, 6, 7, 8]]]), torch.tensor([[6, 7, 8]])
    rewards, f1 = ngram_rewards(tokens, torch.tensor([[4]]), target, torch.tensor([3]), order_weights=(0.0, 1.0))
    assert f1.tolist() == [[pytest.approx(2 * 1 / (4 + 3))]]
    assert (rewards[0, 0] > 0).tolist() == [False, False, False, True]


def test_orders_count_as_they_weigh() -> None:
    # Reference 6 7, written 7: the unigram matches, the bigram (begin 7) does not.
    tokens, target = torch.tensor([[[7]]]), torch.tensor([[6, 7]])
    _, f1 = ngram_rewards(tokens, torch.tensor([[1]]), target, torch.tensor([2]), order_weights=(3.0, 1.0))
    assert f1.tolist() == [[pytest.approx(3 / 4 * 2 / 3)]]


def test_beta_makes_what_is_left_out_cost_more() -> None:
    # Reference 6 7 8: "6" has precision 1 and recall 1/3, "6 7 8 9 10 11" the other way round 1/2 and 1.
    tokens, target = torch.tensor([[[6, PAD, PAD, PAD, PAD, PAD], [6, 7, 8, 9, 10, 11]]]), torch.tensor([[6, 7, 8]])
    counts, lengths = torch.tensor([[1, 6]]), torch.tensor([3])
    rewards, scores = ngram_rewards(tokens, counts, target, lengths, order_weights=(1.0,), beta=2.0)
    assert scores[0].tolist() == pytest.approx([5 / 13, 15 / 18])
    assert rewards[0, 1].tolist() == pytest.approx([(5 - 15 / 18) / 18 * 3] * 3 + [-(15 / 18) / 18 * 3] * 3)


def test_emphasised_symbols_count_more() -> None:
    weights = RiskConfig(emphasis="0%", emphasis_weight=3.0).weights(["a", "10", "b%", "c"])
    assert weights.tolist() == [[1, 3, 3, 1]] * 2
    negations = RiskConfig(emphasised_words=("not", "'t")).weights(["▁Not", "▁note", "'t", "▁t", "0"])
    assert negations.tolist() == [[2, 1, 2, 1, 1]] * 2
    tokens, target = torch.tensor([[[0, 3], [1, 3]]]), torch.tensor([[0, 1]])
    _, f1 = ngram_rewards(tokens, torch.tensor([[2, 2]]), target, torch.tensor([2]), weights, order_weights=(1.0,))
    assert f1[0].tolist() == pytest.approx([2 * 1 / (2 + 4), 2 * 3 / (4 + 4)])


def test_punctuation_counts_only_after_the_right_symbol() -> None:
    weights = RiskConfig(punctuation="。").weights(["a", "b", "c", "。", "。”"])
    assert weights.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    # Reference a b 。, written "。 a b" and "a b 。": the unigrams without the mark match in both, "b 。" in one.
    tokens, target, lengths = torch.tensor([[[3, 0, 1], [0, 1, 3]]]), torch.tensor([[0, 1, 3]]), torch.tensor([3])
    counts = torch.tensor([[3, 3]])
    rewards, f1 = ngram_rewards(tokens, counts, target, lengths, weights, order_weights=(1.0,))
    assert f1[0].tolist() == [1, 1]
    assert rewards[0, 0].tolist() == pytest.approx([0, 0.75, 0.75])
    rewards, f1 = ngram_rewards(tokens, counts, target, lengths, weights, order_weights=(0.0, 1.0))
    assert f1[0].tolist() == pytest.approx([1 / 3, 1])
    assert rewards[0, 0, 0] < 0 < rewards[0, 1, 2]


def test_rewards_are_what_a_symbol_is_worth() -> None:
    """Writing one more symbol changes F1, times labels, by about its reward."""
    target, lengths = torch.tensor([[6, 7, 8, 9, 10, 6, 7]]), torch.tensor([7])
    tokens = torch.tensor([[[6, 7, 9, 10, 6]]])
    rewards, f1 = ngram_rewards(tokens, torch.tensor([[5]]), target, lengths)
    _, without = ngram_rewards(tokens, torch.tensor([[4]]), target, lengths)
    # Without the last symbol the sentence is shorter by one, hence the factor between marginal and average.
    assert float(rewards[0, 0, 4]) == pytest.approx(7 * float(f1 - without) * 11 / 12, rel=0.35)
    assert float(rewards[0, 0, 4]) > 0


def test_rewards_are_discounted_over_frames() -> None:
    rewards = torch.tensor([[[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]])
    assert compute_advantages(rewards, 0.5).tolist() == [[[0.25, 0.5, 1.0], [-0.25, -0.5, -1.0]]]


@pytest.mark.parametrize("chunk", [1, 1000])
def test_policy_gradients_are_those_of_the_log_probabilities(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    B, N, U, V, D, R = 3, 2, 5, 9, 6, 4

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    inputs = draw(B, U, D), draw(V, D), draw(B, N, U, R), draw(V, R)
    symbols = torch.randint(0, V, (B, N, U), generator=generator)
    advantages = draw(B, N, U).detach()
    frames, table, contexts, context_table = inputs
    log_p = ((frames @ table.T)[:, None] + contexts @ context_table.T).log_softmax(-1)
    plain = -(advantages * log_p.gather(-1, symbols[..., None])[..., 0]).sum()
    found = policy_gradient(*inputs, symbols, advantages, torch.tensor(3.0, dtype=torch.float64), chunk)
    assert float(found.detach()) == 3.0
    for ours, theirs in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(plain, inputs), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_gradient_is_that_of_the_sampled_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores that risk_loss differentiates are those that `write` samples from."""
    torch.manual_seed(0)
    sizes = {"width": 8, "inner": 8, "heads": 2, "layers": 1, "context_symbols": 2, "context_inner": 8}
    config = TransducerConfig(12, 12, dropout=0.0, **sizes)  # type: ignore[arg-type]
    model = TransducerModel.build(config).double()
    for parameter in (model.context.table, *model.context.parameters()):
        torch.nn.init.normal_(parameter)
    source, target = torch.randint(6, 12, (2, 4)), torch.randint(6, 12, (2, 3))
    lengths = torch.tensor([4, 3]), torch.tensor([3, 3])
    frames = model.frames(model.encode(source, lengths[0], 1))
    symbols = model.write(frames, samples=3)
    monkeypatch.setattr(TransducerModel, "write", lambda *_, **__: symbols)
    rewards, drawn = torch.randn(symbols.shape, dtype=torch.float64), SampledTranslations.of(symbols)
    monkeypatch.setattr("simulmt.model.risk.compute_advantages", lambda *_: rewards)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(risk_loss(model, Batch(source, lengths[0], target, lengths[1])).total, trained)
    plain = torch.zeros((), dtype=torch.float64)
    for b, n, u in torch.cartesian_prod(*map(torch.arange, symbols.shape)).tolist():
        if u < lengths[0][b] * model.mu:
            history = model.context.histories(drawn.tokens)[b, n, drawn.before[b, n, u]]
            context = model.context(history, model.target_embedding.weight)
            scores = frames[b, u] @ model.target_embedding.weight.T + context @ model.context.table.T
            plain = plain - rewards[b, n, u] * scores.log_softmax(-1)[symbols[b, n, u]]
    for ours, theirs in zip(found, torch.autograd.grad(plain, trained), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_likelihood_is_added_with_its_weight() -> None:
    torch.manual_seed(0)
    sizes = {"width": 8, "inner": 8, "heads": 2, "layers": 1, "context_symbols": 2, "context_inner": 8}
    model = TransducerModel.build(TransducerConfig(12, 12, dropout=0.0, **sizes)).double()  # type: ignore[arg-type]
    torch.nn.init.normal_(model.context.table)
    lengths = torch.tensor([4, 3]), torch.tensor([3, 3])
    batch = Batch(torch.randint(6, 12, (2, 4)), lengths[0], torch.randint(6, 12, (2, 3)), lengths[1])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def gradients(loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(loss, trained, materialize_grads=True)

    torch.manual_seed(1)
    plain = risk_loss(model, batch, 1, RiskConfig())
    torch.manual_seed(1)
    both = risk_loss(model, batch, 1, RiskConfig(likelihood_weight=0.3))
    likelihood = model.loss(batch, 1, smoothing=0.0)
    torch.testing.assert_close(both.total, plain.total + 0.3 * likelihood.total, check_dtype=False)
    assert both.likelihood == plain.likelihood
    for ours, first, second in zip(*map(gradients, (both.total, plain.total, likelihood.total)), strict=True):
        torch.testing.assert_close(ours, first + 0.3 * second, rtol=1e-4, atol=1e-6)


@pytest.mark.learning
def test_it_learns_to_write_a_reordered_reference_in_its_own_order() -> None:
    """The reference is the source backwards, which a causal model cannot write; the same symbols it can."""
    torch.manual_seed(0)
    model = TransducerModel.build(
        TransducerConfig(16, 16, width=32, inner=64, heads=2, layers=1, dropout=0.0, context_symbols=1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scores = []
    for _ in range(80):
        source = torch.randint(6, 16, (32, 4))
        target = torch.cat([source.flip(1), torch.full((32, 1), END)], 1)
        lengths = torch.full((32,), 4), torch.full((32,), 5)
        loss = risk_loss(model, Batch(source, lengths[0], target, lengths[1]), config=RiskConfig(samples=8))
        optimizer.zero_grad()
        (loss.total / loss.tokens).backward()
        optimizer.step()
        scores.append(1 - float(loss.likelihood / loss.tokens))
    assert sum(scores[:5]) / 5 < 0.15
    assert sum(scores[-5:]) / 5 > 0.25  # all unigrams but END in order, and few longer n-grams: 1/4 of 8/9


def _wait_k(dropout: float = 0.0, width: int = 8) -> Seq2SeqModel:
    torch.manual_seed(0)
    return Seq2SeqModel.build(Seq2SeqConfig(12, 12, True, width, 2 * width, 2, 1, 1, dropout)).double()


def _wait_k_batch() -> Batch:
    target = torch.tensor([[6, 7, 8, END], [9, 6, END, PAD]])
    return Batch(torch.randint(6, 12, (2, 5)), torch.tensor([5, 3]), target, torch.tensor([4, 3]))


def test_translations_are_drawn_with_their_probabilities() -> None:
    model = _wait_k().eval()
    torch.nn.init.normal_(model.target_embedding.weight, std=0.4)
    H = model.encoder(torch.randint(6, 12, (1, 4))).expand(20_000, -1, -1)
    tokens, counts = sample_tokens(model, H, None, delay=1, longest=2)
    assert not set(tokens.unique().tolist()) & set(range(len(SPECIAL_SYMBOLS))) - {END, PAD}
    assert (counts == torch.where(tokens[:, 0] == END, 1, 2)).all()
    assert ((tokens[:, 1] == PAD) == (tokens[:, 0] == END)).all()
    allowed = [END, *range(len(SPECIAL_SYMBOLS), 12)]
    first = model.decode(H[:1], None, torch.tensor([[6, 6]]), 1)[0] @ model.target_embedding.weight.T
    for position, rows in ((0, tokens), (1, tokens[tokens[:, 0] == 6])):
        expected = first[position, allowed].softmax(-1)
        found = (rows[:, position, None] == torch.tensor(allowed)).double().mean(0)
        torch.testing.assert_close(found, expected, rtol=0, atol=4 * (0.25 / len(rows)) ** 0.5)


def test_a_wait_k_gradient_is_that_of_the_sampled_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = _wait_k(), _wait_k_batch()
    tokens = torch.tensor([[6, 7, END], [8, END, PAD], [9, 9, 9], [END, PAD, PAD]])  # two of each sentence
    monkeypatch.setattr("simulmt.model.risk.sample_tokens", lambda *_: (tokens, (tokens != PAD).sum(1)))
    rewards = torch.randn(2, 2, 3, dtype=torch.float64)
    monkeypatch.setattr("simulmt.model.risk.compute_advantages", lambda *_: rewards)
    loss = wait_k_risk_loss(model, batch, 2, RiskConfig(samples=2))
    found = torch.autograd.grad(loss.total, list(model.parameters()))
    source, lengths = batch.source.repeat_interleave(2, 0), batch.source_lengths.repeat_interleave(2)
    log_p = model(source, lengths, tokens, 2).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    plain = -(rewards.flatten(0, 1) * log_p * (tokens != PAD)).sum()
    for ours, theirs in zip(found, torch.autograd.grad(plain, list(model.parameters())), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_decoder_of_a_wait_k_model_samples_without_dropout() -> None:
    model, seen = _wait_k(dropout=0.5).train(), list[bool]()

    def record(module: torch.nn.Module, *_: object) -> None:
        seen.append(module.training)

    model.layers[0].register_forward_hook(record)
    wait_k_risk_loss(model, _wait_k_batch(), 1, RiskConfig(likelihood_weight=0.3))
    assert not any(seen[:-1])  # while sampling, and for the probabilities of the samples
    assert seen[-1]  # for the likelihood
    assert model.layers[0].training


def test_wait_k_likelihood_is_added_with_its_weight() -> None:
    model, batch = _wait_k(), _wait_k_batch()
    losses = []
    for weight in (0.0, 0.3):
        torch.manual_seed(1)
        losses.append(wait_k_risk_loss(model, batch, 1, RiskConfig(likelihood_weight=weight)).total)
    torch.testing.assert_close(losses[1] - losses[0], 0.3 * model.loss(batch, 1, 0.0).total, check_dtype=False)


@pytest.mark.learning
def test_a_wait_k_model_learns_to_write_a_reordered_reference_in_its_own_order() -> None:
    """With k = 1 the first token of the source, the last of the reference, is all that it knows at first."""
    torch.manual_seed(0)
    model = Seq2SeqModel.build(Seq2SeqConfig(16, 16, True, 32, 64, 2, 1, 1, 0.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scores = []
    for _ in range(120):
        source = torch.randint(6, 16, (64, 4))
        target = torch.cat([source.flip(1), torch.full((64, 1), END)], 1)
        lengths = torch.full((64,), 4), torch.full((64,), 5)
        batch = Batch(source, lengths[0], target, lengths[1])
        loss = wait_k_risk_loss(model, batch, 1, RiskConfig(samples=8, order_weights=(1.0,)))
        optimizer.zero_grad()
        (loss.total / loss.tokens).backward()
        optimizer.step()
        scores.append(1 - float(loss.likelihood / loss.tokens))
    assert sum(scores[:5]) / 5 < 0.5
    assert sum(scores[-5:]) / 5 > 0.7
