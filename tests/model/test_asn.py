from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment  # type: ignore[attr-defined]
from torch import Tensor, nn

from simulmt.errors import ConfigError, VocabularyError
from simulmt.model.asn import ASNConfig, SortedCTCModel, SortingNetwork, SortingStatistics, exclude_padding, sinkhorn
from simulmt.model.ctc import CTCConfig, CTCModel
from simulmt.model.layers import Batch, NormPlacement
from simulmt.text import END, MASK, PAD

from .helpers import assert_same, gradients, pad, parameter_count, randomise, sum_gradients

WIDTH = 8
VOCABULARY = 13
PAIRS = [([7, 8, 9, 10, 6], [6, 7, 7, END]), ([11], [8, END]), ([6, 7], [6, 6, 6, 6, END]), ([6, 12, 8], [9, 10, END])]


def make_sorter(
    tau: float = 0.5, delta: float = 0.3, gamma: float = 0.5, iterations: int = 8, norm: NormPlacement = "pre"
) -> SortingNetwork:
    sorter = SortingNetwork(WIDTH, 16, 2, 2, 0.0, iterations=iterations, tau=tau, delta=delta, gamma=gamma, norm=norm)
    return randomise(sorter, seed=1)


def make_translator() -> CTCModel:
    return CTCModel.build(CTCConfig(VOCABULARY, VOCABULARY, width=WIDTH, inner=16, heads=2, layers=2, dropout=0.0))


def make_model(delta: float = 0.3, gamma: float = 0.5, norm: NormPlacement = "pre") -> SortedCTCModel:
    return randomise(SortedCTCModel.build(make_translator(), ASNConfig(layers=2, delta=delta, gamma=gamma, norm=norm)))


def batch() -> Batch:
    (source, source_lengths), (target, target_lengths) = (pad(side) for side in zip(*PAIRS, strict=True))
    return Batch(source, source_lengths, target, target_lengths)


def random_scores(*shape: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    return spread * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def plain_sinkhorn(X: Tensor, iterations: int) -> Tensor:
    for _ in range(iterations):
        X = X - X.logsumexp(2, keepdim=True)
        X = X - X.logsumexp(1, keepdim=True)
    return X.exp()


def mask_of(lengths: list[int], longest: int) -> Tensor:
    return torch.arange(longest) < torch.tensor(lengths)[:, None]


def spread_of_row_sums(Z: Tensor) -> float:
    """Return log(largest / smallest row sum); as the columns sum to one, no row sum is farther from one."""
    sums = Z.sum(-1).log()
    return float(sums.max() - sums.min())


# The Sinkhorn operator


@settings(deadline=None, max_examples=40)
@given(size=st.integers(2, 7), iterations=st.integers(1, 12), seed=st.integers(0, 999), spread=st.floats(0.1, 3.0))
def test_columns_sum_to_one_and_rows_approach_it_as_fast_as_theory_promises(
    size: int, iterations: int, seed: int, spread: float
) -> None:
    X = random_scores(1, size, size, seed=seed, spread=spread)
    Z, closer = sinkhorn(X, iterations), sinkhorn(X, iterations + 1)
    assert_same(Z.sum(1), torch.ones(1, size, dtype=torch.float64), 1e-12)
    # Birkhoff: each of the two normalisations contracts by tanh(diameter / 4), where the diameter is the largest
    # log-ratio x_ij x_kl / (x_il x_kj).
    differences = X[0][:, None, :] - X[0][None, :, :]
    diameter = float((differences.amax(-1) - differences.amin(-1)).max())
    contraction = math.tanh(diameter / 4) ** 2
    assert spread_of_row_sums(closer) <= contraction * spread_of_row_sums(Z) + 1e-12


def test_many_iterations_make_rows_and_columns_sum_to_one() -> None:
    Z = sinkhorn(random_scores(3, 6, 6), 300)
    ones = torch.ones(3, 6, dtype=torch.float64)
    assert_same((Z.sum(1), Z.sum(2)), (ones, ones), 1e-9)


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3), iterations=st.integers(0, 16), seed=st.integers(0, 999)
)
def test_values_and_gradients_are_those_of_the_plain_loop(lengths: list[int], iterations: int, seed: int) -> None:
    longest = max(lengths) + 1
    scores = random_scores(len(lengths), longest, longest, seed=seed).requires_grad_()
    X = exclude_padding(scores, mask_of(lengths, longest))
    Z = sinkhorn(X, iterations)
    expected = plain_sinkhorn(X, iterations) if iterations else X.exp() / X.exp().sum(-1, keepdim=True)
    assert_same(Z, expected)
    upstream = random_scores(*Z.shape, seed=seed + 1)
    (found,) = torch.autograd.grad(Z, scores, upstream, retain_graph=True)
    (reference,) = torch.autograd.grad(expected, scores, upstream)
    assert_same(found, reference)


