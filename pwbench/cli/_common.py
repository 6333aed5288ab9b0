"""What every command shares: ``--json``, errors as sentences and exit codes, progress on stderr.

The convention: stdout carries data only, stderr carries everything a person reads while waiting.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import click

from pwbench.errors import PwbenchError

if TYPE_CHECKING:
    from rich.console import Console

CONTEXT_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
"""Passed to every ``click.command``, so that ``-h`` works everywhere."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell reports SIGINT."""

_RESUME = "pwbench.resume"
F = TypeVar("F", bound=Callable[..., Any])


# Output -----------------------------------------------------------------------------------------


def json_option(command: F) -> F:
    """Add ``--json`` to a command; it arrives as the keyword ``as_json: bool``."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print data as JSON on stdout; all else goes to stderr."
    )(command)


def emit_json(data: Any) -> None:
    """Print ``data`` as JSON on stdout. NumPy scalars and paths are converted; a float that is not
    finite becomes null, because JSON has no such number."""
    plain = _plain(data)
    text = json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:  # another locale, or a file name that is no text: JSON can escape both
        text = json.dumps(plain, indent=2, allow_nan=False)
    click.echo(text)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int | bool):
        return value
    return str(value)


def say(message: str) -> None:
    """Tell the person something, on stderr."""
    click.echo(message, err=True)


def terminal(width: int | None = None, **options: Any) -> Console:
    """A rich console on stdout.

    Args:
        width: in columns where stdout is no terminal; None leaves it to rich.
        options: of `rich.console.Console`.
    """
    from rich.console import Console

    class _Plain(Console):
        def on_broken_pipe(self) -> None:
            # rich would exit with 1, which means here that a check failed.
            raise BrokenPipeError

    looked_at = sys.stdout is not None and sys.stdout.isatty()
    return _Plain(width=None if looked_at else width, highlight=False, **options)


# Progress ---------------------------------------------------------------------------------------


class Task(Protocol):
    """Something that advances. Call ``advance`` after each unit; ``note`` names what runs now."""

    def advance(self, steps: float = 1) -> None: ...

    def note(self, text: str) -> None: ...


class _Silent:
    def advance(self, steps: float = 1) -> None:
        pass

    def note(self, text: str) -> None:
        pass


@contextmanager
def progress(description: str, total: float | None) -> Iterator[Task]:
    """A progress bar with the time left on stderr when that is a terminal, silence otherwise.

    Args:
        description: what is going on, a few words.
        total: how many units there are, or None when nobody knows.
    """
    if not sys.stderr.isatty():
        yield _Silent()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("[dim]{task.fields[now]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total, now="")

        class _Bar:
            def advance(self, steps: float = 1) -> None:
                bar.advance(task, steps)

            def note(self, text: str) -> None:
                bar.update(task, now=text)

        yield _Bar()


def track(items: Iterable[Any], description: str, total: float | None = None) -> Iterator[Any]:
    """Iterate over ``items`` with a progress bar."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with progress(description, total) as task:
        for item in items:
            yield item
            task.advance()


# Errors -----------------------------------------------------------------------------------------


def on_interrupt(message: str) -> None:
    """Say what Ctrl-C leaves behind and how to go on; replaces what was said before. Call it again
    as the work proceeds."""
    context = click.get_current_context(silent=True)
    if context is not None:
        context.find_root().meta[_RESUME] = message


def fail(message: str, code: int) -> NoReturn:
    """End the command with one sentence on stderr and an exit code."""
    click.echo(f"pwbench: {message}", err=True)
    raise click.exceptions.Exit(code)


def guarded(ctx: click.Context, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``call(ctx, ...)`` and turn what goes wrong into one sentence and the right exit code.

    Set ``PWBENCH_TRACEBACK=1`` to see the traceback instead.
    """
    if os.environ.get("PWBENCH_TRACEBACK") == "1":
        return call(ctx, *args, **kwargs)
    _never_choke_on_a_character()
    try:
        return call(ctx, *args, **kwargs)
    except PwbenchError as error:
        fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        kept = ctx.find_root().meta.get(
            _RESUME, "Nothing was written; run the same command again to start over."
        )
        fail(f"interrupted. {kept}", INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output (``| head``) went away. Point stdout elsewhere so that the
        # interpreter's own flush at exit does not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(0) from None
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise click.exceptions.Exit(0) from None
        fail(_os_error(error), 2)
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        detail = str(error).splitlines()[0] if str(error) else "no detail"
        fail(
            f"this needs more memory than there is ({detail.rstrip('.')}). Close other programs, or use a "
            "smaller capture.",
            3,
        )


def _out_of_memory(error: BaseException) -> bool:
    # torch says it with a RuntimeError, on the CPU without a class of its own.
    return isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error)


def _never_choke_on_a_character() -> None:
    """Let a terminal or locale that cannot show a character show a question mark instead."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _os_error(error: OSError) -> str:
    where = f" while writing {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full{where}. What had been finished before is whole; free some space (or point "
            "--out, TMPDIR or PWBENCH_CACHE at another disk) and run the same command again."
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"no permission to use {error.filename or 'a file'} ({error.strerror}); choose another path."
    if isinstance(error, FileNotFoundError):
        return f"{error.filename or 'a file'} does not exist; check the path."
    return f"the system refused an operation on {error.filename or 'a file'}: {error.strerror or error}."


def handle_errors(command: F) -> F:
    """Decorator for a command that may also be run outside ``pwbench.cli.main`` (a test, say)."""
    import functools

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        context = click.get_current_context()
        return guarded(context, lambda _ctx: command(*args, **kwargs))

    return wrapped  # type: ignore[return-value]
