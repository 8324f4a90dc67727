"""The few places where Megatron is told of us; each can be removed again.

In ``megatron.training.arguments``:
    ``add_megatron_arguments`` adds our flags after Megatron's own;
    ``validate_args`` translates our flags before Megatron validates.
In ``megatron.training.training``:
    ``get_megatron_optimizer_config`` lets our settings travel with the config;
    ``get_megatron_optimizer`` builds ours where the config carries settings.
In ``megatron.core.optimizer``:
    ``get_megatron_optimizer``, the same for callers that import it from there.
In ``megatron.core.dist_checkpointing``:
    ``load`` asks first whether the checkpoint holds what our optimizer needs;
    ``load_common_state_dict`` says so when a save is not whole.
In ``megatron.training.checkpointing``:
    ``_get_checkpoint_format`` says so when a save was not finished.
In ``megatron.core.optimizer_param_scheduler``, also for a loop of one's own:
    ``OptimizerParamScheduler.load_state_dict`` decides on the rates of groups as on its own.

Valid for the versions in ``versions.SUPPORTED``; a missing target is refused by name.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatron_muon.integration.versions import MegatronVersionError, require_megatron

_CONFIG_ATTRIBUTE = "matrix_config"

_WITHOUT_SETTINGS = (
    "optimizer '{}' reached Megatron without its settings (--yaml-cfg is not supported): give it "
    "on the command line as --optimizer, or call megatron_muon.get_matrix_optimizer with "
    "OptimizerConfig.optimizer='adam'"
)


@dataclass(frozen=True, kw_only=True)
class Hook:
    """One attribute that is replaced.

    Attributes:
        module: Module that holds it.
        attribute: Its name, after a dot where a class of the module holds it.
        wrap: Gives the replacement, from the original.
    """

    module: str
    attribute: str
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]

    def place(self) -> tuple[Any, str]:
        """The module or class, and the name in it; imports the module."""
        owner, _, name = self.attribute.rpartition(".")
        module = importlib.import_module(self.module)
        return (getattr(module, owner, None) if owner else module), name


def _with_our_flags(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_megatron_arguments(parser: Any) -> Any:
        from megatron_muon.integration.arguments import add_matrix_arguments

        return add_matrix_arguments(original(parser))

    return add_megatron_arguments


def _after_translation(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        from megatron_muon.integration.arguments import translate_arguments

        translate_arguments(args)
        return original(args, *rest, **kwargs)

    return validate_args


def _with_our_settings(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_megatron_optimizer_config(args: Any) -> Any:
        from megatron_muon.integration.arguments import matrix_config_from_args

        config, overrides = original(args)
        setattr(config, _CONFIG_ATTRIBUTE, matrix_config_from_args(args))
        return config, overrides

    return get_megatron_optimizer_config


def _ours_where_asked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_megatron_optimizer(config: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron_muon.config import OPTIMIZERS
        from megatron_muon.integration.builder import get_matrix_optimizer
        from megatron_muon.integration.support import ConfigurationError

        settings = getattr(config, _CONFIG_ATTRIBUTE, None)
        if settings is None:
            if getattr(config, "optimizer", None) in OPTIMIZERS:
                raise ConfigurationError([_WITHOUT_SETTINGS.format(config.optimizer)])
            return original(config, *args, **kwargs)

        return get_matrix_optimizer(config, *args, matrix_config=settings, **kwargs)

    return get_megatron_optimizer


def _asking_first(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron_muon.integration.checkpoint_hook import with_check

    return with_check(original)


def _explain_incomplete(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron_muon.integration.checkpoint_hook import explain_incomplete

    return explain_incomplete(original)


def _explain_unfinished(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron_muon.integration.checkpoint_hook import explain_unfinished

    return explain_unfinished(original)


def _deciding_on_groups(original: Callable[..., Any]) -> Callable[..., Any]:
    from megatron_muon.integration.schedule import with_rates_of_groups

    return with_rates_of_groups(original)


SCHEDULE_HOOK = Hook(
    module="megatron.core.optimizer_param_scheduler",
    attribute="OptimizerParamScheduler.load_state_dict",
    wrap=_deciding_on_groups,
)

HOOKS = (
    Hook(
        module="megatron.training.arguments",
        attribute="add_megatron_arguments",
        wrap=_with_our_flags,
    ),
    Hook(module="megatron.training.arguments", attribute="validate_args", wrap=_after_translation),
    Hook(
        module="megatron.training.training",
        attribute="get_megatron_optimizer_config",
        wrap=_with_our_settings,
    ),
    Hook(
        module="megatron.training.training",
        attribute="get_megatron_optimizer",
        wrap=_ours_where_asked,
    ),
    Hook(
        module="megatron.core.optimizer",
        attribute="get_megatron_optimizer",
        wrap=_ours_where_asked,
    ),
    Hook(module="megatron.core.dist_checkpointing", attribute="load", wrap=_asking_first),
    Hook(
        module="megatron.core.dist_checkpointing",
        attribute="load_common_state_dict",
        wrap=_explain_incomplete,
    ),
    Hook(
        module="megatron.training.checkpointing",
        attribute="_get_checkpoint_format",
        wrap=_explain_unfinished,
    ),
    SCHEDULE_HOOK,
)

_originals: dict[tuple[str, str], Callable[..., Any]] = {}


def install() -> None:
    """Make ``--optimizer dmuon`` known to Megatron's training code; a second call does nothing.

    Call it before Megatron parses its arguments. Imports Megatron.

    Raises:
        MegatronVersionError: Megatron is missing, of another version, or lacks a hook's target.
    """
    version = require_megatron(training=True)
    # The builder keeps Megatron's own factory; it must be imported before that is replaced.
    importlib.import_module("megatron_muon.integration.builder")
    put_in(HOOKS, version)


def put_in(hooks: Iterable[Hook], version: str) -> None:
    """Put in hooks that are not in yet, all or none.

    Args:
        hooks: Some of ``HOOKS``.
        version: That of the Megatron found here.

    Raises:
        MegatronVersionError: Megatron lacks a hook's target.
    """
    targets = [
        (hook, *hook.place()) for hook in hooks if (hook.module, hook.attribute) not in _originals
    ]
    for hook, owner, name in targets:
        if not callable(getattr(owner, name, None)):
            raise MegatronVersionError(
                f"{hook.module}.{hook.attribute} is not in the megatron-core {version} found here; "
                "megatron_muon cannot hook it, use an unmodified megatron-core 0.19.x"
            )
    for hook, owner, name in targets:
        original = getattr(owner, name)
        _originals[hook.module, hook.attribute] = original
        setattr(owner, name, hook.wrap(original))


def uninstall() -> None:
    """Put Megatron's own functions back."""
    for hook in HOOKS:
        original = _originals.pop((hook.module, hook.attribute), None)
        if original is not None:
            owner, name = hook.place()
            setattr(owner, name, original)
