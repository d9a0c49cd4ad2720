"""Imports one plugin, validates its hooks, and calls them so that each error names the plugin."""

from __future__ import annotations

import difflib
import inspect
import logging
import traceback
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import pluggy

from core.device import PluginInfo
from core.errors import CoreError, PluginError, broken_extension
from core.hookspecs import PROJECT, CoreSpec, DeviceContext, OpenContext
from core.host.checks import RESULT_CHECKS
from core.host.plugin_metadata import PLUGIN_GROUP
from core.host.trail import running

logger = logging.getLogger(__name__)

HOOK_NAMES = tuple(name for name in vars(CoreSpec) if name.startswith("core_"))


class LoadedPlugin:
    """An imported, validated plugin, whose hooks are called here only.

    Each plugin has a plugin manager of its own, which keeps the hooks of every other plugin out of the call.
    """

    def __init__(self, info: PluginInfo, manager: pluggy.PluginManager) -> None:
        self.info = info
        self._manager = manager

    def implements(self, hook: str) -> bool:
        """Return whether the plugin implements `hook`."""
        return bool(getattr(self._manager.hook, hook).get_hookimpls())

    def call(self, hook: str, context: OpenContext | DeviceContext, default: Any = None) -> Any:
        """Call a hook and return its checked result, or the default where the plugin does not implement the hook.

        Whatever fails names plugin, version and hook.
        """
        with_blame = f"raised by plugin {self.info} in hook {hook}"
        caller: pluggy.HookCaller = getattr(self._manager.hook, hook)
        if not self.implements(hook):
            return default
        try:
            with running(self.info, f"hook {hook}"):
                result = caller(context=context)
        except CoreError as error:
            error.add_note(with_blame)
            raise
        except (Exception, SystemExit) as error:
            error.add_note(with_blame)
            raise self.error(f"hook {hook} raised {describe(error)}") from error
        # Hooks that may have several implementers give a list; here it holds one result, or none for a `None`.
        if caller.spec is None or not caller.spec.opts["firstresult"]:
            result = result[0] if result else None
        complaint = RESULT_CHECKS[hook](result)
        if complaint:
            raise self.error(f"hook {hook} returned {complaint}")
        return result

    def error(self, problem: str) -> PluginError:
        """Return the error that blames this plugin for `problem`."""
        return plugin_error(self.info, problem)


def plugin_error(info: PluginInfo, problem: str) -> PluginError:
    """Return a `PluginError` that names device, plugin and version."""
    return PluginError(
        f"device {info.device!r}",
        found=f"plugin {info} ({info.entry_point}) is broken: {problem}",
        remedy=f"report it to the author of {info.distribution}; `core doctor` shows the traceback",
    )


def load_plugin(info: PluginInfo) -> LoadedPlugin:
    """Import the plugin and validate its implementations; raise `PluginError` with the cause chained."""
    logger.debug("importing plugin %s for device %r from %s", info, info.device, info.entry_point)
    try:
        with running(info, "importing it"):
            plugin = EntryPoint(info.device, info.entry_point, PLUGIN_GROUP).load()
    except (Exception, SystemExit) as error:
        unloadable = broken_extension(f"device {info.device!r}", error)
        raise unloadable or plugin_error(info, f"importing it raised {describe(error)}") from error
    if inspect.isclass(plugin):
        raise plugin_error(info, "its entry point names a class; it must name a module or an instance")
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(CoreSpec)
    try:
        manager.register(plugin, name=info.device)
    except pluggy.PluginValidationError as error:
        raise plugin_error(info, " ".join(str(error).split())) from error
    except Exception as error:
        raise plugin_error(info, f"registering it raised {describe(error)}") from error
    problem = _implementation_problem(manager, plugin) or _unmarked_problem(manager, plugin)
    if problem:
        raise plugin_error(info, problem)
    return LoadedPlugin(info, manager)


def _implementation_problem(manager: pluggy.PluginManager, plugin: object) -> str:
    for caller in manager.get_hookcallers(plugin) or ():
        for implementation in caller.get_hookimpls():
            name = caller.name
            if not caller.has_spec():
                # pluggy accepts a misspelt hook and never calls it; `optionalhook` is how a plugin says it means it.
                if not implementation.optionalhook:
                    return f"it implements hook {name!r}, which does not exist; {_closest_hook(name)}"
            elif implementation.wrapper or implementation.hookwrapper:
                return (
                    f"its implementation of {name} is a wrapper; a plugin is called on its own, so nothing is wrapped"
                )
            else:
                problem = _argument_problem(implementation.function)
                if problem:
                    return f"its implementation of {name} takes {problem}"
    return ""


def _argument_problem(function: Callable[..., object]) -> str:
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return f"{parameter}, which is never filled; take `context` or nothing"
        # pluggy passes only arguments without a default: the implementation would always see its own default.
        if parameter.default is not parameter.empty:
            return f"argument {parameter.name!r} with a default, which is never passed; remove the default"
    return ""


def _unmarked_problem(manager: pluggy.PluginManager, plugin: object) -> str:
    for name in HOOK_NAMES:
        if not getattr(manager.hook, name).get_hookimpls() and callable(getattr(plugin, name, None)):
            return f"it defines {name} without marking it; decorate it with core.hookspecs.hookimpl"
    if not manager.hook.core_open_device.get_hookimpls():
        return "it does not implement core_open_device, the one hook every plugin needs"
    return ""


def _closest_hook(name: str) -> str:
    close = difflib.get_close_matches(name, HOOK_NAMES, n=1)
    return f"did you mean {close[0]!r}?" if close else f"the hooks are: {', '.join(HOOK_NAMES)}"


def describe(error: BaseException) -> str:
    """Return type, message and place of an exception in one line."""
    message = " ".join(str(error).split())
    # Skip frames of the import system, which do not show the failing line.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {message}{place}" if message else f"{type(error).__name__}{place}"
