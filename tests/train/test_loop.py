from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from simulmt.data.corpus import ParallelFiles
from simulmt.data.store import Dataset, prepare_dataset
from simulmt.errors import CheckpointError, ConfigError, TrainingError, VocabularyError
from simulmt.model.asn import SortedCTCModel
from simulmt.model.ctc import CTCModel
from simulmt.model.layers import Batch, Loss
from simulmt.model.risk import RiskConfig
from simulmt.model.seq2seq import Seq2SeqConfig, Seq2SeqModel
from simulmt.text import VocabularySpec
from simulmt.train import loop
from simulmt.train.analysis import explained_variance, sorting_statistics, translate_store
from simulmt.train.batches import BatchPlan, DeviceStore
from simulmt.train.loop import _Objective, batches_in_update, learning_rate, update_size_warning
from simulmt.train.monitor import Monitor
from simulmt.train.run import CheckpointFolder, RunState, describe_run
from simulmt.train.systems import (
    LowDelayConfig,
    RunConfig,
    System,
    TrainingConfig,
    build_model,
    load_model,
    translator_of,
)

from .helpers import ALONE, Recorder, run, same, snapshot, strict_json, tiny

LossFunction = Callable[..., Loss]


def checkpoints_of(directory: Path) -> CheckpointFolder:
    return CheckpointFolder(directory / "checkpoints")


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def patch_loss(monkeypatch: pytest.MonkeyPatch, change: Callable[[int, Loss], Loss]) -> None:
    """Change the loss of the CTC model, by the number of the call, from 1."""
    original: LossFunction = CTCModel.loss
    calls = 0

    def changed(*arguments: Any, **named: Any) -> Loss:
        nonlocal calls
        calls += 1
        return change(calls, original(*arguments, **named))

    monkeypatch.setattr(CTCModel, "loss", changed)


def plan_scores(monkeypatch: pytest.MonkeyPatch, *scores: float) -> Iterator[float]:
    """Make validations return these scores, one after another."""
    planned = iter(scores)
    monkeypatch.setattr(loop, "bleu", lambda *_: next(planned))
    return planned


# --- The numbers that the loop runs on ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("update", "rate"),
    [(1, 1.25e-7), (2000, 2.5e-4), (4000, 5e-4), (16_000, 2.5e-4), (100_000, 1e-4)],
)
def test_the_learning_rate_warms_up_and_falls_with_the_inverse_square_root(update: int, rate: float) -> None:
    assert learning_rate(update, TrainingConfig()) == pytest.approx(rate)


def test_without_warm_up_the_learning_rate_falls_at_once() -> None:
    settings = TrainingConfig(warmup_updates=0, learning_rate=0.3)
    assert [learning_rate(update, settings) for update in (1, 4, 9)] == pytest.approx([0.3, 0.15, 0.1])


def test_in_the_cooldown_the_learning_rate_falls_to_zero() -> None:
    settings = TrainingConfig(warmup_updates=16, learning_rate=0.4, max_updates=100, cooldown=0.2)
    plain = TrainingConfig(warmup_updates=16, learning_rate=0.4, max_updates=100)
    shares = [learning_rate(update, settings) / learning_rate(update, plain) for update in (1, 80, 81, 82, 91, 100)]
    assert shares == pytest.approx([1.0, 1.0, 1.0, 0.95, 0.5, 0.05])


