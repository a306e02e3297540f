"""Read what a model consists of, and what its methods do according to their source, without changing anything."""

from __future__ import annotations

import ast
import collections
import functools
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch

from fastloop.bridge import namespaces
from fastloop.evidence.model.picture_views import list_names, list_views, walk_functions
from fastloop.evidence.samples.sample_code import find_function, is_installed, list_called, parse, walk_code
from fastloop.evidence.samples.source import read_source
from fastloop.feeds import call_shapes
from fastloop.feeds.attention import candidates as attention
from fastloop.feeds.batch_norm import groups
from fastloop.feeds.loss.cross_entropy import find_large

LIGHTNING = tuple(f"{name}." for name in namespaces.NAMES)
"""Prefixes of the names of Lightning's own modules."""
_LISTS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
_MERGES = re.compile(r"\.view\(.*(-1|\*)|\.view_as\(")
_WORKS = re.compile(r"(?<!\bself)\.(linear|conv\dd|matmul|bmm|einsum|cross_entropy)\(| @ ")
"""Products and losses in a method's source, but not calls of the module's own layers such as ``self.linear(x)``."""
_VARIES = re.compile(
    r"\bself\.(trainer|global_step|current_epoch|log|log_dict|print)\b"
    r"|\bself\.\w+ [-+*/]= |\bself\.(\w+) = .*\bself\.\2\b|\bself\.\w+\.append\("
)
"""Code that makes torch capture a compiled method anew in every step, or in pieces: counters, lists, logs."""
_SCALED = (".training_step", ".backward", ".on_after_backward")
_UNSCALED = (".on_before_optimizer_step", ".on_before_zero_grad", ".configure_gradient_clipping")
"""Hooks that run after a loss scaler has unscaled the gradients."""
_GRADIENT_FUNCTIONS = {f"{where}.grad" for where in ("torch.autograd", "autograd", "torch.func", "func")}
_BEFORE_STEPS = re.compile(r"__init__|prepare_data|setup|configure_\w+|\w+_dataloader")
_COUNTS = re.compile(
    r"\btrainer\.(accumulate_grad_batches|num_training_batches|is_last_batch|train_dataloader)\b"
    r"|\b(total_batch_idx|batch_progress)\b"
)
"""The Trainer's numbers of batches, in a method's source."""
_BEFORE_STEPS_OR_FORWARD = re.compile(rf"{_BEFORE_STEPS.pattern}|forward")


def overrides(owner: Any, name: str) -> bool:
    """Whether a LightningModule or DataModule overrides one of Lightning's hooks."""
    own = getattr(owner, "__dict__", {}).get(name) is not None  # None: a hook that is switched off
    for base in type(owner).__mro__:
        if own or name in vars(base):
            return own or not base.__module__.startswith(LIGHTNING)
    return False


def read_module(module: torch.nn.Module, *, syncs_norms: bool = False, callbacks: Iterable[Any] = ()) -> dict[str, Any]:
    """What the model consists of, and what its methods do according to their source.

    Args:
        syncs_norms: the strategy will convert every BatchNorm to SyncBatchNorm.
        callbacks: the Trainer's, which may read weights and gradients.
    """
    named = dict(module.named_modules())
    norms = {name: part for name, part in named.items() if _is_norm_of_batches(part)}
    convs = {name: part for name, part in named.items() if isinstance(part, torch.nn.Conv2d)}
    training_step = getattr(module, "training_step", None)
    searches, configuring = list_methods(module, r"\bLBFGS\("), _list_configuring(module)
    return {
        "batchnorms": tuple(norms),
        "other_batchnorms": tuple(
            name for name, part in norms.items() if syncs_norms or not isinstance(part, groups.KINDS)
        ),
        "convs": tuple(convs),
        "depthwise_convs": tuple(name for name, part in convs.items() if part.groups == part.in_channels > 1),
        "attends_by_hand": (*attention.list_switchable(module), *attention.list_candidates(module)),
        "attends_by_call": tuple(attention.list_sdpa(module)),
        "classes": find_large(module),
        "not_mean_losses": tuple(_find_other_losses(module, named)),
        "autocasts": tuple(list_methods(module, r"\bautocast\s*\(")),
        "views": (*_find_views(module), *_find_callbacks_views(callbacks)) if convs else (),
        "inner_views": tuple(_find_inner_views(named.values())) if convs else (),
        "detaches_grads": tuple(list_methods(module, r"\bgrad\.detach_\(")),
        "refused_losses": (
            *(name for name, part in named.items() if isinstance(part, torch.nn.BCELoss)),
            *(name.partition(".")[2] for name in list_methods(module, r"\bbinary_cross_entropy\(")),
        ),
        "handles_grads": (
            *(each for each in list_methods(module, r"(?<!autograd)(?<!\bfunc)\.grad\b") if each.endswith(_SCALED)),
            *(each for each in list_methods(module, r"\bclip_grad") if not each.endswith(_UNSCALED)),
        ),
        "line_searches": tuple(searches),
        "own_line_searches": tuple(each for each in searches if each.partition(".")[2] not in configuring),
        "compiled_by_user": tuple(name or type(module).__name__ for name in named if is_compiled(named[name])),
        "double_backward": tuple(_find_passing("create_graph", named.values())),
        "keeps_graph": tuple(_find_passing("retain_graph", named.values())),
        "inner_modules": tuple(
            name for name in _find_outermost(module, "") if not _is_layer(module.get_submodule(name))
        ),
        "compile_targets": tuple(list_compile_targets(module)),
        "repeated_blocks": tuple(_group_repeated(module)),
        "grad_hooks": any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in module.parameters()),
        "steps_with_iterator": callable(training_step)
        and "dataloader_iter" in inspect.signature(training_step).parameters,
    }


