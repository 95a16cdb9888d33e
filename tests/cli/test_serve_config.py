"""`kvplace serve --config`: the settings of a file, which flags override."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from pydantic.alias_generators import to_camel

from kvplace.cli.serve_command import command
from kvplace.documents import schema_of
from kvplace.documents.serve import ServeDocument
from kvplace.serve.process import ServeSettings
from tests.cli.calls import Caller

CONFIG = """
tlsCert: /certs/tls.crt
tlsKey: /certs/tls.key
clientCa: /certs/ca.crt
sidecarImage: hook:1
otherSchedulers: [batch, spot]
strategy: spread
mode: advise
extenderAddress: "[::1]:1234"
logLevel: debug
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ServeSettings]:
    """The settings with which serve was started, instead of starting it."""
    settings: list[ServeSettings] = []
    monkeypatch.setattr("kvplace.serve.process.run", settings.append)
    return settings


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text(CONFIG)
    return path


def test_settings_come_from_the_file_and_others_keep_their_defaults(
    kvplace: Caller, started: list[ServeSettings], config: Path
) -> None:
    assert kvplace("serve", "--config", str(config)).code == 0
    (settings,) = started
    assert settings.tls.certificate == Path("/certs/tls.crt")
    assert settings.admission.other_schedulers == ("batch", "spot")
    assert settings.extender.strategy.value == "spread"
    assert settings.extender.mode.value == "advise"
    assert str(settings.extender_address) == "[::1]:1234"
    assert str(settings.health_address) == ":8081"
    assert settings.admission.scheduler_name == "kvplace-scheduler"


def test_the_file_has_a_key_for_every_flag_with_the_same_choices() -> None:
    flags = {str(flag.name): flag for flag in command.params if flag.name not in {"config", "example"}}
    assert flags.keys() == ServeDocument.model_fields.keys()
    schema = schema_of("serve")
    for name in ("strategy", "mode", "log_level"):
        rules = schema["properties"][to_camel(name)]
        rules = schema["$defs"][rules["$ref"].rpartition("/")[2]] if "$ref" in rules else rules
        choice = flags[name].type
        assert isinstance(choice, click.Choice)
        assert rules["enum"] == list(choice.choices)


def test_a_flag_wins_over_the_file(kvplace: Caller, started: list[ServeSettings], config: Path) -> None:
    flags = ("--strategy", "pack", "--other-scheduler", "third")
    assert kvplace("serve", *flags, "--config", str(config)).code == 0
    (settings,) = started
    assert settings.extender.strategy.value == "pack"
    assert settings.admission.other_schedulers == ("third",)
    assert settings.log_level == "debug"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("tlsCrt: x", "serve.yaml: 'tlsCrt' is not known; did you mean 'tlsCert'?"),
        ("mode: advice", "serve.yaml: mode is 'advice'; it must be 'decide' or 'advise'"),
        ("strategy: fill", "serve.yaml: strategy is 'fill'; it must be 'pack', 'spread' or 'balance'"),
        ("healthAddress: 8081", "serve.yaml: healthAddress is 8081; it must be a string"),
        ("healthAddress: localhost", "serve.yaml: healthAddress is 'localhost'; it must match"),
        ("otherSchedulers: batch", "serve.yaml: otherSchedulers is 'batch'; it must be a list"),
        ("sidecarImage: hook:1", "--tls-cert is missing"),
        ("[]", "serve.yaml contains a list; it must be a mapping"),
    ],
)
def test_invalid_settings_are_refused_in_one_sentence(
    kvplace: Caller, started: list[ServeSettings], tmp_path: Path, text: str, sentence: str
) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    called = kvplace("serve", "--config", str(path))
    assert (called.code, called.out, started) == (2, "", [])
    assert sentence in called.err
    assert "Traceback" not in called.err
