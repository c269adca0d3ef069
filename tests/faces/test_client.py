"""What a client does with its token before it is sent anywhere."""

from __future__ import annotations

import pytest

import holdfast
from holdfast.errors import Invalid
from holdfast.faces.client import authorization

SECRET = "hf_very_secret"


def test_a_token_read_from_a_file_loses_its_newline() -> None:
    assert authorization(f"{SECRET}\n") == {"authorization": f"Bearer {SECRET}"}
    assert authorization("\n") == {}


@pytest.mark.parametrize("token", [f"{SECRET}\nx", f"{SECRET} x", f"{SECRET}\x00", f"{SECRET}ü"])
def test_a_token_that_cannot_be_sent_is_refused_at_once_and_never_shown(token: str) -> None:
    with pytest.raises(Invalid) as refused:
        holdfast.Client("http://127.0.0.1:1", token)
    assert str(refused.value).startswith("token is invalid; ")
    assert "secret" not in repr(refused.value)
    assert refused.value.__cause__ is None
