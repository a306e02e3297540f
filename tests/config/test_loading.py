"""From YAML to one checked record: precedence, origins, and refusals that name file, line and key."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from fastloop.config.loading import Config, RunSettings, WatchSettings, load, load_callback_config
from fastloop.config.strict_yaml import Origin
from fastloop.errors import ConfigError
from tests.small_ladder import Amp, Ladder, Read, Workers, folder_fixture, read_fixture  # noqa: F401


def origins(config: Config) -> dict[str, str]:
    """Where the values come from that are not defaults."""
    return {key: str(origin) for key, origin in config.origins.items() if origin != Origin("default")}


def test_an_empty_file_is_all_defaults(read: Read) -> None:
    config = read("")
    assert (config.run, config.watch, config.ladder) == (RunSettings(), WatchSettings(), Ladder())
    assert (config.recipe, config.trainer, config.strict, config.name) == ({}, {}, False, "my")
    assert config.recipe_file is None
    assert origins(config) == {}
    assert list(config.values) == ["recipe", "run", "trainer", "watch", "strict", "rehearsal", "rungs"]
    assert config.values["rungs"]["overlap"] == {"enabled": False, "cap_mb": None, "sizes": [1, 2, 3], "ratio": 0.5}


def test_public_keys_and_their_defaults(read: Read) -> None:
    assert {key: read("").values[key] for key in ("run", "watch", "strict")} == {
        "run": {"max_steps": 200, "seed": 0, "devices": 1, "accelerator": "auto", "resume": None},
        "watch": {"enabled": True, "warmup_steps": 20, "trace_steps": 0, "usd_per_gpu_hour": None},
        "strict": False,
    }


def test_precedence_from_defaults_to_the_command_line(folder: Path, read: Read) -> None:
    for name, text in {
        "first": "run: {seed: 1, devices: 1, max_steps: 1, accelerator: a}\nwatch: {warmup_steps: 1}",
        "second": "run: {seed: 2, devices: 2, max_steps: 2, accelerator: b}",
        "patch": "run:\n  seed: 4\n  devices: 4",
    }.items():
        (folder / f"{name}.yaml").write_text(text)
    config = read(
        "base: [first.yaml, second.yaml]\nrun: {seed: 3, devices: 3, max_steps: 3}", "run.seed=5", more=("patch.yaml",)
    )
    assert config.run == RunSettings(seed=5, devices=4, max_steps=3, accelerator="b")
    assert origins(config) == {
        "run.seed": "command line",
        "run.devices": "patch.yaml:3",
        "run.max_steps": "my.yaml:2",
        "run.accelerator": "second.yaml:1",
        "watch.warmup_steps": "first.yaml:2",
    }


def test_shipped_names_and_the_recipe_behind_them(folder: Path, read: Read) -> None:
    config = load("resnet50", more=["safe", "amp"])
    assert config.name == "resnet50"
    assert config.recipe_file == folder.parent / "clone" / "recipes" / "resnet50.py"
    assert config.ladder == Ladder(workers=Workers(enabled=True), amp=Amp(enabled=True))
    assert origins(config) == {
        "recipe.size": "recipes/resnet50.yaml:1",
        "run.max_steps": "recipes/resnet50.yaml:2",
        "trainer.accumulate_grad_batches": "recipes/resnet50.yaml:3",
        "rungs.workers.enabled": "configs/ladders/safe.yaml:2",
        "rungs.amp.enabled": "configs/rungs/amp.yaml:2",
    }
    (folder / "my.py").touch()
    mine = read("base: [resnet50, safe]\nrecipe: {size: tiny}")
    assert mine.recipe_file == config.recipe_file  # the deepest, not the file's own
    assert (mine.name, mine.recipe) == ("my", {"size": "tiny"})
    assert read("base: safe").recipe_file == folder / "my.py"


def test_the_configuration_of_a_run_is_called_like_its_recipe(folder: Path) -> None:
    for name, called in (("config.resolved", "resnet50"), ("mine", "mine")):
        (folder / f"{name}.yaml").write_text("base: resnet50\n")
        assert load(f"{name}.yaml").name == called


def test_paths_start_at_the_working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "x y.yaml").write_text("run: {seed: 1}")
    monkeypatch.chdir(folder / "sub")
    config = load("./x y.yaml")
    assert (config.name, config.run.seed, origins(config)) == ("x-y", 1, {"run.seed": "x y.yaml:1"})


def test_interpolation(read: Read) -> None:
    config = read(
        "run: {seed: 7}\nrecipe: {a: '${run.seed}', b: 's${run.seed}'}\nrungs: {overlap: {cap_mb: '${recipe.a}'}}"
    )
    assert config.recipe == {"a": 7, "b": "s7"}
    assert config.ladder.overlap.cap_mb == 7  # type: ignore[attr-defined]


def test_a_config_can_be_pickled(read: Read) -> None:
    config = read("base: resnet50")
    assert pickle.loads(pickle.dumps(config)) == config


RUNG_KEYS = "rungs has no key worker; it has workers, amp, overlap"
TOP_KEYS = "it has base, recipe, run, trainer, watch, strict, rehearsal, rungs"
RESOLVERS = ("only keys are looked up; resolvers are not run", "write the value, or a key as in ${run.seed}")
SECTION = "is a section, not a single value"


REFUSALS = [  # of each kind one or two: what types, keys, bases and YAML refuse is in the tests of those files
    # unknown keys
    ("rungs:\n  worker: {count: 4}", "rungs.worker (my.yaml:2)", RUNG_KEYS, "write workers"),
    (
        "run: {seed: 1}\nrecepie: {}",
        "recepie (my.yaml:2)",
        f"a configuration has no key recepie; {TOP_KEYS}",
        "write recipe",
    ),
    ("workers: {}", "workers (my.yaml:1)", f"a configuration has no key workers; {TOP_KEYS}", "write rungs.workers"),
    # YAML surprises: text, numbers and booleans are what they look like
    (
        "rungs:\n  workers:\n    enabled: true\n    count: 08",
        "rungs.workers.count: '08' (my.yaml:4)",
        "it must be an integer or 'auto'; '08' is text",
        "write 8",
    ),
    ("strict: on", "strict: 'on' (my.yaml:1)", "it must be true or false; 'on' is text", "write true"),
    # sections
    ("\nrungs:\n", "rungs: null (my.yaml:2)", f"rungs {SECTION}", "write rungs: {workers: …}, or delete the line"),
    ("recipe: 5", "recipe: 5 (my.yaml:1)", f"recipe {SECTION}", "write recipe: {key: …}, or delete the line"),
    # ranges
    ("rungs:\n  workers:\n    count: 0", "rungs.workers.count=0 (my.yaml:3)", "too few", "write 1 or more"),
    ("run:\n  max_steps: 0", "run.max_steps: 0 (my.yaml:2)", "it must be at least 1", "write 1 or more"),
    ("run: {devices: -1}", "run.devices: -1 (my.yaml:1)", "it must be at least 1", "write 1 or more"),
    ("run: {seed: -1}", "run.seed: -1 (my.yaml:1)", "it must be at least 0", "write 0 or more"),
    (
        "run: {seed: 4294967296}",
        "run.seed: 4294967296 (my.yaml:1)",
        "NumPy takes seeds below 2**32",
        "write a smaller seed",
    ),
    ("watch: {warmup_steps: -1}", "watch.warmup_steps: -1 (my.yaml:1)", "it must be at least 0", "write 0 or more"),
    ("watch: {trace_steps: -1}", "watch.trace_steps: -1 (my.yaml:1)", "it must be at least 0", "write 0 or more"),
    (
        "watch: {usd_per_gpu_hour: -0.5}",
        "watch.usd_per_gpu_hour: -0.5 (my.yaml:1)",
        "it must be at least 0",
        "write 0 or more",
    ),
    # keys of the Trainer that are owned elsewhere
    ("trainer:\n  max_steps: 5", "trainer.max_steps: 5 (my.yaml:2)", "the run section sets it", "write run.max_steps"),
    ("trainer: {devices: 2}", "trainer.devices: 2 (my.yaml:1)", "the run section sets it", "write run.devices"),
    (
        "trainer: {accelerator: gpu}",
        "trainer.accelerator: 'gpu' (my.yaml:1)",
        "the run section sets it",
        "write run.accelerator",
    ),
    (
        "trainer:\n  x: 1\n  callbacks: {a: b}",
        "trainer.callbacks: {'a': 'b'} (my.yaml:3)",
        "callbacks are objects, which YAML cannot create",
        "return them from the module's configure_callbacks",
    ),
    (
        "trainer:\n  precision: 16-mixed\nrungs: {amp: {enabled: true}}",
        "trainer.precision: '16-mixed' (my.yaml:2)",
        "rungs.amp is enabled and sets it",
        "write rungs.amp.mode, or delete this line",
    ),
    # interpolation
    ("run:\n  accelerator: ${oc.env:HOME}", "run.accelerator: '${oc.env:HOME}' (my.yaml:2)", *RESOLVERS),
    ("trainer:\n  x: [1, '${a:b}']", "trainer.x: [1, '${a:b}'] (my.yaml:2)", *RESOLVERS),
    (
        "run:\n  seed: ${run.devices}\n  devices: ${run.seed}",
        "run.seed: '${run.devices}' (my.yaml:2)",
        "it refers back to itself",
        "write a plain value at one of the keys",
    ),
    (
        "run:\n  seed: ${run.sede}",
        "run.seed: '${run.sede}' (my.yaml:2)",
        "there is no key run.sede",
        "write a key from the top, as in ${run.seed}",
    ),
    (
        "recipe: {a: x}\nrun:\n  seed: ${recipe.a}",
        "run.seed: 'x' (my.yaml:3)",
        "it must be an integer; 'x' is text",
        "write an integer",
    ),
]


@pytest.mark.parametrize(("text", "got", "why", "do"), REFUSALS)
def test_refusals_name_file_line_and_key(read: Read, text: str, got: str, why: str, do: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert str(caught.value) == f"got {got}\n  why {why}\n  do  {do}"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("override", "got", "do"),
    [
        ("run.sede=1", "run.sede (command line)", "write seed"),
        ("run.seed=08", "run.seed: '08' (command line)", "write 8"),
        ("run=5", "run: 5 (command line)", "write run.max_steps=…"),
        ("workers.count=1", "workers (command line)", "write rungs.workers.count=1"),
        ("workers.enabled=true", "workers (command line)", "write rungs.workers.enabled=true"),
        ("workers={count: 1, enabled: true}", "workers (command line)", "write rungs.workers"),
        ("rungs.workers.count=0", "rungs.workers.count=0 (command line)", "write 1 or more"),
        (
            "run.seed=${oc.env:HOME}",
            "run.seed: '${oc.env:HOME}' (command line)",
            "write the value, or a key as in ${run.seed}",
        ),
        ("trainer.max_steps=3", "trainer.max_steps: 3 (command line)", "write run.max_steps"),
    ],
)
def test_refusals_of_overrides(read: Read, override: str, got: str, do: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read("run: {seed: 1}", override)
    assert (caught.value.got, caught.value.do) == (got, do)


def test_the_fault_of_a_base_names_the_base(folder: Path, read: Read) -> None:
    (folder / "base.yaml").write_text("x: 1")
    with pytest.raises(ConfigError, match=r"got x \(base.yaml:1\)"):
        read("base: base.yaml")


def test_precision_is_free_while_amp_is_off(read: Read) -> None:
    assert read("trainer: {precision: 16-mixed}").trainer == {"precision": "16-mixed"}


@pytest.mark.parametrize(
    ("conf", "why", "do"),
    [
        ("resnet5", "no recipe, ladder, climb or rung has this name", "write resnet50"),
        ("wurst", "there are recipes: resnet50; ladders: safe; rungs: amp", "write one of these names"),
        ("gone.yaml", "there is no such file", "check the path"),
        ("a/b", "there is no such file", "check the path"),
        ("~nobody-here/b.yaml", "there is no such file", "check the path"),
    ],
)
def test_unknown_configurations(folder: Path, conf: str, why: str, do: str) -> None:
    for arguments in ({"conf": conf}, {"conf": "resnet50", "more": [conf]}):
        with pytest.raises(ConfigError) as caught:
            load(**arguments)  # type: ignore[arg-type]
        assert caught.value.got == repr(conf)
        assert why in caught.value.why
        assert do in caught.value.do


def test_the_real_ladder_is_read() -> None:
    from fastloop.ladder import Ladder as RealLadder

    assert load_callback_config(None)[0].ladder == RealLadder()


def test_reading_a_configuration_imports_neither_torch_nor_lightning(folder: Path) -> None:
    code = (
        "import sys; from fastloop.config.loading import load_callback_config; load_callback_config({'rungs': {}}); "
        "sys.exit(len({'torch', 'lightning', 'pytorch_lightning', 'omegaconf'} & set(sys.modules)))"
    )
    path = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("wrong", [3, True, ["safe"], object])
def test_a_callback_is_told_what_is_no_configuration(wrong: object) -> None:
    with pytest.raises(ConfigError, match="is not a configuration"):
        load_callback_config(wrong)  # type: ignore[arg-type]


def test_a_rung_to_come_is_told_apart_from_a_typing_error() -> None:
    with pytest.raises(ConfigError) as caught:
        load("resnet50", overrides=["rungs.shard.enabled=true"])
    assert caught.value.got == "rungs.shard (command line)" and "no key shard in this version yet" in caught.value.why
    assert caught.value.do == "write one of these, or drop it"
    with pytest.raises(ConfigError, match="this version has no rung shard yet"):
        load("resnet50", more=["shard"])
