"""From YAML to one checked record.

``load`` merges the files and the command line onto the defaults, resolves ``${key}``, checks every key and type against
the dataclasses and records where each value was written. Errors name file, line and full key, never a secret.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fastloop.config.interpolation import escape, refuse_resolvers, resolve
from fastloop.config.layers import (
    Layer,
    Leaf,
    Leaves,
    flatten,
    list_marked_leaves,
    merge,
    nest,
    override_layers,
    read_dict_layers,
    read_file_layers,
    read_patch_layer,
    to_plain_values,
)
from fastloop.config.schema import build, check_keys, check_type, find_origin, make_fault
from fastloop.config.shipped import OF_RUN, Kind, find_shipped
from fastloop.config.strict_yaml import Origin
from fastloop.errors import ConfigError
from fastloop.records.secrets import make_scrubber
from fastloop.records.store import is_file, make_safe_name
from fastloop.records.yaml_text import dump_yaml

if TYPE_CHECKING:
    from fastloop.ladder import Ladder

Switch = Literal["on", "off"]

ABSENT = "-"
"""What `diff` shows for a key that one side does not have."""

DEFAULT = Origin("default")

NOT_FOR_CALLBACKS = ("recipe", "run", "trainer")
"""Sections that describe a run; inside the user's Trainer they cannot set anything."""

OWNED = {
    "max_steps": ("the run section sets it", "write run.max_steps"),
    "devices": ("the run section sets it", "write run.devices"),
    "accelerator": ("the run section sets it", "write run.accelerator"),
    "callbacks": (
        "callbacks are objects, which YAML cannot create",
        "return them from the module's configure_callbacks",
    ),
}
"""Keys of ``trainer`` that are set elsewhere, with the reason and the advice."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How long, how often and on what to train."""

    max_steps: int = 200
    """Optimizer steps, at least 1."""
    seed: int = 0
    """Seed of the first run, 0 to 2**32 - 1; run i of an experiment takes seed + i."""
    devices: int = 1
    """Training processes on this machine, one device each."""
    accelerator: str = "auto"
    """As in Lightning: auto, cpu, gpu, …"""
    resume: str | None = None
    """Path of the checkpoint to resume from; null = start fresh."""

    def __post_init__(self) -> None:
        _require_at_least(1, "run.max_steps", self.max_steps)
        _require_at_least(0, "run.seed", self.seed)
        _require_at_least(1, "run.devices", self.devices)
        if self.seed >= 2**32:
            raise ConfigError(
                key="run.seed",
                got=f"run.seed: {self.seed}",
                why="NumPy takes seeds below 2**32",
                do="write a smaller seed",
            )


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """What is measured while training."""

    enabled: bool = True
    warmup_steps: int = 20
    """Optimizer steps before the measured window opens."""
    trace_steps: int = 0
    """Optimizer steps after the window to record as a trace; 0 = no trace."""
    usd_per_gpu_hour: float | None = None
    """Price of one GPU in US dollars per hour; null = costs are not reported."""

    def __post_init__(self) -> None:
        _require_at_least(0, "watch.warmup_steps", self.warmup_steps)
        _require_at_least(0, "watch.trace_steps", self.trace_steps)
        _require_at_least(0, "watch.usd_per_gpu_hour", self.usd_per_gpu_hour or 0)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A checked configuration. Its repr leaves out fields that may hold secrets: recipe, trainer and values."""

    name: str
    """Safe as a folder name."""
    written: str = ""
    """Its path or shipped name as written on the command line."""
    script: str | None = None
    """Name of the script whose FastLoop it configures, under a command that runs one."""
    recipe_file: Path | None
    """The recipe's Python file: the one next to the deepest YAML in the chain of bases that has one."""
    recipe_yaml: str | None
    """The YAML next to it, as named in origins."""
    recipe: Mapping[str, Any] = field(repr=False)
    run: RunSettings
    trainer: Mapping[str, Any] = field(repr=False)
    watch: WatchSettings
    strict: bool
    rehearsal: Switch
    """Whether rungs that change the device's work are tried on the first step's calls before they take effect."""
    ladder: Ladder
    by_ladder: frozenset[str]
    """Rungs that a shipped ladder enabled, as opposed to rungs that the user enabled by name."""
    values: Mapping[str, Any] = field(repr=False)
    """All values, including defaults, as nested plain values."""
    origins: Mapping[str, Origin] = field(repr=False)
    """Dotted key of each leaf of ``values`` -> where it came from. A list is one leaf."""


