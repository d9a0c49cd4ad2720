"""The `core` command: one module per subcommand, imported only when that subcommand is called."""

from __future__ import annotations

import logging
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

    from core.errors import CoreError
    from core.host.probing import DeviceScan

COMMANDS: Mapping[str, str] = {
    "bench": "core.cli.bench:bench",
    "bisect": "core.cli.bisect:bisect",
    "cache": "core.cli.cache:cache",
    # The suite is a user of core; named here, imported when asked for.
    "conformance": "core_conformance.command:conformance",
    "devices": "core.cli.devices:devices",
    "doctor": "core.cli.doctor:doctor",
    "explain": "core.cli.explain:explain",
    "fakes": "core.cli.fakes:fakes",
    "kernels": "core.cli.kernels.build:kernels",
    "new-plugin": "core.cli.new_plugin:new_plugin",
    "passes": "core.cli.passes:passes",
    "run": "core.cli.run:run",
    "serve": "core.cli.serving.serve:serve",
}
"""Subcommand to `module:function`. To add one, add a line; the module imports torch inside its functions only."""

_JSON_FILES = frozenset({"bench", "conformance"})
"""Subcommands whose `--json` names a file, `-` for standard output; for all others it is a flag."""

_WITHOUT_TORCH = frozenset({"cache", "devices", "doctor", "new-plugin"})
"""Subcommands whose process imports neither torch nor a plugin."""

_TELL_START = frozenset({"bench", "bisect", "explain", "passes", "run"})
"""Subcommands that say so if importing torch takes long."""

EXIT_OK, EXIT_INTERNAL, EXIT_USER, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    0 for success, 1 for a failure that a command found or an internal error, 2 for a `CoreError` or a wrong usage, 130
    and 143 for an interrupt and for SIGTERM, where the command has not answered it itself.
    argv: arguments without the program's name (default: the process's own).
    """
    from core.cli import ranks
    from core.cli.values import check_text
    from core.common.collector import own_process
    from core.errors import CoreError

    ranks.begin()
    own_process(own=argv is None)
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug, arguments = _take_debug(arguments)
    as_json = _wants_json(arguments)
    if debug:
        logging.basicConfig(level=logging.DEBUG, format="%(levelname)s %(name)s: %(message)s")
    elif argv is None:  # the process is the command's own
        _hush()
    try:
        check_text(arguments)
        foreign = _isolate(arguments)
    except CoreError as error:
        _say(error, as_json=as_json, debug=debug)
        return ranks.end(EXIT_USER)
    # Arguments that are given are those of a caller in Python, whose process is not the command's to fork.
    if not foreign or argv is not None:
        return ranks.end(_answer(arguments, as_json=as_json, debug=debug))
    from core.cli.supervision import supervised

    return ranks.end(
        supervised(
            lambda: _answer(arguments, as_json=as_json, debug=debug),
            lambda error: _say(error, as_json=as_json, debug=debug),
        )
    )


def _hush() -> None:
    """Keep transformers from telling users to install kernels for layers whose code passes make ops of."""
    logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)


def _say(error: CoreError, *, as_json: bool, debug: bool) -> None:
    from core.cli.output import print_core_error
    from core.cli.ranks import told

    if not told(error, debug=debug):
        print_core_error(error, as_json=as_json, debug=debug)


def _isolate(arguments: list[str]) -> bool:
    """Keep damaged distributions from a command that imports torch; return whether foreign plugins may run in it."""
    if _wanted(arguments) in (None, *_WITHOUT_TORCH) or "--help" in arguments:
        return False
    from core.host.discovery import discover
    from core.host.distributions.isolation import isolate
    from core.settings import Settings

    found = discover(Settings.from_environment())
    isolate(found.damaged, found.unread)
    return any(entry.verdict == "ready" and not entry.info.in_tree for entry in found.entries)


def _answer(arguments: list[str], *, as_json: bool, debug: bool) -> int:
    """Run the subcommand and return the exit code; errors are printed."""
    from core.cli.output import print_internal_error, print_usage_error
    from core.cli.ranks import told
    from core.errors import CoreError, broken_extension

    try:
        return _run(arguments)
    except CoreError as error:
        _say(error, as_json=as_json, debug=debug)
        return EXIT_USER
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        # typer carries its own copy of click or uses the installed one, by version: told by shape, not by class.
        if hasattr(error, "format_message") and hasattr(error, "show"):
            print_usage_error(error, as_json=as_json)
            return EXIT_USER
        unloadable = broken_extension(f"core {' '.join(arguments)}".strip(), error)
        if unloadable is not None:
            unloadable.__cause__ = error
            _say(unloadable, as_json=as_json, debug=debug)
            return EXIT_USER
        if not told(error, debug=debug):
            print_internal_error(error, as_json=as_json, debug=debug)
        return EXIT_INTERNAL


def _take_debug(arguments: list[str]) -> tuple[bool, list[str]]:
    """Take `--debug` out of the arguments, so that it may stand before or after the subcommand."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [argument for argument in arguments[:end] if argument != "--debug"]
    return len(kept) < end, kept + arguments[end:]


