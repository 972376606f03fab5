"""Configuration files: the options of a command as YAML."""

from collections.abc import Iterable, Sequence
from typing import cast

from dlio.cli.option_records import ConfigFile
from dlio.errors import UsageError
from dlio.util.arguments import nearest
from dlio.util.options import OptionField, Value, as_mapping, options_of


def read_config(path: str, fields: Sequence[OptionField]) -> dict[str, Value]:
    """Return the values in a YAML file, by field name.

    Raises UsageError, naming the file and the key, for a file that cannot be read, a key that is
    not an option, or a value of another type.
    """
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            stated = yaml.safe_load(file)
    except OSError as error:
        raise UsageError(f"--config {path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"--config {path}: not valid YAML: {reason}") from error
    if stated is None:
        return {}
    if not isinstance(stated, dict):
        raise UsageError(f"--config {path}: give options as `name: value`, one a line")
    known = {field.key: field for field in fields}
    values = {}
    for key, value in cast(dict[object, object], stated).items():
        field = known.get(str(key).replace("-", "_"))
        if field is None:
            raise UsageError(f"{path}: {key}: no such option{nearest(str(key), known)}")
        where = f"{path}: {key}:"
        values[field.name] = field.convert(value, where)
        try:
            field.check(values[field.name])
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None
    return values


def config_text(records: Iterable[object]) -> str:
    """Return the options of records as YAML, which `read_config` reads back."""
    import yaml

    stated = {
        field.key: field.show(values[field.name])
        for record in records
        if not isinstance(record, ConfigFile)
        for values in (as_mapping(record),)
        for field in options_of(type(record))
    }
    text: str = yaml.safe_dump(stated, sort_keys=False, allow_unicode=True)
    return text
