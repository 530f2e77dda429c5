"""Score a wait-k bundle with a policy at several thresholds (the stability that a token must have), maximum waits (the
words over which the threshold of a waiting token falls to zero; 0: it never falls) and delays.

    python benchmarks/policy.py --model BUNDLE --source newstest2020.en --reference newstest2020.zh1 \
        --delay 1 3 --stability 0.6 0.7 0.8 --max-wait 0 3

Columns: lower-cased BLEU, AL, LAAL, words written twice in a row, numbers of the source that are kept, and attempts
(decoder steps) per source token, which rise with every prediction that is not stable. "as exported" means the
bundle's own settings. Without --source, a few sample sentences are translated; with --toy, by a tiny untrained model.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from simulmt.eval.results import Result
from simulmt.eval.run import Evaluator, TestSet, Timing, count_pieces, read_test_set
from simulmt.runtime.bundle import DEFAULT_BUNDLE, Bundle, find
from simulmt.runtime.decoding import Array
from simulmt.runtime.seq2seq import Row, Seq2SeqDecoder
from simulmt.runtime.stream import Translator

SAMPLE = TestSet(
    "sample",
    (
        "The last bus to the harbour leaves at 10:45.",
        "Her brother bought 3 tickets and 26 postcards.",
        "Please close the window, the wind is getting colder.",
    ),
    (
        (
            "最后一班去港口的公共汽车10:45开。",
            "她的哥哥买了3张票和26张明信片。",
            "请关上窗户，风越来越冷了。",
        ),
    ),
    {},
)
TOY_DELAYS, TOY_STABILITIES = (1, 3), (0.5, 0.5)


class CountingDecoder(Seq2SeqDecoder):
    """Counts the predictions that it makes."""

    attempts = 0

    def predict(self, rows: Sequence[Row], *outputs: str) -> dict[str, Array]:
        self.attempts += len(rows)
        return super().predict(rows, *outputs)


class Scores(NamedTuple):
    title: str
    delay: int
    result: Result
    attempts: float  # per source token


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="name or path of a wait-k bundle with a policy")
    parser.add_argument("--toy", action="store_true", help="a tiny untrained model, to try the benchmark")
    parser.add_argument("--source", type=Path, help="source sentences, one per line")
    parser.add_argument("--reference", type=Path, nargs="+", default=[], help="reference translations, one per line")
    parser.add_argument("--sentences", type=int, help="use only the first N sentences", metavar="N")
    parser.add_argument("--delay", type=int, nargs="+", help="default: all delays of the model")
    parser.add_argument("--stability", type=float, nargs="+", default=[0.5, 0.7, 0.9], help="thresholds to compare")
    parser.add_argument("--max-wait", type=int, nargs="+", default=[0], help="maximum waits to compare")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if bool(arguments.model) == arguments.toy:
        parser.error("give either --model or --toy")
    test_set = SAMPLE
    if arguments.source:
        test_set = read_test_set(arguments.source, arguments.reference, limit=arguments.sentences)
    evaluator = Evaluator(test_set, "auto", Timing(sentences=0))
    with opened(arguments.model) as bundle:
        if not bundle.config.has_policy:
            parser.error(f"{bundle.name} is a {bundle.config.kind} bundle without a policy")
        delays = arguments.delay or bundle.config.delays
        policies = list(product(arguments.stability, arguments.max_wait))
        show(evaluations(evaluator, bundle, delays, policies, arguments.threads))


@contextmanager
def opened(model: str | None) -> Iterator[Bundle]:
    """Open a bundle; without a name or path, a tiny untrained one."""
    if model is not None:
        yield Bundle(find(model))
        return
    with tempfile.TemporaryDirectory() as folder:
        yield write_toy(Path(folder))


def write_toy(folder: Path) -> Bundle:
    """Export an untrained model with the vocabularies of a shipped one."""
    import torch

    from simulmt.model.seq2seq import Seq2SeqConfig, Seq2SeqModel
    from simulmt.train.export import ExportConfig, TrainedModel, export

    shipped = Bundle(find(DEFAULT_BUNDLE))
    source, target = shipped.source, shipped.target
    torch.manual_seed(1)
    sizes = {"width": 32, "inner": 64, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "policy_inner": 32}
    model = Seq2SeqModel.build(Seq2SeqConfig(source.size, target.size, causal=True, **sizes)).eval()
    config = ExportConfig("en", "zh", delays=TOY_DELAYS, stabilities=TOY_STABILITIES, precision="fp32")
    export(TrainedModel(model, source, target), folder / "toy", config)
    return Bundle(folder / "toy")


def evaluations(
    evaluator: Evaluator, bundle: Bundle, delays: Sequence[int], policies: Sequence[tuple[float, int]], threads: int
) -> Iterator[Scores]:
    """Yield the scores of the bundle as it is and with each threshold and maximum wait, at each delay."""
    versions = {"as exported": bundle}
    for stability, wait in policies:
        name = f"stability {stability:g}" + (f", wait {wait}" if wait else "")
        versions[name] = bundle.with_policy(stability, wait)
    for delay, (name, version) in product(delays, versions.items()):
        translator = Translator(version, threads)
        translator.decoder = decoder = CountingDecoder(version, threads)
        result = evaluator.score_bundle(bundle.name, translator, delay, threads).result
        tokens = sum(sum(count_pieces(translator, source)) for source in evaluator.test_set.sources)
        yield Scores(name, delay, result, decoder.attempts / tokens)


def show(found: Iterator[Scores]) -> None:
    table = Table("policy", "k", "BLEU", "AL", "LAAL", "repeated", "numbers", "attempts/token", box=None)
    signature = None
    for name, delay, result, attempts in found:
        numbers = "" if result.numbers_percent is None else f"{result.numbers_percent:.1f}%"
        latencies = f"{result.AL:.2f}", f"{result.LAAL:.2f}"
        cells = f"{result.BLEU:.2f}", *latencies, str(result.repeated_words), numbers, f"{attempts:.2f}"
        table.add_row(name, str(delay), *cells)
        signature = result.signature
    Console(width=120).print(table)
    print(signature)


if __name__ == "__main__":
    main()