def _wanted(arguments: list[str]) -> str | None:
    return next((item for item in arguments if item in COMMANDS), None)


def _wants_json(arguments: list[str]) -> bool:
    """Return whether standard output is to hold JSON, and so an error too."""
    if _wanted(arguments) not in _JSON_FILES:
        return "--json" in arguments
    # Without a file to write to, the option can only have meant standard output.
    following = [*arguments[1:], "-"]
    values = [
        after if item == "--json" else item.removeprefix("--json=")
        for item, after in zip(arguments, following, strict=True)
        if item.partition("=")[0] == "--json"
    ]
    return values[-1:] == ["-"]


def _run(arguments: list[str]) -> int:
    from core.cli.output import end_start, start
    from core.cli.ranks import COMMAND_LINE

    wanted = _wanted(arguments)
    with ExitStack() as stack:
        stack.callback(end_start)
        start(quiet=wanted not in _TELL_START or "--help" in arguments or "--json" in arguments)
        # Importing typer takes longer than launching the probes, which run meanwhile.
        scan = stack.enter_context(_start_scan()) if wanted == "devices" and "--help" not in arguments else None
        import typer

        COMMAND_LINE.set(tuple(arguments))
        command = typer.main.get_command(_app(wanted))
        result: Any = command.main(arguments or ["--help"], prog_name="core", standalone_mode=False, obj=scan)
    return result if isinstance(result, int) else EXIT_OK


def _start_scan() -> DeviceScan:
    from core.host.probing import DeviceScan
    from core.settings import Settings

    return DeviceScan(Settings.from_environment(), ask_torch=True)


def _print_version(asked: bool) -> None:
    if asked:
        import typer

        from core._version import __version__

        print(f"core {__version__}, Python {platform.python_version()}")
        raise typer.Exit


def _app(wanted: str | None) -> typer.Typer:
    """Build the application: with the wanted subcommand only, or with all of them for `--help` and unknown names."""
    import typer

    from core.cli.values import checked

    app = typer.Typer(add_completion=wanted is None, pretty_exceptions_enable=False, rich_markup_mode=None)

    # `main` takes --debug out before parsing; it is declared here for --help.
    @app.callback()
    def _root(
        debug: bool = typer.Option(False, "--debug", help="Log everything and show tracebacks."),
        version: bool = typer.Option(
            False, "--version", is_eager=True, callback=_print_version, help="Show the versions of core and Python."
        ),
    ) -> None:
        """Run any transformers model on any accelerator: devices, passes and captured graphs."""

    for name, target in COMMANDS.items():
        if wanted in (None, name):
            module, _, function = target.partition(":")
            app.command(name)(checked(getattr(import_module(module), function)))
    return app
