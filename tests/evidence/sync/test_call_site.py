"""Frames to lines: whose they are, how they are called, and what of the framework's is behind them."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastloop.evidence.samples.sample_code import holds_packages
from fastloop.evidence.sync import call_site
from fastloop.evidence.sync.call_site import CallSite, Cause, find_logged_name, find_site, name_place

Frame = tuple[str, str, str]
PACKAGES = "/opt/venv/lib/python3.11/site-packages"
USER = ("/home/u/project/train.py", "train", "step")
SCRIPT = ("/home/u/project/main.py", "__main__", "<module>")
FIT = (f"{PACKAGES}/lightning/pytorch/trainer/trainer.py", "lightning.pytorch.trainer.trainer", "fit")
LOOP = (f"{PACKAGES}/lightning/pytorch/loops/epoch.py", "lightning.pytorch.loops.epoch", "advance")
TORCH = (f"{PACKAGES}/torch/functional.py", "torch.functional", "unique")
METRICS = (f"{PACKAGES}/torchmetrics/metric.py", "torchmetrics.metric", "forward")
LIBRARY = (os.path.join(os.path.dirname(os.__file__), "functools.py"), "functools", "wrapper")
RECIPE = (f"{PACKAGES}/fastloop/_shipped/recipes/gpt2.py", "recipes.gpt2", "forward")
OWN_RECIPE = ("/x/project/mine.py", "fastloop.bridge.fit.recipe_modules.mine", "forward")
OURS = (f"{PACKAGES}/fastloop/rungs/batch.py", "fastloop.rungs.batch", "split")
FEED = (f"{PACKAGES}/fastloop/feeds/loss/padding.py", "fastloop.feeds.loss.padding", "cast")
CALLS = (f"{PACKAGES}/fastloop/feeds/compiled/calls.py", "fastloop.feeds.compiled.calls", "call")
TREE = (f"{PACKAGES}/fastloop/feeds/batch_tree.py", "fastloop.feeds.batch_tree", "tensors")
APPLIER = (f"{PACKAGES}/fastloop/bridge/apply/applier.py", "fastloop.bridge.apply.applier", "to_device")
DYNAMO = (f"{PACKAGES}/torch/_dynamo/eval_frame.py", "torch._dynamo.eval_frame", "compile_wrapper")
GENERATED = ("<eval_with_key>.5", "made", "forward")
THIN = (f"{PACKAGES}/fastloop/bridge/apply/loop/thin_loop.py", "fastloop.bridge.apply.loop.thin_loop", "settle")
HUNTER = (f"{PACKAGES}/fastloop/evidence/sync/hunt.py", "fastloop.evidence.sync.hunt", "run")


def called(*frames: Frame, **names: Any) -> CallSite:
    """The site of an event in the last of these functions, each called by the one before, in files of these names."""
    found: list[CallSite] = []

    def inner() -> None:
        found.append(find_site(sys._getframe(1)))

    for filename, module, function in reversed(frames):
        safe = "module" if function.startswith("<") else function
        scope: dict[str, Any] = {"__name__": module, "inner": inner}
        code = f"def {safe}(self=None, **k):\n    result_metric = metrics = name = None\n    inner()"
        exec(compile(code, filename, "exec"), scope)
        inner = scope[safe]
    inner(**names)
    return found[0]


@pytest.mark.parametrize(
    ("frames", "where", "users"),
    [
        ((USER,), "project/train.py:3", True),
        ((USER, TORCH), "project/train.py:3", True),
        ((SCRIPT, FIT, LOOP), "lightning/pytorch/loops/epoch.py:3", False),
        ((SCRIPT, FIT, LOOP, USER, TORCH), "project/train.py:3", True),
        ((USER, LOOP), "project/train.py:3", True),
        ((SCRIPT, FIT, LOOP, METRICS, TORCH), "lightning/pytorch/loops/epoch.py:3", False),
        ((SCRIPT, LIBRARY), "project/main.py:3", True),
        ((SCRIPT, FIT, LOOP, RECIPE), "recipes/gpt2.py:3", True),
        ((SCRIPT, FIT, LOOP, OWN_RECIPE), "project/mine.py:3", True),
        ((SCRIPT, OURS, TORCH), "project/main.py:3", True),
        ((SCRIPT, FIT, LOOP, OURS), "fastloop's own rung batch", False),
        ((SCRIPT, FIT, LOOP, USER, FEED), "project/train.py:3", True),
        ((SCRIPT, FIT, LOOP, USER, CALLS, DYNAMO, GENERATED), "project/train.py:3", True),
        ((SCRIPT, FIT, LOOP, CALLS, DYNAMO, GENERATED), "lightning/pytorch/loops/epoch.py:3", False),
        ((SCRIPT, FIT, LOOP, CALLS, DYNAMO, USER, TORCH), "project/train.py:3", True),
        ((SCRIPT, FIT, LOOP, APPLIER, LOOP, USER), "project/train.py:3", True),
        ((SCRIPT, FIT, LOOP, APPLIER), "fastloop itself", False),
        ((SCRIPT, FIT, LOOP, TREE), "fastloop itself", False),
        ((USER, HUNTER, TORCH), "project/train.py:3", True),
        ((SCRIPT, FIT, APPLIER, LOOP, THIN), "lightning/pytorch/loops/epoch.py:3", False),
        ((SCRIPT, FIT, LOOP, USER, THIN), "project/train.py:3", True),
        ((SCRIPT, ("<string>", "made", "__init__")), "project/main.py:3", True),
        ((("<stdin>", "__main__", "f"),), "<stdin>:3", True),
        ((SCRIPT, FIT, ("/x/checkout/src/lightning/loop.py", "lightning.loop", "f")), "lightning/loop.py:3", False),
    ],
    ids=[
        "user",
        "torch",
        "launched",
        "hook",
        "self_log",
        "metric",
        "library",
        "recipe",
        "own_recipe",
        "ours",
        "ours_in_a_hook",
        "ours_below_the_users",
        "users_compiled",
        "lightnings_compiled",
        "users_below_compiled",
        "users_below_ours",
        "of_no_rung",
        "of_the_bridge",
        "hunter",
        "read_for_the_progress_bar",
        "read_by_the_user",
        "generated",
        "stdin",
        "editable",
    ],
)
def test_whose_line_it_is(frames: tuple[Frame, ...], where: str, users: bool) -> None:
    found = called(*frames)
    assert (found.where, found.users) == (where, users)


@pytest.mark.parametrize(
    ("frames", "where", "inside"),
    [
        ((SCRIPT, FIT, LOOP, USER, FEED, TORCH), "project/train.py:3", "fastloop's own rung loss"),
        ((SCRIPT, FIT, APPLIER, LOOP, USER, METRICS, FEED), "project/train.py:3", "fastloop's own rung loss"),
        ((SCRIPT, FIT, LOOP, APPLIER, FEED, TORCH), "fastloop's own rung loss", None),
    ],
)
def test_no_file_of_ours_is_a_culprit(frames: tuple[Frame, ...], where: str, inside: str | None) -> None:
    found = called(*frames)
    assert (found.where, found.inside, found.ours) == (where, inside, True)
    assert found.text == "", "what stands in the user's line is not what synchronised"
    # A control: what the user's own code does when ours has called it is theirs.
    theirs = called(*frames[:-1], FEED, USER, TORCH)
    assert (theirs.where, theirs.ours, theirs.inside) == ("project/train.py:3", False, None)


def test_packages_in_a_folder_of_any_name(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen: utils/_scatter.py:48 as if it were the user's, of a package installed with ``pip --target``."""
    scatter = (f"{tmp_path}/extra/torch_geometric/utils/_scatter.py", "torch_geometric.utils._scatter", "scatter")
    apply = (f"{tmp_path}/extra/lightning/fabric/utilities/apply_func.py", "lightning.fabric.utilities.apply_func")
    monkeypatch.syspath_prepend(str(tmp_path / "extra"))
    (tmp_path / "extra" / "torch_geometric-2.8.1.dist-info").mkdir(parents=True)
    for cache in (call_site._find_owner, holds_packages, call_site._shorten_path):
        cache.cache_clear()
    found = called(SCRIPT, FIT, LOOP, USER, scatter, TORCH)
    assert (found.where, found.inside) == ("project/train.py:3", "torch_geometric/utils/_scatter.py:3")
    # Nobody's line led there: the batch is on its way to the device.
    moved = called(SCRIPT, FIT, LOOP, (*apply, "batch_to"))
    assert moved.where == "lightning/fabric/utilities/apply_func.py:3" and moved.cause == Cause(kind="transfer")
    # A control: a module of the user's own that lies beside nothing installed.
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    own = called(SCRIPT, FIT, LOOP, USER, (f"{tmp_path}/mine/helpers/pool.py", "helpers.pool", "pool"), TORCH)
    assert (own.where, own.inside) == ("helpers/pool.py:3", None)


