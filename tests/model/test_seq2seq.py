from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from simulmt.errors import ConfigError, VocabularyError
from simulmt.model.layers import Batch, project_and_loss
from simulmt.model.seq2seq import Seq2SeqConfig, Seq2SeqModel, proportional_rates
from simulmt.text import END, START

from .helpers import Allocations, assert_same, gradients, pad, parameter_count, randomise, sum_gradients

VOCABULARY = 17
PAIRS = [([7, 8, 9, 10, 6], [6, 7, 7, END]), ([11], [8, 9, 10, 11, 12, END]), ([6, 12, 8], [END])]
DELAYS = range(1, 6)


def make_model(causal: bool, policy_inner: int = 0, dropout: float = 0.0) -> Seq2SeqModel:
    sizes = {"width": 8, "inner": 16, "heads": 2, "encoder_layers": 2, "decoder_layers": 3}
    config = Seq2SeqConfig(VOCABULARY, VOCABULARY, causal, **sizes, dropout=dropout, policy_inner=policy_inner)
    return randomise(Seq2SeqModel.build(config))


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(6, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def batch() -> Batch:
    (source, source_lengths), (target, target_lengths) = (pad(side) for side in zip(*PAIRS, strict=True))
    return Batch(source, source_lengths, target, target_lengths)


def inputs_of(target: Tensor) -> Tensor:
    """Return the decoder input: START and all tokens but the last."""
    return torch.cat([torch.full_like(target[:, :1], START), target[:, :-1]], 1)


# Streaming and whole sentences


@pytest.mark.parametrize("target_length", [2, 9])
@pytest.mark.parametrize("delay", DELAYS)
def test_a_word_is_written_from_what_its_policy_has_read(delay: int, target_length: int) -> None:
    model = make_model(causal=True)
    source, target = tokens(2, 6), tokens(2, target_length, seed=1)
    expected = model(source, torch.tensor([6, 6]), target, delay)
    for t in range(target_length):
        read = min(t + delay, 6)
        logits = model(source[:, :read], torch.tensor([read, read]), target[:, : t + 1], delay)
        assert_same(logits[:, t], expected[:, t])


@pytest.mark.parametrize(("causal", "delay"), [(False, None), (False, 2), (True, None), (True, 1), (True, 3)])
@torch.no_grad()
def test_encode_and_steps_are_forward_also_with_padding(causal: bool, delay: int | None) -> None:
    model = make_model(causal)
    source, source_lengths, target, _ = batch()
    state = model.encode(source, source_lengths, target.shape[1])
    logits = []
    for token in inputs_of(target).split(1, 1):
        step, state = model.step(token, state, delay)
        logits.append(step)
    assert_same(torch.stack(logits, 1), model(source, source_lengths, target, delay))
    assert state.past[0].length == target.shape[1]


@torch.no_grad()
def test_hypotheses_side_by_side_are_written_as_if_alone() -> None:
    """Two hypotheses per sentence in one cache; before the third token both continue the second, then they swap."""
    model = make_model(causal=False)
    source, source_lengths, _, _ = batch()
    words = inputs_of(tokens(3 * 2, 4)).view(3, 2, 4)
    state = model.encode(source, source_lengths, 2 * 4)
    visible = torch.zeros(3, 2, 0, dtype=torch.bool)
    written = words.clone()
    for t, parents in enumerate([[0, 1], [0, 1], [1, 1], [1, 0]]):
        visible = torch.cat([visible[:, parents], torch.eye(2, dtype=torch.bool).expand(3, 2, 2)], 2)
        written[:, :, :t] = written[:, parents, :t]
        logits, state = model.step(words[:, :, t], state, visible=visible)
        alone = model.encode(source.repeat_interleave(2, 0), source_lengths.repeat_interleave(2), t + 1)
        for token in written.flatten(0, 1)[:, : t + 1].split(1, 1):
            expected, alone = model.step(token, alone)
        assert_same(logits, expected)


# Proportional reading


def test_rates_are_source_tokens_per_target_token_and_at_least_one() -> None:
    assert proportional_rates(batch()).tolist() == [5 / 4, 1, 3]


@pytest.mark.parametrize("delay", DELAYS)
def test_with_proportional_reading_a_word_depends_on_the_source_up_to_its_share(delay: int) -> None:
    model = make_model(causal=True)
    source, target = torch.arange(6, 15), torch.arange(6, 12)  # a different token in every position
    H = model.encoder(source[None])
    states = model.decode(H, None, target[None], delay, torch.tensor([1.5]))[0]
    for t, last in enumerate([0, 1, 3, 4, 6, 7]):  # floor(1.5 t)
        (by_state,) = torch.autograd.grad(states[t].sum() ** 2, H, retain_graph=True)
        assert (by_state[0].abs().sum(-1) > 0).tolist() == [s < last + delay for s in range(9)]


@torch.no_grad()
def test_steps_with_rates_are_a_decoding_with_rates() -> None:
    model = make_model(causal=True)
    source, source_lengths, target, _ = batch()
    rates = torch.tensor([1.25, 1.0, 3.0])
    state = model.encode(source, source_lengths, target.shape[1])
    logits = []
    for token in inputs_of(target).split(1, 1):
        step, state = model.step(token, state, 1, rates=rates)
        logits.append(step)
    H, mask = model.encoder(source, source_mask := torch.arange(5) < source_lengths[:, None]), source_mask
    assert_same(torch.stack(logits, 1), model.decode(H, mask, target, 1, rates) @ model.target_embedding.weight.T)


# What depends on what


@pytest.mark.parametrize(("causal", "delay"), [*((True, k) for k in DELAYS), (True, None), (False, None)])
def test_a_word_depends_on_exactly_the_source_and_target_its_policy_allows(causal: bool, delay: int | None) -> None:
    model = make_model(causal)
    source, target = torch.arange(6, 14), torch.arange(6, 13)  # a different token in every position
    logits = model(source[None], torch.tensor([8]), target[None], delay)[0]
    probe = torch.randn(logits.shape[-1], dtype=logits.dtype, generator=torch.Generator().manual_seed(1))
    for t in range(7):
        (by_source,) = torch.autograd.grad(logits[t] @ probe, model.encoder.embedding.weight, retain_graph=True)
        seen = (by_source[source].abs().sum(-1) > 0).tolist()
        assert seen == [delay is None or s < t + delay for s in range(8)]
    for changed in range(7):
        other = target.clone()
        other[changed] = 15
        difference = (model(source[None], torch.tensor([8]), other[None], delay)[0] - logits).abs().amax(-1) > 1e-12
        assert difference.tolist() == [t > changed for t in range(7)]


# The loss


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("causal", "delay"), [(False, None), (True, 2)])
def test_the_loss_is_cross_entropy_without_padding(causal: bool, delay: int | None, smoothing: float) -> None:
    model = make_model(causal)
    source, source_lengths, target, target_lengths = batch()
    loss = model.loss(Batch(source, source_lengths, target, target_lengths), delay, smoothing)
    logits = model(source, source_lengths, target, delay).transpose(1, 2)
    labels = target.where(torch.arange(target.shape[1]) < target_lengths[:, None], -100)
    expected = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    assert_same(loss.total, expected)
    assert_same(loss.likelihood, F.cross_entropy(logits, labels, reduction="sum").detach())
    assert (loss.tokens.item(), loss.skipped.item()) == (int(target_lengths.sum()), 0)
    assert_same(gradients(model, loss.total), gradients(model, expected))


