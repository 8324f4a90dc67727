"""Hooks into Megatron: put in once, taken out again, and refused where a target is missing."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_muon.config import MatrixConfig
from megatron_muon.integration import hooks
from megatron_muon.integration.versions import MegatronVersionError


@pytest.fixture(autouse=True)
def _nothing_installed(megatron: Any) -> Iterator[None]:
    """Start and leave with Megatron's own functions."""
    hooks.uninstall()
    yield
    hooks.uninstall()


def _functions() -> list[Any]:
    return [getattr(*hook.place()) for hook in hooks.HOOKS]


def test_every_target_is_replaced_and_put_back() -> None:
    originals = _functions()
    hooks.install()
    for original, ours in zip(originals, _functions(), strict=True):
        assert ours is not original
        assert ours.__wrapped__ is original
        assert ours.__name__ == original.__name__
    hooks.uninstall()
    assert all(a is b for a, b in zip(originals, _functions(), strict=True))


def test_a_second_install_does_nothing() -> None:
    originals = _functions()
    hooks.install()
    first = _functions()
    hooks.install()
    assert all(a is b for a, b in zip(first, _functions(), strict=True))
    hooks.uninstall()
    assert all(a is b for a, b in zip(originals, _functions(), strict=True))


def test_uninstall_without_install_does_nothing() -> None:
    originals = _functions()
    hooks.uninstall()
    assert all(a is b for a, b in zip(originals, _functions(), strict=True))


def test_hooks_can_be_put_in_again() -> None:
    for _ in range(2):
        hooks.install()
        assert all(hasattr(function, "__wrapped__") for function in _functions())
        hooks.uninstall()


@pytest.mark.parametrize("hook", hooks.HOOKS, ids=lambda hook: f"{hook.module}.{hook.attribute}")
@pytest.mark.parametrize("change", ["gone", "no function"])
def test_a_missing_target_is_refused_by_name_and_nothing_replaced(
    monkeypatch: pytest.MonkeyPatch, hook: hooks.Hook, change: str
) -> None:
    owner, name = hook.place()
    if change == "gone":
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, 5)
    others = [other.place() for other in hooks.HOOKS if other is not hook]
    before = [getattr(owner, name) for owner, name in others]
    with pytest.raises(MegatronVersionError) as error:
        hooks.install()
    target = f"{hook.module}.{hook.attribute}"
    assert str(error.value).startswith(f"{target} is not in the megatron-core 0.19.")
    assert "use an unmodified megatron-core 0.19.x" in str(error.value)
    after = [getattr(owner, name) for owner, name in others]
    assert all(a is b for a, b in zip(before, after, strict=True))


def test_a_loop_of_ones_own_has_the_hook_of_the_schedule_alone() -> None:
    originals = _functions()
    hooks.put_in((hooks.SCHEDULE_HOOK,), "0.19.2")
    hooks.put_in((hooks.SCHEDULE_HOOK,), "0.19.2")
    changed = [a is not b for a, b in zip(originals, _functions(), strict=True)]
    assert changed == [hook is hooks.SCHEDULE_HOOK for hook in hooks.HOOKS]
    hooks.install()
    assert not any(a is b for a, b in zip(originals, _functions(), strict=True))
    hooks.uninstall()
    assert all(a is b for a, b in zip(originals, _functions(), strict=True))


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    originals = _functions()
    monkeypatch.setattr("megatron_muon.integration.versions._core_version", lambda: "0.18.0")
    with pytest.raises(MegatronVersionError, match=r"found megatron-core 0\.18\.0"):
        hooks.install()
    assert all(a is b for a, b in zip(originals, _functions(), strict=True))


def test_the_package_offers_the_same_hooks() -> None:
    import megatron_muon

    assert megatron_muon.install is hooks.install
    assert megatron_muon.uninstall is hooks.uninstall


def test_our_flags_come_after_megatrons() -> None:
    from megatron.training import arguments

    hooks.install()
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args(["--optimizer", "dmuon", "--matrix-lr", "3"])
    assert (args.optimizer, args.matrix_lr) == ("dmuon", 3.0)
    hooks.uninstall()
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    with pytest.raises(SystemExit):
        parser.parse_args(["--optimizer", "dmuon"])


def test_arguments_are_translated_before_megatron_validates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.training import arguments

    calls: list[tuple[str, Any]] = []

    def validate_args(args: Any, defaults: Any = None) -> str:
        calls.append((args.optimizer, defaults))
        return "validated"

    monkeypatch.setattr(arguments, "validate_args", validate_args)
    monkeypatch.setattr(
        "megatron_muon.integration.arguments.translate_arguments",
        lambda args: setattr(args, "optimizer", "adam"),
    )
    hooks.install()
    answer = arguments.validate_args(SimpleNamespace(optimizer="dmuon"), {"seed": 1})
    assert answer == "validated"
    assert calls == [("adam", {"seed": 1})]
    hooks.uninstall()


@pytest.mark.parametrize("module", ["megatron.training.training", "megatron.core.optimizer"])
@pytest.mark.parametrize("settings", [None, MatrixConfig()])
def test_ours_is_built_only_where_the_config_carries_settings(
    monkeypatch: pytest.MonkeyPatch, module: str, settings: MatrixConfig | None
) -> None:
    target = importlib.import_module(module)
    monkeypatch.setattr(
        target, "get_megatron_optimizer", lambda *args, **kwargs: ("theirs", args, kwargs)
    )
    monkeypatch.setattr(
        "megatron_muon.integration.builder.get_matrix_optimizer",
        lambda *args, **kwargs: ("ours", args, kwargs),
    )
    hooks.install()
    config = SimpleNamespace(matrix_config=settings)
    whose, args, kwargs = target.get_megatron_optimizer(config, ["chunk"], use_gloo=True)
    assert args == (config, ["chunk"])
    if settings is None:
        assert (whose, kwargs) == ("theirs", {"use_gloo": True})
    else:
        assert (whose, kwargs) == ("ours", {"use_gloo": True, "matrix_config": settings})
    whose, _, kwargs = target.get_megatron_optimizer(SimpleNamespace(), ["chunk"])
    assert (whose, kwargs) == ("theirs", {})
    hooks.uninstall()


def test_our_settings_travel_with_megatrons_config(monkeypatch: pytest.MonkeyPatch) -> None:
    target = importlib.import_module("megatron.training.training")
    monkeypatch.setattr(
        target, "get_megatron_optimizer_config", lambda args: (SimpleNamespace(), "overrides")
    )
    monkeypatch.setattr(
        "megatron_muon.integration.arguments.matrix_config_from_args", lambda args: args.settings
    )
    hooks.install()
    config, overrides = target.get_megatron_optimizer_config(SimpleNamespace(settings="ours"))
    assert (config.matrix_config, overrides) == ("ours", "overrides")
    hooks.uninstall()
