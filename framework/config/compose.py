"""From command-line words to one frozen Config: the only file that sees Hydra's and OmegaConf's objects.

    words -> Hydra composes conf/ and recipes/ into a typed OmegaConf tree -> plain dict -> frozen dataclasses

Whatever Hydra or OmegaConf refuses becomes a ConfigError, a letter that names the key and the choices.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from framework.base.errors import ConfigError
from framework.config import hf
from framework.config.schema import Config

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"

C = TypeVar("C")


def compose(words: Sequence[str], conf: Path = CONF, extra: Path | None = None) -> Config:
    """The Config that `words` (Hydra overrides such as `recipe=tiny zero=stage1 steps=5`) stand for.

    `extra` is one more folder to search for group files (Hydra's --config-dir). Where model.init_from names a folder, what
    nobody has said of the model is as its config.json says.
    Raises ConfigError for an unknown key, choice or type, for a word that Hydra cannot parse, and for a setting that
    contradicts that config.json.
    """
    config = _composed(words, conf, extra)
    if not config.model.init_from:
        return config
    published = hf.read(config.model.init_from)
    register(Config(model=published.model))
    try:
        config = _composed(words, conf, extra)
    finally:
        register()
    hf.refuse_contradictions(config.model, published)
    return config


def _composed(words: Sequence[str], conf: Path, extra: Path | None) -> Config:
    """What nobody has said is as it was registered."""
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if "schema.yaml" not in ConfigStore.instance().repo:
        register()
    search = [] if extra is None else [f"hydra.searchpath=[file://{extra.resolve()}]"]
    try:
        with _own_hydra(), hydra.initialize_config_dir(str(conf), version_base="1.3"):
            tree = hydra.compose("config", overrides=[*map(_as_choice, words), *search])
        plain = OmegaConf.to_container(tree, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise letter(error, words) from None
    return build(Config, typing.cast("Mapping[str, Any]", plain))


@contextmanager
def _own_hydra() -> Iterator[None]:
    """Hydra has one global object; a sweep's is put aside while one of its jobs is composed."""
    from hydra.core.global_hydra import GlobalHydra

    instance = GlobalHydra.instance()
    outer, instance.hydra = instance.hydra, None
    try:
        yield
    finally:
        instance.hydra = outer


def _as_choice(word: str) -> str:
    """`zero=1` as `zero='1'`: a number or null is refused as an unknown choice, not by a ValueError inside Hydra."""
    key, _, value = word.partition("=")
    groups = {"recipe", *(name for name, kind, _ in settings(Config) if dataclasses.is_dataclass(kind))}
    return f"{key}='{value}'" if key in groups and re.fullmatch(r"[\w.+-]+", value) else word


def register(usual: Config = Config()) -> None:  # noqa: B008 (frozen)
    """Store the typed twin of Config, with the defaults of `usual`, under the name that conf/config.yaml lists first."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=_twin(usual))


def _twin(usual: Any) -> type:
    """A mutable copy of a settings class in the types that OmegaConf knows (a frozen class becomes a read-only node there)."""
    fields: list[Any] = []
    for name, kind, _ in settings(type(usual)):
        value = getattr(usual, name)
        if dataclasses.is_dataclass(kind):
            twin = _twin(value)
            fields.append((name, twin, dataclasses.field(default_factory=twin)))
        elif isinstance(value, tuple):
            fields.append((name, list[typing.get_args(kind)[0]], dataclasses.field(default_factory=lambda value=value: list(value))))
        else:
            fields.append((name, _omega_type(kind), dataclasses.field(default=value)))
    return dataclasses.make_dataclass(type(usual).__name__, fields)


def _omega_type(kind: Any) -> Any:
    if typing.get_origin(kind) is typing.Literal:
        return type(typing.get_args(kind)[0])
    if not _is_union(kind):
        return kind
    others = [k for k in typing.get_args(kind) if k is not type(None)]
    if any(typing.get_origin(k) is typing.Literal for k in others):
        return typing.Any  # `build` checks it; OmegaConf has no such type
    return typing.Optional[others[0]]  # noqa: UP045 (OmegaConf's spelling)


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def settings(cls: type) -> Iterator[tuple[str, Any, dataclasses.Field[Any]]]:
    """(name, resolved type, field) of each field of a settings class."""
    hints = typing.get_type_hints(cls)
    for spec in dataclasses.fields(cls):
        yield spec.name, hints[spec.name], spec


def leaves(cls: type = Config, prefix: str = "") -> Iterator[tuple[str, Any, dataclasses.Field[Any]]]:
    """(dotted key, resolved type, field) of every single setting below a settings class."""
    for name, kind, spec in settings(cls):
        if dataclasses.is_dataclass(kind):
            yield from leaves(typing.cast("type", kind), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind, spec


def build(cls: type[C], values: Mapping[str, Any], prefix: str = "") -> C:
    """A frozen settings object from a plain mapping; keys that are missing keep their defaults.

    Raises ConfigError for a key that the class does not have and for a value of another type or outside the choices.
    """
    known = {name: kind for name, kind, _ in settings(cls)}
    for key in values:
        if key not in known:
            raise unknown_key(f"{prefix}{key}", known)
    parts = {}
    for key, value in values.items():
        kind = known[key]
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{prefix}{key}", repr(value), "a block of settings", f"{prefix}{key}.NAME: VALUE")
            parts[key] = build(typing.cast("type", kind), value, f"{prefix}{key}.")
        else:
            parts[key] = _checked(f"{prefix}{key}", kind, value)
    return cls(**parts)


def _checked(key: str, kind: Any, value: Any) -> Any:
    """`value` as `kind`; an int is taken for a float, nothing else is converted."""
    choices = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        if value not in choices or isinstance(value, bool):
            raise ConfigError(key, repr(value), f"one of {', '.join(map(str, choices))}", f"{key}={_nearest(str(value), choices)}")
        return value
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(key, repr(value), type_name(kind), f"{key}=[{'a,b' if choices[0] is str else '1,2'}]")
        return tuple(_checked(key, choices[0], item) for item in value)
    allowed = choices if _is_union(kind) else (kind,)
    if float in allowed and type(value) is int:
        return float(value)
    words = [word for k in allowed for word in typing.get_args(k)]
    if type(value) not in allowed and value not in words:
        raise ConfigError(key, f"{value!r} ({type(value).__name__})", type_name(kind))
    return value


def type_name(kind: Any) -> str:
    """A setting's type in words: its choices, `int`, `int or null`, `list of texts`."""
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return f"list of {type_name(typing.get_args(kind)[0])}s"
    if _is_union(kind):
        return " or ".join(type_name(k) for k in typing.get_args(kind))
    return {type(None): "null", str: "text", bool: "true or false", int: "int", float: "float"}[kind]


def to_dict(config: Any) -> dict[str, Any]:
    """The config as plain nested dicts and lists, ready for YAML or JSON; the inverse of `build`."""
    return dataclasses.asdict(config, dict_factory=lambda pairs: {k: list(v) if isinstance(v, tuple) else v for k, v in pairs})


def _nearest(given: str, choices: Sequence[Any]) -> str:
    near = difflib.get_close_matches(given, [str(choice) for choice in choices], n=1, cutoff=0.0)
    return near[0] if near else "CHOICE"


def unknown_key(key: str, known: Sequence[str] | Mapping[str, Any]) -> ConfigError:
    """The letter for a key that its block does not have."""
    block, _, name = key.rpartition(".")
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    write = f"{block}.{near[0]}".lstrip(".") if near else ""
    return ConfigError(key, "a setting that does not exist", f"one of {', '.join(sorted(known))}", write)


def letter(error: BaseException, words: Sequence[str]) -> ConfigError:
    """What Hydra or OmegaConf refused, as our letter."""
    from hydra.errors import MissingConfigException, OverrideParseException

    chain = _causes(error)
    if isinstance(error, OverrideParseException):
        return ConfigError(f"the word {error.override!r}", "something that is no KEY=VALUE", "recipe=NAME, group=CHOICE or key=value")
    for cause in chain:
        if isinstance(cause, MissingConfigException) and cause.options is not None and cause.missing_cfg_file:
            group, _, choice = str(cause.missing_cfg_file).rpartition("/")
            return ConfigError(group, choice, f"one of {', '.join(cause.options)}", f"{group}={_nearest(choice, cause.options)}")
    text = "\n".join(str(cause) for cause in chain)
    full_key = next((k for c in chain if (k := getattr(c, "full_key", None))), "")
    if missing := re.search(r"Key '(\w+)' (?:is )?not in", text) or re.search(r"Could not (?:override|append) '\+*([\w.]+)'", text):
        key = str(full_key or missing.group(1))
        return unknown_key(key, [name for name, _, _ in settings(_class_at(key.rpartition(".")[0]))])
    where = re.search(r"In '([\w/]+)'", text)
    key = str(full_key or (where.group(1) if where else "the command line")).partition("[")[0]  # of a list, its setting
    given = [word.partition("=")[2] for word in words if word.lstrip("+").startswith(f"{key}=")]
    said = given or [str(cause).splitlines()[0] for cause in chain if str(cause)]
    kinds = {name: kind for name, kind, _ in leaves()}
    return ConfigError(key, said[-1] if said else type(error).__name__, type_name(kinds[key]) if key in kinds else "")


def _causes(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    step: BaseException | None = error
    while step is not None and step not in chain:
        chain.append(step)
        step = step.__cause__ or step.__context__
    return chain


def _class_at(block: str) -> type:
    """The settings class at a dotted path, or the nearest one above it."""
    cls: type = Config
    for name in filter(None, block.split(".")):
        kind = {n: k for n, k, _ in settings(cls)}.get(name)
        if not dataclasses.is_dataclass(kind):
            break
        cls = typing.cast("type", kind)
    return cls