def test_a_padding_symbol_inside_a_target_counts_as_any_other() -> None:
    model = make_model(causal=False)
    source, target, three = torch.tensor([[6, 7, 8]]), torch.tensor([[6, 0, END]]), torch.tensor([3])
    logits = model(source, three, target)
    expected = F.cross_entropy(logits[0], target[0], label_smoothing=0.1, reduction="sum")
    assert_same(model.loss(Batch(source, three, target, three)).total, expected)


@pytest.mark.parametrize(("causal", "delay"), [(False, None), (True, 1), (True, 2), (True, 5)])
def test_a_padded_batch_is_the_sum_of_its_sentences(causal: bool, delay: int | None) -> None:
    model = make_model(causal)
    together = model.loss(batch(), delay=delay)
    alone = [model.loss(Batch(*pad([x]), *pad([y])), delay) for x, y in PAIRS]
    for field, parts in zip(together, zip(*alone, strict=True), strict=True):
        assert_same(field, torch.stack(parts).sum(0))
    summed = sum_gradients([gradients(model, loss.total) for loss in alone])
    assert_same(gradients(model, together.total), summed)


def test_the_loss_never_stores_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Seq2SeqConfig(9, 500, width=4, inner=4, heads=1, encoder_layers=1, decoder_layers=1)
    model = Seq2SeqModel.build(config)
    monkeypatch.setattr("simulmt.model.seq2seq.project_and_loss", partial(project_and_loss, chunk=7))
    source, target, lengths = torch.full((2, 3), 6), torch.full((2, 20), 7), torch.tensor([3, 3])
    with Allocations(2 * 20 * 500) as allocations:
        model.loss(Batch(source, lengths, target, torch.tensor([20, 20]))).total.backward()
    assert allocations.operations == []
    assert allocations.largest == 7 * 500


