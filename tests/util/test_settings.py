"""Settings from the environment: stated once, parsed once, refused in one line."""

from dataclasses import fields

import pytest

from dlio.errors import UsageError
from dlio.util.settings import SETTINGS, Settings, settings, unknown_variables


def test_each_default_is_the_one_of_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in SETTINGS:
        monkeypatch.delenv(setting.name, raising=False)
    assert settings() == Settings()
    for each, setting in zip(fields(Settings), SETTINGS, strict=True):
        assert getattr(Settings(), each.name) == setting.default
        assert setting.help.endswith(".")


def test_a_changed_variable_is_seen_and_an_equal_one_is_not_parsed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DLIO_TIMEOUT", "7.5")
    first = settings()
    assert first.timeout_s == 7.5
    assert settings() is first
    monkeypatch.setenv("DLIO_TIMEOUT", "8")
    assert settings().timeout_s == 8
    monkeypatch.setenv("DLIO_TIMEOUT", "")
    assert settings().timeout_s == Settings().timeout_s


@pytest.mark.parametrize(
    ("name", "text", "remedy"),
    [
        ("DLIO_TIMEOUT", "5 min", "seconds above 0"),
        ("DLIO_TIMEOUT", "0", "seconds above 0"),
        ("DLIO_PEER_TIMEOUT", "nan", "seconds above 0"),
        ("DLIO_FILL_TIMEOUT", "inf", "seconds above 0"),
        ("DLIO_CHECK", "1.5", "0 to 1"),
        ("DLIO_MAX_PIXELS", "1e6", "pixels"),
        ("DLIO_MAX_PIXELS", "0", "pixels"),
        ("DLIO_CUDA_AWARE", "yes", "give 1"),
        ("DLIO_NO_FORK", "no", "give 1"),
    ],
)
def test_an_invalid_value_is_named_with_its_variable_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, remedy: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(UsageError, match=remedy) as raised:
        settings()
    assert str(raised.value).startswith(f"{name}={text}: ")
    assert "\n" not in str(raised.value)


def test_an_unknown_variable_is_found_with_the_nearest_known_one() -> None:
    names = ["DLIO_TIER", "DLIO_TIERS", "DLIO_LAUNCHER_PID", "PATH", "DLIO_WQWQWQ"]
    assert unknown_variables(names) == [("DLIO_TIER", "DLIO_TIERS"), ("DLIO_WQWQWQ", None)]
