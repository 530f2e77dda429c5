from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from simulmt.errors import ConfigError
from simulmt.model.beam import BeamConfig, Hypothesis, _best_words, _normaliser_and_maxima, beam_search
from simulmt.model.seq2seq import Seq2SeqConfig, Seq2SeqModel
from simulmt.text import END, SPECIAL_SYMBOLS, START
from tiny_models import seeing

from .helpers import pad, randomise

VOCABULARY = 9
WORDS = range(len(SPECIAL_SYMBOLS), VOCABULARY)
SOURCES = [[6, 7, 8, 8], [7], [8, 6]]
EVERYTHING = 200  # a beam that holds all hypotheses of up to four tokens


def make_model(
    seed: int = 0, causal: bool = False, std: float = 0.5, target_vocabulary: int = VOCABULARY
) -> Seq2SeqModel:
    sizes = {"width": 8, "inner": 16, "heads": 2, "encoder_layers": 1, "decoder_layers": 2}
    config = Seq2SeqConfig(VOCABULARY, target_vocabulary, causal, dropout=0.0, **sizes)
    return randomise(Seq2SeqModel.build(config), seed, std)


def log_probability(model: Seq2SeqModel, source: list[int], tokens: list[int], delay: int | None) -> float:
    target = torch.tensor([[*tokens, END]])
    with torch.no_grad():
        logits = model(torch.tensor([source]), torch.tensor([len(source)]), target, delay)
    return logits.log_softmax(-1).gather(-1, target[:, :, None]).sum().item()


def all_hypotheses(
    model: Seq2SeqModel, source: list[int], longest: int, config: BeamConfig, delay: int | None
) -> list[Hypothesis]:
    """Return all translations, best first."""
    found = [
        Hypothesis(
            list(tokens),
            log_probability(model, source, list(tokens), delay) / (length + 1) ** config.length_penalty,
        )
        for length in range(config.min_length, longest + 1)
        for tokens in itertools.product(WORDS, repeat=length)
    ]
    return sorted(found, key=lambda hypothesis: -hypothesis.score)


@torch.no_grad()
def greedy(model: Seq2SeqModel, source: list[int], longest: int, min_length: int, delay: int | None) -> list[int]:
    state = model.encode(torch.tensor([source]), torch.tensor([len(source)]), longest)
    tokens: list[int] = []
    while len(tokens) < longest:
        logits, state = model.step(torch.tensor([tokens[-1:] or [START]]), state, delay)
        allowed = [*WORDS, END] if len(tokens) >= min_length else list(WORDS)
        best = max(allowed, key=lambda token: float(logits[0, token]))
        if best == END:
            break
        tokens.append(best)
    return tokens


def plain_beam_search(
    model: Seq2SeqModel, source: list[int], longest: int, config: BeamConfig, delay: int | None
) -> list[Hypothesis]:
    """Search with lists and without a cache, until there are as many finished hypotheses as the beam size."""
    lengths = torch.tensor([len(source)])
    unfinished: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[Hypothesis] = []
    words = list(range(len(SPECIAL_SYMBOLS), model.target_embedding.num_embeddings))
    for length in range(longest + 1):
        if len(finished) >= config.beam:
            break
        allowed = [END] if length == longest else [*words, END] if length >= config.min_length else words
        grown = []
        for score, tokens in unfinished:
            logits = model(torch.tensor([source]), lengths, torch.tensor([[*tokens, END]]), delay)[0, -1]
            log_probs = logits.log_softmax(-1).tolist()
            grown += [(score + log_probs[token], [*tokens, token]) for token in allowed]
        grown.sort(reverse=True)
        ends = [(score, tokens) for score, tokens in grown[: config.beam] if tokens[-1] == END]
        finished += [Hypothesis(tokens[:-1], score / len(tokens) ** config.length_penalty) for score, tokens in ends]
        unfinished = [(score, tokens) for score, tokens in grown if tokens[-1] != END][: config.beam]
    return sorted(finished, key=lambda hypothesis: -hypothesis.score)[: config.beam]


def search(
    model: Seq2SeqModel, sources: list[list[int]], config: BeamConfig, delay: int | None = None
) -> list[list[Hypothesis]]:
    return beam_search(model, *pad(sources), config, delay)