# The policy


def make_deciding_model(dropout: float = 0.0) -> Seq2SeqModel:
    """Make a model with a policy, and so sharp that its distributions change with every source token."""
    model = make_model(causal=True, policy_inner=5, dropout=dropout)
    with torch.no_grad():
        model.final_norm.weight.mul_(5)
        for layer in model.layers:
            layer.cross_attention.key_value.weight *= 8
    return model


def states_by_prefix(model: Seq2SeqModel, source: list[int], target: list[int], seen: list[int]) -> Tensor:
    """Return the decoder states of a sentence, where step t sees the first seen[t] tokens of the source."""
    H = model.encoder(torch.tensor([source]))
    x = model.target_embedding.embed(torch.tensor([[START, *target[:-1]]]))
    visible = torch.arange(len(source)) < torch.tensor(seen)[:, None]
    for layer in model.layers:
        x, _ = layer(x, layer.cross_attention.project(H), visible, causal=True)
    return model.final_norm(x)[0]


def overlap(one: Tensor, other: Tensor) -> float:
    """Return the overlap of two distributions, given as logits."""
    return sum(map(min, one.softmax(-1).tolist(), other.softmax(-1).tolist()))


@pytest.mark.parametrize(
    ("partial", "whole", "expected"),
    [
        ([0.5, 0.3, 0.1, 0.1], [0.5, 0.3, 0.1, 0.1], 1.0),
        ([0.5, 0.3, 0.1, 0.1], [0.1, 0.3, 0.1, 0.5], 0.6),
        ([0.5, 0.5, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0], 0.5),
        ([1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0], 0.0),
    ],
)
def test_stability_by_hand(
    partial: list[float], whole: list[float], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Seq2SeqModel.build(Seq2SeqConfig(9, 4, True, 4, 4, 1, 1, 1, policy_inner=2)).double()
    model.target_embedding.weight.data = torch.eye(4).double()  # states are logits
    states = {
        delay: torch.tensor([[each]], dtype=torch.float64).clamp(min=1e-30).log()
        for delay, each in ((1, partial), (None, whole))
    }
    monkeypatch.setattr(model, "decode", lambda _H, _mask, _target, delay, _rates=None: states[delay])
    one = torch.tensor([1])
    found = model.stability(Batch(torch.tensor([[6]]), one, torch.tensor([[2]]), one), 1)
    assert_same(found[0], states[1][0])
    assert_same(found[1], torch.tensor([expected], dtype=torch.float64))


@pytest.mark.parametrize("delay", DELAYS)
@torch.no_grad()
def test_stability_is_the_overlap_with_the_distribution_given_the_whole_source(delay: int) -> None:
    model = make_deciding_model()
    source, source_lengths, target, target_lengths = batch()
    partial, whole = (model(source, source_lengths, target, each) for each in (delay, None))
    inside = [(row, t) for row, length in enumerate(target_lengths.tolist()) for t in range(length)]
    states, found = model.stability(batch(), delay)
    assert_same(found, torch.tensor([overlap(partial[at], whole[at]) for at in inside], dtype=torch.float64))
    assert_same(states @ model.target_embedding.weight.T, torch.stack([partial[at] for at in inside]))
    # Later steps see the whole source as well, but attend to steps that have not.
    sees_all = [bool(source_lengths[row] <= delay) for row, _ in inside]
    assert [value > 1 - 1e-12 for value in found.tolist()] == sees_all
    assert found.max() <= 1
    assert found.min() < 0.9 or delay > 2


@torch.no_grad()
def test_stability_with_proportional_reading() -> None:
    model = make_deciding_model()
    rates = torch.tensor([1.5, 1.0, 3.0])
    _, found = model.stability(batch(), 1, rates)
    expected = []
    for (source, target), rate in zip(PAIRS, rates.tolist(), strict=True):
        seen = [min(len(source), int(rate * t) + 1) for t in range(len(target))]
        parts = (states_by_prefix(model, source, target, each) for each in (seen, [len(source)] * len(target)))
        table = model.target_embedding.weight.T
        expected += [overlap(one @ table, other @ table) for one, other in zip(*parts, strict=True)]
    assert_same(found, torch.tensor(expected, dtype=torch.float64))
    assert not torch.equal(found, model.stability(batch(), 1)[1])


def test_stability_does_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_deciding_model()
    expected = model.stability(batch(), 1)
    monkeypatch.setattr("simulmt.model.seq2seq.FRAMES_PER_CHUNK", 3)
    assert_same(model.stability(batch(), 1), expected)


@pytest.mark.parametrize("rates", [None, torch.tensor([1.5, 1.0, 3.0])])
def test_the_loss_of_the_policy_is_cross_entropy(rates: Tensor | None) -> None:
    model = make_deciding_model().float()
    assert model.policy is not None
    loss = model.policy_loss(batch(), 1, rates)
    states, stability = model.stability(batch(), 1, rates)
    chances = model.policy(states).sigmoid()
    expected = -(stability * chances.log() + (1 - stability) * (1 - chances).log()).sum()
    assert_same(loss.total, expected, tolerance=1e-5)
    assert_same(loss.likelihood, expected.detach(), tolerance=1e-5)
    assert (loss.tokens.item(), loss.skipped.item()) == (sum(len(target) for _, target in PAIRS), 0)
    assert not loss.likelihood.requires_grad
    own = dict(model.policy.named_parameters())
    by_hand = torch.autograd.grad(expected, list(own.values()))
    loss.total.backward()
    assert_same([parameter.grad for parameter in own.values() if parameter.grad is not None], by_hand, tolerance=1e-4)


def test_only_the_policy_learns_from_its_loss() -> None:
    model = make_deciding_model().float()
    model.policy_loss(batch(), 1).total.backward()
    learning = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert learning == {f"policy.{layer}.{part}" for layer in ("expand", "contract") for part in ("weight", "bias")}
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters() if parameter.grad is not None)


