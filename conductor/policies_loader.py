"""Finds the placement policy that a name means: of the core, of an installed package, or any function.

A name is looked up in the core first, then among the entry points of the group `conductor.policies`; `module:function` names a
function directly. It must take a `Situation` and answer with a `Choice`, or None when nobody can take the request.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from conductor.core.placement import Policy
from conductor.core.policies import POLICIES

GROUP = "conductor.policies"


class PolicyError(ValueError):
    """A policy cannot be had; the message names it, what is wrong, and what is allowed."""


def load_policy(name: str) -> Policy:
    """The policy of that name. Raises PolicyError."""
    if name in POLICIES:
        return POLICIES[name]
    offered = {point.name: point for point in entry_points(group=GROUP)}
    if name in offered:
        return _checked(name, _load(name, offered[name]))
    if ":" not in name:
        known = ", ".join(sorted({*POLICIES, *offered}))
        raise PolicyError(f"policy is {name!r}; allowed: {known}, an entry point of {GROUP}, or module:function")
    return _checked(name, _import(name))


def _load(name: str, point: EntryPoint) -> Any:
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise PolicyError(f"policy is {name!r}; its entry point {point.value!r} cannot be loaded: {error}") from error


def _import(name: str) -> Any:
    module, _, function = name.partition(":")
    if not module or not function:
        raise PolicyError(f"policy is {name!r}; allowed: module:function, with both parts")
    try:
        return getattr(import_module(module), function)
    except ImportError as error:
        raise PolicyError(f"policy is {name!r}; module {module!r} cannot be imported: {error}") from error
    except AttributeError as error:
        raise PolicyError(f"policy is {name!r}; module {module!r} has no {function!r}") from error


def _checked(name: str, found: Any) -> Policy:
    if not callable(found):
        raise PolicyError(f"policy is {name!r}; it is a {type(found).__name__}, allowed: a function of one Situation")
    try:
        inspect.signature(cast(Callable[..., Any], found)).bind(object())
    except TypeError as error:
        raise PolicyError(f"policy is {name!r}; it must take one argument, the Situation: {error}") from error
    return cast(Policy, found)
