"""``${run.seed}``: a value taken from another key. Resolvers (``${oc.env:HOME}``) are refused: YAML runs no code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastloop.config.layers import Leaf, Leaves, flatten, nest
from fastloop.config.schema import make_fault
from fastloop.config.strict_yaml import Marked, Origin
from fastloop.errors import ConfigError
from fastloop.records.secrets import is_secret


def refuse_resolvers(layer: Marked) -> None:
    """Refuse every ``${…:…}`` in a layer before it can be evaluated.

    Raises:
        ConfigError: with file, line and key.
    """
    for path, value in flatten(layer.value):
        if _mentions(value, _calls_resolver):
            raise make_fault(
                ".".join(path),
                layer.origin(path),
                "only keys are looked up; resolvers are not run",
                "write the value, or a key as in ${run.seed}",
                value=value,
            )


def resolve(leaves: Leaves) -> Leaves:
    """Return the leaves with every ``${a.b}`` replaced by the value of that key; a replaced leaf keeps its origin.

    Raises:
        ConfigError: a missing key, a loop, or an unclosed brace; with file, line and key.
    """
    if not any(_mentions(leaf.value, lambda text: "${" in text) for leaf in leaves.values()):
        return leaves
    from omegaconf import OmegaConf  # here, because importing it takes longer than the rest of loading
    from omegaconf.errors import OmegaConfBaseException

    try:
        values = OmegaConf.to_container(OmegaConf.create(nest(leaves)), resolve=True)
    except OmegaConfBaseException as error:
        raise _explain_unresolved(error, leaves) from None
    resolved: Leaves = {}
    for path, leaf in leaves.items():
        value: Any = values
        for key in path:
            value = value[key]
        resolved.update({inner: Leaf(each, leaf.origin) for inner, each in flatten(value, path)})
    return resolved


def escape(nested: Any) -> Any:
    """Escape resolved values so that they can be written and read back unchanged: a literal ``${`` becomes ``\\${``."""
    if isinstance(nested, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", nested)
    if isinstance(nested, Mapping):
        return {key: escape(value) for key, value in nested.items()}
    return [escape(item) for item in nested] if isinstance(nested, list) else nested


def _mentions(value: Any, found: Any) -> bool:
    if isinstance(value, (list, dict)):
        return any(_mentions(item, found) for item in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and bool(found(value))


def _calls_resolver(text: str) -> bool:
    """Whether there is a colon anywhere inside a ``${…}``, including nested ones."""
    depth = 0
    for token in re.findall(r"\$\{|[}:]", re.sub(r"\\[\\$]", "", text)):  # an escaped \${ is not an interpolation
        if token == ":" and depth:
            return True
        depth = max(0, depth + {"${": 1, "}": -1, ":": 0}[token])
    return False


def _explain_unresolved(error: Exception, leaves: Leaves) -> ConfigError:
    key = re.sub(r"\[\d+\]", "", getattr(error, "full_key", None) or "")
    leaf = leaves.get(tuple(key.split(".")), Leaf("", Origin("configuration")))
    missing = re.search(r"Interpolation key '(.+)' not found", str(error))
    if missing:
        why = "there is no such key" if is_secret(key) else f"there is no key {missing[1]}"
        do = "write a key from the top, as in ${run.seed}"
    elif "Recursive" in str(error) or "parent node" in str(error):
        why, do = "it refers back to itself", "write a plain value at one of the keys"
    else:
        why, do = "the text inside ${…} is not a key", "fix the braces, or write \\${ for a literal ${"
    return make_fault(key, leaf.origin, why, do, value=leaf.value)