def test_a_padded_batch_is_the_sum_of_its_sentences_to_the_policy() -> None:
    model = make_deciding_model().float()
    together = model.policy_loss(batch(), 2)
    alone = [model.policy_loss(Batch(*pad([x]), *pad([y])), 2) for x, y in PAIRS]
    for field, parts in zip(together, zip(*alone, strict=True), strict=True):
        assert_same(field, torch.stack(parts).sum(0), tolerance=1e-5)


def test_the_policy_learns_without_dropout() -> None:
    model = make_deciding_model(dropout=0.5).float()
    expected = model.policy_loss(batch(), 1)
    model.train()
    modes = {name: module.training for name, module in model.named_modules()}
    assert not torch.equal(model.loss(batch(), 1).total, model.loss(batch(), 1).total)
    assert_same(model.policy_loss(batch(), 1), expected)
    assert {name: module.training for name, module in model.named_modules()} == modes == dict.fromkeys(modes, True)


@torch.no_grad()
def test_a_policy_changes_no_translation() -> None:
    plain, deciding = make_model(causal=True), make_deciding_model()
    weights = {name: each for name, each in deciding.state_dict().items() if not name.startswith("policy.")}
    plain.load_state_dict(weights)
    source, source_lengths, target, _ = batch()
    assert torch.equal(plain(source, source_lengths, target, 2), deciding(source, source_lengths, target, 2))