def assert_same_hypotheses(found: list[Hypothesis], expected: list[Hypothesis]) -> None:
    assert [hypothesis.tokens for hypothesis in found] == [hypothesis.tokens for hypothesis in expected]
    scores = [hypothesis.score for hypothesis in expected]
    assert [hypothesis.score for hypothesis in found] == pytest.approx(scores, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.5])
@pytest.mark.parametrize(("causal", "delay"), [(False, None), (True, 1), (True, 3)])
def test_a_wide_beam_finds_the_same_as_enumeration(length_penalty: float, causal: bool, delay: int | None) -> None:
    model = make_model(causal=causal)
    config = BeamConfig(EVERYTHING, length_penalty, max_ratio=0.5, max_extra=2, min_length=1)
    for source, found in zip(SOURCES, search(model, SOURCES, config, delay), strict=True):
        longest = int(0.5 * len(source) + 2)
        expected = all_hypotheses(model, source, longest, config, delay)
        assert len(expected) == sum(3**length for length in range(1, longest + 1))
        assert_same_hypotheses(found, expected)


def test_an_empty_translation_is_found_where_it_is_allowed() -> None:
    config = BeamConfig(EVERYTHING, length_penalty=1.0, max_ratio=0.0, max_extra=2, min_length=0)
    model = make_model()
    (found,) = search(model, [[6, 7]], config)
    assert [] in [hypothesis.tokens for hypothesis in found]
    assert_same_hypotheses(found, all_hypotheses(model, [6, 7], 2, config, None))


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 500),
    beam=st.integers(1, 6),
    length_penalty=st.sampled_from([0.0, 0.6, 1.0, 1.5]),
    delay=st.sampled_from([None, 1, 2]),
)
def test_a_batch_is_searched_as_its_sentences_one_by_one(
    seed: int, beam: int, length_penalty: float, delay: int | None
) -> None:
    model = make_model(seed, causal=delay is not None)
    config = BeamConfig(beam, length_penalty, max_ratio=1.0, max_extra=3)
    together = search(model, SOURCES, config, delay)
    for source, found in zip(SOURCES, together, strict=True):
        assert_same_hypotheses(found, search(model, [source], config, delay)[0])


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 500),
    beam=st.integers(1, 5),
    length_penalty=st.sampled_from([0.0, 0.6, 1.0, 1.5]),
    min_length=st.integers(0, 2),
    delay=st.sampled_from([None, 1, 2]),
    std=st.sampled_from([0.5, 1.2]),
)
def test_tensors_and_caches_change_nothing(
    seed: int, beam: int, length_penalty: float, min_length: int, delay: int | None, std: float
) -> None:
    model = make_model(seed, causal=delay is not None, std=std)
    config = BeamConfig(beam, length_penalty, max_ratio=0.5, max_extra=3, min_length=min_length)
    for source, found in zip(SOURCES, search(model, SOURCES, config, delay), strict=True):
        assert_same_hypotheses(found, plain_beam_search(model, source, int(0.5 * len(source) + 3), config, delay))


@pytest.mark.parametrize("target_vocabulary", [133, 134, 135, 262, 300])
@pytest.mark.parametrize("beam", [1, 4])
def test_a_large_vocabulary_is_searched_like_a_small_one(target_vocabulary: int, beam: int) -> None:
    """Vocabularies of no, one or two whole chunks, with or without a remainder."""
    model = make_model(target_vocabulary=target_vocabulary, std=0.8)
    config = BeamConfig(beam, max_ratio=0.5, max_extra=3)
    for source, found in zip(SOURCES, search(model, SOURCES, config), strict=True):
        assert_same_hypotheses(found, plain_beam_search(model, source, int(0.5 * len(source) + 3), config, None))


@settings(deadline=None, max_examples=60)
@given(
    words=st.integers(1, 700),
    count=st.integers(1, 8),
    levels=st.integers(1, 1000),
    seed=st.integers(0, 100),
)
def test_the_best_words_are_those_of_the_whole_vocabulary(words: int, count: int, levels: int, seed: int) -> None:
    """Also with many equal logits, of which any may be chosen."""
    specials = len(SPECIAL_SYMBOLS)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(levels, (3, specials + words), generator=generator).double() / levels * 9
    normaliser, chunk_maxima = _normaliser_and_maxima(logits, specials)
    values, index = _best_words(logits[:, specials:], chunk_maxima, count)
    assert torch.equal(values, logits[:, specials:].topk(min(count, words)).values)
    assert torch.equal(values, logits[:, specials:].gather(1, index))
    assert all(len(set(row)) == len(row) for row in index.tolist())
    assert torch.allclose(normaliser, logits.logsumexp(-1))