def list_gradient_users(owners: Sequence[Any]) -> Iterator[str]:
    """Names of the user's functions that use ``.grad``, among those of these objects and the code that they name. To
    zero a gradient or to test whether there is one does not count, nor does torch's own code, such as for clipping."""
    held = [value for each in owners for value in getattr(each, "__dict__", {}).values() if inspect.isroutine(value)]
    for function in walk_functions([*owners, *held]):
        names = set(list_names(function))
        if not is_installed(function) and names & {"grad", "getattr"}:
            parsed = parse(function)
            if "grad" in names if parsed is None else _uses_gradients(parsed[0]):
                yield function.__qualname__.rpartition("<locals>.")[2]


def _uses_gradients(tree: ast.AST) -> bool:
    nodes, harmless = [*ast.walk(tree)], set[ast.AST]()
    for node in nodes:
        if isinstance(node, ast.Assign) and ast.unparse(node.value) == "None":
            harmless.update(node.targets)
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "None":
            harmless.add(node.left)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            harmless.update([called.value] if isinstance(called, ast.Attribute) and called.attr == "zero_" else ())
    used = (node for node in nodes if isinstance(node, ast.Attribute) and node.attr == "grad")
    return any(node not in harmless and ast.unparse(node) not in _GRADIENT_FUNCTIONS for node in used)


def _is_norm_of_batches(part: torch.nn.Module) -> bool:
    """Whether a layer keeps statistics of batches: every BatchNorm, and an InstanceNorm that tracks them."""
    tracks = isinstance(part, torch.nn.modules.instancenorm._InstanceNorm) and part.track_running_stats
    return tracks or isinstance(part, torch.nn.modules.batchnorm._BatchNorm)


def _find_other_losses(module: torch.nn.Module, named: dict[str, torch.nn.Module]) -> Iterator[str]:
    for name, part in named.items():
        if type(part).__name__.endswith("Loss"):
            if getattr(part, "reduction", "mean") in ("sum", "none"):
                yield f"{name} ({type(part).__name__} with reduction={part.reduction!r})"
            elif getattr(part, "weight", None) is not None:
                yield f"{name} ({type(part).__name__} divides by its class weights)"
    for method in list_methods(module, r"""reduction\s*=\s*["'](sum|none)["']"""):
        yield f"{method} uses reduction='sum' or 'none'"
    made = r"\b(CrossEntropyLoss|NLLLoss)\((weight=|\w+[^=\w])"  # those made in __init__ are modules, seen above
    steps = [each for each in list_methods(module, made) if not each.endswith(".__init__")]
    for method in dict.fromkeys([*list_methods(module, r"\b(cross_entropy|nll_loss)\(.*\bweight\s*="), *steps]):
        yield f"{method} divides by its class weights"