@pytest.mark.parametrize("iterations", [0, 1, 2, 5])
def test_gradcheck(iterations: int) -> None:
    mask = mask_of([4, 2, 1], 4)
    scores = random_scores(3, 4, 4, spread=1.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: sinkhorn(exclude_padding(s, mask), iterations), (scores,))


@pytest.mark.parametrize("iterations", [0, 1, 7, 16])
def test_padding_neither_takes_nor_gives_mass(iterations: int) -> None:
    lengths, longest = [5, 3, 1], 6
    scores = random_scores(3, longest, longest)
    Z = sinkhorn(exclude_padding(scores, mask_of(lengths, longest)), iterations)
    for matrix, score, length in zip(Z, scores, lengths, strict=True):
        expected = torch.eye(longest, dtype=torch.float64)  # each padding position maps to itself
        expected[:length, :length] = sinkhorn(score[None, :length, :length], iterations)[0]
        assert_same(matrix, expected, 1e-12)


def test_scores_on_padding_get_no_gradient() -> None:
    scores = random_scores(1, 5, 5).requires_grad_()
    Z = sinkhorn(exclude_padding(scores, mask_of([3], 5)), 4)
    (gradient,) = torch.autograd.grad(Z, scores, random_scores(1, 5, 5, seed=1))
    assert gradient[:, :3, :3].all()
    assert not gradient[:, 3:].any()
    assert not gradient[:, :, 3:].any()