def test_what_lies_between_is_kept() -> None:
    found = called(USER, METRICS, TORCH)
    assert found.inside == "torchmetrics/metric.py:3" and found.through == ("unique",)
    assert called(USER, TORCH).inside is None
    assert called(USER, (f"{PACKAGES}/torch/optim/adam.py", "torch.optim.adam", "step")).of_optimizer
    closure = (f"{PACKAGES}/torch/optim/adam.py", "torch.optim.adam", "step")
    assert not called(SCRIPT, FIT, closure, USER).of_optimizer  # Lightning runs training_step inside optimizer.step
    fetch = (f"{PACKAGES}/torch/utils/data/_utils/fetch.py", "torch.utils.data._utils.fetch", "fetch")
    assert called(SCRIPT, FIT, fetch, USER).of_loading and not called(SCRIPT, FIT, USER).of_loading


class Meta:
    name = "loss"


class Metric:
    meta = Meta()


RESULT = f"{PACKAGES}/lightning/pytorch/result.py"


@pytest.mark.parametrize(
    ("frame", "cause"),
    [
        ((RESULT, "lightning.pytorch.result", "update"), Cause(kind="sync_dist", name="loss")),
        ((RESULT, "lightning.pytorch.logger_connector", "log_metrics"), Cause(kind="logger")),
        ((RESULT, "lightning.pytorch.core.module", "__to_tensor"), Cause(kind="number")),
        ((RESULT, "lightning.pytorch.loops", "_broadcast_sigterm_tensor"), Cause(kind="sigterm")),
        ((RESULT, "lightning.pytorch.utilities", "detect_nan_parameters"), Cause(kind="checks")),
        ((RESULT, "lightning.pytorch.callbacks.progress.tqdm", "f"), Cause(kind="prog_bar")),
        ((RESULT, "lightning.pytorch.callbacks.early_stopping", "f"), Cause(kind="callback", name="Metric")),
        ((RESULT, "torch.amp.grad_scaler", "step"), Cause(kind="scaler")),
        (LOOP, None),
        (USER, None),
    ],
    ids=["sync_dist", "logger", "number", "sigterm", "checks", "bar", "callback", "scaler", "loop", "user"],
)
def test_the_frameworks_own_reasons(frame: Frame, cause: Cause | None) -> None:
    # The innermost frame gets the metric as its `self`.
    found: list[CallSite] = []

    def look() -> None:
        found.append(find_site(sys._getframe(1)))

    scope: dict[str, Any] = {"__name__": frame[1], "look": look}
    exec(compile(f"def {frame[2]}(self):\n    name = None\n    look()", frame[0], "exec"), scope)
    scope[frame[2]](Metric())
    assert found[0].cause == cause


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"_every_n_train_steps": 50, "_every_n_epochs": 0}, "Saves(every_n_train_steps=50)"),
        ({"_every_n_train_steps": 0, "_every_n_epochs": 1}, "Saves(every_n_epochs=1)"),
        ({"_every_n_train_steps": None}, "Saves"),
        ({"_every_n_epochs": "1"}, "Saves"),
        ({}, "Saves"),
    ],
    ids=["steps", "epochs", "none", "text", "nothing"],
)
def test_a_callback_is_called_as_its_user_wrote_it(given: dict[str, Any], name: str) -> None:
    callback = type("Saves", (), given)()
    assert call_site._describe_callback(callback) == name