def test_parameter_count_of_the_paper() -> None:
    with torch.device("meta"):
        models = [Seq2SeqModel.build(Seq2SeqConfig(32_000, 32_000, causal)) for causal in (True, False)]
    attention = 4 * (512 * 512 + 512)
    feed_forward = 512 * 2048 + 2048 + 2048 * 512 + 512
    norm = 2 * 512
    encoder = 6 * (attention + feed_forward + 2 * norm) + norm
    decoder = 6 * (2 * attention + feed_forward + 3 * norm) + norm
    for model in models:
        assert parameter_count(model) == 2 * 32_000 * 512 + encoder + decoder == 76_908_544
        assert sum(value.numel() for value in model.state_dict().values()) == 76_908_544


# Bad input


@pytest.mark.parametrize("bad", [-1, VOCABULARY])
def test_tokens_outside_the_vocabularies_are_named(bad: int) -> None:
    model, good, wrong, one = make_model(causal=True), torch.tensor([[6]]), torch.tensor([[bad]]), torch.tensor([1])
    with pytest.raises(VocabularyError, match=f"source token id {bad} "):
        model(wrong, one, good)
    with pytest.raises(VocabularyError, match=f"source token id {bad} "):
        model.loss(Batch(wrong, one, good, one))
    with pytest.raises(VocabularyError, match=f"source token id {bad} "):
        model.encode(wrong, one, 1)
    with pytest.raises(VocabularyError, match=f"target token id {bad} "):
        model(good, one, wrong)
    with pytest.raises(VocabularyError, match=f"target token id {bad} "):
        model.loss(Batch(good, one, wrong, one))


@pytest.mark.parametrize("delay", [0, -4])
def test_a_delay_below_one_is_refused(delay: int) -> None:
    model, token, one = make_model(causal=True), torch.tensor([[6]]), torch.tensor([1])
    with pytest.raises(ConfigError, match=f"at least 1, got {delay}"):
        model(token, one, token, delay)
    with pytest.raises(ConfigError, match=f"at least 1, got {delay}"):
        model.step(token, model.encode(token, one, 1), delay)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("encoder_layers", 0, "encoder_layers must be at least 1, got 0"),
        ("decoder_layers", 0, "decoder_layers must be at least 1, got 0"),
        ("dropout", 1.0, "dropout .* got 1.0"),
        ("heads", 5, r"multiple of heads \(5\)"),
        ("heads", 0, r"multiple of heads \(0\)"),
        ("policy_inner", -1, "policy_inner must not be negative, got -1"),
        ("policy_inner", 8, "policy_inner is for wait-k models"),
    ],
)
def test_bad_settings_are_named(setting: str, value: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Seq2SeqConfig(10, 10, **{setting: value})  # type: ignore[arg-type]
