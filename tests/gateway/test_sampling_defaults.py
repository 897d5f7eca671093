"""Reading generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foretoken.errors import CheckpointError
from gateway.sampling_defaults import SamplingDefaults


def test_without_a_file_the_defaults_are_openais(tmp_path: Path) -> None:
    assert SamplingDefaults.of_checkpoint(tmp_path) == SamplingDefaults(1.0, 1.0, 0, 0.0, 1.0, None)


def test_fields_without_a_meaning_here_have_no_effect(tmp_path: Path) -> None:
    config = {"do_sample": False, "pad_token_id": 0, "transformers_version": "5", "temperature": 0.7, "top_k": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert SamplingDefaults.of_checkpoint(tmp_path) == SamplingDefaults(temperature=0.7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ('{"temperature": "hot"}', "temperature must be a number"),
        ('{"temperature": 9.0}', "--generation-config none"),
        ('{"max_new_tokens": 0}', "max_new_tokens"),
    ],
)
def test_an_unusable_file_is_refused_at_the_start(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "generation_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=message) as caught:
        SamplingDefaults.of_checkpoint(tmp_path)
    assert "generation_config.json" in caught.value.message
