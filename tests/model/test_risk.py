"""Minimum risk and the bigram loss: by hand, gradients against automatic differentiation, and that they learn."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from simulmt.model.ctc import Alignments, CTCConfig, CTCModel
from simulmt.model.layers import Batch
from simulmt.model.risk import (
    RiskConfig,
    SampledTranslations,
    bigram_loss,
    compute_advantages,
    inference_path_loss,
    ngram_rewards,
    policy_gradient,
    risk_loss,
    sample_tokens,
    wait_k_risk_loss,
)
from simulmt.model.seq2seq import Seq2SeqConfig, Seq2SeqModel
from simulmt.model.transducer import TransducerConfig, TransducerModel
from simulmt.text import BLANK, END, PAD, SPECIAL_SYMBOLS

from .helpers import randomise

V = 5
A, B, C = (symbol for symbol in range(V) if symbol != BLANK and symbol != END)


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


def test_a_word_repeated_in_the_right_place_earns_no_second_reward() -> None:
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
    tokens, counts = sample_tokens(model, model.start(H, None, 2), delay=1, longest=2)
    assert not set(tokens.unique().tolist()) & set(range(len(SPECIAL_SYMBOLS))) - {END, PAD}
    assert (counts == torch.where(tokens[:, 0] == END, 1, 2)).all()
    assert ((tokens[:, 1] == PAD) == (tokens[:, 0] == END)).all()
    allowed = [END, *range(len(SPECIAL_SYMBOLS), 12)]
    first = model.decode(H[:1], None, torch.tensor([[6, 6]]), 1)[0] @ model.target_embedding.weight.T
    for position, rows in ((0, tokens), (1, tokens[tokens[:, 0] == 6])):
        expected = first[position, allowed].softmax(-1)
        found = (rows[:, position, None] == torch.tensor(allowed)).double().mean(0)
        torch.testing.assert_close(found, expected, rtol=0, atol=4 * (0.25 / len(rows)) ** 0.5)


def test_at_a_low_temperature_the_greedy_translation_is_drawn() -> None:
    model = _wait_k().eval()
    torch.nn.init.normal_(model.target_embedding.weight, std=0.4)
    H = model.encoder(torch.randint(6, 12, (1, 4))).expand(50, -1, -1)
    drawn, _ = sample_tokens(model, model.start(H, None, 4), delay=1, longest=4, temperature=1e-4)
    assert len({tuple(tokens) for tokens in drawn.tolist()}) == 1
    logits = model.decode(H[:1], None, drawn[:1], 1)[0] @ model.target_embedding.weight.T
    logits[:, [symbol for symbol in range(len(SPECIAL_SYMBOLS)) if symbol != END]] = -torch.inf
    written = drawn[0] != PAD
    assert (logits.argmax(-1) == drawn[0])[written].all()


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_wait_k_gradient_is_that_of_the_sampled_tokens(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    model, batch = _wait_k(), _wait_k_batch()
    tokens = torch.tensor([[6, 7, END], [8, END, PAD], [9, 9, 9], [END, PAD, PAD]])  # two of each sentence
    monkeypatch.setattr("simulmt.model.risk.sample_tokens", lambda *_: (tokens, (tokens != PAD).sum(1)))
    rewards = torch.randn(2, 2, 3, dtype=torch.float64)
    monkeypatch.setattr("simulmt.model.risk.compute_advantages", lambda *_: rewards)
    loss = wait_k_risk_loss(model, batch, 2, RiskConfig(samples=2, temperature=temperature))
    found = torch.autograd.grad(loss.total, list(model.parameters()))
    source, lengths = batch.source.repeat_interleave(2, 0), batch.source_lengths.repeat_interleave(2)
    log_p = (model(source, lengths, tokens, 2) / temperature).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    plain = -(rewards.flatten(0, 1) * log_p * (tokens != PAD)).sum()
    for ours, theirs in zip(found, torch.autograd.grad(plain, list(model.parameters())), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_wait_k_rewards_are_not_discounted() -> None:
    """A discount per token written rewards translations that omit words."""
    model, batch, gradients = _wait_k(), _wait_k_batch(), []
    for discount in (0.5, 1.0):
        torch.manual_seed(1)
        loss = wait_k_risk_loss(model, batch, 1, RiskConfig(discount=discount))
        gradients.append(
            torch.cat([each.flatten() for each in torch.autograd.grad(loss.total, list(model.parameters()))])
        )
    assert gradients[0].abs().sum() > 0
    torch.testing.assert_close(*gradients)


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
        source = torch.randint(6, 16, (32, 3))
        target = torch.cat([source.flip(1), torch.full((32, 1), END)], 1)
        lengths = torch.full((32,), 3), torch.full((32,), 4)
        batch = Batch(source, lengths[0], target, lengths[1])
        loss = wait_k_risk_loss(model, batch, 1, RiskConfig(samples=8, order_weights=(1.0,)))
        optimizer.zero_grad()
        (loss.total / loss.tokens).backward()
        optimizer.step()
        scores.append(1 - float(loss.likelihood / loss.tokens))
    assert sum(scores[:5]) / 5 < 0.3
    assert sum(scores[-5:]) / 5 > 0.6


def collapsed(path: tuple[int, ...]) -> list[int]:
    kept = [symbol for i, symbol in enumerate(path) if i == 0 or symbol != path[i - 1]]
    return [symbol for symbol in kept if symbol != BLANK]


def bigrams(symbols: list[int]) -> Counter[tuple[int, int]]:
    return Counter(zip([-1, *symbols], symbols, strict=False))


def by_enumeration(p: Tensor, labels: list[int]) -> float:
    """Return 1 - F1, computed from the probabilities of all paths."""
    expected: Counter[tuple[int, int]] = Counter()
    for path in product(range(V), repeat=p.shape[0]):
        chance = float(torch.stack([p[frame, symbol] for frame, symbol in enumerate(path)]).prod())
        for bigram, count in bigrams(collapsed(path)).items():
            expected[bigram] += chance * count  # type: ignore[assignment]
    reference = bigrams(labels)
    matched = sum(min(float(expected[bigram]), count) for bigram, count in reference.items())
    return 1 - 2 * matched / (sum(expected.values()) + sum(reference.values()))


def loss_of(logits: Tensor, sentences: list[list[int]], frames: list[int]) -> Tensor:
    longest = max(map(len, sentences))
    target = torch.tensor([sentence + [0] * (longest - len(sentence)) for sentence in sentences])
    lengths = torch.tensor([len(sentence) for sentence in sentences])
    return bigram_loss(logits, torch.eye(V).to(logits), Alignments.of(target, lengths, torch.tensor(frames))).total


@pytest.mark.parametrize(
    "labels", [[A, END], [A, B, END], [A, A, END], [A, B, A, B, END], [A, A, A], [C, A, B, C, A, END], [END]]
)
@pytest.mark.parametrize("sharpness", [0.3, 3.0])
def test_equals_the_sum_over_all_paths(labels: list[int], sharpness: float) -> None:
    logits = torch.randn(1, 5, V, generator=torch.Generator().manual_seed(len(labels)), dtype=torch.float64) * sharpness
    found = loss_of(logits, [labels], [5]) / len(labels)
    assert float(found) == pytest.approx(by_enumeration(logits[0].softmax(-1), labels), abs=1e-9)


def one_hot(path: list[int]) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor([path]), V).double() * 60


def test_a_perfect_translation_has_no_loss() -> None:
    assert float(loss_of(one_hot([A, A, BLANK, B, BLANK, END]), [[A, B, END]], [6])) == pytest.approx(0, abs=1e-9)


def test_a_moved_phrase_loses_only_the_ngrams_at_its_borders() -> None:
    """A B | C END against C | A B END: of four bigrams each, A B is in both."""
    assert float(loss_of(one_hot([C, A, B, END]), [[A, B, C, END]], [4])) / 4 == pytest.approx(1 - 1 / 4)


def test_a_repeated_bigram_counts_as_often_as_the_reference_has_it() -> None:
    written = one_hot([A, B, A, B, A, B])
    assert float(loss_of(written, [[A, B]], [6])) / 2 == pytest.approx(1 - 2 * 2 / (6 + 2))


def test_padding_changes_nothing() -> None:
    logits = torch.randn(2, 6, V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    apart = loss_of(logits[:1], [[A, B, END]], [6]) + loss_of(logits[1:, :4], [[C, END]], [4])
    torch.testing.assert_close(loss_of(logits, [[A, B, END], [C, END]], [6, 4]), apart)


def test_sentences_without_labels_are_skipped() -> None:
    alignments = Alignments.of(torch.tensor([[A, END], [0, 0]]), torch.tensor([2, 0]), torch.tensor([4, 4]))
    loss = bigram_loss(torch.zeros(2, 4, V), torch.eye(V), alignments)
    assert (int(loss.tokens), int(loss.skipped)) == (2, 1)


def test_gradients_are_finite_where_blanks_are_certain() -> None:
    logits = one_hot([BLANK, BLANK, A, END]).requires_grad_()
    loss_of(logits, [[A, END]], [4]).backward()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


def test_the_loss_of_a_model_is_on_the_inference_path() -> None:
    model = randomise(CTCModel.build(CTCConfig(9, V, width=8, inner=8, heads=2, layers=1)))
    source, lengths = torch.tensor([[6, 7, 8], [6, 5, 0]]), torch.tensor([3, 2])
    target, target_lengths = torch.tensor([[A, B, END], [C, END, 0]]), torch.tensor([3, 2])
    expected = loss_of(model(source, lengths, 2), [[A, B, END], [C, END]], [6, 4])
    batch = Batch(source, lengths, target, target_lengths)
    torch.testing.assert_close(inference_path_loss(model, batch, delay=2).total, expected)


def test_in_chunks_it_is_the_loss_of_plain_probabilities_and_so_are_its_gradients() -> None:
    """Chunks that end inside sentences, between them and at the end; padding; labels that occur twice."""
    generator = torch.Generator().manual_seed(3)
    target = torch.randint(BLANK + 1, 9, (3, 6), generator=generator)
    target[0, 3:5] = target[0, :2]
    alignments = Alignments.of(target, torch.tensor([6, 4, 1]), torch.tensor([8, 8, 5]))
    frames = torch.randn(3, 8, 4, generator=generator, dtype=torch.float64).requires_grad_()
    table = torch.randn(9, 4, generator=generator, dtype=torch.float64).requires_grad_()
    expected = [plain_loss(frames @ table.T, alignments)]
    expected += torch.autograd.grad(expected[0], (frames, table))
    for chunk in (1, 2, 5, 8, 23, 24, 100):
        found = [bigram_loss(frames, table, alignments, chunk).total]
        found += torch.autograd.grad(found[0], (frames, table))
        torch.testing.assert_close(found, expected)


def plain_loss(logits: Tensor, alignments: Alignments) -> Tensor:
    """Return the loss with all pairs of frames and symbols stored, per sentence; the start symbol comes last."""
    total = logits.new_zeros(())
    is_symbol = torch.arange(logits.shape[-1] + 1) != BLANK
    for scores, labels, U, T in zip(logits, alignments.columns[:, 1:], *alignments[1:3], strict=True):
        p = F.pad(scores[:U].softmax(-1), (0, 1, 1, 0)) + F.pad(torch.ones(1, 1), (scores.shape[-1], 0, 0, int(U)))
        E = p.new_zeros(len(is_symbol), len(is_symbol))
        for i, j in combinations(range(int(U) + 1), 2):
            pair = p[i][:, None] * p[j] * p[i + 1 : j, BLANK].prod()
            E = E + (pair if j > i + 1 else pair - pair.diag().diag())
        written = E[is_symbol][:, is_symbol].sum()
        matched = sum(E[u, v].clamp(max=n) for (u, v), n in bigrams(labels[:T].tolist()).items())
        total = total + (1 - 2 * matched / (written + T)) * T
    return total


def test_in_half_precision_it_is_nearly_the_same() -> None:
    """As in training: network and backward pass under autocast, weights and loss in fp32."""
    generator = torch.Generator().manual_seed(4)
    target = torch.randint(BLANK + 1, 40, (4, 6), generator=generator)
    alignments = Alignments.of(target, torch.tensor([6, 4, 1, 6]), torch.tensor([12, 12, 5, 9]))
    frames = torch.randn(4, 12, 16, generator=generator).requires_grad_()
    table = torch.randn(40, 16, generator=generator).requires_grad_()
    exact = bigram_loss(frames.double(), table.double(), alignments).total
    expected = torch.autograd.grad(exact, (frames, table))
    with torch.autocast("cpu", torch.bfloat16):
        loss = bigram_loss(frames, table, alignments, chunk=20).total
        found = torch.autograd.grad(loss, (frames, table))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=2e-3)
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm() / other.norm()) < 2e-2