def load(
    conf: str,
    *,
    more: Sequence[str] = (),
    overrides: Sequence[str] = (),
    suggested: Sequence[Kind] = ("recipes",),
) -> Config:
    """Read a configuration: defaults < its bases, left to right < the file itself < ``more`` < ``overrides``.

    Args:
        conf: a path (contains ``/`` or ends in ``.yaml``) or a shipped name.
        more: patches, by path or shipped name; they have no ``base``.
        overrides: ``key=value`` arguments; one argument may hold several, separated by commas.
        suggested: the kinds whose names may be suggested for a mistyped one.

    Raises:
        ConfigError: for any error, with file, line and full key.
    """
    cwd = Path.cwd()
    files = read_file_layers(conf, cwd, suggested=suggested)
    layers = [*files, *(read_patch_layer(text, cwd) for text in more), *override_layers(overrides)]
    recipe = _find_recipe_layer(files)
    named = recipe.path if recipe is not None and Path(conf).name == OF_RUN else None  # a run's own names none
    config = _assemble(layers, make_safe_name((named or Path(conf)).stem), recipe)
    return dataclasses.replace(config, written=conf)


def load_callback_config(
    config: str | os.PathLike[str] | Mapping[str, Any] | None,
) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration of ``FastLoop(config)``, and the sections in it that a callback ignores.

    Args:
        config: None (defaults: only watch), a shipped name or a path, or a mapping shaped like the YAML.

    Raises:
        ConfigError: as in `load`.
    """
    cwd = Path.cwd()
    if config is None:
        name, layers = "fastloop", []
    elif isinstance(config, Mapping):
        name, layers = "dict", read_dict_layers(config, cwd)
    elif not isinstance(config, (str, os.PathLike)):
        raise ConfigError(
            got=f"FastLoop({config!r})",
            why=f"{type(config).__name__} is not a configuration",
            do="write a shipped name, a path, or a mapping such as {'rungs': {...}}",
        )
    else:
        text = config if isinstance(config, str) else str(Path(config).absolute())
        name, layers = make_safe_name(Path(text).stem), read_file_layers(text, cwd)
    ignored = tuple(key for key in NOT_FOR_CALLBACKS if any(key in layer.marked.value for layer in layers))
    return _assemble(layers, name, None, ignored), ignored


def require_recipe(config: Config) -> Path:
    """Return the recipe's Python file.

    Raises:
        ConfigError: neither the configuration nor one of its bases is a recipe, so there is nothing to train.
    """
    if config.recipe_file is None:
        recipes = ", ".join(find_shipped("recipes"))
        do = f"write base: with one of {recipes}"
        if any(config.written in find_shipped(kind) for kind in ("ladders", "climbs", "rungs")):
            do = f"write one of {recipes}, with --config {config.written}"
        elif Path(config.written).name == OF_RUN:
            do = f"write fastloop exec --config {config.written} -- python train.py: a script was trained with it"
        why = "neither it nor its bases name a recipe, so there is nothing to train"
        raise ConfigError(got=config.written, why=why, do=do)
    return config.recipe_file


def require_checkpoint(config: Config) -> Path | None:
    """Return the file of ``run.resume``; None if the run starts fresh.

    Raises:
        ConfigError: there is no such file.
    """
    if config.run.resume is None:
        return None
    path, key = Path(config.run.resume), "run.resume"
    if not is_file(path):
        do = "write the path of a checkpoint"
        raise make_fault(key, config.origins[key], "there is no such file", do, value=config.run.resume)
    return path


def to_yaml(config: Config) -> str:
    """Return all values as YAML, with secrets masked."""
    return dump_yaml(escape(_mask_values(config)))


def show(config: Config) -> list[tuple[str, Any, Origin]]:
    """Return key, value and origin of every leaf, with secrets masked."""
    return [(".".join(path), value, config.origins[".".join(path)]) for path, value in flatten(_mask_values(config))]


def diff(a: Config, b: Config) -> list[tuple[str, Any, Any]]:
    """Return key and both values of every leaf that differs, `ABSENT` if one is missing, with secrets masked. A section
    that is empty on one side differs by the keys of the other."""
    clear_a, clear_b = dict(flatten(a.values)), dict(flatten(b.values))
    shown_a, shown_b = dict(flatten(_mask_values(a))), dict(flatten(_mask_values(b)))
    # Compare texts, since 1 == 1.0 in Python, but limit_train_batches: 1 is one batch and 1.0 is all batches.
    every = {**clear_a, **clear_b}
    sections = {path[:length] for path in every for length in range(1, len(path))}
    differing = [
        path
        for path in every
        if not (path in sections and every[path] == {})
        and ((path in clear_a) != (path in clear_b) or repr(clear_a[path]) != repr(clear_b[path]))
    ]
    return [(".".join(path), shown_a.get(path, ABSENT), shown_b.get(path, ABSENT)) for path in differing]


def list_changes(config: Config) -> dict[str, Any]:
    """Return the values set on top of the defaults and the recipe's YAML, nested, with secrets masked."""
    return nest(
        {
            path: Leaf(value, origin)
            for path, value in flatten(_mask_values(config))
            if (origin := config.origins[".".join(path)]) != DEFAULT and origin.file != config.recipe_yaml
        }
    )


