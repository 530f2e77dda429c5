from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from cli.helpers import COMMAND, ENVIRONMENT, WITHOUT_TORCH, assert_refused, call, simulmt, simulmt_after, start
from runtime.test_captions import parse_srt, parse_vtt
from runtime.test_pipe import translation
from simulmt.cli import app
from simulmt.data import synthetic
from simulmt.files import cores
from simulmt.runtime import bundle as bundle_module
from simulmt.runtime import demo, pipe
from simulmt.runtime.pipe import Arrival
from simulmt.runtime.stream import Translator
from simulmt.text import Tokenizer, split_words
from tiny_models import trained, translator

TEXT = "The old bridge.\n\n  \nWe waited. The wind! Nobody\r\nthe 河 and 大 is café, nobody is listening\nno end"
LINES = TEXT.split("\n")
ENDED = "The old bridge.\nWe waited.\n"
COMMANDS = ["translate", "demo", "bench", "models", "export"]


def written(model: Translator, text: str) -> bytes:
    """Return the expected output after an unfinished line at delay 1."""
    return "".join(commit.text for commit in model.stream(1).push(text)).encode()


class Reader:
    """Reads the output of a process as it arrives."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._descriptor = process.stdout.fileno()
        self.data = b""

    def until(self, enough: bytes) -> bytes:
        """Read until the wanted bytes have arrived; return everything read."""
        end = time.monotonic() + 60
        while enough not in self.data:
            ready, _, _ = select.select([self._descriptor], [], [], end - time.monotonic())
            assert ready, f"only this came: {self.data!r}"
            chunk = os.read(self._descriptor, 4096)
            assert chunk, f"it ended after {self.data!r}"
            self.data += chunk
        return self.data


@pytest.fixture
def started(bundle: Path) -> Iterator[subprocess.Popen[bytes]]:
    with start("translate", "--model", bundle, "--delay", "1") as process:
        yield process
        process.kill()


def send(process: subprocess.Popen[bytes], data: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(data)


def send_for_ever(process: subprocess.Popen[bytes]) -> None:
    while True:
        send(process, b"the old bridge\n")


def rest_of(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Close the input; return the rest of the output, and all errors."""
    output, errors = process.communicate(timeout=60)
    return output, errors


