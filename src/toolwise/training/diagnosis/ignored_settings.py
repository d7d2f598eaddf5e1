"""Settings that have no effect because another one is not set: a budget without a router limits nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pydantic import BaseModel

from toolwise.config.schema import RunConfig
from toolwise.types.findings import Finding

WITHOUT_ROUTER = ("enable", "name", "train_actor", "families", "prices", "cost", "cost_kwargs", "usage")
"""What `[router]` says about costs, which are measured without a router too."""
WITH_OWN_ROUTER = ("enable", "name", "kwargs", "train_actor", "timeout_s")


def ignored_settings(config: RunConfig, *, has_held_out: bool) -> Finding | None:
    """One finding that names them all."""
    problems = [f"{', '.join(names)} (since {reason})" for names, reason in _ignored(config, has_held_out) if names]
    if not problems:
        return None
    return Finding(
        "ignored_settings",
        "warning",
        f"settings without effect: {'; '.join(problems)}",
        cure="Leave them out, or set what they need",
    )


def _ignored(config: RunConfig, has_held_out: bool) -> Iterator[tuple[list[str], str]]:
    """Names, and why they have no effect."""
    router, model = config.router, config.model
    if router.name:
        yield _changed("router", router, WITH_OWN_ROUTER), "router.name is a router of your own"
    elif not router.enable:
        yield _changed("router", router, WITHOUT_ROUTER), "router.enable is false"
    if config.rollout.engine != "vllm":
        yield _changed("rollout.vllm", config.rollout.vllm), f"rollout.engine is {config.rollout.engine!r}"
    if config.env.name == "tools":
        yield (["env.kwargs"] if config.env.kwargs else []), "env.name is 'tools'"
    if not config.env.interaction:
        yield (["env.interaction_kwargs"] if config.env.interaction_kwargs else []), "env.interaction is empty"
    if model.path.startswith("builtin:"):
        yield [f"model.{name}" for name in ("revision", "base") if getattr(model, name)], f"the model is {model.path}"
    if not has_held_out and not router.enable:  # whose calibration is a validation too
        names = [name for name in _changed("validation", config.validation) if name != "validation.before"]
        yield names, "there are no held-out tasks: set data.val"


def _changed(section: str, settings: BaseModel, allowed: Collection[str] = ()) -> list[str]:
    """The settings that differ from their defaults, but for the `allowed`."""
    return [
        f"{section}.{name}"
        for name, field in type(settings).model_fields.items()
        if name not in allowed and getattr(settings, name) != field.get_default(call_default_factory=True)
    ]