@pytest.mark.parametrize(
    ("batch_tokens", "update_tokens", "processes", "batches"),
    [(8192, 32_768, 1, 4), (8192, 32_768, 3, 6), (8192, 32_768, 8, 8), (100, 100, 1, 1), (100, 160, 1, 2)],
)
def test_an_update_is_a_whole_number_of_batches_for_each_process(
    batch_tokens: int, update_tokens: int, processes: int, batches: int
) -> None:
    settings = TrainingConfig(batch_tokens=batch_tokens, update_tokens=update_tokens)
    assert batches_in_update(settings, processes) == batches
    warning = update_size_warning(settings, processes)
    assert bool(warning) == (batches * batch_tokens >= 1.25 * update_tokens)
    if warning:  # the advice works
        advised = TrainingConfig(batch_tokens=update_tokens // processes, update_tokens=update_tokens)
        assert f"training.batch_tokens to {advised.batch_tokens:,}" in warning
        assert not update_size_warning(advised, processes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_updates", 0),
        ("keep_best", 0),
        ("patience", 0),
        ("seed", -1),
        ("weight_decay", -0.1),
        ("warmup_updates", -1),
        ("learning_rate", 0.0),
        ("betas", (0.9, 1.0)),
        ("smoothing", 1.0),
        ("ema_decay", -0.5),
        ("clip_norm", 0.0),
        ("update_tokens", 100),
    ],
)
def test_a_setting_out_of_range_is_an_error_that_names_it(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        TrainingConfig(**{name: value})


def test_updates_match_a_plain_implementation(data: Path, dataset: Dataset, tmp_path: Path) -> None:
    """Compare with a plain version: gradient of the mean over an update's tokens, clipped, then AdamW."""
    config = tiny(data, max_updates=3, clip_norm=0.5, weight_decay=0.1)
    recorder = Recorder()
    run(config, tmp_path, recorder)

    settings = config.training
    torch.manual_seed(settings.seed)
    model = build_model(loop.system_config(config, dataset))
    assert isinstance(model, CTCModel)
    assert same(recorder.weights[0], snapshot(model))
    store = DeviceStore(dataset.train, ALONE.device)
    plan = BatchPlan(store.source_lengths, store.target_lengths, settings.batch_tokens, settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.1)
    for update, report in enumerate(recorder.reports, start=1):
        losses = []
        for number in (2 * update - 2, 2 * update - 1):
            torch.manual_seed(settings.seed * 1_000_003 + number)
            batch = store.batch(plan.rows(number))
            losses.append(model.loss(batch))
        mean = sum(loss.total for loss in losses) / sum(loss.tokens for loss in losses)
        optimizer.zero_grad()
        mean.backward()  # type: ignore[union-attr]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = 5e-3 * update / 4
        optimizer.step()
        assert report.gradient_norm == pytest.approx(norm.item(), rel=1e-4)
        assert norm > 0.5
        assert report.loss / report.tokens == pytest.approx(mean.item(), rel=1e-5)  # type: ignore[union-attr]
        assert report.learning_rate == 5e-3 * update / 4
        for name, tensor in snapshot(model).items():
            if "key_value.bias" not in name:  # attention does not depend on the keys' bias: its gradient is rounding
                torch.testing.assert_close(recorder.weights[update][name], tensor, rtol=1e-4, atol=1e-6)


# --- Whole runs --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ctc_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finish a run of a plain CTC system."""
    directory = tmp_path_factory.mktemp("ctc")
    run(tiny(data, "ctc", max_updates=6, validate_every=3), directory)
    return directory


@pytest.mark.parametrize("system", ["ctc", "ctc+asn", "wait-k", "teacher"])
def test_every_system_learns_and_leaves_a_model(system: System, data: Path, tmp_path: Path) -> None:
    config = tiny(data, system, max_updates=24, validate_every=8, delays=(2,))
    recorder = Recorder()
    outcome = run(config, tmp_path, recorder)

    assert (outcome.status, outcome.update, outcome.model) == ("finished", 24, tmp_path / "final")
    assert [report.update for report in recorder.reports] == list(range(1, 25))
    assert sum(recorder.losses[-4:]) < 0.85 * sum(recorder.losses[:4])
    delay = "None" if system == "teacher" else "2"
    assert [(update, *scores) for update, scores in recorder.scores.items()] == [(8, delay), (16, delay), (24, delay)]
    model, found = load_model(tmp_path)
    assert found.system == system
    assert snapshot(model).keys() == recorder.weights[0].keys()
    assert not same(snapshot(model), recorder.weights[0])
    described = strict_json(tmp_path / "final" / "model.json")
    assert described["dev_bleu"][described["chosen"]] == outcome.score


def test_each_batch_draws_one_of_several_delays(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    original: LossFunction = CTCModel.loss

    def listening(*arguments: Any) -> Loss:
        drawn.append(arguments[-2])  # the delay, before the smoothing
        return original(*arguments)

    monkeypatch.setattr(CTCModel, "loss", listening)
    recorder = Recorder()
    run(tiny(data, delays=(1, 3)), tmp_path, recorder)
    assert len(drawn) == 40
    assert all(count > 10 for count in Counter(drawn).values())
    assert set(drawn) == {1, 3}
    assert {tuple(scores) for scores in recorder.scores.values()} == {("1", "3")}
    progress = checkpoints_of(tmp_path).load(20).state["progress"]
    assert progress["scores"]["20"] == pytest.approx(sum(recorder.scores[20].values()) / 2)
    assert sum(recorder.losses[-4:]) < 0.8 * sum(recorder.losses[:4])


@pytest.fixture
def low_data(data: Path, tmp_path: Path) -> Path:
    """Prepare a data directory of five equal pairs with the vocabularies of `data`."""
    for name in ("source", "target"):
        (tmp_path / name).write_text("kyo tsi\n" * 5, encoding="utf-8")
    pairs = ParallelFiles(tmp_path / "source", tmp_path / "target")
    prepare_dataset(tmp_path / "low", [pairs], pairs, vocabularies=data)
    return tmp_path / "low"


def test_a_share_of_the_batches_at_low_delays_has_its_own_pairs(
    data: Path, low_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[int, bool]] = []
    original: LossFunction = CTCModel.loss

    def listening(model: CTCModel, batch: Batch, delay: int, smoothing: float) -> Loss:
        drawn.append((delay, len(batch.source) == 5 and bool((batch.source == batch.source[0]).all())))
        return original(model, batch, delay, smoothing)

    monkeypatch.setattr(CTCModel, "loss", listening)
    low = LowDelayConfig(low_data, share=0.5, max_delay=3)
    config = tiny(data, delays=(1, 3, 5), low_delay=low, max_updates=60)
    run(config, tmp_path / "run")
    own = Counter(delay for delay, is_own in drawn if is_own)
    batches = Counter(delay for delay, _ in drawn)
    assert own[5] == 0
    assert all(0.3 < own[delay] / batches[delay] < 0.7 for delay in (1, 3))
    assert describe_run(config, ALONE)["data"]["low_delay"]["pairs"] == 5


def test_pairs_for_low_delays_need_low_delays_and_the_same_vocabularies(
    data: Path, low_data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"low_delay.max_delay is 3, but no delay is that low: \[5\]"):
        tiny(data, delays=(5,), low_delay=LowDelayConfig(low_data))
    text = ParallelFiles(data.parent / "text" / "dev.source", data.parent / "text" / "dev.target")
    prepare_dataset(tmp_path / "other", [text], text, VocabularySpec(size=60), VocabularySpec(size=60))
    with pytest.raises(VocabularyError, match=r"other: its vocabularies differ .* --vocabularies"):
        run(tiny(data, low_delay=LowDelayConfig(tmp_path / "other")), tmp_path / "run")


def test_a_sorted_system_starts_with_all_weights_of_a_plain_run(ctc_run: Path, data: Path, tmp_path: Path) -> None:
    recorder, scratch = Recorder(), Recorder()
    run(tiny(data, "ctc+asn", init=ctc_run, max_updates=2), tmp_path / "one", recorder)
    run(tiny(data, "ctc+asn", max_updates=2), tmp_path / "other", scratch)
    model, _ = load_model(ctc_run)
    assert same(under("translator.", recorder.weights[0]), snapshot(model))
    assert same(under("sorter.", recorder.weights[0]), under("sorter.", scratch.weights[0]))
    assert not same(under("translator.", scratch.weights[0]), snapshot(model))


def test_a_sorted_run_reports_how_far_it_is_from_the_identity(data: Path, dataset: Dataset, tmp_path: Path) -> None:
    recorder = Recorder()
    outcome = run(tiny(data, "ctc+asn", delays=(1, 3), max_updates=10, keep_best=1), tmp_path / "sorted", recorder)
    assert [*recorder.sorted] == [*recorder.scores] == [5, 10]
    assert outcome.model is not None
    model, _ = load_model(outcome.model)
    best = max(recorder.scores, key=lambda update: sum(recorder.scores[update].values()))
    assert isinstance(model, SortedCTCModel)
    expected = sorting_statistics(model, DeviceStore(dataset.dev, ALONE.device), delay=1, batch_tokens=64)
    assert recorder.sorted[best] == pytest.approx(expected, rel=1e-4)
    assert 0 < expected.diagonal < 1
    plain = Recorder()
    run(tiny(data, "ctc", max_updates=5), tmp_path / "plain", plain)
    assert plain.sorted == {}


def test_a_run_resumes_without_its_initial_model(ctc_run: Path, data: Path, tmp_path: Path) -> None:
    run(tiny(data, init=ctc_run, max_updates=2), tmp_path)
    recorder = Recorder()
    run(tiny(data, init=tmp_path / "gone", max_updates=4), tmp_path, recorder)
    assert recorder.started_at == 2


def test_second_stage_counts_bigrams_from_a_trained_model(data: Path, ctc_run: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    config = tiny(data, init=ctc_run, objective="bigrams", delays=(1, 3), learning_rate=1e-3, max_updates=20)
    run(config, tmp_path, recorder)
    assert all(0 <= loss <= 1 for loss in recorder.losses)  # 1 - F1, unlike a likelihood
    assert sum(recorder.losses[-5:]) < sum(recorder.losses[:5])


def test_proportional_reading_needs_wait_k(data: Path) -> None:
    with pytest.raises(ConfigError, match='reading is for system "wait-k", got ctc'):
        RunConfig("ctc", data, reading="proportional")


@pytest.mark.parametrize("objective", ["likelihood", "risk", "policy"])
def test_the_objective_reads_as_configured(objective: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr("simulmt.train.loop.wait_k_risk_loss", lambda *arguments: found.append(arguments[-1]))
    for loss in ("loss", "policy_loss"):
        monkeypatch.setattr(Seq2SeqModel, loss, lambda *arguments: found.append(arguments[-1]))
    model = Seq2SeqModel.build(Seq2SeqConfig(9, 9, True, 8, 8, 2, 1, 1))
    batch = Batch(torch.full((2, 4), 6), torch.tensor([4, 3]), torch.full((2, 3), 6), torch.tensor([2, 3]))
    for reading in ("steady", "proportional"):
        how: dict[str, Any] = {"objective": objective, "reading": reading}
        config = RunConfig("wait-k", data, data, model={"policy_inner": 4}, **how)
        _Objective(model, config, ["a"] * 9)(batch, 1)
    assert found[0] is None
    assert found[1].tolist() == [2.0, 1.0]


def test_a_sampling_temperature_needs_wait_k(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'risk\.temperature is for system "wait-k", got transducer'):
        RunConfig("transducer", data, tmp_path, risk=RiskConfig(temperature=0.5), objective="risk")


@pytest.mark.parametrize(
    ("system", "init", "message"), [("ctc+asn", True, 'for system "ctc"'), ("ctc", False, "needs init")]
)
def test_second_stage_needs_a_ctc_model_that_has_learnt(
    system: System, init: bool, message: str, data: Path, ctc_run: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(data, system, objective="bigrams", init=ctc_run if init else None)


# --- The read/write policy of a wait-k model ---------------------------------------------------------------


@pytest.fixture(scope="module")
def wait_k_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finish a run of a wait-k system without a policy."""
    directory = tmp_path_factory.mktemp("wait-k")
    run(tiny(data, "wait-k", delays=(1, 3), max_updates=6, validate_every=3), directory)
    return directory


def policy_of(data: Path, init: Path, **changes: Any) -> RunConfig:
    settings = {"delays": (1, 3), "max_updates": 12, "validate_every": 4, "learning_rate": 0.02, **changes}
    return tiny(data, "wait-k", init=init, objective="policy", model={"policy_inner": 8}, **settings)


@pytest.mark.parametrize("changes", [{}, {"ema_decay": 0.5}, {"weight_decay": 0.5}, {"reading": "proportional"}])
def test_a_policy_is_trained_and_nothing_else(
    changes: dict[str, Any], data: Path, wait_k_run: Path, tmp_path: Path
) -> None:
    recorder = Recorder()
    outcome = run(policy_of(data, wait_k_run, keep_best=3, **changes), tmp_path, recorder)
    assert outcome.status == "finished"
    learning = [name for name, parameter in recorder.model.named_parameters() if parameter.requires_grad]
    assert learning == [f"policy.{layer}.{part}" for layer in ("expand", "contract") for part in ("weight", "bias")]
    final, initial = snapshot(load_model(tmp_path)[0]), snapshot(load_model(wait_k_run)[0])
    assert initial.keys() == {name for name in final if not name.startswith("policy.")}
    for weights in (*recorder.weights, final):
        assert same({name: weights[name] for name in initial}, initial)
    for name, tensor in under("policy.", final).items():
        assert not torch.equal(tensor, recorder.weights[0][f"policy.{name}"]), name
    assert sum(recorder.losses[-4:]) < sum(recorder.losses[:4])


def test_the_average_of_equal_weights_is_unchanged(data: Path, wait_k_run: Path, tmp_path: Path) -> None:
    """Whichever checkpoints are chosen, the translations stay those that were validated."""
    run(policy_of(data, wait_k_run, keep_best=3), tmp_path)
    folder = checkpoints_of(tmp_path)
    average = folder.average([4, 8, 12], "model.")
    first = under("model.", folder.load(4).tensors)
    frozen = [name for name in first if not name.startswith("policy.")]
    assert same({name: average[name] for name in frozen}, {name: first[name] for name in frozen})
    assert not same(average, first)


def test_other_objectives_leave_the_policy_as_it_is(data: Path, wait_k_run: Path, tmp_path: Path) -> None:
    """Every parameter that is trained needs a gradient, or several processes could not train together."""
    trained = tmp_path / "policy"
    run(policy_of(data, wait_k_run), trained)
    config = tiny(data, "wait-k", init=trained / "final", model={"policy_inner": 8}, max_updates=2)
    run(config, tmp_path / "further")
    before, after = (load_model(path)[0] for path in (trained, tmp_path / "further"))
    assert same(under("policy.", before.state_dict()), under("policy.", after.state_dict()))
    assert not same(before.state_dict(), after.state_dict())


def test_a_policy_is_scored_by_the_variance_that_it_explains(
    data: Path, dataset: Dataset, wait_k_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Printing(Recorder):
        def __init__(self) -> None:
            super().__init__()
            Monitor.__init__(self, tmp_path)

    recorder = Printing()
    outcome = run(policy_of(data, wait_k_run, keep_best=1), tmp_path, recorder)
    assert recorder.metric == "R2"
    assert [(update, *scores) for update, scores in recorder.scores.items()] == [(4, "None"), (8, "None"), (12, "None")]
    model, _ = load_model(tmp_path)
    assert isinstance(model, Seq2SeqModel)
    expected = explained_variance(model, DeviceStore(dataset.dev, ALONE.device), (1, 3), proportional=False)
    assert outcome.score == pytest.approx(expected, abs=1e-3)
    assert expected <= 100
    described = strict_json(tmp_path / "final" / "model.json")
    assert described["dev_r2"][described["chosen"]] == outcome.score
    assert "dev_bleu" not in described
    shown = capsys.readouterr().err
    assert f"finished after update 12: dev R2 {outcome.score:.2f}" in shown
    assert "BLEU" not in shown


@pytest.mark.parametrize("reading", ["steady", "proportional"])
def test_a_policy_is_scored_as_it_reads(
    reading: str, data: Path, wait_k_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = set()

    def fit(_model: Seq2SeqModel, _dev: DeviceStore, *how: Any) -> float:
        asked.add(how)
        return 50.0

    monkeypatch.setattr(loop, "explained_variance", fit)
    outcome = run(policy_of(data, wait_k_run, reading=reading), tmp_path)
    assert (asked, outcome.score) == ({((1, 3), reading == "proportional")}, 50.0)


def test_a_policy_that_resumes_is_trained_as_if_it_had_never_stopped(
    data: Path, wait_k_run: Path, tmp_path: Path
) -> None:
    for directory, updates in (("twice", 4), ("twice", 8), ("once", 8)):
        run(policy_of(data, wait_k_run, max_updates=updates), tmp_path / directory)
    twice, once = (checkpoints_of(tmp_path / name).load(8) for name in ("twice", "once"))
    assert same(twice.tensors, once.tensors)
    assert twice.state == once.state
    assert {name.split(".")[1] for name in once.tensors if name.startswith("moments.")} == {"policy"}


def test_a_policy_is_trained_further(data: Path, wait_k_run: Path, tmp_path: Path) -> None:
    run(policy_of(data, wait_k_run), tmp_path / "one")
    recorder = Recorder()
    run(policy_of(data, tmp_path / "one", max_updates=2), tmp_path / "other", recorder)
    assert same(recorder.weights[0], snapshot(load_model(tmp_path / "one")[0]))


@pytest.mark.parametrize(
    ("system", "changes", "message"),
    [
        ("ctc", {}, 'objective "policy" is for system "wait-k", got ctc'),
        ("transducer", {}, 'objective "policy" is for system "wait-k", got transducer'),
        ("teacher", {}, 'objective "policy" is for system "wait-k", got teacher'),
        ("wait-k", {"init": None}, 'objective "policy" needs init: a trained wait-k model'),
        ("wait-k", {"model": {}}, r'objective "policy" needs model\.policy_inner'),
        ("wait-k", {"model": {"policy_inner": 0}}, r'objective "policy" needs model\.policy_inner'),
    ],
)
def test_a_policy_needs_a_wait_k_model_that_has_learnt_and_a_size(
    system: System, changes: dict[str, Any], message: str, data: Path, wait_k_run: Path
) -> None:
    settings: dict[str, Any] = {"init": wait_k_run, "model": {"policy_inner": 8}, **changes}
    with pytest.raises(ConfigError, match=message):
        tiny(data, system, objective="policy", **settings)


# --- Checkpoints, scores and early stopping ----------------------------------------------------------------


def test_the_best_and_the_last_checkpoints_are_kept(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_scores(monkeypatch, 1, 9, 2, 8, 3, 4, 5, 1, 21)
    outcome = run(tiny(data, max_updates=16, validate_every=2), tmp_path)
    assert checkpoints_of(tmp_path).updates() == [4, 8, 14, 16]
    assert outcome.score == 21
    described = strict_json(tmp_path / "final" / "model.json")
    assert described["best_updates"] == [4, 8]
    assert described["chosen"] == "average of the best"
    parts = [under("model.", checkpoints_of(tmp_path).load(update).tensors) for update in (4, 8)]
    final = safetensors.torch.load_file(tmp_path / "final" / "model.safetensors")
    assert same(final, {name: (parts[0][name] + parts[1][name]) / 2 for name in final})


def test_the_best_checkpoint_is_final_where_the_average_is_worse(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_scores(monkeypatch, 1, 9, 2, 8.5)
    outcome = run(tiny(data, max_updates=6, validate_every=2), tmp_path)
    assert outcome.score == 9
    best = under("model.", checkpoints_of(tmp_path).load(4).tensors)
    assert same(safetensors.torch.load_file(tmp_path / "final" / "model.safetensors"), best)


def test_a_missing_best_checkpoint_is_ignored(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_scores(monkeypatch, 1, 9, 2, 5)
    run(tiny(data, max_updates=6, validate_every=2), tmp_path)
    (checkpoints_of(tmp_path).path(4) / "tensors.safetensors").unlink()
    plan_scores(monkeypatch)  # one checkpoint is left, and its score is known
    recorder = Recorder()
    run(tiny(data, max_updates=6, validate_every=2), tmp_path, recorder)
    assert "update-000000004: damaged" in recorder.warnings[0]
    assert strict_json(tmp_path / "final" / "model.json")["best_updates"] == [6]


@pytest.mark.parametrize(
    ("scores", "last"),
    [((1, 2, 1, 1, 1, 1), 8), ((1, 2, 3, 1, 3, 1), 10), ((0, 0, 0, 0, 0, 0), 6)],
    ids=["no gain", "equal is no gain", "never any gain"],
)
def test_a_run_ends_when_it_no_longer_gains(
    scores: tuple[int, ...], last: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_scores(monkeypatch, *scores, 0, 0, 0)
    outcome = run(tiny(data, max_updates=1000, validate_every=2, patience=4), tmp_path)
    assert (outcome.status, outcome.update) == ("finished", last)
    assert (tmp_path / "final" / "model.safetensors").exists()


def test_the_last_update_is_validated_whatever_its_number(data: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    run(tiny(data, max_updates=7, validate_every=5), tmp_path, recorder)
    assert list(recorder.scores) == [5, 7]


def test_a_finished_run_stays_as_it_is_when_called_again(ctc_run: Path, data: Path) -> None:
    files = {path: path.read_bytes() for path in ctc_run.rglob("*") if path.is_file()}
    recorder = Recorder()
    outcome = run(tiny(data, "ctc", max_updates=6, validate_every=3), ctc_run, recorder)
    assert (outcome.status, outcome.update, recorder.reports) == ("finished", 6, [])
    assert {path: path.read_bytes() for path in ctc_run.rglob("*") if path.is_file()} == files


def test_a_finished_run_given_more_updates_resumes_as_if_it_had_never_stopped(data: Path, tmp_path: Path) -> None:
    run(tiny(data, max_updates=5), tmp_path / "twice")
    run(tiny(data, max_updates=10), tmp_path / "twice")
    run(tiny(data, max_updates=10), tmp_path / "once")
    twice, once = (checkpoints_of(tmp_path / name).load(10) for name in ("twice", "once"))
    assert same(twice.tensors, once.tensors)
    assert twice.state == once.state


def test_a_run_out_of_time_finishes_and_resumes_with_the_next_call(data: Path, tmp_path: Path) -> None:
    for update in (1, 2, 3):
        outcome = run(tiny(data, max_minutes=1e-9), tmp_path / "slow")
        assert (outcome.status, outcome.update) == ("finished", update)
        assert load_model(tmp_path / "slow")
    run(tiny(data, max_updates=3), tmp_path / "once")
    slow, once = (checkpoints_of(tmp_path / name).load(3).tensors for name in ("slow", "once"))
    assert same(slow, once)


def test_the_moving_average_is_validated_and_leaves_training_alone(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validated: list[dict[str, Tensor]] = []

    def watching(model: Any, *arguments: Any, **named: Any) -> dict[int, list[int]]:
        validated.append(snapshot(model))
        return translate_store(model, *arguments, **named)

    monkeypatch.setattr(loop, "translate_store", watching)
    recorder, plain = Recorder(), Recorder()
    run(tiny(data, ema_decay=0.6, max_updates=6, validate_every=3), tmp_path / "average", recorder)
    run(tiny(data, max_updates=6, validate_every=3), tmp_path / "plain", plain)

    average = recorder.weights[0]
    by_hand = []
    for update, weights in enumerate(recorder.weights[1:]):
        decay = min(0.6, (1 + update) / (10 + update))
        average = {name: decay * average[name] + (1 - decay) * weights[name] for name in average}
        by_hand.append(average)
    torch.testing.assert_close(validated[0], by_hand[2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(validated[1], by_hand[5], rtol=1e-5, atol=1e-6)
    tensors = checkpoints_of(tmp_path / "average").load(6).tensors
    assert same(under("average.", tensors), validated[1])
    assert all(same(one, other) for one, other in zip(recorder.weights, plain.weights, strict=True))
    # The final model comes from the averages.
    final = safetensors.torch.load_file(tmp_path / "average" / "final" / "model.safetensors")
    means = {name: (validated[0][name] + validated[1][name]) / 2 for name in final}
    assert any(same(final, candidate) for candidate in (means, *validated[:2]))


def test_bfloat16_runs_and_learns(data: Path, tmp_path: Path) -> None:
    recorder, plain = Recorder(), Recorder()
    run(tiny(data, "ctc+asn", precision="bfloat16", max_updates=10), tmp_path / "one", recorder)
    run(tiny(data, "ctc+asn", max_updates=10), tmp_path / "other", plain)
    assert recorder.losses != plain.losses
    assert recorder.losses == pytest.approx(plain.losses, rel=0.03)
    assert all(tensor.dtype == torch.float32 for tensor in recorder.weights[-1].values())


# --- What goes wrong ---------------------------------------------------------------------------------------


def scaled(loss: Loss, factor: float) -> Loss:
    return loss._replace(total=loss.total * factor, likelihood=loss.likelihood * factor)


def shifted(loss: Loss, offset: float) -> Loss:
    """Change the value, but not the gradient."""
    return loss._replace(total=loss.total + offset)


def only_unalignable(loss: Loss) -> Loss:
    return scaled(loss, 0.0)._replace(tokens=loss.tokens * 0)


INSANE: dict[str, Callable[[Loss], Loss]] = {
    "nan": lambda loss: scaled(loss, math.nan),
    "infinite": lambda loss: scaled(loss, math.inf),
    "nan with a finite gradient": lambda loss: shifted(loss, math.nan),
    "infinite with a finite gradient": lambda loss: shifted(loss, math.inf),
    "no tokens": only_unalignable,
    "exploding": lambda loss: scaled(loss, 50.0),
}


# A first loss that explodes has nothing to be compared with.
@pytest.mark.parametrize(
    ("spoil", "first"),
    [
        pytest.param(INSANE[name], first, id=f"{name}, {first}")
        for name in INSANE
        for first in (1, 4)
        if (name, first) != ("exploding", 1)
    ],
)
def test_a_diverging_update_is_skipped_and_training_continues(
    spoil: Callable[[Loss], Loss], first: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[RunState] = []
    start = RunState.start

    def remembering(*arguments: Any) -> RunState:
        states.append(start(*arguments))
        return states[-1]

    monkeypatch.setattr(RunState, "start", remembering)
    moments: list[dict[str, Tensor]] = []

    class Watching(Recorder):
        def update(self, *arguments: Any) -> None:
            super().update(*arguments)
            moments.append({name: value.clone() for name, value in states[0].tensors().items()})

    spoiled = {first, first + 1}
    patch_loss(monkeypatch, lambda call, loss: spoil(loss) if call in spoiled else loss)
    recorder = Watching()
    run(tiny(data, update_tokens=256, max_updates=12, validate_every=12, ema_decay=0.5), tmp_path, recorder)
    for update, (before, after) in enumerate(pairwise(recorder.weights), start=1):
        assert same(before, after) == (update in spoiled)
    for update, (before, after) in enumerate(pairwise(moments), start=2):
        assert same(before, after) == (update in spoiled)
    progress = checkpoints_of(tmp_path).load(12).state["progress"]
    assert (progress["skipped_updates"], progress["skipped_in_a_row"]) == (2, 0)
    assert 0 < progress["average_loss"] < math.inf


def test_too_many_skipped_updates_in_a_row_end_the_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_loss(monkeypatch, lambda call, loss: scaled(loss, math.nan) if call > 6 or call == 2 else loss)
    recorder = Recorder()
    with pytest.raises(TrainingError, match=r"update 10: 4 updates in a row were skipped \(loss nan.*learning_rate"):
        run(tiny(data, update_tokens=256, max_skipped=3, validate_every=4), tmp_path, recorder)
    assert len(recorder.reports) == 9
    newest = checkpoints_of(tmp_path).load_latest(recorder.warn)
    assert newest is not None
    assert newest.update == 8
    assert all(tensor.isfinite().all() for tensor in newest.tensors.values())


def test_a_corpus_in_which_nothing_can_be_aligned_is_an_error(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_loss(monkeypatch, lambda _, loss: only_unalignable(loss))
    with pytest.raises(TrainingError, match="no target fits"):
        run(tiny(data, max_skipped=3), tmp_path)


def test_sentences_that_cannot_be_aligned_are_skipped_counted_and_reported(
    data: Path, dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = [dataset.train.pair(row)[1].tolist() for row in range(len(dataset.train))]
    needed = [len(target) + sum(one == other for one, other in pairwise(target)) for target in targets]
    unalignable = sum(int(frames < need) for frames, need in zip(dataset.train.source_lengths, needed, strict=True))
    assert 50 < unalignable < 300
    lengths = dataset.train.source_lengths, dataset.train.target_lengths
    epoch = BatchPlan(*lengths, batch_tokens=256, seed=1).batches_per_epoch
    config = tiny(data, model={"mu": 1}, update_tokens=256, max_updates=epoch, validate_every=epoch)
    run(config, tmp_path, Monitor(tmp_path, log_every=epoch))
    assert checkpoints_of(tmp_path).load(epoch).state["progress"]["skipped_sentences"] == unalignable
    assert f"{unalignable} sentences skipped, target too long for the source" in capsys.readouterr().err


def test_a_run_directory_of_another_configuration_is_refused(ctc_run: Path, data: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not fit this configuration.*another run directory"):
        run(tiny(data, "ctc", model={"width": 32}), ctc_run)
    with pytest.raises(CheckpointError, match="does not fit this configuration"):
        run(tiny(data, "ctc", ema_decay=0.5), ctc_run)


def test_a_run_directory_of_another_system_is_refused_even_if_its_tensors_fit(data: Path, tmp_path: Path) -> None:
    run(tiny(data, "wait-k", max_updates=1), tmp_path)
    with pytest.raises(CheckpointError, match=f"{tmp_path}: a wait-k run; choose another for teacher"):
        run(tiny(data, "teacher", max_updates=2), tmp_path)


def test_a_damaged_newest_checkpoint_costs_a_few_updates_and_nothing_else(data: Path, tmp_path: Path) -> None:
    config = tiny(data, max_updates=15, validate_every=5)
    for name in ("one", "other"):
        run(config, tmp_path / name)
    path = checkpoints_of(tmp_path / "one").path(15) / "tensors.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    recorder = Recorder()
    run(config, tmp_path / "one", recorder)
    assert recorder.started_at == 10
    assert "update-000000015: damaged" in recorder.warnings[0]
    assert path.read_bytes() == whole


def test_a_failed_checkpoint_write_ends_the_run_and_keeps_the_last_good_one(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(data, max_updates=10, validate_every=5)
    run(tiny(data, max_updates=5, validate_every=5), tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(CheckpointError, match=r"No space left.*last good checkpoint is update 5"):
            run(config, tmp_path)
    recorder = Recorder()
    assert run(config, tmp_path, recorder).status == "finished"
    assert (recorder.started_at, recorder.warnings) == (5, [])


def test_a_run_holds_tensors_plain_data_and_curves_only(data: Path, tmp_path: Path) -> None:
    run(tiny(data, max_updates=10, ema_decay=0.5), tmp_path, Monitor(tmp_path, log_every=5))
    paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in paths if "tfevents" not in path.name} == {".safetensors", ".json"}
    for path in paths:
        if path.suffix == ".safetensors":
            assert safetensors.torch.load_file(path)
        elif path.suffix == ".json":
            assert strict_json(path)
    assert not list(tmp_path.rglob(".*"))


# --- Words seen whole --------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["ctc", "ctc+asn"])
def test_a_run_learns_where_words_begin_from_its_vocabulary(
    data: Path, dataset: Dataset, system: System, tmp_path: Path
) -> None:
    """Neither the optimiser nor averaging of weights changes them."""
    plain = run(tiny(data, max_updates=4), tmp_path / "plain")
    config = tiny(data, system, init=plain.model, model={"whole_words": True}, max_updates=10, ema_decay=0.9)
    outcome = run(config, tmp_path / "run")
    assert outcome.model is not None
    model, loaded = load_model(outcome.model)
    assert loaded.model["whole_words"]
    starts = translator_of(model).encoder.word_starts
    assert starts is not None
    assert starts.tolist() == dataset.source_tokenizer.word_starts
    assert 0 < sum(starts.tolist()) < len(starts)