def test_no_iterations_are_a_softmax_over_each_row() -> None:
    X = random_scores(2, 4, 4)
    assert_same(sinkhorn(X, 0), X.softmax(-1))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_falling_tau_approaches_the_best_permutation(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # One permutation is clearly best: between nearly equal ones Sinkhorn would need very many iterations.
    favoured = torch.eye(6, dtype=torch.float64)[torch.randperm(6, generator=generator)]
    A = 1.5 * torch.randn(6, 6, dtype=torch.float64, generator=generator) + 2 * favoured
    _, columns = linear_sum_assignment(A.numpy(), maximize=True)
    assert columns.tolist() != A.argmax(-1).tolist(), "the best column of every row would be no permutation"
    permutation = torch.eye(6, dtype=torch.float64)[columns]
    distances = [float((sinkhorn(A[None] / tau, 1000) - permutation).abs().max()) for tau in (1.0, 0.5, 0.25, 0.05)]
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 0.3
    assert distances[-1] < 0.01


def test_memory_for_the_gradient_does_not_grow_with_the_iterations() -> None:
    X = random_scores(2, 5, 5).requires_grad_()
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for iterations in (1, 64):
            sinkhorn(X, iterations)
    assert kept == [X.numel(), X.numel()]


def test_extreme_scores_stay_finite() -> None:
    X = random_scores(2, 5, 5, spread=1e4).float().requires_grad_()
    Z = sinkhorn(X, 16)
    (gradient,) = torch.autograd.grad(Z.square().sum(), X)
    assert Z.isfinite().all()
    assert gradient.isfinite().all()


# Hidden target tokens


@settings(deadline=None, max_examples=40)
@given(
    targets=st.lists(st.lists(st.integers(6, 12), max_size=9), min_size=1, max_size=4),
    gamma=st.sampled_from([0.0, 0.25, 0.5, 0.8, 1.0]),
    seed=st.integers(0, 999),
)
def test_the_masked_share_is_exact_and_spares_end_and_padding(
    targets: list[list[int]], gamma: float, seed: int
) -> None:
    torch.manual_seed(seed)
    target, _ = pad([[*tokens, END] for tokens in targets])
    masked = make_sorter(gamma=gamma).train().mask_tokens(target)
    for before, after, tokens in zip(target, masked, targets, strict=True):
        assert int((after == MASK).sum()) == round(gamma * len(tokens))
        assert torch.equal(after[after != MASK], before[after != MASK])
        assert after[len(tokens)] == END
        assert (after[len(tokens) + 1 :] == PAD).all()


def test_masks_are_redrawn_and_every_token_is_masked_sometimes() -> None:
    torch.manual_seed(0)
    sorter = make_sorter(gamma=0.5).train()
    target = torch.tensor([[6, 7, 8, 9, 10, 11, END]])
    draws = torch.stack([sorter.mask_tokens(target)[0] == MASK for _ in range(200)]).double()
    assert len(draws.unique(dim=0)) > 15  # of 20 ways to mask 3 of 6
    share = draws.mean(0)
    assert ((share[:6] > 0.35) & (share[:6] < 0.65)).all()


def test_nothing_is_masked_outside_training() -> None:
    target = torch.tensor([[6, 7, 8, 9, END]])
    assert torch.equal(make_sorter(gamma=1.0).eval().mask_tokens(target), target)


# The sorting network


def scores_by_hand(sorter: SortingNetwork, H: Tensor, context: Tensor) -> Tensor:
    Q = H
    for layer in sorter.layers:
        Q, _ = layer(Q, layer.cross_attention.project(context), None)
    return sorter.final_norm(Q) @ H.transpose(1, 2) / WIDTH**0.5


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize(("iterations", "tau"), [(0, 1.0), (3, 1.0), (3, 0.25), (16, 0.5)])
def test_z_is_sinkhorn_of_the_scores_over_tau(iterations: int, tau: float, norm: NormPlacement) -> None:
    sorter = make_sorter(tau=tau, iterations=iterations, norm=norm)
    H, context = random_scores(2, 5, WIDTH, spread=1), random_scores(2, 3, WIDTH, seed=1, spread=1)
    Z = sorter(H, None, context, None)
    assert Z.dtype == torch.float32
    assert_same(Z.double(), sinkhorn(scores_by_hand(sorter, H, context) / tau, iterations), 1e-4)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_gradients_reach_the_states_as_queries_as_keys_and_as_values(norm: NormPlacement) -> None:
    sorter = make_sorter(tau=2.0, norm=norm)
    H = random_scores(2, 5, WIDTH, spread=1).requires_grad_()
    context, upstream = random_scores(2, 3, WIDTH, seed=1, spread=1), random_scores(2, 5, WIDTH, seed=2)
    sorted_states = sorter(H, None, context, None).double() @ H
    (found,) = torch.autograd.grad(sorted_states, H, upstream)
    expected_states = plain_sinkhorn(scores_by_hand(sorter, H, context) / sorter.tau, sorter.iterations) @ H
    (expected,) = torch.autograd.grad(expected_states, H, upstream)
    assert_same(found, expected, 1e-3)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_translator_learns_through_the_sorting_network(norm: NormPlacement) -> None:
    """With states or target embeddings detached on their way to Z, losses would stay, and all parameters learn."""
    model = make_model(norm=norm)
    source, target = torch.tensor([[7, 8, 9, 10, 6]]), torch.tensor([[6, 7, 7, END]])
    batch = Batch(source, torch.tensor([5]), target, torch.tensor([4]))
    translator, sorter = model.translator, model.sorter
    H, context = translator.encoder(source, None, 2), translator.target_embedding.embed(target)
    Z = plain_sinkhorn(scores_by_hand(sorter, H, context) / sorter.tau, sorter.iterations)
    expected = translator.loss_of_states(Z @ H, batch, 0.1).total
    assert_same(gradients(translator, model.loss(batch, 2).total), gradients(translator, expected), 1e-5)


def test_scores_are_in_single_precision_under_autocast() -> None:
    sorter = make_sorter(tau=0.25).float()
    sorter.layers = nn.ModuleList()  # type: ignore[assignment]  # what is left is Q H^T of normalised states
    H, context = random_scores(2, 6, WIDTH, spread=1).float(), torch.zeros(2, 3, WIDTH)
    expected = sorter(H, None, context, None)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sorter(H, None, context, None), expected)


# How far Z is from the identity


def test_statistics_of_matrices_worked_by_hand() -> None:
    identity, reverse, uniform = torch.eye(3), torch.eye(3).flip(0), torch.full((3, 3), 1 / 3)
    three = torch.tensor([3])
    assert SortingStatistics.of([(identity[None], three)]) == (1.0, 0.0)
    assert SortingStatistics.of([(reverse[None], three)]) == pytest.approx((1 / 3, 4 / 3))
    assert SortingStatistics.of([(uniform[None], three)]) == pytest.approx((1 / 3, 8 / 9))
    both = [(identity[None], three), (torch.stack([reverse, uniform]), torch.tensor([3, 3]))]
    assert SortingStatistics.of(both) == pytest.approx((5 / 9, 20 / 27))