def _find_views(module: torch.nn.Module) -> Iterator[str]:
    """Find calls of `view` in code that is not rehearsed and may get images: steps, losses, helpers."""
    methods = {name: member for base in type(module).__mro__[::-1] for name, member in vars(base).items()}
    is_rehearsed = "" in list_compile_targets(module)  # its forward
    left_out = _BEFORE_STEPS_OR_FORWARD if is_rehearsed else _BEFORE_STEPS
    users = _list_user_bases(type(module))
    named = {each for base in users for member in vars(base).values() for each in list_names(member)}
    targets = [module.get_submodule(name) for name in _find_outermost(module, "")]
    played = [target for target in targets if not named.intersection(_list_other_methods(type(target)))]
    rehearsed = {id(part) for target in played for part in target.modules()}
    yield from list_views(
        [
            *(member for name, member in methods.items() if not left_out.fullmatch(name)),
            *(part for part in module.modules() if part is not module and id(part) not in rehearsed),
            *(value for name, value in vars(module).items() if name not in vars(torch.nn.Module())),
        ]
    )


def _find_callbacks_views(callbacks: Iterable[Any]) -> Iterator[str]:
    """Find calls of `view` in callbacks; ModelPruning and its subclasses are included, as they flatten the weights."""
    for callback in callbacks:
        if any(base.__name__ == "ModelPruning" for base in type(callback).__mro__):
            yield type(callback).__name__
        yield from list_views([callback, *filter(inspect.isroutine, vars(callback).values())], in_modules=False)


def _list_other_methods(kind: type) -> Iterator[str]:
    """Methods of a module class that may be called besides its forward, such as ``encode``."""
    bases = [base for base in kind.__mro__ if not base.__module__.startswith(("torch.", "builtins"))]
    members = [(name, member) for base in bases for name, member in vars(base).items()]
    yield from (name for name, member in members if inspect.isfunction(member) and name not in ("__init__", "forward"))


def _list_user_kinds(modules: Iterable[torch.nn.Module]) -> list[type]:
    """The modules' classes, without those of torch and torchvision."""
    kinds = dict.fromkeys(map(type, modules))
    return [kind for kind in kinds if not kind.__module__.startswith(("torch.", "torchvision."))]


def _find_inner_views(modules: Iterable[torch.nn.Module]) -> Iterator[str]:
    for kind in _list_user_kinds(modules):
        yield from (f"{kind.__name__}.{name}" for name, source in _read_user_methods(kind) if _MERGES.search(source))


def _find_passing(argument: str, modules: Iterable[torch.nn.Module]) -> Iterator[str]:
    """Name the users' methods, and functions that these call, that pass this argument in a call."""
    found = dict[Any, None]()
    for kind in _list_user_kinds(modules):
        members = [member for base in _list_user_bases(kind) for member in vars(base).values()]
        methods = [find_function(getattr(member, "__func__", member)) for member in members]
        found |= dict.fromkeys((*filter(None, methods), *list_called(methods, kind)))
    yield from (each.__qualname__.rpartition("<locals>.")[2] for each in found if _passes(argument, each))


def _passes(argument: str, function: FunctionType) -> bool:
    """Whether a call names this argument and gives it anything but False."""
    consts = (const for code in walk_code(function.__code__) for const in code.co_consts)
    if not any(isinstance(const, tuple) and argument in const for const in consts):
        return False
    source = _read_plainly(function.__code__)
    return source is None or re.search(rf"\b{argument}=(?!False\b)", source) is not None


def _list_user_bases(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if not base.__module__.startswith((*LIGHTNING, "torch.", "builtins"))]


def _read_user_methods(module: torch.nn.Module | type) -> Iterator[tuple[str, str]]:
    """Name and source, without comments, of the methods that the user's own classes define."""
    for base in _list_user_bases(module if isinstance(module, type) else type(module)):
        for name, member in vars(base).items():
            function = find_function(member)
            if function is not None and (text := _read_plainly(function.__code__)) is not None:
                yield name, text


@functools.lru_cache(maxsize=1024)
def _read_plainly(code: CodeType) -> str | None:
    """A function's source without comments; None for one that was typed at a prompt."""
    try:
        return ast.unparse(ast.parse(textwrap.dedent(read_source(code))))
    except (OSError, TypeError, SyntaxError):
        return None


def list_methods(module: torch.nn.Module, pattern: str) -> list[str]:
    """The module's own methods for training whose source contains `pattern`."""
    return [
        f"{type(module).__name__}.{name}"
        for name, source in _read_user_methods(module)
        if not name.startswith(("validation", "test", "predict")) and re.search(pattern, source)
    ]