@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 500), beam=st.integers(1, 3), delay=st.sampled_from([None, 2]))
def test_sentences_that_finish_early_do_not_change_the_others(seed: int, beam: int, delay: int | None) -> None:
    model = make_model(seed, causal=delay is not None, std=1.0)
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (16,), generator=random).tolist()
    sources = [torch.randint(6, VOCABULARY, (length,), generator=random).tolist() for length in lengths]
    config = BeamConfig(beam, length_penalty=1.0, max_ratio=1.2, max_extra=2)
    together = search(model, sources, config, delay)
    for source, found in zip(sources, together, strict=True):
        longest = int(1.2 * len(source) + 2)
        assert_same_hypotheses(found, plain_beam_search(model, source, longest, config, delay))


def test_the_n_best_are_the_first_n_of_all_hypotheses() -> None:
    config = BeamConfig(beam=4)
    everything = search(make_model(), SOURCES, config)
    for best in (1, 2):
        found = beam_search(make_model(), *pad(SOURCES), config, best=best)
        assert found == [hypotheses[:best] for hypotheses in everything]


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 500),
    length_penalty=st.sampled_from([0.0, 1.0, 1.5]),
    min_length=st.integers(0, 3),
    delay=st.sampled_from([None, 1, 2]),
)
def test_a_beam_of_one_is_greedy_search(seed: int, length_penalty: float, min_length: int, delay: int | None) -> None:
    model = make_model(seed, causal=delay is not None)
    config = BeamConfig(beam=1, length_penalty=length_penalty, max_ratio=1.0, max_extra=4, min_length=min_length)
    for source, (best, *others) in zip(SOURCES, search(model, SOURCES, config, delay), strict=True):
        assert others == []
        assert best.tokens == greedy(model, source, len(source) + 4, min_length, delay)
        expected = log_probability(model, source, best.tokens, delay) / (len(best.tokens) + 1) ** length_penalty
        assert best.score == pytest.approx(expected, rel=1e-4, abs=1e-5)


@torch.no_grad()
def as_a_stream(model: Seq2SeqModel, source: list[int], config: BeamConfig, delay: int) -> tuple[Hypothesis, int]:
    """Translate a sentence token by token; also return how often it read on instead of ending early."""
    longest = int(config.max_ratio * len(source) + config.max_extra)
    state = model.encode(torch.tensor([source]), torch.tensor([len(source)]), longest + 1)
    tokens: list[int] = []
    read, extra, score = 0, 0, 0.0
    while True:
        read = max(read, min(len(tokens) + delay, len(source)))
        logits, after = model.step(torch.tensor([tokens[-1:] or [START]]), seeing(state, read))
        words = [] if len(tokens) == longest else list(WORDS)
        end = [END] if len(tokens) >= config.min_length else []
        best = max([*words, *end], key=lambda token: float(logits[0, token]))
        if best == END and words and read < len(source):
            read, extra = read + 1, extra + 1
            continue
        score += float(logits[0].log_softmax(-1)[best])
        if best == END:
            return Hypothesis(tokens, score / (len(tokens) + 1) ** config.length_penalty), extra
        tokens.append(best)
        state = after._replace(context=state.context)


def test_a_batch_reads_on_as_each_of_its_streams_would() -> None:
    """Many random models, some of which must read on, by different amounts in a batch."""
    uneven = 0
    for seed in range(60):
        random = torch.Generator().manual_seed(seed)
        model = make_model(seed, causal=True, std=1.0)
        lengths = torch.randint(1, 12, (6,), generator=random).tolist()
        sources = [torch.randint(6, VOCABULARY, (length,), generator=random).tolist() for length in lengths]
        config = BeamConfig(1, seed % 3 / 2, max_ratio=seed % 4 / 2, max_extra=3, min_length=seed % 3, reads_on=True)
        delay = 1 + seed % 5
        expected, extra = zip(*(as_a_stream(model, source, config, delay) for source in sources), strict=True)
        assert_same_hypotheses([found for (found,) in search(model, sources, config, delay)], list(expected))
        uneven += len(set(extra)) > 2
    assert uneven > 5


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 500),
    beam=st.integers(1, 5),
    length_penalty=st.sampled_from([0.0, 1.0, 1.5]),
    min_length=st.integers(0, 3),
    max_ratio=st.sampled_from([0.0, 0.5, 1.2]),
)
def test_invariants_of_every_search(
    seed: int, beam: int, length_penalty: float, min_length: int, max_ratio: float
) -> None:
    model = make_model(seed)
    config = BeamConfig(beam, length_penalty, max_ratio, max_extra=4, min_length=min_length)
    for source, found in zip(SOURCES, search(model, SOURCES, config), strict=True):
        assert 1 <= len(found) <= beam
        assert len({tuple(hypothesis.tokens) for hypothesis in found}) == len(found)
        assert [hypothesis.score for hypothesis in found] == sorted((h.score for h in found), reverse=True)
        for tokens, score in found:
            assert min_length <= len(tokens) <= int(max_ratio * len(source) + 4)
            assert all(token in WORDS for token in tokens)
            expected = log_probability(model, source, tokens, None) / (len(tokens) + 1) ** length_penalty
            assert score == pytest.approx(expected, rel=1e-4, abs=1e-5)