def test_the_expression_itself() -> None:
    found = [find_site(sys._getframe()), None]
    expected = "find_site(sys._getframe())"
    if sys.version_info < (3, 11):
        expected = f"found = [{expected}, None]"
    assert found[0] is not None and found[0].text in (expected, "sys._getframe()") and found[0].users


def test_the_name_under_which_a_tensor_is_logged() -> None:
    loss, other = torch.ones(1), torch.ones(1)

    def log_metrics(metrics: dict[str, torch.Tensor]) -> list[str | None]:
        return [find_logged_name(sys._getframe(), tensor) for tensor in (other, loss, torch.ones(1))]

    assert log_metrics({"loss_step": loss, "acc": other}) == ["acc", "loss_step", None]
    assert find_logged_name(sys._getframe(), loss) is None


def test_paths_are_short_and_tell_nothing_of_the_machine(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call_site._shorten_path.cache_clear()
    monkeypatch.chdir(tmp_path)
    assert call_site._shorten_path(str(tmp_path / "models" / "net.py")) == "models/net.py"
    assert call_site._shorten_path("/home/somebody/deep/down/net.py") == "down/net.py"
    assert call_site._shorten_path(f"{PACKAGES}/timm/models/vit.py") == "timm/models/vit.py"
    call_site._shorten_path.cache_clear()


def test_a_notebooks_line_is_named_by_its_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """``ipykernel_9160/3283219722.py:8`` is a file that no user ever sees."""
    cells = {"/tmp/ipykernel_9160/3283219722.py": ("Cell", "In[3]")}
    newer = SimpleNamespace(compile=SimpleNamespace(format_code_name=cells.get))
    older = SimpleNamespace(compile=SimpleNamespace())
    file = "ipykernel_9160/3283219722.py:8"
    for shell, where in ((newer, "Cell In[3]:8"), (older, file), (None, file)):
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))
        assert name_place("/tmp/ipykernel_9160/3283219722.py", 8) == where
        assert name_place("/home/somebody/deep/down/net.py", 8) == "down/net.py:8"  # a module that the notebook imports
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: newer))
    cells["/tmp/ipykernel_9160/3283219722.py"] = ("Cell", "In[7]")  # run again
    assert name_place("/tmp/ipykernel_9160/3283219722.py", 8) == "Cell In[7]:8"


def test_no_frames_at_all() -> None:
    assert find_site(None) == CallSite(where="unknown", users=False)


def test_a_script_run_by_its_name(tmp_path: Any) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "import sys\nfrom fastloop.evidence.sync.call_site import find_site\n"
        "sys.stdout.write(find_site(sys._getframe()).where)"
    )
    done = subprocess.run(
        [sys.executable, "main.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert done.stdout == "main.py:3", done.stderr


def test_a_line_without_columns_is_quoted_whole() -> None:
    """As in a compiled function, whose finding said ``gpt2.py:91: `` and nothing more."""
    line = sys._getframe().f_lineno - 1
    quotes = []
    for columns in ((0, 0), (4, 7), (None, None)):
        code = SimpleNamespace(co_filename=__file__, co_positions=lambda at=columns: iter([(line, line, *at)]))
        quotes.append(call_site._read_line(SimpleNamespace(f_code=code, f_lineno=line, f_lasti=0)))  # type: ignore
    whole = '"""As in a compiled function, whose finding said ``gpt2.py:91: `` and nothing more."""'
    assert quotes == [whole, '"""' if sys.version_info >= (3, 11) else whole, whole]
