"""SimulEval agent for bundles.

    simuleval --agent-class simulmt.eval.simuleval.BundleAgent --model en-zh --delay 3 \\
        --source FILE --target FILE --eval-latency-unit char --sacrebleu-tokenizer zh --output DIR
    simuleval --system-dir BUNDLE --system-config k3.yaml --source FILE --target FILE ...

The second form needs the files written by `simulmt.runtime.bundle.write_system_configs`.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from simuleval.agents.actions import Action, ReadAction, WriteAction
from simuleval.agents.agent import TextToTextAgent
from simuleval.agents.states import AgentStates

from simulmt.eval.latency import CompleteWords
from simulmt.runtime.stream import Translator, load


class BundleStates(AgentStates):
    """State of a sentence: SimulEval's, and the stream."""

    def __init__(self, translator: Translator, delay: int | None) -> None:
        self._translator = translator
        self._delay = delay
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self._stream = self._translator.stream(self._delay, segment=False)
        self._words = CompleteWords(self._translator.bundle.target.spaced)
        self._pushed = 0

    def translate(self) -> str:
        """Return the words completed since the last call; SimulEval expects whole words."""
        arrived = self.source[self._pushed :]
        self._pushed = len(self.source)
        commits = [commit for word in arrived for commit in self._stream.push(f"{word} ")]
        if self.source_finished:
            commits += self._stream.finish()
        text = "".join(self._words.push(commit.text) for commit in commits)
        return text + self._words.finish() if self.source_finished else text


class BundleAgent(TextToTextAgent):
    """Passes words from SimulEval to a stream, and commits back."""

    def __init__(self, args: Namespace) -> None:
        self._translator = load(args.model, args.threads)
        self._delay = args.delay
        super().__init__(args)

    @staticmethod
    def add_args(parser: ArgumentParser) -> None:
        parser.add_argument("--model", required=True, help="Bundle: the name of a shipped one, or a path.")
        parser.add_argument("--delay", type=int, help="Delay k; defaults to that of the model.")
        parser.add_argument(
            "--threads",
            type=int,
            default=2,
            help="CPU threads, at most one per core; 0 uses OMP_NUM_THREADS, or all cores.",
        )

    def build_states(self) -> BundleStates:
        return BundleStates(self._translator, self._delay)

    def policy(self, states: BundleStates) -> Action:  # type: ignore[override]
        """Write completed words; read if there are none."""
        text = states.translate()
        is_over = states.source_finished
        return WriteAction(text, is_over) if text or is_over else ReadAction()