def favour(model: Seq2SeqModel, token: int) -> Seq2SeqModel:
    """Make a symbol by far the most probable in every context."""
    with torch.no_grad():
        model.final_norm.weight.zero_()
        model.final_norm.bias.copy_(torch.ones(8))
        model.target_embedding.weight.zero_()
        model.target_embedding.weight[token] = 5.0
    return model


@pytest.mark.parametrize("symbol", [symbol for symbol in range(len(SPECIAL_SYMBOLS)) if symbol != END])
def test_special_symbols_are_never_written(symbol: int) -> None:
    for hypotheses in search(favour(make_model(), symbol), SOURCES, BeamConfig(beam=3, max_extra=2)):
        assert hypotheses
        assert all(token in WORDS for hypothesis in hypotheses for token in hypothesis.tokens)


def test_the_minimum_holds_against_a_model_that_wants_to_stop() -> None:
    config = BeamConfig(beam=2, max_extra=5, min_length=3)
    for best, *_ in search(favour(make_model(), END), SOURCES, config):
        assert len(best.tokens) == 3


def test_the_limit_holds_against_a_model_that_never_stops() -> None:
    config = BeamConfig(beam=2, max_ratio=1.5, max_extra=2)
    lengths = [len(hypotheses[0].tokens) for hypotheses in search(favour(make_model(), 7), SOURCES, config)]
    assert lengths == [int(1.5 * len(source) + 2) for source in SOURCES]


def test_a_search_leaves_no_graph_behind() -> None:
    model = make_model()
    graphs: list[bool] = []
    model.final_norm.register_forward_hook(lambda _, __, states: graphs.append(states.requires_grad))
    search(model, SOURCES, BeamConfig(beam=2))
    assert graphs
    assert not any(graphs)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("beam", 0, "beam must be at least 1, got 0"),
        ("length_penalty", -0.5, "length_penalty must not be negative, got -0.5"),
        ("max_ratio", -1.0, "max_ratio must not be negative, got -1.0"),
        ("max_extra", 0, "max_extra must be at least 1, got 0"),
        ("min_length", -1, "min_length .* got -1"),
        ("min_length", 10, "min_length .* got 10"),
    ],
)
def test_bad_settings_are_named(setting: str, value: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BeamConfig(**{setting: value})  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("delay", [None, 2])
def test_a_gpu_finds_what_the_cpu_finds(delay: int | None) -> None:
    model = make_model(3, causal=delay is not None, std=0.6, target_vocabulary=300)
    config = BeamConfig(beam=4, max_ratio=1.0, max_extra=3)
    expected = search(model, SOURCES * 5, config, delay)
    source, lengths = pad(SOURCES * 5)
    for found, hypotheses in zip(
        beam_search(model.cuda(), source.cuda(), lengths, config, delay), expected, strict=True
    ):
        assert_same_hypotheses(found, hypotheses)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_reads_on_as_the_cpu_does() -> None:
    model = make_model(3, causal=True, std=1.0)
    config = BeamConfig(beam=1, max_ratio=1.0, max_extra=3, reads_on=True)
    expected = search(model, SOURCES * 5, config, 1)
    source, lengths = pad(SOURCES * 5)
    found = beam_search(model.cuda(), source.cuda(), lengths, config, 1)
    assert_same_hypotheses([one for (one,) in found], [one for (one,) in expected])
