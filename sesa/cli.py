"""The `sesa` command. Results go to stdout, progress to stderr; an expected error is one line and exit code 2.

Commands import what they use when they run, so that `sesa --help` answers at once.
"""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from typing import NoReturn

import typer

from sesa import cli_inspect, cli_work
from sesa.cli_output import MOST_SHOWN, one_line, outside
from sesa.errors import SesaError

app = typer.Typer(
    name="sesa",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Search self-play with an evolving skill memory. Rounds are launched with `python training/run.py`.",
)
app.add_typer(cli_inspect.runs, name="runs")
app.add_typer(cli_inspect.rollouts, name="rollouts")
app.add_typer(cli_inspect.skills, name="skills")
app.add_typer(cli_work.corpus, name="corpus")
app.command("ask")(cli_work.ask)
app.command("serve")(cli_work.serve)
app.command("doctor")(cli_work.doctor)


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 doctor found something, 2 an error that is told in one line, 130 Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal that cannot show a character must not stop the command
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except SesaError as error:
        _refuse(str(error))
    except BrokenPipeError:  # the reader has seen enough, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except UnicodeEncodeError:
        _refuse("an argument is not valid UTF-8; write it anew")
    except (OSError, OverflowError) as error:
        _refuse(outside(error))


def _refuse(message: str) -> NoReturn:
    print(f"sesa: {one_line(message, MOST_SHOWN)}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
