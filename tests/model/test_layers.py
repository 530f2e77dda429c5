from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from simulmt.errors import ConfigError, VocabularyError
from simulmt.model.layers import (
    Attention,
    DecoderLayer,
    Embedding,
    Encoder,
    EncoderLayer,
    KeysValues,
    KeyValueBuffer,
    NormPlacement,
    at_least_float32,
    check_delay,
    check_tokens,
    length_mask,
    look_ahead_mask,
    project_and_loss,
    sinusoids,
    tokens_seen,
)
from simulmt.text import PAD

from .helpers import Allocations, assert_same, pad, randomise

DELAYS = range(1, 6)
LENGTH = 9
VOCABULARY = 12
B, U, C, D, V = 3, 5, 4, 6, 11
CHUNKS = [1, 2, 4, 7, B * U, 1000]  # below a sentence, across sentences, above everything


def make_encoder(causal: bool = True, layers: int = 3, look_ahead_layer: int = 0) -> Encoder:
    return randomise(
        Encoder(VOCABULARY, 8, 16, 2, layers, dropout=0.0, causal=causal, look_ahead_layer=look_ahead_layer)
    )


def sources(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def visible(delay: int) -> Tensor:
    """Return which tokens each state may depend on, as [state, token]."""
    return torch.tensor([[token <= state + delay - 1 for token in range(LENGTH)] for state in range(LENGTH)])


def dependencies_by_gradient(encoder: Encoder, delay: int) -> Tensor:
    """Use a different token in every position, so that rows of the table with a gradient are the positions seen."""
    tokens = torch.arange(1, LENGTH + 1)
    H = encoder(tokens[None], delay=delay)
    probe = torch.randn(H.shape[-1], dtype=H.dtype, generator=torch.Generator().manual_seed(1))
    rows = []
    for t in range(LENGTH):
        (by_table,) = torch.autograd.grad(H[0, t] @ probe, encoder.embedding.weight, retain_graph=True)
        rows.append(by_table[tokens].abs().sum(-1) > 0)
    return torch.stack(rows)


def dependencies_by_perturbation(encoder: Encoder, delay: int) -> Tensor:
    tokens = torch.arange(1, LENGTH + 1)
    with torch.no_grad():
        before = encoder(tokens[None], delay=delay)[0]
        columns = []
        for s in range(LENGTH):
            changed = tokens.clone()
            changed[s] = VOCABULARY - 1
            columns.append((encoder(changed[None], delay=delay)[0] - before).abs().amax(-1) > 1e-12)
    return torch.stack(columns, 1)


@pytest.mark.parametrize("looking", range(3))
@pytest.mark.parametrize("delay", DELAYS)
def test_a_state_depends_on_exactly_the_tokens_its_delay_allows(delay: int, looking: int) -> None:
    encoder = make_encoder(look_ahead_layer=looking)
    assert torch.equal(dependencies_by_gradient(encoder, delay), visible(delay))
    assert torch.equal(dependencies_by_perturbation(encoder, delay), visible(delay))


def test_a_bidirectional_state_depends_on_every_token() -> None:
    encoder = make_encoder(causal=False)
    assert dependencies_by_gradient(encoder, 1).all()
    assert dependencies_by_perturbation(encoder, 1).all()


@settings(deadline=None, max_examples=40)
@given(length=st.integers(1, 12), delay=st.integers(1, 6), seed=st.integers(0, 99), looking=st.integers(0, 2))
def test_a_prefix_gives_the_states_of_the_whole_sentence(length: int, delay: int, seed: int, looking: int) -> None:
    """A stream may compute a state as soon as its look-ahead is read."""
    encoder, source = make_encoder(look_ahead_layer=looking), sources(2, length, seed)
    whole = encoder(source, delay=delay)
    for read in range(delay, length + 1):
        finished = read - delay + 1
        assert_same(encoder(source[:, :read], delay=delay)[:, :finished], whole[:, :finished])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("delay", [1, 3, 5])
def test_padding_changes_no_state(causal: bool, delay: int) -> None:
    encoder = make_encoder(causal)
    sentences = [[3, 1, 4, 1, 5, 9], [2, 7], [8], [2, 8, 1]]
    # Not PAD after the end: only the mask may exclude it.
    batch, lengths = pad(sentences, filler=10)
    H = encoder(batch, length_mask(lengths, batch.shape[1], batch.device), delay)
    for row, sentence in zip(H, sentences, strict=True):
        alone = encoder(torch.tensor([sentence]), delay=delay)[0]
        assert_same(row[: len(sentence)], alone)


word_starts = st.lists(st.booleans(), min_size=VOCABULARY, max_size=VOCABULARY)


def seeing_words(starts: list[bool], look_ahead_layer: int = 0) -> Encoder:
    encoder = Encoder(VOCABULARY, 8, 16, 2, 3, dropout=0.0, whole_words=True, look_ahead_layer=look_ahead_layer)
    randomise(encoder).mark_words(starts)
    return encoder


def parted(tokens: list[int], starts: list[bool]) -> list[list[int]]:
    """Return the tokens of each word."""
    found: list[list[int]] = []
    for token in tokens:
        found = [*found, [token]] if starts[token] or not found else [*found[:-1], [*found[-1], token]]
    return found


class TestWholeWords:
    @settings(deadline=None, max_examples=40)
    @given(starts=word_starts, delay=st.integers(1, 5), looking=st.integers(0, 2))
    def test_a_state_sees_the_rest_of_the_last_word_that_was_read(
        self, starts: list[bool], delay: int, looking: int
    ) -> None:
        ends = [end for word in parted(list(range(1, LENGTH + 1)), starts) for end in [word[-1]] * len(word)]
        allowed = [[token < ends[min(state + delay, LENGTH) - 1] for token in range(LENGTH)] for state in range(LENGTH)]
        assert dependencies_by_gradient(seeing_words(starts, looking), delay).tolist() == allowed

    @settings(deadline=None, max_examples=40)
    @given(starts=word_starts, delay=st.integers(1, 5), seed=st.integers(0, 99), looking=st.integers(0, 2))
    def test_whole_words_of_a_prefix_give_the_states_of_the_whole_sentence(
        self, starts: list[bool], delay: int, seed: int, looking: int
    ) -> None:
        encoder, source = seeing_words(starts, looking), sources(1, 12, seed)
        whole, read = encoder(source, delay=delay), 0
        for word in parted(source[0].tolist(), starts):
            read += len(word)
            finished = max(0, read - delay + 1)
            assert_same(encoder(source[:, :read], delay=delay)[:, :finished], whole[:, :finished])

    @settings(deadline=None, max_examples=20)
    @given(starts=word_starts, delay=st.integers(1, 5), looking=st.integers(0, 2))
    def test_padding_changes_no_state(self, starts: list[bool], delay: int, looking: int) -> None:
        encoder = seeing_words(starts, looking)
        sentences = [[3, 1, 4, 1, 5, 9], [2, 7], [8], [2, 8, 1]]
        batch, lengths = pad(sentences, filler=10)
        H = encoder(batch, length_mask(lengths, batch.shape[1], batch.device), delay)
        for row, sentence in zip(H, sentences, strict=True):
            assert_same(row[: len(sentence)], encoder(torch.tensor([sentence]), delay=delay)[0])

    @pytest.mark.parametrize("delay", DELAYS)
    def test_where_every_token_is_a_word_nothing_changes(self, delay: int) -> None:
        encoder, source = seeing_words([True] * VOCABULARY), sources(3, LENGTH)
        plain = make_encoder()
        plain.load_state_dict({name: x for name, x in encoder.state_dict().items() if name != "word_starts"})
        assert_same(encoder(source, delay=delay), plain(source, delay=delay))

    def test_how_many_tokens_are_seen(self) -> None:
        numbers = torch.tensor([[1, 1, 1, 2, 3, 3], [1, 2, 3, 4, 4, 4]])
        assert tokens_seen(numbers, 1).tolist() == [[3, 3, 3, 4, 6, 6], [1, 2, 3, 6, 6, 6]]
        assert tokens_seen(numbers, 3).tolist() == [[3, 4, 6, 6, 6, 6], [3, 6, 6, 6, 6, 6]]

    def test_until_words_are_marked_every_token_is_a_word(self) -> None:
        encoder = Encoder(VOCABULARY, 8, 16, 2, 1, dropout=0.0, whole_words=True)
        assert encoder.words(torch.tensor([[4, 4, 9]])).tolist() == [[1, 2, 3]]
        encoder.mark_words([token == 9 for token in range(VOCABULARY)])
        assert encoder.words(torch.tensor([[4, 4, 9, 4, 9]])).tolist() == [[0, 0, 1, 1, 2]]
        make_encoder().mark_words([False] * VOCABULARY)  # no effect without whole_words

    def test_a_bidirectional_encoder_sees_everything_anyway(self) -> None:
        with pytest.raises(ConfigError, match="whole_words is for causal encoders"):
            Encoder(VOCABULARY, 8, 16, 2, 1, dropout=0.0, causal=False, whole_words=True)


def split_in_projection(weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
    query, key_value = weight[: len(weight) // 3], weight[len(weight) // 3 :]
    query_bias, key_value_bias = bias[: len(query)], bias[len(query) :]
    return {
        "query.weight": query,
        "query.bias": query_bias,
        "key_value.weight": key_value,
        "key_value.bias": key_value_bias,
    }


def from_pytorch(layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> dict[str, Tensor]:
    """Return the weights of PyTorch's layer under our names."""
    names = {"norm1": "attention_norm", "linear1": "feed_forward.expand", "linear2": "feed_forward.contract"}
    attentions = {"self_attn": "attention"}
    if isinstance(layer, nn.TransformerDecoderLayer):
        names |= {"norm2": "cross_norm", "norm3": "feed_forward_norm"}
        attentions["multihead_attn"] = "cross_attention"
    else:
        names["norm2"] = "feed_forward_norm"
    weights = layer.state_dict()
    ours = {f"{b}.{kind}": weights[f"{a}.{kind}"] for a, b in names.items() for kind in ("weight", "bias")}
    for theirs, name in attentions.items():
        parts = split_in_projection(weights[f"{theirs}.in_proj_weight"], weights[f"{theirs}.in_proj_bias"])
        ours |= {f"{name}.{key}": value for key, value in parts.items()}
        ours |= {f"{name}.output.{kind}": weights[f"{theirs}.out_proj.{kind}"] for kind in ("weight", "bias")}
    return ours


def test_the_encoder_layer_is_pytorchs_own_pre_norm_layer() -> None:
    theirs = randomise(nn.TransformerEncoderLayer(8, 2, 16, 0.0, "relu", batch_first=True, norm_first=True))
    ours = EncoderLayer(8, 16, 2, 0.0).double()
    ours.load_state_dict(from_pytorch(theirs))
    x = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = look_ahead_mask(5, 5, 0, 2, x.device)
    expected = theirs.train()(x, src_mask=~mask)  # in training mode: the fused fast path is for inference only
    assert_same(ours(x, mask), expected)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("causal", [True, False])
def test_the_decoder_layer_is_pytorchs_own_layer(causal: bool, norm: NormPlacement) -> None:
    theirs = randomise(nn.TransformerDecoderLayer(8, 2, 16, 0.0, "relu", batch_first=True, norm_first=norm == "pre"))
    ours = DecoderLayer(8, 16, 2, 0.0, norm).double()
    ours.load_state_dict(from_pytorch(theirs))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 8, dtype=torch.float64, generator=generator)
    memory = torch.randn(2, 3, 8, dtype=torch.float64, generator=generator)
    keys = torch.tensor([[True, True, True], [True, True, False]])
    forbidden = look_ahead_mask(5, 5, 0, 1, x.device).logical_not() if causal else None
    expected = theirs(x, memory, tgt_mask=forbidden, memory_key_padding_mask=~keys)
    y, _ = ours(x, ours.cross_attention.project(memory), keys[:, None, None, :], causal=causal)
    assert_same(y, expected)


@torch.no_grad()
def test_steps_with_a_buffer_give_the_states_of_the_whole_sentence() -> None:
    layer = randomise(DecoderLayer(8, 16, 2, 0.0))
    generator = torch.Generator().manual_seed(0)
    context = layer.cross_attention.project(torch.randn(3, 4, 8, dtype=torch.float64, generator=generator))
    x = torch.randn(3, 4, 8, dtype=torch.float64, generator=generator)
    whole, _ = layer(x, context, None, causal=True)
    past, rows = KeyValueBuffer.like(context, positions=7), torch.tensor([2, 0])
    for t in range(4):
        y, past = layer(x[:, t : t + 1], context, None, past=past)
        assert_same(y, whole[:, t : t + 1], 1e-12)
        assert past.length == t + 1
        assert_same(past.select(rows).filled, KeysValues(*(side[rows] for side in past.filled)), 0)


def test_dropout_falls_on_the_embedding_and_the_residuals_and_never_on_attention_weights() -> None:
    torch.manual_seed(0)
    layer = EncoderLayer(8, 16, 2, dropout=1 - 1e-6).double().train()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    assert torch.equal(layer(x, None), x), "with all of both branches dropped only the residual is left"
    attention = layer.attention
    assert torch.equal(attention(x, attention.project(x)), attention(x, attention.project(x)))
    encoder = Encoder(VOCABULARY, 8, 16, 2, 1, dropout=0.5).double().train()
    assert not torch.equal(encoder(sources(1, 5)), encoder(sources(1, 5)))


def test_sinusoids_by_hand() -> None:
    waves = sinusoids(torch.tensor([0, 1, 50]), 6)
    slow = [1.0, 1 / 100, 1 / 10_000]  # from wavelength 2 pi to 10,000 * 2 pi in equal ratios
    expected = [[math.sin(p * w) for w in slow] + [math.cos(p * w) for w in slow] for p in (0, 1, 50)]
    assert_same(waves, torch.tensor(expected), 1e-6)


def test_an_embedding_is_scaled_and_knows_its_position() -> None:
    embedding = randomise(Embedding(VOCABULARY, 8))
    tokens = sources(2, 7)
    whole = embedding.embed(tokens)
    assert_same(embedding.embed(tokens[:, 3:], first_position=3), whole[:, 3:], 0)
    waves = sinusoids(torch.arange(7), 8).double()
    assert_same(whole - waves, embedding.weight[tokens] * 8**0.5, 1e-12)


def test_a_new_embedding_of_padding_is_zero() -> None:
    weight = Embedding(VOCABULARY, 8).weight
    assert not weight[PAD].any()
    assert weight[PAD + 1 :].any(-1).all()


def test_length_mask() -> None:
    assert length_mask(torch.tensor([3, 3]), 3, torch.device("cpu")) is None
    mask = length_mask(torch.tensor([2, 0, 3]), 3, torch.device("cpu"))
    assert mask is not None
    assert mask.tolist() == [[True, True, False], [False, False, False], [True, True, True]]


@pytest.mark.parametrize("delay", [0, -3])
def test_a_delay_below_one_is_refused(delay: int) -> None:
    encoder = make_encoder()
    with pytest.raises(ConfigError, match=f"at least 1, got {delay}"):
        check_delay(delay)
    with pytest.raises(ConfigError, match=f"at least 1, got {delay}"):
        encoder(sources(1, 3), delay=delay)


@pytest.mark.parametrize("bad", [-1, 12, 1_000_000])
def test_a_token_outside_the_vocabulary_is_named(bad: int) -> None:
    with pytest.raises(VocabularyError, match=rf"source token id {bad} is not in 0\.\.11"):
        check_tokens(torch.tensor([[3, bad, 4]]), 12, "source")
    check_tokens(torch.tensor([[0, 11]]), 12, "source")
    check_tokens(torch.zeros(1, 0, dtype=torch.long), 12, "source")


@pytest.mark.parametrize("heads", [3, 0, -2])
def test_heads_must_divide_the_width(heads: int) -> None:
    with pytest.raises(ConfigError, match=rf"width \(8\) must be a multiple of heads \({heads}\)"):
        Attention(8, heads)


class Case:
    """Random frames, a random table, and random soft labels over a few columns, some of them equal."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.frames = torch.randn(B, U, D, generator=generator, dtype=dtype, requires_grad=True)
        self.table = torch.randn(V, D, generator=generator, dtype=dtype, requires_grad=True)
        self.columns = torch.randint(V, (B, C), generator=generator)
        self.columns[:, -1] = self.columns[:, 0]
        lengths = torch.tensor([U, 2, 0])
        self.weights = (torch.arange(U) < lengths[:, None]).to(dtype)
        shares = torch.rand(B, U, C, generator=generator, dtype=dtype)
        self.soft = shares / shares.sum(-1, keepdim=True) * self.weights[:, :, None]

    def align(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        return -(log_probs * self.soft).sum(), self.soft

    def fused(self, smoothing: float, chunk: int = 4) -> tuple[Tensor, Tensor]:
        return project_and_loss(
            self.frames, self.table, self.columns, self.weights, self.align, smoothing=smoothing, chunk=chunk
        )

    def plain(self, smoothing: float) -> tuple[Tensor, Tensor]:
        log_probs = (self.frames @ self.table.T).log_softmax(-1)
        columns = self.columns[:, None, :].expand(-1, U, -1)
        negative = -(log_probs.gather(-1, columns) * self.soft).sum()
        uniform = -(log_probs.sum(-1) * self.weights).sum() / V
        return (1 - smoothing) * negative + smoothing * uniform, negative


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_values_and_gradients_are_those_of_a_full_log_softmax(chunk: int, smoothing: float) -> None:
    case = Case()
    (total, negative), (expected, expected_negative) = case.fused(smoothing, chunk), case.plain(smoothing)
    assert_same(total, expected)
    assert_same(negative, expected_negative.detach())
    inputs = (case.frames, case.table)
    # Not the gradient of the loss alone but of something computed from it.
    assert_same(torch.autograd.grad((total * 3.7) ** 2, inputs), torch.autograd.grad((expected * 3.7) ** 2, inputs))


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), chunk=st.integers(1, 20), smoothing=st.floats(0, 1))
def test_the_chunks_do_not_matter(seed: int, chunk: int, smoothing: float) -> None:
    case = Case(seed)
    total, _ = case.fused(smoothing, chunk)
    whole, _ = case.fused(smoothing, B * U)
    assert_same(total, whole)
    inputs = (case.frames, case.table)
    assert_same(torch.autograd.grad(total, inputs), torch.autograd.grad(whole, inputs))


def test_gradcheck() -> None:
    case = Case()

    def loss(frames: Tensor, table: Tensor) -> Tensor:
        return project_and_loss(frames, table, case.columns, case.weights, case.align, 0.1, 4)[0]

    assert torch.autograd.gradcheck(loss, (case.frames, case.table))


@pytest.mark.parametrize("alone", ["frames", "table"])
def test_one_input_may_need_no_gradient(alone: str) -> None:
    case, both = Case(), Case()
    other = {"frames": "table", "table": "frames"}[alone]
    getattr(case, other).requires_grad_(False)
    case.fused(0.1)[0].backward()
    both.fused(0.1)[0].backward()
    assert_same(getattr(case, alone).grad, getattr(both, alone).grad, 0)
    assert getattr(case, other).grad is None


def test_without_gradients_the_values_stay() -> None:
    case = Case()
    with torch.no_grad():
        total, negative = case.fused(0.1)
    assert not total.requires_grad
    assert_same(total, case.fused(0.1)[0].detach(), 0)
    assert_same(negative, case.fused(0.1)[1], 0)


def test_only_the_total_carries_a_gradient() -> None:
    total, negative = Case().fused(0.0)
    assert total.requires_grad
    assert not negative.requires_grad


def test_frames_without_weight_are_ignored() -> None:
    case, other = Case(), Case()
    with torch.no_grad():
        other.frames[case.weights == 0] = 50.0
    totals = [c.fused(0.1)[0] for c in (case, other)]
    assert_same(totals[0], totals[1])
    tables = [torch.autograd.grad(t, (c.table, c.frames)) for t, c in zip(totals, (case, other), strict=True)]
    assert_same(tables[0][0], tables[1][0])
    assert not tables[1][1][case.weights == 0].any()


def test_large_logits_do_not_overflow() -> None:
    case = Case(dtype=torch.float32)
    with torch.no_grad():
        case.frames *= 1000
    total, _ = case.fused(0.1)
    expected, _ = case.plain(0.1)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(total, (case.frames, case.table)))


@pytest.mark.parametrize("upstream", [torch.float32, torch.bfloat16])
def test_mixed_precision_keeps_the_loss_in_fp32_and_the_gradients_close(upstream: torch.dtype) -> None:
    case = Case(dtype=torch.float32)
    frames = case.frames.detach().to(upstream).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        total, negative = project_and_loss(frames, case.table, case.columns, case.weights, case.align, 0.1, 4)
    assert total.dtype == negative.dtype == torch.float32
    expected, _ = case.plain(0.1)
    torch.testing.assert_close(total, expected, rtol=0.02, atol=0)
    found = torch.autograd.grad(total, (frames, case.table))
    references = torch.autograd.grad(expected, (case.frames, case.table))
    assert [gradient.dtype for gradient in found] == [upstream, torch.float32]
    for gradient, reference in zip(found, references, strict=True):
        assert (gradient - reference).norm() < 0.03 * reference.norm()


def large_case(chunk: int) -> tuple[Tensor, Tensor, partial[tuple[Tensor, Tensor]]]:
    frames, table = torch.randn(4, 16, 3, requires_grad=True), torch.randn(200, 3, requires_grad=True)
    columns, weights = torch.randint(200, (4, 2)), torch.ones(4, 16)
    soft = torch.full((4, 16, 2), 0.5)

    def align(log_probs: Tensor) -> tuple[Tensor, Tensor]:
        return -(log_probs * soft).sum(), soft

    return frames, table, partial(project_and_loss, frames, table, columns, weights, align, 0.1, chunk)


@pytest.mark.parametrize("chunk", [1, 5, 32])
def test_never_more_than_one_chunk_of_frames_times_vocabulary_exists(chunk: int) -> None:
    torch.manual_seed(0)
    _, table, loss = large_case(chunk)
    with Allocations(4 * 16 * 200) as allocations:
        loss()[0].backward()
    assert table.grad is not None
    assert allocations.operations == []
    assert allocations.largest <= max(chunk * 200, table.numel())


def test_the_tracker_of_allocations_sees_a_chunk_of_everything() -> None:
    *_, loss = large_case(chunk=64)
    with Allocations(4 * 16 * 200) as allocations:
        loss()
    assert allocations.operations


def test_only_the_two_gradients_are_kept_for_backward() -> None:
    frames, table, loss = large_case(chunk=5)
    total, _ = loss()
    assert total.grad_fn is not None
    saved = total.grad_fn.saved_tensors  # type: ignore[attr-defined]
    assert sorted(tensor.shape for tensor in saved) == sorted([frames.shape, table.shape])


def test_at_least_float32() -> None:
    widths = {torch.bfloat16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}
    for given_dtype, expected in widths.items():
        assert at_least_float32(torch.ones(1, dtype=given_dtype)).dtype == expected
