"""A plain HTTP client of the verbs, and what a refusal looks like."""

from __future__ import annotations

import json
from typing import Any

import httpx2

from tests.queue.installation import TOKEN, Installation

CODE_TEXTS = {400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 453: "Request Failed", 454: "Retry Request"}
CODE_TEXTS |= {455: "Client Content Error", 500: "Internal Error", 501: "Not Implemented"}


def plain_client(installation: Installation, headers: dict[str, str] | None = None) -> httpx2.AsyncClient:
    """A client with the token, or with these headers instead."""
    if headers is None:
        headers = {"authorization": f"Bearer {TOKEN}"}
    return httpx2.AsyncClient(base_url=installation.url, headers=headers, trust_env=False, timeout=30)


async def post(http: httpx2.AsyncClient, verb: str, body: Any) -> tuple[int, Any]:
    """The status and the JSON of a reply; `body` is bytes, or becomes JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await http.post(f"/v1/{verb}", content=content)
    assert answer.headers["content-type"] == "application/json"
    return answer.status_code, answer.json()


async def error(http: httpx2.AsyncClient, verb: str, body: Any, code: int) -> str:
    """The message of a refusal, whose body is as the contract says."""
    status, reply = await post(http, verb, body)
    assert status == reply["code"] == code
    assert reply["code_text"] == CODE_TEXTS[code]
    assert set(reply) <= {"code", "code_text", "message", "details"}
    return str(reply["message"])
