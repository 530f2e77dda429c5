"""The command `simulmt run`."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from simulmt.cli.training import require_file
from simulmt.errors import ConfigError, DataError

if TYPE_CHECKING:
    from simulmt.recipe.plan import Recipe, Stage, Workspace

# Commands that can run in several processes.
SHARDED = (("rewrite", "distil"), ("rewrite", "pseudo"), ("rewrite", "rerank"), ("rewrite", "backtranslate"))
MULTI_GPU = (("train",), *SHARDED)  # commands that can run on several GPUs
RESUMABLE = ("train", "sweep", "rewrite")
SCRATCH = "checkpoints"  # large, and deleted once a run is finished
IGNORED = ("tensorboard",)
PRELOADED = (
    "simulmt.cli",
    "simulmt.train.loop",
    "simulmt.train.export",
    "simulmt.train.rerank",
    "simulmt.eval.report.page",
    "simulmt.eval.run",
    "torch._dynamo",  # imported by the first optimiser, which takes two seconds
    "torch.utils.tensorboard",
)


def run(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="Recipe (TOML file).")],
    only: Annotated[list[str] | None, typer.Option(help="Run only this stage, e.g. ctc or ctc-k3; repeatable.")] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Show the status of each stage without running any; with --only, its command line."
        ),
    ] = False,
    data: Annotated[Path | None, typer.Option(help="Directory of the input text files.")] = None,
    work: Annotated[
        Path | None,
        typer.Option(help="Working directory, with one subdirectory per stage.", show_default="runs/RECIPE"),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Stages to run in parallel.", show_default="1 with a GPU, else one per core"),
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs per training or translation stage.")] = 1,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override a value, e.g. settings.student.training.seed=2; repeatable."
        ),
    ] = None,
    ignore_code: Annotated[
        bool, typer.Option("--ignore-code", help="Treat results from other versions of the code as up to date.")
    ] = False,
) -> None:
    """Run the stages of a recipe that are missing or out of date.

    To resume an interrupted run, repeat the same command. To run a stage on another machine, use --only there and copy
    the stage's directory back.

    \b
    Examples:
      simulmt run recipes/toy.toml --dry-run
      simulmt run recipes/toy.toml
      simulmt run recipes/en-zh.toml --data corpora/en-zh --only teacher
    """
    from rich.console import Console

    from simulmt.cli.display import WIDEST, open_progress, plan_tree
    from simulmt.files import cores
    from simulmt.recipe.plan import Recipe, Workspace
    from simulmt.recipe.runner import Program, run_stages
    from simulmt.recipe.state import check_runnable, code_hash, stage_statuses

    plan = Recipe.read(require_file(recipe), assignments or ())
    workspace = Workspace(work or Path("runs") / recipe.stem, data)
    handlers = _check_commands(plan, workspace, context.find_root().command)
    statuses = stage_statuses(plan, workspace, lambda stage: code_hash(*handlers[stage.name]), ignore_code)
    chosen = [statuses[stage.name] for stage in plan.matching(only or ())]
    if dry_run:
        Console(width=WIDEST).print(plan_tree(plan, statuses))
        for status in chosen if only else ():
            _print_command(status.stage, workspace)
        return
    todo = [status for status in chosen if status.state != "done"]
    check_runnable(todo, statuses, workspace)
    _check_writable(workspace.work)
    jobs = jobs or (1 if _has_gpu() else cores())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // jobs)))
    signal.signal(signal.SIGTERM, _stop)
    view = open_progress(Console(stderr=True), len(chosen) - len(todo), len(todo))
    try:
        program = Program(partial(run_command, gpus=gpus), PRELOADED, RESUMABLE, SCRATCH, IGNORED)
        succeeded = run_stages(todo, workspace, jobs, program, view)
    except KeyboardInterrupt:
        typer.echo("interrupted; run the same command to resume", err=True)
        raise typer.Exit(130) from None
    finally:
        view.close()
    if not succeeded:
        raise typer.Exit(1)


def _print_command(stage: Stage, workspace: Workspace) -> None:
    from simulmt.recipe.plan import settings_file

    typer.echo(f"\n{stage.name}: simulmt {shlex.join(workspace.command_line(stage))}")
    for name in stage.settings:
        path = settings_file(workspace.directory(stage.name), name)
        if not path.exists():
            typer.echo(f"{path} does not exist yet: it is written when the stage starts", err=True)


def _check_writable(work: Path) -> None:
    try:
        work.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=work).close()
    except OSError as error:
        raise DataError(f"--work {work}: not writable: {error.strerror}") from None


def run_command(arguments: list[str], processes: int = 1, gpus: int = 1) -> int:
    """Run a simulmt command line, in several processes if it can be sharded; return its exit code."""
    from simulmt.cli import main

    if gpus > 1 and any(arguments[: len(command)] == [*command] for command in MULTI_GPU):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
        # "--" keeps torchrun from taking --run for its own --run-path. It inherits the lock of its stage, because it
        # takes a while to stop its workers after being killed.
        command = [*torchrun, "-m", "--", "simulmt", *arguments]
        return subprocess.run(command, check=False, close_fds=False).returncode
    sys.argv = ["simulmt", *arguments]
    with _additional_processes(arguments, processes - 1):
        try:
            main()
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else 1
    return 0


@contextmanager
def _additional_processes(arguments: list[str], count: int) -> Iterator[None]:
    """Run a command in additional processes; if one fails, the others do its work."""
    command = [sys.executable, "-m", "simulmt", *arguments]
    processes = [subprocess.Popen(command, close_fds=False) for _ in range(count)]
    try:
        yield
    finally:  # the result is complete, or cannot be completed
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def _check_commands(plan: Recipe, workspace: Workspace, program: Any) -> dict[str, tuple[str, str]]:
    """Parse the command line of every stage, to fail early; return the module and name of their handlers."""
    from simulmt.cli import UsageError

    handlers = {}
    for stage in plan.stages.values():
        command, words = program, workspace.command_line(stage)
        try:
            while commands := getattr(command, "commands", None):
                command = commands.get(words[0] if words else "")
                words = words[1:]
            if command is None:
                raise ConfigError(f"stages.{stage.family}: unknown command '{stage.command}'")
            command.make_context(stage.command, words)
            if stage.processes > 1 and stage.words[:2] not in SHARDED:
                raise ConfigError(f"stages.{stage.family}: processes: {stage.command} cannot run in several processes")
        except UsageError as error:
            raise ConfigError(f"stages.{stage.family}: {stage.command}: {error.format_message()}") from None
        handlers[stage.name] = command.callback.__module__, command.callback.__name__
    return handlers


def _has_gpu() -> bool:
    """Return whether there is a GPU, without importing PyTorch."""
    return Path("/dev/nvidiactl").exists()


def _stop(_number: int, _frame: object) -> NoReturn:
    raise typer.Exit(128 + signal.SIGTERM)