class TestTranslate:
    def test_one_line_per_source_line(self, model: Translator, bundle: Path) -> None:
        done = simulmt("translate", "--model", bundle, stdin=TEXT)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == translation(model, TEXT)
        assert done.stdout.count("\n") == len(LINES)

    def test_a_file_with_a_byte_order_mark_and_a_delay(
        self, model: Translator, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "talk.txt"
        file.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
        done = call("translate", file, "--model", bundle, "--delay", "3", "--threads", "1", capture=capsys)
        assert done.stdout == translation(model, TEXT, 3) != translation(model, TEXT, 1)

    def test_more_threads_than_cores_are_no_error(self, model: Translator, bundle: Path) -> None:
        """A command line that works on one machine works on a smaller one."""
        done = simulmt("translate", "--model", bundle, "--threads", "4000", stdin=TEXT)
        assert (done.returncode, done.stderr, done.stdout) == (0, "", translation(model, TEXT))

    def test_a_file_is_translated_with_the_largest_delay(
        self, model: Translator, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "talk.txt"
        file.write_text(TEXT, encoding="utf-8")
        largest = translation(model, TEXT, model.config.largest_delay)
        done = call("translate", file, "--model", bundle, capture=capsys)
        assert done.stdout == largest != translation(model, TEXT)
        with file.open() as redirected:
            other = subprocess.run([*COMMAND, "translate", "--model", bundle], stdin=redirected, capture_output=True)
        assert other.stdout.decode() == largest

    def test_a_beam_for_a_full_sentence_model(
        self,
        source_tokenizer: Tokenizer,
        target_tokenizer: Tokenizer,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        network = trained("full-sentence", source_tokenizer, target_tokenizer)
        model = translator(network, "full-sentence", "fp32", tmp_path)
        lines, events = tmp_path / "lines", tmp_path / "events"
        lines.write_text(ENDED, encoding="utf-8")
        events.write_text("".join(json.dumps({"text": line}) + "\n" for line in ENDED.splitlines()), encoding="utf-8")
        arguments = ("--model", model.bundle.directory, "--beam", "3")
        done = call("translate", lines, *arguments, capture=capsys)
        assert done.stdout == model.translate(ENDED, beam=3) != model.translate(ENDED)
        done = call("translate", events, *arguments, "--input", "revisions", capture=capsys)
        assert done.stdout == model.translate(ENDED, beam=3)

    def test_events_before_a_bad_one_are_translated(
        self, model: Translator, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        events = tmp_path / "events.jsonl"
        good = "".join(json.dumps({"text": f"{line} ", "final": True}) + "\n" for line in ENDED.splitlines())
        events.write_text(good + '{"foo": 1}\n', encoding="utf-8")
        done = call("translate", events, "--model", bundle, "--input", "revisions", capture=capsys)
        number = len(ENDED.splitlines()) + 1
        assert done.returncode == 1
        assert f"{events}: line {number}: expected an event" in done.stderr
        assert done.stdout == model.translate(ENDED, model.config.default_delay)

    def test_no_text_gives_no_text(self, bundle: Path) -> None:
        done = simulmt("translate", "-", "--model", bundle)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def test_a_word_is_translated_when_it_is_complete(
        self, model: Translator, started: subprocess.Popen[bytes]
    ) -> None:
        """No line feed, no end of input; and the output only grows."""
        reader, so_far = Reader(started), "the"
        send(started, b"the")
        for word in ("old", "bridge", "over", "river"):
            send(started, f" {word}".encode())
            expected = written(model, f"{so_far} ")
            assert reader.until(expected) == expected
            so_far += f" {word}"
        output, errors = rest_of(started)
        assert (reader.data + output).decode() == translation(model, so_far, 1)
        assert (started.returncode, errors) == (0, b"")

    def test_characters_cut_in_pieces(self, model: Translator, started: subprocess.Popen[bytes]) -> None:
        text = "the 河 and 大 is café\n🙂 river\n"
        for byte in text.encode():
            send(started, bytes([byte]))
            time.sleep(0.002)
        assert rest_of(started)[0].decode() == translation(model, text, 1)

    def test_invalid_bytes_are_replaced_and_reported(self, model: Translator, bundle: Path) -> None:
        done = simulmt("translate", "--model", bundle, stdin=b"the old \xff\xe6\xb2 bridge\nriver \xe6")
        assert done.returncode == 0
        advice = "skipping bytes that are not UTF-8; convert the text with `iconv`"
        assert done.stderr == f"simulmt: standard input: line 1: {advice}\n"
        assert done.stdout == translation(model, "the old \ufffd\ufffd bridge\nriver \ufffd")

    def test_json_lines(self, model: Translator, bundle: Path) -> None:
        done = simulmt("translate", "--model", bundle, "--format", "jsonl", stdin=TEXT)
        records = [json.loads(line) for line in done.stdout.splitlines()]
        assert [record["seq"] for record in records] == list(range(1, len(records) + 1))
        for number, line in enumerate(LINES):
            mine = [record for record in records if record["sentence"] == number]
            assert "".join(record["text"] for record in mine) == model.translate(line, model.config.default_delay)
            read = [record["source_words"] for record in mine]
            assert read == sorted(read)
            assert read[-1:] == ([len(split_words(line))] if line.strip() else [])
        for record in records:
            assert list(record) == ["sentence", "seq", "text", "source_words", "lag_ms"]
            assert list(record["lag_ms"]) == ["recognition", "policy", "queue", "compute"]
            assert min(record["lag_ms"].values()) >= 0 < record["lag_ms"]["compute"]

    @pytest.mark.parametrize(("style", "parse"), [("srt", parse_srt), ("vtt", parse_vtt)])
    def test_subtitles(self, unspaced: Translator, style: str, parse: type) -> None:
        done = simulmt("translate", "--model", unspaced.bundle.directory, "--format", style, stdin=TEXT)
        cues = parse(done.stdout)
        text = "".join("".join(cue.lines) for cue in cues)
        assert text.replace(" ", "") == translation(unspaced, TEXT).replace("\n", "").replace(" ", "")
        assert len(cues) >= len([line for line in LINES if line.strip()])

    def test_output_is_utf_8_whatever_the_locale(self, unspaced: Translator) -> None:
        command = [*COMMAND, "translate", "--model", str(unspaced.bundle.directory)]
        environment = {**ENVIRONMENT, "PYTHONIOENCODING": "latin-1"}
        done = subprocess.run(command, input=b"the river", capture_output=True, check=True, env=environment)
        assert done.stdout.decode() == translation(unspaced, "the river")

    def test_translating_does_not_import_torch(self, model: Translator, bundle: Path) -> None:
        done = simulmt_after(WITHOUT_TORCH, "translate", "--model", bundle, stdin=TEXT)
        assert done.stdout == translation(model, TEXT)


class TestEndings:
    def test_a_closed_pipe_ends_it_quietly(self, started: subprocess.Popen[bytes]) -> None:
        assert started.stdout is not None
        send(started, b"the old bridge\n")
        Reader(started).until(b"\n")
        started.stdout.close()
        with pytest.raises(BrokenPipeError):  # it exits while input is still being sent
            send_for_ever(started)
        assert started.stderr is not None
        assert started.stderr.read() == b""
        assert started.wait(60) == 0

    @pytest.mark.parametrize(
        ("command", "redirection", "reason"),
        [
            ("translate", ">/dev/full", "standard output: No space left on device"),
            ("demo --fast", ">/dev/full", "standard output: No space left on device"),
            ("models path", ">/dev/full", "standard output: No space left on device"),
            ("translate", ">&-", "standard output is closed"),
            ("demo --fast", ">&-", "standard output is closed"),
            ("translate", "<&-", "standard input: Bad file descriptor"),
        ],
    )
    def test_an_unusable_stream_is_an_error(self, bundle: Path, command: str, redirection: str, reason: str) -> None:
        model = [bundle] if command == "models path" else ["--model", bundle]
        program = ["sh", "-c", f'exec "$@" {redirection}', "sh", *COMMAND, *command.split(), *model]
        environment = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run(program, input="the river", capture_output=True, check=False, text=True, env=environment)
        assert_refused(done, 1, reason)

    def test_ctrl_c_ends_it_quietly(self, model: Translator, started: subprocess.Popen[bytes]) -> None:
        send(started, b"the old ")
        Reader(started).until(written(model, "the old "))
        started.send_signal(signal.SIGINT)
        assert started.wait(60) == 130
        assert started.stderr is not None
        assert started.stderr.read() == b""

    def test_ctrl_c_while_modules_load(self) -> None:
        """A module of the command line that is interrupted while it loads leaves no traceback."""
        code = (
            "import sys, types; sys.meta_path.insert(0, types.SimpleNamespace(find_spec=lambda name, *_: "
            "(_ for _ in ()).throw(KeyboardInterrupt) if name == 'simulmt.cli' else None)); "
            "from simulmt.__main__ import main; main()"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (130, b"")

    def test_ctrl_c_keeps_the_subtitle_that_was_begun(self, model: Translator, bundle: Path) -> None:
        def interrupted(*_: object) -> Iterator[list[Arrival]]:
            yield [Arrival("the river ", 0.0)]
            raise KeyboardInterrupt

        with patch.object(pipe, "arrivals", interrupted):
            arguments = ["translate", "--model", str(bundle), "--delay", "1", "--format", "vtt"]
            done = CliRunner().invoke(app, arguments)
        (cue,) = parse_vtt(done.stdout)
        assert cue.lines == [written(model, "the river ").decode()]
        assert done.exit_code == 130

    @pytest.mark.parametrize(
        ("arguments", "code", "mentioned"),
        [
            (["translate", "--model", "xx-yy"], 1, ["xx-yy", "no such model"]),
            (["translate", "--format", "pdf"], 2, ["--format", "srt", "--help"]),
            (["translate", "--threads", "-1"], 2, ["--threads"]),
            (["translate", "missing.txt"], 1, ["missing.txt"]),
            (["translate", "Hello world"], 2, ["no such file", 'echo "Hello world" | simulmt translate']),
            (["traslate"], 2, ["Did you mean 'translate'", "'?"]),
            (["translate", "."], 1, ["directory"]),
            (["demo", "--text", "missing.txt"], 1, ["missing.txt"]),
            (["demo", "--pace", "0"], 2, ["--pace"]),
            (["models", "show", "xx-yy"], 1, ["xx-yy"]),
            (["models", "paint"], 2, ["paint", "?"]),
            (["bench", "--threads", "0"], 2, ["--threads"]),
            (["export", "runs/1"], 2, ["--"]),
            (["dance"], 2, ["dance"]),
        ],
    )
    def test_errors_are_one_line(
        self, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, mentioned: list[str]
    ) -> None:
        assert_refused(call(*arguments, capture=capsys), code, *mentioned)

    def test_an_untrained_delay_is_wrong_usage(self, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
        done = call("translate", "--model", bundle, "--delay", "4", capture=capsys)
        assert_refused(done, 2, "--delay 4", "1, 2, 3, 5")

    def test_a_damaged_model_is_named(self, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        broken = tmp_path / "broken"
        shutil.copytree(bundle, broken)
        (broken / "source.model").write_bytes(b"")
        assert_refused(call("translate", "--model", broken, capture=capsys), 1, "source.model", "damaged")

    def test_debug_shows_the_traceback(self) -> None:
        done = simulmt("--debug", "translate", "--model", "xx-yy")
        assert done.returncode == 1
        assert "Traceback" in done.stderr
        assert "BundleError: xx-yy" in done.stderr


class TestDemo:
    def test_plain_output_grows_and_matches_the_translation(self, model: Translator, bundle: Path) -> None:
        done = simulmt("demo", "--fast", "--model", bundle, "--delay", "3")
        assert (done.returncode, done.stderr) == (0, "")
        title, *sentences, summary, hints = done.stdout.split("\n\n")
        assert title == f"{bundle.name}: en to de, delay 3"
        assert len(sentences) == len(demo.SENTENCES["en"])
        for spoken, lines in zip(demo.SENTENCES["en"], sentences, strict=True):
            read = [line[4:] for line in lines.splitlines() if line.startswith("en  ")]
            pieces = [line[4:] for line in lines.splitlines() if line.startswith("de  ")]
            assert " ".join(read) == spoken
            assert "".join(pieces).replace(" ", "") == model.translate(spoken, 3).replace(" ", "")
            assert len(pieces) > 2
        words = sum(len(sentence.split()) for sentence in demo.SENTENCES["en"])
        assert summary.startswith(f"{len(sentences)} sentences, {words} words read")
        assert f"simulmt translate --model {bundle}" in hints

    def test_a_terminal_shows_lag_and_trace(self, model: Translator, bundle: Path, tmp_path: Path) -> None:
        (tmp_path / "text").write_text("the old river\n\nthe wind\n", encoding="utf-8")
        arguments = ["demo", "--model", str(bundle), "--text", str(tmp_path / "text"), "--pace", "50"]
        output = in_terminal(arguments)
        translated = model.translate("the wind", model.config.default_delay)
        for wanted in ("trace", "ms computing", "W", "2 sentences, 5 words read", translated):
            assert wanted in output
        assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1  # the cursor is shown again

    @pytest.mark.parametrize(("options", "pace"), [((), 2.5), (("--pace", "4"), 4), (("--fast", "--pace", "4"), 0)])
    def test_the_pace_can_be_chosen(
        self, bundle: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], pace: float
    ) -> None:
        with patch.object(demo, "play", return_value=iter(())) as play:
            assert call("demo", "--model", bundle, *options, capture=capsys).returncode == 0
        assert play.call_args.args[3] == pace

    def test_a_synthetic_language_has_its_own_samples(self, shipped: Path, capsys: pytest.CaptureFixture[str]) -> None:
        done = call("demo", "--fast", "--model", shipped / "invented", capture=capsys)
        lexicon = {word.source for kind in synthetic.lexicon().values() for word in kind}
        read = " ".join(line[8:] for line in done.stdout.splitlines() if line.startswith("source  "))
        assert len(read.split()) > 20
        assert set(read.split()) <= lexicon
        assert "\ntarget  " in done.stdout


def in_terminal(arguments: list[str]) -> str:
    """Return what a command writes to a terminal."""
    ours, theirs = pty.openpty()
    environment = {**ENVIRONMENT, "TERM": "xterm-256color"}
    with subprocess.Popen(
        [*COMMAND, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        output = b""
        try:
            while chunk := os.read(ours, 4096):
                output += chunk
        except OSError:  # a terminal reports its end as an error
            os.close(ours)
    assert process.returncode == 0, output.decode()
    return output.decode()


class TestModels:
    @pytest.fixture(autouse=True)
    def _installed(self, shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bundle_module, "SHIPPED", shipped)
        monkeypatch.setenv("COLUMNS", "120")

    def test_list(self) -> None:
        header, invented, real = CliRunner().invoke(app, ["models"]).stdout.splitlines()
        assert header.split() == ["model", "languages", "kind", "size", "delays", "default"]
        assert invented.split()[:4] == ["invented", "synthetic", "to", "synthetic"]
        assert real.split()[:6] == ["real", "en", "to", "de", "ctc", "int8"]
        assert real.split()[-2:] == ["1,2,3,5", "1"]

    @pytest.mark.parametrize("columns", ["80", "40"])
    def test_rows_are_not_wrapped_and_the_shipped_ones_fit_a_terminal(
        self, columns: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.undo()
        monkeypatch.setenv("COLUMNS", columns)
        lines = CliRunner().invoke(app, ["models"]).stdout.splitlines()
        assert len(lines) == 1 + len(bundle_module.shipped_names())
        assert all(len(line) <= 80 for line in lines)

    def test_a_damaged_model_does_not_hide_the_others(
        self, shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shutil.copytree(shipped, tmp_path / "copy")
        (tmp_path / "copy" / "invented" / "config.json").unlink()
        monkeypatch.setattr(bundle_module, "SHIPPED", tmp_path / "copy")
        listed = CliRunner().invoke(app, ["models"])
        assert listed.exit_code == 0
        assert "config.json: missing" in listed.stderr
        assert [line.split()[0] for line in listed.stdout.splitlines()] == ["model", "real"]

    def test_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bundle_module, "SHIPPED", tmp_path)
        listed = CliRunner().invoke(app, ["models"])
        assert (listed.exit_code, listed.stdout) == (0, "")
        assert "simulmt export" in listed.stderr

    def test_show(self, shipped: Path) -> None:
        shown = CliRunner().invoke(app, ["models", "show", "real"]).stdout
        card = (shipped / "real" / "README.md").read_text(encoding="utf-8")
        assert shown.endswith(card)
        for fact in ("en to de", "1,2,3,5", "150 and 150 pieces", str(shipped / "real")):
            assert fact in shown.removesuffix(card)

    def test_path(self, shipped: Path) -> None:
        assert CliRunner().invoke(app, ["models", "path", "real"]).stdout == f"{shipped / 'real'}\n"

    def test_verify(self, shipped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert CliRunner().invoke(app, ["models", "verify", "real"]).exit_code == 0
        shutil.copytree(shipped / "real", tmp_path / "copy")
        weights = tmp_path / "copy" / "ctc.weights"
        data = bytearray(weights.read_bytes())
        data[len(data) // 2] ^= 1
        weights.write_bytes(data)
        done = call("models", "verify", tmp_path / "copy", capture=capsys)
        assert_refused(done, 1, "ctc.weights", "checksum")

    def test_the_default_is_the_first_real_one(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert call("demo", "--fast", capture=capsys).stdout.startswith("real: ")

    def test_a_synthetic_model_is_the_default_if_it_is_the_only_one(
        self, shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        shutil.copytree(shipped / "invented", tmp_path / "invented")
        monkeypatch.setattr(bundle_module, "SHIPPED", tmp_path)
        done = call("demo", "--fast", capture=capsys)
        assert done.stdout.startswith("invented: ")
        assert "| simulmt translate\n" in done.stdout

    def test_without_models_the_error_says_what_to_do(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(bundle_module, "SHIPPED", tmp_path)
        assert_refused(call("translate", capture=capsys), 1, "--model")


class TestBench:
    @pytest.fixture(autouse=True)
    def _quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(demo, "SECONDS", 0.01)
        monkeypatch.setattr(demo, "SAMPLES", 20)

    def test_json(self, bundle: Path) -> None:
        done = CliRunner().invoke(app, ["bench", "--model", str(bundle), "--delay", "2", "--json"])
        found = json.loads(done.stdout)
        assert (found["model"], found["delay"], found["threads"]) == (bundle.name, 2, 1)
        assert 0 < found["ms_per_token"]["median"] <= found["ms_per_token"]["p95"] <= found["ms_per_token"]["p99"]
        assert [row["streams"] for row in found["throughput"]] == [1, 8, 32]
        for row in found["throughput"]:
            assert row["tokens_per_second"] > row["speakers_per_core"] > 0
        assert found["load_ms"] > 0
        assert 10 < found["memory_mb"] < 100_000

    def test_threads_beyond_the_cores_are_not_counted(self, bundle: Path) -> None:
        done = CliRunner().invoke(app, ["bench", "--model", str(bundle), "--threads", "4000", "--json"])
        assert json.loads(done.stdout)["threads"] == cores()

    def test_table(self, bundle: Path) -> None:
        shown = CliRunner().invoke(app, ["bench", "--model", str(bundle)]).stdout
        labels = [line.split("  ")[0] for line in shown.splitlines()]
        assert labels == ["model", "load", "memory", "per token", "1 stream", "8 streams", "32 streams"]

    def test_a_text_file_can_be_given(self, bundle: Path, tmp_path: Path) -> None:
        (tmp_path / "text").write_text("the river\n", encoding="utf-8")
        done = CliRunner().invoke(app, ["bench", "--model", str(bundle), "--text", str(tmp_path / "text"), "--json"])
        assert done.exit_code == 0


@pytest.mark.parametrize("command", [*COMMANDS, "models show", "models verify", "models path"])
def test_every_command_has_help(command: str) -> None:
    for flag in ("-h", "--help"):
        shown = CliRunner().invoke(app, [*command.split(), flag])
        assert shown.exit_code == 0
        assert "Usage: " in shown.stdout
        assert ("Example" in shown.stdout) == (command in COMMANDS)