def test_statistics_leave_padding_out() -> None:
    swap = torch.tensor([[0.0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    assert SortingStatistics.of([(swap[None], torch.tensor([2]))]) == (0.0, 1.0)
    assert SortingStatistics.of([]) == (0.0, 0.0)


def fresh_diagonal(norm: NormPlacement, query_scale: float) -> float:
    torch.manual_seed(0)
    sorter = SortingNetwork(32, 64, 4, 3, 0.0, 16, 0.25, 0.3, 0.5, norm=norm, query_scale=query_scale).eval()
    H, lengths = nn.functional.layer_norm(torch.randn(8, 12, 32), (32,)), torch.full((8,), 12)
    return SortingStatistics.of([(sorter(H, None, torch.randn(8, 10, 32), None), lengths)]).diagonal


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_smaller_query_scale_starts_farther_from_the_identity(norm: NormPlacement) -> None:
    diagonals = [fresh_diagonal(norm, scale) for scale in (1.0, 0.3, 0.1, 0.01)]
    assert diagonals == sorted(diagonals, reverse=True)
    assert diagonals[0] > 0.9
    assert diagonals[-1] < 0.2


def test_post_norm_starts_farther_from_the_identity_than_pre_norm() -> None:
    assert fresh_diagonal("post", 0.3) < fresh_diagonal("pre", 0.3) - 0.05


def test_without_noise_training_is_deterministic() -> None:
    H, context = random_scores(2, 5, WIDTH), random_scores(2, 3, WIDTH, seed=1)
    quiet = make_sorter(delta=0.0).train()
    assert torch.equal(quiet(H, None, context, None), quiet(H, None, context, None))
    noisy = make_sorter(delta=0.3).train()
    assert not torch.equal(noisy(H, None, context, None), noisy(H, None, context, None))
    assert torch.equal(noisy.eval()(H, None, context, None), quiet.eval()(H, None, context, None))


def test_the_noise_is_gumbel_times_delta_over_tau() -> None:
    torch.manual_seed(0)
    tau, delta = 0.5, 0.3
    sorter = make_sorter(tau=tau, delta=delta, iterations=0).train()
    with torch.no_grad():
        sorter.final_norm.weight.zero_()
        sorter.final_norm.bias.zero_()  # all scores are zero: what is left is the noise, each row less a constant
    Z = sorter(random_scores(8, 64, WIDTH), None, random_scores(8, 3, WIDTH), None)
    noise = Z.detach().double().log() * tau / delta
    noise = noise - noise.mean(-1, keepdim=True)
    deviation = noise.square().mean().sqrt() * math.sqrt(64 / 63)
    assert float(deviation) == pytest.approx(math.pi / math.sqrt(6), rel=0.02)
    assert float((noise**3).mean() / deviation**3) == pytest.approx(
        1.14, abs=0.15
    )  # the Gumbel distribution is skewed to the right


@pytest.mark.parametrize("training", [True, False])
def test_noise_never_moves_mass_to_padding(training: bool) -> None:
    torch.manual_seed(0)
    sorter = make_sorter(delta=5.0).train(training)
    mask = mask_of([4, 2], 4)
    Z = sorter(random_scores(2, 4, WIDTH), mask, random_scores(2, 3, WIDTH), None)
    assert not Z[1, :2, 2:].any()
    assert torch.equal(Z[1, 2:], torch.eye(4)[2:])


def test_the_order_of_the_target_matters_and_its_padding_does_not() -> None:
    model = make_model()
    source, one = torch.tensor([[7, 8, 9]]), torch.tensor([3])

    def sort_by(target: list[int], length: int) -> Tensor:
        return model.sort(Batch(source, one, torch.tensor([target]), torch.tensor([length])))[1]

    assert (sort_by([6, 7, END], 3) - sort_by([7, 6, END], 3)).abs().max() > 1e-3
    assert_same(sort_by([6, 7, END], 3), sort_by([6, 7, END, 9, 9], 3), 1e-5)


def test_with_all_target_tokens_masked_sorting_depends_only_on_the_length() -> None:
    source, three = torch.tensor([[7, 8, 9]]), torch.tensor([3])
    targets = [torch.tensor([[6, 7, END]]), torch.tensor([[10, 11, END]])]
    for gamma, same in ((1.0, True), (0.0, False)):
        model = make_model(delta=0.0, gamma=gamma).train()
        first, second = (model.sort(Batch(source, three, target, three))[1] for target in targets)
        assert torch.equal(first, second) == same
        trained = model.sort(Batch(source, three, targets[0], three))[1]
        assert torch.equal(trained, model.eval().sort(Batch(source, three, targets[0], three))[1]) != same


# CTC over sorted states


def test_the_identity_sorts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()

    def identity(H: Tensor, *_: object) -> Tensor:
        return torch.eye(H.shape[1]).expand(H.shape[0], -1, -1)

    monkeypatch.setattr(model.sorter, "forward", identity)
    for delay in (1, 3):
        sorted_loss, plain = (part.loss(batch(), delay=delay) for part in (model, model.translator))
        assert_same(sorted_loss, plain)
        found, expected = (gradients(model.translator, loss.total) for loss in (sorted_loss, plain))
        assert_same(found, expected)


@pytest.mark.parametrize("permutation", [[2, 0, 1], [0, 2, 1]])
def test_row_r_of_z_selects_the_state_of_position_r(monkeypatch: pytest.MonkeyPatch, permutation: list[int]) -> None:
    model = make_model()
    monkeypatch.setattr(model.sorter, "forward", lambda *_: torch.eye(3)[permutation][None])
    source, target, three = torch.tensor([[7, 8, 9]]), torch.tensor([[6, 7, END]]), torch.tensor([3])
    H = model.translator.encoder(source)
    batch = Batch(source, three, target, three)
    assert_same(model.loss(batch), model.translator.loss_of_states(H[:, permutation], batch, 0.1))


@pytest.mark.parametrize("delay", [1, 2, 4])
def test_a_padded_batch_is_the_sum_of_its_sentences(delay: int) -> None:
    model = make_model()
    together = model.loss(batch(), delay=delay)
    alone = [model.loss(Batch(*pad([x]), *pad([y])), delay) for x, y in PAIRS]
    for field, parts in zip(together, zip(*alone, strict=True), strict=True):
        assert_same(field, torch.stack(parts).sum(0), 1e-5)  # Z is in single precision, always
    assert together.skipped.item() == 1
    summed = sum_gradients([gradients(model, loss.total) for loss in alone])
    for found, expected in zip(gradients(model, together.total), summed, strict=True):
        assert (found - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_gradients_reach_every_parameter(norm: NormPlacement) -> None:
    torch.manual_seed(0)
    model = make_model(norm=norm).train()
    found = gradients(model, model.loss(batch()).total)
    names = [name for name, _ in model.named_parameters()]
    without = [name for name, gradient in zip(names, found, strict=True) if not gradient.abs().max() > 1e-12]
    assert without == []


def test_the_weights_shared_with_ctc_load_both_ways() -> None:
    source, lengths, *_ = batch()
    baseline, sorted_model = randomise(make_translator(), seed=7), make_model()
    sorted_model.translator.load_state_dict(baseline.state_dict(), strict=True)
    assert_same(sorted_model.translator(source, lengths, 2), baseline(source, lengths, 2), 0)
    shipped = randomise(make_translator(), seed=8)
    shipped.load_state_dict(sorted_model.translator.state_dict(), strict=True)
    assert_same(shipped(source, lengths, 2), baseline(source, lengths, 2), 0)


def test_parameter_count_of_the_paper() -> None:
    with torch.device("meta"):
        model = SortedCTCModel.build(CTCModel.build(CTCConfig(32_000, 32_000)), ASNConfig())
    attention = 4 * (512 * 512 + 512)
    feed_forward = 512 * 2048 + 2048 + 2048 * 512 + 512
    layer = 2 * attention + feed_forward + 3 * (2 * 512)
    assert parameter_count(model.sorter) == 3 * layer + 2 * 512 == 12_613_120
    assert parameter_count(model) == 52_208_640 + 12_613_120


@pytest.mark.parametrize("bad", [-1, VOCABULARY])
def test_tokens_outside_the_vocabularies_are_named(bad: int) -> None:
    model, good, wrong, one = make_model(), torch.tensor([[6]]), torch.tensor([[bad]]), torch.tensor([1])
    with pytest.raises(VocabularyError, match=f"source token id {bad} "):
        model.loss(Batch(wrong, one, good, one))
    with pytest.raises(VocabularyError, match=f"target token id {bad} "):
        model.loss(Batch(good, one, wrong, one))
    with pytest.raises(ConfigError, match="delay k must be at least 1, got 0"):
        model.loss(Batch(good, one, good, one), delay=0)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("layers", 0, r"layers \(M\) must be at least 1, got 0"),
        ("iterations", -1, r"iterations \(l\) must not be negative, got -1"),
        ("tau", 0.0, "tau must be above 0, got 0.0"),
        ("tau", -0.25, "tau must be above 0, got -0.25"),
        ("tau", math.nan, "tau must be above 0, got nan"),
        ("delta", -0.3, "delta must not be negative, got -0.3"),
        ("gamma", -0.1, r"gamma must be in 0\.\.1, got -0.1"),
        ("gamma", 1.5, r"gamma must be in 0\.\.1, got 1.5"),
        ("query_scale", 0.0, "query_scale must be above 0, got 0.0"),
    ],
)
def test_bad_settings_are_named(setting: str, value: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ASNConfig(**{setting: value})  # type: ignore[arg-type]