def _assemble(layers: Sequence[Layer], name: str, recipe: Layer | None, ignored: Sequence[str] = ()) -> Config:
    """Merge the layers onto the defaults, resolve, check, and build the records."""
    rungs = import_ladder_class()
    secrets = [layer.marked.value for layer in layers]
    try:
        for layer in layers:
            refuse_resolvers(layer.marked)
            kept = {key: value for key, value in layer.marked.value.items() if key not in ignored}
            check_keys(kept, {"base": list, **_make_schema(rungs)}, layer.marked.origin)
        leaves = _lay(layers, _list_defaults(rungs), ignored)
        nested = nest(leaves)
        secrets.append(nested)
        origins = {".".join(path): leaf.origin for path, leaf in leaves.items()}
        ladders = {layer.marked.file for layer in layers if layer.path in find_shipped("ladders").values()}
        return _build({key: nested[key] for key in _make_schema(rungs)}, origins, rungs, name, recipe, ladders)
    except ConfigError as error:
        hide = make_scrubber(*secrets).text
        raise ConfigError(got=hide(error.got), why=hide(error.why), do=hide(error.do), key=error.key) from None


def _lay(layers: Iterable[Layer], defaults: Leaves, ignored: Sequence[str]) -> Leaves:
    """Merge the layers onto the defaults and resolve. Keys may refer to ignored sections, which then get defaults."""
    leaves = resolve(merge([defaults.items(), *(list_marked_leaves(layer.marked) for layer in layers)]))
    kept = {path: leaf for path, leaf in leaves.items() if path[0] not in ignored}
    return kept | {path: leaf for path, leaf in defaults.items() if path[0] in ignored}


def _build(
    values: Mapping[str, Any],
    origins: Mapping[str, Origin],
    rungs: type[Any],
    name: str,
    recipe: Layer | None,
    ladders: Collection[str],
) -> Config:
    run = build(RunSettings, values["run"], "run", origins)
    watch = build(WatchSettings, values["watch"], "watch", origins)
    strict = check_type(values["strict"], bool, "strict", origins["strict"])
    ladder = build(rungs, values["rungs"], "rungs", origins)
    _check_trainer(values["trainer"], ladder, origins)
    checked = {
        key: to_plain_values(dataclasses.asdict(record))
        for key, record in (("run", run), ("watch", watch), ("rungs", ladder))
    }
    return Config(
        name=name,
        recipe_file=recipe.path.with_suffix(".py") if recipe and recipe.path else None,
        recipe_yaml=recipe.marked.file if recipe else None,
        recipe=values["recipe"],
        run=run,
        trainer=values["trainer"],
        watch=watch,
        strict=strict,
        rehearsal=check_type(values["rehearsal"], Switch, "rehearsal", origins["rehearsal"]),
        ladder=ladder,
        by_ladder=frozenset(rung for rung in values["rungs"] if origins[f"rungs.{rung}.enabled"].file in ladders),
        values={**values, **checked},
        origins=origins,
    )


def _make_schema(rungs: type[Any]) -> dict[str, Any]:
    """Return the top-level keys of a configuration, in the order in which they are written."""
    return {
        "recipe": dict,
        "run": RunSettings,
        "trainer": dict,
        "watch": WatchSettings,
        "strict": bool,
        "rehearsal": Switch,
        "rungs": rungs,
    }


def _list_defaults(rungs: type[Any]) -> Leaves:
    plain = {"recipe": {}, "trainer": {}, "strict": False, "rehearsal": "on"}
    values = {
        key: plain[key] if key in plain else dataclasses.asdict(kind()) for key, kind in _make_schema(rungs).items()
    }
    return {path: Leaf(value, DEFAULT) for path, value in flatten(to_plain_values(values))}


def import_ladder_class() -> type[Any]:
    """Import the record of all rungs, which takes longer than the rest of loading."""
    from fastloop.ladder import Ladder

    return Ladder


def _find_recipe_layer(files: Iterable[Layer]) -> Layer | None:
    """Return the deepest file in the chain of bases with a Python file next to it; the last of several equally deep."""
    with_code = [layer for layer in files if layer.path and layer.path.with_suffix(".py").is_file()]
    return max(reversed(with_code), key=lambda layer: layer.depth, default=None)


def _check_trainer(trainer: Mapping[str, Any], ladder: Any, origins: Mapping[str, Origin]) -> None:
    from fastloop.ladder import collect_cards

    owned = dict(OWNED)
    for rung, card in collect_cards().items():
        if getattr(getattr(ladder, rung, None), "enabled", False):
            for key, own in card.owns_trainer_keys.items():
                owned[key] = (f"rungs.{rung} is enabled and sets it", f"write rungs.{rung}.{own}, or delete this line")
    for key in trainer:
        if key in owned:
            full = f"trainer.{key}"
            raise make_fault(full, find_origin(full, origins), *owned[key], value=trainer[key])


def _mask_values(config: Config) -> Any:
    return make_scrubber(config.values).scrub(config.values)


def _require_at_least(least: int, key: str, value: float) -> None:
    if value < least:
        raise ConfigError(
            key=key, got=f"{key}: {value}", why=f"it must be at least {least}", do=f"write {least} or more"
        )
