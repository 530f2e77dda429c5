"""The command `simulmt run`: a whole experiment from one file."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from simulmt.cli import panels
from simulmt.cli.inputs import require_file
from simulmt.errors import ConfigError, DataError

if TYPE_CHECKING:
    from simulmt.recipe.plan import Places, Recipe
    from simulmt.recipe.state import Standing

SHARED = (("train",), ("rewrite", "distil"), ("rewrite", "pseudo"))  # commands that several processes can share
GO_ON = ("train", "sweep", "rewrite")  # commands that go on where a killed call was
SCRATCH = "checkpoints"  # what a training run needs only while it lasts, and by far its largest part
ASIDE = ("tensorboard",)  # what nothing is made from
PRELOADED = ("simulmt.train.loop", "simulmt.train.export", "simulmt.eval.report", "simulmt.eval.evaluate")


def register(app: typer.Typer) -> None:
    """Add this module's command to the application."""
    app.command(rich_help_panel=panels.TRAIN)(run)


def run(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="The recipe, a TOML file.")],
    only: Annotated[
        list[str] | None, typer.Option(help="Do this stage and no other, e.g. ctc or ctc-k3; may be repeated.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what is done, what is to be done and why; with --only, how.")
    ] = False,
    data: Annotated[Path | None, typer.Option(help="Directory of the text files that the recipe reads.")] = None,
    work: Annotated[
        Path | None, typer.Option(help="Where every stage has its directory.", show_default="runs/RECIPE")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Stages at a time.", show_default="1 with a GPU, else one a core")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that a stage that trains or translates is spread over.")] = 1,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe, e.g. settings.student.training.seed=2."),
    ] = None,
    ignore_code: Annotated[
        bool, typer.Option("--ignore-code", help="Keep what other versions of simulmt's code have made.")
    ] = False,
) -> None:
    """Run an experiment: the stages of a recipe that are not done, or not up to date, each after what it needs.

    Kill it whenever you like: the same command goes on where it was. A stage can be done on another machine: run the
    recipe there with --only, and copy the stage's directory back.

    \b
    Example:
      simulmt run recipes/toy.toml --dry-run
      simulmt run recipes/toy.toml
      simulmt run recipes/en-zh.toml --data corpora/en-zh --only teacher
    """
    from rich.console import Console

    from simulmt.cli.recipe_view import WIDEST, open_view, plan_tree
    from simulmt.recipe.plan import Places, Recipe
    from simulmt.recipe.runner import Program, run_stages
    from simulmt.recipe.state import survey

    plan = Recipe.read(require_file(recipe), assignments or ())
    places = Places(work or Path("runs") / recipe.stem, data)
    handlers = _check_commands(plan, places, context.find_root().command)
    standings = survey(plan, places, lambda stage: _code(handlers[stage.name]), ignore_code)
    chosen = [standings[stage.name] for stage in plan.matching(only or ())]
    if dry_run:
        Console(width=WIDEST).print(plan_tree(plan, standings))
        for standing in chosen if only else ():
            typer.echo(f"\n{standing.stage.name}: simulmt {shlex.join(places.command_line(standing.stage))}")
        return
    todo = [standing for standing in chosen if standing.state != "done"]
    _check_possible(todo, standings, places)
    _check_writable(places.work)
    jobs = jobs or (1 if _has_gpu() else _cores())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // jobs)))
    signal.signal(signal.SIGTERM, _stop)
    view = open_view(Console(stderr=True), len(chosen) - len(todo), len(todo))
    try:
        program = Program(partial(perform, gpus=gpus), PRELOADED, GO_ON, SCRATCH, ASIDE)
        went_well = run_stages(todo, places, jobs, program, view)
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on from here", err=True)
        raise typer.Exit(130) from None
    finally:
        view.close()
    if not went_well:
        raise typer.Exit(1)


def _check_writable(work: Path) -> None:
    try:
        work.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=work).close()
    except OSError as error:
        raise DataError(f"--work {work}: cannot be written: {error.strerror}") from None


def perform(words: list[str], gpus: int) -> int:
    """Run a command line of simulmt in this process, or, if it can be shared, in one for each GPU; its exit code."""
    from simulmt.cli import main

    if gpus > 1 and any(words[: len(verbs)] == [*verbs] for verbs in SHARED):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
        # Behind "--", or torchrun takes --run for the beginning of its own --run-path. It inherits the lock of its
        # stage: killed, it takes a while to end the others, and nobody may start meanwhile.
        return subprocess.run([*torchrun, "-m", "--", "simulmt", *words], check=False, close_fds=False).returncode
    sys.argv = ["simulmt", *words]
    try:
        main()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    return 0


def _check_commands(plan: Recipe, places: Places, program: Any) -> dict[str, Callable[..., Any]]:
    """Parse every stage's command line as it will be parsed when its time has come; the handler of each."""
    from simulmt.cli import WrongUsage

    handlers = {}
    for stage in plan.stages.values():
        command, words = program, places.command_line(stage)
        try:
            while commands := getattr(command, "commands", None):
                command = commands.get(words[0] if words else "")
                words = words[1:]
            if command is None:
                raise ConfigError(f"stages.{stage.family}: simulmt has no command '{stage.command}'")
            command.make_context(stage.command, words)
        except WrongUsage as error:
            raise ConfigError(f"stages.{stage.family}: {stage.command}: {error.format_message()}") from None
        handlers[stage.name] = command.callback
    return handlers


def _code(handler: Callable[..., Any]) -> str:
    from simulmt.recipe.code import code_hash

    return code_hash(handler.__module__, handler.__name__)


def _check_possible(todo: Sequence[Standing], standings: dict[str, Standing], places: Places) -> None:
    """Refuse at once what would fail later: a file that is not there, a stage that --only leaves out."""
    from simulmt.cli.recipe_view import in_words
    from simulmt.recipe.state import is_foreign

    for directory in (places.directory(standing.stage.name) for standing in todo):
        if is_foreign(directory):
            raise ConfigError(f"--work {places.work}: {directory} was not made by a recipe; move it or work elsewhere")
    names = {standing.stage.name for standing in todo}
    for standing in todo:
        if missing := places.not_at_hand(standing.stage):
            where, kind = (places.given, DataError) if places.given else ("DIR", ConfigError)
            raise kind(f"--data {where}: {standing.stage.name} reads {missing[0]}, which is not there")
        for need in standing.stage.needs:
            if standings[need].state != "done" and need not in names:
                raise ConfigError(f"--only {standing.stage.name}: needs {need}, which is {in_words(standings[need])}")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _has_gpu() -> bool:
    """Whether there is a GPU, asked without PyTorch, which takes seconds to load."""
    return Path("/dev/nvidiactl").exists()


def _stop(_number: int, _frame: object) -> NoReturn:
    raise typer.Exit(128 + signal.SIGTERM)
