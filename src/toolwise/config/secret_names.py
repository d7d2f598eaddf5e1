"""Detect and mask values that look like secrets: by their name, by known prefixes, and inside URLs and commands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

MASK = "***"
_SECRET_NAME = re.compile(
    r"(api|access|private|secret|signing|encryption)_?keys?$|(access|api|auth|bearer|refresh|session)_?tokens?$"
    r"|secrets?$|passw(or)?d$|passphrase$|passwd$|pwd$|credentials?$|authorization$|(^|_)(pw|creds?)$"
)
_AMBIGUOUS_NAME = re.compile(r"(^|_)(key|token)$")
"""Names that often hold no secret: the key of a dictionary, a tokenizer's token."""
_SECRET_VALUE = re.compile(
    r"(sk-|sk_live_|sk_test_|rk_live_|hf_|ghp_|gho_|ghs_|github_pat_|glpat-|xox[abprs]-|AKIA|AIza|eyJ)[\w.+/=-]{8,}$"
)
_LOGIN = re.compile(r"://(?:[^/@\s:]*:(?![{%<$*])[^/@\s]+|[\w-]{20,})@")
"""A URL with a password, or with a token as its user."""
_SETTING = re.compile(r"(^|[?&]|(?:^|\s)--?)([A-Za-z_][\w.-]*)=([^&\s]+)")
"""NAME=VALUE at the start of a text, in a URL's query or as an option of a command."""
_PLACEHOLDER = re.compile(r"[{%<$*\[(]|\.\.|…|[A-Z_]+$")
_HEADER = re.compile(r"(?:proxy-)?authorization:\s*[^\s{%<$*]|x-api-key:\s*[^\s{%<$*]", re.IGNORECASE)
_RANDOM_VALUE = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w.+/=-]{16,}$")


def is_secret(name: str, value: Any) -> bool:
    """Whether `value`, stored under `name`, looks like a secret that must not be written where others can read it."""
    if not isinstance(value, str) or not value:
        return False
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_")
    if _SECRET_VALUE.match(value) or _SECRET_NAME.search(words) or _contains_secret(value):
        return True
    return bool(_AMBIGUOUS_NAME.search(words) and _RANDOM_VALUE.match(value))


def _contains_secret(text: str) -> bool:
    """Whether a URL, a header or an option of a command has a secret in it."""
    if _LOGIN.search(text) or _HEADER.match(text):
        return True
    for start, name, value in _SETTING.findall(text):
        if not _PLACEHOLDER.match(value) and (is_secret(name, value) or (start and name.lower() == "token")):
            return True
    return False


def list_names(items: Sequence[Any], name: str) -> list[str]:
    """The name of each item of a list: the option before it, as in ["--api-key", "…"], or that of the list."""
    before = ["", *items][: len(items)]
    return [
        item.lstrip("-") if isinstance(item, str) and item.startswith("--") and "=" not in item else name
        for item in before
    ]


def secret_keys(table: Any, path: str = "", key: str = "") -> Iterator[str]:
    """The dotted names of secrets in nested tables and lists."""
    if isinstance(table, Mapping):
        pairs = [(str(name), f"{path}.{name}" if path else str(name), value) for name, value in table.items()]
    elif isinstance(table, list | tuple):
        names = list_names(table, key)
        pairs = [(name, f"{path}[{i}]", value) for i, (name, value) in enumerate(zip(names, table, strict=True))]
    else:
        return
    for name, location, value in pairs:
        if is_secret(name, value):
            yield location
        else:
            yield from secret_keys(value, location, name)


def mask_secrets(table: Any, key: str = "") -> Any:
    """A copy of nested tables and lists with secrets replaced by a mask."""
    if isinstance(table, Mapping):
        return {name: mask_secrets(value, str(name)) for name, value in table.items()}
    if isinstance(table, list | tuple):
        return [mask_secrets(value, name) for name, value in zip(list_names(table, key), table, strict=True)]
    return MASK if is_secret(key, table) else table


def find_secret(source: str) -> str | None:
    """The name of the first string in Python source that looks like a secret; its first characters if unnamed."""
    tree = ast.parse(source)
    for name, node in _named_values(tree):
        if isinstance(node, ast.Constant) and is_secret(name, node.value):
            return name
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return next((f"{str(value)[:4]!r}…" for value in constants if is_secret("", value)), None)


def secrets_warning(settings: Mapping[str, Any], folder: Path, *, sandboxed_reward: bool) -> str:
    """One line about settings that look like secrets, which a run stores in its folder; empty if there are none."""
    keys = list(secret_keys(settings))
    if not keys:
        return ""
    text = f"{', '.join(keys)}: looks like a secret and is stored as plain text in {folder}; read it from os.environ "
    text += "inside the function instead"
    if sandboxed_reward and any(key.startswith("reward.") for key in keys):
        text += " (a reward in the sandbox does not see the environment: name its module in sandbox.trusted)"
    return text


def _named_values(tree: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Expressions with a name: assignments, keyword arguments, dictionary values, parameter defaults."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                yield from ((name, value) for target in targets for name in _names(target))
            case ast.AnnAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
                yield from ((name, value) for name in _names(target))
            case ast.keyword(arg=str(name), value=value):
                yield name, value
            case ast.Dict(keys=keys, values=values):
                for key, value in zip(keys, values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(key.value, str):
                        yield key.value, value
            case ast.arguments(posonlyargs=first, args=args, defaults=defaults, kwonlyargs=keyword, kw_defaults=others):
                positional = [*first, *args][len(first) + len(args) - len(defaults) :]
                yield from ((arg.arg, value) for arg, value in zip(positional, defaults, strict=True))
                yield from ((arg.arg, value) for arg, value in zip(keyword, others, strict=True))


def _names(target: ast.expr) -> Iterator[str]:
    match target:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=str(name))):
            yield name
