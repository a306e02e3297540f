"""Finds the code by which samples draw random numbers, from generators that outlive a sample.

A generator that a function makes from a seed gives the same numbers in any process and thread.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastloop.evidence.samples import sample_code
from fastloop.evidence.samples.dataset import list_running, read_attributes, walk
from fastloop.evidence.samples.writes import name_called

DRAWS = re.compile(
    r"random|rand(n|int|range|perm|bytes)?|randn?_like|getrandbits|shuffle|choices?|r?sample|rvs|permut(ed|ation)"
    r"|uniform|normal|gauss|bernoulli|multinomial|default_rng|RandomState|dropout"
    r"|(beta|binomial|expo|gamma|lognorm|normal|pareto|vonmises|weibull)variate"
    r"|(exponential|cauchy|geometric|random|uniform|bernoulli|(log_|trunc_)?normal)_"
    r"|initial_seed"
)
"""Names of functions that draw random numbers, or give their seed."""
_SEEDS = {"random", "initial_seed", "default_rng", "RandomState"}
"""Names that also stand where generators are only seeded."""
_RANDOM_TRANSFORMS = re.compile(
    r"Random|ColorJitter|(\w*Dropout)|(Auto|Rand)Augment|TrivialAugment|AugMix|MixUp|CutMix|ElasticTransform|Gaussian(Blur|Noise)|JPEG"
)
_MAKERS = {"Random", "default_rng", "RandomState"}
_PURE = {"int", "abs", "len", "sum", "min", "max", "ord", "crc32"}
"""Functions that may compute a seed."""
_BEFORE_SAMPLES = ("__init__", "__new__", "__len__", "__setstate__", "setup", "prepare_data")
"""Methods that run before the first sample is requested: their random draws happen in the main process either way."""
_SYSTEM = frozenset(
    {"SystemRandom", "urandom", "getrandom", "secrets", "token_bytes", "token_hex", "randbelow", "randbits", "uuid4"}
)
_SEEDED = frozenset(
    {"seed", "default_rng", "Random", "RandomState", "SeedSequence", "PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"}
)
"""Calls that take the system's randomness unless they are given a seed."""
_CLOCKS = frozenset({"time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "now"})


def draws_random(*roots: Any) -> tuple[str, ...]:
    """Names of transforms and functions reachable from the dataset whose code draws random numbers."""
    items = [item for root in roots for _, item in walk(root)]
    return list_draws(items, items)


def list_init_draws(init: Any) -> tuple[str, ...]:
    """The functions of a ``worker_init_fn`` that draw random numbers other than seeds."""
    drawing = (
        function
        for _, _, function in list_running([*walk(init, "worker_init_fn")])[0]
        if any(DRAWS.fullmatch(name) for name in {*sample_code.list_names(function.__code__)} - _SEEDS)
    )
    return tuple(dict.fromkeys(function.__qualname__ for function in drawing))


def list_draws(items: Sequence[Any], held: Sequence[Any]) -> tuple[str, ...]:
    """Names of the transforms and functions among `items` that draw random numbers, in samples made of all `held`."""
    ones = {item if inspect.isfunction(item) else type(item): item for item in items}.values()  # one of each class
    found = [item for item in ones if _find_draw(item, None) is not None]
    is_packaged = any(sample_code.is_packaged(base) for item in found for base in type(item).__mro__)
    called = _list_called_names(held) if is_packaged else None  # takes long in large datasets
    return tuple(dict.fromkeys(name for item in found if (name := _find_draw(item, called)) is not None))


def _find_draw(item: Any, called: set[str] | None) -> str | None:
    """The name of a transform or function that draws random numbers; None if it draws none. Of an installed package's
    class only what is `called` counts: a table has a method ``sample``, and a dataset one that shuffles it."""
    kind: type = type(item)
    if inspect.isfunction(item):
        return item.__qualname__.split(".")[-1] if draws_random_numbers(item) else None
    if _RANDOM_TRANSFORMS.match(kind.__name__):
        return kind.__name__
    for base in kind.__mro__:
        if sample_code.is_framework(base):
            continue
        counts = called if called is not None and sample_code.is_packaged(base) and "getattr" not in called else None
        for name, member in vars(base).items():
            function = _get_function(member)
            if name in _BEFORE_SAMPLES or (counts is not None and name not in counts):
                continue
            if function is not None and draws_random_numbers(function):
                return f"{kind.__name__}.{name}"
    return None


def _get_function(member: Any) -> Any:
    """The function behind a member of a class, a property's too; None if there is none."""
    member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    return sample_code.find_function(member)


def _list_called_names(held: Sequence[Any]) -> set[str]:
    """Names of the methods that samples may call on any of these objects: entries, and all that functions with such
    names name in turn, those of installed packages too, with the strings of those that call ``getattr``."""
    names = set(sample_code.ENTRIES)
    for _, _, function in list_running([("", item) for item in held])[0]:
        names.update(sample_code.list_names(function.__code__))
    for item in held:  # methods that are kept as attributes, and names for ``getattr``
        kept = read_attributes(item).values()
        names.update(each.__name__ for each in kept if inspect.isroutine(each))
        names.update(each for each in kept if isinstance(each, str))
    bases = dict.fromkeys(base for item in held for base in type(item).__mro__ if sample_code.is_packaged(base))
    left = [(name, made) for base in bases for name, each in vars(base).items() if (made := _get_function(each))]
    while left:
        reached, left = [each for each in left if each[0] in names], [each for each in left if each[0] not in names]
        if not reached:
            break
        for _, function in reached:
            named = set(sample_code.list_names(function.__code__))
            consts = {each for code in sample_code.walk_code(function.__code__) for each in code.co_consts}
            names |= named - {"getattr"} | (consts if "getattr" in named else set())
    return names


def draws_random_numbers(function: Any, depth: int = 3) -> bool:
    """Whether a function draws random numbers, itself or in the user's functions that it names; those of a generator
    that it makes from a seed excepted."""
    names = set(sample_code.list_names(function.__code__))
    if any(DRAWS.fullmatch(name) for name in names) and not _draws_from_seeds(function):
        return True
    called = [function.__globals__.get(name) for name in names] if depth else []
    return any(
        inspect.isfunction(other) and not sample_code.is_framework(other) and draws_random_numbers(other, depth - 1)
        for other in called
    )


def _draws_from_seeds(function: Any) -> bool:
    """Whether all that a function draws comes from generators that it makes from seeds."""
    parsed = sample_code.parse(function)
    if parsed is None or _find_in(function, None) is not None:
        return False
    nodes = list(ast.walk(parsed[0]))
    own, allowed = _list_own_generators(nodes), set[int]()
    for node in nodes:
        if isinstance(node, ast.Call) and _makes_generator(node) and isinstance(node.func, ast.Attribute):
            allowed |= {id(node.func), id(node.func.value)}  # np.random.default_rng
        elif isinstance(node, ast.Call) and any(_is_one(each.value, own) for each in node.keywords):
            allowed.add(id(node.func))  # torch.randn(3, generator=generator)
        elif isinstance(node, ast.Attribute) and _is_one(node.value, own):
            allowed.add(id(node))
    left = [node for node in nodes if id(node) not in allowed]
    names = {node.id for node in left if isinstance(node, ast.Name)} - {*function.__code__.co_varnames}
    names |= {node.attr for node in left if isinstance(node, ast.Attribute)}
    return not any(DRAWS.fullmatch(name) for name in names)


def _list_own_generators(nodes: Sequence[ast.AST]) -> set[str]:
    """Names that stand for nothing but generators made from seeds."""
    made, other = set[str](), set[str]()
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _makes_generator(node.value):
            made |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr, ast.For, ast.withitem)):
            other |= {
                each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            }
    return made - other


