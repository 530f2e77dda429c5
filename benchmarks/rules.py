"""The effect of each decoding rule of a CTC bundle: scores with all rules, without each of them, and without any.

    python benchmarks/rules.py --source newstest2015.de --reference newstest2015.en --lexicon train.en [--delay K]

Columns: lower-cased BLEU, AL, words written twice in a row, words found neither in the lexicon nor in the source, and
sentences that change without the rule. The lexicon should be the training text; by default it is the
bundle's word list, in which rare words are missing. Without --source, a few sample sentences are translated.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from simulmt.data.corpus import read_lines
from simulmt.eval.quality import Lexicon
from simulmt.eval.run import Evaluation, Evaluator, TestSet, Timing, read_test_set
from simulmt.runtime.bundle import WORDS, Bundle, find
from simulmt.runtime.stream import Translator

SAMPLE = TestSet(
    "sample",
    (
        "Guten Morgen, meine Damen und Herren.",
        "Die Feuerwehr rettete eine Katze aus dem Lindenbaum.",
        "Gestern Abend hat der Hausmeister die Heizung repariert.",
    ),
    (
        (
            "Good morning, ladies and gentlemen.",
            "The fire brigade rescued a cat from the lime tree.",
            "The caretaker repaired the heating last night.",
        ),
    ),
    {},
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="de-en", help="name or path of a CTC bundle")
    parser.add_argument("--source", type=Path, help="source sentences, one per line")
    parser.add_argument("--reference", type=Path, nargs="+", default=[], help="reference translations, one per line")
    parser.add_argument("--lexicon", type=Path, help="text in the target language; words not in it are unknown")
    parser.add_argument("--sentences", type=int, help="use only the first N sentences", metavar="N")
    parser.add_argument("--delay", type=int, help="default: the model's default")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    bundle = Bundle(find(arguments.model))
    if not bundle.config.rules.active:
        parser.error(f"{bundle.name} has no decoding rules")
    test_set = SAMPLE
    if arguments.source:
        test_set = read_test_set(arguments.source, arguments.reference, limit=arguments.sentences)
    lexicon = Lexicon(read_lines(arguments.lexicon or bundle.directory / WORDS))
    evaluator = Evaluator(test_set, "auto", Timing(sentences=0), lexicon=lexicon)
    delay = arguments.delay or bundle.config.default_delay
    show(list(evaluations(evaluator, bundle, delay, arguments.threads)))


def evaluations(
    evaluator: Evaluator, bundle: Bundle, delay: int | None, threads: int
) -> Iterator[tuple[str, Evaluation]]:
    """Yield a title and the scores with all rules, without each of them, and without any."""
    rules = bundle.config.rules.active
    without = {"all rules on": [], **{f"without {rule}": [rule] for rule in rules}, "all rules off": rules}
    for title, off in without.items():
        translator = Translator(bundle.without(*off), threads)
        yield title, evaluator.score_bundle(bundle.name, translator, delay, threads)


def show(found: list[tuple[str, Evaluation]]) -> None:
    table = Table("rules", "BLEU", "AL", "repeated", "unknown", "changed", box=None)
    baseline = found[0][1]
    for title, evaluation in found:
        result = evaluation.result
        pairs = zip(evaluation.hypotheses, baseline.hypotheses, strict=True)
        changed = sum(hypothesis != other for hypothesis, other in pairs)
        counts = map(str, (result.repeated_words, result.unknown_words, changed))
        table.add_row(title, f"{result.BLEU:.2f}", f"{result.AL:.2f}", *counts)
    Console(width=120).print(table)
    print(baseline.result.signature)


if __name__ == "__main__":
    main()