def list_read_counts(module: torch.nn.Module) -> Iterator[str]:
    """Say which of the module's methods read which of the Trainer's numbers of batches during the training."""
    for name, source in _read_user_methods(module):
        if not _BEFORE_STEPS.fullmatch(name) and (found := _COUNTS.search(source)):
            yield f"{type(module).__name__}.{name} reads {found[0]}"


def list_ignored_labels(module: torch.nn.Module) -> set[int]:
    """Each ``ignore_index`` that the module's own methods give to a function as a number."""
    sources = (source for _, source in _read_user_methods(module))
    return {int(each) for source in sources for each in re.findall(r"\bignore_index\s*=\s*(-?\d+)", source)}


def list_compile_targets(module: torch.nn.Module) -> Iterator[str]:
    """Names of the modules worth compiling: the outermost inner modules that hold parameters.

    If the LightningModule calls its own ``forward`` in training, and ``forward`` does the work itself (it only joins
    bare layers, or has products or a loss of its own and keeps no counts), it is the target (written as ''). With DDP,
    Lightning borrows ``forward`` for the training step, so the inner modules are the targets.
    """
    targets = list(_find_outermost(module, ""))
    if targets and overrides(module, "forward") and not torch.distributed.is_initialized():
        sources = dict([*_read_user_methods(module)][::-1])  # the most derived class's last
        if any(not each.endswith(".forward") for each in list_methods(module, r"\bself\(")):
            are_layers = all(_is_layer(module.get_submodule(name)) for name in targets)
            works = _WORKS.search(sources.get("forward", ""))
            if are_layers or (works and not any(map(_VARIES.search, _follow("forward", sources)))):
                targets = [""]
    yield from targets


def _list_configuring(module: torch.nn.Module) -> set[str]:
    """Names of configure_optimizers and of the methods that it calls."""
    sources = dict([*_read_user_methods(module)][::-1])
    names = set(sources)
    collections.deque(_follow("configure_optimizers", sources), maxlen=0)
    return names - set(sources)


def _follow(name: str, sources: dict[str, str]) -> Iterator[str]:
    """Yield the sources of a method and of the methods that it calls, and remove them from `sources`."""
    yield (source := sources.pop(name, ""))
    for called in re.findall(r"\bself\.(\w+)\(", source):
        yield from _follow(called, sources)


def is_metric(owner: Any) -> bool:
    """Whether this is a torchmetrics metric, or of a class derived from one."""
    return any(base.__module__.startswith("torchmetrics.") for base in type(owner).__mro__)


def _is_layer(module: torch.nn.Module) -> bool:
    """Whether this is one of torch's own layers, without children."""
    return type(module).__module__.startswith("torch.nn.modules.") and not list(module.children())


def _find_outermost(module: torch.nn.Module, prefix: str) -> Iterator[str]:
    for name, child in module.named_children():
        if is_metric(child) or not any(True for _ in child.parameters()):
            continue
        if isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            yield from _find_outermost(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _group_repeated(module: torch.nn.Module) -> Iterable[tuple[str, ...]]:
    """Names of the repeated blocks, grouped by class and shapes."""
    groups: dict[Any, tuple[str, ...]] = {}
    for name in _find_repeated(module, ""):
        kind = call_shapes.describe_kind(module.get_submodule(name))
        groups[kind] = (*groups.get(kind, ()), name)
    return groups.values()


def _find_repeated(module: torch.nn.Module, prefix: str) -> Iterator[str]:
    """Members of layer lists that contain layers themselves and whose class occurs more than once in the list."""
    is_list = isinstance(module, _LISTS)
    kinds = collections.Counter(type(child) for child in module.children())
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        holds = not isinstance(child, _LISTS) and any(True for _ in child.children())
        if is_list and holds and kinds[type(child)] > 1 and any(True for _ in child.parameters()):
            yield path
        else:
            yield from _find_repeated(child, path)


def is_compiled(module: Any) -> bool:
    """Whether the module's calls are compiled, by us or by the user."""
    return (
        type(module).__name__ == "OptimizedModule"
        or vars(module).get("_compiled_call_impl") is not None
        or hasattr(getattr(module, "forward", None), "_torchdynamo_orig_callable")
        or getattr(module, "_compiler_ctx", None) is not None  # how Lightning marks trainer.fit(torch.compile(module))
    )