def _makes_generator(call: ast.Call) -> bool:
    """Whether a call makes a generator from a seed that is not itself drawn at random."""
    name, inner = name_called(call), getattr(call.func, "value", None)
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    calls = [each for argument in given for each in ast.walk(argument) if isinstance(each, ast.Call)]
    if not given or any(name_called(each) not in _PURE for each in calls):
        return False
    makes = isinstance(inner, ast.Call) and name_called(inner) == "Generator"
    return name in _MAKERS or (name == "manual_seed" and makes)


def _is_one(node: ast.AST, own: set[str]) -> bool:
    """Whether an expression is a generator made from a seed: one with such a name, or one made right there."""
    return (isinstance(node, ast.Name) and node.id in own) or (isinstance(node, ast.Call) and _makes_generator(node))


# -- the system's randomness, which no state makes draw the same again -------------------------------------------------


def find_system_seed(items: Mapping[str, Any]) -> str | None:
    """Where one of these draws from the system, and by which call: ``sampler (Shuffled.__iter__: default_rng)``; None
    if none does."""
    held = list(items.items())
    for place, function in sample_code.follow([*items.values()]):
        path, item = held[place]
        if (name := _find_in(function, item)) is not None:
            return f"{path} ({function.__qualname__}: {name})"
    return None


def _find_in(function: Any, item: Any) -> str | None:
    """The call by which a method of this object draws from the system or seeds a generator; None without one."""
    if named := sorted(_SYSTEM.intersection(sample_code.list_names(function.__code__))):
        return named[0]
    tree, me = sample_code.parse(function) or (ast.Module([], []), None)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name, given = name_called(call), [*call.args, *(keyword.value for keyword in call.keywords)]
        if name in _SEEDED and all(_is_none(each, me, item) for each in given):
            return name
        inner = {name_called(node) for each in given for node in ast.walk(each) if isinstance(node, ast.Call)}
        if (name in _SEEDED or name == "manual_seed") and (clocks := sorted(_CLOCKS & inner)):
            return clocks[0]
    return None


def _is_none(node: ast.AST, me: str | None, item: Any) -> bool:
    """Whether an argument is ``None``, or an attribute of the function's object with this value."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == me:
        return getattr(item, node.attr, node) is None
    return isinstance(node, ast.Constant) and node.value is None
